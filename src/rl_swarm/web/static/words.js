// Explains the words of the page, one line each, behind a "?". The same words stand in the terminal and in docs/glossary.md.

import { h } from "./dom.js";

export const WORDS = {
  "Round": "In a round every node answers questions, scores its answers, shares them, and learns from its own and from those of peers.",
  "Test score": "Share of right answers to a fixed set of questions that training never uses, answered twice at temperature 1 (the held-out score).",
  "Learned from peers": "Share of the trained groups (a question with all its answers) that other nodes wrote. Whether that helped, a run alone cannot tell: `rl-swarm experiment` compares it with training alone.",
  "The swarm": "Every point is a node, which trains its own model. When one learns from answers that another one's model wrote, a spark flies from the author to the learner. The ring says what a node is doing.",
  "Score": "Mean reward of a node's last 20 rounds: where a right answer earns 1 and a wrong one 0, the share of right answers.",
  "From peers": "Share of the trained groups (a question with all its answers) that other nodes wrote.",
  "Reward": "Mean reward of what the models have just written: 1 for a right answer, 0 for a wrong one, as the task says.",
  "Nodes": "A node is a process that owns one model, answers questions with it and trains it.",
  "Tasks": "Kinds of questions whose answers can be checked, such as sums.",
  "Rollouts": "A rollout is one question with all answers that a node's model wrote: what nodes share.",
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
  return h("span", { class: "term" }, h("span", {}, label), why(label, said));
}
