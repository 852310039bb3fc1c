// Shows rollouts: questions, answer keys, and all answers; first those that have something to teach.

import { csv, get } from "./api.js";
import { nodeChoice } from "./choices.js";
import { hasProgram, python, shown } from "./code.js";
import { differences, nearest } from "./differences.js";
import { apiRound, folding, h, moment, nodeLink, roundNumber, save as saving, signed } from "./dom.js";
import { box, kindOf, rewardBar, rightOnes, verdictOf } from "./verdict.js";
import { term } from "./words.js";

const FIELDS = ["order", "round", "task", "node", "min_reward", "max_reward"];
const MOST_EMPTY = 5; // pages without a match that are turned by themselves
const tests = (count) => (count === 1 ? "the only test" : `all ${count} tests`);

// What is known of the tests of a program: it is right if it passes all of them.
function tested(answer, count) {
  if (!hasProgram(answer.text)) return "no program in this answer";
  return kindOf(answer) === "right" ? `passes ${tests(count)}` : count === 1 ? "fails the only test" : `fails at least 1 of ${count} tests`;
}

// Folds equal answers, and puts right ones first: {answer, times, ranges} where `ranges` differ from the nearest right one.
function folded(completions) {
  const found = new Map();
  for (const answer of completions) {
    const key = `${answer.reward} ${answer.truncated} ${answer.text}`;
    const same = found.get(key);
    same ? (same.times += 1) : found.set(key, { answer, times: 1 });
  }
  const all = [...found.values()].sort((one, other) => other.answer.right - one.answer.right);
  const right = all.filter(({ answer }) => kindOf(answer) === "right").map(({ answer }) => answer.text);
  return all.map((each) => {
    const near = kindOf(each.answer) === "right" ? null : nearest(each.answer.text, right);
    return { ...each, ranges: near === null ? [] : differences(each.answer.text, near) };
  });
}

// The task decides what is right: it may allow more than the key says, such as a rounded number.
const accepted = (answer, row) => kindOf(answer) === "right" && row.answer !== null && !row.tests.length && !answer.text.includes(row.answer);

function completion({ answer, times, ranges }, number, row) {
  return h("li", { class: `answer ${kindOf(answer)}` },
    h("p", { class: "marks" }, box(answer), h("strong", {}, verdictOf(answer)), times > 1 ? h("span", { class: "pill" }, `${times} times`) : null,
      rewardBar(answer, row.best), h("span", {}, `advantage ${signed(answer.advantage)}`),
      row.tests.length ? h("span", { class: "tested" }, tested(answer, row.tests.length)) : null,
      accepted(answer, row) ? h("span", {}, "not the key, but the task accepts it") : null,
      answer.truncated ? h("span", {}, "cut off at the longest length") : null, answer.shortened ? h("span", {}, "shortened for display") : null),
    folding(answer.text, `completion ${number + 1}`, answer.text ? shown(answer.text, ranges) : h("pre", {}, "(nothing)")));
}

function key(row) {
  if (row.answer === null) return h("pre", { class: "key" }, row.task ? "Several answers are correct." : "This question could not be regenerated here.");
  return row.tests.length ? folding(row.answer, "the answer key", h("pre", { class: "code" }, python(row.answer))) : h("pre", { class: "key" }, row.answer);
}

const testList = (row) => h("div", { class: "tests" }, h("h3", {}, row.tests.length === 1 ? "Its test" : `Its ${row.tests.length} tests`),
  h("ul", {}, row.tests.map((test) => h("li", {}, h("code", {}, python(`${test.call} == ${test.expected}`)),
    row.question.includes(test.call) ? h("span", { class: "note" }, "in the question") : null))));

