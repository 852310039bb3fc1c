"""Measures how fast the dashboard answers and what it costs: real servers, real files, a real browser.

    python -m benchmarks.dashboard.load [start] [load] [beside] [--quick] [--json FILE]

- `start`: seconds from `rl-swarm watch DIR` until it answers the overview's data and the reward curve of a run of 2000
  rounds and 8 nodes. Only the system's file cache outlives a start; the first start has a row of its own.
- `load`: 1000 peers and 2000 rounds in a folder that keeps growing. 200 viewers listen for changes and ask for the
  overview's data with each (viewers.py). A page is all four answers. Server, viewers and the folder's writer share two
  cores.
- `beside`: processor seconds of the web process over those of the nodes, during a default `rl-swarm up` with the
  overview open in Chromium.

The code that writes the history is the nodes' own (benchmarks/lib/synthetic_run.py). `--quick` is small, to show that
all works.
"""

import http.client
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.dashboard.viewers import PAGE, Known
from benchmarks.lib.command import parser_of, print_table, progress, write_json
from benchmarks.lib.synthetic_run import History

PARTS = ("start", "load", "beside")
BARS = {"start": "under 1 s", "load": "median under 100 ms", "memory": "flat", "beside": "at most 3 %"}
WARM_SECONDS = 600.0  # at most, until a server answers
HEARTBEAT_SECONDS = 15.0  # between heartbeats of a node
TICK = 0.1
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Size:
    nodes: int = 8
    rounds: int = 2000
    starts: int = 6
    peers: int = 1000
    viewers: int = 200
    seconds: float = 240.0
    up: tuple[str, ...] = ()  # arguments of `up`


QUICK = Size(4, 50, 2, 20, 10, 4.0, ("--rounds", "8", "--nodes", "2", "--set", "held_out_questions=16"))


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ask(port: int, path: str) -> bytes:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WARM_SECONDS)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
    if answer.status != 200:
        raise SystemExit(f"{path} was answered with {answer.status}")
    return body


