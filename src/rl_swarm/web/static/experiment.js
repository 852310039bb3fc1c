// Shows an experiment: what it has shown so far, how its arms compare, their curves, and a link to every run.

import { csv, get } from "./api.js";
import { Chart } from "./charts.js";
import { follow, rest } from "./connection.js";
import { card, fact, h, redraw, score, signed, table } from "./dom.js";
import { forestPlot } from "./forest_plot.js";
import { term } from "./words.js";

const CURVES = [
  ["fresh_local", "Reward of fresh answers", "reward", "Mean reward of the answers that a node's own model has just written. It says what the model can do."],
  ["held_out", "Test score", "share", "Share of right answers to questions that training never sees."],
  ["training_set", "Reward of what it trained on", "reward", "Mean reward of all answers that were trained on, those of peers included. They were chosen, so this does not say what a model can do."],
];
const AT_EQUAL_TOKENS = [["fresh_local_change_equal_tokens", "Reward of fresh answers"], ["held_out_change_equal_tokens", "Test score"]];
const AFTER_EQUAL_ROUNDS = [["fresh_local_change", "Reward of fresh answers"], ["held_out_change", "Test score"], ["training_set_change", "Reward of what it trained on"]];
const NOTES = [
  "Rewards are totals over nodes and rounds. Fresh answers are those that the node's own model has just written.",
  "What it trained on includes the answers of peers, which were chosen. The paper seems to log this.",
  "Unseen questions: the score at the start and now, on questions that training never sees.",
  "Below each number its 95 % interval, by bootstrap over seeds and nodes. With one seed it shows how nodes differ, not how seeds do: it is too narrow.",
];

const main = document.getElementById("main");
const charts = CURVES.map(([metric, title, kind, said]) => new Chart(title, { key: `experiment.${metric}`, kind, said, after: true, csv: csv("api/experiment/curves", { metric, points: 1000 }) }));
const conclusion = h("p", { class: "conclusion", role: "status" });
const comparison = h("div");
const more = h("div");
const progress = h("progress", { max: 1, value: 0, "aria-label": "Rounds played" });
const facts = h("dl", { class: "facts" });
const arms = h("div");
const runs = h("div");
let version = null;

const within = (value, interval) => h("span", {}, value, h("span", { class: "interval" }, interval));

// What the name of an arm says: questions that a node answers, and groups of peers that it trains on, in a round.
function meaning(arm) {
  const [, own, peers] = /^(\d+)\/(\d+)/.exec(arm) ?? [];
  if (!own) return "";
  return peers === "0" ? `alone: ${own} questions a round` : `${own} own questions and ${peers} of peers a round`;
}

const measure = (found, digits) => (found ? within(found.mean.toFixed(digits), `${found.low.toFixed(digits)} to ${found.high.toFixed(digits)}`) : "–");
const percent = (found) => (found ? within(`${signed(100 * found.mean, 0)} %`, `${signed(100 * found.low, 0)} to ${signed(100 * found.high, 0)}`) : "–");
const link = (run, text) => h("a", { href: `run/${encodeURIComponent(run)}/#/` }, text);

function heldOut(arm) {
  if (!arm.held_out) return "–";
  return within([h("span", { class: "wide" }, `${score(arm.held_out_start.mean)} → `), score(arm.held_out.mean)], `${score(arm.held_out.low)} to ${score(arm.held_out.high)}`);
}

const ARMS = [
  { title: "Way of training", cell: (arm) => within(arm.arm, [h("span", { class: "wide" }, meaning(arm.arm)), arm.against ? h("span", { class: "interval" }, `against ${arm.against}`) : null]) },
  { title: "Seeds", wide: true, cell: (arm) => arm.seeds.join(", ") },
  { title: "Rounds", number: true, wide: true, cell: (arm) => `${arm.played} of ${arm.rounds}` },
  { title: "Trained on", number: true, cell: (arm) => measure(arm.training_set, 1) },
  { title: "Change", number: true, wide: true, cell: (arm) => percent(arm.training_set_change) },
  { title: "Fresh answers", number: true, cell: (arm) => measure(arm.fresh_local, 1) },
  { title: "Change", number: true, wide: true, cell: (arm) => percent(arm.fresh_local_change) },
  { title: "Unseen questions", number: true, cell: heldOut },
  { title: "Change", number: true, wide: true, cell: (arm) => percent(arm.held_out_change) },
];

const RUNS = [
  { title: "Run", cell: (run) => (run.phase === "waiting" || run.packed ? run.run : link(run.run, run.run)) },
  { title: "Way of training", short: true, wide: true, cell: (run) => run.arm },
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
  rest(state.phase);
  facts.replaceChildren(...[
    fact("Runs finished", `${state.runs.filter((run) => run.phase === "finished").length} of ${state.runs.length}`, "of those that have begun"),
    fact("Ways of training", String(state.arms.length), "that are compared"),
    fact("Nodes", String(Math.max(0, ...state.arms.map((arm) => arm.nodes))), "of each swarm"),
    fact("Seeds", String(new Set(state.runs.map((run) => run.seed)).size), "of each arm"),
    state.tuning ? fact("Learning rates", `${state.tuned} of ${state.tuning}`, "short runs finished") : null,
  ].filter(Boolean));
  charts.forEach((chart, k) => chart.show({ rounds: curves[k].rounds, lines: curves[k].lines }));
  conclusion.textContent = state.conclusion;
  conclusion.className = `conclusion ${state.verdict}`;
  const compared = (measures) => measures.map(([key, title]) => ({ title, rows: state.arms.map((arm) => ({ label: arm.against ? `${arm.arm} against ${arm.against}` : arm.arm, change: arm[key] })) }));
  redraw(comparison, forestPlot("Changes at the same number of generated tokens", compared(AT_EQUAL_TOKENS)));
  redraw(more, forestPlot("Changes after the same number of rounds", compared(AFTER_EQUAL_ROUNDS)));
  redraw(arms, table("Ways of training", ARMS, state.arms));
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
  h("section", { class: "card", "aria-label": "Conclusion" }, conclusion),
  h("section", { class: "card", "aria-label": "Changes" },
    h("div", { class: "head" }, h("h2", {}, term("Compared with training alone", "How much higher a number is than that of nodes that share nothing. Where the bar crosses zero, chance alone may explain the difference."))),
    h("p", { class: "note" }, "When nodes had generated the same number of tokens, as many as the cheapest way of training."), comparison,
    h("details", { id: "more" }, h("summary", {}, "After the same number of rounds"), more)),
  h("section", { class: "card", "aria-label": "Status" }, progress, facts),
  h("div", { class: "main-charts even" }, charts.slice(0, 2).map((chart) => h("section", { class: "card", "aria-label": chart.label }, chart.element))),
  card("Ways of training", csv("api/experiment"), arms, h("ul", { class: "notes" }, NOTES.map((note) => h("li", {}, note)))),
  h("section", { class: "card", "aria-label": charts[2].label }, charts[2].element),
  card("Runs", csv("api/experiment/runs"), runs)));
update();
follow({
  changed: (newest) => newest !== version && update(),
  closing: update,
  lost: () => { version = null; }, // the server may restart
});
