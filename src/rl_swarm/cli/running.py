"""Starting things: a whole swarm on this machine, or one process of a swarm."""

import os
import random
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from rl_swarm.cli import catch_signals, dashboard, program
from rl_swarm.cli.drawing import LONGEST_PATH, marked, plain
from rl_swarm.cli.live import LiveView
from rl_swarm.cli.summary import print_summary
from rl_swarm.config import SECRETS, Settings
from rl_swarm.errors import UserError
from rl_swarm.hub import outcomes
from rl_swarm.identity import Identity
from rl_swarm.learning import smollm2
from rl_swarm.network.address import is_url
from rl_swarm.network.files import LocalFiles
from rl_swarm.network.folder import change_roll
from rl_swarm.report import RunView
from rl_swarm.swarm import LocalSwarm, worker_settings
from rl_swarm.telemetry import sinks
from rl_swarm.telemetry.logs import start_logging
from rl_swarm.words import ADJECTIVES, ANIMALS
from rl_swarm.worker import found

SETTINGS_FILE = "settings.json"


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
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / SETTINGS_FILE).write_bytes(msgspec.json.encode(_portable(settings)))
    except OSError as error:
        raise UserError(f"--run {root}: {error.strerror}. Choose a directory that can be written.") from error
    start_logging(settings, root / "logs", "up", terminal=False)

    workers = worker_settings(settings)
    coordinator = replace(settings, min_peers=max(settings.min_peers, settings.nodes))
    if settings.admission == "invited":
        _allow(root, settings, workers)
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
        with dashboard.beside(root, settings, console, interrupted), LiveView(RunView(root), console) as live:
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


def _allow(root: Path, settings: Settings, workers: Mapping[str, Settings]) -> None:
    """Founds a swarm of invited peers with its own nodes on the owner's list."""
    files, owner = LocalFiles(root), Identity.load(Path(settings.identity_path))
    manifest = found(files, settings, root.name, owner)
    peers = [Identity.load(Path(worker.identity_path)).peer_id for worker in workers.values()]
    change_roll(files, manifest, owner, [peer for peer in peers if peer != owner.peer_id], allow=True)


def alone(role: str, address: Path | str, settings: Settings) -> None:
    """One process of a swarm, with its log on the terminal."""
    from rl_swarm import worker

    if role == "worker" and not is_url(address) and not Path(address).parent.parent.is_dir():
        raise UserError(f"{address}: the folder does not exist. Is the drive mounted, and GDRIVE_PATH right?")
    start_logging(settings, Path("logs"), role, terminal=True)
    stop = catch_signals()
    (worker.coordinate if role == "coordinator" else worker.join)(address, settings, stop)


def settings_of(run: Path, strategy_given: bool = False) -> dict[str, object]:
    """The settings that a run was started with."""
    try:
        values: dict[str, object] = msgspec.json.decode((run / SETTINGS_FILE).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(
            f"--resume {run}: that is no run of `rl-swarm up`. `rl-swarm runs` lists yours."
        ) from error
    name = values.get("strategy")
    if isinstance(name, str) and ":" in name and not strategy_given:  # others may write to a shared folder
        raise UserError(
            f"--resume {run}: its strategy is {name}. Code is only run that is named here: add --set strategy={name}"
        )
    return values


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


def remove_runs(root: Path, names: list[str]) -> None:
    known = {str(folder): folder for folder in _runs(root)} | {folder.name: folder for folder in _runs(root)}
    for name in names:
        folder = known.get(name.rstrip("/"))
        if folder is None:
            raise UserError(f"--remove {name}: there is no such run in {root}. `rl-swarm runs` lists them.")
        view = RunView(folder)
        view.refresh()
        if any(node.alive for node in view.nodes.values()):
            raise UserError(f"--remove {name}: it is running. Stop it first.")
        shutil.rmtree(folder)
        print(f"removed {folder}")


def _runs(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob("*/manifest.json"))


def _new_run_directory() -> Path:
    pick = random.SystemRandom()
    while True:
        name = f"{time.strftime('%m%d-%H%M')}-{pick.choice(ADJECTIVES)}-{pick.choice(ANIMALS)}"
        if not (path := Path("runs") / name).exists():
            return path


def _portable(settings: Settings) -> dict[str, object]:
    """The settings as they are kept with a run: without secrets, with a key that is found from anywhere."""
    values: dict[str, object] = msgspec.to_builtins(settings)
    for name in SECRETS:
        values.pop(name)
    values["identity_path"] = str(Path(settings.identity_path).absolute())
    return values
