// What peers say now, and what happened to them.

import { csv, get } from "./api.js";
import { card, h, moment, nodeLink, table } from "./dom.js";

const KINDS = ["joined", "joined_late", "resumed", "left", "gone", "came back", "skipped", "rejected", "not_asked", "checkpoint", "finished"];
const PAGE = 50;

export function events() {
  const feed = h("ol", { class: "feed" });
  const happened = h("div");
  const pages = h("div", { class: "pages" });
  const kind = h("select", { id: "kind", onchange: () => { offset = 0; list(); } }, h("option", { value: "" }, "all"), KINDS.map((each) => h("option", { value: each }, each.replaceAll("_", " "))));
  let offset = 0;

  async function list() {
    const page = await get("api/events", { kind: kind.value, offset, limit: PAGE });
    happened.replaceChildren(table("Events", [
      { title: "When", cell: (event) => moment(event.timestamp) },
      { title: "Node", cell: (event) => nodeLink(event.node, event.name) },
      { title: "What", cell: (event) => event.event.replaceAll("_", " ") },
      { title: "Round", number: true, wide: true, cell: (event) => (event.round === null ? "–" : String(event.round)) },
      { title: "Detail", wide: true, cell: (event) => event.detail },
    ], page.events, "Nothing of that kind."));
    const move = (by, label) => h("button", { type: "button", onclick: () => { offset += by; list(); } }, label);
    pages.replaceChildren(...[offset > 0 && move(-PAGE, "Newer"), offset + PAGE < page.total && move(PAGE, "Older")].filter(Boolean));
  }

  async function refresh() {
    const [gossip] = await Promise.all([get("api/gossip", { limit: 12 }), list()]);
    feed.replaceChildren(...gossip.messages.map((each) => h("li", {}, h("span", { class: "note" }, nodeLink(each.nodeId, each.node), " ", moment(each.timestamp)), h("p", {}, each.message))));
    if (!gossip.messages.length) feed.append(h("li", { class: "empty" }, "Nobody has said anything yet."));
  }

  return {
    title: "Feed",
    refresh,
    element: h("div", { class: "stack" },
      card("What they say now", feed),
      card("Events", h("div", { class: "tools" }, h("label", { for: "kind" }, "Kind", kind), h("a", { class: "save", href: csv("api/events", { limit: 1000 }), download: true, "aria-label": "Save the events as CSV" }, "CSV")), happened, pages)),
  };
}
