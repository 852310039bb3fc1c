// Shows one node: its curves, the peers whose rollouts it used, and its errors.

import { csv, get } from "./api.js";
import { Chart } from "./charts.js";
import { bytes, card, count, fact, h, eventLabel, life, moment, nodeLink, percent, redraw, save, score, signed, table } from "./dom.js";

// Charts that show several metrics or need a unit, in this order. Every other metric has a chart under its own name.
const CHARTS = [
  ["Reward", /^reward_(local|training)$/],
  ["Reward by stage", /^reward_local\.stage_/],
  ["Completion length, tokens", /^completion_length$/],
  ["Entropy", /^entropy$/],
  ["Gradient norm", /^grad_norm$/],
  ["Tokens per second", /^tokens_per_second$/],
  ["GPU load, %", /^load\.gpu$/, 0.01],
  ["GPU memory, MiB", /^load\.gpu_memory$/, 2 ** 20],
  ["CPU load, cores", /^load\.processor$/],
  ["Memory, MiB", /^(load\.|peak_)memory$/, 2 ** 20],
  ["Seconds per phase", /^seconds\./],
  ["External groups", /^external_accepted$/],
];
const NAMES = { "load.gpu": "load", "load.gpu_memory": "in use", "load.processor": "load", "load.memory": "current", peak_memory: "peak", reward_local: "fresh local", reward_training: "training set" };
const TITLES = { kl: "KL divergence", external_max_nll: "External max NLL", logprob_mismatch: "Log-probability mismatch" };
const plain = (metric) => NAMES[metric] ?? metric.replace(/^(seconds|reward_local)\./, "").replaceAll("_", " ");
const titled = (metric) => TITLES[metric] ?? plain(metric).replace(/^./, (first) => first.toUpperCase());

// Groups metrics into charts of {label, metrics, unit}.
function grouped(metrics) {
  const taken = new Set();
  const found = CHARTS.map(([label, pattern, unit = 1]) => ({ label, unit, metrics: metrics.filter((metric) => pattern.test(metric)) }));
  found.forEach((each) => each.metrics.forEach((metric) => taken.add(metric)));
  const rest = metrics.filter((metric) => !taken.has(metric)).map((metric) => ({ label: titled(metric), unit: 1, metrics: [metric] }));
  return [...found.filter((each) => each.metrics.length), ...rest];
}

const links = (caption, rows, empty) => table(caption, [
  { title: "Node", cell: (link) => nodeLink(link.node, link.name) },
  { title: "Groups", number: true, cell: (link) => String(link.groups) },
], rows, empty);

const pairs = (first, second, found, empty, number = true) => table(first, [
  { title: first, short: !number, cell: ([name]) => name },
  { title: second, number, cell: ([, value]) => String(value) },
], Object.entries(found), empty);

