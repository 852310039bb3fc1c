// Draws a curve as small as a word.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 72;
const HEIGHT = 26;
const EDGE = 2;

// Values are drawn from 0, or the least of them, to 1, or the greatest, so that rows can be compared.
export function sparkline(values) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [name, value] of Object.entries({ class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" })) svg.setAttribute(name, value);
  const known = values.filter((value) => value !== null);
  if (!known.length) return svg;
  const low = Math.min(0, ...known);
  const high = Math.max(1, ...known);
  const place = (value, k) => [
    EDGE + (k / Math.max(values.length - 1, 1)) * (WIDTH - 2 * EDGE),
    HEIGHT - EDGE - ((value - low) / (high - low)) * (HEIGHT - 2 * EDGE),
  ];
  const points = values.map((value, k) => (value === null ? null : place(value, k))).filter(Boolean);
  const line = document.createElementNS(SVG, "path");
  line.setAttribute("d", points.map(([x, y], k) => `${k ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join(""));
  const last = document.createElementNS(SVG, "circle");
  for (const [name, value] of Object.entries({ cx: points.at(-1)[0].toFixed(1), cy: points.at(-1)[1].toFixed(1), r: 1.8 })) last.setAttribute(name, value);
  svg.append(line, last);
  return svg;
}
