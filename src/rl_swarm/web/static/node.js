// Shows one node: its curves, whom it learned from, and what went wrong.

import { csv, get } from "./api.js";
import { Chart } from "./charts.js";
import { bytes, card, count, fact, h, happening, life, moment, nodeLink, percent, redraw, save, score, signed, table } from "./dom.js";

const CHARTS = [
  ["Reward", ["reward_local", "reward_training"]],
  ["Completion length, tokens", ["completion_length"]],
  ["Entropy", ["entropy"]],
  ["Gradient norm", ["grad_norm"]],
  ["Tokens per second", ["tokens_per_second"]],
  ["GPU load, %", ["load.gpu"], 0.01],
  ["GPU memory, MiB", ["load.gpu_memory"], 2 ** 20],
  ["Processor load, cores", ["load.processor"]],
  ["Memory, MiB", ["load.memory", "peak_memory"], 2 ** 20],
  ["Seconds per phase", ["seconds.generate", "seconds.train", "seconds.collect", "seconds.score", "seconds.publish", "seconds.questions", "seconds.report"]],
  ["Groups from others", ["external_accepted"]],
];
const NAMES = { "load.gpu": "busy", "load.gpu_memory": "used on the device", "load.processor": "busy", "load.memory": "now", peak_memory: "at most" };
const plain = (metric) => NAMES[metric] ?? metric.replace("seconds.", "").replace("reward_local", "fresh local").replace("reward_training", "training set").replaceAll("_", " ");

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
  const charts = CHARTS.map(([label, metrics, unit = 1]) => [new Chart(label, { height: 190, csv: csv(`${path}/curves`, { metric: metrics, points: 1000 }) }), metrics, unit]);
  const view = { title: "Node", refresh, element: h("div", { class: "stack" }, head, h("section", { "aria-label": "Curves" }, grid), rest) };

  async function refresh() {
    const [about, curves, happened] = await Promise.all([get(path), get(`${path}/curves`), get("api/events", { node: id, limit: 20 })]);
    if (!head.isConnected) return; // somebody went on to another page
    const { row } = about;
    view.title = row.name;
    document.querySelector("#main h1").replaceChildren(life(row.alive), ` ${row.name}`);
    redraw(head,
      h("p", { class: "id" }, row.peer_id || row.node),
      h("dl", { class: "facts" },
        fact("Rank", String(row.rank), `wins: ${row.wins}`),
        fact("Reward", score(row.reward), row.trend === null ? "last 20 rounds" : `trend ${signed(row.trend)}`),
        fact("Held-out score", score(row.held_out_now), row.held_out_start === null ? null : `from ${score(row.held_out_start)}`),
        fact("Rejected", count(Object.values(about.rejected).reduce((sum, times) => sum + times, 0)), "rollouts of others"),
        fact("Rounds", String(row.participation), row.round === null ? null : `last: ${row.round}`),
        fact("From others", percent(row.from_others), "of what it learned"),
        fact("Tokens", count(about.tokens), `rollouts: ${count(about.rollouts)}`),
        fact("Model", row.model || "–", about.device),
        ...(row.role ? [fact("Role", row.role, Object.entries(about.role_metrics).map(([name, value]) => `${plain(name)} ${score(value)}`).join(", "))] : []),
        fact("Peak memory", bytes(about.peak_memory), about.host ? `on ${about.host}` : null),
        fact("Restarts", String(about.restarts), `rounds skipped: ${count(about.skipped)}`)),
      h("p", { class: "note" }, "Joined ", moment(about.joined), ", last sign of life ", moment(about.seen), ". ",
        h("a", { href: `#/rollouts?node=${encodeURIComponent(row.node)}` }, "Read its rollouts")));
    const drawn = charts.filter(([, metrics]) => metrics.some((metric) => curves.metrics[metric]));
    if (grid.childElementCount !== drawn.length) grid.replaceChildren(...drawn.map(([chart]) => h("div", { class: "card" }, chart.element)));
    for (const [chart, metrics, unit] of drawn) {
      const lines = metrics.filter((metric) => curves.metrics[metric]).map((metric) => ({ name: plain(metric), values: curves.metrics[metric].map((value) => (value === null ? null : value / unit)) }));
      chart.show({ rounds: curves.rounds, lines });
    }
    const open = new Set([...rest.querySelectorAll("details[open]")].map((each) => each.id));
    const saved = (name) => `${path}/tables/${name}`;
    redraw(rest,
      h("div", { class: "columns" },
        card("It learned from", saved("learned_from"), links("Whose rollouts it learned from", about.learned_from, "From nobody yet.")),
        card("Who learned from it", saved("taught"), links("Who learned from its rollouts", about.taught, "Nobody yet, as far as the logs here tell.")),
        card("Held-out score by task", saved("held_out"), table("Held-out score by task", [
          { title: "Task", cell: (each) => each.task },
          { title: "Before", number: true, cell: (each) => score(each.start) },
          { title: "Now", number: true, cell: (each) => score(each.now) },
        ], about.held_out)),
        card("Rollouts of others that it rejected", saved("rejected"), pairs("Reason", "Times", about.rejected, "None.")),
        card("Its rollouts that others rejected", saved("refused"), pairs("Reason", "Times", about.refused, "None, as far as the logs here tell.")),
        card("Errors", saved("errors"), pairs("Error", "Times", about.errors, "None.")),
        card("Checkpoints", saved("checkpoints"), about.checkpoints.length ? h("p", { class: "plain" }, about.checkpoints.map((round) => `round ${round}`).join(", ")) : h("p", { class: "empty" }, "None on this machine.")),
        card("Hardware", saved("hardware"), pairs("Part", "What it is", about.hardware, "It keeps that to itself.", false))),
      card("What happened to it", csv("api/events", { node: id, limit: 1000 }), table("Events", [
        { title: "When", short: true, cell: (event) => moment(event.timestamp) },
        { title: "What", short: true, cell: (event) => happening(event.event) },
        { title: "Round", number: true, cell: (event) => (event.round === null ? "–" : String(event.round)) },
        { title: "Detail", wide: true, cell: (event) => event.detail },
      ], happened.events)),
      Object.keys(about.settings).length ? h("details", { class: "card", id: "settings", open: open.has("settings") }, h("summary", {}, "Settings"),
        h("div", { class: "head" }, h("span", {}), save(saved("settings"), "settings")), pairs("Setting", "Value", about.settings, "", false)) : "");
  }
  return view;
}
