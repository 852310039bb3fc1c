// Shows the nodes as a table, best first.

import { csv, get } from "./api.js";
import { card, h, life, nodeLink, percent, redraw, score, signed, table } from "./dom.js";

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

export function leaderboard() {
  const leaders = h("div");
  const more = h("div", { class: "pages" });
  const search = h("input", { type: "search", placeholder: "Name, peer id or model", "aria-label": "Search the leaderboard", maxlength: 100, oninput: () => { offset = 0; refresh(); } });
  let offset = 0;

  async function refresh() {
    const wanted = search.value;
    const page = await get("api/nodes", { search: wanted, offset, limit: PAGE });
    if (wanted !== search.value) return;
    redraw(leaders, table("Leaderboard", COLUMNS, page.nodes, wanted ? "No node matches." : "No node has joined yet."));
    const move = (by, label) => h("button", { type: "button", onclick: () => { offset += by; refresh(); } }, label);
    more.replaceChildren(...[offset > 0 && move(-PAGE, "Higher ranks"), offset + PAGE < page.total && move(PAGE, "Lower ranks")].filter(Boolean));
  }

  const element = card("Leaderboard", csv("api/nodes", { limit: 1000 }), leaders, more);
  element.querySelector(".head").insertBefore(search, element.querySelector(".save"));
  return { element, refresh };
}
