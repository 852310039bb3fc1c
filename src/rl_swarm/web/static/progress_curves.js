// Shows the two curves of the overview: reward while training, and the score on questions that training never sees.

import { csv, get } from "./api.js";
import { Chart } from "./charts.js";
import { h } from "./dom.js";

export function progressCurves() {
  const reward = new Chart("Reward: every node, and their mean", { csv: csv("api/curves", { metric: "reward_local", points: 1000, limit: 200 }) });
  const heldOut = new Chart("Held-out score", { csv: csv("api/curves", { metric: "held_out", limit: 200 }) });

  async function refresh() {
    const [rewards, scores] = await Promise.all([get("api/curves", { metric: "reward_local" }), get("api/curves", { metric: "held_out" })]);
    reward.show(rewards);
    heldOut.show(scores);
  }

  const element = h("div", { class: "main-charts" },
    h("section", { class: "card", "aria-label": "Reward" }, reward.element),
    h("section", { class: "card", "aria-label": "Held-out score" }, heldOut.element));
  return { element, refresh };
}
