"""Simulates a swarm of any size in virtual time; files, coordinator, exchange and selection are the real ones.

A rollout is not relayed: a node that wants it asks its author, and every node asks a few. What was learned from it
spreads further. A rollout reaches a node when the node learns from it, or from a publication of a node that was reached
before.
"""

import hashlib
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.utils import timed_storage
from msgspec.structs import replace

from benchmarks.network.simulated_network import COSTS, Costs, Line, Network, SimulatedEngine
from benchmarks.network.stub_nodes import RequestCounts, StubNode, figures, introduction, manifest, quantiles, stub_node
from benchmarks.network.synthetic_rollouts import Arithmetic
from benchmarks.network.virtual_time import Stop, World
from rl_swarm.network.documents import MANIFEST
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.p2p import documents, members
from rl_swarm.network.p2p import records as notices
from rl_swarm.network.p2p.documents import PeerStore
from rl_swarm.network.p2p.joining import manifests
from rl_swarm.network.p2p.quota import DhtQuota
from rl_swarm.network.p2p.records import KEPT_SECONDS
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.wire import seal, unseal

START = 1_800_000_000.0  # a moment, as long as real ones when it is written
JOINING = 0.5  # of a round, in which all join before the first one
CHURN_ROUNDS, CHURN_SHARE = 10, 1 / 3  # rounds in which that share leaves, and new peers join


@dataclass(frozen=True)
class Scenario:
    peers: int
    rounds: int = 10
    interval: float = 60.0
    churn: bool = False
    seed: int = 1
    delays: tuple[float, float] = (0.01, 0.1)  # seconds from one peer to another, at least and at most
    rate: float = 1.25e6  # bytes a second
    costs: Costs = COSTS
    settle: int = 10  # rounds before those that are measured, in which all peers get to know enough others


@dataclass
class Peer:
    node: StubNode
    engine: SimulatedEngine
    store: PeerStore


@dataclass
class Swarm:
    scenario: Scenario
    folder: Path
    peers: list[Peer] = field(default_factory=list)  # all peers so far

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.world = World(START)
        self.network = Network(self.world, scenario.seed, scenario.costs, scenario.delays, scenario.rate)
        self.environment = Arithmetic()
        self.rng = random.Random(f"swarm {scenario.seed}")
        self.owner = identity(scenario.seed, 0)
        begins = START + JOINING * scenario.interval
        self.manifest: Manifest = manifest(self.owner, begins, scenario.rounds + scenario.settle, scenario.interval)
        self.signed = seal(self.manifest, self.owner)

    def run(self) -> None:
        scenario, begins = self.scenario, self.manifest.created
        for number in range(scenario.peers):
            delay = 0.0 if number == 0 else self.rng.uniform(0.1, JOINING * scenario.interval)
            self.world.spawn(lambda number=number: self.take_part(number), delay)
        if scenario.churn:
            each = scenario.interval * CHURN_ROUNDS / (scenario.peers * CHURN_SHARE)
            for number in range(round((scenario.rounds + scenario.settle) * scenario.interval / each)):
                self.world.spawn(self.change, begins - START + (number + self.rng.random()) * each)
        self.measured = begins + scenario.settle * scenario.interval
        self.before: dict[SimulatedEngine, tuple[Line, RequestCounts]] = {}
        self.world.spawn(self.remember, self.measured - START)
        self.world.run(begins + (scenario.settle + scenario.rounds) * scenario.interval)
        self.settle()

    def take_part(self, number: int) -> None:
        """Play one peer as `worker` does."""
        world, manifest, who = self.world, self.manifest, identity(self.scenario.seed, number)
        here = [peer.engine for peer in self.peers if peer.engine.online]
        rng = random.Random(f"{self.scenario.seed} {number}")
        engine = SimulatedEngine(self.network, who, DhtQuota(world.clock), rng)
        engine.start(self.rng.choice(here) if here else None)
        while number > 0 and not manifests(engine):  # type: ignore[arg-type]
            world.sleep(1.0)
        local = FolderStore.at(self.folder / str(number))
        store = PeerStore(engine, manifest.swarm(), manifest.peer_id, who, local, world.clock, rng)  # type: ignore[arg-type]
        store.serve()
        node = stub_node(
            store, manifest, who, self.environment, Stop(world), world.clock, world.clock, world.sleep, rng
        )
        self.peers.append(Peer(node, engine, store))
        if number == 0:
            store.write(MANIFEST, self.signed)
        else:
            store.serve_copy(MANIFEST, self.signed)
        node.coordinator.request_admission(None)  # type: ignore[attr-defined]
        info = introduction(node, world.now, "benchmark", 1)
        node.coordinator.register(info)

        def again(work: Callable[[], object], every: float) -> None:
            def once() -> None:
                world.spawn(once, every, lambda: engine.online)
                work()

            world.spawn(once, every, lambda: engine.online)

        again(lambda: node.coordinator.register(replace(info, timestamp=world.now)), manifest.peer_timeout / 4)
        again(store.renew, KEPT_SECONDS / 6)
        world.spawn(node.run, 0.0, lambda: engine.online)

    def change(self) -> None:
        """Let one peer leave without notice and another one come."""
        self.rng.choice([peer for peer in self.peers if peer.engine.online]).engine.leave()
        self.take_part(len(self.peers) + self.scenario.peers)

    def settle(self) -> None:
        for peer in self.peers:
            for other in peer.engine.connected:
                peer.engine.settle(other)

    def remember(self) -> None:
        self.settle()
        for peer in self.peers:
            self.before[peer.engine] = (peer.engine.line.copy(), peer.engine.asked.copy())