@contextmanager
def served(root: Path) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """Start `rl-swarm watch` as a user does; yield the process and its port."""
    port = free_port()
    command = [sys.executable, "-m", "rl_swarm", "watch", str(root), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield process, port
    finally:
        process.terminate()
        process.wait(60)


def until_it_listens(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + WARM_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit("the server has ended")
        with closing(socket.socket()) as found:
            if found.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.002)
    raise SystemExit("the server does not listen")


def known_of(history: History) -> Known:
    return Known([peer.node for peer in history.peers], history.state.round)


def measure_start(folder: Path, size: Size) -> dict[str, Any]:
    history = History(folder / "start", size.nodes, size.rounds)
    known, seconds, processor = known_of(history), [], []
    for _ in range(size.starts):
        for node in range(size.nodes):
            history.sign(node)  # else they count as offline after a while
        started = time.perf_counter()
        with served(history.root) as (process, port):
            until_it_listens(process, port)
            answers = {what: ask(port, PAGE[what]) for what in ("overview", "reward")}
            seconds.append(time.perf_counter() - started)
            spent = psutil.Process(process.pid).cpu_times()
            processor.append(spent.user + spent.system)
        for what, body in answers.items():
            known.check(what, body)
    again = seconds[1:] or seconds
    return {
        "nodes": size.nodes,
        "rounds": size.rounds,
        "first_s": seconds[0],
        "again_s": statistics.median(again),
        "worst_s": max(seconds),
        "processor_s": statistics.median(processor),
    }


def grow(history: History, until: "subprocess.Popen[str]", server: psutil.Process) -> list[int]:
    """Play on until the viewers have left; return the server's memory, once a second."""
    count, interval, memory = len(history.peers), history.rules.interval, list[int]()
    began = time.monotonic()
    played = signed = ended = 0
    while until.poll() is None:
        passed = time.monotonic() - began
        while played < min(passed * count / interval, (ended + 1) * count):
            history.play(played % count)
            played += 1
        while signed < passed * count / HEARTBEAT_SECONDS:
            history.sign(signed % count)
            signed += 1
        if passed >= (ended + 1) * interval and played == (ended + 1) * count:
            history.end_round()
            ended += 1
        if len(memory) < passed:
            memory.append(server.memory_info().rss)
        time.sleep(TICK)
    return memory


def measure_load(folder: Path, size: Size) -> dict[str, Any]:
    began = time.perf_counter()
    interval = min(10.0, size.seconds / 3)
    history = History(folder / "load", size.peers, size.rounds, interval=interval)
    made = time.perf_counter() - began
    known = known_of(history)
    facts = folder / "history.json"
    facts.write_text(json.dumps({"nodes": known.nodes, "played": known.played}))
    for node in range(size.peers):
        history.sign(node)
    began = time.perf_counter()
    with served(history.root) as (process, port):
        until_it_listens(process, port)
        for path in PAGE.values():
            ask(port, path)
        ready = time.perf_counter() - began
        server = psutil.Process(process.pid)
        before = server.cpu_times()
        command = [sys.executable, "-m", "benchmarks.dashboard.viewers", str(port), str(facts)]
        command += ["--viewers", str(size.viewers), "--seconds", str(size.seconds)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as viewers:
            memory = grow(history, viewers, server)
            assert viewers.stdout is not None
            told = viewers.stdout.read()
        if viewers.returncode:
            raise SystemExit("the viewers failed")
        after = server.cpu_times()
    spent = after.user + after.system - before.user - before.system
    return {
        "peers": size.peers,
        "rounds": size.rounds,
        "rounds_played_meanwhile": history.state.round - known.played,
        "history_made_s": made,
        "ready_s": ready,
        **json.loads(told),
        "processor_share": spent / size.seconds,
        "rss_start": memory[0],
        "rss_middle": memory[len(memory) // 2],
        "rss_end": memory[-1],
        "rss_most": max(memory),
    }


def measure_beside(folder: Path, size: Size) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("beside needs Chromium (apt install chromium).")
    run, port = folder / "beside", free_port()
    command = [sys.executable, "-m", "rl_swarm", "up", "--run", str(run), "--port", str(port), *size.up]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as swarm, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        until_it_listens(swarm, port)
        page = browser.new_page()
        page.goto(f"http://localhost:{port}/#/")
        seen = ""
        spent: dict[int, float] = {}
        web: set[int] = set()
        while swarm.poll() is None:
            for child in psutil.Process(swarm.pid).children(recursive=True):
                try:
                    times = child.cpu_times()
                    spent[child.pid] = times.user + times.system
                    if "rl_swarm.web.server" in child.cmdline():
                        web.add(child.pid)
                except psutil.NoSuchProcess:
                    continue
            page.wait_for_timeout(200)
            if fact := page.locator("dl.facts dd").all_text_contents():
                seen = fact[0]
        browser.close()
    peers = [json.loads(path.read_text()) for path in (run / "peers").glob("*.json")]
    nodes = sum(spent[peer["pid"]] for peer in peers)
    served = sum(spent[pid] for pid in web)
    return {
        "nodes": len(peers),
        "nodes_s": nodes,
        "web_s": served,
        "share": served / nodes,
        "seen_last": seen,
        "returned": swarm.returncode,
    }


def show(figures: dict[str, Any]) -> None:
    rows: list[list[str]] = []
    if start := figures.get("start"):
        rows.append(
            [
                f"start, {start['rounds']} rounds of {start['nodes']} nodes",
                f"first {start['first_s']:.2f} s, again {start['again_s']:.2f} s, CPU {start['processor_s']:.2f} s",
                BARS["start"],
            ]
        )
    if load := figures.get("load"):
        rows.append(
            [
                f"{load['peers']} peers, {load['rounds']} rounds, {load['viewers']} viewers, {load['seconds']:.0f} s",
                f"median {load['median_ms']:.0f} ms, 95 % {load['p95_ms']:.0f} ms, worst {load['worst_ms']:.0f} ms; "
                f"{load['pages']} pages of {load['page_bytes'] / 1000:.0f} kB, {sum(load['wrong'].values())} wrong",
                BARS["load"],
            ]
        )
        sizes = " → ".join(f"{load[f'rss_{when}'] / MEBIBYTE:.0f}" for when in ("start", "middle", "end"))
        rows.append(
            [
                "the server meanwhile",
                f"{sizes} MiB, {load['processor_share']:.0%} of a core; ready after {load['ready_s']:.1f} s",
                BARS["memory"],
            ]
        )
    if beside := figures.get("beside"):
        rows.append(
            [
                f"beside `up` of {beside['nodes']} nodes",
                f"{beside['web_s']:.1f} s of {beside['nodes_s']:.1f} s: {beside['share']:.1%}",
                BARS["beside"],
            ]
        )
    print_table(["what", "measured", "bar"], rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path, help="where the histories are made (2.5 GB; removed afterwards)")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    size = QUICK if given.quick else Size()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    figures: dict[str, Any] = {
        "machine": {
            "name": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load_before": os.getloadavg()[0],
        }
    }
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="dashboard-") as folder:
        for part in given.parts or PARTS:
            progress(f"measuring {part} …")
            figures[part] = {"start": measure_start, "load": measure_load, "beside": measure_beside}[part](
                Path(folder), size
            )
    if given.json != "-":
        show(figures)
    write_json(given.json, figures)


if __name__ == "__main__":
    main()
