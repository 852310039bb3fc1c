// Draws changes with their intervals, one below the other, around a line at zero. The same figures stand beside them.

import { h } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const FARTHEST = 3; // +300 %: what lies beyond is cut in the drawing, not in the figures
const STEPS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1];
const MAX_TICKS = 6;

// A share as a signed percentage; small ones with a digit, so that what is clearly above 0 is not shown as 0.
export function signedPercent(share) {
  const text = Math.abs(100 * share).toFixed(Math.abs(share) < 0.095 ? 1 : 0);
  return Number(text) === 0 ? "0" : `${share < 0 ? "−" : "+"}${text}`;
}

export const inWords = ({ mean, low, high }) => `${signedPercent(mean)} % (${signedPercent(low)} to ${signedPercent(high)})`;
const verdict = ({ low, high }) => (low > 0 ? "more" : high < 0 ? "less" : "unclear");

function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// The limits of the drawing and its ticks: zero is always inside.
export function scaleOf(changes) {
  const bounded = (value) => Math.min(FARTHEST, Math.max(-1, value));
  const low = Math.min(0, ...changes.map((change) => bounded(change.low)));
  const high = Math.max(0, ...changes.map((change) => bounded(change.high)));
  const step = STEPS.find((each) => (high - low) / each <= MAX_TICKS) ?? STEPS.at(-1);
  const [first, last] = [Math.floor(low / step - 0.2), Math.ceil(high / step + 0.2)];
  const ticks = Array.from({ length: last - first + 1 }, (_, k) => (first + k) * step);
  const place = (value) => `${(100 * (Math.min(last, Math.max(first, value / step)) - first)) / (last - first)}%`;
  return { ticks, place };
}

function drawing(scale, change) {
  const svg = shape("svg", { width: "100%", height: 30, "aria-hidden": "true", class: `interval-drawing ${change ? verdict(change) : ""}` });
  scale.ticks.forEach((tick) => svg.append(shape("line", { x1: scale.place(tick), x2: scale.place(tick), y1: 0, y2: 30, class: tick === 0 ? "zero" : "tick" })));
  if (!change) return svg;
  svg.append(shape("line", { x1: scale.place(change.low), x2: scale.place(change.high), y1: 15, y2: 15, class: "whisker" }));
  for (const end of [change.low, change.high]) svg.append(shape("line", { x1: scale.place(end), x2: scale.place(end), y1: 10, y2: 20, class: "whisker" }));
  svg.append(shape("circle", { cx: scale.place(change.mean), cy: 15, r: 5 }));
  return svg;
}

function ticksRow(scale) {
  const svg = shape("svg", { width: "100%", height: 18, "aria-hidden": "true", class: "interval-drawing" });
  scale.ticks.slice(1, -1).forEach((tick) => {
    const text = shape("text", { x: scale.place(tick), y: 13, "text-anchor": "middle" });
    text.textContent = tick === 0 ? "0" : `${signedPercent(tick).replace(".0", "")} %`;
    svg.append(text);
  });
  return svg;
}

// groups: [{title, rows: [{label, change}]}], with changes as shares {mean, low, high}.
export function forestPlot(caption, groups) {
  const known = groups.map(({ title, rows }) => ({ title, rows: rows.filter((row) => row.change) })).filter(({ rows }) => rows.length);
  if (!known.length) return h("p", { class: "empty" }, "There is nothing to compare yet.");
  const scale = scaleOf(known.flatMap(({ rows }) => rows.map((row) => row.change)));
  return h("table", { class: "forest" },
    h("caption", { class: "hidden" }, caption),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Way of training"), h("th", { scope: "col", class: "drawn" }, h("span", { class: "hidden" }, "Drawing")), h("th", { scope: "col", class: "number" }, "Change (95 % interval)"))),
    known.map(({ title, rows }) => h("tbody", {},
      h("tr", {}, h("th", { scope: "rowgroup", colspan: 3, class: "group" }, title)),
      rows.map((row) => h("tr", {}, h("th", { scope: "row" }, row.label), h("td", { class: "drawn" }, drawing(scale, row.change)),
        h("td", { class: `number ${verdict(row.change)}` }, inWords(row.change)))))),
    h("tfoot", { "aria-hidden": "true" }, h("tr", {}, h("td"), h("td", { class: "drawn" }, ticksRow(scale)), h("td"))));
}