def identity(seed: int, number: int) -> Identity:
    """Return the same identity for the same label."""
    secret = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return Identity._from_key(Ed25519PrivateKey.from_private_bytes(secret))


def simulate(scenario: Scenario) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        swarm = Swarm(scenario, Path(folder))
        with one_world(swarm.world, scenario.seed):
            swarm.run()
    return summary(swarm)


@contextmanager
def one_world(world: World, seed: int) -> Iterator[None]:
    """Let records expire by the world's clock, and draw chance from its seed.

    Every receiver checks what it gets; here the first of them does it for all.
    """
    checked, chance = lru_cache(maxsize=1 << 15)(unseal), random.getstate()
    random.seed(seed)
    with (
        patch.object(timed_storage, "get_dht_time", world.clock),
        patch.object(documents, "unseal", checked),
        patch.object(notices, "unseal", checked),
        patch.object(members, "unseal", checked),
    ):
        yield
    random.setstate(chance)


def summary(swarm: Swarm) -> dict[str, Any]:
    scenario = swarm.scenario
    each = scenario.peers * scenario.rounds
    sent, received, messages, asked, loads = Counter[str](), Counter[str](), Counter[str](), RequestCounts(), []
    for peer in swarm.peers:
        line, (before, asked_before) = peer.engine.line, swarm.before.get(peer.engine, (Line(), RequestCounts()))
        sent += line.sent - before.sent
        received += line.received - before.received
        messages += line.messages - before.messages
        asked += peer.engine.asked - asked_before
        loads.append((line.sent - before.sent).total() / scenario.rounds)
    played = [done for peer in swarm.peers for done in peer.node.exchange.played if done.number >= scenario.settle]
    present = [peer for peer in swarm.peers if peer.engine.online]
    return {
        **figures(scenario.peers, scenario.rounds, scenario.interval, played, asked),
        "churn": scenario.churn,
        "members_known": mean(len(peer.node.coordinator._last.members) for peer in present),  # type: ignore[attr-defined]
        "connections": mean(len(peer.engine.connected) for peer in present),
        "bytes": sent.total() / each,
        "received": received.total() / each,
        "busiest": max(loads),
        "messages": messages.total() / each,
        "bytes_by_kind": {kind: size / each for kind, size in sorted(sent.items())},
        "messages_by_kind": {kind: count / each for kind, count in sorted(messages.items())},
        "rejected": dict(sum((peer.node.intake.problems for peer in swarm.peers), Counter())),
        "reach": reach(swarm),
    }


def reach(swarm: Swarm, most: int = 50) -> dict[str, Any]:
    """Tell how far the rollouts of the first measured round got."""
    took: list[tuple[float, str, str, float]] = []  # time, reader, author, time of publication
    published = {
        (peer.node.identity.peer_id, done.number): done.published
        for peer in swarm.peers
        for done in peer.node.exchange.played
    }
    read = Counter[tuple[str, int]]()
    for peer in swarm.peers:
        me = peer.node.identity.peer_id
        for done in peer.node.exchange.played:
            read.update({(of, number) for of, number, _ in done.read})
            at = done.published + done.collect_s
            took += [(at, me, of, published[of, number]) for of, number in set(done.took) if (of, number) in published]
    took.sort()
    half = swarm.scenario.peers / 2
    first = [place for place in published if place[1] == swarm.scenario.settle]
    random.Random(0).shuffle(first)
    seconds = []
    for author, number in first[:most]:
        since = published[author, number]
        reached = {author: since}
        for at, who, of, when in took:
            if at > since and who not in reached and of in reached and reached[of] <= when:
                reached[who] = at
                if len(reached) >= half:
                    seconds.append(at - since)
                    break
    readers = [read[place] / (swarm.scenario.peers - 1) for place in first]
    return {
        "read_by": mean(readers) if readers else 0.0,  # peers' rollouts
        "half_reached": len(seconds) / len(first[:most]) if first else 0.0,
        "half_s": quantiles(seconds) if seconds else None,
        "half_rounds": median(seconds) / swarm.scenario.interval if seconds else None,
    }