// What stands below a question is made when it is opened for the first time.
function rollout(row, open) {
  const answers = row.completions.length;
  const right = rightOnes(row);
  const parted = row.completions.some((answer) => kindOf(answer) === "part");
  const fill = () => {
    const all = folded(row.completions);
    const ranges = all.flatMap((each) => each.ranges);
    const differs = ranges.some(([from, to]) => to > from);
    const misses = ranges.some(([from, to]) => to === from);
    element.append(
      h("p", { class: "note" }, "Round ", String(row.round), ", ", nodeLink(row.node, row.name), " with ", row.model, ", ", moment(row.timestamp)),
      h("div", { class: "asking" }, h("div", {}, h("h3", {}, "Question"), folding(row.question, "the question")), h("div", {}, h("h3", {}, "Answer key"), key(row))),
      row.tests.length ? testList(row) : "",
      h("div", { class: "between" }, h("h3", {}, `${answers} ${answers === 1 ? "answer" : "answers"}`),
        h("p", { class: "note" }, term("Advantage"), 
          differs ? h("span", {}, h("mark", {}, "Underlined"), ": other words than in the nearest right answer") : null,
          misses ? h("span", {}, h("span", { class: "missing" }, "‸"), " words of it are missing") : null)),
      h("ol", { class: row.tests.length ? "answers programs" : "answers" }, all.map((each, k) => completion(each, k, row))));
  };
  const element = h("details", { class: "card rollout", open, ontoggle: () => element.open && element.childElementCount === 1 && fill() },
    h("summary", {}, h("span", { class: "pill" }, row.task ?? "unknown task"), h("span", { class: "asked" }, row.question.replace(/\s+/g, " ").slice(0, 160)),
      h("span", { class: "marks", "aria-hidden": "true" }, row.completions.map(box)),
      h("span", { class: "mean" }, `${right} of ${answers} right`, parted ? h("span", { class: "wide" }, ", some partly") : null)));
  if (open) fill();
  return element;
}

export function rollouts(_, query) {
  const fields = {
    order: h("select", { id: "order" }, h("option", { value: "" }, "most to learn from first"), h("option", { value: "newest", selected: query.get("order") === "newest" }, "newest first")),
    round: h("input", { type: "number", min: 1, id: "round", value: query.get("round") && roundNumber(Number(query.get("round"))) }),
    task: h("select", { id: "task" }, h("option", { value: "" }, "all")),
    node: h("select", { id: "node" }, h("option", { value: "" }, "all")),
    min_reward: h("input", { type: "number", step: "any", id: "min_reward", value: query.get("min_reward") }),
    max_reward: h("input", { type: "number", step: "any", id: "max_reward", value: query.get("max_reward") }),
  };
  const labels = { order: "Order", round: "Round", task: "Task", node: "Node", min_reward: "Minimum reward", max_reward: "Maximum reward" };
  const list = h("div", { class: "stack", "aria-live": "polite" }, h("p", { class: "empty" }, "Reading …"));
  const older = h("button", { type: "button", hidden: true, onclick: () => load(next) }, "Older rollouts");
  const newer = h("button", { type: "button", hidden: true, onclick: () => load(null) }, "Show the newest");
  const save = saving("#", "these rollouts");
  const known = new Set(); // ids that are shown: a rollout may come twice as rounds go by
  let next = null;
  let newest = null; // the version that is known
  let loaded = null; // the version that the list was made at

  const entered = (name) => (name === "round" && fields.round.value ? String(apiRound(Number(fields.round.value))) : fields[name].value);
  const wanted = () => Object.fromEntries(FIELDS.map((name) => [name, entered(name) || query.get(name) || ""]));
  const choices = nodeChoice(fields.node, query.get("node"));

  async function load(after) {
    save.href = csv("api/rollouts", { ...wanted(), limit: 100 });
    const rows = [];
    const first = after === null;
    if (first) known.clear();
    for (let turned = 0; turned < MOST_EMPTY && !rows.length && (after !== null || turned === 0); turned++) {
      const page = await get("api/rollouts", { ...wanted(), after, limit: 10 });
      rows.push(...page.rollouts.filter((row) => !known.has(row.id)));
      after = page.next;
    }
    rows.forEach((row) => known.add(row.id));
    const made = rows.map((row, k) => rollout(row, first && k === 0));
    if (first) {
      loaded = newest;
      list.replaceChildren(...made);
    } else list.append(...made);
    if (!list.childElementCount) list.append(h("p", { class: "empty" }, after ? "None so far: look further back." : "No rollouts."));
    next = after;
    older.hidden = !next;
    newer.hidden = newest === loaded;
  }

  async function refresh() {
    const about = await get("api/overview");
    if (fields.task.options.length !== about.tasks.length + 1) {
      fields.task.replaceChildren(h("option", { value: "" }, "all"), ...about.tasks.map((task) => h("option", { value: task, selected: task === query.get("task") }, task)));
    }
    await choices(about.nodes);
    newest = about.version;
    const waits = !known.size && !Object.values(wanted()).some(Boolean); // for the first answers of a swarm
    if (loaded === null || waits) await load(null);
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
