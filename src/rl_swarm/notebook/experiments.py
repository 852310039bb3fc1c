"""Runs the SAPO experiment below a cell, and shows its results."""

from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from rl_swarm.errors import UserError
from rl_swarm.experiment import report, text
from rl_swarm.experiment.arms import is_packed
from rl_swarm.experiment.drawing import drawn
from rl_swarm.experiment.progress import ExperimentProgress
from rl_swarm.notebook.cells import run_below_cell, set_flags, written
from rl_swarm.notebook.picture import WIDTH
from rl_swarm.notebook.plots import Plot, needs_matplotlib

# Options of `rl-swarm experiment sapo`; everything else is a setting.
OPTIONS = (
    "configs", "strategies", "nodes", "rounds", "seeds", "model", "tasks", "rates", "tune_seeds", "tune_rounds",
    "device",
    "at_once",
)  # fmt: skip
# A check that all of it works here. On two slow cores it takes about three minutes with four arms.
TEST = {"model": "tiny", "nodes": 4, "rounds": 20, "seeds": "1", "rates": "", "held_out_questions": 50}


def experiment(out: str | Path, test: bool = False, **options: object) -> Path:
    """Run the SAPO experiment, or resume it, and return the folder of its results.

    Options are those of `rl-swarm experiment sapo` (`configs="paper"`) and settings of docs/settings.md. `test` runs a
    small one, in a folder of its own.
    """
    folder = Path(f"{out}-test" if test else out)
    progress = ExperimentProgress(folder)

    def picture(last: bool) -> RenderableType:
        progress.poll()
        state = progress.state()
        return drawn(state, WIDTH) if state.runs or state.tuning else Text(f"{folder}: starting")

    run_below_cell(["experiment", "sapo", "--out", str(folder), *flags({**options, **(TEST if test else {})})], picture)
    return folder


def flags(options: dict[str, object]) -> list[str]:
    """Format options as the command takes them, without those that are None or empty. `node` may be a list."""
    given = {name: value for name, value in options.items() if value is not None and value != ""}
    nodes, keep = given.pop("node", ()), given.pop("keep_models", False)
    found = ["--keep-models"] if keep else []
    for assignment in [nodes] if isinstance(nodes, str) else list(nodes):  # type: ignore[call-overload]
        found += ["--node", assignment]
    for name in OPTIONS:
        if name in given:
            found += [f"--{name.replace('_', '-')}", written(given.pop(name))]
    return found + set_flags(given)


def results(*given: str | Path) -> "Results":
    """Read the results of one or several experiments: folders of `experiment`, packed files, or folders with a
    report.json."""
    paths = [Path(path) for path in given]
    for path in paths:
        if not (is_packed(path) or path.is_dir()):
            raise UserError(f"{path}: there is no such folder. Give the folder of an experiment.")
    return Results(report.read(paths))


class Markdown:
    """Shows some tables of a report at the end of a cell."""

    def __init__(self, written: str) -> None:
        self.text = written

    def _repr_markdown_(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text


class Results(Markdown):
    """Holds the numbers of a report, as in report.json, and shows rewards and scores at the end of a cell."""

    def __init__(self, numbers: dict[str, Any]) -> None:
        self.numbers = numbers
        super().__init__("\n\n".join([*text.head(numbers), self.tables("Rewards", "Held-out score").text]))

    def tables(self, *titles: str) -> Markdown:
        """Return sections of the report by the beginnings of their titles; all of them without any."""
        sections = text.sections(self.numbers)
        for title in titles:
            if not any(known.startswith(title) for known in sections):
                raise UserError(f"There is no table {title!r}. There are: {', '.join(sections)}.")
        wanted = [
            f"**{title}**\n\n{section}" for title, section in sections.items() if not titles or title.startswith(titles)
        ]
        return Markdown("\n\n".join(wanted))

    def plot(self, *panels: str) -> Plot:
        """Plot curves with intervals: fresh_local, training_set, held_out, held_out_by_tokens; or by_task."""
        with needs_matplotlib():
            from rl_swarm.experiment import figures
        for panel in panels:
            if panel not in figures.PANELS:
                raise UserError(f"There is no plot {panel!r}. There are: {', '.join(figures.PANELS)}.")
        return Plot(figures.figure(self.numbers, panels or [name for name in figures.PANELS if name != "by_task"]))
