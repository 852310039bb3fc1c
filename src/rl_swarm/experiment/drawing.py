"""Draws an experiment in characters, for `experiment sapo`, `watch --tui`, `status` and a notebook's cell."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rl_swarm.experiment.measures import Measure, percent
from rl_swarm.experiment.progress import ArmState, ExperimentState, followed
from rl_swarm.monitor.drawing import plain

DRAW_SECONDS = 1.0
GAP = 2  # between columns
DROP_ORDER = (
    "rounds",
    "seeds",
    "start",
    "held-out change",
    "training-set change",
)  # left out first in a narrow terminal


def drawn(state: ExperimentState, width: int) -> Group:
    """Draw every arm with its measures and their intervals, and the runs that go on."""
    parts: list[RenderableType] = [_head(state)]
    if state.arms:
        parts.append(arms_table(state, width))
    parts.append(Text(plain(state.conclusion)))
    going = [f"{plain(run.run)} {run.phase} {run.played}/{run.rounds}" for run in state.runs if run.phase != "finished"]
    if going:
        parts.append(Text(", ".join(going), style="dim"))
    return Group(*parts)


def watch(path: Path, console: Console, stop: threading.Event) -> None:
    """Show an experiment until all its runs have finished or `stop` is set; show it once without a terminal."""
    progress = followed(path)
    if not console.is_terminal:
        return print_once(path)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            state = progress.state()
            live.update(drawn(state, console.width), refresh=True)
            if state.phase == "finished" or stop.wait(DRAW_SECONDS):
                return None
            progress.poll()


def print_once(path: Path, as_json: bool = False) -> None:
    state = followed(path).state()
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(state)).decode())
    else:
        console = Console(highlight=False)
        console.print(drawn(state, console.width))


def arms_table(state: ExperimentState, width: int) -> Table:
    """Draw the arms, with as many columns as fit."""
    rows = [_cells(arm) for arm in state.arms]
    titles = [title for title in rows[0] if any(row[title].plain for row in rows)]
    if all(arm.played == arm.rounds for arm in state.arms):
        titles.remove("rounds")
    if all(len(arm.seeds) < 2 for arm in state.arms):
        titles.remove("seeds")
    for dropped in DROP_ORDER:
        if sum(_width(title, rows) + GAP for title in titles) - GAP > width:
            titles = [title for title in titles if title != dropped]
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="dim", pad_edge=False)
    for title in titles:
        table.add_column(_shown(title), justify="left" if title == "arm" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[title] for title in titles))
    return table


def _head(state: ExperimentState) -> Text:
    finished = sum(run.phase == "finished" for run in state.runs)
    says: list[str] = [state.phase] if state.phase != "finished" or not state.runs else []
    says += [f"{finished} of {len(state.runs)} runs have finished"] if state.runs else []
    if state.tuned < state.tuning:
        says.append(f"learning rates: {state.tuned} of {state.tuning} short runs")
    return Text(plain(state.name), style="bold").append(f"  {', '.join(says)}", style="dim")


def _shown(title: str) -> str:
    return "change" if title.endswith("change") else "" if title == "start" else title


def _width(title: str, rows: Sequence[Mapping[str, Text]]) -> int:
    lines = [line for row in rows for line in row[title].plain.splitlines()]
    return max(map(len, [_shown(title), *lines]))


def _cells(arm: ArmState) -> dict[str, Text]:
    """Return a row by its titles. Changes are against the arm that is named below."""
    return {
        "arm": Text(plain(arm.arm)).append(f"\n  against {plain(arm.against)}" if arm.against else "", style="dim"),
        "rounds": Text(f"{arm.played}/{arm.rounds}"),
        "seeds": Text(str(len(arm.seeds))),
        "training set": _number(arm.training_set, 1),
        "training-set change": _change(arm.training_set_change),
        "fresh local": _number(arm.fresh_local, 1),
        "fresh-local change": _change(arm.fresh_local_change),
        "start": Text(f"{arm.held_out_start.mean:.3f} →" if arm.held_out_start else ""),
        "held out": _number(arm.held_out, 3),
        "held-out change": _change(arm.held_out_change),
    }


def _number(measure: Measure | None, digits: int) -> Text:
    if measure is None:
        return Text("")
    low, high = f"{measure.low:.{digits}f}", f"{measure.high:.{digits}f}"
    return Text(f"{measure.mean:.{digits}f}").append(f"\n{low} to {high}", style="dim")


def _change(measure: Measure | None) -> Text:
    if measure is None:
        return Text("")
    mean, low, high = map(percent, (measure.mean, measure.low, measure.high))
    return Text(f"{mean} %").append(f"\n{low} to {high}", style="dim")
