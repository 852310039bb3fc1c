"""The report of an experiment: `report.md` with tables and figures, `report.json` with the same numbers for programs."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rl_swarm.errors import UserError
from rl_swarm.evaluation import mean
from rl_swarm.experiment import measures
from rl_swarm.experiment.arms import FILE, RUNS
from rl_swarm.experiment.measures import ArmResult, NodeLog, RoundLine, Run

MACHINE, RATES = "machine.json", "rates.json"
THOUSAND, HOUR = 1000.0, 3600.0


class Tuned(msgspec.Struct, frozen=True):
    """How an arm's learning rate was chosen: the held-out score at the end of every rate's runs."""

    rate: float
    scores: dict[str, float]  # by rate
    seeds: list[int]
    rounds: int


@dataclass
class Findings:
    """All that the report is made of."""

    arms: list[ArmResult]
    unfinished: list[str] = field(default_factory=list)
    tuned: dict[str, Tuned] = field(default_factory=dict)  # by label
    machine: dict[str, str] = field(default_factory=dict)


def find(folders: Sequence[Path]) -> Findings:
    """The finished runs in these folders; arms of several experiments carry the name of theirs."""
    found = Findings([])
    for folder in folders:
        runs = _folders(folder)
        if not runs:
            raise UserError(
                f"{folder} holds no run of an experiment. Give what `rl-swarm experiment sapo --out` was given."
            )
        prefix = f"{folder.name}: " if len(folders) > 1 else ""
        by_label: dict[str, ArmResult] = {}
        for path in runs:
            run = Run.read(path)
            if run is None or run.played < run.job.rounds or len(run.nodes[0].held_out) < 2:
                found.unfinished.append(f"{prefix}{path.name}")
                continue
            label = prefix + run.job.arm.label
            by_label.setdefault(label, ArmResult(label, run.job.arm, [])).runs.append(run)
        found.arms += sorted(by_label.values(), key=lambda result: result.arm.place)
        found.tuned |= {prefix + label: tuned for label, tuned in read_rates(folder).items()}
        found.machine |= _read(runs[0] / MACHINE, dict[str, str]) or {}
    if not found.arms:
        raise UserError(
            f"No run has finished yet in {', '.join(map(str, folders))}; unfinished: {', '.join(found.unfinished)}."
        )
    return found


def _folders(folder: Path) -> list[Path]:
    if (folder / FILE).is_file():
        return [folder]
    return sorted(path.parent for path in [*folder.glob(f"{RUNS}/*/{FILE}"), *folder.glob(f"*/{FILE}")])


def read_rates(folder: Path) -> dict[str, Tuned]:
    return _read(folder / RATES, dict[str, Tuned]) or {}


def _read(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise UserError(f"{path} cannot be read: {error}.") from error


def write(folders: Sequence[Path], out: Path) -> Path:
    """Writes report.md, report.json and the figures; returns the first."""
    found = find(folders)
    out.mkdir(parents=True, exist_ok=True)
    numbers = as_numbers(found)
    (out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(numbers)) + b"\n")
    pictures = _drawn(found, out)
    path = out / "report.md"
    path.write_text(as_markdown(found, numbers, pictures))
    return path


def _drawn(found: Findings, out: Path) -> dict[str, str]:
    try:
        from rl_swarm.experiment import figures
    except ImportError:  # matplotlib, of the extra `experiment`
        return {}
    return figures.draw(found.arms, out)


def bases(arms: Sequence[ArmResult]) -> list[ArmResult]:
    """What others are compared with: nodes that train alone, in the plain way."""
    return [result for result in arms if result.arm.is_plain] or list(arms[:1])


def fresh(run: Run, node: NodeLog) -> float:
    return mean([line.reward_local for line in node.rounds])


def training_set(run: Run, node: NodeLog) -> float:
    return mean([line.reward_training for line in node.rounds])


def held_out(run: Run, node: NodeLog) -> float:
    return node.held_out[-1].sampled


COMPARED: dict[str, Callable[[Run, NodeLog], float]] = {
    "training_set": training_set,
    "fresh_local": fresh,
    "held_out": held_out,
}


def as_numbers(found: Findings) -> dict[str, object]:
    budgets = {
        "tokens": min(result.budget(measures.tokens_spent) for result in found.arms),
        "seconds": min(result.budget(measures.seconds_spent) for result in found.arms),
    }
    return {
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "machine": found.machine,
        "unfinished": found.unfinished,
        "equal_budgets_per_node": budgets,
        "configurations": {r.label: _arm(r, found, budgets) for r in found.arms},
    }


def _arm(result: ArmResult, found: Findings, budgets: Mapping[str, float]) -> dict[str, object]:
    jobs = [run.job for run in result.runs]
    settings = jobs[0].members()[0]
    reach, lag, tasks = result.spread()
    tuned = found.tuned.get(result.label)
    return {
        "configuration": result.arm.configuration,
        "strategy": result.arm.strategy,
        "nodes": result.nodes,
        "rounds": result.rounds,
        "seeds": [job.seed for job in jobs],
        "model": settings.model,
        "learning_rate": settings.step_size(),
        "learning_rate_chosen": msgspec.to_builtins(tuned),
        "settings": jobs[0].settings,
        "settings_of_nodes": jobs[0].each,
        "training_set": _rewards(result, lambda line: line.reward_training),
        "fresh_local": {
            **_rewards(result, lambda line: line.reward_local),
            "at_equal_tokens": _at(result, measures.fresh_until, measures.tokens_spent, budgets["tokens"]),
            "at_equal_seconds": _at(result, measures.fresh_until, measures.seconds_spent, budgets["seconds"]),
        },
        "held_out": _held_out(result, budgets),
        "groups_with_signal": asdict(
            result.of(
                lambda run, node: (
                    sum(line.local_with_signal for line in node.rounds)
                    / max(1, sum(line.local_groups for line in node.rounds))
                )
            )
        ),
        "external_groups_per_round": asdict(
            result.of(lambda run, node: mean([float(line.external_taken) for line in node.rounds]))
        ),
        "oscillation": asdict(
            result.of(lambda run, node: measures.oscillation([line.reward_local for line in node.rounds]))
        ),
        "spread_of_skills": {
            "tasks_learned": tasks,
            "reach": reach and asdict(reach),
            "rounds": lag and asdict(lag),
        },
        "generated_tokens_per_node": asdict(result.of(lambda r, n: measures.tokens_spent(r, n)[-1])),
        "trained_tokens_per_node": asdict(
            result.of(lambda r, n: sum(line.trained_tokens for line in n.rounds) / r.share)
        ),
        "seconds_per_node": asdict(result.of(lambda r, n: measures.seconds_spent(r, n)[-1])),
        "against": {
            base.label: {
                name: (change := measures.compared(result.each(value), base.each(value))) and asdict(change)
                for name, value in COMPARED.items()
            }
            for base in bases(found.arms)
            if base is not result
        },
    }


def _rewards(result: ArmResult, value: Callable[[RoundLine], float]) -> dict[str, object]:
    def earned(run: Run, node: NodeLog) -> float:
        return sum(value(line) for line in node.rounds)

    return {
        "total": asdict(result.of(earned, result.nodes)),
        "per_round": asdict(result.of(lambda r, n: earned(r, n) / len(n.rounds))),
        "per_1000_tokens": asdict(
            result.of(lambda r, n: THOUSAND * earned(r, n) / max(1.0, measures.tokens_spent(r, n)[-1]))
        ),
        "per_second": asdict(
            result.of(lambda r, n: earned(r, n) / max(1e-9, measures.seconds_spent(r, n)[-1]))
        ),
        "by_round": result.curve(value),
    }


def _held_out(result: ArmResult, budgets: Mapping[str, float]) -> dict[str, object]:
    def gain(run: Run, node: NodeLog) -> float:
        return node.held_out[-1].sampled - node.held_out[0].sampled

    def ends(value: Callable[[measures.HeldOutLine], float | None]) -> dict[str, object]:
        return {
            "start": asdict(result.of(lambda r, n: value(n.held_out[0]) or 0.0)),
            "end": asdict(result.of(lambda r, n: value(n.held_out[-1]) or 0.0)),
        }

    sampled, greedy = result.by_task(), result.by_task(greedy=True)
    return {
        "sampled": ends(lambda line: line.sampled),
        "greedy": ends(lambda line: line.greedy),
        "by_task": {
            task: {
                "sampled": {"start": asdict(start), "end": asdict(end)},
                "greedy": {"start": asdict(greedy[task][0]), "end": asdict(greedy[task][1])},
            }
            for task, (start, end) in sampled.items()
        },
        "gain_per_round": asdict(result.of(lambda r, n: gain(r, n) / len(n.rounds))),
        "gain_per_million_tokens": asdict(
            result.of(lambda r, n: 1e6 * gain(r, n) / max(1.0, measures.tokens_spent(r, n)[-1]))
        ),
        "gain_per_hour": asdict(
            result.of(lambda r, n: HOUR * gain(r, n) / max(1e-9, measures.seconds_spent(r, n)[-1]))
        ),
        "at_equal_tokens": _at(result, measures.held_out_at, measures.tokens_spent, budgets["tokens"]),
        "at_equal_seconds": _at(result, measures.held_out_at, measures.seconds_spent, budgets["seconds"]),
        "by_round": result.held_out_curve(),
    }


def _at(
    result: ArmResult,
    measure: Callable[[NodeLog, Sequence[float], float], float],
    spent: Callable[[Run, NodeLog], list[float]],
    budget: float,
) -> dict[str, float]:
    return asdict(result.of(lambda run, node: measure(node, spent(run, node), budget)))


def as_markdown(found: Findings, numbers: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    arms: dict[str, dict[str, Any]] = numbers["configurations"]
    first = next(iter(arms.values()))
    seeds = sorted({seed for arm in arms.values() for seed in arm["seeds"]})
    against = [base.label for base in bases(found.arms)]
    parts = [
        "# What sharing rollouts is worth",
        f"{first['nodes']} nodes, {first['rounds']} rounds, {first['model']}, "
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}; made {numbers['made']}"
        + (f" on {found.machine['processor']}, {found.machine['cores']} cores" if found.machine else "")
        + (f", {found.machine['gpu']}" if "gpu" in found.machine else "")
        + ".",
        "In brackets: 95 % intervals by bootstrap over seeds and nodes."
        + (
            ""
            if len(seeds) > 1
            else " With one seed they tell how nodes differ, not how seeds do: they are too narrow."
        ),
    ]
    if found.unfinished:
        parts.append(f"Left out, because unfinished: {', '.join(found.unfinished)}.")
    parts += ["## Rewards", _rewards_table(arms, against)]
    parts.append(
        "Totals are over all nodes and rounds, of the mean reward of a round. `training set` is what a node trained on, "
        "external groups included, as the paper logs it; `fresh local` is what its own model has just written. A pooled "
        "learner counts as all nodes whose questions it has."
    )
    parts += ["## Held-out score", _held_out_table(arms)]
    equal = numbers["equal_budgets_per_node"]
    parts.append(
        f"Questions that training never sees, sampled at temperature 1 and greedily. `equal tokens`: when a node had "
        f"generated {equal['tokens']:,.0f} tokens; `equal seconds`: when it had worked for {equal['seconds']:,.0f} s."
    )
    parts += ["## At equal cost", _cost_table(arms), "## How it learns", _learning_table(arms)]
    parts.append(
        f"`signal`: the share of own groups whose rewards differ. `oscillation`: how far the fresh local reward, in windows, "
        f"lies below the highest it had reached before, on average. `reach`: of the tasks in which some node rose by "
        f"{measures.SKILL} or more, the share of the other nodes that did so too by the end; `after`: how many rounds "
        f"later than the first, as finely as held-out scores were taken."
    )
    parts += ["## Held-out score by task, at the end (sampled)", _task_table(arms), _rates(arms)]
    parts += [f"![{title}]({name})" for title, name in pictures.items()]
    if not pictures:
        parts.append(
            "Figures need matplotlib: `pip install 'rl-swarm[experiment]'`, then `rl-swarm experiment report`."
        )
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(measure: Mapping[str, float] | None, digits: int = 3) -> str:
    if measure is None:
        return ""
    mean, low, high = (f"{measure[name]:.{digits}f}" for name in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def _percent(measure: Mapping[str, float] | None) -> str:
    if measure is None:
        return ""
    mean, low, high = (f"{100 * measure[name]:+.0f}" for name in ("mean", "low", "high"))
    return f"{mean} % ({low} to {high})"


def _rewards_table(arms: Mapping[str, Any], against: Sequence[str]) -> str:
    head = ["arm", "training set, total", "fresh local, total", "fresh local, per round"]
    head += [f"{what} against {base}" for base in against for what in ("training set", "fresh local")]
    rows = []
    for label, arm in arms.items():
        row = [label, _number(arm["training_set"]["total"], 1), _number(arm["fresh_local"]["total"], 1)]
        row.append(_number(arm["fresh_local"]["per_round"]))
        for base in against:
            change = arm["against"].get(base, {})
            row += [_percent(change.get(what)) for what in ("training_set", "fresh_local")]
        rows.append(row)
    return _table(head, rows)


def _held_out_table(arms: Mapping[str, Any]) -> str:
    head = ["arm", "start", "end", "greedy, start", "greedy, end", "equal tokens", "equal seconds"]
    rows = []
    for label, arm in arms.items():
        found = arm["held_out"]
        ends = [found[how][when] for how in ("sampled", "greedy") for when in ("start", "end")]
        rows.append(
            [label, *(_number(m) for m in [*ends, found["at_equal_tokens"], found["at_equal_seconds"]])]
        )
    return _table(head, rows)


def _cost_table(arms: Mapping[str, Any]) -> str:
    head = [
        "arm", "generated tokens", "trained tokens", "seconds", "fresh local, equal tokens", "equal seconds",
        "per 1000 tokens", "per second", "held-out gain per million tokens", "per hour",
    ]  # fmt: skip
    rows = []
    for label, arm in arms.items():
        spent = [
            f"{arm[name]['mean']:,.0f}"
            for name in ("generated_tokens_per_node", "trained_tokens_per_node", "seconds_per_node")
        ]
        fresh, held = arm["fresh_local"], arm["held_out"]
        names = ("at_equal_tokens", "at_equal_seconds", "per_1000_tokens", "per_second")
        rows.append([label, *spent, *(_number(fresh[name]) for name in names),
                     _number(held["gain_per_million_tokens"]), _number(held["gain_per_hour"], 2)])  # fmt: skip
    return (
        _table(head, rows)
        + "\n\nTokens and seconds are per node. Seconds are those of its own work, in its turn."
    )


def _learning_table(arms: Mapping[str, Any]) -> str:
    head = ["arm", "signal", "external groups a round", "oscillation", "tasks learned", "reach", "after"]
    return _table(
        head,
        [
            [
                label,
                _number(arm["groups_with_signal"]),
                f"{arm['external_groups_per_round']['mean']:.2f}",
                _number(arm["oscillation"]),
                f"{arm['spread_of_skills']['tasks_learned']:g}",
                _number(arm["spread_of_skills"]["reach"], 2),
                _number(arm["spread_of_skills"]["rounds"], 0),
            ]
            for label, arm in arms.items()
        ],
    )


def _task_table(arms: Mapping[str, Any]) -> str:
    tasks = list(next(iter(arms.values()))["held_out"]["by_task"])
    rows = []
    for task in tasks:
        ends = [arm["held_out"]["by_task"].get(task, {}).get("sampled", {}) for arm in arms.values()]
        rows.append([task, *(_number(end.get("end"), 2) for end in ends)])
    return _table(["task", *arms], rows)


def _rates(arms: Mapping[str, Any]) -> str:
    lines = []
    for label, arm in arms.items():
        chosen = arm["learning_rate_chosen"]
        line = f"- {label}: {arm['learning_rate']:g}"
        if chosen:
            scores = ", ".join(f"{rate}: {score:.3f}" for rate, score in chosen["scores"].items())
            line += (
                f", the best of {scores} (held-out score after {chosen['rounds']} rounds, "
                f"seeds {', '.join(map(str, chosen['seeds']))})"
            )
        else:
            line += ", not tuned"
        lines.append(line)
    return "## Learning rates\n\n" + "\n".join(lines)
