"""Writes the report of an experiment: `report.md` with tables and figures, `report.json` with the same numbers."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rl_swarm.errors import UserError
from rl_swarm.experiment import measures, packed, text
from rl_swarm.experiment.arms import RUNS, files_of, is_packed, job_folders, name_of
from rl_swarm.experiment.conclusion import PUBLISHED
from rl_swarm.experiment.measures import ArmResult, NodeLog, Run, Score, Tuned
from rl_swarm.experiment.packed import Head
from rl_swarm.node.evaluation import mean
from rl_swarm.protocol.wire import MAX_BYTES, UNREADABLE
from rl_swarm.storage.files import LocalFiles
from rl_swarm.telemetry.schema import RoundRecord

MACHINE, RATES, NUMBERS = "machine.json", "rates.json", "report.json"
THOUSAND, HOUR = 1000.0, 3600.0


@dataclass
class Findings:
    """Holds everything that the report is made of."""

    arms: list[ArmResult]
    unfinished: list[str] = field(default_factory=list)
    tuned: dict[str, Tuned] = field(default_factory=dict)  # by label
    machine: dict[str, str] = field(default_factory=dict)


def find(paths: Sequence[Path]) -> Findings:
    """Find the finished runs of experiments, in folders or packed. With several experiments, labels of arms begin with
    the experiment's name."""
    found = Findings([])
    for path in paths:
        prefix = _prefix(path, paths)
        head, runs, unfinished = _experiment(path)
        by_label: dict[str, ArmResult] = {}
        for run in runs:
            label = prefix + run.job.arm.label
            by_label.setdefault(label, ArmResult(label, run.job.arm, [])).runs.append(run)
        found.arms += sorted(by_label.values(), key=lambda result: result.arm.place)
        found.unfinished += [prefix + name for name in unfinished]
        found.tuned |= {prefix + label: tuned for label, tuned in head.rates.items()}
        found.machine |= head.machine
    if not found.arms:
        raise UserError(
            f"No run has finished yet in {', '.join(map(str, paths))}; unfinished: {', '.join(found.unfinished)}."
        )
    return found


def _experiment(path: Path) -> tuple[Head, list[Run], list[str]]:
    """Read the finished runs of one experiment, and the names of the others."""
    if is_packed(path):
        head, packed_runs = packed.read(path)
        return head, list(packed_runs), []
    folders, runs, unfinished = _folders(path), [], []
    if not folders:
        raise UserError(
            f"{path} holds no run of an experiment. Give the directory that `rl-swarm experiment sapo --out` named."
        )
    for folder in folders:
        run = Run.read(folder)
        if run is None or not run.is_whole:
            unfinished.append(folder.name)
        else:
            runs.append(run)
    machine = _read(folders[0] / MACHINE, dict[str, str]) or {}
    return Head(machine, read_rates(path)), runs, unfinished


def _prefix(path: Path, paths: Sequence[Path]) -> str:
    """Return the prefix of an experiment's arms: its name, or its path where two have one name."""
    names, name = [name_of(one) for one in paths], name_of(path)
    return "" if len(paths) == 1 else f"{name if names.count(name) == 1 else path}: "


def _folders(folder: Path) -> list[Path]:
    if folder in job_folders(folder.parent):
        return [folder]
    return sorted([*job_folders(folder / RUNS), *job_folders(folder)])


def read_rates(folder: Path) -> dict[str, Tuned]:
    return _read(folder / RATES, dict[str, Tuned]) or {}