export function node(id) {
  const path = `api/nodes/${encodeURIComponent(id)}`;
  const head = h("div", { class: "card" });
  const rest = h("div", { class: "stack" });
  const grid = h("div", { class: "charts" });
  const charts = new Map(); // by label and metrics
  const view = { title: "Node", refresh, element: h("div", { class: "stack" }, head, h("section", { "aria-label": "Curves" }, grid), rest) };

  async function refresh() {
    const [about, curves, happened] = await Promise.all([get(path), get(`${path}/curves`), get("api/events", { node: id, limit: 20 })]);
    if (!head.isConnected) return; // the user has opened another page
    const { row } = about;
    view.title = row.name;
    document.querySelector("#main h1").replaceChildren(life(row.alive), ` ${row.name}`);
    redraw(head,
      h("p", { class: "id" }, row.peer_id || row.node),
      h("dl", { class: "facts" },
        fact("Rank", String(row.rank), `wins: ${row.wins}`),
        fact("Reward", score(row.reward), row.trend === null ? "last 20 rounds" : `trend ${signed(row.trend)}`),
        fact("Held-out score", score(row.held_out_now), row.held_out_start === null ? null : `from ${score(row.held_out_start)}`),
        fact("Rejected", count(Object.values(about.rejected).reduce((sum, times) => sum + times, 0)), "peer rollouts"),
        fact("Rounds", String(row.participation), row.round === null ? null : `last: ${row.round}`),
        fact("External groups", percent(row.external_share), "of the groups trained on"),
        fact("Tokens", count(about.tokens), `rollouts: ${count(about.rollouts)}`),
        fact("Model", row.model || "–", about.device),
        ...(row.role ? [fact("Role", row.role, Object.entries(about.role_metrics).map(([name, value]) => `${plain(name)} ${score(value)}`).join(", "))] : []),
        fact("Peak memory", bytes(about.peak_memory), about.host ? `on ${about.host}` : null),
        fact("Restarts", String(about.restarts), `rounds skipped: ${count(about.skipped)}`)),
      h("p", { class: "note" }, "Joined ", moment(about.joined), ", last heartbeat ", moment(about.last_heartbeat), ". ",
        h("a", { href: `#/rollouts?node=${encodeURIComponent(row.node)}` }, "Read its rollouts")));
    const drawn = grouped(Object.keys(curves.metrics)).map((each) => {
      const key = [each.label, ...each.metrics].join();
      if (!charts.has(key)) charts.set(key, new Chart(each.label, { height: 190, csv: csv(`${path}/curves`, { metric: each.metrics, points: 1000 }) }));
      return { ...each, chart: charts.get(key) };
    });
    const places = drawn.map(({ chart }) => chart.element.parentElement ?? h("div", { class: "card" }, chart.element));
    if (places.length !== grid.childElementCount || places.some((place) => place.parentElement !== grid)) grid.replaceChildren(...places);
    for (const { chart, metrics, unit } of drawn) {
      const lines = metrics.map((metric) => ({ name: plain(metric), values: curves.metrics[metric].map((value) => (value === null ? null : value / unit)) }));
      chart.show({ rounds: curves.rounds, lines });
    }
    const open = new Set([...rest.querySelectorAll("details[open]")].map((each) => each.id));
    const saved = (name) => `${path}/tables/${name}`;
    redraw(rest,
      h("div", { class: "columns" },
        card("Learned from", saved("learned_from"), links("Peers whose groups it trained on", about.learned_from, "No external groups yet.")),
        card("Used by", saved("used_by"), links("Peers that trained on its groups", about.used_by, "No peer yet, according to the logs on this machine.")),
        card("Held-out score by task", saved("held_out"), table("Held-out score by task", [
          { title: "Task", cell: (each) => each.task },
          { title: "Before", number: true, cell: (each) => score(each.start) },
          { title: "Now", number: true, cell: (each) => score(each.now) },
        ], about.held_out)),
        card("Rejected peer rollouts", saved("rejected"), pairs("Reason", "Times", about.rejected, "None.")),
        card("Own rollouts rejected by peers", saved("rejected_by_peers"), pairs("Reason", "Times", about.rejected_by_peers, "None, according to the logs on this machine.")),
        card("Errors", saved("errors"), pairs("Error", "Times", about.errors, "None.")),
        card("Checkpoints", saved("checkpoints"), about.checkpoints.length ? h("p", { class: "plain" }, about.checkpoints.map((round) => `round ${round}`).join(", ")) : h("p", { class: "empty" }, "None on this machine.")),
        card("Hardware", saved("hardware"), pairs("Part", "Description", about.hardware, "Not shared.", false))),
      card("Events", csv("api/events", { node: id, limit: 1000 }), table("Events", [
        { title: "When", short: true, cell: (event) => moment(event.timestamp) },
        { title: "Event", short: true, cell: (event) => eventLabel(event.event) },
        { title: "Round", number: true, cell: (event) => (event.round === null ? "–" : String(event.round)) },
        { title: "Detail", wide: true, cell: (event) => event.detail },
      ], happened.events)),
      Object.keys(about.settings).length ? h("details", { class: "card", id: "settings", open: open.has("settings") }, h("summary", {}, "Settings"),
        h("div", { class: "head" }, h("span", {}), save(saved("settings"), "settings")), pairs("Setting", "Value", about.settings, "", false)) : "");
  }
  return view;
}
