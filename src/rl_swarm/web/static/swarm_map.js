// Shows the swarm alive: every node, its score and phase, and a spark wherever one learns from another. A slider replays
// the run. Nothing is drawn while nothing changes, while the page is hidden or the map is out of sight.

import { get } from "./api.js";
import { h, roundNumber } from "./dom.js";
import { card, sentence } from "./map_card.js";
import { Drawing, rampOf } from "./map_drawing.js";
import { FEW, MANY, Network, circle, fitted, grid, nearest, next } from "./map_layout.js";
import { Model, PHASES, WORDS, neighbours, phaseAt, spread, summed } from "./map_model.js";
import { term } from "./words.js";

const MAX_SPARKS = 240, MAX_SPARKS_PHONE = 70; // at a time
const MAX_THREADS = 400; // faint edges of the newest rounds
const MAX_LIT = 200, MAX_LIT_GRID = 80; // edges of a round, where it stands still
const MAX_NAMES = 60; // that are tried
const LAYOUT_MS = 4; // of a frame
const TWEEN = 450; // milliseconds of a change of colour
const QUICK = 3; // seconds of a round whose phases are played after it, for heartbeats are slower
const BEAT_MS = 70; // between the phases that are played
const REPLAY_MS = 24_000; // of a whole run, about
const beside = matchMedia("(min-width: 68rem)"); // the headline, as in style.css
const still = matchMedia("(prefers-reduced-motion: reduce)");
let shown = null; // the map on the page

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => shown?.recolor());
still.addEventListener("change", () => shown?.draw());
document.addEventListener("visibilitychange", () => shown?.seen());

export function swarmMap() {
  const map = new SwarmMap();
  shown = map;
  return { element: map.element, refresh: () => map.refresh() };
}

class SwarmMap {
  model = new Model();
  scene = { nodes: [], radius: 8, low: 0, high: 1, threads: [], lit: [], order: [], phases: false, cells: null, redrawn: true };
  places = []; // from -1 to 1
  network = null;
  sparks = [];
  sums = []; // of the edges that are shown
  frame = null; // of the replay; null: live
  focused = null;
  beats = new Map(); // node -> when its last round is played, and for how long
  tween = null;
  timer = 0;
  pending = 0;
  played = 0; // when the phases were drawn last
  onScreen = false;
  stale = { base: true, above: true };

  constructor() {
    const [base, above] = [h("canvas", { role: "img", "aria-label": "Map of the swarm" }), h("canvas", { "aria-hidden": "true" })];
    this.label = base;
    this.card = h("div", { class: "map-card", hidden: true });
    this.told = h("p", { class: "hidden", role: "status" });
    this.link = h("a", { class: "hidden", href: "#/", onkeydown: (event) => this.key(event), onfocus: () => this.focus(this.focused ?? this.scene.order[0] ?? null, true), onblur: () => this.focus(null) }, "Walk through the nodes with the arrow keys");
    this.stage = h("div", { class: "map-stage" }, base, above, this.link, this.card);
    this.play = h("button", { type: "button", onclick: () => (this.timer ? this.pause() : this.start()) }, "Play");
    this.slider = h("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "Round that the map shows", oninput: () => this.drag() });
    this.live = h("button", { type: "button", "aria-pressed": "true", onclick: () => this.goLive() }, "Live");
    this.when = h("output", { class: "note" });
    this.sort = h("select", { "aria-label": "Order of the cells", onchange: () => this.arrange() }, h("option", { value: "joined" }, "Oldest first"), h("option", { value: "score" }, "Best first"));
    this.scale = h("span", { class: "map-scale", role: "img" });
    this.ends = [h("span"), h("span")];
    this.counts = new Map(WORDS.map((word) => [word, h("b", {}, "0")]));
    this.phases = h("ul", { class: "map-phases", "aria-label": "Nodes by phase" }, WORDS.map((word) => h("li", { "data-phase": word }, h("i", { class: `ring ${word}` }), word, " ", this.counts.get(word))));
    this.note = h("p", { class: "note", hidden: true });
    this.element = h("section", { class: "card map", "aria-label": "The swarm" },
      h("div", { class: "head" }, h("h2", {}, term("The swarm")), this.sort, h("span", { class: "map-key" }, term("Score"), this.ends[0], this.scale, this.ends[1])),
      this.stage, this.phases,
      h("div", { class: "map-time" }, this.play, this.slider, this.live, this.when), this.note, this.told);
    this.drawing = new Drawing(base, above);
    this.listen();
  }

  listen() {
    const at = (event) => this.pick(event.offsetX, event.offsetY);
    this.stage.addEventListener("pointermove", (event) => event.target !== this.card && event.pointerType !== "touch" && event.target.tagName === "CANVAS" && this.focus(at(event)));
    this.stage.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && document.activeElement !== this.link && this.focus(null));
    this.stage.addEventListener("click", (event) => {
      if (event.target.tagName !== "CANVAS") return;
      const node = at(event);
      const opens = node !== null && (event.pointerType !== "touch" || node === this.focused);
      opens ? this.open(node) : this.focus(node);
    });
    new ResizeObserver(() => this.fit()).observe(this.stage);
    new IntersectionObserver(([entry]) => {
      this.onScreen = entry.isIntersecting;
      this.seen();
    }).observe(this.stage);
  }

