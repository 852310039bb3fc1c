"""Starts real peers on one machine, each with its own libp2p daemon on the loopback interface.

In a network namespace of its own the interface carries nothing else, so its counters say what the swarm sent, TCP and
IP headers included. Several peers share a process; each has its daemon, its event loop and its thread.
"""

import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.network.stub_nodes import (
    RequestCounts,
    Round,
    StubNode,
    figures,
    introduction,
    manifest,
    settings,
    stub_node,
)
from benchmarks.network.synthetic_rollouts import Arithmetic
from rl_swarm.network.p2p import joining
from rl_swarm.network.p2p.engine import PeerEngine
from rl_swarm.network.p2p.quota import DhtQuota
from rl_swarm.network.p2p.table import REPLICAS
from rl_swarm.network.presence import Watch
from rl_swarm.node.heartbeats import heartbeats
from rl_swarm.node.node import Stopped
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.wire import seal

LISTEN = ("/ip4/127.0.0.1/tcp/0",)
INSIDE = "RL_SWARM_BENCHMARK_NAMESPACE"  # set inside the network namespace
SETTLE = 6  # rounds until all peers know enough others
READY_SECONDS = 20.0  # limit for a peer to start, before the next one starts
END_SECONDS = 30.0  # limit for a process to end
ENDLESS = 1_000_000  # rounds


def in_a_namespace() -> bool:
    """Restart this program in a network namespace where it is root; return True inside one."""
    if os.environ.get(INSIDE):
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return True
    allowed = os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip")
    if allowed and subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0:
        os.environ[INSIDE] = "1"
        sys.stdout.flush()
        os.execvp("unshare", ["unshare", "-n", "--", sys.executable, *sys.orig_argv[1:]])
    return False


@dataclass(frozen=True)
class Traffic:
    """Reads what the loopback interface has carried so far."""

    bytes: int
    packets: int

    @staticmethod
    def now() -> "Traffic":
        for line in Path("/proc/net/dev").read_text().splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == "lo":
                received = counts.split()
                return Traffic(int(received[0]), int(received[1]))
        raise OSError("there is no loopback interface")

    def since(self, before: "Traffic") -> "Traffic":
        return Traffic(self.bytes - before.bytes, self.packets - before.packets)


class CountedEngine(PeerEngine):
    """Counts the requests to the engine, and the calls that hivemind's DHT makes for them."""

    def __init__(self, identity: Identity, known: list[str]) -> None:
        super().__init__(identity, known, LISTEN, quota=DhtQuota(), relay=False, map_ports=False)
        self.asked, self.calls = RequestCounts(), RequestCounts()

    async def _start(self) -> None:
        await super()._start()
        call = self.p2p.call_protobuf_handler

        async def counted(peer_id: Any, name: str, request: Any, kind: Any) -> Any:
            response = await call(peer_id, name, request, kind)
            self.calls.note(name.rpartition("_")[2], request.ByteSize() + response.ByteSize())
            return response

        self.p2p.call_protobuf_handler = counted

    def store(self, key: str, subkey: str, value: bytes, seconds: float, copies: int = REPLICAS) -> bool:
        self.asked.note("store", len(value))
        return super().store(key, subkey, value, seconds, copies)

    def find(self, key: str, quick: bool = False) -> dict[str, bytes]:
        found = super().find(key, quick)
        self.asked.note("find", sum(map(len, found.values())))
        return found

    def ask(self, peer_id: str, request: bytes, limit: int, seconds: float = 10.0) -> bytes | None:
        answer = super().ask(peer_id, request, limit, seconds)
        self.asked.note("ask" if answer else "ask in vain", len(request) + len(answer or b""))
        return answer


@dataclass
class PeerRecord:
    """Records what a peer did from the first measured round on."""

    rounds: list[Round]
    asked: RequestCounts
    calls: RequestCounts
    problems: Counter[str]
    members: int


@dataclass
class Peer:
    """Plays one peer of a process."""

    identity: Identity
    known: list[str]
    folder: Path
    environment: Arithmetic
    founded: tuple[Manifest, bytes] | None = None  # by the first
    stop: threading.Event = field(default_factory=threading.Event)
    ready: threading.Event = field(default_factory=threading.Event)
    node: StubNode | None = None
    engine: CountedEngine | None = None

    def run(self) -> None:
        with ExitStack() as stack:
            self.engine = engine = CountedEngine(self.identity, self.known)
            engine.start()
            stack.callback(engine.close)
            engine.meet(joining.MEET_SECONDS if self.known else 0.0)
            found = self.founded or joining.await_manifest(engine, settings(1.0).network, self.stop)
            if found is None:
                return
            manifest, signed = found
            files = stack.enter_context(joining.among_peers(engine, self.identity, manifest, signed, self.folder))
            self.node = node = stub_node(files, manifest, self.identity, self.environment, self.stop)
            node.coordinator.request_admission(None)  # type: ignore[attr-defined]
            watch = Watch(files, node.name, self.identity, manifest.swarm())
            peer = introduction(node, time.time(), platform.node(), os.getpid())
            node.coordinator.register(peer)
            self.ready.set()
            alive = heartbeats(node.coordinator, peer, manifest.peer_timeout / 4, self.stop, watch)  # type: ignore[arg-type]
            with alive, suppress(Stopped):
                node.run()

    def account(self, rounds: range, before: tuple[RequestCounts, RequestCounts]) -> PeerRecord | None:
        if self.node is None or self.engine is None:
            return None
        return PeerRecord(
            [done for done in self.node.exchange.played if done.number in rounds],
            self.engine.asked - before[0],
            self.engine.calls - before[1],
            self.node.intake.problems,
            len(self.node.coordinator.current().members),
        )


