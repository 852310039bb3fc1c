"""Lists the runs of a folder, so that they can be compared."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from rl_swarm.monitor import snapshot
from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.records import Line, Lines, RunPage, RunRow, SettingRow, SettingsTable
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.monitor.series import Curves, mean_of, padded
from rl_swarm.network.layout import MANIFEST_FILE
from rl_swarm.node.settings import NodeSettings
from rl_swarm.sections import settings_of
from rl_swarm.storage.files import LocalFiles

MAX_OPEN = 32  # runs that are kept in memory
MAX_LISTED = 1000
MAX_SEARCHED = 10_000  # folders that are searched for runs


class Runs:
    def __init__(self, current: Follower | None, root: Path | None = None, experiment: str = "") -> None:
        """Serve the runs beside `current`, the one that is watched, or those in the folder `root`."""
        if current is not None and not current.view.address.is_url:
            root = current.view.root.absolute().parent
        self.current, self.root = current, root
        self.experiment = experiment  # the experiment's name, if these are its runs
        self._opening = threading.Lock()
        self._open: OrderedDict[str, Follower] = OrderedDict()
        self.closing: list[Callable[[], None]] = []  # called when the server ends

    def names(self) -> list[str]:
        """List the runs of the folder, the newest first; of a remote swarm only itself."""
        if self.root is None:
            return [self.current.view.address.name] if self.current else []
        files = LocalFiles(self.root)
        when = {name: _changed(files, name) for name in files.names("")[:MAX_SEARCHED] if _is_name(name)}
        found = [(changed, name) for name, changed in when.items() if changed is not None]
        return [name for _, name in sorted(found, reverse=True)[:MAX_LISTED]]

    def get(self, name: str) -> Follower | None:
        """Return a run of the list, polled now."""
        if self.current and name == self.current.view.address.name:
            return self.current
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
        found.poll()
        return found

    def page(self, offset: int, limit: int, current: Follower | None = None) -> RunPage:
        """Return a page of the list; `current` is by default the run that is watched."""
        names = self.names()
        found = [(name, self.get(name)) for name in names[offset : offset + limit]]
        rows = [_row(name, run, run is (current or self.current)) for name, run in found if run]
        metrics = {metric for _, run in found if run for metric in snapshot.metrics(run)}
        return RunPage(len(names), offset, rows, sorted(metrics))

    def lines(self, names: list[str], metric: str, points: int) -> Lines:
        """Return the mean over the nodes of every run, over the same rounds."""
        found = [(name, run) for name in names if (run := self.get(name)) is not None]
        means = [(name, snapshot.lines(run, metric, points, most=0, spread=False)) for name, run in found]
        curves = [_as_curves(lines) for _, lines in means]
        step = max((lines.rounds[1] for _, lines in means if len(lines.rounds) > 1), default=1)
        values = [curve.points(metric, step) for curve in curves]
        length = max(map(len, values), default=0)
        whole = [padded(line, length) for line in values]
        shown = [Line(name, name, line) for (name, _), line in zip(means, whole, strict=True)]
        return Lines(metric, [k * step for k in range(length)], mean_of(whole), shown)

    def settings(self, names: list[str]) -> SettingsTable:
        """Compare the public settings of some runs."""
        found = {name: run for name in names if (run := self.get(name)) is not None}
        known = [snapshot.run_settings_of(run) for run in found.values()]
        rows = {name: [settings.get(name) for settings in known] for each in known for name in each}
        about = {setting.name: setting.description for setting in settings_of(NodeSettings)}
        table = [SettingRow(name, about.get(name, ""), row, len(set(row)) > 1) for name, row in rows.items()]
        return SettingsTable(list(found), table)


def _row(name: str, run: Follower, current: bool) -> RunRow:
    about = snapshot.overview(run)
    return RunRow(
        name, about.phase, about.round, about.rounds, about.nodes, about.reward, about.held_out_start,
        about.held_out_now, current,
    )  # fmt: skip


def _as_curves(lines: Lines) -> Curves:
    """Return a mean as curves, so that runs of different lengths can be shown in the same steps."""
    curves = Curves()
    curves.add(lines.rounds, {lines.metric: lines.mean})
    return curves


def _is_name(name: str) -> bool:
    """Return whether a text can name a run's folder, and leads nowhere else."""
    return name.isprintable() and not name.startswith(".") and not {"/", "\\"}.intersection(name)


def _changed(files: LocalFiles, name: str) -> float | None:
    """Return when a run was founded; None if it was not."""
    try:
        return files.stat(f"{name}/{MANIFEST_FILE}").st_mtime
    except OSError:
        return None
