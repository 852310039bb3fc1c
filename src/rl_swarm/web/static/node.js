// Shows one node: its curves, the peers whose rollouts it used, and its errors.

import { csv, get } from "./api.js";
import { shown } from "./chart_axes.js";
import { RECENT } from "./chart_entries.js";
import { Chart } from "./charts.js";
import { smoothingSelect } from "./chart_tools.js";
import { bytes, card, count, fact, h, eventLabel, life, moment, nodeLink, percent, redraw, roundNumber, save, score, signed, table } from "./dom.js";
import { Choice } from "./kept.js";
import { inUnits, metricInfo, stage } from "./metrics.js";
import { WINDOWS } from "./smoothing.js";

// The charts in this order; some show several metrics. Every other metric has a chart of its own after these.
const CHARTS = [
  { metrics: /^reward_(local|training)$/, of: "reward_local" },
  { metrics: /^held_out$/, of: "held_out" },
  { metrics: /^reward_local\.stage_/, of: "reward_local", label: "Reward by stage" },
  { metrics: /^external_accepted$/ },
  { metrics: /^completion_length$/ },
  { metrics: /^tokens_per_second$/ },
  { metrics: /^seconds\./, label: "Seconds per phase", said: "Where the time of a round goes." },
  { metrics: /^(load\.|peak_)memory$/, of: "load.memory" },
  { metrics: /^load\.processor$/ },
  { metrics: /^load\.gpu$/ },
  { metrics: /^load\.gpu_memory$/ },
  { metrics: /^(zero_std|truncated|clip)_fraction$/, of: "zero_std_fraction", label: "Shares of groups, answers and tokens", said: "Groups without signal (all answers got the same reward), answers cut off at their longest, and tokens whose update was limited." },
];
const NAMES = { "load.memory": "now", peak_memory: "peak", reward_local: "its own answers", reward_training: "what it trained on", held_out: "score", zero_std_fraction: "groups without signal", truncated_fraction: "answers cut off", clip_fraction: "tokens limited" };
const plain = (metric) => NAMES[metric] ?? stage(metric.replace(/^(seconds|reward_local|load)\./, "")).replaceAll("_", " ");

// Groups metrics into charts of {label, said, kind, unit, metrics}.
function grouped(metrics) {
  const taken = new Set();
  const charts = CHARTS.map(({ metrics: pattern, of, ...named }) => {
    const found = metrics.filter((metric) => pattern.test(metric));
    found.forEach((metric) => taken.add(metric));
    const { title, ...info } = metricInfo(of ?? found[0] ?? "");
    return { label: title, ...info, ...named, metrics: found };
  });
  const rest = metrics.filter((metric) => !taken.has(metric)).map((metric) => {
    const { title, ...info } = metricInfo(metric);
    return { label: title, ...info, metrics: [metric] };
  });
  return [...charts.filter((each) => each.metrics.length), ...rest];
}

const links = (caption, rows, empty) => table(caption, [
  { title: "Node", cell: (link) => nodeLink(link.node, link.name) },
  { title: "Groups", number: true, cell: (link) => String(link.groups) },
], rows, empty);

const pairs = (first, second, found, empty, number = true) => table(first, [
  { title: first, short: !number, cell: ([name]) => name },
  { title: second, number, cell: ([, value]) => String(value) },
], Object.entries(found), empty);

// The swarm's mean as a line to compare with, where its points stand for as many rounds as those of the node.
function meanOf(swarm, rounds) {
  const step = (of) => of[1] - of[0];
  if (!(swarm?.nodes > 1) || step(swarm.rounds) !== step(rounds)) return [];
  return [{ name: "mean of all nodes", values: rounds.map((_, k) => swarm.mean[k] ?? null) }];
}

