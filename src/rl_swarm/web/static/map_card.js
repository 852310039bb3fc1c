// Says on a small card what a node of the map does, and who taught whom.

import { h, score } from "./dom.js";

const SHOWN = 4; // neighbours of each kind

const SAID = { "": "phase not known", offline: "offline", finished: "finished" };

function list(title, neighbours, nodes, unit) {
  const rest = neighbours.length - SHOWN;
  return h("div", {}, h("h3", {}, h("span", {}, title), h("span", {}, neighbours.length ? unit : "")),
    neighbours.length ? h("ul", {}, neighbours.slice(0, SHOWN).map(([other, groups]) => h("li", {}, h("span", {}, nodes[other].name), h("b", {}, String(groups)))),
      rest > 0 ? h("li", { class: "note" }, `and ${rest} more`) : null) : h("p", { class: "note" }, "nobody"));
}

// `when` is {title, live, span}: the title of the rounds that are shown.
export function card(node, around, nodes, when) {
  const unit = node.hasLog ? "groups" : "votes";
  return [
    h("p", { class: "map-name" }, h("strong", {}, node.name), when.live ? h("span", { class: "pill" }, SAID[node.phase] ?? node.phase) : null),
    h("p", { class: "plain" }, `Score ${score(node.shown)}`, when.live ? ` · votes: ${node.wins}` : ""),
    h("p", { class: "note" }, when.title),
    list(node.hasLog ? "Learned from" : "Found best", around.from, nodes, unit),
    list(node.hasLog ? "Taught" : "Found best by", around.to, nodes, unit),
    h("a", { href: `#/node/${encodeURIComponent(node.id)}`, tabindex: "-1" }, "Open its page"),
  ];
}

// The same in a sentence, for those who hear it.
export function sentence(node, around, nodes, when) {
  const named = (neighbours) => neighbours.slice(0, SHOWN).map(([other, groups]) => `${nodes[other].name} ${groups}`).join(", ") || "nobody";
  const [from, to] = node.hasLog ? ["learned groups from", "taught groups to"] : ["found best", "was found best by"];
  return `${node.name}: score ${score(node.shown)}${when.live ? `, ${SAID[node.phase] ?? node.phase}` : ""}. ${when.title}: ${from} ${named(around.from)}; ${to} ${named(around.to)}.`;
}
