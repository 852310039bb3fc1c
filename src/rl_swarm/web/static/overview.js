// Shows the swarm at a glance, and its leaderboard.

import { csv, get } from "./api.js";
import { Chart } from "./charts.js";
import { card, count, duration, fact, h, life, nodeLink, percent, redraw, score, signed, table } from "./dom.js";

const ENDS = { interval: "by the clock", everyone: "when all have reported", deadline: "when all have reported", lockstep: "all nodes in lock-step" };

const PAGE = 50;
const arrow = (change) => (change > 0.005 ? "▲" : change < -0.005 ? "▼" : "•");

const COLUMNS = [
  { title: "Rank", number: true, cell: (row) => String(row.rank) },
  { title: "Node", cell: (row) => h("span", { class: "who" }, life(row.alive), nodeLink(row.node, row.name), row.role ? h("span", { class: "note" }, row.role) : null) },
  { title: "Model", wide: true, short: true, cell: (row) => row.model },
  { title: "Rounds", number: true, wide: true, cell: (row) => String(row.participation) },
  { title: "Reward", number: true, cell: (row) => score(row.reward) },
  { title: "Trend", number: true, cell: (row) => (row.trend === null ? "–" : h("span", { class: row.trend > 0.005 ? "up" : row.trend < -0.005 ? "down" : "" }, `${arrow(row.trend)} ${signed(row.trend)}`)) },
  { title: "Wins", number: true, cell: (row) => String(row.wins) },
  { title: "Held-out", number: true, wide: true, cell: (row) => (row.held_out_now === null ? "–" : `${score(row.held_out_start)} → ${score(row.held_out_now)}`) },
  { title: "External", number: true, wide: true, cell: (row) => percent(row.external_share) },
];

export function overview() {
  const facts = h("dl", { class: "facts" });
  const progress = h("progress", { max: 1, value: 0, "aria-label": "Rounds played" });
  const reward = new Chart("Reward: every node, and their mean", { csv: csv("api/curves", { metric: "reward_local", points: 1000, limit: 200 }) });
  const heldOut = new Chart("Held-out score", { csv: csv("api/curves", { metric: "held_out", limit: 200 }) });
  const leaders = h("div");
  const more = h("div", { class: "pages" });
  const search = h("input", { type: "search", placeholder: "Name, peer id or model", "aria-label": "Search the leaderboard", maxlength: 100, oninput: () => { offset = 0; rank(); } });
  let offset = 0;

  async function rank() {
    const wanted = search.value;
    const page = await get("api/nodes", { search: wanted, offset, limit: PAGE });
    if (wanted !== search.value) return;
    redraw(leaders, table("Leaderboard", COLUMNS, page.nodes, wanted ? "No node matches." : "No node has joined yet."));
    const move = (by, label) => h("button", { type: "button", onclick: () => { offset += by; rank(); } }, label);
    more.replaceChildren(...[offset > 0 && move(-PAGE, "Higher ranks"), offset + PAGE < page.total && move(PAGE, "Lower ranks")].filter(Boolean));
  }

  async function refresh() {
    const [about, rewards, scores] = await Promise.all([get("api/overview"), get("api/curves", { metric: "reward_local" }), get("api/curves", { metric: "held_out" }), rank()]);
    const played = about.phase === "finished" ? about.rounds : about.round;
    progress.max = about.rounds || 1;
    progress.value = played;
    facts.replaceChildren(
      fact("Round", `${played} of ${about.rounds}`, about.stages > 1 ? `stage ${about.stage + 1} of ${about.stages}` : "one stage each"),
      fact("Next round in", about.phase === "running" ? duration(about.seconds_to_next) : "–", about.phase === "running" ? ENDS[about.round_end] ?? "" : about.phase),
      fact("Nodes", `${about.alive} of ${about.nodes}`, "online"),
      fact("Models", about.models.join(", ") || "–", "trained by the nodes"),
      fact("Tasks", String(about.tasks.length), "in the task list"),
      fact("Reward", score(about.reward), about.stages > 1 ? `by stage ${about.reward_by_stage.map(score).join(", ")}` : "last 20 rounds"),
      fact("Held-out score", score(about.held_out_now), about.held_out_start === null ? null : `from ${score(about.held_out_start)}; ${about.held_out_protocol}`),
      fact("External groups", percent(about.external_share), "of the groups trained on"),
      fact("Tokens", count(about.tokens), `${count(about.tokens_per_second)} per second`),
      fact("Rollouts", count(about.rollouts), "questions answered"),
    );
    reward.show(rewards);
    heldOut.show(scores);
    note.hidden = about.has_logs || !about.nodes;
    unreadable.hidden = !about.unreadable_lines;
    unreadable.textContent = `${count(about.unreadable_lines)} ${about.unreadable_lines === 1 ? "line" : "lines"} of the nodes' logs cannot be read: the curves may have gaps.`;
  }

  const board = card("Leaderboard", csv("api/nodes", { limit: 1000 }), leaders, more);
  board.querySelector(".head").insertBefore(search, board.querySelector(".save"));
  const note = h("p", { class: "note", hidden: true }, "The nodes' logs cannot be read from here: this page shows what the nodes report.");
  const unreadable = h("p", { class: "note", role: "status", hidden: true });
  return {
    title: "Overview",
    refresh,
    element: h("div", { class: "stack" },
      h("section", { class: "card", "aria-label": "Status" }, progress, facts, note, unreadable),
      h("div", { class: "main-charts" },
        h("section", { class: "card", "aria-label": "Reward" }, reward.element),
        h("section", { class: "card", "aria-label": "Held-out score" }, heldOut.element)),
      board),
  };
}
