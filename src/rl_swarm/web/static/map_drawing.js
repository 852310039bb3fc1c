// Draws the map on two canvases: one with nodes, redrawn when they change, and above it one with what moves.

import { PHASES } from "./map_model.js";

// Low scores fade into the page, high ones stand out. Lightness alone tells the order, so that colour-blind people read it.
const RAMPS = {
  light: ["#f2e6bf", "#b5d9a8", "#58aea3", "#1f7390", "#2b2f73"],
  dark: ["#3a4186", "#2c7094", "#35a396", "#90d38f", "#fbf0a0"],
};
const SHADES = 64;
const NOTCHED = 13; // pixels of a cell, from which it shows its phase
const FLIGHT = 1000; // milliseconds of a spark
const FADE = 900; // and of its edge afterwards
const TAIL = 0.16; // of the way
const BEND = 0.13;

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const part = (hex, at) => parseInt(hex.slice(1 + 2 * at, 3 + 2 * at), 16);
const ease = (t) => (t < 0.5 ? 2 * t * t : 1 - 2 * (1 - t) * (1 - t));
export const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;
export const rampOf = () => RAMPS[isDark() ? "dark" : "light"];

function shades(stops) {
  return Array.from({ length: SHADES }, (_, k) => {
    const at = (k / (SHADES - 1)) * (stops.length - 1);
    const [a, b] = [stops[Math.floor(at)], stops[Math.min(stops.length - 1, Math.floor(at) + 1)]];
    const mixed = [0, 1, 2].map((each) => Math.round(part(a, each) + (part(b, each) - part(a, each)) * (at % 1)));
    return `rgb(${mixed.join()})`;
  });
}

export class Drawing {
  constructor(base, above) {
    this.canvases = [base, above, document.createElement("canvas")]; // the last one keeps the edges, which seldom change
    [this.base, this.above, this.lines] = this.canvases.map((canvas) => canvas.getContext("2d"));
    this.width = this.height = 0;
    this.recolor();
  }

  recolor() {
    this.shades = shades(rampOf());
    this.ink = Object.fromEntries(["text", "muted", "line", "card", "accent", "back"].map((name) => [name, style(`--${name}`)]));
  }

