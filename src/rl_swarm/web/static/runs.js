// Compares the runs in the same folder: their curves laid over each other, and the settings in which they differ.

import { csv, get } from "./api.js";
import { shown } from "./chart_axes.js";
import { COLORS, RECENT } from "./chart_entries.js";
import { Chart } from "./charts.js";
import { card, count, h, redraw, roundNumber, roundOf, save, score, table } from "./dom.js";
import { keep, recall } from "./kept.js";
import { inUnits, metricInfo } from "./metrics.js";

const FIRST = ["reward_local", "held_out", "reward_training", "external_accepted", "completion_length", "tokens_per_second"]; // in the list of metrics
const MOST = 8; // shown together
const PAGE = 20; // in the list
const COLOURS = "runs.colors";
const root = location.pathname.replace(/run\/[^/]+\/$/, ""); // of this server: other runs are at run/<name>/ there

// Colours of runs, which stay although other runs come and go.
function colorsOf(runs) {
  const kept = recall(COLOURS, {}) ?? {};
  const colors = {};
  for (const run of runs) if (Number.isInteger(kept[run]) && !Object.values(colors).includes(kept[run])) colors[run] = kept[run];
  for (const run of runs) colors[run] ??= COLORS.findIndex((_, k) => !Object.values(colors).includes(k));
  keep(COLOURS, colors);
  return colors;
}

