// Shows where the swarm stands: rounds, nodes, scores.

import { shown } from "./chart_axes.js";
import { count, duration, fact, h, percent, roundOf, score } from "./dom.js";

const ENDS = { interval: "by the clock", everyone: "when all have reported", deadline: "when all have reported", lockstep: "all nodes in lock-step" };

export function headline() {
  const facts = h("dl", { class: "facts" });
  const progress = h("progress", { max: 1, value: 0, "aria-label": "Rounds played" });
  const note = h("p", { class: "note", hidden: true }, "The nodes' logs cannot be read from here: this page shows what the nodes report.");
  const unreadable = h("p", { class: "note", role: "status", hidden: true });

  function show(about) {
    progress.max = about.rounds || 1;
    progress.value = about.phase === "finished" ? about.rounds : about.round;
    facts.replaceChildren(
      fact("Round", `${roundOf(about)} of ${about.rounds}`, about.stages > 1 ? `stage ${about.stage + 1} of ${about.stages}` : "one stage each"),
      fact("Next round in", about.phase === "running" ? duration(about.seconds_to_next) : "–", about.phase === "running" ? ENDS[about.round_end] ?? "" : about.phase),
      fact("Nodes", `${about.alive} of ${about.nodes}`, "online"),
      fact("Models", about.models.join(", ") || "–", "trained by the nodes"),
      fact("Tasks", String(about.tasks.length), "in the task list"),
      fact("Reward", score(about.reward), about.stages > 1 ? `by stage ${about.reward_by_stage.map(score).join(", ")}` : "last 20 rounds"),
      fact("Score on unseen questions", shown(about.held_out_now, "share"), about.held_out_start === null ? null : `from ${shown(about.held_out_start, "share")}; ${about.held_out_protocol}`),
      fact("External groups", percent(about.external_share), "of the groups trained on"),
      fact("Tokens", count(about.tokens), `${count(about.tokens_per_second)} per second`),
      fact("Rollouts", count(about.rollouts), "questions answered"),
    );
    note.hidden = about.has_logs || !about.nodes;
    unreadable.hidden = !about.unreadable_lines;
    unreadable.textContent = `${count(about.unreadable_lines)} ${about.unreadable_lines === 1 ? "line" : "lines"} of the nodes' logs cannot be read: the curves may have gaps.`;
  }

  return { element: h("section", { class: "card", "aria-label": "Status" }, progress, facts, note, unreadable), show };
}
