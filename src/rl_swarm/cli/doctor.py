"""Checks this machine: what it has, what is missing, and what to do about it."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from rl_swarm.config import resolve as config
from rl_swarm.environments import task_list
from rl_swarm.environments.reasoning import Reasoning
from rl_swarm.errors import FAILED, UserError
from rl_swarm.network.address import configured_address, open_address
from rl_swarm.network.documents import PEERS
from rl_swarm.network.p2p.joining import engine_of
from rl_swarm.network.p2p.time_offset import compared
from rl_swarm.plural import counted
from rl_swarm.protocol.identity import Identity
from rl_swarm.scoring.sandbox.sandbox import ISOLATIONS, Sandbox, available
from rl_swarm.telemetry import otlp, sinks
from rl_swarm.telemetry.export import Source

# True if it works, False if not, None if only some users need it; and a sentence.
Finding = tuple[bool | None, str]
SIGNS = {True: "[green]ok [/]", False: "[red]NO [/]", None: "[yellow]-- [/]"}


def examine(as_json: bool = False) -> int:
    """Print every finding; return the exit code, which tells whether something needs doing."""
    console = Console(highlight=False)
    found = list[dict[str, object]]()
    for title, look in CHECKS:
        for good, text in _findings(look):
            found.append({"check": title, "ok": good, "found": text})
            if not as_json:
                console.print(f"{SIGNS[good]} {title}: {escape(text)}")
    results = {one["ok"] for one in found}
    if as_json:
        print(json.dumps({"passed": False not in results, "checks": found}, indent=2))
    elif False in results:
        console.print("Some checks failed: see the lines with NO.")
    else:
        console.print(f"All checks passed{', except the lines with --' * (None in results)}. Start with: rl-swarm up")
    return FAILED if False in results else 0


def _findings(look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except UserError as error:
        yield False, str(error)


def python() -> Iterator[Finding]:
    yield (3, 10) <= sys.version_info[:2] <= (3, 13), f"{sys.version.split()[0]} (3.10 to 3.13 are supported)"


def packages() -> Iterator[Finding]:
    for name in ("torch", "transformers", "reasoning-gym", "msgspec", "cryptography"):
        try:
            yield True, f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield False, f"{name} is not installed: pip install rl-swarm"


def machine() -> Iterator[Finding]:
    from rl_swarm.learning.devices import free_disk, pick_device, total_memory
    from rl_swarm.learning.memory import GIB

    settings = config.load().settings
    device = pick_device(settings.model)
    memory, disk = total_memory(device), free_disk(Path.cwd())
    yield True, f"{counted(os.cpu_count() or 1, 'core')}, device {device}"
    yield memory >= 2 * GIB, f"{memory / GIB:.1f} GiB of memory (2 GiB are enough for the bundled model)"
    yield disk >= GIB, f"{disk / GIB:.1f} GiB free on this disk (1 GiB is enough)"


def model() -> Iterator[Finding]:
    from rl_swarm.learning.policy import Policy

    settings = config.load(flags={"model": "tiny", "device": "cpu"}).settings
    policy = Policy.load(settings, "")
    text = policy.sample(["1 + 1 ="], 1, seed=0)[0][0].text
    yield True, f"the bundled model loads and answers {text!r}"


def scoring() -> Iterator[Finding]:
    environment = Reasoning(task_list(config.load().settings.task, config.load().settings.model.model))
    try:
        questions = environment.questions(range(8))
        right = environment.score([(q, f"<answer>{q.answer}</answer>") for q in questions])
        yield sum(right) == len(right), f"{len(questions)} questions made and scored in their own process"
        yield True, f"that process is {environment.scorer.protection()}"
    finally:
        environment.close()


def code() -> Iterator[Finding]:
    """Find which isolation is active, and why no better one is."""
    try:
        sandbox = Sandbox(workers=1)
    except UserError as error:
        yield None, f"only the environment coding needs it. {error}. Or let a model guess: GUESS_WITH=coder"
        return
    sandbox.close()
    yield True, f"programs of models and peers run behind {ISOLATIONS[sandbox.isolation]}"
    for offer in available():
        if offer.isolation == sandbox.isolation:
            return
        yield True, f"not behind {ISOLATIONS[offer.isolation]}: {offer.problem}"


def folder() -> Iterator[Finding]:
    settings = config.load().settings
    address = configured_address(settings.storage)
    if isinstance(address, str):
        yield from _store(address)
        return
    root = Path(settings.storage.gdrive_path).expanduser() if settings.storage.gdrive_path else Path.cwd()
    try:
        with tempfile.NamedTemporaryFile(dir=root):
            yield True, f"{root} can be written" + (f"; the swarm is {address}" if address else "")
    except OSError as error:
        yield (False, f"{root} cannot be written ({error.strerror}). Mount it, or set GDRIVE_PATH to one that can.")


def _store(address: str) -> Iterator[Finding]:
    try:
        open_address(address).store.nodes(PEERS)
        yield True, f"{address} can be reached"
    except (OSError, UserError) as error:
        yield False, str(error)


def peer_to_peer() -> Iterator[Finding]:
    """Start the daemon as a node would, and ask the peers that the settings name."""
    settings = config.load().settings.changed(p2p_relay=False)  # do not ask the router for a port
    if importlib.util.find_spec("hivemind") is None:
        needed = settings.swarm.network == "p2p" or settings.network.p2p_initial_peers is not None
        yield (not needed, "not installed; only swarms across the internet need it: pip install 'rl-swarm[p2p]'")
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        engine_of(Identity.generate(), [], settings.network, Path(folder)) as engine,
    ):
        yield True, f"the daemon starts and listens at {engine.addresses[0].rpartition('/p2p/')[0]}"
        if engine.known:
            yield (
                engine.met.is_set(),
                f"P2P_KNOWN={settings.network.p2p_initial_peers}: "
                + (
                    "a peer answers"
                    if engine.met.is_set()
                    else "no peer answers. Are the addresses right, and is the port open?"
                ),
            )
            if (clocks := compared(engine)) is not None:
                yield clocks.agrees, str(clocks)


def identity() -> Iterator[Finding]:
    path = Path(config.load().settings.network.identity_path)
    if not path.exists():
        yield True, f"{path} will be made at the first start"
        return
    mine = Identity.load(path)
    private = path.stat().st_mode & 0o077 == 0
    yield (
        private,
        f"{mine.name}, {mine.peer_id}" + ("" if private else f"; others can read the key: chmod 600 {path}"),
    )


def metrics() -> Iterator[Finding]:
    """Ask the collector, and let each sink write a record into a temporary folder, offline."""
    wanted = sinks.requested(config.load().settings.telemetry, os.environ)
    if not wanted:
        yield True, "to metrics.jsonl; METRICS_SINKS and OTEL_EXPORTER_OTLP_ENDPOINT are not set"
    for signal, variable in otlp.endpoints(os.environ).items():
        reason = otlp.collector_problem(signal)
        yield not reason, f"{signal} to {variable}={os.environ[variable]}: {reason or 'it answers'}"
    mode = os.environ.get("WANDB_MODE") or "offline"
    for name in (name for name in wanted if name != "otlp"):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            os.environ |= {"WANDB_MODE": "offline", "TRACKIO_DIR": folder}
            for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
                os.environ.pop(variable, None)
            try:
                sink = sinks.open_sink(name, Source("doctor", "doctor", "doctor", "", Path(folder)))
                sink.write("round", {"round": 0, "reward": 1.0})
                sink.close()
                yield True, f"METRICS_SINKS: {name} works" + (f", {mode}" if name == "wandb" else "")
            except Exception as error:  # noqa: BLE001 whatever the library raises is the finding
                yield False, f"METRICS_SINKS: {name} does not work: {type(error).__name__}: {error}"


def tools() -> Iterator[Finding]:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    yield True, f"C compiler {compiler or 'not found (only needed to install)'}"


CHECKS: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
    ("Python", python),
    ("packages", packages),
    ("tools", tools),
    ("machine", machine),
    ("model", model),
    ("scoring", scoring),
    ("running code", code),
    ("folder", folder),
    ("peer-to-peer", peer_to_peer),
    ("identity", identity),
    ("metrics", metrics),
)
