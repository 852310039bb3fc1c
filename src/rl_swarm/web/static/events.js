// Shows what happens in the swarm as sentences, and the latest answers.

import { csv, get } from "./api.js";
import { nodeChoice } from "./choices.js";
import { shown } from "./code.js";
import { card, h, moment, nodeLink, redraw } from "./dom.js";
import { entry, grouped } from "./happenings.js";
import { box, kindOf, rightOnes, verdictOf } from "./verdict.js";

const KINDS = { joined: "joined", joined_late: "joined late", restarted: "started again", left: "left", offline: "went offline", online: "came online", taught: "taught others", best_score: "best test score", first_solved: "first of its kind solved",
  checkpoint: "saved a checkpoint", finished: "finished", skipped: "skipped rounds", rejected: "refused a rollout", not_asked: "ignored a peer", failed: "failed", pushed: "uploaded its model", push_failed: "upload failed" };
const PAGE = 100;
const MAX = 1000;
const ANSWERS = 8; // questions whose best answers are shown
const READ = 24; // from which these are chosen
const ANSWERS_EVERY = 5000; // milliseconds
const AGE_EVERY = 30_000; // milliseconds after which "just now" is looked at again

function answered(row) {
  const best = row.completions.reduce((one, other) => (other.right > one.right ? other : one));
  return h("li", { class: kindOf(best) },
    h("div", { class: "note" }, h("span", {}, nodeLink(row.node, row.name), ` got ${rightOnes(row) || "none"} of ${row.completions.length} right`, row.task ? [" on ", h("a", { href: `#/rollouts?task=${encodeURIComponent(row.task)}` }, row.task)] : "", "."), moment(row.timestamp)),
    h("p", { class: "asked" }, row.question.replace(/\s+/g, " ")),
    h("div", { class: "said" }, box(best), h("span", { class: "hidden" }, `${verdictOf(best)}: `), best.text ? shown(best.text) : h("pre", {}, "(nothing)")),
    kindOf(best) !== "right" && row.answer !== null && !row.tests.length ? h("p", { class: "rightly" }, "Right would be: ", h("strong", {}, row.answer)) : null);
}

// Chooses rows of different nodes in turn.
function mixed(rows, count) {
  const seen = new Map();
  const turn = (row) => seen.set(row.node, (seen.get(row.node) ?? 0) + 1).get(row.node);
  return rows.map((row) => [turn(row), row]).sort(([one], [other]) => one - other).slice(0, count).map(([, row]) => row);
}

export function events() {
  const feed = h("ol", { class: "feed" }, h("li", { class: "empty" }, "Reading …"));
  const happened = h("div", { class: "happened" }, h("p", { class: "empty" }, "Reading …"));
  const kind = h("select", { id: "kind", onchange: () => list(PAGE) }, h("option", { value: "" }, "all"), Object.entries(KINDS).map(([value, label]) => h("option", { value }, label)));
  const node = h("select", { id: "node", onchange: () => list(PAGE) }, h("option", { value: "" }, "all"));
  const older = h("button", { type: "button", hidden: true, onclick: () => list(limit + PAGE) }, "Older");
  const choices = nodeChoice(node, "");
  const open = new Set(); // entries of the feed that a user has unfolded
  let limit = PAGE;
  let page = { events: [], total: 0 };
  let readAt = -Infinity; // when the answers were read
  let later = null;

  async function list(most = limit) {
    limit = most;
    const asked = { kind: kind.value, node: node.value };
    const found = await get("api/events", { ...asked, limit });
    if (asked.kind !== kind.value || asked.node !== node.value) return;
    page = found;
    older.hidden = page.total <= page.events.length || limit >= MAX;
    save.href = csv("api/events", { ...asked, limit: MAX });
    draw();
  }

  function draw() {
    const groups = grouped(page.events, Date.now() / 1000);
    redraw(happened, ...groups.map(([heading, entries]) => h("section", { "aria-label": heading }, h("h3", {}, heading), h("ol", {}, entries.map((each) => entry(each, open))))));
    if (!groups.length) happened.append(h("p", { class: "empty" }, kind.value || node.value ? "Nothing of that kind." : "Nothing has happened yet."));
  }

  async function answers() {
    clearTimeout(later);
    const wait = readAt + ANSWERS_EVERY - Date.now();
    if (wait > 0) {
      later = setTimeout(() => feed.isConnected && answers().catch(() => {}), wait);
      return;
    }
    const { rollouts } = await get("api/rollouts", { order: "newest", limit: READ });
    readAt = rollouts.length ? Date.now() : -Infinity; // the first ones are shown at once
    redraw(feed, ...mixed(rollouts, ANSWERS).map(answered));
    if (!rollouts.length) feed.append(h("li", { class: "empty" }, "No answers yet."));
  }

  async function refresh() {
    const about = await get("api/overview");
    await Promise.all([list(), answers(), choices(about.nodes)]);
  }

  const aging = setInterval(() => (happened.isConnected ? draw() : clearInterval(aging)), AGE_EVERY);
  const element = h("div", { class: "feeds" },
    card("Events", csv("api/events", { limit: MAX }), h("div", { class: "tools" }, h("label", { for: "kind" }, "Kind", kind), h("label", { for: "node" }, "Node", node)), happened, h("div", { class: "pages" }, older)),
    card("Latest answers", null, feed));
  const save = element.querySelector(".save");
  return { title: "Feed", refresh, element };
}