  // --- what is known

  async refresh() {
    const answer = await get("api/map", { since: Math.max(0, this.model.newest - 1) });
    const first = !this.model.nodes.length, before = this.model.nodes.length;
    const { fresh, changed } = this.model.take(answer);
    this.slider.max = this.model.round;
    if (changed) {
      this.beats.clear();
      this.sparks = [];
      if (!this.model.frames && this.frame !== null) this.goLive(); // the server has started again
      this.place(before);
    }
    const votes = this.model.nodes.filter((node) => !node.hasLog).length;
    this.note.hidden = !votes || !this.model.nodes.length;
    this.note.textContent = votes === this.model.nodes.length
      ? "The nodes' logs are elsewhere, or empty so far: a line leads from the node whose answers another one found best."
      : `The logs of ${votes} of ${this.model.nodes.length} nodes are elsewhere: for these a line leads from the node whose answers they found best.`;
    if (this.frame !== null) {
      this.show(this.model.frames[this.frame].scores);
      return;
    }
    const newest = fresh.filter(([, , , round]) => round >= this.model.newest - (first ? 0 : 1));
    if (fresh.length || changed) this.know();
    this.show(this.model.nodes.map((node) => node.score));
    if (newest.length) this.beat(summed(newest));
  }

  // Takes the edges that are shown now.
  know() {
    this.sums = summed(this.model.edges(this.frame));
    const most = this.model.nodes.length <= 150 ? MAX_THREADS : this.model.nodes.length;
    this.scene.threads = this.frame === null ? this.sums.slice(0, most) : [];
    this.light(this.frame === null ? [] : this.sums);
  }

  // Lights the edges of a round, where nothing moves.
  light(edges) {
    this.scene.lit = edges.slice(0, this.scene.cells ? MAX_LIT_GRID : MAX_LIT);
    this.changed();
  }

  // Notes that all is to be drawn again.
  changed() {
    this.scene.redrawn = true;
    this.stale = { base: true, above: true };
  }

  // Shows scores: they change their colours slowly.
  show(scores) {
    const { nodes } = this.scene, live = this.frame === null;
    Object.assign(this.scene, { low: this.model.low, high: this.model.high });
    const moving = nodes.some((node, k) => node.score !== (scores[k] ?? null));
    const smooth = moving && !still.matches && nodes.length < MANY;
    this.tween = smooth ? { start: null, from: nodes.map((node) => node.score), to: scores } : null;
    nodes.forEach((node, k) => {
      const known = this.model.nodes[k], score = scores[k] ?? null, phase = live ? known.phase : score === null ? "offline" : "";
      this.stale.base ||= phase !== node.phase || (moving && !smooth);
      node.phase = this.beats.has(k) && live && known.phase !== "offline" ? node.phase : phase;
      if (!smooth) node.score = score;
      known.shown = score;
    });
    if (this.scene.cells && this.sort.value === "score" && moving) this.position();
    this.tell();
    if (this.tween || this.stale.base || this.stale.above) this.draw();
  }

  // --- what moves

  // Plays a round that has just ended: its sparks, and its phases where they were too quick for heartbeats.
  beat(edges) {
    if (still.matches) {
      this.light(edges);
      this.draw();
      return;
    }
    const now = performance.now(), { nodes } = this.model;
    const shares = new Map();
    for (const learner of new Set(edges.map(([learner]) => learner))) {
      const seconds = nodes[learner].seconds, total = seconds.reduce((sum, each) => sum + each, 0);
      const length = Math.max(1200, Math.min(2600, 1000 * total));
      if (total > 0 && total < QUICK && nodes[learner].phase !== "offline") this.beats.set(learner, { start: now, length });
      shares.set(learner, total > 0 && total < QUICK ? (length * (seconds[0] + seconds[1])) / total : 0);
    }
    this.launch(edges, now, (learner) => shares.get(learner), 700);
  }

