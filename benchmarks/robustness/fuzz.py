"""Fuzzes everything that strangers can reach in a node: random cases against every part.

    python -m benchmarks.robustness.fuzz --hours 24 --processes 2
    python -m benchmarks.robustness.fuzz --hours 1 --targets folder,http
    python -m benchmarks.robustness.fuzz --targets messages --cases 1000000
    python -m benchmarks.robustness.fuzz --replay fuzz-failures/fuzz-folder-0123456789ab.json

Targets:
    messages  documents, changed and signed again, guided by coverage
    streams   requests and records among real peers on loopback, as a state machine
    folder    the layer below the shared folder, while calls to the system fail and files are replaced
    http      the dashboard's server, under slow and broken clients beside honest ones

The targets share the time. A case that fails is kept in a file, which `--replay` plays again. Ctrl-C ends the run with
the table of what was done so far. The exit code is 1 where anything failed.
"""

import argparse
import faulthandler
import importlib
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.robustness.fuzz_target import MAX_FAILURES, MEBIBYTE, Result, Target, fuzz

TARGETS = {
    "messages": ("benchmarks.robustness.fuzz_messages", "Messages"),
    "streams": ("benchmarks.robustness.fuzz_streams", "Streams"),
    "folder": ("benchmarks.robustness.fuzz_folder", "Folder"),
    "http": ("benchmarks.robustness.fuzz_http", "Http"),
}
SLICE = 3600.0  # seconds of a process; the next one of its target has another seed
PROGRESS_SECONDS = 60.0
STUCK_SECONDS = 300.0  # without output of a process, beyond the limit of a case
END_SECONDS = 60.0  # for a process to end when stopped
MAX_SHOWN = 12  # of the counts


def target_of(name: str, seed: int) -> Target:
    module, kind = TARGETS[name]
    made: Target = getattr(importlib.import_module(module), kind)(seed)
    return made


def work(name: str, seed: int, seconds: float, cases: float, failures_to: Path, parent: Connection) -> None:
    """Fuzz one target in a process of its own, until the parent says so or has gone."""
    faulthandler.enable()
    fuzz(target_of(name, seed), failures_to, seconds, cases, parent.poll, parent.send)


