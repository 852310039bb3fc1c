// Shows rollouts: questions, answer keys, and all completions.

import { csv, get } from "./api.js";
import { apiRound, folding, h, moment, nodeLink, roundNumber, save as saving, score, signed } from "./dom.js";

const FIELDS = ["round", "task", "node", "min_reward", "max_reward"];

function completion(text, number) {
  return h("li", { class: text.reward > 0 ? "answer good" : "answer" },
    h("p", { class: "marks" }, h("strong", {}, `Reward ${score(text.reward)}`), h("span", {}, `advantage ${signed(text.advantage)}`),
      text.truncated ? h("span", {}, "truncated") : null, text.shortened ? h("span", {}, "shortened for display") : null),
    folding(text.text || "(nothing)", `completion ${number + 1}`));
}

function rollout(row, open) {
  return h("details", { class: "card rollout", open },
    h("summary", {}, h("span", { class: "pill" }, row.task ?? "unknown task"), h("span", { class: "asked" }, row.question.replace(/\s+/g, " ").slice(0, 160)),
      h("span", { class: "marks", "aria-hidden": "true" }, row.completions.map((text) => h("i", { class: text.reward > 0 ? "right" : null }))),
      h("span", { class: "mean" }, score(row.reward))),
    h("p", { class: "note" }, "Round ", String(roundNumber(row.round)), ", ", nodeLink(row.node, row.name), " with ", row.model, ", ", moment(row.timestamp)),
    h("div", { class: "asking" },
      h("div", {}, h("h3", {}, "Question"), folding(row.question, "the question")),
      h("div", {}, h("h3", {}, "Answer key"), h("pre", { class: "key" }, row.answer ?? (row.task ? "Several answers are correct." : "This question could not be regenerated here.")))),
    h("h3", {}, `${row.completions.length} completions`), h("ol", { class: "answers" }, row.completions.map(completion)));
}

export function rollouts(_, query) {
  const fields = {
    round: h("input", { type: "number", min: 1, id: "round", value: query.get("round") && roundNumber(Number(query.get("round"))) }),
    task: h("select", { id: "task" }, h("option", { value: "" }, "all")),
    node: h("select", { id: "node" }, h("option", { value: "" }, "all")),
    min_reward: h("input", { type: "number", step: "any", id: "min_reward", value: query.get("min_reward") }),
    max_reward: h("input", { type: "number", step: "any", id: "max_reward", value: query.get("max_reward") }),
  };
  const labels = { round: "Round", task: "Task", node: "Node", min_reward: "Minimum reward", max_reward: "Maximum reward" };
  const list = h("div", { class: "stack", "aria-live": "polite" }, h("p", { class: "empty" }, "Reading …"));
  const older = h("button", { type: "button", hidden: true, onclick: () => load(next) }, "Older rollouts");
  const newer = h("button", { type: "button", hidden: true, onclick: () => load(null) }, "Show the newest");
  const save = saving("#", "these rollouts");
  let next = null;
  let newest = null; // the version that is known
  let loaded = null; // the version that the list was made at

  const entered = (name) => (name === "round" && fields.round.value ? String(apiRound(Number(fields.round.value))) : fields[name].value);
  const wanted = () => Object.fromEntries(FIELDS.map((name) => [name, entered(name) || query.get(name) || ""]));
  const choose = (select, options, name) => {
    if (select.options.length === options.length + 1) return;
    select.replaceChildren(h("option", { value: "" }, "all"), ...options.map(([value, label]) => h("option", { value, selected: value === query.get(name) }, label)));
  };

  async function load(after) {
    save.href = csv("api/rollouts", { ...wanted(), limit: 100 });
    const page = await get("api/rollouts", { ...wanted(), after, limit: 10 });
    const rows = page.rollouts.map((row, k) => rollout(row, after === null && k === 0));
    if (after === null) {
      loaded = newest;
      list.replaceChildren(...rows);
    } else list.append(...rows);
    if (!list.childElementCount) list.append(h("p", { class: "empty" }, page.next ? "None so far: look further back." : "No rollouts."));
    next = page.next;
    older.hidden = !next;
    newer.hidden = newest === loaded;
  }

  async function refresh() {
    const [about, nodes] = await Promise.all([get("api/overview"), get("api/nodes", { limit: 1000 })]);
    choose(fields.task, about.tasks.map((task) => [task, task]), "task");
    choose(fields.node, nodes.nodes.map((row) => [row.node, row.name]), "node");
    newest = about.version;
    if (loaded === null) await load(null);
    newer.hidden = newest === loaded; // the user may be reading: nothing moves by itself
  }

  const form = h("form", { class: "tools", role: "search", "aria-label": "Filter rollouts", onchange: apply, onsubmit: (event) => { event.preventDefault(); apply(); } },
    FIELDS.map((name) => h("label", { for: name }, labels[name], fields[name])), newer, save);

  function apply() {
    const chosen = new URLSearchParams(FIELDS.filter(entered).map((name) => [name, entered(name)]));
    FIELDS.forEach((name) => query.delete(name));
    history.replaceState(null, "", chosen.size ? `#/rollouts?${chosen}` : "#/rollouts");
    load(null);
  }

  return { title: "Rollouts", refresh, element: h("div", { class: "stack" }, form, list, h("div", { class: "pages" }, older)) };
}
