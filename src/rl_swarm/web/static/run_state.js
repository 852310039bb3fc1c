// Says how the run stands where it does not just go on: waiting, stopped, crashed, finished, damaged, or out of reach.

import { duration, h, moment, nodeLink, roundNumber } from "./dom.js";

const copied = (text) => h("button", { type: "button", class: "copy", "aria-label": `Copy ${text}`, onclick: async (event) => {
  await navigator.clipboard?.writeText(text).catch(() => null);
  event.target.textContent = "Copied";
} }, "Copy");

// A command to type, with a button that copies it.
const command = (label, text) => (text ? h("p", { class: "command" }, label, " ", h("code", {}, text), " ", copied(text)) : null);

// Which nodes are gone, and what is known of when.
function lost(nodes) {
  const shown = nodes.slice(0, 5).map(({ node, name, round, last_sign }) => h("li", {}, nodeLink(node, name),
    round === null ? ", before its first round" : `, after round ${roundNumber(round)}`, last_sign === null ? "" : [", last heard of at ", moment(last_sign)]));
  return h("ul", { class: "plain" }, shown, nodes.length > shown.length ? h("li", {}, `and ${nodes.length - shown.length} others`) : null);
}

const WHY = "Nothing was said before, so the process was killed, or its machine or its network failed.";
const ended = (nodes) => (nodes.length === 1 ? `${nodes[0].name} has ended without a word.` : `${nodes.length} nodes have ended without a word.`);

function described(about, connection) {
  const { condition, phase } = about;
  const since = condition.last_sign === null ? null : Math.max(0, Date.now() / 1000 - condition.last_sign);
  const seen = since === null ? null : ["The last sign of life was ", moment(condition.last_sign), `, ${duration(since)} ago.`];
  const resume = command("Resume it with", condition.resume);
  const again = command("Open this page again with", condition.watch);
  const notes = [];
  if (phase === "crashed") {
    notes.push(note("bad", `The run has crashed: ${ended(condition.crashed)}`, lost(condition.crashed), h("p", {}, WHY), seen && h("p", {}, seen), resume, log(condition.log_end)));
  } else if (phase === "stopped") {
    notes.push(note("warn", `The run was stopped in round ${about.round + 1} of ${about.rounds}. Its nodes have saved what they learned.`, seen && h("p", {}, seen), resume));
  } else if (phase === "waiting") {
    notes.push(note("", about.nodes ? "The first round begins when enough nodes are ready." : "Waiting for the first node. Nodes load their model first, which takes seconds to minutes."));
  } else if (phase === "running" && condition.crashed.length) {
    const again = "The others go on. A node of \u201crl-swarm up\u201d is started again by itself; another one is started again as it was first.";
    notes.push(note("warn", ended(condition.crashed), lost(condition.crashed), h("p", {}, WHY), h("p", {}, again), log(condition.log_end)));
  }
  if (condition.damaged.length) {
    notes.push(note("warn", "Lines of these logs cannot be read, so curves may have gaps:", h("ul", { class: "plain" }, condition.damaged.map((file) => h("li", {}, h("code", {}, file.path), `: ${file.lines} ${file.lines === 1 ? "line" : "lines"}`)))));
  }
  if (!about.has_logs && about.nodes) notes.push(note("", "The nodes' logs are on other machines: this page shows what the nodes report."));
  if (connection === "closing" && phase === "finished") notes.push(note("good", "The run has finished. What you see stays until you close the page.", again));
  else if (connection === "closing") notes.push(note("warn", "The dashboard was closed. What you see stays until you close the page.", again));
  else if (phase === "finished") notes.push(note("good", "The run has finished."));
  return notes;
}

const note = (kind, title, ...more) => h("section", { class: `notice ${kind}`, "aria-label": title }, h("p", { class: "title" }, title), ...more);

const log = (lines) => (lines.length ? h("details", {}, h("summary", {}, "The end of logs/swarm.log"), h("pre", {}, lines.join("\n"))) : null);

// The place on top of every view. `show(about, connection)`; `lost()` when the server does not answer.
export function runState() {
  const element = h("div", { class: "notices", role: "status" });
  let shown = "";
  let gone = null;

  function show(about, connection) {
    const key = JSON.stringify([about.phase, about.condition, about.has_logs, about.nodes > 0, connection]);
    gone = null;
    if (key === shown) return;
    shown = key;
    element.replaceChildren(...described(about, connection));
  }

  function lost(about) {
    if (gone) return;
    gone = new Date();
    shown = "";
    element.replaceChildren(note("bad", `The dashboard does not answer since ${gone.toLocaleTimeString()}. What you see is from then.`,
      h("p", {}, "This page asks again by itself."), about ? command("Start it again with", about.condition.watch) : null));
  }

  return { element, show, lost };
}
