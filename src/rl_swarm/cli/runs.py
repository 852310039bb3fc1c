"""Lists the runs on this machine, and removes some: `rl-swarm runs`."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rl_swarm.cli import program
from rl_swarm.cli.dashboard import say
from rl_swarm.config.settings import Settings
from rl_swarm.errors import UsageError, UserError
from rl_swarm.monitor.drawing import LONGEST_PATH, marked, plain
from rl_swarm.monitor.headline import headline
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.network.layout import MANIFEST_FILE
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.untrusted import printable
from rl_swarm.storage import private
from rl_swarm.storage.files import LocalFiles
from rl_swarm.storage.private import swarm_folder


def list_runs(root: Path, as_json: bool = False) -> None:
    """Print every run with its progress and its held-out score."""
    if root.exists() and not root.is_dir():
        raise UsageError(f"--root {root} is a file. Give the folder with the runs.")
    views = []
    for folder in _runs(root):
        view = RunView(folder)
        view.refresh()
        views.append(view)
    if as_json:
        print(json.dumps([_as_dict(view) for view in views], indent=2))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("run", "phase", "round", "nodes", "test score", "mean of"):
        table.add_column(title, no_wrap=title not in ("run", "mean of"), overflow="fold")
    for view in views:
        start, now = view.mean_held_out("start"), view.mean_held_out("now")
        rounds = f"{_played(view)}/{view.manifest.rounds}" if view.state and view.manifest else ""
        held_out = f"{start:.3f} → {now:.3f}" if start is not None and now is not None else ""
        asked = view.held_out_protocol() if held_out else ""
        name = marked(str(view.root), LONGEST_PATH)
        table.add_row(name, view.phase, rounds, str(len(view.nodes)), held_out, asked)
    console = Console(highlight=False)
    if table.row_count:
        console.print(table)
    else:
        say(console, plain(f"No runs in {root}. Start one: {program()} up", LONGEST_PATH))


def _played(view: RunView) -> int:
    return view.state.round + (view.state.phase == "finished") if view.state else 0


def _as_dict(view: RunView) -> dict[str, object]:
    return {
        "run": str(view.root),
        "phase": view.phase,
        "round": _played(view),
        "rounds": view.manifest.rounds if view.manifest else None,
        "nodes": len(view.nodes),
        "held_out_start": view.mean_held_out("start"),
        "held_out_now": view.mean_held_out("now"),
        "held_out_protocol": view.held_out_protocol(),
        "headline": headline(view.active(), view.phase in ("finished", "stopped", "crashed")).sentence,
    }


def remove_runs(root: Path, names: list[str], settings: Settings) -> None:
    """Remove runs by their names or paths. One that is running stays."""
    known = {str(folder): folder for folder in _runs(root)} | {folder.name: folder for folder in _runs(root)}
    for name in names:
        folder = known.get(name.rstrip("/"))
        if folder is None:
            raise UserError(f"--remove {name}: there is no such run in {root}. `{program()} runs` lists them.")
        view = RunView(folder)
        view.refresh()
        if any(node.alive for node in view.nodes.values()):
            raise UserError(f"--remove {name}: it is running. Stop it first.")
        remove(folder, view.manifest, settings)
        print(printable(f"removed {folder}"))


def remove(root: Path, manifest: Manifest | None, settings: Settings) -> None:
    """Remove a run and its private folder."""
    if manifest is not None:
        own = swarm_folder(settings.storage, root, manifest.swarm())
        LocalFiles(own.parent).remove(own.name)
        private.remember_swarm(settings.storage, root, "")
    LocalFiles(root.parent).remove(root.name)


def _runs(root: Path) -> list[Path]:
    return [root / name for name in LocalFiles(root).folders_with(MANIFEST_FILE)]
