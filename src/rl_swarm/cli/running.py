"""Runs a whole swarm on this machine, or one process of a swarm: `up`, `join`, `coordinate`."""

import os
import random
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import typer
from rich.console import Console

from rl_swarm.cli import StopRequest, catch_signals, dashboard, end_if_stopped, preflight, program, quoted
from rl_swarm.cli.dashboard import say
from rl_swarm.cli.live import LiveView
from rl_swarm.cli.runs import remove
from rl_swarm.cli.steps import SwarmProgress, step, steps_of_log
from rl_swarm.cli.summary import print_summary
from rl_swarm.config.settings import Settings
from rl_swarm.errors import UsageError, UserError
from rl_swarm.learning import smollm2
from rl_swarm.monitor.drawing import LONGEST_PATH, plain
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.network.address import is_peer_address, is_url, peer_url
from rl_swarm.network.documents import DocumentStore
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.layout import MANIFEST_FILE
from rl_swarm.network.owner_documents import change_access_list
from rl_swarm.network.presence import only_run_here
from rl_swarm.node import run_settings, worker
from rl_swarm.node.hub import outcomes
from rl_swarm.node.settings import NodeSettings
from rl_swarm.node.swarm import SwarmError, SwarmProcesses, worker_settings
from rl_swarm.plural import counted
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.words import ADJECTIVES, ANIMALS
from rl_swarm.storage import private
from rl_swarm.storage.files import LocalFiles
from rl_swarm.storage.private import swarm_folder
from rl_swarm.telemetry import sinks
from rl_swarm.telemetry.logs import start_logging
from rl_swarm.web import server


def up(settings: Settings, run: Path | None, resume: Path | None, from_base: bool = False) -> None:
    """Start a swarm, show it until it has finished or Ctrl-C, and sum up."""
    console = Console(highlight=False)
    sinks.requested(settings.telemetry, os.environ)  # raises before anything is started
    if resume is None:
        preflight.check(settings)
    if settings.web.web and server.is_installed():
        server.check_host(settings.web.web_host)
    root = resume or run or _new_run_directory()
    with only_run_here(root):
        if resume is None and (root / MANIFEST_FILE).exists():
            raise UserError(
                f"--run {root}: there is a run already. Resume it with `{program()} up --resume {quoted(root)}`."
            )
        if resume is not None:
            _check_resumable(resume, settings, from_base)
        _run(settings, root, resume is not None, console)


def _run(settings: Settings, root: Path, resumed: bool, console: Console) -> None:
    interrupted = catch_signals()
    new = not root.exists()
    private.check(settings.storage, root)  # before anything is made
    key = Path(settings.network.identity_path)
    if key.exists():
        Identity.load(key)
    try:
        store = FolderStore.at(root)
        store.make()
        owner = Identity.load_or_create(key)
        manifest = worker.found(store, settings, root.name, owner)
        run_settings.keep(settings, root, manifest, owner)
    except OSError as error:
        raise UserError(f"--run {root}: {error.strerror}. Choose a directory that can be written.") from error
    private_log = start_logging(settings.telemetry, settings.storage, root, "up", terminal=False)

    workers = worker_settings(settings)
    coordinator = settings.changed(min_peers=max(settings.network.min_peers, settings.swarm.nodes))
    if settings.swarm.admission == "invited":
        _allow(store, manifest, owner, workers)
    swarm = SwarmProcesses(root, coordinator, workers)
    begin = "Resuming" if resumed else "Starting"
    say(
        console,
        f"{begin} {counted(settings.swarm.nodes, 'node')} in {root}   (Ctrl-C stops "
        f"{'it' if settings.swarm.nodes == 1 else 'them'})",
    )
    if smollm2.needs_converting(settings.model.model):
        say(console, f"{settings.model.model} is converted into {smollm2.cached()} first: half a minute, once.")
    if settings.checkpoint.hub_repo and settings.model.hf_token:
        each = "-<node>" if settings.swarm.nodes > 1 else ""
        say(console, f"Models are pushed to {settings.checkpoint.hub_repo}{each} on the hub at the end")
    started = time.monotonic()
    try:
        _tend(swarm, root, settings, private_log, console, interrupted)
    except SwarmError:  # wrong settings leave no folder behind
        if new and not _has_worked(root, manifest, settings):
            remove(root, manifest, settings)
        raise
    view = RunView(root)
    view.refresh()
    finished = view.state is not None and view.state.phase == "finished"
    if interrupted.is_set() and not finished:
        say(console, _stopped(view, root))
        sys.exit(interrupted.exit_code)
    print_summary(view, time.monotonic() - started, console)
    for outcome in outcomes(root, workers):
        say(console, plain(outcome, LONGEST_PATH))