class Slice:
    """Holds one process and its reports."""

    def __init__(self, name: str, seed: int, seconds: float, cases: float, failures_to: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.result, self.heard, self.seed = Result(name), time.monotonic(), seed
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=work, args=(name, seed, seconds, cases, failures_to, theirs), name=f"fuzz {name}"
        )
        self.process.start()
        theirs.close()

    def hear(self) -> bool:
        """Read the process's reports; return False once it has ended."""
        try:
            while self.connection.poll():
                self.result, self.heard = self.connection.recv(), time.monotonic()
        except (EOFError, OSError):
            self.process.join(END_SECONDS)
            if self.process.exitcode != 0:
                self._failed(f"the process ended with {self.process.exitcode}")
            return False
        if time.monotonic() - self.heard > STUCK_SECONDS:
            self._failed(f"nothing was heard of it for {STUCK_SECONDS:.0f} s")
            self.process.kill()
            self.process.join()
            return False
        return True

    def stop(self) -> None:
        try:
            self.connection.send("stop")
        except OSError:
            return

    def _failed(self, why: str) -> None:
        about = f"after {self.result.cases} cases of --targets {self.result.target} --seed {self.seed}"
        self.result.failures.append(f"{self.result.target}: {why} {about}")


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C. Processes that start meanwhile never receive it: it is for the parent."""
    resource_tracker.ensure_running()  # which would unblock it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run(targets: list[str], seconds: float, cases: float, processes: int, seed: int, failures_to: Path) -> list[Result]:
    """Run slices of all targets in turn; return the results so far when it is interrupted."""
    share = seconds * processes / len(targets)
    rounds = math.ceil(max(processes / len(targets), 0.0 if math.isinf(share) else share / SLICE))
    slices = ((seed + number, share / rounds, cases / rounds) for number in range(rounds))
    waiting = deque((name, *each) for each in slices for name in targets)
    running, done = list[Slice](), list[Result]()
    started = told = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                with without_interrupts():
                    running.append(Slice(*waiting.popleft(), failures_to))
            wait([each.connection for each in running], 5.0)
            for each in [each for each in running if not each.hear()]:
                running.remove(each)
                done.append(each.result)
                if len(each.result.failures) >= MAX_FAILURES:
                    waiting = deque(item for item in waiting if item[0] != each.result.target)
            if time.monotonic() >= told + PROGRESS_SECONDS:
                told = time.monotonic()
                print(progress([*done, *(each.result for each in running)], told - started), flush=True)
    except KeyboardInterrupt:
        print("\nending", flush=True)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for each in running:
            each.stop()
        deadline = time.monotonic() + END_SECONDS
        while running and time.monotonic() < deadline:
            wait([each.connection for each in running], 1.0)
            for each in [each for each in running if not each.hear()]:
                running.remove(each)
                done.append(each.result)
        for each in running:
            each.process.kill()
            done.append(each.result)
    return done


def progress(results: list[Result], seconds: float) -> str:
    counts = ", ".join(f"{each.target} {each.cases}" for each in merged(results))
    failures = sum(len(each.failures) for each in results)
    return f"{seconds / 60:.0f} min: {counts} cases, {failures} failures"


def merged(results: list[Result]) -> list[Result]:
    """Add up the slices of each target."""
    found: dict[str, Result] = {}
    for each in results:
        all_of_it = found.setdefault(each.target, Result(each.target))
        all_of_it.cases += each.cases
        all_of_it.seconds += each.seconds
        all_of_it.slowest = max(all_of_it.slowest, each.slowest)
        all_of_it.reached += each.reached
        all_of_it.failures += each.failures
        if not all_of_it.memory or each.growth() > all_of_it.growth():
            all_of_it.memory = each.memory
    return list(found.values())


def table(results: list[Result]) -> str:
    lines = [
        f"{'target':10}{'cases':>10}{'seconds':>9}{'failures':>10}{'slowest, s':>12}{'memory, MiB':>16}{'reached':>9}"
    ]
    for each in merged(results):
        memory = f"{each.memory[-1] / MEBIBYTE:.0f} ({each.growth() / MEBIBYTE:+.0f})" if each.memory else "-"
        lines.append(
            f"{each.target:10}{each.cases:10}{each.seconds:9.0f}{len(each.failures):10}{each.slowest:12.2f}{memory:>16}"
            f"{len(each.reached):9}"
        )
    for each in merged(results):
        most = ", ".join(f"{label} {count}" for label, count in each.reached.most_common(MAX_SHOWN))
        rare = ", ".join(label for label, _ in each.reached.most_common()[MAX_SHOWN:][-MAX_SHOWN:])
        lines.append(f"{each.target} reached: {most}" + (f"; least often: {rare}" if rare else ""))
    return "\n".join(lines)


def replay(path: Path) -> int:
    """Play a case that failed."""
    kept: dict[str, Any] = json.loads(path.read_text())
    target = target_of(kept["target"], 0)
    target.open()
    try:
        print("\n".join(target.play(kept["case"])))
    finally:
        target.close()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=None, help="for all targets together (0.1)")
    parser.add_argument("--cases", type=int, default=None, help="end each target after so many")
    parser.add_argument("--targets", default=",".join(TARGETS), help="names with commas (all)")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), metavar="FOLDER")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="play one case that failed")
    given = parser.parse_args()
    if given.replay:
        return replay(given.replay)
    targets = given.targets.split(",")
    if unknown := [name for name in targets if name not in TARGETS]:
        parser.error(f"--targets {','.join(unknown)}: there are {', '.join(TARGETS)}")
    if given.processes < 1 or (given.hours is not None and not 0 < given.hours < float("inf")):
        parser.error("--processes is at least 1, and --hours is a number above 0")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    hours = 0.1 if given.hours is None and given.cases is None else given.hours or float("inf")
    results = run(targets, hours * 3600, given.cases or float("inf"), given.processes, given.seed, given.failures)
    print(table(results))
    failures = [failure for result in results for failure in result.failures]
    for failure in failures:
        print(failure, file=sys.stderr)
    if failures:
        print(f"{len(failures)} failures; play one again with --replay FILE", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
