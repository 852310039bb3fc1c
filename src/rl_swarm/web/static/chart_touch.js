// Lets fingers read and zoom a chart: one moves the crosshair, two stretch the rounds between them.

const CLOSEST = 20; // pixels between two fingers: nearer ones would jump

// `zoomTo([first, last])` is called while two fingers move; `plot()` is the plot now, which new data may replace.
export function touch(place, plot, zoomTo) {
  const fingers = new Map(); // by pointer: {x now, value that it holds}

  const left = (event) => event.clientX - plot().over.getBoundingClientRect().left;

  function stretch() {
    const [one, other] = [...fingers.values()].sort((a, b) => a.value - b.value);
    if (other.x - one.x < CLOSEST || other.value === one.value) return;
    const perPixel = (other.value - one.value) / (other.x - one.x);
    const first = one.value - one.x * perPixel;
    zoomTo([first, first + plot().over.clientWidth * perPixel]);
  }

  place.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "touch" || !plot() || fingers.size === 2) return;
    const x = left(event);
    fingers.set(event.pointerId, { x, value: plot().posToVal(x, "x") });
  });
  place.addEventListener("pointermove", (event) => {
    const finger = fingers.get(event.pointerId);
    if (!finger || !plot()) return;
    finger.x = left(event);
    if (fingers.size === 2) stretch();
    else plot().setCursor({ left: finger.x, top: plot().over.clientHeight / 2 }, true, true);
  });
  for (const end of ["pointerup", "pointercancel"]) addEventListener(end, (event) => fingers.delete(event.pointerId), { passive: true });
}
