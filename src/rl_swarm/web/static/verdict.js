// Marks answers as right, partly right or wrong, the same in every view.

import { h, score } from "./dom.js";

export const kindOf = ({ right }) => (right >= 1 ? "right" : right > 0 ? "part" : "wrong");
export const verdictOf = (answer) => ({ right: "Right", part: `Partly right, ${Math.round(answer.right * 100)} %`, wrong: "Wrong" })[kindOf(answer)];

// A small box that is filled as far as the answer is right.
export function box(answer) {
  const fill = h("b");
  fill.style.height = `${Math.round(Math.min(1, Math.max(0, answer.right)) * 100)}%`;
  return h("i", { class: `box ${kindOf(answer)}` }, fill);
}

// The reward as a bar: full is the best that an answer to this question can get.
export function rewardBar(answer, best) {
  const fill = h("b");
  fill.style.width = `${Math.round(Math.min(1, Math.max(0, answer.reward / best)) * 100)}%`;
  return h("span", { class: `reward-bar ${kindOf(answer)}` }, h("i", { "aria-hidden": "true" }, fill), `reward ${score(answer.reward)}`);
}

// How many answers of a group are right.
export const rightOnes = (row) => row.completions.filter((answer) => kindOf(answer) === "right").length;
