"""Runs `rl-swarm` and the benchmarks as a user does: real processes, real files."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

RL_SWARM = [sys.executable, "-m", "rl_swarm"]
CHECKOUT = Path(__file__).parents[2]
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # tests that a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
HAS_HIVEMIND = find_spec("hivemind") is not None  # there is a wheel for Linux on x86-64
needs_hivemind = pytest.mark.skipif(not HAS_HIVEMIND, reason="hivemind is not installed")
HELD_OUT = ["--set", "held_out_questions=8", "--set", "held_out_samples=1"]
WHOLE = [*HELD_OUT, "--set", "checkpoint_every=5"]  # rounds as large as a user's
FEW = [*HELD_OUT, "--set", "local_groups=2", "--set", "generations=4"]  # rounds of a fifth of a second
QUICK = [*FEW, "--set", "checkpoint_every=5"]
SMALL = [*FEW, "--no-web"]


def start(cwd: Path, *arguments: str, start_new_session: bool = False, **environ: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*RL_SWARM, *arguments],
        start_new_session=start_new_session,
        cwd=cwd,
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(cwd: Path, *arguments: str, timeout: float = 240, **environ: str) -> tuple[int, str]:
    process = start(cwd, *arguments, **environ)
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        end(process)
    return process.returncode, output


def start_benchmark(name: str, *arguments: str, cwd: Path = CHECKOUT, **options: Any) -> "subprocess.Popen[str]":
    """Start a benchmark by its module below `benchmarks`, from any directory."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    return subprocess.Popen(command, cwd=cwd, env=environ, stdout=subprocess.PIPE, text=True, **options)


def run_benchmark(name: str, *arguments: str, timeout: float = 240) -> "subprocess.CompletedProcess[str]":
    process = start_benchmark(name, *arguments, stderr=subprocess.PIPE)
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        end(process)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def family(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def members(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Return the coordinator and the nodes: forked from the fork server, not started afresh like the scorers."""
    children = family(process)
    servers = {child.pid for child in children if _parent(child) == process.pid}
    return [child for child in children if _parent(child) in servers]


def _parent(child: psutil.Process) -> int:
    try:
        return child.ppid()
    except psutil.NoSuchProcess:
        return 0


def until(condition: Callable[[], bool], seconds: float = 400.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def status(cwd: Path, address: Path) -> dict[str, Any]:
    code, output = run(cwd, "status", str(address), "--json")
    assert code == 0, output
    return json.loads(output)


def state(address: Path) -> dict[str, Any]:
    try:
        return json.loads((address / "state" / "current_state.json").read_text())
    except (OSError, ValueError):
        return {"round": -1, "phase": "waiting"}


def metrics(address: Path) -> dict[str, list[dict[str, Any]]]:
    """Return every node's metrics without those that depend on the clock or the machine."""
    timing = {"timestamp", "seconds", "began", "phases", "tokens_per_second", "peak_memory", "load"}
    found = {}
    for path in sorted(address.glob("logs/*/metrics.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.parent.name] = [{k: v for k, v in line.items() if k not in timing} for line in lines]
    return found
