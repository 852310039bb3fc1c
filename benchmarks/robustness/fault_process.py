"""Starts, signals and reads one process of a swarm under faults."""

import json
import math
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.robustness.fault_plan import Fault
from benchmarks.robustness.fault_verdict import History


@dataclass
class Process:
    """Holds one of the swarm's processes, and what the runner knows of it."""

    name: str
    folder: Path
    prefix: list[str]  # command prefix for its own network namespace
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


def processes_in(root: Path) -> list[str]:
    """Return the processes at work below a folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()).is_relative_to(root):
                found.append(" ".join(process.cmdline())[:200])
    return found


def last_words(process: Process) -> str:
    """Return the last message of a process: the one to its user, or the unforeseen error."""
    lines = (process.folder / "output.log").read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines[-200:] if line.startswith(("rl-swarm: ", "Traceback"))]
    return (errors or lines or ["it said nothing"])[-1]
