// Keeps the viewer's choices on this machine. Where the browser refuses, they last as long as the page is open.

const PREFIX = "rl-swarm.";
const memory = new Map();

export function recall(key, fallback) {
  if (memory.has(key)) return memory.get(key);
  try {
    const text = localStorage.getItem(PREFIX + key);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

export function keep(key, value) {
  try {
    localStorage.setItem(PREFIX + key, JSON.stringify(value));
    memory.delete(key);
  } catch {
    memory.set(key, value); // the browser is full, or keeps nothing
  }
}

// A choice among a few numbers, which several charts may share.
export class Choice {
  constructor(key, value, allowed) {
    this.key = key;
    this.listeners = new Set();
    const kept = recall(key, value);
    this.value = allowed.includes(kept) ? kept : value;
  }

  set(value) {
    this.value = value;
    keep(this.key, value);
    this.listeners.forEach((tell) => tell());
  }
}
