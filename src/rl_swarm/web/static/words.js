// Explains the words of the page, one line each, behind a "?". The same words stand in the terminal and in docs/glossary.md.

import { h } from "./dom.js";

export const WORDS = {
  "The swarm": "Every point is a node, which trains its own model. When one learns from answers that another one's model wrote, a spark flies from the author to the learner. The ring says what a node is doing.",
  "Score": "Mean reward of a node's last 20 rounds: where a right answer earns 1 and a wrong one 0, the share of right answers.",
  "Held-out score": "Share of right answers to a fixed set of questions that training never sees, sampled at temperature 1.",
  "Reward": "Mean reward of the answers that the models have just written: 1 for a right answer, 0 for a wrong one.",
  "From peers": "Share of the trained groups (a question with all its answers) that other nodes wrote.",
};

// A label with its explanation, which the keyboard and a touch reach too.
export function term(label, said = WORDS[label]) {
  if (!said) return label;
  return h("span", { class: "term" }, label,
    h("button", { type: "button", class: "why", "aria-label": `What is ${label}?` }, "?", h("span", { class: "tip", role: "tooltip" }, said)));
}
