// Explains the words of the page, one line each, behind a "?". The same words stand in the terminal and in docs/glossary.md.

import { h } from "./dom.js";

export const WORDS = {
  "Round": "In a round every node answers questions, scores its answers, shares them, and learns from its own and from those of peers.",
  "Score on unseen questions": "Share of right answers to a fixed set of questions that training never uses, sampled at temperature 1; the mean of all nodes.",
  "Learned from peers": "Share of the trained groups (a question with all its answers) that other nodes wrote.",
  "The swarm": "Every point is a node, which trains its own model. When one learns from answers that another one's model wrote, a spark flies from the author to the learner. The ring says what a node is doing.",
  "Score": "Mean reward of a node's last 20 rounds: where a right answer earns 1 and a wrong one 0, the share of right answers.",
  "From peers": "Share of the trained groups (a question with all its answers) that other nodes wrote.",
  "Reward": "Mean reward of what the models have just written: 1 for a right answer, 0 for a wrong one, as the task says.",
  "Nodes": "A node is a process that owns one model, answers questions with it and trains it.",
  "Tasks": "Kinds of questions whose answers can be checked, such as sums.",
  "Rollouts": "A rollout is one question with all answers that a node's model wrote: what nodes share.",
};

// A label with its explanation, which the keyboard and a touch reach too.
export function term(label, said = WORDS[label]) {
  if (!said) return label;
  return h("span", { class: "term" }, h("span", {}, label),
    h("button", { type: "button", class: "why", "aria-label": `What is ${label}?` }, "?", h("span", { class: "tip", role: "tooltip" }, said)));
}
