"""Plays viewers of the dashboard: each listens to `/api/stream` and fetches the overview after every change.

    python -m benchmarks.dashboard.viewers PORT HISTORY.json [--viewers 200] [--seconds 180]

They ask as the page's JavaScript does: four requests at once, each over its own connection, and again only after the
answers. Every answer is checked against the history; a body that was correct before is not parsed again. All viewers
are one process with plain sockets, which costs little beside the server that is measured.
"""

import argparse
import asyncio
import hashlib
import json
import statistics
import sys
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.lib.synthetic_run import SCORED_EVERY, reward

PAGE = {
    "overview": "/api/overview",
    "reward": "/api/curves?metric=reward_local",
    "held out": "/api/curves?metric=held_out",
    "leaderboard": "/api/nodes?offset=0&limit=50",
}
ARRIVING_SECONDS = 2.0  # seconds over which all of them connect
SECONDS = 30.0  # for an answer


class Wrong(Exception):
    """An answer contradicts the history."""


@dataclass
class Known:
    """Holds what an answer must say: the nodes by their names, and the rounds that all of them had played."""

    nodes: list[str]
    played: int
    right: set[bytes] = field(default_factory=set)  # digests of answers that passed the check

    @classmethod
    def of(cls, path: Path) -> "Known":
        return cls(**json.loads(path.read_text()))

    def check(self, what: str, body: bytes) -> None:
        digest = hashlib.sha256(what.encode() + body).digest()
        if digest in self.right:
            return
        told = json.loads(zlib.decompress(body, wbits=31) if body.startswith(b"\x1f\x8b") else body)
        if what == "overview":
            self._same((told["nodes"], told["alive"]), (len(self.nodes), len(self.nodes)))
            if not self.played <= told["round"]:
                raise Wrong(f"round {told['round']}")
        elif what == "leaderboard":
            self._same(told["total"], len(self.nodes))
            self._same([row["rank"] for row in told["nodes"]], list(range(1, min(50, len(self.nodes)) + 1)))
            self._same(told["nodes"][0]["node"], self.nodes[0])
        else:
            self._curves(told, what)
        self.right.add(digest)

    def _curves(self, told: dict[str, Any], what: str) -> None:
        rounds = told["rounds"]
        self._same(len(told["lines"]), min(50, len(self.nodes)))
        step = rounds[1] - rounds[0] if len(rounds) > 1 else 1
        places = {name: k for k, name in enumerate(self.nodes)}
        for k, start in enumerate(rounds):
            if start + step > self.played:
                continue  # an unfinished round
            every = SCORED_EVERY if what == "held out" else 1
            self._near(told["mean"][k], mean_reward(range(len(self.nodes)), start, step, every))
            for line in told["lines"]:
                node = places[line["node"]]
                self._near(line["values"][k], mean_reward(range(node, node + 1), start, step, every))

    def _near(self, told: float | None, expected: float | None) -> None:
        if (told is None) != (expected is None) or abs((told or 0.0) - (expected or 0.0)) > 1e-4:
            raise Wrong(f"{told} instead of {expected}")

    def _same(self, told: object, expected: object) -> None:
        if told != expected:
            raise Wrong(f"{str(told)[:100]} instead of {str(expected)[:100]}")


@cache
def mean_reward(nodes: range, start: int, step: int, every: int) -> float | None:
    """Return the mean reward of some nodes in the rounds behind one point, as far as they were measured."""
    rounds = [played for played in range(start, start + step) if played % every == 0]
    return statistics.fmean(reward(node, played) for node in nodes for played in rounds) if rounds else None


