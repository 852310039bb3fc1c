"""What can happen to a swarm of real nodes, on purpose: crashes, hangs, bad lines, wrong clocks, full disks, old states.

    python benchmarks/faults.py --network folder
    python benchmarks/faults.py --network p2p --nodes 16 --rounds 75 [--seed 1] [--json FILE]
    python benchmarks/faults.py --network p2p --show > plan.json      # the plan of a run; --plan plan.json plays it

Faults are data, drawn from a seed. Nodes are `rl-swarm join` with the bundled model (faulted.py); a third of them leave,
orderly or not, in every ten rounds, and come back. In a folder the drive behaves badly; among peers the
network does (wires.py), and bootnodes and founder are killed in the middle. Everything runs in namespaces of its own,
which need no rights where the kernel lets users have them; where not, the faults that need them are left out.

After the run: no node stuck, no work lost beyond the round in flight, all agree on who is who (verdict.py). Exit code
1 and a sentence for every violation.
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
from verdict import End, History, Run, Start, violations
from wires import Line, Wires

from rl_swarm.identity import Identity
from rl_swarm.telemetry.journal import read_lines

Kind = Literal[
    "join",
    "leave",
    "crash",
    "hang",
    "partition",
    "loss",
    "delay",
    "reorder",
    "duplicate",
    "clock",
    "disk",
    "old",
]
Network = Literal["folder", "p2p"]
WORDS: dict[Kind, str] = {
    "join": "a new node joins",
    "leave": "told to stop, comes back",
    "crash": "crash (SIGKILL), comes back",
    "hang": "hang (SIGSTOP)",
    "partition": "partition",
    "loss": "loss",
    "delay": "delay",
    "reorder": "reordering",
    "duplicate": "duplicates",
    "clock": "wrong clock",
    "disk": "disk full",
    "old": "restart with an old state",
}
ON_THE_LINE = ("partition", "loss", "delay", "reorder", "duplicate")
ENDS = ("leave", "crash", "old")  # the process
INSIDE = "FAULTS_INSIDE"  # set in the namespaces
UNSHARE = [
    "unshare",
    "--user",
    "--map-root-user",
    "--net",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
]
NODE_SETTINGS = {
    "held_out_questions": 2,
    "held_out_samples": 1,
    "held_out_every": 0,
    "checkpoint_every": 1,
    "threads": 1,
    "poll_interval": 0.25,
    "device": "cpu",
}
LOOK_SECONDS = 0.25
STARTING = 2  # nodes at a time: they load torch
STARTING_SECONDS = 15.0  # that it usually takes
RESTART_SECONDS = 2.0  # until a process that ended by itself is started again
EXCUSED_SECONDS = 15.0  # after a fault in which a node may still end because of it
LAST_SECONDS = 90.0  # for nodes to end after the last round


@dataclass(frozen=True)
class Fault:
    kind: Kind
    round: int  # of the swarm, in which it begins
    nodes: tuple[str, ...]
    seconds: float | None = 0.0  # that it lasts, or until the node comes back; None: for good
    amount: float = 0.0  # a share, seconds, or rounds back, by its kind


def draw(network: Network, count: int, rounds: int, interval: float, seed: int) -> list[Fault]:
    """Faults for a run: in every ten rounds a third of the nodes go and come back, and one of every other kind."""
    rng = random.Random(f"{network} {count} {rounds} {seed}")
    names = node_names(count)
    busy = dict.fromkeys(names, 0.0)  # rounds
    plan: list[Fault] = []

    def happen(kind: Kind, at: int, how_many: int, seconds: float, amount: float = 0.0) -> None:
        begins = at - amount if kind == "old" else at
        free = [name for name in names if busy[name] <= begins]
        chosen = tuple(sorted(rng.sample(free, min(how_many, len(free)))))
        if not chosen:
            return
        plan.append(Fault(kind, at, chosen, round(seconds, 1), amount))
        for name in chosen:
            busy[name] = at + seconds / interval + 3

    late = names[-(count // 8) :] if count >= 8 else []
    for name in late:
        at = rng.randrange(rounds // 5, max(rounds // 2, rounds // 5 + 1))
        plan.append(Fault("join", at, (name,)))
        busy[name] = at + 4
    for first in range(min(4, rounds // 4), rounds - 6, 10):
        length = min(10, rounds - 6 - first)
        gone = math.ceil(count / 3 * length / 10)
        wanted: list[tuple[Kind, float]] = [(rng.choice(("leave", "crash")), 0.0) for _ in range(gone)]
        wanted += [
            ("hang", 0.0),
            ("partition", 0.0),
            ("loss", rng.choice((0.05, 0.15, 0.3))),
            ("delay", rng.choice((0.1, 0.3, 1.0))),
            ("reorder", 0.3),
            ("duplicate", 0.3),
            ("clock", rng.choice((-2.5, -0.4, 0.4, 2.5)) * interval),
            ("old", 3.0),
        ]
        if network == "p2p" or first <= rounds / 2 < first + 10:  # all nodes of a folder share one disk
            wanted.append(("disk", 0.0))
        rng.shuffle(wanted)
        for place, (kind, amount) in enumerate(wanted):
            group = max(1, count // 4) if kind == "partition" else 1
            happen(
                kind, first + place * length // len(wanted), group, rng.uniform(0.5, 2.5) * interval, amount
            )
    if network == "p2p":
        plan.append(Fault("crash", rounds // 2, ("boot-1", "boot-2", "lead"), None))
    else:
        plan += [Fault("crash", rounds * part // 3, ("lead",), interval) for part in (1, 2)]
    return sorted(plan, key=lambda fault: fault.round)


def node_names(count: int) -> list[str]:
    return [f"node-{number:02}" for number in range(1, count + 1)]


def left_out(plan: Iterable[Fault], network: Network, namespaces: bool) -> tuple[list[Fault], Counter[str]]:
    """The faults that can be brought about here, and how many of each kind cannot."""
    kept, out = [], Counter[str]()
    for fault in plan:
        if not namespaces and (fault.kind == "disk" or (network == "p2p" and fault.kind in ON_THE_LINE)):
            out[fault.kind] += 1
        else:
            kept.append(fault)
    return kept, out


def plan_of(text: str) -> list[Fault]:
    """A plan as `--show` prints it; a clear error where it is none."""
    try:
        faults = [Fault(**{**entry, "nodes": tuple(entry["nodes"])}) for entry in json.loads(text)]
    except (ValueError, TypeError, KeyError) as error:
        raise SystemExit(f"--plan is no list of faults as --show prints them: {error!r}") from error
    for fault in faults:
        if fault.kind not in get_args(Kind):
            raise SystemExit(f"--plan: {fault.kind!r} is no kind of fault; these are: {', '.join(WORDS)}")
    return sorted(faults, key=lambda fault: fault.round)


@dataclass
class Process:
    """One of the swarm's processes, and what the bench knows of it."""

    name: str
    folder: Path
    prefix: list[str]  # what it takes to run in its own network
    command: list[str]
    popen: "subprocess.Popen[bytes] | None" = None
    wanted: bool = False  # to be running
    start_at: float = 0.0
    faults: list[Fault] = field(default_factory=list)  # at present
    excused: tuple[str, float] = ("", -math.inf)  # the last fault that may end a process, and until when
    well_since: float | None = None
    started: float = 0.0
    in_place: bool = False
    put_back: bool = False
    read: dict[str, int] = field(default_factory=dict)  # of files, up to which byte
    history: History = field(default_factory=History)

    @property
    def runs(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def send(self, number: signal.Signals) -> None:
        if self.popen is not None and self.popen.poll() is None:
            self.popen.send_signal(number)

    def control(self, line: dict[str, float]) -> None:
        aside = self.folder / "control.tmp"
        aside.write_text(json.dumps(line))
        aside.replace(self.folder / "control.json")


class Bench:
    def __init__(
        self, network: Network, plan: Sequence[Fault], count: int, rounds: int, interval: float, round_end: str,
        folder: Path, seed: int, namespaces: bool,
    ) -> None:  # fmt: skip
        self.network, self.plan, self.rounds, self.interval = network, list(plan), rounds, interval
        self.round_end, self.root, self.namespaces = round_end, folder, namespaces
        self.swarm = folder / "swarm"
        self.wires = Wires(seed) if namespaces and network == "p2p" else None
        self.run = Run(rounds)
        self.round = -1
        self.created = 0.0  # of the manifest, with rounds by the clock
        self.active: list[tuple[float, Fault]] = []  # with the time of their end
        self.happened: list[tuple[float, float, Fault]] = []
        self.kept: dict[tuple[str, int], Path] = {}  # old states
        self.small = set[Path]()  # disks of their own
        later = {name for fault in plan if fault.kind == "join" for name in fault.nodes}
        bootnodes = ["boot-1", "boot-2"] if network == "p2p" else []
        self.processes = {name: self._process(name) for name in [*bootnodes, "lead", *node_names(count)]}
        self.nodes = {name: p for name, p in self.processes.items() if name.startswith("node")}
        self.first = [name for name in self.nodes if name not in later]
        self.run.nodes = {name: process.history for name, process in self.nodes.items()}

    def play(self) -> Run:
        try:
            self._found()
            self._play()
            self._look()
        finally:
            self._end()
        return self.run

    def _play(self) -> None:
        """Until the swarm has finished, or nobody gets any further."""
        patience = time.monotonic() + LAST_SECONDS + self.rounds * self.interval * 2
        last = math.inf
        while time.monotonic() < min(patience, last):
            self._observe_round()
            self._begin_and_end_faults()
            self._supervise()
            self._look()
            over = self.round >= self.rounds
            if over and last == math.inf:
                last = time.monotonic() + LAST_SECONDS
            coming = self.network == "folder" and (
                any(ends < math.inf for ends, _ in self.active) or any(p.wanted for p in self.nodes.values())
            )
            if over and not coming and not any(process.runs for process in self.nodes.values()):
                return
            time.sleep(LOOK_SECONDS)

    def _found(self) -> None:
        rules = [
            "--rounds",
            str(self.rounds),
            "--round-end",
            self.round_end,
            "--round-interval",
            str(self.interval),
        ]
        rules += ["--min-peers", str(len(self.first)), "--set", f"peer_timeout={3 * self.interval}"]
        rules += ["--set", "poll_interval=0.25", "--set", f"network={self.network}"]
        known = []
        for name in ("boot-1", "boot-2"):
            if name in self.processes:
                boot = self.processes[name]
                boot.command = ["bootnode", *(["--known", known[0]] if known else []), *self._listen(name)]
                self._start(boot)
                known.append(self._said(boot, "join p2p://"))
        lead = self.processes["lead"]
        address = str(self.swarm) if self.network == "folder" else "swarm"
        more = ["--set", f"p2p_known={','.join(known)}", *self._listen("lead")] if known else []
        lead.command = ["coordinate", address, *rules, *more]
        if self.network == "folder":
            self.swarm.mkdir()
            self._mount(self.swarm, 4 << 30)
        self._start(lead)
        manifest = (self.swarm if self.network == "folder" else lead.folder / "swarm") / "manifest.json"
        while not manifest.exists():
            if not lead.runs:
                raise SystemExit(f"the swarm could not be founded: {last_words(lead)}")
            time.sleep(0.1)
        self.created = json.loads(manifest.read_text())["created"]
        node = ["--local", "1", "--external", "1", "--generations", "4"]
        node += [word for name, value in NODE_SETTINGS.items() for word in ("--set", f"{name}={value}")]
        for name, process in self.nodes.items():
            where = ",".join(known) if known else str(self.swarm)
            process.command = ["join", where, *node, *self._listen(name)]
            process.history.peer_id = Identity.load_or_create(process.folder / "swarm.pem").peer_id
        for number, name in enumerate(self.first):
            self.nodes[name].wanted = True
            self.nodes[name].start_at = time.monotonic() + number * 0.1

    def _process(self, name: str) -> Process:
        folder = self.root / name
        folder.mkdir()
        address, prefix = self.wires.add(name) if self.wires else ("127.0.0.1", [])
        (folder / "address").write_text(address)
        if self.network == "p2p" and any(f.kind == "disk" and name in f.nodes for f in self.plan):
            (folder / "runs").mkdir()
            self._mount(folder / "runs", 512 << 20)
        return Process(name, folder, prefix, [])

    def _listen(self, name: str) -> list[str]:
        if self.network == "folder":
            return []
        address = (self.processes[name].folder / "address").read_text()
        return ["--set", f"p2p_listen=/ip4/{address}/tcp/0", "--set", "p2p_relay=false"]

    def _mount(self, folder: Path, size: int) -> None:
        if self.namespaces:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], check=True)
            self.small.add(folder)

    def _start(self, process: Process) -> None:
        launcher = [sys.executable, str(Path(__file__).with_name("faulted.py")), str(process.folder)]
        environ = {**os.environ, "NODE_ID": process.name, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environ |= {"TMPDIR": str(self.root), "PYTHONUNBUFFERED": "1"}
        with (process.folder / "output.log").open("ab") as output:
            process.popen = subprocess.Popen(
                [*process.prefix, *launcher, *process.command], cwd=process.folder, env=environ, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        process.wanted, process.in_place, process.started = True, False, time.monotonic()

    def _said(self, process: Process, words: str) -> str:
        """The address in what a process prints."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.runs:
            for line in (process.folder / "output.log").read_text(errors="replace").splitlines():
                if words in line:
                    return line.split()[-1]
            time.sleep(0.1)
        raise SystemExit(f"{process.name} did not start: {last_words(process)}")

    def _observe_round(self) -> None:
        if self.network == "p2p" and self.round_end == "interval":
            number = min(int((time.time() - self.created) // self.interval), self.rounds)
        else:
            folder = self.swarm if self.network == "folder" else self.processes["lead"].folder / "swarm"
            try:
                state = json.loads((folder / "state" / "current_state.json").read_text())
            except (OSError, ValueError):
                return
            number = state["round"] + (state["phase"] == "finished") if state["phase"] != "waiting" else -1
        if number != self.round:
            self.round = number
            if number < self.rounds:
                self.run.clock.append((time.monotonic(), number))
            self._tell()

    def _tell(self) -> None:
        up = sum(process.runs for process in self.nodes.values())
        faults = ", ".join(
            f"{fault.kind} of {' '.join(name.removeprefix('node-') for name in fault.nodes)}"
            for _, fault in self.active
        )
        progress(
            f"round {self.round:3} of {self.rounds}: {up} nodes up, {self.run.node_rounds()} node-rounds"
            f"{'; ' if faults else ''}{faults}"
        )

    def _begin_and_end_faults(self) -> None:
        now = time.monotonic()
        for fault in self.plan:
            if fault.kind == "old" and self.round >= fault.round - fault.amount:
                for name in fault.nodes:
                    self._keep(self.nodes[name], fault)
        while self.plan and self.round >= self.plan[0].round:
            fault = self.plan.pop(0)
            ends = math.inf if fault.seconds is None else now + fault.seconds
            self.active.append((ends, fault))
            self.happened.append((now, ends, fault))
            for name in fault.nodes:
                self._begin(self.processes[name], fault, now)
        for ends, fault in [entry for entry in self.active if entry[0] <= now]:
            self.active.remove((ends, fault))
            for name in fault.nodes:
                self._end_fault(self.processes[name], fault, now)

    def _begin(self, process: Process, fault: Fault, now: float) -> None:
        self._no_longer_well(process, now)
        process.faults.append(fault)
        if fault.kind in ENDS:
            process.wanted = False
            process.send(signal.SIGTERM if fault.kind == "leave" else signal.SIGKILL)
        elif fault.kind == "hang":
            process.send(signal.SIGSTOP)
        elif fault.kind == "disk":
            self._resize(process, full=True)
        self._apply(process)

    def _end_fault(self, process: Process, fault: Fault, now: float) -> None:
        process.faults.remove(fault)
        if fault.kind in (*ENDS, "join"):
            if fault.kind == "leave" and process.runs:  # it takes its time
                process.faults.append(fault)
                self.active.append((now + 1, fault))
                return
            if process.popen is not None:
                process.popen.wait()
                self._look_at(process)
                process.popen = None
            if fault.kind == "old":
                self._put_back(process, fault)
            process.wanted, process.start_at = True, now
        elif fault.kind == "hang":
            process.send(signal.SIGCONT)
        elif fault.kind == "disk":
            self._resize(process, full=False)
        if fault.kind in ("disk", "partition", "loss"):
            process.excused = (WORDS[fault.kind], now + EXCUSED_SECONDS)
        self._apply(process)
        if process.runs and process.in_place and not process.faults:
            process.well_since = now

    def _apply(self, process: Process) -> None:
        """Makes the process's clock, drive and line as bad as its faults say."""
        amounts: dict[str, float] = {fault.kind: fault.amount for fault in process.faults}
        on_the_line = {kind: amounts[kind] for kind in ON_THE_LINE if kind in amounts}
        drive = dict(on_the_line)
        if "partition" in drive:
            drive["partition"] = 1.0
        if self.wires:
            cut = next((id(f) for f in process.faults if f.kind == "partition"), 0)
            on_the_line.pop("partition", None)
            self.wires.lines[process.name] = Line(cut=cut, **on_the_line)
            drive = {}
        process.control({**drive, "clock": amounts.get("clock", 0.0)})

    def _resize(self, process: Process, full: bool) -> None:
        """Takes all the room of a disk, or gives it back."""
        disk = self.swarm if self.network == "folder" else process.folder / "runs"
        if disk not in self.small:
            return
        usage = shutil.disk_usage(disk)
        size = usage.used + 4096 if full else (4 << 30 if self.network == "folder" else 512 << 20)
        subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)
        if self.network == "folder":  # all share it
            for other in self.processes.values():
                self._no_longer_well(other, time.monotonic())
                until = math.inf if full else time.monotonic() + EXCUSED_SECONDS
                other.excused = (WORDS["disk"], until)
                if not full and other.runs and other.in_place and not other.faults:
                    other.well_since = time.monotonic()

    def _no_longer_well(self, process: Process, now: float) -> None:
        if process.well_since is not None:
            process.history.well.append((process.well_since, now))
        process.well_since = None

    def _supervise(self) -> None:
        now = time.monotonic()
        starting = sum(
            process.runs and not process.in_place and now - process.started < 3 * STARTING_SECONDS
            for process in self.nodes.values()
        )
        for process in self.processes.values():
            if process.popen is not None and not process.runs and process.wanted:
                self._ended_by_itself(process, now)
            due = process.wanted and not process.runs and now >= process.start_at
            # Among peers nobody is there any more to come back to.
            if due and (self.network == "folder" or self.round < self.rounds):
                if process.name in self.nodes:
                    if starting >= STARTING:
                        continue
                    starting += 1
                self._start(process)

    def _ended_by_itself(self, process: Process, now: float) -> None:
        assert process.popen is not None
        self._look_at(process)
        self._no_longer_well(process, now)
        code = process.popen.returncode
        if code == 0 and (process.history.left_well or process.name not in self.nodes):
            process.wanted = False
            return
        excuse = process.faults[0].kind if process.faults else ""
        if not excuse and now < process.excused[1]:
            excuse = process.excused[0]
        end = End(now, code, excuse, last_words(process))
        process.history.ends.append(end)
        progress(f"{process.name} ended with exit code {code} ({excuse or 'no reason'}): {end.words}")
        if not process.in_place:
            self._note_start(process, None)
        process.popen, process.start_at = None, now + RESTART_SECONDS

    def _keep(self, process: Process, fault: Fault) -> None:
        """Copies a node's state as it is now, to be put back later."""
        key = (process.name, fault.round)
        if key in self.kept:
            return
        copy = self.kept[key] = self.root / f"old-{process.name}-{fault.round}"
        for _ in range(5):
            try:
                for path in self._state_of(process):
                    shutil.copytree(path, copy / path.relative_to(self.root), dirs_exist_ok=True)
                return
            except (shutil.Error, OSError):  # a file has gone meanwhile
                shutil.rmtree(copy, ignore_errors=True)
        progress(f"the state of {process.name} could not be copied")

    def _put_back(self, process: Process, fault: Fault) -> None:
        copy = self.kept.pop((process.name, fault.round))
        for path in self._state_of(process):
            shutil.rmtree(path)
        shutil.copytree(copy, self.root, dirs_exist_ok=True)
        shutil.rmtree(copy)
        process.put_back = True
        for name in ("metrics", "training_events"):
            with suppress(FileNotFoundError):
                process.read[name] = self._journal(process, name).stat().st_size

    def _state_of(self, process: Process) -> list[Path]:
        """What is a node's own on disk, its key aside."""
        if self.network == "p2p":
            return [path for path in (process.folder / "runs").glob("*") if path.is_dir()]
        found = [self.swarm / "logs" / process.name, *self.swarm.glob(f"checkpoints/round_*/{process.name}")]
        return [path for path in found if path.is_dir()]

    def _journal(self, process: Process, name: str) -> Path:
        if name == "seen":
            return process.folder / "seen.jsonl"
        if self.network == "folder":
            return self.swarm / "logs" / process.name / f"{name}.jsonl"
        found = list((process.folder / "runs").glob(f"p2p-*/logs/{process.name}/{name}.jsonl"))
        return found[0] if found else process.folder / "nowhere"

    def _look(self) -> None:
        for process in self.nodes.values():
            if process.popen is not None:
                self._look_at(process)

    def _look_at(self, process: Process) -> None:
        """Reads what a node has written since the last look."""
        now, history = time.monotonic(), process.history
        for line in self._news(process, "metrics"):
            if line["kind"] == "round":
                history.finished.append((now, line["round"]))
        for line in self._news(process, "training_events"):
            if line["event"] in ("joined", "resumed") and not process.in_place:
                self._note_start(process, line["round"])
                process.in_place, process.put_back = True, False
                if not process.faults:
                    process.well_since = now
            if line["event"] == "finished":
                history.left_well = True
                self._no_longer_well(process, now)
        for line in self._news(process, "seen"):
            if line["what"] == "members":
                history.members.append((now, line["members"]))
            elif line["what"] == "accepted":
                history.accepted.append((line["author"], line["round"], line["content"]))

    def _note_start(self, process: Process, resumed: int | None) -> None:
        history = process.history
        since = max((start.time for start in history.starts if start.put_back), default=-math.inf)
        before = {number for time, number in history.finished if since < time < process.started}
        lost = tuple(sorted(number for number in before if resumed is not None and number > resumed))
        start = Start(process.started, resumed, time.monotonic(), lost, process.put_back)
        process.history.starts.append(start)

    def _news(self, process: Process, name: str) -> list[dict[str, Any]]:
        lines, process.read[name] = read_lines(self._journal(process, name), process.read.get(name, 0))
        return lines

    def _end(self) -> None:
        now = time.monotonic()
        for process in self.nodes.values():
            self._no_longer_well(process, now)
            if process.runs and not process.history.left_well:
                process.history.left_well = False
            if process.runs and not process.in_place:
                self._note_start(process, None)
        for process in self.processes.values():
            process.send(signal.SIGCONT)
            process.send(signal.SIGKILL)
            if process.popen is not None:
                process.popen.wait()
        deadline = time.monotonic() + 10
        while (left := processes_in(self.root)) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.run.left_behind = left
        if self.wires:
            self.wires.close()


def processes_in(root: Path) -> list[str]:
    """Processes at work below a folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()).is_relative_to(root):
                found.append(" ".join(process.cmdline())[:200])
    return found


def last_words(process: Process) -> str:
    """What a process said at its end: its message to the user, or the error that it did not foresee."""
    lines = (process.folder / "output.log").read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines[-200:] if line.startswith(("rl-swarm: ", "Traceback"))]
    return (errors or lines or ["it said nothing"])[-1]


def outcome(bench: Bench) -> list[dict[str, Any]]:
    """By kind of fault: how often, and how long until its nodes had finished a round again."""
    rows = []
    for kind in get_args(Kind):
        found = [entry for entry in bench.happened if entry[2].kind == kind]
        waits = []
        for _, ends, fault in found:
            for name in fault.nodes:
                if name in bench.nodes and ends < math.inf:
                    waits += waits_after(bench.nodes[name].history, ends)
        if found:
            rows.append(
                {
                    "kind": kind,
                    "times": len(found),
                    "nodes": sum(len(fault.nodes) for _, _, fault in found),
                    "median_seconds": round(statistics.median(waits), 1) if waits else None,
                    "worst_seconds": round(max(waits), 1) if waits else None,
                }
            )
    return rows


def waits_after(history: History, ends: float) -> list[float]:
    """Seconds from the end of a fault, or from the start after it, to the next finished round, if there was one."""
    after = min((time for time, _ in history.finished if time > ends), default=math.inf)
    begun = max([ends, *(start.time for start in history.starts if start.time < after)])
    return [after - begun] if after < math.inf else []


def figures_of(bench: Bench, broken: list[str], seconds: float) -> dict[str, Any]:
    run = bench.run
    starts = [s for node in run.nodes.values() for s in node.starts[1:] if s.resumed is not None]
    lost = [len(start.lost) for start in starts if not start.put_back]
    return {
        "network": bench.network,
        "round_end": bench.round_end,
        "interval": bench.interval,
        "nodes": len(run.nodes),
        "rounds": run.rounds,
        "node_rounds": run.node_rounds(),
        "restarts": len(starts),
        "rounds_lost": sum(lost),
        "most_lost_by_one": max(lost, default=0),
        "ended_and_started_again": sum(len(node.ends) for node in run.nodes.values()),
        "faults": outcome(bench),
        "violations": broken,
        "seconds": round(seconds),
        "cores": os.cpu_count(),
    }


def print_figures(figures: dict[str, Any]) -> None:
    print(
        "| fault | times | nodes | until the next finished round: median | worst |\n| --- | ---: | ---: | ---: | ---: |"
    )
    for row in figures["faults"]:
        waits = [
            f"{row[f'{which}_seconds']} s" if row["median_seconds"] is not None else "-"
            for which in ("median", "worst")
        ]
        print(f"| {WORDS[row['kind']]} | {row['times']} | {row['nodes']} | {' | '.join(waits)} |")
    print(
        f"\n{figures['network']}: {figures['nodes']} nodes, {figures['rounds']} rounds, {figures['node_rounds']} node-rounds in "
        f"{figures['seconds']} s; {figures['restarts']} restarts lost {figures['rounds_lost']} rounds together and one at most "
        f"{figures['most_lost_by_one']}; {figures['ended_and_started_again']} ended because of a fault and were started again."
    )


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def can_unshare() -> bool:
    with suppress(OSError):
        return (
            subprocess.run([*UNSHARE, "ip", "tuntap", "add", "mode", "tap"], capture_output=True).returncode
            == 0
        )
    return False


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--network", choices=get_args(Network), default="folder")
    options.add_argument("--nodes", type=int, default=16)
    options.add_argument("--rounds", type=int, default=75)
    options.add_argument("--interval", type=float, default=8.0, help="seconds per round")
    options.add_argument(
        "--round-end", help="default: deadline in a folder, interval (the clock) among peers"
    )
    options.add_argument("--seed", type=int, default=0, help="decides the plan")
    options.add_argument("--plan", metavar="FILE", help="the faults, instead of those drawn from the seed")
    options.add_argument("--show", action="store_true", help="print the plan and do nothing")
    options.add_argument("--folder", help="keep everything there (default: a temporary folder)")
    options.add_argument("--json", metavar="FILE", help="write the figures there")
    options.add_argument("--no-namespaces", action="store_true", help="only what needs none")
    return options


def main() -> None:
    options = parser().parse_args()
    if options.plan:
        plan = plan_of(Path(options.plan).read_text())
    else:
        plan = draw(options.network, options.nodes, options.rounds, options.interval, options.seed)
    if options.show:
        print("[\n" + ",\n".join("  " + json.dumps(asdict(fault)) for fault in plan) + "\n]")
        return
    if INSIDE not in os.environ and not options.no_namespaces:
        if can_unshare():
            os.execvpe(UNSHARE[0], [*UNSHARE, sys.executable, *sys.argv], {**os.environ, INSIDE: "1"})
        progress("this user may not have namespaces (unshare): what needs them is left out")
    namespaces = INSIDE in os.environ
    plan, out = left_out(plan, options.network, namespaces)
    if out:
        progress(
            f"left out without namespaces: {', '.join(f'{kind} ({count})' for kind, count in out.items())}"
        )
    round_end = options.round_end or ("interval" if options.network == "p2p" else "deadline")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        folder = Path(options.folder or temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(
            options.network, plan, options.nodes, options.rounds, options.interval, round_end, folder, options.seed,
            namespaces,
        )  # fmt: skip
        try:
            bench.play()
        except KeyboardInterrupt:
            sys.exit(130)
        broken = violations(bench.run)
        figures = figures_of(bench, broken, time.monotonic() - started)
    print_figures(figures)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")
    for sentence in broken:
        print(sentence)
    print(f"{len(broken)} violations" if broken else "nothing stuck, nothing lost, all agree on who is who")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