  launch(edges, now, after, within) {
    const most = this.drawing.width < 560 ? MAX_SPARKS_PHONE : MAX_SPARKS;
    const room = Math.max(0, most - this.sparks.length), every = Math.max(1, edges.length / Math.max(1, room));
    for (let k = 0; k < edges.length && room; k += every) {
      const [learner, author, groups] = edges[Math.floor(k)];
      this.sparks.push({ from: author, to: learner, groups, start: now + after(learner) + (spread(learner, author) / 997) * within });
    }
    this.draw();
  }

  draw() {
    if (!this.pending && this.onScreen && !document.hidden) this.pending = requestAnimationFrame((now) => this.step(now));
  }

  seen() {
    if (document.hidden || !this.onScreen) {
      cancelAnimationFrame(this.pending);
      this.pending = 0;
      if (document.hidden) this.pause();
    } else this.draw();
  }

  // Draws a frame, and asks for another one if something still moves.
  step(now) {
    this.pending = 0;
    if (!this.element.isConnected) return;
    const layout = this.network !== null && this.network.run(LAYOUT_MS);
    if (this.network && (!layout || !still.matches)) {
      this.places = this.network.places();
      if (!layout) this.network = null;
      this.position();
    }
    if (this.tween) this.mix(now);
    if (this.beats.size && now - this.played > BEAT_MS) this.playPhases(now);
    if (this.stale.base) this.scene.cells ? this.drawing.grid(this.scene) : this.drawing.network(this.scene);
    if (this.stale.above || this.stale.base || this.sparks.length) this.drawAbove(now);
    this.stale = { base: false, above: false };
    if (layout || this.tween || this.sparks.length || this.beats.size) this.draw();
  }

  // Shows the phases of the rounds that are played.
  playPhases(now) {
    this.played = now;
    for (const [node, { start, length }] of this.beats) {
      const known = this.model.nodes[node], here = this.scene.nodes[node], over = now > start + length;
      if (over) this.beats.delete(node);
      const phase = over ? known.phase : phaseAt(known.seconds, (now - start) / length);
      this.stale.base ||= here.phase !== phase;
      here.phase = phase;
    }
    this.count();
  }

  mix(now) {
    this.tween.start ??= now;
    const t = Math.min(1, (now - this.tween.start) / TWEEN);
    this.scene.nodes.forEach((node, k) => {
      const from = this.tween.from[k], to = this.tween.to[k] ?? null;
      node.score = from === null || to === null || from === undefined ? to : from + (to - from) * t;
    });
    this.stale.base = true;
    if (t === 1) this.tween = null;
  }

  drawAbove(now) {
    this.drawing.clear();
    const { focused } = this;
    if (focused !== null && this.scene.nodes[focused]) {
      this.drawing.focus(this.scene, focused, neighbours(this.sums, focused), document.activeElement === this.link);
    }
    const drawn = focused === null ? this.sparks : this.sparks.filter(({ from, to }) => from === focused || to === focused);
    const left = this.drawing.sparks(this.scene, drawn, now);
    this.sparks = focused === null ? left : this.sparks.filter((spark) => !drawn.includes(spark) ? now < spark.start + 1900 : left.includes(spark));
  }

  // --- where things are

  // Chooses the layout, when nodes have joined.
  place(before) {
    const { nodes } = this.model, { length } = nodes;
    this.scene.nodes = nodes.map((node, k) => this.scene.nodes[k] ?? { x: 0, y: 0, score: node.score, phase: node.phase, name: "" });
    this.scene.nodes.forEach((node, k) => { node.name = nodes[k].name; });
    this.network = null;
    if (length <= FEW) this.places = circle(length);
    else if (length < MANY) {
      const sums = summed(this.model.edges()), most = sums[0]?.[2] ?? 1;
      this.network = new Network(length, sums.slice(0, 4 * length).map(([a, b, groups]) => [a, b, groups / most]), before > FEW && before < MANY ? this.places : [], this.stage.clientWidth < 560 ? 0.9 : 2.4);
      this.places = this.network.places();
    }
    this.arrange();
    this.fit();
  }