export function runs(_, query) {
  const metric = h("select", { id: "metric", onchange: () => { view = null; remember(); } });
  const place = h("div");
  const list = h("div");
  const pages = h("div", { class: "pages" });
  const differences = h("div");
  const equal = h("input", { type: "checkbox", onchange: compare });
  const settingsLink = save("#", "settings of the chosen runs");
  const chosen = new Set(query.getAll("run").slice(0, MOST));
  const wanted = query.get("metric") ?? FIRST[0];
  let offset = 0;
  let begun = chosen.size > 0;
  let view = null; // the chart of the chosen metric
  let sorted = { by: null, down: true };
  let rows = [];

  function remember() {
    const choice = new URLSearchParams([...[...chosen].map((run) => ["run", run]), ["metric", metric.value]]);
    history.replaceState(null, "", `#/runs?${choice}`);
    draw();
  }

  function chartOf(name) {
    const { title, said, kind } = metricInfo(name);
    const chart = new Chart(title, { key: `runs.${name}`, said, kind, csv: "#", height: 320, window: name === "reward_local" ? RECENT : 1, after: name === "held_out" });
    place.replaceChildren(chart.element);
    return chart;
  }

  async function draw() {
    const name = metric.value;
    const asked = { run: [...chosen], metric: name };
    const [lines] = await Promise.all([chosen.size ? get("api/runs/curves", asked) : { rounds: [], lines: [] }, compare()]);
    if (name !== metric.value || asked.run.join() !== [...chosen].join()) return; // another choice since
    view ??= chartOf(name);
    view.link.href = csv("api/runs/curves", { ...asked, points: 1000 });
    const { unit } = metricInfo(name);
    const colors = colorsOf(asked.run);
    view.show({
      rounds: name === "held_out" ? lines.rounds : lines.rounds.map(roundNumber),
      lines: lines.lines.map((line) => ({ ...line, color: colors[line.name], values: inUnits(line.values, unit) })),
    });
  }

  async function compare() {
    const run = [...chosen];
    settingsLink.href = csv("api/runs/settings", { run });
    const found = run.length ? await get("api/runs/settings", { run }) : { runs: [], settings: [] };
    const listed = found.settings.filter((each) => each.differs || equal.checked);
    const none = run.length < 2 ? "Choose two runs or more to see in which settings they differ." : "These runs have the same settings.";
    redraw(differences, table("Settings of the chosen runs", [
      { title: "Setting", cell: (each) => h("span", {}, each.name.replaceAll("_", " "), each.about ? h("span", { class: "interval" }, each.about) : null) },
      ...found.runs.map((name, k) => ({ title: name, cell: (each) => (each.differs ? h("strong", {}, each.values[k] ?? "not known") : each.values[k] ?? "not known") })),
    ], listed, none));
  }

  function pick(row) {
    const box = h("input", { type: "checkbox", "aria-label": `Show ${row.run}`, onchange: () => {
      box.checked && chosen.size < MOST ? chosen.add(row.run) : chosen.delete(row.run);
      box.checked = chosen.has(row.run);
      full.hidden = chosen.size < MOST;
      remember();
    } });
    box.checked = chosen.has(row.run);
    return box;
  }

  function sortBy(title, value) {
    return h("button", { type: "button", class: "sort", "aria-label": `Sort by ${title}`, onclick: () => {
      sorted = { by: title, value, down: sorted.by === title ? !sorted.down : true };
      listRuns();
    } }, title, sorted.by === title ? (sorted.down ? " ↓" : " ↑") : "");
  }

  function listRuns() {
    const order = sorted.by ? [...rows].sort((one, other) => {
      const [a, b] = [sorted.value(one), sorted.value(other)];
      if (a === null || b === null) return (a === null) - (b === null); // unknown ones last
      return (a < b ? -1 : a > b ? 1 : 0) * (sorted.down ? -1 : 1);
    }) : rows;
    redraw(list, table("Runs", [
      { title: "Show", cell: pick },
      { title: sortBy("Run", (row) => row.run), cell: (row) => (row.current ? h("a", { href: "#/" }, h("strong", {}, row.run)) : h("a", { href: `${root}run/${encodeURIComponent(row.run)}/#/` }, row.run)) },
      { title: "Phase", short: true, cell: (row) => h("span", { class: `pill ${row.phase}` }, row.phase) },
      { title: sortBy("Round", roundOf), number: true, wide: true, cell: (row) => `${roundOf(row)} of ${count(row.rounds)}` },
      { title: sortBy("Nodes", (row) => row.nodes), number: true, wide: true, cell: (row) => String(row.nodes) },
      { title: sortBy("Reward", (row) => row.reward), number: true, cell: (row) => score(row.reward) },
      { title: sortBy("Unseen questions", (row) => row.held_out_now), number: true, wide: true, cell: (row) => (row.held_out_now === null ? "–" : `${shown(row.held_out_start, "share")} → ${shown(row.held_out_now, "share")}`) },
    ], order));
  }

  // Offers all metrics, the ones that most people look for first.
  function offer(metrics) {
    const known = [...FIRST.filter((name) => metrics.includes(name)), ...metrics.filter((name) => !FIRST.includes(name))];
    if (known.join() === [...metric.options].map((option) => option.value).join()) return;
    const before = metric.value || wanted;
    metric.replaceChildren(...known.map((name) => h("option", { value: name }, metricInfo(name).title)));
    metric.value = known.includes(before) ? before : known[0] ?? "";
  }

  async function refresh() {
    const page = await get("api/runs", { offset });
    if (!begun) page.runs.filter((row) => row.current).forEach((row) => chosen.add(row.run));
    begun = true;
    rows = page.runs;
    const move = (by, label) => h("button", { type: "button", onclick: () => { offset += by; refresh(); } }, label);
    pages.replaceChildren(...[offset > 0 && move(-PAGE, "Newer runs"), offset + PAGE < page.total && move(PAGE, "Older runs")].filter(Boolean));
    offer(page.metrics);
    listRuns();
    if (metric.value) await draw();
  }

  const full = h("p", { class: "note", hidden: true }, `${MOST} runs at most are shown together.`);
  const element = h("div", { class: "stack" },
    h("section", { class: "card", "aria-label": "Curves" }, h("div", { class: "tools" }, h("label", { for: "metric" }, "Curve", metric)), place,
      h("p", { class: "note" }, "Each line is the mean of all nodes of one run.")),
    card("Runs in this folder", csv("api/runs"), list, pages, full),
    card("Differences in settings", null, h("label", { class: "beside" }, equal, "Show equal settings too"), differences));
  element.lastElementChild.querySelector(".head").append(settingsLink);
  return { title: "Runs", refresh, element };
}
