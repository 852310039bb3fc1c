// Shows the nodes as a table that can be sorted by every column.

import { csv, get } from "./api.js";
import { shown } from "./chart_axes.js";
import { card, h, life, nodeLink, percent, score, signed } from "./dom.js";
import { LongTable } from "./long_table.js";
import { pins } from "./pins.js";
import { sparkline } from "./sparkline.js";
import { why } from "./words.js";

const ROW = 44; // pixels, as in style.css
const SHORT = 600; // milliseconds that typing may pause
const arrow = (change) => (change > 0.005 ? "▲" : change < -0.005 ? "▼" : "•");
let sort = { column: "held_out_now", descending: true }; // as it was left

const trend = (row) => (row.trend === null ? "–"
  : h("span", { class: row.trend > 0.005 ? "up" : row.trend < -0.005 ? "down" : null }, `${arrow(row.trend)} ${signed(row.trend)}`));

const pin = (row) => h("button", { type: "button", class: "pin", "aria-pressed": String(row.pinned), "aria-label": `Pin ${row.name} (${row.node.slice(-6)})`,
  title: row.pinned ? "Pinned to the top" : "Pin to the top", onclick: () => pins.toggle(row.node) }, h("i", { "aria-hidden": "true" }));

const COLUMNS = [
  { said: "Pinned", name: "pins", cell: pin },
  { title: "#", said: "Rank", key: "rank", number: true, ascending: true, name: "rank", cell: (row) => String(row.rank) },
  { title: "Node", name: "node", key: "name", ascending: true, cell: (row) => h("span", { class: "who" }, life(row.alive), nodeLink(row.node, row.name), row.role ? h("span", { class: "note" }, row.role) : null) },
  { title: "Test score", name: "test", key: "held_out_now", number: true, why: why("Test score"), cell: (row) => (row.held_out_now === null ? "–"
    : [row.held_out_start === null ? null : h("span", { class: "before wide" }, `${shown(row.held_out_start, "share")} → `), h("strong", {}, shown(row.held_out_now, "share"))].filter(Boolean)) },
  { title: "Reward", name: "rewards", key: "reward", number: true, why: why("Reward"), cell: (row) => h("span", { class: "sparked" }, sparkline(row.spark), h("span", {}, score(row.reward))) },
  { title: "Trend", name: "trend", key: "trend", number: true, wide: true, why: why("Trend"), cell: trend },
  { title: "Total reward", name: "total", key: "total_reward", number: true, wide: true, why: why("Total reward"), cell: (row) => row.total_reward.toFixed(1) },
  { title: "Votes", name: "votes", key: "wins", number: true, wide: true, why: why("Votes"), cell: (row) => String(row.wins) },
  { title: "From peers", name: "from", key: "external_share", number: true, wide: true, why: why("From peers"), cell: (row) => percent(row.external_share) },
  { title: "Rounds", name: "rounds", key: "participation", number: true, wide: true, why: why("Rounds"), cell: (row) => String(row.participation) },
  { title: "Model", name: "model", key: "model", ascending: true, wide: true, short: true, cell: (row) => h("span", { title: row.model }, row.model) },
];

export function leaderboard() {
  const search = h("input", { type: "search", placeholder: "Name, peer id or model", "aria-label": "Search the leaderboard", maxlength: 100, oninput: () => {
    clearTimeout(typing);
    typing = setTimeout(() => again(true), SHORT / 4);
  } });
  const found = h("span", { class: "note", role: "status" });
  let typing = null;

  const asked = () => ({ search: search.value, sort: sort.column, descending: sort.descending });
  async function load(offset, limit) {
    const pinned = pins.all();
    const page = await get("api/nodes", { ...asked(), first: pinned, offset, limit });
    found.textContent = search.value ? `${page.total.toLocaleString("en")} found` : page.total > 20 ? `${page.total.toLocaleString("en")} nodes` : "";
    return { total: page.total, rows: page.nodes.map((row) => ({ ...row, pinned: pinned.includes(row.node) })) };
  }

  const long = new LongTable({
    caption: "Leaderboard", columns: COLUMNS, rowHeight: ROW, load, sort,
    onsort: (chosen) => { sort = chosen; link(); },
    empty: () => (search.value ? "No node matches." : "No node has joined yet."),
  });

  const element = card("Leaderboard", csv("api/nodes", asked()), long.element);
  const saved = element.querySelector(".save");
  const link = () => { saved.href = csv("api/nodes", asked()); };
  const again = (anew) => {
    link();
    return long.refresh(anew);
  };
  const stop = pins.onchange(() => (element.isConnected ? again(false).catch(() => {}) : stop()));
  saved.before(found, search);
  element.classList.add("board");
  showTips(element);
  return { element, refresh: () => again(false) };
}

// The table scrolls, so an explanation would be cut off at its edge: it is placed on the window instead.
function showTips(element) {
  const place = (event) => {
    const button = event.target.closest?.(".why");
    if (!button) return;
    const { left, bottom, width } = button.getBoundingClientRect();
    const tip = button.querySelector(".tip");
    tip.style.top = `${bottom + 6}px`;
    tip.style.left = `${Math.min(Math.max(left + width / 2, 170), innerWidth - 170)}px`;
  };
  element.addEventListener("pointerover", place);
  element.addEventListener("focusin", place);
}
