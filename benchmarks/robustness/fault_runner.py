"""Runs a swarm of real processes, applies the faults of a plan, and reads what became of every node.

The runner starts nodes, kills and restarts them, disturbs their clocks, drives and lines, and reads what they write. It
judges nothing: fault_verdict.py does.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.command import progress
from benchmarks.robustness.fault_network import Line, Wires
from benchmarks.robustness.fault_plan import ON_THE_LINE, WORDS, Fault, Network, node_names
from benchmarks.robustness.fault_process import Process, last_words, processes_in
from benchmarks.robustness.fault_verdict import START_SECONDS, End, Run, Start
from rl_swarm.protocol.identity import Identity
from rl_swarm.storage.files import LocalFiles
from rl_swarm.telemetry.journal import read_lines

ENDS = ("leave", "crash", "old")  # the process
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
KILLED = "killed from outside"
STARTING = 4  # nodes at a time: they load torch
STARTING_SECONDS = 15.0  # that it usually takes
PRIVATE = "private"  # in a node's folder, what only it writes
RESTART_SECONDS = 2.0  # until a process that ended by itself is started again
EXCUSED_SECONDS = 15.0  # after a fault in which a node may still end because of it
LAST_SECONDS = 90.0  # for nodes to end after the last round


class FaultRunner:
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
        self.happened: list[tuple[float, Fault]] = []
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
        """Play until the swarm has finished, or no node gets any further."""
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
            if over and not self._any_left():
                return
            time.sleep(LOOK_SECONDS)

    def _any_left(self) -> bool:
        """Return whether nodes still end or return. Among peers no node is left to return to after the last round."""
        if self.network == "p2p":
            return any(process.runs and process.in_place for process in self.nodes.values())
        coming = any(ends < math.inf for ends, _ in self.active)
        return coming or any(process.runs or process.wanted for process in self.nodes.values())

    def _found(self) -> None:
        rules = ["--rounds", str(self.rounds), "--round-end", self.round_end, "--round-interval", str(self.interval)]
        rules += ["--min-peers", str(len(self.first)), "--set", f"peer_timeout={3 * self.interval}"]
        rules += ["--set", "poll_interval=0.25", "--set", f"network={self.network}"]
        known = []
        for name in ("boot-1", "boot-2"):
            if name in self.processes:
                boot = self.processes[name]
                boot.command = ["bootnode", *(["--initial-peers", known[0]] if known else []), *self._listen(name)]
                self._start(boot)
                known.append(self._said(boot, "join p2p://"))
        lead = self.processes["lead"]
        address = str(self.swarm) if self.network == "folder" else "swarm"
        more = ["--set", f"p2p_initial_peers={','.join(known)}", *self._listen("lead")] if known else []
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
        node = ["--local-groups", "1", "--external-groups", "1", "--generations", "4"]
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
        if process.name in self.nodes and not process.history.starts and not self.processes["lead"].runs:
            process.command[1] = self._present_peers() or process.command[1]  # all peers that it knows have left
        launcher = [sys.executable, str(Path(__file__).with_name("fault_node.py")), str(process.folder)]
        environ = {**os.environ, "NODE_ID": process.name, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environ |= {"TMPDIR": str(self.root), "PYTHONUNBUFFERED": "1"}
        environ["PRIVATE_PATH"] = str(process.folder / PRIVATE)
        with (process.folder / "output.log").open("ab") as output:
            process.popen = subprocess.Popen(
                [*process.prefix, *launcher, *process.command], cwd=process.folder, env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        process.wanted, process.in_place, process.started = True, False, time.monotonic()

    def _present_peers(self) -> str:
        """Return addresses of present peers, as a newcomer would get them from a friend."""
        files = self.root.glob("node-*/runs/p2p-*/addresses.json")
        known = {address for file in files for address in json.loads(file.read_text())["addresses"]}
        return ",".join(f"p2p://{address}" for address in sorted(known)[:32])

    def _said(self, process: Process, words: str) -> str:
        """Return the address in what a process prints."""
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
            hit = tuple(name for name in fault.nodes if fault.kind == "join" or self.processes[name].runs)
            if hit:  # others were down anyway
                self.happened.append((ends, replace(fault, nodes=hit)))
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
            if fault.kind == "leave" and process.runs:  # a stop may take long
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
        """Make the process's clock, drive and line as bad as its faults say."""
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
        """Fill a disk, or free it again."""
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
        for process in sorted(self.processes.values(), key=lambda process: process.start_at):
            if process.popen is not None and not process.runs and process.wanted:
                self._ended_by_itself(process, now)
            due = process.wanted and not process.runs and now >= process.start_at
            # Among peers no node is left to return to.
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
        if code == -signal.SIGKILL:  # as the kernel does where memory runs out: an unplanned crash
            excuse = KILLED
        end = End(now, code, excuse, last_words(process))
        process.history.ends.append(end)
        progress(f"{process.name} ended with exit code {code} ({excuse or 'no reason'}): {end.words}")
        process.popen, process.start_at = None, now + RESTART_SECONDS

    def _keep(self, process: Process, fault: Fault) -> None:
        """Copy a node's present state, to be restored later."""
        key = (process.name, fault.round)
        if key in self.kept:
            return
        copy = self.kept[key] = self.root / f"old-{process.name}-{fault.round}"
        for _ in range(5):
            copy.mkdir()  # it stays empty for a node that has no state yet
            try:
                for path in self._state_of(process):
                    shutil.copytree(path, copy / path.relative_to(self.root), dirs_exist_ok=True)
                return
            except (shutil.Error, OSError):  # a file has gone meanwhile
                shutil.rmtree(copy, ignore_errors=True)
        raise OSError(f"the state of {process.name} could not be copied")

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
        """Return a node's own files, without its key."""
        found = [process.folder / PRIVATE]
        if self.network == "p2p":
            found += (process.folder / "runs").glob("*")
        else:
            found += [self.swarm / "logs" / process.name]
            found += self.swarm.glob(f"checkpoints/round_*/{process.name}")
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
        """Read what a node has written since the last look."""
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
        path = self._journal(process, name)
        lines, process.read[name] = read_lines(LocalFiles(path.parent), path.name, process.read.get(name, 0))
        return lines

    def _end(self) -> None:
        now = time.monotonic()
        for process in self.nodes.values():
            self._no_longer_well(process, now)
            if not process.runs:
                continue
            too_late = self.network == "p2p" and now - process.started < START_SECONDS
            if not process.in_place and not too_late:
                self._note_start(process, None)
            if process.in_place and not process.history.left_well:
                process.history.left_well = False
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