  // Orders the nodes: the cells of the grid, and the names that are written first.
  arrange() {
    const { nodes } = this.model, score = (k) => nodes[k].shown ?? nodes[k].score ?? -Infinity;
    this.sort.hidden = nodes.length < MANY;
    const best = nodes.map((_, k) => k).sort((a, b) => score(b) - score(a));
    this.scene.order = nodes.length <= MAX_NAMES ? best : best.slice(0, MAX_NAMES);
    this.position();
    this.draw();
  }

  fit() {
    const width = this.stage.clientWidth, { length } = this.scene.nodes, phone = width < 560;
    if (!width) return;
    const most = phone ? 400 : 440;
    this.scene.cells = length >= MANY ? grid(length, width, most) : null;
    const height = this.scene.cells ? this.scene.cells.height + 2 : length <= FEW ? (phone ? 320 : beside.matches ? 470 : 350) : phone ? 380 : 480;
    this.scene.radius = length <= FEW ? (phone ? 15 : 19) : (length <= 40 ? 11 : length <= 120 ? 7.5 : 5) * (phone ? 0.7 : 1);
    this.scene.phases = length <= FEW;
    this.stage.style.height = `${height}px`;
    this.drawing.resize(width, height);
    this.position();
    this.stale.above = true;
    this.draw();
  }

  position() {
    const { width, height } = this.drawing, { nodes, cells, radius } = this.scene;
    if (cells) {
      const { nodes: known } = this.model;
      const key = this.sort.value === "score" ? (k) => -(known[k].shown ?? known[k].score ?? -1e9) : (k) => known[k].joined;
      this.cells = known.map((_, k) => k).sort((a, b) => key(a) - key(b) || a - b);
      this.cells.forEach((k, slot) => {
        nodes[k].x = cells.left + ((slot % cells.columns) + 0.5) * cells.cell;
        nodes[k].y = (Math.floor(slot / cells.columns) + 0.5) * cells.cell + 1;
      });
    } else {
      const few = nodes.length <= FEW, side = few ? Math.min(width / 2 - 64, 330) : width / 2 - (width < 560 ? 18 : 48);
      const top = radius * 2 + 8, bottom = few ? radius * 1.5 + 42 : radius + 24;
      const places = nodes.length < 3 ? this.places : fitted(this.places);
      nodes.forEach((node, k) => {
        node.x = width / 2 + (places[k]?.x ?? 0) * side;
        node.y = (top + height - bottom) / 2 + (places[k]?.y ?? 0) * ((height - bottom - top) / 2);
      });
    }
    this.changed();
  }

  pick(x, y) {
    const { nodes, cells, radius } = this.scene;
    if (cells) {
      const column = Math.floor((x - cells.left) / cells.cell), row = Math.floor((y - 1) / cells.cell);
      return column >= 0 && column < cells.columns && row >= 0 ? this.cells[row * cells.columns + column] ?? null : null;
    }
    return nearest(nodes, x, y, radius + 12);
  }

  // --- one node

  focus(node, byKey = false) {
    if (node === this.focused && !byKey) return;
    this.focused = node;
    this.stage.classList.toggle("pointing", node !== null);
    if (node === null) this.link.removeAttribute("aria-label");
    this.describe(byKey);
    this.stale.above = true;
    this.draw();
  }

  describe(aloud) {
    const node = this.model.nodes[this.focused], place = this.scene.nodes[this.focused];
    this.card.hidden = !node;
    if (!node) return;
    const around = neighbours(this.sums, this.focused), when = this.period();
    this.card.replaceChildren(...card(node, around, this.model.nodes, when));
    const { width, height } = this.drawing, right = place.x < width / 2;
    const beside = Math.max(0, right ? place.x + this.scene.radius * 2 + 14 : place.x - this.scene.radius * 2 - 14 - this.card.offsetWidth);
    this.card.style.left = `${Math.min(beside, width - this.card.offsetWidth)}px`;
    this.card.style.top = `${Math.max(0, Math.min(place.y - this.card.offsetHeight / 2, height - this.card.offsetHeight))}px`;
    this.link.href = `#/node/${encodeURIComponent(node.id)}`;
    if (!aloud) return;
    const said = sentence(node, around, this.model.nodes, when);
    this.link.setAttribute("aria-label", said);
    this.told.textContent = said;
  }

  open(node) {
    location.hash = `#/node/${encodeURIComponent(this.model.nodes[node].id)}`;
  }

