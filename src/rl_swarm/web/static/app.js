// Starts the page: routes to a view, and refreshes it.

import { get } from "./api.js";
import { forget } from "./charts.js";
import { follow, rest } from "./connection.js";
import { h } from "./dom.js";
import { overview } from "./overview.js";
import { node } from "./node.js";
import { rollouts } from "./rollouts.js";
import { events } from "./events.js";
import { runState } from "./run_state.js";
import { runs } from "./runs.js";
import { offer } from "./stopping.js";

const ROUTES = [[/^\/?$/, overview], [/^\/node\/(.+)$/, node], [/^\/rollouts$/, rollouts], [/^\/events$/, events], [/^\/runs$/, runs]];
const main = document.getElementById("main");
let view = null; // {title, element, refresh}
let busy = null; // the view that is being refreshed
let again = false;
let version = null; // of what was read last
let known = null; // the last overview
let connection = "open"; // or "closing", when the server has said that it ends
const state = runState();

function failure(error) {
  main.querySelector(".failure")?.remove();
  if (!error) return;
  if (error instanceof TypeError) connection === "open" && state.lost(known); // the request did not arrive
  else main.prepend(h("p", { class: "failure", role: "alert" }, error.message));
}

async function refresh() {
  if (busy === view) {
    again = true;
    return;
  }
  const asked = view;
  busy = asked;
  again = false;
  try {
    const [about] = await Promise.all([get("api/overview"), asked.refresh()]);
    if (asked !== view) return; // the user has opened another page
    version = about.version;
    known = about;
    state.show(about, connection);
    rest(about.phase);
    main.removeAttribute("aria-busy");
    document.getElementById("swarm").textContent = about.name || "RL Swarm";
    const phase = document.getElementById("phase");
    phase.textContent = about.phase;
    phase.className = `pill ${about.phase}`;
    document.getElementById("experiment").hidden = !about.experiment;
    offer(about.can_stop && about.phase !== "finished");
    document.title = `${view.title} · ${about.name || "RL Swarm"}`;
    failure(null);
  } catch (error) {
    if (asked === view) failure(error);
  }
  if (busy !== asked) return;
  busy = null;
  if (again) refresh();
}

function plain(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // typed by hand
  }
}

function show() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  for (const link of document.querySelectorAll("nav a")) {
    const here = link.getAttribute("href") === `#${path || "/"}`;
    here ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  }
  const [found, make] = ROUTES.map(([pattern, make]) => [path.match(pattern), make]).find(([match]) => match) ?? [[""], overview];
  view = make(plain(found[1] ?? ""), new URLSearchParams(query));
  main.replaceChildren(state.element, h("h1", {}, view.title), view.element);
  forget();
  refresh();
}

addEventListener("hashchange", () => {
  if (location.hash === "#main") return;
  show();
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
});
if (!location.hash || location.hash === "#main") history.replaceState(null, "", "#/");
show();
follow({
  changed: (newest) => newest !== version && refresh(),
  closing: () => {
    connection = "closing";
    if (known) state.show(known, connection);
    refresh();
  },
  lost: () => {
    version = null; // the server may restart
    state.lost(known);
  },
});
