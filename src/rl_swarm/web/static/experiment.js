// Shows an experiment: its arms as curves, their measures so far, and a link to every run.

import { csv, get } from "./api.js";
import { Chart } from "./charts.js";
import { follow } from "./connection.js";
import { card, fact, h, redraw, score, signed, table } from "./dom.js";

const CURVES = [["fresh_local", "Reward of fresh local rollouts"], ["held_out", "Held-out score"], ["training_set", "Reward of the training set"]];
const NOTES = [
  "Training set: the mean reward of what a node trained on in a round, external groups included, summed over nodes and rounds. The paper seems to log this.",
  "Fresh local: the mean reward of what its own model has just written, summed likewise.",
  "Held out: the score on questions that training never sees, at the start and now.",
  "Below each number its 95 % interval, by bootstrap over seeds and nodes. With one seed it shows how nodes differ, not how seeds do: it is too narrow.",
];

const main = document.getElementById("main");
const charts = CURVES.map(([metric, title]) => new Chart(title, { csv: csv("api/experiment/curves", { metric, points: 1000 }) }));
const progress = h("progress", { max: 1, value: 0, "aria-label": "Rounds played" });
const facts = h("dl", { class: "facts" });
const arms = h("div");
const runs = h("div");
let version = null;

const within = (value, interval) => h("span", {}, value, h("span", { class: "interval" }, interval));
const measure = (found, digits) => (found ? within(found.mean.toFixed(digits), `${found.low.toFixed(digits)} to ${found.high.toFixed(digits)}`) : "–");
const percent = (found) => (found ? within(`${signed(100 * found.mean, 0)} %`, `${signed(100 * found.low, 0)} to ${signed(100 * found.high, 0)}`) : "–");
const link = (run, text) => h("a", { href: `run/${encodeURIComponent(run)}/#/` }, text);

function heldOut(arm) {
  if (!arm.held_out) return "–";
  return within([h("span", { class: "wide" }, `${score(arm.held_out_start.mean)} → `), score(arm.held_out.mean)], `${score(arm.held_out.low)} to ${score(arm.held_out.high)}`);
}

const ARMS = [
  { title: "Arm", short: true, cell: (arm) => within(arm.arm, arm.against ? `against ${arm.against}` : "") },
  { title: "Seeds", wide: true, cell: (arm) => arm.seeds.join(", ") },
  { title: "Rounds", number: true, wide: true, cell: (arm) => `${arm.played} of ${arm.rounds}` },
  { title: "Training set", number: true, cell: (arm) => measure(arm.training_set, 1) },
  { title: "Change", number: true, wide: true, cell: (arm) => percent(arm.training_set_change) },
  { title: "Fresh local", number: true, cell: (arm) => measure(arm.fresh_local, 1) },
  { title: "Change", number: true, wide: true, cell: (arm) => percent(arm.fresh_local_change) },
  { title: "Held out", number: true, cell: heldOut },
  { title: "Change", number: true, wide: true, cell: (arm) => percent(arm.held_out_change) },
];

const RUNS = [
  { title: "Run", cell: (run) => (run.phase === "waiting" || run.packed ? run.run : link(run.run, run.run)) },
  { title: "Arm", short: true, wide: true, cell: (run) => run.arm },
  { title: "Seed", number: true, wide: true, cell: (run) => String(run.seed) },
  { title: "Round", number: true, cell: (run) => `${run.played} of ${run.rounds}` },
  { title: "Phase", short: true, cell: (run) => h("span", { class: `pill ${run.phase}` }, run.phase) },
];

async function refresh() {
  const [page, ...curves] = await Promise.all([get("api/experiment"), ...CURVES.map(([metric]) => get("api/experiment/curves", { metric }))]);
  const { state } = page;
  version = page.version;
  const sum = (key) => state.runs.reduce((total, run) => total + run[key], 0);
  progress.max = sum("rounds") || 1;
  progress.value = sum("played");
  document.title = `${state.name} · RL Swarm`;
  document.getElementById("name").textContent = state.name;
  const phase = document.getElementById("phase");
  phase.textContent = state.phase;
  phase.className = `pill ${state.phase}`;
  facts.replaceChildren(...[
    fact("Runs finished", `${state.runs.filter((run) => run.phase === "finished").length} of ${state.runs.length}`, "of those that have begun"),
    fact("Arms", String(state.arms.length), "that are compared"),
    fact("Nodes", String(Math.max(0, ...state.arms.map((arm) => arm.nodes))), "of each swarm"),
    fact("Seeds", String(new Set(state.runs.map((run) => run.seed)).size), "of each arm"),
    state.tuning ? fact("Learning rates", `${state.tuned} of ${state.tuning}`, "short runs finished") : null,
  ].filter(Boolean));
  charts.forEach((chart, k) => chart.show({ rounds: curves[k].rounds, lines: curves[k].lines }));
  redraw(arms, table("Arms", ARMS, state.arms));
  redraw(runs, table("Runs", RUNS, state.runs));
}

let busy = false;
let again = false;

async function update() {
  if (busy) {
    again = true;
    return;
  }
  busy = true;
  again = false;
  main.querySelector(".failure")?.remove();
  await refresh().catch((error) => main.prepend(h("p", { class: "failure", role: "alert" }, error.message)));
  busy = false;
  if (again) update();
}

main.append(h("h1", {}, "What sharing is worth"), h("div", { class: "stack" },
  h("section", { class: "card", "aria-label": "Status" }, progress, facts),
  h("div", { class: "main-charts even" }, charts.slice(0, 2).map((chart) => h("section", { class: "card", "aria-label": chart.label }, chart.element))),
  card("Arms", csv("api/experiment"), arms, h("ul", { class: "notes" }, NOTES.map((note) => h("li", {}, note)))),
  h("section", { class: "card", "aria-label": charts[2].label }, charts[2].element),
  card("Runs", csv("api/experiment/runs"), runs)));
update();
follow({
  changed: (newest) => newest !== version && update(),
  closing: update,
  lost: () => { version = null; }, // the server may restart
});
