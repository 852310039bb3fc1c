"""Starting things: a whole swarm on this machine, or one process of a swarm."""

import os
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from rl_swarm import private, run_settings
from rl_swarm.cli import catch_signals, dashboard, program
from rl_swarm.cli.drawing import LONGEST_PATH, marked, plain
from rl_swarm.cli.live import LiveView
from rl_swarm.cli.summary import print_summary
from rl_swarm.config import Settings
from rl_swarm.errors import UserError
from rl_swarm.hub import outcomes
from rl_swarm.identity import Identity
from rl_swarm.learning import smollm2
from rl_swarm.manifest import Manifest
from rl_swarm.network.address import is_url
from rl_swarm.network.files import LocalFiles
from rl_swarm.network.folder import change_roll
from rl_swarm.private import swarm_folder
from rl_swarm.report import RunView, run_names
from rl_swarm.swarm import LocalSwarm, worker_settings
from rl_swarm.telemetry import sinks
from rl_swarm.telemetry.logs import start_logging
from rl_swarm.words import ADJECTIVES, ANIMALS
from rl_swarm.worker import found


def up(settings: Settings, run: Path | None, resume: Path | None) -> None:
    """Starts a swarm, shows it until it has finished or Ctrl-C, and sums up."""
    console = Console(highlight=False)
    sinks.wanted(settings, os.environ)  # or an error, before anything is started
    root = resume or run or _new_run_directory()
    if resume is None and (root / "manifest.json").exists():
        raise UserError(f"--run {root}: there is a run already. Go on with `{program()} up --resume {root}`.")
    if resume is not None:
        view = RunView.open(resume)
        if view.state is not None and view.state.phase == "finished":
            raise UserError(
                f"{resume} has finished all its {view.state.round + 1} rounds. Start a new run: rl-swarm up"
            )
    private.check(settings, root)  # before anything is made
    owner = Identity.load_or_create(Path(settings.identity_path))
    try:
        files = LocalFiles(root)
        files.make()
        manifest = found(files, settings, root.name, owner)
        run_settings.keep(settings, root, manifest, owner)
    except OSError as error:
        raise UserError(f"--run {root}: {error.strerror}. Choose a directory that can be written.") from error
    private_log = start_logging(settings, root, "up", terminal=False)

    workers = worker_settings(settings)
    coordinator = replace(settings, min_peers=max(settings.min_peers, settings.nodes))
    if settings.admission == "invited":
        _allow(files, manifest, owner, workers)
    swarm = LocalSwarm(root, coordinator, workers)
    console.print(
        f"{'Going on with' if resume else 'Starting'} {settings.nodes} nodes in {root}   (Ctrl-C stops them)"
    )
    if smollm2.needs_converting(settings.model):
        console.print(f"{settings.model} is converted first, once, into {smollm2.cached()}: half a minute.")
    if settings.hub_repo and settings.hf_token:
        each = "-<node>" if settings.nodes > 1 else ""
        console.print(f"Models are pushed to {settings.hub_repo}{each} on the hub at the end")
    started = time.monotonic()
    interrupted = catch_signals()
    swarm.start()
    try:
        with (
            dashboard.beside(root, settings, private_log, console, interrupted),
            LiveView(RunView(root), console) as live,
        ):
            while swarm.tend() and not interrupted.is_set():
                live.update(swarm.restarts)
                interrupted.wait(0.25)
            live.update(swarm.restarts)
    finally:
        if interrupted.is_set():
            console.print("Stopping: the nodes save where they are. (Ctrl-C again ends them at once.)")
        swarm.stop()
    view = RunView.open(root)
    finished = view.state is not None and view.state.phase == "finished"
    if interrupted.is_set() and not finished:
        console.print(
            f"Stopped at round {view.state.round if view.state else 0}. Go on with: {program()} up --resume {root}"
        )
        sys.exit(130)
    print_summary(view, time.monotonic() - started, console)
    for outcome in outcomes(root):
        console.print(plain(outcome, LONGEST_PATH), markup=False, soft_wrap=True)


def _allow(files: LocalFiles, manifest: Manifest, owner: Identity, workers: Mapping[str, Settings]) -> None:
    """Puts the nodes of a swarm of invited peers on its owner's list."""
    peers = [Identity.load(Path(worker.identity_path)).peer_id for worker in workers.values()]
    change_roll(files, manifest, owner, [peer for peer in peers if peer != owner.peer_id], allow=True)


def alone(role: str, address: Path | str, settings: Settings) -> None:
    """One process of a swarm, with its log on the terminal."""
    from rl_swarm import worker

    if role == "worker" and not is_url(address) and not Path(address).parent.parent.is_dir():
        raise UserError(f"{address}: the folder does not exist. Is the drive mounted, and GDRIVE_PATH right?")
    start_logging(settings, Path(), role, terminal=True)
    stop = catch_signals()
    (worker.coordinate if role == "coordinator" else worker.join)(address, settings, stop)


def list_runs(root: Path) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("run", "phase", "round", "nodes", "held out"):
        table.add_column(title, no_wrap=title != "run", overflow="fold")
    for folder in _runs(root):
        view = RunView(folder)
        view.refresh()
        start, now = view.mean_held_out("start"), view.mean_held_out("now")
        rounds = (
            f"{view.state.round + (view.state.phase == 'finished')}/{view.manifest.rounds}"
            if view.state and view.manifest
            else ""
        )
        held_out = f"{start:.3f} → {now:.3f}" if start is not None and now is not None else ""
        phase: str = view.state.phase if view.state else "waiting"
        if phase == "running" and not any(node.alive for node in view.nodes.values()):
            phase = "stopped"
        table.add_row(marked(str(folder), LONGEST_PATH), phase, rounds, str(len(view.nodes)), held_out)
    console = Console(highlight=False)
    console.print(table if table.row_count else f"No runs in {root}. Start one: {program()} up")


def remove_runs(root: Path, names: list[str], settings: Settings) -> None:
    known = {str(folder): folder for folder in _runs(root)} | {folder.name: folder for folder in _runs(root)}
    for name in names:
        folder = known.get(name.rstrip("/"))
        if folder is None:
            raise UserError(f"--remove {name}: there is no such run in {root}. `rl-swarm runs` lists them.")
        view = RunView(folder)
        view.refresh()
        if any(node.alive for node in view.nodes.values()):
            raise UserError(f"--remove {name}: it is running. Stop it first.")
        if view.manifest is not None:
            own = swarm_folder(settings, folder, view.manifest.swarm())
            LocalFiles(own.parent).remove(own.name)
        LocalFiles(root).remove(folder.name)
        print(f"removed {folder}")


def _runs(root: Path) -> list[Path]:
    return [root / name for name in run_names(LocalFiles(root))]


def _new_run_directory() -> Path:
    pick = random.SystemRandom()
    while True:
        name = f"{time.strftime('%m%d-%H%M')}-{pick.choice(ADJECTIVES)}-{pick.choice(ANIMALS)}"
        if not (path := Path("runs") / name).exists():
            return path
