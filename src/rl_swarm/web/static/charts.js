// Draws curves over rounds, by uPlot: with a legend, smoothing, a logarithmic axis, and a zoom that all charts of a page share.

import uPlot from "./vendor/uPlot.esm.js";
import { axes, roundRange, shown, valueRange } from "./chart_axes.js";
import { COLORS, compacted, drawnOf, entriesOf, limits } from "./chart_entries.js";
import { savePicture } from "./chart_picture.js";
import { chartTools } from "./chart_tools.js";
import { touch } from "./chart_touch.js";
import { h, save } from "./dom.js";
import { Choice, keep, recall } from "./kept.js";
import { WINDOWS } from "./smoothing.js";
import { term } from "./words.js";

const HEIGHT = 250;
const MIN_ROUNDS = 1; // of a zoom
const FEW = 24; // points that are drawn as dots too
const CROSSHAIR = uPlot.sync("page"); // the same in all charts of a page
const ONLY_MOVES = { pub: (type) => type === "mousemove", sub: (type) => type === "mousemove" };
const charts = new Set();
let zoom = null; // [first, last] round that the charts of this page show; null: all

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function zoomTo(range) {
  zoom = range;
  for (const chart of charts) if (chart.place.isConnected) chart.rescale();
}

// A chart that is drawn into its own element by `show({rounds, lines: [{name, node, values, color}], mean, low, median,
// high, nodes, recent})`. Rounds are those that people count. `kind` and `said` are those of metrics.js; `key` names
// the viewer's choices; `after` says that a value was measured after its round; `smoothing` is shared with other charts.
export class Chart {
  constructor(label, { key = label, said = null, kind = "plain", csv = null, height = HEIGHT, window = 1, smoothing = null, after = false } = {}) {
    Object.assign(this, { label, key: `chart.${key}`, kind, height, after, plot: null, data: null, entries: [] });
    this.smoothing = smoothing ?? new Choice(`${this.key}.smoothing`, window, WINDOWS);
    this.smoothing.listeners.add(() => this.data && this.draw());
    this.log = recall(`${this.key}.log`, false) === true;
    this.hidden = recall(`${this.key}.hidden`, {}) ?? {};
    this.place = h("div", { class: "plot", role: "img", tabindex: 0, "aria-label": label, onkeydown: (event) => this.press(event), ondblclick: () => this.reset() });
    this.round = h("span", { class: "at" });
    this.legend = h("p", { class: "reading" }, this.round);
    this.link = csv ? save(csv, label) : null;
    this.tools = chartTools(this, { ownSmoothing: !smoothing, link: this.link });
    this.element = h("figure", { class: "chart" },
      h("figcaption", { class: "head" }, h("h2", {}, said ? term(label, said) : label), this.tools.element),
      h("div", { class: "frame" }, this.place, this.tools.reset), this.legend);
    this.element.chart = this; // for a look from the browser's console
    touch(this.place, () => this.plot, (range) => this.zoomInto(...range));
    new ResizeObserver(() => this.fit()).observe(this.place);
    charts.add(this);
  }

  show(data) {
    this.data = compacted(data);
    this.draw();
  }

  draw() {
    const window = this.smoothing.value;
    this.entries = entriesOf(this.data, window);
    const visible = this.entries.filter((entry) => !this.isHidden(entry));
    this.parts = drawnOf(visible, window);
    const [low] = limits(this.parts);
    const positive = low > 0 && low < Infinity;
    const logarithmic = this.log && positive;
    const values = [this.data.rounds, ...this.parts.map((part) => part.values)];
    const made = JSON.stringify([logarithmic, window, this.parts.map(({ entry, part }) => [entry.key, entry.color, part])]);
    this.place.classList.toggle("empty-plot", !this.data.rounds.length);
    if (this.plot && made === this.made) this.plot.setData(values);
    else this.make(values, logarithmic);
    this.made = made;
    this.list();
    this.tools.update({ zoomed: zoom !== null, logarithmic, positive });
    const main = this.entries.find((entry) => entry.values);
    this.place.setAttribute("aria-label", `${this.label}. Lines: ${this.data.lines.length}, the latest value is ${shown(main?.values.findLast((value) => value !== null), this.kind)}. Arrow keys read the values, plus and minus zoom.`);
  }

