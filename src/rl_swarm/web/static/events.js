// Shows events, and the latest completions of all nodes.

import { csv, get } from "./api.js";
import { card, h, eventLabel, moment, nodeLink, redraw, roundNumber, score, table } from "./dom.js";

const KINDS = ["joined", "joined_late", "restarted", "left", "offline", "online", "skipped", "rejected", "not_asked", "failed", "checkpoint", "finished"];
const PAGE = 50;

export function events() {
  const feed = h("ol", { class: "feed" }, h("li", { class: "empty" }, "Reading …"));
  const happened = h("div", {}, h("p", { class: "empty" }, "Reading …"));
  const pages = h("div", { class: "pages" });
  const kind = h("select", { id: "kind", onchange: () => { offset = 0; list(); } }, h("option", { value: "" }, "all"), KINDS.map((each) => h("option", { value: each }, each.replaceAll("_", " "))));
  let offset = 0;

  async function list() {
    const page = await get("api/events", { kind: kind.value, offset, limit: PAGE });
    redraw(happened, table("Events", [
      { title: "When", short: true, cell: (event) => moment(event.timestamp) },
      { title: "Node", cell: (event) => nodeLink(event.node, event.name) },
      { title: "Event", short: true, cell: (event) => eventLabel(event.event) },
      { title: "Round", number: true, wide: true, cell: (event) => (event.round === null ? "–" : String(roundNumber(event.round))) },
      { title: "Detail", wide: true, cell: (event) => event.detail },
    ], page.events, "No events of that kind."));
    const move = (by, label) => h("button", { type: "button", onclick: () => { offset += by; list(); } }, label);
    pages.replaceChildren(...[offset > 0 && move(-PAGE, "Newer"), offset + PAGE < page.total && move(PAGE, "Older")].filter(Boolean));
  }

  async function refresh() {
    const [gossip] = await Promise.all([get("api/gossip", { limit: 12 }), list()]);
    redraw(feed, ...gossip.messages.map((each) => h("li", { class: each.reward > 0 ? "good" : "" },
      h("p", { class: "note" }, nodeLink(each.nodeId, each.node), " ", moment(each.timestamp), h("span", { class: "mean" }, score(each.reward))),
      h("p", {}, each.question), h("pre", {}, each.answer || "(nothing)"))));
    if (!gossip.messages.length) feed.append(h("li", { class: "empty" }, "No completions yet."));
  }

  return {
    title: "Feed",
    refresh,
    element: h("div", { class: "feeds" },
      card("Events", csv("api/events", { limit: 1000 }), h("div", { class: "tools" }, h("label", { for: "kind" }, "Kind", kind)), happened, pages),
      card("Latest completions", null, feed)),
  };
}
