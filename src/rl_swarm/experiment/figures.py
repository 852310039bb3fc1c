"""Draws the figures of an experiment from the numbers of its report: every arm a line, its interval a band."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from rl_swarm.storage.files import LocalFiles

Numbers = Mapping[str, Any]  # the contents of report.json
WIDTH, HEIGHT = 6.4, 3.8  # inches of a panel
REWARDS = ("training_set", "fresh_local")


def draw(numbers: Numbers, out: Path) -> dict[str, str]:
    """Write the figures; return their files by what they show."""
    files = {
        "Reward of the training set and of fresh local rollouts": ("rewards.png", ["training_set", "fresh_local"]),
        "Held-out score by rounds and by generated tokens": ("held_out.png", ["held_out", "held_out_by_tokens"]),
        "Held-out score by task": ("by_task.png", ["by_task"]),
    }
    for name, panels in files.values():
        drawn = io.BytesIO()
        figure(numbers, panels).savefig(drawn, dpi=110, format="png")
        LocalFiles(out).write(name, drawn.getvalue())
    return {title: name for title, (name, _) in files.items()}


def figure(numbers: Numbers, panels: Sequence[str], columns: int = 2) -> Figure:
    """Draw some panels of `PANELS` beside each other."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    wide = 1.6 if list(panels) == ["by_task"] else columns
    made = Figure(figsize=(wide * WIDTH, rows * HEIGHT), layout="constrained")
    rewards = None  # the first panel of rewards, whose scale the others share
    for number, name in enumerate(panels, 1):
        axes = made.add_subplot(rows, columns, number, sharey=rewards if name in REWARDS else None)
        rewards = rewards or (axes if name in REWARDS else None)
        axes.grid(alpha=0.3)
        PANELS[name](axes, numbers["configurations"])
        if number == 1:
            axes.legend(fontsize="small")
    return made


def _curves(measure: str, ylabel: str, by: str = "by_round", xlabel: str = "round") -> Callable[[Any, Numbers], None]:
    def panel(axes: Any, arms: Numbers) -> None:
        axes.set(ylabel=ylabel, xlabel=xlabel)
        for label, arm in arms.items():
            points = arm[measure][by]
            x, mean, low, high = zip(*points, strict=True) if points else ([], [], [], [])
            axes.plot(x, mean, marker="." if len(points) < 30 else "", label=label)
            axes.fill_between(x, low, high, alpha=0.15)

    return panel


def _by_task(axes: Any, arms: Numbers) -> None:
    axes.set_ylabel("held-out score (sampled)")
    width = 0.8 / (len(arms) + 1)
    tasks = list(next(iter(arms.values()))["held_out"]["by_task"])
    for number, (label, arm) in enumerate(arms.items()):
        scores = arm["held_out"]["by_task"]
        if number == 0:
            starts = [scores[task]["sampled"]["start"]["mean"] for task in tasks]
            places = [k + width / 2 for k in range(len(tasks))]
            axes.bar(places, starts, width, label="start", color="lightgray")
        known = [(k, scores[task]["sampled"]["end"]) for k, task in enumerate(tasks) if task in scores]
        axes.bar(
            [k + (number + 1.5) * width for k, _ in known],
            [end["mean"] for _, end in known],
            width,
            yerr=[[end["mean"] - end["low"] for _, end in known], [end["high"] - end["mean"] for _, end in known]],
            label=label,
            error_kw={"linewidth": 0.8},
        )
    names = [task.replace("_", "\n") for task in tasks]
    axes.set_xticks([k + 0.4 for k in range(len(tasks))], names, fontsize="x-small")


PANELS: dict[str, Callable[[Any, Numbers], None]] = {
    "fresh_local": _curves("fresh_local", "fresh local reward"),
    "training_set": _curves("training_set", "training set reward"),
    "held_out": _curves("held_out", "held-out score (sampled)"),
    "held_out_by_tokens": _curves("held_out", "held-out score (sampled)", "by_tokens", "generated tokens per node"),
    "by_task": _by_task,
}