  make(values, logarithmic) {
    this.plot?.destroy();
    const points = { size: 6, show: (plot, k) => plot.data[k].reduce((sum, value) => sum + (value !== null), 0) <= FEW };
    const series = this.parts.map(({ entry, part }) => this.series(entry, part, points));
    const high = this.parts.findIndex(({ part }) => part === "high") + 1;
    this.plot = new uPlot({
      width: Math.max(200, this.place.clientWidth),
      height: this.room(),
      padding: [10, 12, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false, setScale: false, dist: 4 }, focus: { prox: this.entries.length > 3 ? 24 : -1 }, sync: { key: CROSSHAIR.key, scales: ["x", null], filters: ONLY_MOVES } },
      focus: { alpha: 0.35 },
      scales: {
        x: { time: false, range: () => roundRange(this.data.rounds, zoom) },
        y: logarithmic ? { distr: 3 } : { range: (_, low, top) => valueRange(this.kind, zoom !== null, low, top) },
      },
      axes: axes(this.kind, color),
      series: [{ label: "round" }, ...series],
      bands: high ? [{ series: [high, high + 1], fill: color("--band") }] : [],
      hooks: { setCursor: [() => this.read()], setSelect: [(plot) => this.select(plot)] },
    }, values, this.place);
  }

  series(entry, part, points) {
    const stroke = color(COLORS[entry.color]);
    const looks = {
      mean: { width: 3, stroke, points },
      median: { width: 1.5, stroke, dash: [6, 4], points: { show: false } },
      line: this.data.mean ? { width: 1, stroke, points: { show: false } } : { width: 2, stroke, points },
      raw: { width: 1, stroke, alpha: 0.35, points: { show: false } },
      high: { width: 0, points: { show: false } },
      low: { width: 0, points: { show: false } },
    };
    return { label: entry.name, spanGaps: true, ...looks[part] };
  }

  isHidden(entry) {
    return this.hidden[entry.key] ?? entry.off ?? false;
  }

  hide(entry) {
    this.hidden = { ...this.hidden, [entry.key]: !this.isHidden(entry) };
    keep(`${this.key}.hidden`, this.hidden);
    this.draw();
  }

  setLog(on) {
    this.log = on;
    keep(`${this.key}.log`, on);
    this.draw();
  }

  // Lists the entries as buttons that switch them on and off; the buttons stay while the same entries are shown.
  list() {
    const listed = JSON.stringify(this.entries.map(({ key, name, color }) => [key, name, color]));
    if (listed !== this.listed) {
      this.listed = listed;
      this.keys = this.entries.map((entry, k) => h("button", { type: "button", class: `key ${entry.role} k${entry.color}`, onclick: () => this.hide(this.entries[k]) }, entry.name, " ", h("span", { class: "value" })));
      this.legend.replaceChildren(this.round, ...this.keys);
    }
    this.keys.forEach((key, k) => key.setAttribute("aria-pressed", String(!this.isHidden(this.entries[k]))));
    this.read();
  }

  // Writes the values at the crosshair; else the latest ones that are in sight.
  read() {
    const { rounds } = this.data;
    const end = zoom ? rounds.findLastIndex((round) => round <= zoom[1]) : rounds.length - 1;
    const pointed = this.plot?.cursor.idx ?? null;
    const at = (values) => values[pointed ?? values.findLastIndex((value, k) => k <= end && value !== null)];
    const ends = new Set(this.entries.map((entry) => (entry.values ?? entry.low).findLastIndex((value) => value !== null)));
    this.round.textContent = !rounds.length ? "Nothing yet: the first round is under way." : pointed === null && ends.size > 1 ? "Latest" : this.roundText(pointed ?? end);
    const near = this.plot?.cursor.idx === null ? null : this.parts[(this.plot?.series.findIndex((series, k) => k > 0 && series._focus) ?? 0) - 1]?.entry;
    this.keys.forEach((key, k) => {
      const entry = this.entries[k];
      const value = entry.role === "band" ? `${shown(at(entry.low), this.kind)} to ${shown(at(entry.high), this.kind)}` : shown(at(entry.values), this.kind);
      key.lastElementChild.textContent = value;
      key.hidden = !rounds.length;
      key.classList.toggle("near", entry === near);
    });
  }

  roundText(at) {
    const { rounds, step } = this.data;
    if (this.after) return rounds[at] === 0 ? "Before training" : `After round ${rounds[at]}`;
    if (step <= 1) return `Round ${rounds[at]}`;
    return at === rounds.length - 1 ? `Since round ${rounds[at]}` : `Rounds ${rounds[at]} to ${rounds[at] + step - 1}`;
  }

  select(plot) {
    const { left, width } = plot.select;
    if (width <= 0) return;
    const [from, to] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.zoomInto(from, to);
  }

  rescale() {
    if (this.data) this.draw();
  }

  reset() {
    if (zoom) zoomTo(null);
  }

  // Zooms around the crosshair, or the middle; what would show more than all shows all.
  scaleBy(factor) {
    const { min, max } = this.plot.scales.x;
    const middle = this.data.rounds[this.plot.cursor.idx ?? -1] ?? (min + max) / 2;
    this.zoomInto(middle - (middle - min) * factor, middle + (max - middle) * factor);
  }

  zoomInto(from, to) {
    const [first, last] = roundRange(this.data.rounds, null);
    const least = Math.max(0, MIN_ROUNDS - (to - from)) / 2;
    const range = [Math.max(first, from - least), Math.min(last, to + least)];
    zoomTo(range[0] <= first && range[1] >= last ? null : range);
  }

  // Moves the crosshair and zooms by keyboard.
  press(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const factor = { "+": 0.5, "-": 2 }[event.key];
    if (event.target !== this.place || !this.plot || !this.data.rounds.length || event.ctrlKey || event.metaKey) return;
    if (event.key === "Escape") this.reset();
    if (factor) this.scaleBy(factor);
    if (!step) return;
    event.preventDefault();
    const { rounds } = this.data;
    const at = Math.min(rounds.length - 1, Math.max(0, (this.plot.cursor.idx ?? rounds.length) + step));
    this.plot.setCursor({ left: this.plot.valToPos(rounds[at], "x"), top: this.plot.height / 2 }, true, true);
  }

  toggleFullScreen() {
    document.fullscreenElement ? document.exitFullscreen() : this.element.requestFullscreen();
  }

  savePicture() {
    const entries = this.entries.filter((entry) => !this.isHidden(entry)).map((entry) => ({ text: entry.name, color: color(entry.role === "band" ? "--band" : COLORS[entry.color]) }));
    savePicture({ title: this.label, plot: this.plot, entries, background: color("--card"), text: color("--text") });
  }

  room() {
    return document.fullscreenElement === this.element ? Math.max(200, this.place.clientHeight) : this.height;
  }

  fit() {
    const [width, height] = [this.place.clientWidth, this.room()];
    if (this.plot && width > 0 && (width !== this.plot.width || height !== this.plot.height)) this.plot.setSize({ width, height });
  }
}

function redrawAll() {
  for (const chart of charts) {
    if (!chart.place.isConnected || !chart.data) continue;
    chart.made = null;
    chart.draw();
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
document.addEventListener("fullscreenchange", () => requestAnimationFrame(() => charts.forEach((chart) => chart.fit())));

// Lets go of the charts of another page, and of its zoom.
export function forget() {
  zoom = null;
  for (const chart of charts) {
    if (chart.place.isConnected) continue;
    chart.plot?.destroy();
    chart.smoothing.listeners.clear();
    charts.delete(chart);
  }
}