export function node(id) {
  const path = `api/nodes/${encodeURIComponent(id)}`;
  const head = h("div", { class: "card" });
  const rest = h("div", { class: "stack" });
  const grid = h("div", { class: "charts" });
  const charts = new Map(); // by label and metrics
  const smoothing = new Choice("node.smoothing", RECENT, WINDOWS); // of all charts here
  const tools = h("div", { class: "tools" }, smoothingSelect(smoothing, "Smoothing of all curves"));
  const view = { title: "Node", refresh, element: h("div", { class: "stack" }, head, h("section", { "aria-label": "Curves" }, tools, grid), rest) };

  function chartOf({ label, said, kind, metrics }) {
    const scored = metrics[0] === "held_out";
    const table = scored ? csv("api/curves", { metric: "held_out", limit: 0, node: id }) : csv(`${path}/curves`, { metric: metrics, points: 1000 });
    return new Chart(label, { key: `node.${metrics.join()}`, said, kind, height: 190, csv: table, ...(scored ? { after: true } : { smoothing }) });
  }

  async function refresh() {
    const [about, curves, all, scores, happened] = await Promise.all([get(path), get(`${path}/curves`), get("api/curves", { limit: 0 }), get("api/curves", { metric: "held_out", limit: 0, node: id }), get("api/events", { node: id, limit: 20 })]);
    if (!head.isConnected) return; // the user has opened another page
    const { row } = about;
    view.title = row.name;
    document.querySelector("#main h1").replaceChildren(life(row.alive), ` ${row.name}`);
    redraw(head,
      h("p", { class: "id" }, row.peer_id || row.node),
      h("dl", { class: "facts" },
        fact("Rank", String(row.rank), `votes: ${row.wins}`),
        fact("Reward", score(row.reward), row.trend === null ? "last 20 rounds" : `trend ${signed(row.trend)}`),
        fact("Test score", shown(row.held_out_now, "share"), row.held_out_start === null ? null : `from ${shown(row.held_out_start, "share")}`),
        fact("Rejected", count(Object.values(about.rejected).reduce((sum, times) => sum + times, 0)), "peer rollouts"),
        fact("Rounds", String(row.participation), row.round === null ? null : `last: ${roundNumber(row.round)}`),
        fact("External groups", percent(row.external_share), "of the groups trained on"),
        fact("Tokens", count(about.tokens), `rollouts: ${count(about.rollouts)}`),
        fact("Model", row.model || "–", about.device),
        ...(row.role ? [fact("Role", row.role, Object.entries(about.role_metrics).map(([name, value]) => `${plain(name)} ${score(value)}`).join(", "))] : []),
        fact("Peak memory", bytes(about.peak_memory), about.host ? `on ${about.host}` : null),
        fact("Restarts", String(about.restarts), `rounds skipped: ${count(about.skipped)}`)),
      h("p", { class: "note" }, "Joined ", moment(about.joined), ", last heartbeat ", moment(about.last_heartbeat), ". ",
        h("a", { href: `#/rollouts?node=${encodeURIComponent(row.node)}` }, "Read its rollouts")));
    const measured = { ...curves.metrics, ...(scores.lines.length ? { held_out: scores.lines[0].values } : {}) };
    const drawn = grouped(Object.keys(measured)).map((each) => {
      const key = [each.label, ...each.metrics].join();
      if (!charts.has(key)) charts.set(key, chartOf(each));
      return { ...each, chart: charts.get(key) };
    });
    const places = drawn.map(({ chart }) => chart.element.parentElement ?? h("div", { class: "card" }, chart.element));
    if (places.length !== grid.childElementCount || places.some((place) => place.parentElement !== grid)) grid.replaceChildren(...places);
    for (const { chart, metrics, unit } of drawn) {
      const rounds = metrics[0] === "held_out" ? scores.rounds : curves.rounds.map(roundNumber);
      const lines = metrics.map((metric) => ({ name: metrics.length > 1 ? plain(metric) : "this node", values: inUnits(measured[metric], unit) }));
      chart.show({ rounds, lines: [...lines, ...meanOf({ held_out: scores, reward_local: all }[metrics[0]], rounds)] });
    }
    const open = new Set([...rest.querySelectorAll("details[open]")].map((each) => each.id));
    const saved = (name) => `${path}/tables/${name}`;
    redraw(rest,
      h("div", { class: "columns" },
        card("Learned from", saved("learned_from"), links("Peers whose groups it trained on", about.learned_from, "No external groups yet.")),
        card("Used by", saved("used_by"), links("Peers that trained on its groups", about.used_by, "No peer yet, according to the logs on this machine.")),
        card("Test score, by task", saved("held_out"), table("Test score, by task", [
          { title: "Task", cell: (each) => each.task },
          { title: "Before", number: true, cell: (each) => shown(each.start, "share") },
          { title: "Now", number: true, cell: (each) => shown(each.now, "share") },
        ], about.held_out)),
        card("Rejected peer rollouts", saved("rejected"), pairs("Reason", "Times", about.rejected, "None.")),
        card("Own rollouts rejected by peers", saved("rejected_by_peers"), pairs("Reason", "Times", about.rejected_by_peers, "None, according to the logs on this machine.")),
        card("Errors", saved("errors"), pairs("Error", "Times", about.errors, "None.")),
        card("Checkpoints", saved("checkpoints"), about.checkpoints.length ? h("p", { class: "plain" }, about.checkpoints.map((round) => `round ${roundNumber(round)}`).join(", ")) : h("p", { class: "empty" }, "None on this machine.")),
        card("Hardware", saved("hardware"), pairs("Part", "Description", about.hardware, "Not shared.", false))),
      card("Events", csv("api/events", { node: id, limit: 1000 }), table("Events", [
        { title: "When", short: true, cell: (event) => moment(event.timestamp) },
        { title: "Event", short: true, cell: (event) => eventLabel(event.event) },
        { title: "Round", number: true, cell: (event) => (event.round === null ? "–" : String(roundNumber(event.round))) },
        { title: "Detail", wide: true, cell: (event) => event.detail },
      ], happened.events)),
      Object.keys(about.settings).length ? h("details", { class: "card", id: "settings", open: open.has("settings") }, h("summary", {}, "Settings"),
        h("div", { class: "head" }, h("span", {}), save(saved("settings"), "settings")), pairs("Setting", "Value", about.settings, "", false)) : "");
  }
  return view;
}
