// Turns curves into the entries of a legend, and those into what is drawn.

import { trailingMean } from "./smoothing.js";

export const RECENT = 20; // rounds that the tiles of the page average
export const COLORS = ["--accent", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8", "--c9", "--c10", "--c11", "--c12"];
const MIN_FOR_BAND = 3; // nodes: of two, both lines are seen

const present = (value) => value !== null && value !== undefined;
const lastOf = (values) => values.findLastIndex(present);

// Leaves out rounds without any value: held-out scores are taken now and then.
export function compacted({ rounds, ...data }) {
  const rows = [data.mean, data.low, data.median, data.high, ...data.lines.map((line) => line.values)].filter((row) => row?.length);
  const kept = rounds.map((_, k) => k).filter((k) => rows.some((row) => present(row[k])));
  const only = (values) => (values?.length ? kept.map((k) => values[k] ?? null) : null);
  const lines = data.lines.map((line) => ({ ...line, values: only(line.values) ?? kept.map(() => null) }));
  const step = rounds.length > 1 ? rounds[1] - rounds[0] : 1; // rounds that a point stands for
  return { ...data, step, rounds: only(rounds) ?? [], lines, mean: only(data.mean), low: only(data.low), median: only(data.median), high: only(data.high) };
}

// The entries {key, name, color, values, raw, low, high, role, off}: `off` ones are hidden until they are asked for.
export function entriesOf(data, window) {
  const smooth = (values) => trailingMean(data.rounds, values, window);
  const entries = [];
  if (data.mean) {
    const values = smooth(data.mean).slice();
    if (window === RECENT && present(data.recent) && lastOf(values) >= 0) values[lastOf(values)] = data.recent; // a node may be a round behind
    entries.push({ key: "mean", role: "mean", name: data.nodes > 1 ? "Mean of all nodes" : "Mean", color: 0, values, raw: data.mean });
  }
  if (data.low && data.high && data.nodes >= MIN_FOR_BAND) {
    entries.push({ key: "band", role: "band", name: "10th–90th percentile of all nodes", color: 0, low: smooth(data.low), high: smooth(data.high) });
    entries.push({ key: "median", role: "median", name: "Median", color: 2, values: smooth(data.median), off: true });
  }
  data.lines.forEach((line, k) => entries.push({
    key: `line ${line.node ?? line.name}`,
    role: "line",
    name: line.name,
    color: (line.color ?? k + (data.mean ? 1 : 0)) % COLORS.length,
    values: smooth(line.values),
    raw: data.mean ? null : line.values,
  }));
  return entries;
}

const ORDER = ["high", "low", "raw", "line", "median", "mean"]; // the last are drawn above the others

// What is drawn of the visible entries: {entry, part, values}.
export function drawnOf(entries, window) {
  const parts = [];
  for (const entry of entries) {
    if (entry.role === "band") parts.push({ entry, part: "high", values: entry.high }, { entry, part: "low", values: entry.low });
    else parts.push({ entry, part: entry.role, values: entry.values });
    if (entry.raw && window > 1) parts.push({ entry, part: "raw", values: entry.raw });
  }
  return parts.sort((one, other) => ORDER.indexOf(one.part) - ORDER.indexOf(other.part));
}

// The limits of all that is drawn.
export function limits(parts) {
  const known = parts.flatMap(({ values }) => values.filter(present));
  return known.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}
