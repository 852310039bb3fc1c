// The axes of a chart: whole rounds below, and limits that suit what is measured.

import uPlot from "./vendor/uPlot.esm.js";

const WHOLE = [1, 2, 5].flatMap((step) => Array.from({ length: 13 }, (_, power) => step * 10 ** power)).sort((a, b) => a - b);
const ROOM = 1.03; // above the highest value
const TOPS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1];

const short = (tick) => (Math.abs(tick) >= 10000 ? `${+(tick / 1000).toPrecision(4)}k` : String(+tick.toPrecision(6)));
const ticked = (kind) => (tick) => (tick === null ? "" : kind === "share" ? `${+(100 * tick).toPrecision(4)} %` : short(tick));

export function shown(value, kind = "plain") {
  if (value === null || value === undefined) return "–";
  if (kind === "share") return `${(100 * value).toFixed(1)} %`;
  if (kind === "reward") return value.toFixed(3);
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3));
}

// From 0 to a round number, for what lies between 0 and 1. A part that was zoomed into fills the height.
export function valueRange(kind, zoomed, low, high) {
  if (low === null || high === null || (low === 0 && high === 0)) return [0, 1];
  if (kind !== "plain" && !zoomed && low >= 0 && high <= 1) return [0, TOPS.find((top) => top >= ROOM * high) ?? 1];
  const [bottom, top] = uPlot.rangeNum(low, high, 0.1, true);
  return kind !== "plain" && low >= 0 ? [Math.max(0, bottom), top] : [bottom, top];
}

export function roundRange(rounds, zoom) {
  if (zoom) return zoom;
  if (!rounds.length) return [0, 1];
  return [rounds[0], Math.max(rounds[0] + 1, rounds.at(-1))];
}

export function axes(kind, color) {
  const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
  const values = (_, ticks) => ticks.map(ticked(kind));
  const size = (_, ticks) => 14 + 7 * Math.max(1, ...(ticks ?? []).map((tick) => tick.length));
  return [{ ...axis, size: 24, space: 70, incrs: WHOLE, label: "round", labelFont: axis.font, labelSize: 18, labelGap: -2 }, { ...axis, size, space: 40, gap: 4, values }];
}
