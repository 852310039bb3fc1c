// Shows the swarm at a glance.

import { get } from "./api.js";
import { h } from "./dom.js";
import { headline } from "./headline.js";
import { leaderboard } from "./leaderboard.js";
import { progressCurves } from "./progress_curves.js";
import { swarmMap } from "./swarm_map.js";

export function overview() {
  const status = headline();
  const [map, ...others] = [swarmMap(), progressCurves(), leaderboard()]; // each fetches what it shows

  async function refresh() {
    const [about] = await Promise.all([get("api/overview"), ...[map, ...others].map((part) => part.refresh())]);
    status.show(about);
  }

  return { title: "Overview", refresh, element: h("div", { class: "stack" }, h("div", { class: "opening" }, status.element, map.element), others.map((part) => part.element)) };
}
