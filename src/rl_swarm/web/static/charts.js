// Draws curves over rounds, by uPlot.

import uPlot from "./vendor/uPlot.esm.js";
import { h, save } from "./dom.js";

const HEIGHT = 250;
const FEW = 24; // points that are drawn as dots too
const PALETTE = ["--accent", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
const WHOLE = [1, 2, 5].flatMap((step) => Array.from({ length: 13 }, (_, power) => step * 10 ** power)).sort((a, b) => a - b);
const charts = new Set();

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const shown = (value) => (value === null || value === undefined ? "–" : Math.abs(value) >= 1000 ? value.toFixed(0) : value.toPrecision(3));
const short = (tick) => (Math.abs(tick) >= 10000 ? `${+(tick / 1000).toPrecision(4)}k` : String(+tick.toPrecision(6)));

// A chart that is drawn into its own element: `show({rounds, lines: [{name, values}], mean})`. With a mean the lines are
// thin and alike, and the mean is bold; without one they have colours and a legend.
export class Chart {
  constructor(label, { csv = null, height = HEIGHT } = {}) {
    this.label = label;
    this.height = height;
    this.plot = null;
    this.place = h("div", { class: "plot", role: "img", "aria-label": label });
    this.reading = h("p", { class: "reading", "aria-hidden": "true" }, " ");
    this.link = csv ? save(csv, label) : null;
    this.element = h("figure", {}, h("figcaption", { class: "head" }, h("h2", {}, label), this.link), this.reading, this.place);
    new ResizeObserver(() => this.fit()).observe(this.place);
    charts.add(this);
  }

  show(data) {
    this.data = data;
    const rows = [...data.lines.map((line) => line.values), ...(data.mean ? [data.mean] : [])];
    this.place.hidden = !data.rounds.length;
    const names = JSON.stringify([data.lines.map((line) => line.name), !data.mean]);
    if (this.plot && names === this.names) {
      this.plot.setData([data.rounds, ...rows]);
      this.read(this.plot);
    } else this.draw(names, [data.rounds, ...rows]);
    const last = (data.mean ?? rows[0] ?? []).filter((value) => value !== null).at(-1);
    this.place.setAttribute("aria-label", `${this.label}. Lines: ${data.lines.length}, the latest value is ${shown(last)}.`);
  }

  draw(names = this.names, values = this.plot?.data) {
    if (!values) return;
    this.names = names;
    this.plot?.destroy();
    const { lines, mean } = this.data;
    const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const points = { size: 6, show: (plot, k) => plot.data[k].reduce((sum, value) => sum + (value !== null), 0) <= FEW };
    const series = lines.map((line, k) => ({
      label: line.name,
      spanGaps: true,
      width: mean ? 1 : 1.75,
      stroke: mean ? color("--thin") : color(PALETTE[k % PALETTE.length]),
      points: mean ? { show: false } : points,
    }));
    if (mean) series.push({ label: "mean", spanGaps: true, width: 3, stroke: color("--accent"), fill: color("--wash"), points });
    this.plot = new uPlot({
      width: Math.max(200, this.place.clientWidth),
      height: this.height,
      padding: [10, 12, 0, 0],
      legend: { show: false },
      cursor: { drag: { x: true, y: false }, focus: { prox: 24 } },
      focus: { alpha: 0.35 },
      scales: { x: { time: false } },
      axes: [{ ...axis, size: 26, space: 70, incrs: WHOLE }, { ...axis, size: (_, ticks) => 14 + 7 * Math.max(1, ...(ticks ?? []).map((tick) => tick.length)), gap: 4, values: (_, ticks) => ticks.map(short) }],
      series: [{ label: "round" }, ...series],
      hooks: { setCursor: [(plot) => this.read(plot)] },
    }, values, this.place);
    this.read(this.plot);
  }

  // Writes the values under the pointer; else the latest ones.
  read(plot) {
    const at = plot.cursor.idx ?? this.data.rounds.length - 1;
    const { lines, mean, rounds } = this.data;
    const focused = plot.series.findIndex((series, k) => k > 0 && series._focus && plot.cursor.idx !== null);
    const parts = [];
    if (!rounds.length) {
      this.reading.replaceChildren("Nothing yet.");
      return;
    }
    parts.push(h("span", {}, `round ${rounds[at]}`));
    if (mean) {
      parts.push(h("span", { class: "mean" }, `mean ${shown(mean[at])}`));
      const line = lines[focused - 1];
      if (line && focused !== plot.series.length - 1) parts.push(h("span", {}, `${line.name} ${shown(line.values[at])}`));
    } else {
      lines.slice(0, 12).forEach((line, k) => parts.push(h("span", { class: `key k${k % PALETTE.length}` }, `${line.name} ${shown(line.values[at])}`)));
    }
    this.reading.replaceChildren(...parts);
  }

  fit() {
    const width = this.place.clientWidth;
    if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.place.isConnected && chart.draw()));

export function forget() {
  for (const chart of charts) {
    if (chart.place.isConnected) continue;
    chart.plot?.destroy();
    charts.delete(chart);
  }
}
