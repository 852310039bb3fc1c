"""Lists the runs of a folder, so that they can be laid over each other."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from rl_swarm.monitor import snapshot as telling
from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.records import Line, Lines, RunPage, RunRow
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.monitor.series import Curves, filled, mean_of
from rl_swarm.network.layout import MANIFEST_FILE
from rl_swarm.storage.files import LocalFiles

MAX_OPEN = 32  # runs that are kept in memory
MAX_LISTED = 1000
MAX_LOOKED_AT = 10_000  # folders in which a run is looked for


class Runs:
    def __init__(self, here: Follower | None, root: Path | None = None, experiment: str = "") -> None:
        """`here` is the one that is watched, `root` the folder; by default that of `here`, where it is on this
        machine."""
        if here is not None and not here.view.address.is_url:
            root = here.view.root.absolute().parent
        self.here, self.root = here, root
        self.experiment = experiment  # the name of the one that the runs are of
        self._opening = threading.Lock()
        self._open: OrderedDict[str, Follower] = OrderedDict()
        self.closing: list[Callable[[], None]] = []  # what is to end with the server

    def names(self) -> list[str]:
        """The runs of the folder, the newest first; of a swarm elsewhere only itself."""
        if self.root is None:
            return [self.here.view.address.name] if self.here else []
        files = LocalFiles(self.root)
        when = {name: _changed(files, name) for name in files.names("")[:MAX_LOOKED_AT] if _is_name(name)}
        found = [(changed, name) for name, changed in when.items() if changed is not None]
        return [name for _, name in sorted(found, reverse=True)[:MAX_LISTED]]

    def get(self, name: str) -> Follower | None:
        """A run of the list, looked at now."""
        if self.here and name == self.here.view.address.name:
            return self.here
        if self.root is None or not _is_name(name):
            return None
        folder = self.root / name
        if _changed(LocalFiles(self.root), name) is None:
            return None
        with self._opening:
            found = self._open.setdefault(name, Follower(RunView(folder)))
            self._open.move_to_end(name)
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        found.look()
        return found

    def page(self, offset: int, limit: int, here: Follower | None = None) -> RunPage:
        """`here` is the one that is looked at, by default the one that is watched."""
        names = self.names()
        found = [(name, self.get(name)) for name in names[offset : offset + limit]]
        return RunPage(
            len(names),
            offset,
            [_row(name, run, run is (here or self.here)) for name, run in found if run],
        )

    def lines(self, names: list[str], metric: str, points: int) -> Lines:
        """The mean over the nodes of every run, over the same rounds."""
        found = [(name, run) for name in names if (run := self.get(name)) is not None]
        means = [(name, telling.lines(run, metric, points, most=0)) for name, run in found]
        curves = [_as_curves(lines) for _, lines in means]
        step = max((lines.rounds[1] for _, lines in means if len(lines.rounds) > 1), default=1)
        values = [curve.points(metric, step) for curve in curves]
        length = max(map(len, values), default=0)
        whole = [filled(line, length) for line in values]
        shown = [Line(name, name, line) for (name, _), line in zip(means, whole, strict=True)]
        return Lines(metric, [k * step for k in range(length)], mean_of(whole), shown)


def _row(name: str, run: Follower, here: bool) -> RunRow:
    told = telling.overview(run)
    return RunRow(
        name, told.phase, told.round, told.rounds, told.nodes, told.reward, told.held_out_start, told.held_out_now, here
    )  # fmt: skip


def _as_curves(lines: Lines) -> Curves:
    """A mean as a curve of its own, so that runs of different lengths can be told in the same steps."""
    curves = Curves()
    curves.add(lines.rounds, {lines.metric: lines.mean})
    return curves


def _is_name(name: str) -> bool:
    """Tells whether a text can be the name of a run's folder, and leads nowhere else."""
    return name.isprintable() and not name.startswith(".") and not {"/", "\\"}.intersection(name)


def _changed(files: LocalFiles, name: str) -> float | None:
    """Tells when a run was founded; None if it was not."""
    try:
        return files.stat(f"{name}/{MANIFEST_FILE}").st_mtime
    except OSError:
        return None
