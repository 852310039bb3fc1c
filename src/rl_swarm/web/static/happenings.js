// Puts events into sentences, folds those that repeat each other, and groups them by time.

import { h, nodeLink } from "./dom.js";

const SERIES = ["taught", "best_score"]; // events of a node that continue each other although their words differ
const WITH_DETAIL = ["rejected"];
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });

function at(timestamp) {
  const date = new Date(timestamp * 1000);
  if (Number.isNaN(date.getTime())) return h("span", { class: "note" }, "–");
  return h("time", { datetime: date.toISOString(), title: date.toString() }, clock(timestamp));
}

// The heading of the group that an event belongs to.
export function when(timestamp, now) {
  const minutes = Math.floor((now - timestamp) / 60);
  if (minutes < 1) return "Just now";
  if (minutes < 60) return minutes < 5 ? "A few minutes ago" : `${minutes - (minutes % 5)} minutes ago`;
  const [date, today] = [timestamp, now].map((seconds) => new Date(seconds * 1000));
  if (Number.isNaN(date.getTime())) return "At an unknown time";
  if (date.toDateString() === today.toDateString()) return `Today, ${String(date.getHours()).padStart(2, "0")}:00 to ${String(date.getHours()).padStart(2, "0")}:59`;
  return date.toLocaleDateString([], { weekday: "long", day: "numeric", month: "long", year: "numeric" });
}

// Returns groups of [heading, entries]; an entry is {key, events} of events that say the same, the newest first.
export function grouped(events, now) {
  const groups = new Map();
  for (const event of events) {
    const heading = when(event.timestamp, now);
    if (!groups.has(heading)) groups.set(heading, new Map());
    const entries = groups.get(heading);
    const key = SERIES.includes(event.event) ? `${event.event} ${event.node}` : [event.event, event.said, event.about_name, event.rest].join(" ");
    if (!entries.has(key)) entries.set(key, { key: `${heading} ${key}`, events: [] });
    entries.get(key).events.push(event);
  }
  return [...groups].map(([heading, entries]) => [heading, [...entries.values()]]);
}

const rest = (event) => [` ${event.said}`, event.about_name ? [" ", nodeLink(event.about, event.about_name)] : "", event.rest].flat();
const dot = (text) => (/[.!?]$/.test(text) ? "" : ".");

const alone = (event) => h("span", {}, nodeLink(event.node, event.name), rest(event), dot(event.rest || event.said));

// One sentence for all events of an entry.
function together(events) {
  const [latest] = events;
  const nodes = new Map(events.map((event) => [event.node, event.name]));
  if (SERIES.includes(latest.event)) return h("span", {}, nodeLink(latest.node, latest.name), rest(latest), `, and ${events.length === 2 ? "once" : `${events.length - 1} times`} before.`);
  const links = [...nodes].map(([node, name]) => nodeLink(node, name));
  const who = nodes.size === 1 ? links : nodes.size === 2 ? [links[0], " and ", links[1]] : [h("strong", {}, `${nodes.size} nodes`)];
  const times = events.length === nodes.size ? "" : `, ${events.length} times since ${clock(events.at(-1).timestamp)}`;
  return h("span", {}, who, rest(latest), times, times ? "." : dot(latest.rest || latest.said));
}

const mark = (event) => h("i", { class: `what ${event.event.replaceAll(/[^a-z]/g, "-")}`, "aria-hidden": "true" });

const detail = (event) => (WITH_DETAIL.includes(event.event) || (event.detail && event.said === event.event.replaceAll("_", " ")) ? h("span", { class: "note" }, event.detail) : null);

// A line of the feed. `open` holds the keys of the entries whose events are shown one by one.
export function entry({ key, events }, open) {
  const [latest] = events;
  if (events.length === 1) return h("li", {}, mark(latest), h("div", {}, alone(latest), detail(latest)), at(latest.timestamp));
  const each = h("ol", { class: "each" });
  const sentence = together(events);
  const button = h("button", { type: "button", class: "count", "aria-label": `Each of these events: ${sentence.textContent.slice(0, 80)}`, onclick: () => {
    open.has(key) ? open.delete(key) : open.add(key);
    show();
  } }, String(events.length));
  const show = () => {
    button.setAttribute("aria-expanded", String(open.has(key)));
    each.replaceChildren(...(open.has(key) ? events.map((event) => h("li", {}, h("div", {}, alone(event), detail(event)), at(event.timestamp))) : []));
  };
  show();
  return h("li", {}, mark(latest), h("div", {}, sentence, button, each), at(latest.timestamp));
}
