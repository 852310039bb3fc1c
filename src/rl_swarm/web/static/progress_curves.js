// Shows the two curves of the overview: reward while training, and the score on questions that training never sees.

import { csv, get } from "./api.js";
import { RECENT } from "./chart_entries.js";
import { Chart } from "./charts.js";
import { h, roundNumber } from "./dom.js";
import { metricInfo } from "./metrics.js";
import * as pins from "./pins.js";

const FEW = 12; // nodes that are all drawn; of more, the pinned ones are

export function progressCurves() {
  const reward = chart("reward_local", { window: RECENT });
  const heldOut = chart("held_out", { after: true });
  let crowded = false;

  function chart(metric, options) {
    const { title, said, kind } = metricInfo(metric);
    return new Chart(title, { key: metric, said, kind, csv: csv("api/curves", { metric, points: 1000, limit: 200 }), ...options });
  }

  const wanted = (metric) => get("api/curves", { metric, limit: crowded ? 0 : FEW, node: crowded ? pins.all() : [] });

  // The lines to draw, each with a colour that stays: of few nodes by their names, of pinned ones by when they were pinned.
  function chosen({ nodes, lines }) {
    const pinned = pins.all();
    const shown = nodes <= FEW ? lines : lines.filter((line) => pinned.includes(line.node));
    const order = nodes <= FEW ? shown.map((line) => line.node).sort() : pinned;
    return shown.map((line) => ({ ...line, color: 1 + order.indexOf(line.node) })).sort((one, other) => one.color - other.color);
  }

  async function refresh() {
    const [rewards, scores] = await Promise.all([wanted("reward_local"), wanted("held_out")]);
    const first = crowded !== rewards.nodes > FEW;
    crowded = rewards.nodes > FEW;
    if (first && crowded && pins.all().length) return refresh();
    reward.show({ ...rewards, rounds: rewards.rounds.map(roundNumber), lines: chosen(rewards) });
    heldOut.show({ ...scores, lines: chosen(scores) });
  }

  const element = h("div", { class: "main-charts" }, [reward, heldOut].map((each) => h("section", { class: "card", "aria-label": each.label }, each.element)));
  const ended = pins.onchange(() => (element.isConnected ? refresh() : ended()));
  return { element, refresh };
}
