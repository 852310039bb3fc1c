// Builds the page. Texts of models and peers only ever become text nodes: nothing here parses HTML.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Redraws a part, and keeps the keyboard focus on the same link or box.
export function redraw(place, ...children) {
  const focused = place.contains(document.activeElement) ? document.activeElement : null;
  const name = focused && ["href", "aria-label"].find((each) => focused.hasAttribute(each));
  const folded = focused?.tagName === "SUMMARY" && focused.parentElement.id;
  place.replaceChildren(...children);
  if (name) place.querySelector(`${focused.tagName}[${name}="${CSS.escape(focused.getAttribute(name))}"]`)?.focus({ preventScroll: true });
  else if (folded) place.querySelector(`#${folded} > summary`)?.focus({ preventScroll: true });
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

// The API counts rounds from 0, people count them from 1.
export const roundNumber = (round) => round + 1;
export const apiRound = (number) => Math.max(0, number - 1);

// How far a run is, in rounds as people count: the one that is played now, or all.
export const roundOf = ({ phase, round, rounds }) => (phase === "waiting" ? 0 : phase === "finished" ? rounds : Math.min(rounds, roundNumber(round)));

const known = (value) => value !== null && value !== undefined;

export const score = (value) => (known(value) ? value.toFixed(3) : "–");
export const count = (value) => (known(value) ? compact.format(value) : "–");
export const percent = (value) => (known(value) ? `${Math.round(value * 100)} %` : "–");
export const signed = (value, digits = 2) => (known(value) ? `${value.toFixed(digits) < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}` : "–");
export const bytes = (value) => (known(value) ? (value < 2 ** 30 ? `${Math.round(value / 2 ** 20)} MiB` : `${(value / 2 ** 30).toFixed(1)} GiB`) : "–");

export function duration(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  return seconds < 6000 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

export function moment(timestamp) {
  if (!known(timestamp)) return "–";
  const date = new Date(timestamp * 1000);
  if (Number.isNaN(date.getTime())) return "–";
  const today = date.toDateString() === new Date().toDateString();
  return h("time", { datetime: date.toISOString(), title: date.toString() }, today ? date.toLocaleTimeString() : date.toLocaleString());
}

export const nodeLink = (node, name) => (node ? h("a", { href: `#/node/${encodeURIComponent(node)}` }, name) : name);

export const life = (alive) => h("span", { class: alive ? "dot online" : "dot", title: alive ? "online" : "offline" },
  h("span", { class: "hidden" }, alive ? "online" : "offline"));

export const save = (href, what) => h("a", { class: "save", href, download: true, "aria-label": `Save ${what} as CSV` }, "CSV");

// A part of a page, with a link that saves its table where there is one.
export function card(title, csv, ...content) {
  return h("section", { class: "card", "aria-label": title },
    h("div", { class: "head" }, h("h2", {}, title), csv ? save(csv, title[0].toLowerCase() + title.slice(1)) : null), ...content);
}

export const fact = (label, value, note) => h("div", { class: "fact" }, h("dt", {}, label), h("dd", {}, value),
  note ? h("dd", { class: "note" }, note) : null);

export const eventLabel = (kind) => h("span", { class: `what ${kind.replaceAll(/[^a-z]/g, "-")}` }, kind.replaceAll("_", " "));

// A table of columns {title, cell(row), number, wide, short}; `wide` ones are left out on a phone, `short` ones stay on a line.
export function table(caption, columns, rows, empty = "Nothing yet.") {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  const kind = (column) => [column.number && "number", column.wide && "wide", column.short && "short"].filter(Boolean).join(" ") || null;
  return h("div", { class: "scroll" }, h("table", {},
    h("caption", { class: "hidden" }, caption),
    h("thead", {}, h("tr", {}, columns.map((c) => h("th", { scope: "col", class: kind(c) }, c.title)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, columns.map((c) => h("td", { class: kind(c) }, c.cell(row) ?? "–")))))));
}

// A text that folds when it is long.
export function folding(text, label, body = h("pre", {}, text)) {
  if (text.length < 700 && text.split("\n").length < 12) return body;
  body.classList.add("folded");
  const button = h("button", { type: "button", "aria-expanded": "false", "aria-label": `Show all of ${label}`, onclick: () => {
    const folded = body.classList.toggle("folded");
    button.textContent = folded ? "Show all" : "Show less";
    button.setAttribute("aria-expanded", String(!folded));
  } }, "Show all");
  return h("div", {}, body, button);
}
