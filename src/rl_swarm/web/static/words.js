// Explains the words of the page, one line each, behind a "?". The same words stand in the terminal and in docs/glossary.md.

import { h } from "./dom.js";

export const WORDS = {
  "Held-out score": "Share of right answers to a fixed set of questions that training never sees, sampled at temperature 1.",
  "Reward": "Mean reward of the answers that the models have just written: 1 for a right answer, 0 for a wrong one.",
  "From peers": "Share of the trained groups (a question with all its answers) that other nodes wrote.",
  "Test score": "Share of right answers to a fixed set of questions that training never sees: at the start, and now.",
  "Total reward": "The rewards of all rounds, added up, as the coordinator counted them.",
  "Trend": "How the reward of the last 20 rounds differs from that of the 20 before.",
  "Votes": "Each round a node gives one vote: to the peer whose answers had the highest mean reward there.",
  "Advantage": "How much better or worse an answer is than the mean of its group, in standard deviations. Training makes the better ones likelier.",
  "Rounds": "In how many rounds the node has taken part.",
};

// The "?" of a label, which the keyboard and a touch reach too.
export const why = (label, said = WORDS[label]) =>
  h("button", { type: "button", class: "why", "aria-label": `What is ${label}?` }, "?", h("span", { class: "tip", role: "tooltip" }, said));

// A label with its explanation.
export function term(label, said = WORDS[label]) {
  if (!said) return label;
  return h("span", { class: "term" }, label, why(label, said));
}
