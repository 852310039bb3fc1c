"""Runs the two swarms of `siege.py` and the processes beside them, and reads them while they run."""

import hashlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

from benchmarks.lib.paths import MANIFEST
from benchmarks.robustness.siege_hostile import Pace, Processes, Target
from rl_swarm.network.history import parse_history

START_SECONDS = 240.0
STARTING = 3  # hostile processes at a time, beside a swarm that plays
STOP_SECONDS = 90.0
END_SECONDS = 20.0  # for the processes beside a swarm
MEBIBYTE = 1 << 20
BURN_SECONDS = 0.005  # between a harmless process's readings of its target
READY_SECONDS = 120.0  # for the harmless processes to start
VIEWER = "127.0.0.2"  # a viewer of the dashboard beside the attacker


@dataclass
class Swarm:
    """Runs a swarm of `rl-swarm up` on some of the cores."""

    name: str
    root: Path
    network: str
    settings: Mapping[str, object]
    cores: set[int]
    nodes: int
    seed: int
    port: int = 0
    process: "subprocess.Popen[bytes] | None" = None
    memory: list[dict[int, float]] = field(default_factory=list)  # MiB by process
    looks: list[float | None] = field(default_factory=list)  # seconds the dashboard took; None: no answer

    @property
    def folder(self) -> Path:
        return self.root / self.name

    @property
    def private(self) -> Path:
        """Return the private directory of this run."""
        return next((self.root / "private").glob(f"{self.name}-*/coordinator")).parent

    def start(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        values = {
            **self.settings,
            "nodes": self.nodes,
            "seed": self.seed,
            "network": self.network,
            "web": "true",
            "web_port": self.port,
            "private_path": self.root / "private",
            "identity_path": self.root / "swarm.pem",
        }
        if self.network == "p2p":
            values |= {"p2p_listen": "/ip4/127.0.0.1/tcp/0", "p2p_relay": "false"}
        words = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
        cores = self.cores
        with (self.root / "output.log").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rl_swarm", "up", "--run", self.name, *words],
                cwd=self.root,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: pin_self(cores),
            )

    def family(self) -> list[int]:
        return [] if self.process is None else Processes.now().family(self.process.pid)

    def used(self) -> tuple[float, float]:
        """Return the processor time of all its processes, and of its libp2p daemons among them."""
        now = Processes.now()
        family = [] if self.process is None else now.family(self.process.pid)
        daemons = [pid for pid in family if command_of(pid) == "p2pd"]
        return sum(now.seconds[pid] for pid in family), sum(now.seconds[pid] for pid in daemons)

    def round(self) -> int:
        try:
            state = json.loads((self.private / "coordinator/state/current_state.json").read_text())
        except (OSError, ValueError, StopIteration):
            return -1
        return int(state["round"]) if state["phase"] == "running" else -1

    def until_round(self, number: int, seconds: float = START_SECONDS) -> None:

        def reached() -> bool:
            if self.process is None or self.process.poll() is not None:
                raise SystemExit(f"the swarm {self.name} has ended: {self.last_words()}")
            return self.round() >= number

        try:
            wait_until(reached, seconds)
        except TimeoutError as error:
            raise SystemExit(f"the swarm {self.name}, round {number}: {error}: {self.last_words()}") from error

    def last_words(self) -> str:
        return (self.root / "output.log").read_text(errors="replace")[-2000:]

    def ended_rounds(self, since: float, until: float) -> list[str]:
        """Return why each round of that time ended, by the coordinator's private history."""
        history, _ = parse_history((self.private / "coordinator/history.jsonl").read_bytes())
        return [ended.why for ended in history if since <= ended.ended <= until]

    def metrics(self) -> dict[str, list[dict[str, Any]]]:
        """Return the honest nodes' own logs, by node."""
        found = {}
        for path in sorted(self.private.glob("*/logs/metrics.jsonl")):
            lines = []
            for line in path.read_text().splitlines():
                with suppress(ValueError):
                    lines.append(json.loads(line))
            found[path.parent.parent.name] = lines
        return found

    def scores(self) -> dict[int, float]:
        """Return the mean held-out score of all nodes, by round, where all have one."""
        by_round: dict[int, dict[str, float]] = {}
        for node, lines in self.metrics().items():
            for line in lines:
                if line.get("kind") == "held_out" and line.get("when") == "now":
                    by_round.setdefault(line["round"], {})[node] = line["sampled"]
        return {number: sum(s.values()) / len(s) for number, s in by_round.items() if len(s) == self.nodes}

    def refused(self, since: float) -> Counter[str]:
        """Return what the nodes refused, by reason, and how many documents the coordinator named."""
        counted = Counter[str]()
        for lines in self.metrics().values():
            for line in lines:
                if line.get("kind") == "round" and line.get("timestamp", 0) >= since:
                    counted.update(line.get("external_rejected") or {})
        for path in (self.root / "private/logs").glob("*.log"):
            counted["coordinator"] += path.read_text(errors="replace").count(" is not used: ")
        return counted

    def restarts(self) -> int:
        logs = [path.read_text(errors="replace") for path in (self.root / "private/logs").glob("*.log")]
        return sum(text.count("is started again") for text in logs)

    def weigh(self) -> None:
        """Note the memory of every process of this swarm; shared memory is divided among its users."""
        self.memory.append({pid: pss(pid) for pid in self.family()})

    def look(self) -> None:
        """Ask the dashboard as a viewer at another address."""
        started = time.monotonic()
        try:
            with socket.create_connection(("127.0.0.1", self.port), 10, (VIEWER, 0)) as link:
                link.settimeout(10)
                link.sendall(b"GET /api/overview HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                answer = b""
                while data := link.recv(1 << 16):
                    answer += data
            told = answer.startswith(b"HTTP/1.1 200")
        except OSError:
            told = False
        self.looks.append(time.monotonic() - started if told else None)

    def pin(self, cores: set[int]) -> None:
        self.cores = cores
        pin(self.family(), cores)

    def kill_a_node(self) -> None:
        """Kill one node, so that its successor has to load a checkpoint."""
        peers = self.private.glob("*/logs/training_events.jsonl")
        lines = [json.loads(line) for line in sorted(peers)[0].read_text().splitlines()]
        pids = [line["pid"] for line in lines if line.get("event") in ("joined", "resumed")]
        with suppress(ProcessLookupError, IndexError):
            os.kill(pids[-1], signal.SIGKILL)

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        family = self.family()
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for pid in family:  # processes that outlived it, if any
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def thirds(memory: Sequence[dict[int, float]]) -> tuple[tuple[float, float], float]:
    """Return the mean memory of all processes in the first and last third, and the largest process in the last."""
    part = max(1, len(memory) // 3)
    first, last = (sum(sum(each.values()) for each in some) / len(some) for some in (memory[:part], memory[-part:]))
    pids = {pid for each in memory[-part:] for pid in each}
    largest = max(sum(each.get(pid, 0.0) for each in memory[-part:]) / part for pid in pids)
    return (first, last), largest


def command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def pss(pid: int) -> float:
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024
    return 0.0


def pin_self(cores: Iterable[int]) -> None:
    os.sched_setaffinity(0, cores)


def pin(pids: Iterable[int], cores: set[int]) -> None:
    """Move all threads of these processes to these cores."""
    for pid in pids:
        with suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with suppress(OSError):
                    os.sched_setaffinity(int(task), cores)


def usable_cores() -> set[int]:
    return set(os.sched_getaffinity(0))


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it did not happen in {seconds:.0f} s")
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@dataclass
class Beside:
    """Holds the processes beside a swarm: hostile ones, or as many that burn as much processor time."""

    children: dict[str, Any]  # by kind
    stop: Event
    before: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)  # kinds that ended early

    def seconds(self) -> dict[str, float]:
        now = Processes.now()
        return {kind: now.used(child.pid) for kind, child in self.children.items()}

    def begin(self) -> None:
        self.before = self.seconds()

    def used(self) -> dict[str, float]:
        return {kind: used - self.before.get(kind, 0.0) for kind, used in self.seconds().items()}

    def pin(self, cores: set[int]) -> None:
        now = Processes.now()
        for child in self.children.values():
            pin(now.family(child.pid), cores)

    def end(self) -> None:
        self.failed = [kind for kind, child in self.children.items() if not child.is_alive()]
        self.stop.set()
        now, deadline = Processes.now(), time.monotonic() + END_SECONDS
        families = [now.family(child.pid) for child in self.children.values()]
        for child in self.children.values():
            child.join(max(0.0, deadline - time.monotonic()))
        for pid in (pid for family in families for pid in family):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for child in self.children.values():
            child.join()


def besiege(network: str, kinds: Sequence[str], target: Target, folder: Path) -> Beside:
    """Start one hostile process of every kind, a few at a time, and wait until all are ready."""
    context = multiprocessing.get_context("spawn")
    beside = Beside({}, context.Event())
    waiting: dict[str, Event] = {}
    try:
        for number, kind in enumerate(kinds):
            ready, log = context.Event(), folder / f"hostile-{number}.log"
            arguments = (network, kind, target, ready, beside.stop, log, number)
            beside.children[kind] = context.Process(target=attack, args=arguments)
            beside.children[kind].start()
            waiting[kind] = ready
            last = number == len(kinds) - 1
            deadline = time.monotonic() + START_SECONDS
            while len(waiting) > (0 if last else STARTING) and time.monotonic() < deadline:
                time.sleep(0.1)
                waiting = {
                    each: event
                    for each, event in waiting.items()
                    if not event.is_set() and beside.children[each].is_alive()
                }
    except BaseException:
        beside.end()
        raise
    return beside


def attack(network: str, kind: str, target: Target, ready: Event, stop: Event, log: Path, number: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    kinds_of(network)[kind](target, Pace(target.share, ready, stop, target.seed * 100 + number))


def kinds_of(network: str) -> dict[str, Callable[[Target, Pace], None]]:
    if network == "folder":
        from benchmarks.robustness import siege_folder

        return siege_folder.KINDS
    from benchmarks.robustness import siege_peers

    return siege_peers.KINDS


def burn_beside(kinds: Sequence[str], cores: set[int]) -> tuple[Beside, Any]:
    """Start as many harmless processes; each burns as much as the array says."""
    context = multiprocessing.get_context("spawn")
    stop, wanted = context.Event(), context.Array("d", len(kinds))
    ready = context.Barrier(len(kinds) + 1)  # what their imports cost is not counted
    children = {}
    for number, kind in enumerate(kinds):
        children[kind] = context.Process(target=burn, args=(wanted, number, stop, ready))
        children[kind].start()
    ready.wait(READY_SECONDS)
    beside = Beside(children, stop)
    beside.pin(cores)
    return beside, wanted


def burn(wanted: Any, number: int, stop: Event, ready: Barrier) -> None:
    """Burn as much processor time as it is told."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ready.wait(READY_SECONDS)
    first = time.process_time()
    while not stop.wait(BURN_SECONDS):
        until = min(time.process_time() + 0.02, first + wanted[number])
        while time.process_time() < until:
            hashlib.sha256(b"x" * 10_000).digest()


def target_of(swarm: Swarm, outside: Path, scratch: Path, share: float) -> Target:
    addresses: list[str] = []
    if swarm.network == "p2p":
        addresses = json.loads((swarm.folder / "bootnodes.json").read_text())["addresses"]
    return Target(
        folder=swarm.folder,
        private=swarm.private / "coordinator",
        manifest=(swarm.folder / MANIFEST).read_bytes(),
        addresses=addresses,
        port=swarm.port,
        outside=outside,
        scratch=scratch,
        seed=swarm.seed,
        share=share,
    )


def make_outside(folder: Path) -> Path:
    """Make what lies outside of the swarm's folder, where nothing may change."""
    (folder / "precious").mkdir(parents=True)
    (folder / "profile").write_text("# mine\n")
    for name in ("round_0", "round_0/stage_0", "round_1", "stage_0", "a-node"):
        (folder / "precious" / name).mkdir(parents=True, exist_ok=True)
        (folder / "precious" / name / "precious.json").write_text("mine")
    return folder


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def harm_done(swarm: Swarm, outside: Path, before: dict[str, str]) -> list[str]:
    """Look for what an attack must never do. The swarm has ended."""
    found = []
    after = tree(outside)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        found.append(f"outside of the folder {', '.join(changed[:5])} changed")
    subprocess.run(["sh", "-c", ". ./profile"], cwd=outside, check=False, capture_output=True)
    ran = [str(path) for path in swarm.root.parent.rglob("ran")]
    if ran:
        found.append(f"a command of an attacker ran: {ran[0]}")
    for path in sorted(swarm.private.glob("*/checkpoints/round_*/model.safetensors")):
        if largest_weight(path) < 0.5:
            found.append(f"{path.parent.parent.parent.name} has foreign weights")
    if swarm.network == "folder":
        told = subprocess.run(
            [sys.executable, "-m", "rl_swarm", "up", "--resume", swarm.name, "--dry-run", "--set",
             f"private_path={swarm.root / 'private'}", "--set", f"identity_path={swarm.root / 'swarm.pem'}"],
            cwd=swarm.root, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if "them/" in told.stdout + told.stderr:
            found.append("edited settings are used")
    return found


def largest_weight(path: Path) -> float:
    from safetensors.torch import load_file

    return max(float(value.abs().max()) for value in load_file(path).values())
