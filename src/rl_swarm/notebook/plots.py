"""Draws curves of a swarm, one chart beside the other: every node a thin line, their mean a bold one."""

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rl_swarm.errors import UserError
from rl_swarm.monitor.records import Lines
from rl_swarm.monitor.snapshot import HELD_OUT

TITLES = {
    "reward_local": "reward",
    HELD_OUT: "held-out score",
    "tokens_per_second": "tokens per second",
    "external_accepted": "external groups",
    "completion_length": "length of answers in tokens",
    "peak_memory": "memory in bytes",
}
COLUMNS = 2
MAX_NAMED = 8  # nodes in the legend


class Plot:
    """Shows a figure of matplotlib at the end of a cell, whatever the notebook's backend."""

    def __init__(self, figure: Any) -> None:
        self.figure = figure

    def _repr_png_(self) -> bytes:
        png = io.BytesIO()
        self.figure.savefig(png, format="png", dpi=100)
        return png.getvalue()

    def __repr__(self) -> str:
        return "a plot of " + ", ".join(axes.get_title("left") or axes.get_ylabel() for axes in self.figure.axes)


@contextmanager
def needs_matplotlib() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UserError("Curves need matplotlib: pip install 'rl-swarm[notebooks]'") from error


def plotted(charts: Sequence[Lines]) -> Plot:
    with needs_matplotlib():
        from matplotlib.figure import Figure
    columns = min(COLUMNS, len(charts))
    rows = math.ceil(len(charts) / columns)
    figure = Figure(figsize=(6 * columns, 3.4 * rows), layout="constrained")
    for number, chart in enumerate(charts, 1):
        axes = figure.add_subplot(rows, columns, number)
        axes.set_title(TITLES.get(chart.metric, chart.metric.replace("_", " ")), loc="left")
        axes.set_xlabel("round")
        axes.grid(alpha=0.3)
        for line in chart.lines:
            _draw(axes, chart.rounds, line.values, linewidth=1, alpha=0.6, label=line.name)
        if len(chart.lines) != 1:
            _draw(axes, chart.rounds, chart.mean, linewidth=2.5, color="black", label="mean")
        if number == 1 and 0 < len(chart.lines) <= MAX_NAMED:
            axes.legend(fontsize="small")
    return Plot(figure)


def _draw(axes: Any, rounds: Sequence[int], values: Sequence[float | None], **style: Any) -> None:
    known = [(played, value) for played, value in zip(rounds, values, strict=True) if value is not None]
    axes.plot([x for x, _ in known], [y for _, y in known], marker="." if len(known) < 20 else "", **style)