def _tend(
    swarm: SwarmProcesses, root: Path, settings: Settings, private_log: Path, console: Console, interrupted: StopRequest
) -> None:
    """Run the swarm until it has finished or is interrupted. Its nodes have saved by then, whatever happens here."""
    with ExitStack() as page:  # which sees how the run ends
        try:
            with LiveView(RunView(root), console, settings.swarm.nodes, sums_up=False) as live:
                live.update()
                swarm.start(interrupted)
                if interrupted.is_set():
                    return
                served = dashboard.dashboard_of_run(root, settings.web, private_log, console, interrupted)
                page.enter_context(served)
                while not interrupted.is_set() and swarm.tend():
                    live.update(swarm.restarts)
                    interrupted.wait(0.25)
                live.update(swarm.restarts)
        finally:
            try:
                if interrupted.is_set() and has_begun(root):
                    say(console, "Stopping: the nodes save their state. (Ctrl-C again ends them at once.)")
            finally:
                with step("the nodes save and leave", console):
                    swarm.stop()


def _stopped(view: RunView, root: Path) -> str:
    """Say where a run was interrupted, and how to resume it."""
    if view.manifest is None:
        return "Stopped before the swarm was founded. Nothing is lost: start again."
    at = f"at round {view.state.round}" if has_begun(root) and view.state else "before the first round"
    return f"Stopped {at}. Resume with: {program()} up --resume {quoted(root)}"


def has_begun(root: Path) -> bool:
    """Return whether a round of the run has begun."""
    view = RunView(root)
    view.refresh_swarm()
    return view.state is not None and view.state.phase != "waiting"


def _check_resumable(root: Path, settings: Settings, from_base: bool) -> None:
    """Raise if a run cannot be resumed. Ask before trained nodes begin again with the base model."""
    view = RunView.open(root)
    if view.state is None:
        return
    if view.state.phase == "finished":
        raise UserError(
            f"{root} has finished, round {view.state.round + 1} was its last. Start a new run: {program()} up"
        )
    members = view.state.members
    played = [node for node in view.nodes.values() if node.peer and node.peer.peer_id in members]
    learned = [node for node in played if node.member and node.member.participation]
    lost = [node.name for node in learned if not _has_checkpoint(view, node.node, settings)]
    if not lost or from_base:
        return
    many = len(lost) > 1
    problem = (
        f"{', '.join(lost)} {'have' if many else 'has'} no checkpoint in {root}, which stopped at round "
        f"{view.state.round}: {'they' if many else 'it'} would start again from the base model "
        f"({settings.model.model}), and what {'they' if many else 'it'} learned is lost."
    )
    if not sys.stdin.isatty():
        raise UserError(f"{problem} To accept that, add --from-base.")
    if not typer.confirm(f"{problem} Continue?"):
        raise UserError(f"{root} was left as it is.")


def _has_checkpoint(view: RunView, node: str, settings: Settings) -> bool:
    """Return whether a node of this user has a checkpoint, here or in the folder."""
    assert view.manifest is not None
    own = LocalFiles(swarm_folder(settings.storage, view.root, view.manifest.swarm()))
    return bool(own.names(f"{node}/checkpoints")) or bool(view.checkpoints(node))


def _has_worked(root: Path, manifest: Manifest, settings: Settings) -> bool:
    """Return whether the run has done anything, by its private folder: members may have changed the shared one."""
    own = LocalFiles(swarm_folder(settings.storage, root, manifest.swarm()))
    begun = bool(own.names("coordinator"))  # its state or its history
    return begun or any(own.names(f"{node}/checkpoints") for node in own.names(""))


def _allow(store: DocumentStore, manifest: Manifest, owner: Identity, workers: Mapping[str, NodeSettings]) -> None:
    """Put the nodes of a swarm of invited peers on its owner's list."""
    peers = [Identity.load(Path(worker.network.identity_path)).peer_id for worker in workers.values()]
    change_access_list(store, manifest, owner, [peer for peer in peers if peer != owner.peer_id], allow=True)


def run_process(role: str, address: Path | str, settings: Settings) -> None:
    """Run one process of a swarm, with its log on the terminal."""
    if is_peer_address(str(address)):
        raise UsageError(
            f"{address} is the address of a peer. Write {peer_url('')} before it: {peer_url(str(address))}"
        )
    if role == "worker" and not is_url(address) and not Path(address).parent.parent.is_dir():
        raise UserError(f"{address}: the folder does not exist. Is the drive mounted, and GDRIVE_PATH right?")
    if role == "coordinator":
        preflight.check_tasks(settings)
    stop = catch_signals()
    progress = None if is_url(address) else SwarmProgress(RunView(address))
    with steps_of_log("starting", progress) as follow:
        start_logging(settings.telemetry, settings.storage, Path(), role, terminal=True)
        follow()
        (worker.coordinate if role == "coordinator" else worker.join)(address, settings, stop)
    end_if_stopped(stop)


def _new_run_directory() -> Path:
    pick = random.SystemRandom()
    while True:
        name = f"{time.strftime('%m%d-%H%M')}-{pick.choice(ADJECTIVES)}-{pick.choice(ANIMALS)}"
        if not (path := Path("runs") / name).exists():
            return path
