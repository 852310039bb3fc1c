"""Serves an experiment over HTTP: its arms and curves, and every run as a page under `run/<name>/`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from fastapi import Depends, FastAPI, Query
from fastapi.responses import Response

from rl_swarm.experiment.arms import RUNS, name_of
from rl_swarm.experiment.measures import Measure
from rl_swarm.experiment.progress import ArmState, ExperimentProgress, ExperimentState, Points, RunProgress
from rl_swarm.monitor.follower import Poller
from rl_swarm.monitor.records import Line, Lines
from rl_swarm.monitor.runs import Runs
from rl_swarm.monitor.series import mean_of
from rl_swarm.web import security, tables
from rl_swarm.web.api import OR_CSV, Format, as_csv, as_json, page_app, serve_runs
from rl_swarm.web.stream import Stream

MEASURED = (
    "training_set", "fresh_local", "held_out_start", "held_out", "training_set_change", "fresh_local_change",
    "held_out_change", "fresh_local_change_equal_tokens", "held_out_change_equal_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class ExperimentPage:
    version: int  # grows when anything changes
    state: ExperimentState


class ExperimentFollower(Poller):
    """Follows an experiment for many viewers."""

    def __init__(self, progress: ExperimentProgress) -> None:
        super().__init__()
        self.progress = progress

    def _read(self) -> bool:
        with self.lock:
            return self.progress.poll()

    def page(self) -> ExperimentPage:
        with self.lock:
            return ExperimentPage(self.version, self.progress.state())

    def lines(self, metric: str, points: int) -> Lines:
        with self.lock:
            return _lines(metric, self.progress.curves(metric, points))


def create_experiment_app(path: Path, hosts: Sequence[str], token: str | None = None) -> FastAPI:
    follower = ExperimentFollower(ExperimentProgress(path))
    stream, runs = Stream(follower), Runs(None, path.absolute() / RUNS, name_of(path))

    def close() -> None:
        stream.closed = True
        for ending in runs.closing:
            ending()

    about = "The data of an experiment's page: arms, measures, curves, runs. Read only."
    app = page_app("RL Swarm: an experiment", about, "experiment.html", stream, runs, close)
    serve_runs(app, runs)
    security.protect(app, hosts, token)

    def current() -> ExperimentFollower:
        stream.catch_up()
        return follower

    Experiment = Annotated[ExperimentFollower, Depends(current)]

    @app.get("/api/experiment", response_model=ExperimentPage, responses=OR_CSV)
    def experiment(experiment: Experiment, format: Format = "json") -> Response:
        """Return the arms with their measures, and the runs."""
        page = experiment.page()
        return as_json(page) if format == "json" else as_csv("arms", arms_csv(page.state.arms))

    @app.get("/api/experiment/runs", response_model=list[RunProgress], responses=OR_CSV)
    def all_runs(experiment: Experiment, format: Format = "json") -> Response:
        found = experiment.page().state.runs
        return as_json(found) if format == "json" else as_csv("runs", tables.records_csv(RunProgress, found))

    @app.get("/api/experiment/curves", response_model=Lines, responses=OR_CSV)
    def curves(
        experiment: Experiment,
        metric: Literal["fresh_local", "training_set", "held_out"] = "fresh_local",
        points: Annotated[int, Query(ge=2, le=1000, description="Maximum number of points of a curve.")] = 100,
        format: Format = "json",
    ) -> Response:
        """Return a line per arm: the mean over its nodes and seeds."""
        lines = experiment.lines(metric, points)
        return as_json(lines) if format == "json" else as_csv(metric, tables.lines_csv(lines))

    return app


def _lines(metric: str, curves: dict[str, Points]) -> Lines:
    """Align all curves to the same rounds."""
    rounds = sorted({after for points in curves.values() for after, _ in points})
    known = {label: dict(points) for label, points in curves.items()}
    lines = [Line(label, label, [values.get(after) for after in rounds]) for label, values in known.items()]
    return Lines(metric, rounds, mean_of([line.values for line in lines]), lines)


def arms_csv(arms: Sequence[ArmState]) -> str:
    """Write a line per arm; every measure with the ends of its interval."""
    plain = ["arm", "nodes", "played", "rounds", "against"]
    header = [*plain, "seeds", *(f"{name}{end}" for name in MEASURED for end in ("", "_low", "_high"))]

    def ends(measure: Measure | None) -> list[float | None]:
        return [measure.mean, measure.low, measure.high] if measure else [None] * 3

    rows = [
        [
            *(getattr(arm, name) for name in plain),
            " ".join(map(str, arm.seeds)),
            *(value for name in MEASURED for value in ends(getattr(arm, name))),
        ]
        for arm in arms
    ]
    return tables.csv_text(header, rows)
