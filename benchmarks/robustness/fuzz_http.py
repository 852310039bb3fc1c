"""Fuzzes the dashboard's real server: slow, broken, pipelined and oversized clients beside honest ones.

A case is a crowd: each client plays random steps on a real socket and then closes, resets, or stays. A case fails when

- an honest client gets no answer, or a response is a 5xx other than 503;
- a client that stays without finishing is not disconnected;
- connections or files of the server stay behind;
- the server writes a traceback.
"""

import asyncio
import json
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.lib.synthetic_run import History
from benchmarks.robustness.fuzz_messages import change_bytes
from benchmarks.robustness.fuzz_target import Case, Harm, Target, resident
from rl_swarm.web import server

FILES = 256
SECONDS = 1  # for each thing that a client has to do
PATIENCE = 60.0
SETUP = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}))
from rl_swarm.web import connections, server
connections.HEAD_SECONDS = connections.BODY_SECONDS = connections.WRITE_SECONDS = {SECONDS}.0
connections.IDLE_SECONDS = {SECONDS}
"""
MAIN = "\nserver._main(sys.argv[1], int(sys.argv[2]))\n"
HONEST, CROWD = "127.0.0.2", [f"127.0.0.{number}" for number in range(3, 7)]
STREAM = "/api/stream"
PATHS = (
    "/health", "/", "/api/overview", "/api/nodes", "/api/nodes?format=csv", "/api/curves", "/api/rollouts?limit=5",
    "/metrics",
    "/api/events", "/api/runs", "/api/runs/curves", "/static/vendor/uPlot.esm.js", "/api/openapi.json",
    "/api/nodes/nobody",
    "/api/nodes/%00/curves", "/api/curves?points=-1", "/api/events?offset=99999999999999999999",
    "/api/rollouts?round=x", STREAM,
    "/static/../../etc/passwd", "/static/%2e%2e/api.py", "/api/id-to-name", "/api/stop", "/runs/..%2f..", "//", "/é",
    "*",
)  # fmt: skip
HONEST_PATHS = ("/health", "/api/overview", "/api/nodes", "/api/curves", "/api/events", "/api/runs")
HEADERS = (
    b"Host: localhost", b"Host: evil.example", b"Host:", b"Connection: keep-alive", b"Connection: close",
    b"Expect: 100-continue",
    b"Transfer-Encoding: chunked", b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 99999999999",
    b"X: " + b"y" * 9000,
    b"Content-Length: 5\r\nContent-Length: 6", b"Upgrade: websocket\r\nConnection: "
                                               b"Upgrade", b"Range: bytes=0-1,5-", b"Cookie: \xff\0",
    b"If-None-Match: *", b"Accept-Encoding: gzip", b"Authorization: Bearer x", b"Content-Type: "
                                                                               b"application/json", b"Last-Event-ID: 1",
)  # fmt: skip
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")


def request(rng: random.Random) -> bytes:
    """Make a request, most of the time a slightly wrong one."""
    method = rng.choice((b"GET", b"GET", b"GET", b"HEAD", b"POST", b"PUT", b"OPTIONS", b"CONNECT", b"G\0T"))
    lines = [b"%s %s HTTP/1.1" % (method, rng.choice(PATHS).encode()), b"Host: localhost"]
    lines += rng.choices(HEADERS, k=rng.choice((0, 0, 1, 2, 5)))
    body = rng.choice((b"", b"", b"[]", b'["x"]', b"5\r\nhello\r\n0\r\n\r\n", b"ffffffffff\r\n", b"[" * 5000, b"hello"))
    made = b"\r\n".join(lines) + b"\r\n\r\n" + body
    return change_bytes(made, [made], rng) if rng.random() < 0.3 else made


class Client:
    """Plays one client of the crowd."""

    def __init__(self, address: tuple[str, int], rng: random.Random) -> None:
        self.address, self.rng = address, rng
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.heard, self.done = b"", list[str]()
        self.stays = rng.random() < 0.5
        self.listens = False  # to a stream of events, which lasts

    async def play(self) -> None:
        loop = asyncio.get_running_loop()
        steps: list[Callable[[], object]] = [
            *(self.ask, self.ask, self.ask_partly, self.ask_often, self.send_garbage, self.send_much, self.drip,
            self.wait),
            *(self.read, self.read_all, self.end_sending),
        ]  # fmt: skip
        try:
            if self.rng.random() < 0.3:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            self.socket.bind((self.rng.choice(CROWD), 0))
            await asyncio.wait_for(loop.sock_connect(self.socket, self.address), PATIENCE)
            for _ in range(self.rng.choice((0, 1, 1, 2, 5))):
                step = self.rng.choice(steps)
                self.done.append(step.__name__)  # type: ignore[attr-defined]
                await step()  # type: ignore[misc]
        except (OSError, asyncio.TimeoutError):
            self.done.append("was hung up on")
        if not self.stays:
            if self.rng.random() < 0.4:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                self.done.append("reset")
            self.socket.close()

    async def _send(self, data: bytes) -> None:
        self.listens = self.listens or STREAM[5:].encode() in data
        await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(self.socket, data), 2.0)

    async def ask(self) -> None:
        await self._send(request(self.rng))

    async def ask_partly(self) -> None:
        made = request(self.rng)
        await self._send(made[: self.rng.randrange(len(made) + 1)])

    async def ask_often(self) -> None:
        await self._send(request(self.rng) * self.rng.choice((2, 10, 100)))

    async def send_garbage(self) -> None:
        await self._send(self.rng.randbytes(self.rng.choice((1, 100, 70_000))))

    async def send_much(self) -> None:
        await self._send(b"GET /health HTTP/1.1\r\n" + b"X: " + b"x" * self.rng.choice((10_000, 100_000, 3_000_000)))

    async def drip(self) -> None:
        for byte in request(self.rng)[: self.rng.choice((3, 10, 30))]:
            await self._send(bytes([byte]))
            await asyncio.sleep(0.05)

    async def wait(self) -> None:
        await asyncio.sleep(self.rng.choice((0.0, 0.1, 0.5, SECONDS * 1.2)))

    async def read(self) -> None:
        reading = asyncio.get_running_loop().sock_recv(self.socket, self.rng.choice((1, 100, 65536)))
        try:
            self.heard += await asyncio.wait_for(reading, 0.5)
        except asyncio.TimeoutError:
            self.done.append("heard nothing")

    async def read_all(self) -> None:
        for _ in range(50):
            await self.read()
            if self.done[-1] == "heard nothing" or len(self.heard) > 1 << 20:
                break

    async def end_sending(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def drain(self) -> None:
        """Read the rest of the responses."""
        try:
            while len(self.heard) < 1 << 20 and (part := self.socket.recv(65536)):
                self.heard += part
        except OSError:
            return


class Http(Target):
    name = "http"
    longest = 240.0

    def open(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="rl-swarm-fuzz-"))
        History(self.place / "run", nodes=3, played=20)
        with server.bound("127.0.0.1", 29080) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # each connection has such short deadlines
            self.address = listening.getsockname()
            with (self.place / "log").open("wb") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", SETUP + MAIN, str(self.place / "run"), str(listening.fileno())],
                    pass_fds=[listening.fileno()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                )
        self.seen = psutil.Process(self.process.pid)
        asyncio.run(self._ask("/health"))
        self.files = self.seen.num_fds()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.place, ignore_errors=True)

    def resident(self) -> int:
        return resident(self.process.pid)

    def next(self) -> Case:
        return {"seed": self.rng.getrandbits(48), "clients": self.rng.choice((1, 5, 20, 60, 200))}

    def play(self, case: Case) -> set[str]:
        rng = random.Random(case["seed"])
        clients = [Client(self.address, random.Random(rng.getrandbits(48))) for _ in range(case["clients"])]
        try:
            asyncio.run(self._crowd(clients, rng))
            self._until(lambda: not self._held(clients), "clients that do not finish are not let go")
            for client in clients:
                client.drain()
        finally:
            for client in clients:
                client.socket.close()
        self._until(lambda: not self._connections(), "connections stay behind")
        self._until(lambda: self.seen.num_fds() <= self.files + 16, "the server's files stay open")
        reached = {f"client: {step}" for client in clients for step in client.done}
        for client in clients:
            statuses = [int(found) for found in STATUS.findall(client.heard)]
            if wrong := [status for status in statuses if status >= 500 and status != 503]:
                raise Harm(f"a response with the status {wrong[0]}")
            reached |= {f"response: {status}" for status in statuses}
        said = (self.place / "log").read_text(errors="replace")
        if "Traceback" in said:
            raise Harm(f"the server wrote {said[-2000:]}")
        return reached

    async def _crowd(self, clients: list[Client], rng: random.Random) -> None:
        """Let the clients play while an honest one asks."""
        crowd = asyncio.gather(*(client.play() for client in clients))
        while True:
            await self._ask(rng.choice(HONEST_PATHS))
            if crowd.done():
                break
            await asyncio.wait([crowd], timeout=0.1)
        await crowd
        await self._ask("/health")

    async def _ask(self, path: str) -> None:
        """Ask as an honest client does; raise unless it is answered."""
        try:
            heard = await asyncio.wait_for(self._answer(path), PATIENCE)
        except (OSError, asyncio.TimeoutError) as error:
            raise Harm(f"an honest client is not answered at {path}: {error!r}") from error
        head, _, body = heard.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200") or (path.startswith("/api") and not json.loads(body)):
            raise Harm(f"an honest client gets {head[:100]!r} at {path}")

    async def _answer(self, path: str) -> bytes:
        reader, writer = await asyncio.open_connection(*self.address, local_addr=(HONEST, 0))
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            return await reader.read()
        finally:
            writer.close()

    def _held(self, clients: list[Client]) -> bool:
        ports = {
            each.socket.getsockname()[1]
            for each in clients
            if each.stays and not each.listens and each.socket.fileno() >= 0
        }
        return bool(ports & self._connections())

    def _connections(self) -> set[int]:
        """Return the ports of the clients that the server is connected to."""
        if self.process.poll() is not None:
            raise Harm(f"the server has ended with {self.process.returncode}")
        return {each.raddr.port for each in self.seen.net_connections("tcp") if each.raddr}

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not is_so():
            if time.monotonic() > deadline:
                raise Harm(what)
            time.sleep(0.1)