def _read(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(files_of(path.parent).read(path.name, MAX_BYTES), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error


def write(paths: Sequence[Path], out: Path) -> Path:
    """Write report.md, report.json and the figures; return the path of the first."""
    found = find(paths)
    files, numbers = LocalFiles(out), as_numbers(found)
    files.write(NUMBERS, msgspec.json.format(msgspec.json.encode(numbers)) + b"\n")
    files.write("report.md", text.whole(numbers, _drawn(numbers, out)).encode())
    return out / "report.md"


def pack(folder: Path, path: Path) -> int:
    """Pack what a report reads of the finished runs into one file; return how many runs those are."""
    head, runs, unfinished = _experiment(folder)
    if not runs:
        raise UserError(f"No run has finished yet in {folder}; unfinished: {', '.join(unfinished)}.")
    packed.write(path, head, runs)
    return len(runs)


def read(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the numbers of some experiments; without runs, those of its report.json."""
    known = [is_packed(path) or bool(_folders(path)) for path in paths]
    if all(known):
        return as_numbers(find(paths))
    merged: dict[str, Any] = {}
    for path, has_runs in zip(paths, known, strict=True):
        numbers = as_numbers(find([path])) if has_runs else _read(path / NUMBERS, dict[str, Any])
        if numbers is None:
            raise UserError(f"{path} holds neither runs nor {NUMBERS} of an experiment.")
        prefix = _prefix(path, paths)
        arms = {prefix + label: arm for label, arm in numbers["configurations"].items()}
        for arm in arms.values():
            arm["against"] = {prefix + base: change for base, change in arm["against"].items()}
        numbers["compared_with"] = [prefix + base for base in numbers["compared_with"]]
        for arm in arms.values():  # experiments have different budgets
            arm["against_at_equal_tokens"] = {}
        lists: dict[str, Any] = {"compared_with": [], "compared_at_equal_tokens": [], "unfinished": []}
        merged = merged or {**numbers, **lists, "configurations": {}}
        merged["configurations"] |= arms
        merged["compared_with"] += numbers["compared_with"]
        merged["unfinished"] += [prefix + run for run in numbers["unfinished"]]
    return merged


def _drawn(numbers: Mapping[str, Any], out: Path) -> dict[str, str]:
    try:
        from rl_swarm.experiment import figures
    except ImportError:  # matplotlib, of the extra `experiment`
        return {}
    return figures.draw(numbers, out)


def bases(arms: Sequence[ArmResult]) -> list[ArmResult]:
    """Return the arms that others are compared with: nodes that train alone, in the plain way."""
    return [result for result in arms if result.arm.is_plain] or list(arms[:1])


def rivals(arms: Sequence[ArmResult]) -> list[ArmResult]:
    """Return the arms that others are compared with at equal cost: the bases, and SAPO as published."""
    published = [result for result in arms if (result.arm.configuration, result.arm.strategy) == PUBLISHED]
    return bases(arms) + [result for result in published if result not in bases(arms)]


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


def as_numbers(found: Findings) -> dict[str, Any]:
    budgets = {
        "tokens": min(result.budget(measures.tokens_spent) for result in found.arms),
        "seconds": min(result.budget(measures.seconds_spent) for result in found.arms),
    }
    return {
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "machine": found.machine,
        "unfinished": found.unfinished,
        "equal_budgets_per_node": budgets,
        "compared_with": [base.label for base in bases(found.arms)],
        "compared_at_equal_tokens": [base.label for base in rivals(found.arms)],
        "configurations": {r.label: _arm(r, found, budgets) for r in found.arms},
    }


def _arm(result: ArmResult, found: Findings, budgets: Mapping[str, float]) -> dict[str, object]:
    jobs = [run.job for run in result.runs]
    settings = jobs[0].swarm()
    reach, lag, tasks = result.spread()
    tuned = found.tuned.get(result.label)
    return {
        "configuration": result.arm.configuration,
        "strategy": result.arm.strategy,
        "nodes": result.nodes,
        "rounds": result.rounds,
        "seeds": [job.seed for job in jobs],
        "model": settings.model.model,
        "generations": settings.sampling.generations,
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
            result.of(lambda run, node: mean([float(line.external_accepted) for line in node.rounds]))
        ),
        "oscillation": asdict(
            result.of(lambda run, node: measures.oscillation([line.reward_local for line in node.rounds]))
        ),
        "spread_of_skills": {"tasks_learned": tasks, "reach": reach and asdict(reach), "rounds": lag and asdict(lag)},
        "generated_tokens_per_node": asdict(result.of(lambda r, n: measures.tokens_spent(r, n)[-1])),
        "trained_tokens_per_node": asdict(
            result.of(lambda r, n: sum(line.trained_tokens for line in n.rounds) / r.share)
        ),
        "seconds_per_node": asdict(result.of(lambda r, n: measures.seconds_spent(r, n)[-1])),
        "against": _changes(result, bases(found.arms), COMPARED),
        "against_at_equal_tokens": _changes(result, rivals(found.arms), _at_equal_tokens(budgets["tokens"])),
    }


def _changes(
    result: ArmResult, others: Sequence[ArmResult], values: Mapping[str, Callable[[Run, NodeLog], float]]
) -> dict[str, object]:
    """Compare an arm with others: by which share each of its values is higher."""
    return {
        base.label: {
            name: (change := measures.compared(result.each(value), base.each(value))) and asdict(change)
            for name, value in values.items()
        }
        for base in others
        if base is not result
    }


def _at_equal_tokens(budget: float) -> dict[str, Callable[[Run, NodeLog], float]]:
    return {
        "fresh_local": lambda r, n: measures.fresh_until(n, measures.tokens_spent(r, n), budget),
        "held_out": lambda r, n: measures.held_out_at(n, measures.tokens_spent(r, n), budget),
    }


def _rewards(result: ArmResult, value: Callable[[RoundRecord], float]) -> dict[str, object]:
    def earned(run: Run, node: NodeLog) -> float:
        return sum(value(line) for line in node.rounds)

    return {
        "total": asdict(result.of(earned, result.nodes)),
        "per_round": asdict(result.of(lambda r, n: earned(r, n) / len(n.rounds))),
        "per_1000_tokens": asdict(
            result.of(lambda r, n: THOUSAND * earned(r, n) / max(1.0, measures.tokens_spent(r, n)[-1]))
        ),
        "per_second": asdict(result.of(lambda r, n: earned(r, n) / max(1e-9, measures.seconds_spent(r, n)[-1]))),
        "by_round": result.curve(value),
    }


def _held_out(result: ArmResult, budgets: Mapping[str, float]) -> dict[str, object]:
    def gain(run: Run, node: NodeLog) -> float:
        return node.held_out[-1].sampled - node.held_out[0].sampled

    def ends(value: Callable[[Score], float | None]) -> dict[str, object]:
        return {
            "start": asdict(result.of(lambda r, n: value(n.held_out[0]) or 0.0)),
            "end": asdict(result.of(lambda r, n: value(n.held_out[-1]) or 0.0)),
        }

    sampled, greedy = result.by_task(), result.by_task(greedy=True)
    curve = result.held_out_curve()
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
        "by_round": curve,
        "by_tokens": [(result.tokens_after(int(after)), *rest) for after, *rest in curve],
    }


def _at(
    result: ArmResult,
    measure: Callable[[NodeLog, Sequence[float], float], float],
    spent: Callable[[Run, NodeLog], list[float]],
    budget: float,
) -> dict[str, float]:
    return asdict(result.of(lambda run, node: measure(node, spent(run, node), budget)))
