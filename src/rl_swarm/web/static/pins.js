// The nodes that the viewer has pinned: charts draw them in swarms of any size. They are kept on this machine.

import { keep, recall } from "./kept.js";

export const MAX_PINS = 12; // as many as one request may name
const KEY = "pins";
const listeners = new Set();

export function all() {
  const kept = recall(KEY, []);
  return (Array.isArray(kept) ? kept : []).filter((node) => typeof node === "string" && node.length <= 100).slice(-MAX_PINS);
}

export const has = (node) => all().includes(node);

// Pins a node, or lets it go; beyond the maximum the oldest goes. Returns whether it is pinned now.
export function toggle(node) {
  const others = all().filter((each) => each !== node);
  const pinned = others.length === all().length;
  keep(KEY, pinned ? [...others, node].slice(-MAX_PINS) : others);
  listeners.forEach((tell) => tell());
  return pinned;
}

// Calls back when a pin has changed. Returns a function that ends it.
export function onchange(tell) {
  listeners.add(tell);
  return () => listeners.delete(tell);
}

export const pins = { all, has, toggle, onchange };

addEventListener("storage", (event) => event.key?.endsWith(KEY) && listeners.forEach((tell) => tell())); // another tab
