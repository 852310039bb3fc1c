// Shows where the swarm stands: rounds, nodes, scores.

import { shown } from "./chart_axes.js";
import { count, duration, fact, h, roundOf, score } from "./dom.js";
import { term } from "./words.js";

const ENDS = { interval: "by the clock", everyone: "when all have reported", deadline: "when all have reported", lockstep: "all nodes in lock-step" };

// The most that can be said in one line, and a question that shows it.
export function headline() {
  const sentence = h("p", { class: "sentence" });
  const example = h("div", { class: "example", hidden: true });
  const main = h("dl", { class: "three" });
  const facts = h("dl", { class: "facts" });
  const progress = h("progress", { max: 1, value: 0, "aria-label": "Rounds played" });
  let last = "";

  function show(about) {
    progress.max = about.rounds || 1;
    progress.value = about.phase === "finished" ? about.rounds : about.round;
    sentence.textContent = about.headline;
    const told = JSON.stringify(about.example);
    if (told !== last) example.replaceChildren(...(about.example ? beforeAndAfter(about.example) : []));
    example.hidden = !about.example;
    last = told;
    const left = about.seconds_left === null ? about.phase : `about ${duration(about.seconds_left)} left`;
    main.replaceChildren(
      fact(term("Round"), `${roundOf(about)} of ${about.rounds}`, about.stages > 1 ? `stage ${about.stage + 1} of ${about.stages}; ${left}` : left),
      fact(term("Test score"), share(about.held_out_now), about.held_out_start === null ? "not measured yet" : about.held_out_now === about.held_out_start ? "before training; measured again later" : `from ${share(about.held_out_start)}, on questions that training never uses`),
      fact(term("Learned from peers"), share(about.external_share), "of what was trained on"),
    );
    facts.replaceChildren(
      fact(term("Nodes"), `${about.alive} of ${about.nodes}`, "online"),
      fact("Models", about.models.join(", ") || "–"),
      fact(term("Tasks"), String(about.tasks.length), about.tasks.slice(0, 3).join(", ") + (about.tasks.length > 3 ? " …" : "")),
      fact(term("Reward"), score(about.reward), about.stages > 1 ? `by stage ${about.reward_by_stage.map(score).join(", ")}` : "last 20 rounds"),
      fact(term("Rollouts"), count(about.rollouts), "questions answered"),
      fact("Tokens", count(about.tokens), `${count(about.tokens_per_second)} per second`),
      fact("A round ends", ENDS[about.round_end] ?? "–", about.seconds_to_next === null ? null : `the next in ${duration(about.seconds_to_next)}`),
    );
  }

  const more = h("details", { class: "more" }, h("summary", {}, "More figures"), facts);
  const element = h("section", { class: "card headline", "aria-label": "Status" }, sentence, example, progress, main, more);
  return { element, show };
}

const share = (value) => shown(value, "share");

function beforeAndAfter({ question, before, after, before_right, after_right, key, name }) {
  const answer = (label, text, right) => h("div", { class: right ? "told right" : "told" }, h("h3", {}, `${label}: ${right ? "right" : "wrong"}`), h("pre", {}, text || "(nothing)"));
  return [
    h("div", {}, h("h3", {}, `${name} was asked, and never trained on it`), h("pre", {}, question), key ? h("p", { class: "note" }, `The right answer is ${key}.`) : null),
    answer("Before training", before, before_right), answer("Now", after, after_right),
  ];
}