  // The arrow keys go to the nearest node in their direction.
  key(event) {
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const { nodes } = this.scene, here = nodes[this.focused];
    if (event.key === "Escape") this.link.blur();
    if (!way || !here) return;
    event.preventDefault();
    this.focus(next(nodes, this.focused, way), true);
  }

  // --- time

  period() {
    const { model, frame } = this;
    if (frame === null) return { live: true, title: model.rounds.size ? `In rounds ${roundNumber(model.oldest)} to ${roundNumber(model.newest)}` : "No round yet" };
    const first = model.frames[frame].round, last = Math.min(model.round, first + model.stride - 1);
    return { live: false, title: first === last ? `In round ${roundNumber(first)}` : `In rounds ${roundNumber(first)} to ${roundNumber(last)}` };
  }

  // Writes how many nodes are in each phase.
  count() {
    const totals = new Map(WORDS.map((word) => [word, 0]));
    this.scene.nodes.forEach(({ phase }) => totals.has(phase) && totals.set(phase, totals.get(phase) + 1));
    this.phases.classList.toggle("still", this.frame !== null); // it keeps its room
    for (const [word, count] of totals) {
      const told = this.counts.get(word);
      if (told.textContent !== String(count)) told.textContent = String(count);
      told.parentElement.hidden = !count && !PHASES.includes(word) && word !== "waiting";
    }
  }

  // Writes what is shown beside the map.
  tell() {
    const { model } = this, live = this.frame === null, { title } = this.period();
    this.count();
    this.label.setAttribute("aria-label", `Map of the swarm. Nodes: ${model.nodes.length}, offline: ${model.nodes.filter(({ phase }) => phase === "offline").length}. ${title}.`);
    this.ends[0].textContent = String(model.low);
    this.ends[1].textContent = String(model.high);
    this.scale.setAttribute("aria-label", `Colours from ${model.low} to ${model.high}`);
    this.scale.style.background = `linear-gradient(90deg, ${rampOf().join()})`;
    this.when.textContent = live ? `now, round ${roundNumber(model.round)}` : title.replace("In ", "");
    this.live.setAttribute("aria-pressed", String(live));
    if (live) this.slider.value = this.slider.max;
    this.slider.setAttribute("aria-valuetext", this.when.textContent);
    if (this.focused !== null) this.describe(false);
  }

  // Fetches the rounds of the run; returns whether there are any.
  async load() {
    const asked = this.model.round;
    if (!this.model.frames || this.loaded !== asked) {
      try {
        this.model.takeReplay(await get("api/map/replay"));
        this.loaded = asked;
      } catch (error) {
        this.when.textContent = error.message;
      }
    }
    return Boolean(this.model.frames?.length);
  }

  async drag() {
    this.pause();
    const wanted = Number(this.slider.value);
    if (wanted >= Number(this.slider.max)) {
      this.goLive();
      return;
    }
    const found = await this.load();
    if (found && Number(this.slider.value) === wanted) this.go(Math.floor(wanted / this.model.stride), false);
  }

  go(frame, sparking) {
    this.frame = Math.max(0, Math.min(frame, this.model.frames.length - 1));
    this.know();
    this.beats.clear();
    if (sparking && !still.matches) {
      this.light([]);
      this.launch(this.sums.slice(0, MAX_SPARKS), performance.now(), () => 0, 300);
    }
    this.show(this.model.frames[this.frame]?.scores ?? []);
  }

  async start() {
    this.timer = -1;
    this.play.textContent = "Pause";
    const found = await this.load();
    if (!found || !this.timer) {
      this.pause();
      return;
    }
    const { length } = this.model.frames, every = Math.max(120, Math.min(700, REPLAY_MS / length));
    const tick = () => {
      if (!this.element.isConnected) return;
      const next = this.frame === null ? 0 : this.frame + 1;
      if (next >= length) {
        this.goLive();
        return;
      }
      this.go(next, true);
      this.slider.value = this.model.frames[this.frame].round;
      this.timer = setTimeout(tick, every);
    };
    tick();
  }

  pause() {
    clearTimeout(this.timer);
    if (this.timer && this.frame !== null) {
      this.know();
      this.draw();
    }
    this.timer = 0;
    this.play.textContent = "Play";
  }

  goLive() {
    this.frame = null;
    this.pause();
    this.know();
    this.show(this.model.nodes.map((node) => node.score));
  }

  recolor() {
    this.drawing.recolor();
    this.changed();
    this.tell();
    this.draw();
  }
}
