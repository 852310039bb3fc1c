"""Figures of an experiment: every arm a line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from rl_swarm.experiment import measures
from rl_swarm.experiment.measures import ArmResult

WIDE = (6.4, 3.8)


def draw(arms: Sequence[ArmResult], out: Path) -> dict[str, str]:
    """Writes the figures; what each shows, and the name of its file."""
    figures = {
        "Reward of fresh local rollouts": (
            "fresh_local.png",
            _curves(arms, "fresh local reward", "reward_local"),
        ),
        "Reward of the training set": (
            "training_set.png",
            _curves(arms, "training set reward", "reward_training"),
        ),
        "Held-out score by rounds and by generated tokens": ("held_out.png", _held_out(arms)),
        "Held-out score by task": ("by_task.png", _by_task(arms)),
    }
    for name, figure in figures.values():
        figure.savefig(out / name, dpi=110)
    return {title: name for title, (name, _) in figures.items()}


def _axes(figure: Figure, place: tuple[int, int, int], ylabel: str, xlabel: str) -> Any:
    axes = figure.add_subplot(*place)
    axes.set_ylabel(ylabel)
    axes.set_xlabel(xlabel)
    axes.grid(alpha=0.3)
    return axes


def _curves(arms: Sequence[ArmResult], ylabel: str, field: str) -> Figure:
    figure = Figure(figsize=WIDE, layout="constrained")
    axes = _axes(figure, (1, 1, 1), ylabel, "round")
    for result in arms:
        points = result.curve(lambda line: float(getattr(line, field)), points=40)
        axes.plot([x for x, _ in points], [y for _, y in points], label=result.label)
    axes.legend(fontsize="small")
    return figure


def _held_out(arms: Sequence[ArmResult]) -> Figure:
    figure = Figure(figsize=(2 * WIDE[0], WIDE[1]), layout="constrained")
    by_round = _axes(figure, (1, 2, 1), "held-out score (sampled)", "round")
    by_tokens = _axes(figure, (1, 2, 2), "held-out score (sampled)", "generated tokens per node")
    for result in arms:
        points = result.held_out_curve()
        by_round.plot([x for x, _ in points], [y for _, y in points], marker=".", label=result.label)
        spent = [measures.tokens_spent(run, node) for run in result.runs for node in run.nodes]
        tokens = [sum(each[x - 1] if x else 0.0 for each in spent) / len(spent) for x, _ in points]
        by_tokens.plot(tokens, [y for _, y in points], marker=".", label=result.label)
    by_round.legend(fontsize="small")
    return figure


def _by_task(arms: Sequence[ArmResult]) -> Figure:
    figure = Figure(figsize=(1.6 * WIDE[0], WIDE[1]), layout="constrained")
    axes = _axes(figure, (1, 1, 1), "held-out score (sampled)", "")
    width = 0.8 / (len(arms) + 1)
    tasks: list[str] = []
    for number, result in enumerate(arms):
        scores = result.by_task()
        tasks = tasks or list(scores)
        if number == 0:
            starts = [scores[task][0].mean for task in tasks]
            axes.bar(
                [k + width / 2 for k in range(len(tasks))], starts, width, label="start", color="lightgray"
            )
        ends = [scores[task][1] for task in tasks if task in scores]
        places = [k + (number + 1.5) * width for k in range(len(ends))]
        errors = [[e.mean - e.low for e in ends], [e.high - e.mean for e in ends]]
        axes.bar(
            places,
            [e.mean for e in ends],
            width,
            yerr=errors,
            label=result.label,
            error_kw={"linewidth": 0.8},
        )
    axes.set_xticks(
        [k + 0.4 for k in range(len(tasks))], [task.replace("_", "\n") for task in tasks], fontsize="x-small"
    )
    axes.legend(fontsize="small")
    return figure