  resize(width, height) {
    this.width = width;
    this.height = height;
    const scale = Math.min(2, devicePixelRatio || 1);
    for (const canvas of this.canvases) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = `${height}px`;
      canvas.getContext("2d").setTransform(scale, 0, 0, scale, 0, 0);
    }
  }

  color(score, low, high) {
    if (score === null) return this.ink.line;
    const at = Math.round(((score - low) / (high - low || 1)) * (SHADES - 1));
    return this.shades[Math.max(0, Math.min(SHADES - 1, at))];
  }

  // Whether dark text is read better on the color of a score.
  isLight(score, low, high) {
    const [r, g, b] = this.color(score, low, high).match(/\d+/g).map(Number);
    return 0.299 * r + 0.587 * g + 0.114 * b > 130;
  }

  // The scene: {nodes: [{x, y, score, phase, name}], radius, low, high, cells}: `threads` and `lit` are edges,
  // which are drawn again where they are `redrawn`.
  network(scene) {
    const { base, lines } = this;
    if (scene.redrawn) {
      lines.clearRect(0, 0, this.width, this.height);
      lines.lineCap = "round";
      this.threads(lines, scene, scene.threads, this.ink.muted, 0.3);
      this.threads(lines, scene, scene.lit, this.ink.accent, 0.75);
      scene.redrawn = false;
    }
    base.clearRect(0, 0, this.width, this.height);
    base.drawImage(lines.canvas, 0, 0, this.width, this.height);
    for (const node of scene.nodes) this.node(base, node, scene);
    base.globalAlpha = 1;
    this.names(base, scene);
  }

  threads(context, scene, threads, color, alpha) {
    const most = threads.reduce((sum, [, , groups]) => Math.max(sum, groups), 1);
    const widest = scene.nodes.length <= 12 ? 2 : 0.9;
    context.strokeStyle = color;
    for (const [learner, author, groups] of threads) {
      const from = scene.nodes[author], to = scene.nodes[learner];
      context.globalAlpha = alpha * (0.35 + (0.65 * groups) / most);
      context.lineWidth = 0.6 + (widest * groups) / most;
      trace(context, curve(from, to, gapOf(scene)));
    }
    context.globalAlpha = 1;
  }

  node(context, node, { radius, low, high }) {
    const { ink } = this, dead = node.phase === "offline";
    const ring = radius + Math.max(2.5, radius * 0.3), thick = Math.max(1.6, radius * 0.2);
    context.beginPath();
    context.arc(node.x, node.y, ring + thick / 2 + 1, 0, 7);
    context.fillStyle = ink.card; // edges end at the node
    context.fill();
    context.beginPath();
    context.arc(node.x, node.y, dead ? radius * 0.8 : radius, 0, 7);
    if (dead) {
      context.strokeStyle = ink.muted;
      context.lineWidth = 1.25;
      context.setLineDash([2, 3]);
      context.stroke();
      context.setLineDash([]);
      return;
    }
    context.fillStyle = this.color(node.score, low, high);
    context.fill();
    if (radius >= 14 && node.score !== null) {
      context.font = `600 ${radius < 17 ? 10 : 12}px system-ui, sans-serif`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillStyle = this.isLight(node.score, low, high) ? "#1d2120" : "#ffffff";
      context.fillText(node.score.toFixed(2), node.x, node.y + 0.5);
    }
    context.strokeStyle = ink.line;
    context.lineWidth = thick;
    context.beginPath();
    context.arc(node.x, node.y, ring, 0, 7);
    context.stroke();
    const quarter = PHASES.indexOf(node.phase);
    if (quarter < 0 && node.phase !== "measuring") return;
    context.strokeStyle = ink.accent;
    context.lineWidth = thick + 0.5;
    context.beginPath();
    if (quarter < 0) context.arc(node.x, node.y, ring, 0, 7);
    else context.arc(node.x, node.y, ring, (quarter - 1) * (Math.PI / 2) + 0.12, quarter * (Math.PI / 2) - 0.12);
    context.stroke();
  }

  // Writes the names that find room, those of the best nodes first.
  names(context, { nodes, radius, order, phases }) {
    const taken = nodes.map(({ x, y }) => [x - radius, y - radius, x + radius, y + radius]);
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const k of order) {
      const { x, y, name, phase } = nodes[k], top = y + radius * 1.45 + 5;
      context.font = "600 12px system-ui, sans-serif";
      const said = phases && phase ? phase : "", half = context.measureText(name).width / 2 + 3;
      const place = Math.max(half, Math.min(this.width - half, x));
      const box = [place - half, top, place + half, top + (said ? 31 : 15)];
      if (box[3] > this.height || taken.some((other, at) => at !== k && overlap(box, other))) continue;
      taken.push(box);
      context.lineWidth = 3;
      context.strokeStyle = this.ink.card;
      context.lineJoin = "round";
      context.strokeText(name, place, top);
      context.fillStyle = phase === "offline" ? this.ink.muted : this.ink.text;
      context.fillText(name, place, top);
      if (!said) continue;
      context.font = "12px system-ui, sans-serif";
      context.strokeText(said, place, top + 16);
      context.fillStyle = this.ink.muted;
      context.fillText(said, place, top + 16);
    }
  }

  // The same scene as cells: `cells` is {cell, columns, left}.
  grid(scene) {
    const { base } = this, { cell } = scene.cells;
    const gap = cell > 8 ? 2 : 1, side = cell - gap, notch = cell >= NOTCHED ? Math.max(4, Math.round(side * 0.32)) : 0;
    base.clearRect(0, 0, this.width, this.height);
    for (const node of scene.nodes) {
      const left = node.x - cell / 2, top = node.y - cell / 2;
      if (node.phase === "offline") {
        base.strokeStyle = this.ink.muted;
        base.globalAlpha = 0.6;
        base.lineWidth = 1;
        base.strokeRect(left + 0.5, top + 0.5, side - 1, side - 1);
        base.globalAlpha = 1;
        continue;
      }
      base.fillStyle = this.color(node.score, scene.low, scene.high);
      base.fillRect(left, top, side, side);
      const quarter = notch ? PHASES.indexOf(node.phase) : -1;
      if (quarter < 0) continue;
      base.fillStyle = this.ink.card; // the corner says the phase, in the order of a clock
      base.fillRect(quarter < 2 ? left + side - notch : left, quarter === 1 || quarter === 2 ? top + side - notch : top, notch, notch);
    }
    this.threads(base, scene, scene.lit, this.ink.text, 0.35);
  }

  clear() {
    this.above.clearRect(0, 0, this.width, this.height);
  }

  // Draws sparks from authors to learners: [{from, to, start, groups}]. Returns those that are not over.
  sparks(scene, sparks, now) {
    const { above: context, ink } = this, dots = scene.cells !== null, size = dots ? 1 : Math.min(1, 0.35 + scene.radius / 24);
    context.strokeStyle = dots ? ink.text : ink.accent;
    context.fillStyle = context.strokeStyle;
    context.lineCap = "round";
    return sparks.filter((spark) => {
      const age = now - spark.start, from = scene.nodes[spark.from], to = scene.nodes[spark.to];
      if (age > FLIGHT + FADE || !from || !to) return false;
      if (age < 0) return true;
      const way = curve(from, to, gapOf(scene)), t = ease(Math.min(1, age / FLIGHT));
      const fading = Math.max(0, (age - FLIGHT) / FADE);
      context.lineWidth = dots ? 1 : Math.min(3, (1 + spark.groups / 3) * size);
      context.globalAlpha = (dots ? 0.3 : 0.55) * Math.min(1, age / 200) * (1 - fading);
      trace(context, way);
      if (age < FLIGHT) {
        for (const [back, wide, alpha] of dots ? [[0, 2, 1]] : [[TAIL, 1.7, 0.25], [TAIL / 2, 2.6, 0.5], [0, 4, 1]]) {
          const [x, y] = along(way, Math.max(0, t - back));
          context.globalAlpha = alpha;
          context.beginPath();
          context.arc(x, y, wide * size, 0, 7);
          context.fill();
        }
      } else if (!dots) { // it has arrived: a ring spreads from the learner
        context.globalAlpha = 0.5 * (1 - fading);
        context.lineWidth = 1.5;
        context.beginPath();
        context.arc(to.x, to.y, scene.radius * (1.5 + fading), 0, 7);
        context.stroke();
      }
      return true;
    });
  }

  // Lifts a node and its neighbours out of the rest: `around` is {from, to} of [node, groups].
  focus(scene, node, around, ring) {
    const { above: context, ink } = this, me = scene.nodes[node];
    const others = [...around.from, ...around.to].map(([other]) => other);
    context.globalAlpha = scene.cells ? 0.45 : 0.72;
    context.fillStyle = ink.card;
    if (others.length) context.fillRect(0, 0, this.width, this.height);
    this.threads(context, scene, around.from.map(([other, groups]) => [node, other, groups]), ink.accent, 1);
    this.threads(context, scene, around.to.map(([other, groups]) => [other, node, groups]), ink.text, 0.75);
    context.globalAlpha = 1;
    for (const other of [...others, node]) {
      const each = scene.nodes[other];
      if (scene.cells) this.cell(context, each, scene, other === node && ring);
      else this.node(context, each, scene);
    }
    if (scene.cells) return;
    const named = [node, ...others].slice(0, 12);
    this.names(context, { ...scene, order: named, nodes: scene.nodes.map((each, k) => (named.includes(k) ? each : { ...each, x: -1e4, y: -1e4 })), phases: false });
    if (!ring) return;
    context.strokeStyle = ink.accent;
    context.lineWidth = 2;
    context.beginPath();
    context.arc(me.x, me.y, scene.radius * 1.6 + 5, 0, 7);
    context.stroke();
  }

  cell(context, node, { cells, low, high }, ring) {
    const side = cells.cell - (cells.cell > 8 ? 2 : 1), left = node.x - cells.cell / 2, top = node.y - cells.cell / 2;
    context.fillStyle = node.phase === "offline" ? this.ink.card : this.color(node.score, low, high);
    context.fillRect(left, top, side, side);
    context.strokeStyle = ring ? this.ink.accent : this.ink.text;
    context.lineWidth = ring ? 3 : 1.5;
    context.strokeRect(left - 0.5, top - 0.5, side + 1, side + 1);
  }
}

// The curve from one node to another, which leaves `gap` pixels at both: begin, bend and end.
function curve(from, to, gap) {
  const dx = to.x - from.x, dy = to.y - from.y;
  const bx = (from.x + to.x) / 2 + dy * BEND, by = (from.y + to.y) / 2 - dx * BEND;
  const cut = Math.min(0.8, gap / (Math.hypot(bx - from.x, by - from.y) || 1)); // both halves are equally long
  return [from.x + (bx - from.x) * cut, from.y + (by - from.y) * cut, bx, by, to.x + (bx - to.x) * cut, to.y + (by - to.y) * cut];
}

function trace(context, [ax, ay, bx, by, cx, cy]) {
  context.beginPath();
  context.moveTo(ax, ay);
  context.quadraticCurveTo(bx, by, cx, cy);
  context.stroke();
}

function along([ax, ay, bx, by, cx, cy], t) {
  const [a, b, c] = [(1 - t) * (1 - t), 2 * t * (1 - t), t * t];
  return [a * ax + b * bx + c * cx, a * ay + b * by + c * cy];
}

const gapOf = ({ cells, radius }) => (cells ? cells.cell / 3 : radius * 1.4 + 5);
const overlap = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
