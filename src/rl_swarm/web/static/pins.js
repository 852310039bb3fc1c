// Keeps which nodes a user has pinned, in this browser, for all views.

const KEY = "pinned nodes";
const MAX = 12;
const listeners = new Set();
let kept = read();

function read() {
  try {
    const found = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(found) ? found.filter((node) => typeof node === "string" && node.length <= 100).slice(0, MAX) : [];
  } catch {
    return []; // no storage, or something else wrote it
  }
}

export const pins = {
  all: () => [...kept],

  // Pins a node or lets it go; returns whether it is pinned now. The first of more than twelve is let go.
  toggle(node) {
    const pinned = !kept.includes(node);
    kept = pinned ? [...kept, node].slice(-MAX) : kept.filter((each) => each !== node);
    try {
      localStorage.setItem(KEY, JSON.stringify(kept));
    } catch {
      // without storage, until the page is closed
    }
    listeners.forEach((listener) => listener());
    return pinned;
  },

  // Calls `listener` after every change; returns a function that ends this.
  onchange(listener) {
    listeners.add(listener);
    return () => listeners.delete(listener);
  },
};

addEventListener("storage", (event) => {
  if (event.key !== KEY) return;
  kept = read();
  listeners.forEach((listener) => listener());
});