def host(link: Connection, count: int, known: list[str], founded: tuple[float, int, float]) -> None:
    """Run a process with some peers. It sends the address of its first one, and at the end what they did."""
    os.setpgrp()  # so that its children end with it
    environment, first = Arithmetic(), not known
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        peers = [Peer(Identity.generate(), known, Path(folder) / str(k), environment) for k in range(count)]
        if first:
            owner = peers[0].identity
            made = manifest(owner, *founded)
            peers[0].founded = (made, seal(made, owner))
        for peer in peers:
            peer.folder.mkdir()
        threads = [threading.Thread(target=peer.run, daemon=True) for peer in peers]
        for peer, thread in zip(peers, threads, strict=True):
            thread.start()
            peer.ready.wait(READY_SECONDS)
            if peer.founded:
                assert peer.engine is not None
                known += peer.engine.addresses
                link.send(known)
        link.send("ready")
        starts, ends, rounds = link.recv()
        time.sleep(max(0.0, starts - time.time()))
        before = [
            (peer.engine.asked.copy(), peer.engine.calls.copy()) if peer.engine else (RequestCounts(), RequestCounts())
            for peer in peers
        ]
        time.sleep(max(0.0, ends - time.time()))
        link.send([peer.account(rounds, old) for peer, old in zip(peers, before, strict=True)])
        link.recv()
        for peer in peers:
            peer.stop.set()
        for thread in threads:
            thread.join(20)


@contextmanager
def hosts(target: Callable[..., None], count: int, processes: int, *rest: Any) -> Iterator[list[Connection]]:
    """Start processes with so many peers together, all of which have joined.

    The first process gives the others its address. At the end every process that they started is gone.
    """
    context = multiprocessing.get_context("spawn")
    sizes = [count // processes + (k < count % processes) for k in range(min(processes, count))]
    links, known, children = list[Connection](), list[str](), []
    try:
        for size in sizes:
            ours, theirs = context.Pipe()
            child = context.Process(target=target, args=(theirs, size, list(known), *rest))
            child.start()
            theirs.close()
            children.append(child)
            links.append(ours)
            known = known or ours.recv()
        for link in links:
            link.recv()
        yield links
        for link in links:
            link.send("end")
        for child in children:
            child.join(END_SECONDS)
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.killpg(child.pid or 0, signal.SIGKILL)


def measure(count: int, processes: int, rounds: int, interval: float) -> dict[str, Any]:
    """Play so many peers for so many rounds, after some in which they get to know each other."""
    created = time.time()
    with hosts(host, count, processes, (created, ENDLESS, interval)) as links:
        first = int((time.time() - created) // interval) + 1 + SETTLE
        starts = created + first * interval
        ends = starts + rounds * interval
        for link in links:
            link.send((starts, ends, range(first, first + rounds)))
        time.sleep(max(0.0, starts - time.time()))
        before = Traffic.now()
        time.sleep(max(0.0, ends - time.time()))
        sent = Traffic.now().since(before)
        accounts = [account for link in links for account in link.recv() if account is not None]
    return summary(count, rounds, interval, accounts, sent if os.environ.get(INSIDE) else None)


def summary(
    count: int, rounds: int, interval: float, accounts: list[PeerRecord], sent: Traffic | None
) -> dict[str, Any]:
    each = count * rounds
    asked = sum((account.asked for account in accounts), RequestCounts())
    calls = sum((account.calls for account in accounts), RequestCounts())
    return {
        **figures(count, rounds, interval, [done for a in accounts for done in a.rounds], asked),
        "members_known": sum(account.members for account in accounts) / len(accounts),
        "bytes": sent.bytes / each if sent else None,
        "packets": sent.packets / each if sent else None,
        "messages": 2 * (calls.calls.total() + asked.calls["ask"] + asked.calls["ask in vain"]) / each,
        "calls": {kind: [n / each, calls.bytes[kind] / each] for kind, n in sorted(calls.calls.items())},
        "rejected": dict(sum((account.problems for account in accounts), Counter())),
    }
