// Places the nodes of the map: a few on a circle, many as a network, very many as cells of a grid.

export const FEW = 12; // nodes on a circle
export const MANY = 400; // from here on a grid
const STEPS = 220; // of the network until it rests
const STEPS_AFTER = 60; // when nodes have joined a network that rests
const GOLDEN = Math.PI * (3 - Math.sqrt(5));

// Places on an ellipse, the first one on top, in a box from -1 to 1.
export function circle(count) {
  if (count === 1) return [{ x: 0, y: 0 }];
  const first = count === 2 ? Math.PI : -Math.PI / 2;
  return Array.from({ length: count }, (_, k) => ({ x: Math.cos(first + (2 * Math.PI * k) / count), y: Math.sin(first + (2 * Math.PI * k) / count) }));
}

// A network in which nodes that learn from each other attract each other, and all others keep away. `step()` moves the
// nodes a little, until it returns false. Nodes that were placed before hardly move when others join. `aspect` is the
// width of the map by its height: its shape turns to fill it.
export class Network {
  constructor(count, links, before, aspect) {
    this.count = count;
    this.aspect = Math.sqrt(Math.max(0.4, Math.min(2.5, aspect)));
    this.links = links; // [a, b, weight from 0 to 1]
    this.left = before.length ? STEPS_AFTER : STEPS;
    this.heat = before.length ? 0.02 : 0.12;
    this.cooling = this.heat / (this.left + 1);
    this.x = new Float64Array(count);
    this.y = new Float64Array(count);
    const near = new Map(links.flatMap(([a, b]) => [[a, b], [b, a]]));
    for (let k = 0; k < count; k++) {
      const known = before[k] ?? before[near.get(k)];
      const radius = known && before[k] ? 0 : known ? 0.08 : Math.sqrt((k + 0.5) / count);
      this.x[k] = (known?.x ?? 0) + radius * Math.cos(k * GOLDEN);
      this.y[k] = (known?.y ?? 0) + radius * Math.sin(k * GOLDEN);
    }
    this.movedX = new Float64Array(count);
    this.movedY = new Float64Array(count);
  }

  step() {
    if (this.left <= 0) return false;
    const { count, x, y, movedX, movedY } = this;
    const apart = 1.1 / Math.sqrt(count); // distance at which two nodes like to be
    movedX.fill(0);
    movedY.fill(0);
    for (let a = 0; a < count; a++) {
      for (let b = a + 1; b < count; b++) {
        const dx = x[a] - x[b], dy = y[a] - y[b];
        const push = (apart * apart) / (dx * dx + dy * dy + 1e-6);
        movedX[a] += dx * push;
        movedY[a] += dy * push;
        movedX[b] -= dx * push;
        movedY[b] -= dy * push;
      }
    }
    for (const [a, b, weight] of this.links) {
      const dx = x[a] - x[b], dy = y[a] - y[b];
      const pull = (weight * 2.5 * Math.hypot(dx, dy)) / apart / 4;
      movedX[a] -= dx * pull;
      movedY[a] -= dy * pull;
      movedX[b] += dx * pull;
      movedY[b] += dy * pull;
    }
    for (let k = 0; k < count; k++) {
      movedX[k] -= (x[k] * 0.9) / this.aspect;
      movedY[k] -= y[k] * 0.9 * this.aspect;
      const length = Math.hypot(movedX[k], movedY[k]) || 1;
      const most = Math.min(length * 0.3, this.heat) / length;
      x[k] += movedX[k] * most;
      y[k] += movedY[k] * most;
    }
    this.heat -= this.cooling;
    this.left -= 1;
    return this.left > 0;
  }

  // Steps for so many milliseconds at most; returns whether there are more.
  run(milliseconds) {
    const end = performance.now() + milliseconds;
    while (this.step()) if (performance.now() >= end) return true;
    return false;
  }

  places() {
    return Array.from(this.x, (x, k) => ({ x, y: this.y[k] }));
  }
}

// Fits places into a box from -1 to 1.
export function fitted(places) {
  const span = (values) => {
    const low = Math.min(...values), high = Math.max(...values);
    return [(low + high) / 2, (high - low) / 2 || 1];
  };
  const [x, width] = span(places.map((place) => place.x));
  const [y, height] = span(places.map((place) => place.y));
  return places.map((place) => ({ x: (place.x - x) / width, y: (place.y - y) / height }));
}

// A grid of so many square cells: their size, and how many in a row.
export function grid(count, width, height) {
  const cell = Math.max(4, Math.min(28, Math.floor(Math.sqrt((width * height) / Math.max(1, count)))));
  const columns = Math.max(1, Math.floor(width / cell));
  const rows = Math.ceil(count / columns);
  return { cell, columns, rows, height: rows * cell, left: Math.floor((width - columns * cell) / 2) };
}

// The node nearest to a point, at most `most` pixels away; null if there is none.
export function nearest(nodes, x, y, most) {
  let found = null, least = most ** 2;
  nodes.forEach((node, k) => {
    const distance = (node.x - x) ** 2 + (node.y - y) ** 2;
    if (distance < least) [found, least] = [k, distance];
  });
  return found;
}

// The next node from one in a direction ([1, 0] is right); the same one at the end.
export function next(nodes, from, [right, down]) {
  const here = nodes[from];
  let found = from, least = Infinity;
  nodes.forEach((node, k) => {
    const dx = node.x - here.x, dy = node.y - here.y, ahead = dx * right + dy * down;
    const distance = ahead + 2.5 * Math.abs(dx * down + dy * right);
    if (ahead > 0.5 && distance < least) [found, least] = [k, distance];
  });
  return found;
}