class Connection:
    """Keeps a connection open, for one request at a time."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.reader: asyncio.StreamReader | None = None

    async def open(self, path: str) -> dict[str, str]:
        """Send a request and read up to the body. The server closes connections that idle for long."""
        used = self.reader is not None
        try:
            return await self._ask(path)
        except (ConnectionError, asyncio.IncompleteReadError):
            if not used:
                raise
            self.close()
            return await self._ask(path)

    async def _ask(self, path: str) -> dict[str, str]:
        if self.reader is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        self.writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\n\r\n".encode())
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        if " 200 " not in head[0]:
            raise Wrong(head[0])
        return {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}

    async def get(self, path: str) -> bytes:
        """Return the body as it came."""
        headers = await self.open(path)
        assert self.reader is not None
        return await self.reader.readexactly(int(headers["content-length"]))

    def close(self) -> None:
        if self.reader is not None:
            self.writer.close()
            self.reader = None


@dataclass
class Seen:
    pages: list[float] = field(default_factory=list)  # seconds
    received: Counter[str] = field(default_factory=Counter)  # bytes
    told: int = 0  # change events, of all viewers together
    wrong: Counter[str] = field(default_factory=Counter)


class Viewer:
    def __init__(self, port: int, known: Known, seen: Seen) -> None:
        self.stream = Connection(port)
        self.asking = {what: Connection(port) for what in PAGE}
        self.known, self.seen = known, seen

    async def look(self) -> None:
        await self.stream.open("/api/stream")
        assert self.stream.reader is not None
        heard = asyncio.Event()
        refreshing = asyncio.create_task(self._refresh_when(heard))
        try:
            while line := await self.stream.reader.readline():
                if line.startswith(b"event: changed"):
                    self.seen.told += 1
                    heard.set()
        finally:
            refreshing.cancel()
            for connection in (self.stream, *self.asking.values()):
                connection.close()

    async def _refresh_when(self, heard: asyncio.Event) -> None:
        while True:
            await heard.wait()
            heard.clear()
            started = time.perf_counter()
            answers = await asyncio.gather(*map(self._ask, PAGE))
            self.seen.pages.append(time.perf_counter() - started)
            for what, body in zip(PAGE, answers, strict=True):
                if body is not None:
                    self._check(what, body)

    async def _ask(self, what: str) -> bytes | None:
        try:
            body = await asyncio.wait_for(self.asking[what].get(PAGE[what]), SECONDS)
        except (OSError, EOFError, asyncio.TimeoutError, Wrong) as error:
            self.seen.wrong[f"{what}: {error or type(error).__name__}"] += 1
            return None
        self.seen.received[what] += len(body)
        return body

    def _check(self, what: str, body: bytes) -> None:
        try:
            self.known.check(what, body)
        except (Wrong, KeyError, ValueError, TypeError, IndexError) as error:
            self.seen.wrong[f"{what}: {error}"] += 1


async def watch(port: int, known: Known, viewers: int, seconds: float) -> dict[str, Any]:
    first = Viewer(port, known, seen := Seen())
    for what, path in PAGE.items():  # the first check of a curve takes seconds, so it comes before the viewers
        known.check(what, await first.asking[what].get(path))
    people = []
    for _ in range(viewers):
        people.append(asyncio.create_task(Viewer(port, known, seen).look()))
        await asyncio.sleep(ARRIVING_SECONDS / viewers)
    arrived = len(seen.pages)
    await asyncio.sleep(seconds)
    lost = sum(task.done() for task in people)
    for task in people:
        task.cancel()
    await asyncio.gather(*people, return_exceptions=True)
    pages = sorted(seen.pages[arrived:])
    return {
        "viewers": viewers,
        "viewers_lost": lost,
        "seconds": seconds,
        "told": seen.told,
        "pages": len(pages),
        "median_ms": 1000 * statistics.median(pages),
        "p95_ms": 1000 * pages[int(0.95 * len(pages))],
        "worst_ms": 1000 * pages[-1],
        "page_bytes": sum(seen.received.values()) / max(1, len(seen.pages)),
        "wrong": dict(seen.wrong),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("history", type=Path)
    parser.add_argument("--viewers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=180.0)
    given = parser.parse_args()
    result = asyncio.run(watch(given.port, Known.of(given.history), given.viewers, given.seconds))
    json.dump(result, sys.stdout)
