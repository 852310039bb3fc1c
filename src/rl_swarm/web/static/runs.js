// Compares the runs in the same folder.

import { csv, get } from "./api.js";
import { Chart } from "./charts.js";
import { card, count, h, redraw, score, table } from "./dom.js";

const METRICS = [["reward_local", "Reward"], ["held_out", "Held-out score"], ["entropy", "Entropy"], ["completion_length", "Completion length"], ["tokens_per_second", "Tokens per second"]];
const MOST = 8;
const root = location.pathname.replace(/run\/[^/]+\/$/, ""); // of this server: other runs are at run/<name>/ there

export function runs(_, query) {
  const chart = new Chart("Means of the chosen runs", { csv: "#" });
  const metric = h("select", { id: "metric", onchange: remember }, METRICS.map(([value, label]) => h("option", { value }, label)));
  const list = h("div");
  const chosen = new Set(query.getAll("run").slice(0, MOST));
  let begun = chosen.size > 0;

  if (query.get("metric")) metric.value = query.get("metric");

  function remember() {
    const choice = new URLSearchParams([...[...chosen].map((run) => ["run", run]), ["metric", metric.value]]);
    history.replaceState(null, "", `#/runs?${choice}`);
    draw();
  }

  async function draw() {
    const wanted = { run: [...chosen], metric: metric.value };
    chart.link.href = csv("api/runs/curves", { ...wanted, points: 1000 });
    const lines = chosen.size ? await get("api/runs/curves", wanted) : { rounds: [], lines: [] };
    chart.show({ rounds: lines.rounds, lines: lines.lines });
  }

  function pick(row) {
    const box = h("input", { type: "checkbox", "aria-label": `Show ${row.run}`, onchange: () => {
      box.checked && chosen.size < MOST ? chosen.add(row.run) : chosen.delete(row.run);
      box.checked = chosen.has(row.run);
      remember();
    } });
    box.checked = chosen.has(row.run);
    return box;
  }

  async function refresh() {
    const page = await get("api/runs");
    if (!begun) page.runs.filter((row) => row.current).forEach((row) => chosen.add(row.run));
    begun = true;
    redraw(list, table("Runs", [
      { title: "Show", cell: pick },
      { title: "Run", cell: (row) => (row.current ? h("a", { href: "#/" }, h("strong", {}, row.run)) : h("a", { href: `${root}run/${encodeURIComponent(row.run)}/#/` }, row.run)) },
      { title: "Phase", short: true, cell: (row) => h("span", { class: `pill ${row.phase}` }, row.phase) },
      { title: "Round", number: true, wide: true, cell: (row) => `${row.phase === "finished" ? row.rounds : row.round} of ${count(row.rounds)}` },
      { title: "Nodes", number: true, wide: true, cell: (row) => String(row.nodes) },
      { title: "Reward", number: true, cell: (row) => score(row.reward) },
      { title: "Held-out", number: true, wide: true, cell: (row) => (row.held_out_now === null ? "–" : `${score(row.held_out_start)} → ${score(row.held_out_now)}`) },
    ], page.runs));
    await draw();
  }

  return {
    title: "Runs",
    refresh,
    element: h("div", { class: "stack" },
      h("section", { class: "card", "aria-label": "Curves" }, h("div", { class: "tools" }, h("label", { for: "metric" }, "Metric", metric)), chart.element),
      card("Runs in this folder", csv("api/runs"), list)),
  };
}
