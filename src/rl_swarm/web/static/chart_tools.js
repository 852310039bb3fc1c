// The tools of a chart: reset of the zoom, full screen, smoothing, logarithmic axis, picture and table.

import { h } from "./dom.js";
import { WINDOWS } from "./smoothing.js";

const SVG = "http://www.w3.org/2000/svg";
const EXPAND = "M2 6V2h4M10 2h4v4M14 10v4h-4M6 14H2v-4";
const SLIDERS = "M2 5h7M13 5h1M2 11h1M7 11h7M9 5a2 2 0 1 0 4 0a2 2 0 1 0-4 0M3 11a2 2 0 1 0 4 0a2 2 0 1 0-4 0";

function icon(path) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [name, value] of [["viewBox", "0 0 16 16"], ["width", "16"], ["height", "16"], ["aria-hidden", "true"]]) svg.setAttribute(name, value);
  const line = document.createElementNS(SVG, "path");
  line.setAttribute("d", path);
  svg.append(line);
  return svg;
}

const named = (rounds) => (rounds === 1 ? "none" : `mean of ${rounds} rounds`);

// A list of how many rounds are averaged, for one chart or all of a page.
export function smoothingSelect(choice, label = "Smoothing") {
  const select = h("select", { onchange: () => choice.set(Number(select.value)) }, WINDOWS.map((rounds) => h("option", { value: rounds }, named(rounds))));
  select.value = String(choice.value);
  choice.listeners.add(() => { select.value = String(choice.value); });
  return h("label", {}, label, select);
}

// Returns the tools of `chart`: {element, update(state)}.
export function chartTools(chart, { ownSmoothing, link }) {
  const reset = h("button", { type: "button", class: "reset", hidden: true, "aria-label": `Reset the zoom of ${chart.label}`, onclick: () => chart.reset() }, "Reset zoom");
  const full = h("button", { type: "button", class: "icon", title: "Full screen", "aria-label": `Full screen: ${chart.label}`, hidden: !document.fullscreenEnabled, onclick: () => chart.toggleFullScreen() }, icon(EXPAND));
  const log = h("input", { type: "checkbox", onchange: () => chart.setLog(log.checked) });
  const why = h("span", { class: "note", hidden: true }, "Only where all values are above 0.");
  const picture = h("button", { type: "button", "aria-label": `Save ${chart.label} as PNG`, onclick: () => chart.savePicture() }, "PNG");
  const panel = h("div", { class: "panel" },
    ownSmoothing ? smoothingSelect(chart.smoothing) : null,
    h("label", { class: "beside" }, log, "Logarithmic axis"), why,
    h("div", { class: "beside" }, "Save as", picture, link));
  const options = h("details", { class: "options", onkeydown: (event) => event.key === "Escape" && close() },
    h("summary", { class: "icon", title: "Options", "aria-label": `Options of ${chart.label}` }, icon(SLIDERS)), panel);
  const close = () => {
    if (options.contains(document.activeElement)) options.firstElementChild.focus();
    options.open = false;
  };
  const outside = (event) => !options.contains(event.target) && close();
  options.addEventListener("toggle", () => (options.open ? document.addEventListener("pointerdown", outside) : document.removeEventListener("pointerdown", outside)));

  function update({ zoomed, logarithmic, positive }) {
    if (!zoomed && document.activeElement === reset) chart.place.focus({ preventScroll: true });
    reset.hidden = !zoomed;
    log.checked = logarithmic;
    log.disabled = !positive;
    why.hidden = positive;
  }
  return { element: h("div", { class: "chart-tools" }, full, options), reset, update };
}
