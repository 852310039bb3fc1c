"""Plays nodes without a model in a peer-to-peer swarm: the real `Node`, with a policy that sleeps and makes up text.

They play among real peers and in a simulation, in the same code.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.network.synthetic_rollouts import COMPLETIONS, QUESTIONS, Arithmetic, TimedArithmetic
from rl_swarm.config.settings import Settings
from rl_swarm.environments.base import Role
from rl_swarm.learning.checkpoints import Checkpoints
from rl_swarm.learning.trainer import Update
from rl_swarm.network.exchange import DocumentExchange
from rl_swarm.network.p2p.clock_rounds import ClockCoordinator
from rl_swarm.network.p2p.documents import PeerStore
from rl_swarm.node.intake import Accepted, Intake
from rl_swarm.node.node import Node
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.rollouts import Completion, Group, Publication
from rl_swarm.protocol.rounds import PeerInfo, State
from rl_swarm.protocol.tasks import Task

EXTERNAL = 8  # J, as many as its own groups
CPU = torch.device("cpu")
WORK = (0.25, 0.6)  # of a round that generating takes, at least and at most


def settings(interval: float) -> Settings:
    return Settings.of(
        local_groups=QUESTIONS,
        external_groups=EXTERNAL,
        generations=COMPLETIONS,
        check_likelihood=False,  # there is no model
        round_end="interval",
        round_interval=interval,
        peer_timeout=2 * interval,
    )


def manifest(owner: Identity, created: float, rounds: int, interval: float) -> Manifest:
    return Manifest(
        peer_id=owner.peer_id,
        name="benchmark",
        created=created,
        seed=1,
        environment="arithmetic",
        tasks=[Task("arithmetic")],
        partial_rewards=False,
        versions={},
        rounds=rounds,
        stages=1,
        round_end="interval",
        round_interval=interval,
        peer_timeout=2 * interval,
    )


@dataclass
class RequestCounts:
    """Counts the calls of our own code at the network, and the bytes of their payload."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def note(self, kind: str, size: int) -> None:
        self.calls[kind] += 1
        self.bytes[kind] += size

    def copy(self) -> "RequestCounts":
        return RequestCounts(self.calls.copy(), self.bytes.copy())

    def __add__(self, other: "RequestCounts") -> "RequestCounts":
        return RequestCounts(self.calls + other.calls, self.bytes + other.bytes)

    def __sub__(self, before: "RequestCounts") -> "RequestCounts":
        return RequestCounts(self.calls - before.calls, self.bytes - before.bytes)


@dataclass
class Policy:
    """Writes text from a seed, in about the time that a model takes."""

    environment: Arithmetic
    interval: float
    sleep: Callable[[float], object]
    name: str = "none"
    tokenizer_hash: str = ""
    version: int = 0
    device: torch.device = CPU

    def sample(
        self, prompts: Sequence[str], generations: int, seed: int, greedy: bool = False
    ) -> list[list[Completion]]:
        rng = random.Random(seed)
        self.sleep(rng.uniform(*WORK) * self.interval)
        return self.environment.generate(len(prompts), rng)

    def learn(self, groups: Sequence[Group]) -> Update:
        self.version += 1
        return Update()


class Journal:
    """Discards all metrics and events."""

    def metrics(self, kind: str, **values: object) -> None: ...

    def event(self, event: str, **values: object) -> None: ...


@dataclass
class Round:
    """Records what one node did in a round."""

    number: int
    published: float  # when
    publish_s: float
    collect_s: float
    took: list[tuple[str, int]]  # peer and round of the groups that it took
    read: list[tuple[str, int, float]]  # publications that were read: author, round, time


class TimedExchange(DocumentExchange):
    """Times the publication of each round."""

    def __init__(self, *parts: Any, clock: Callable[[], float], monotonic: Callable[[], float]) -> None:
        super().__init__(*parts, clock=monotonic)
        self.now = clock
        self.played: list[Round] = []

    def publish(self, publication: Publication) -> None:
        started = self.now()
        super().publish(publication)
        ended = self.now()
        self.played.append(Round(publication.round, ended, ended - started, 0.0, [], []))


class TimedIntake(Intake):
    """Times the intake of each round, without the scoring, and counts rejections by reason."""

    exchange: TimedExchange
    environment: TimedArithmetic

    def __post_init__(self) -> None:
        super().__post_init__()
        self.problems: Counter[RejectReason] = Counter()

    def collect(self, state: State, own: Sequence[Group] = ()) -> Accepted:
        started, checking = self.exchange.now(), self.environment.seconds
        accepted = super().collect(state, own)
        this = self.exchange.played[-1]
        this.collect_s = self.exchange.now() - started - (self.environment.seconds - checking)
        this.took = [(peer_id, number) for peer_id, number, _, _ in accepted.ids]
        return accepted

    def fetch(self, state: State, rng: random.Random, sources: Mapping[str, str]) -> Iterator[Publication]:
        for publication in super().fetch(state, rng, sources):
            read = (publication.peer_id, publication.round, self.exchange.now())
            self.exchange.played[-1].read.append(read)
            yield publication

    def reject(self, node: str, reason: RejectReason, detail: str) -> None:
        self.problems[reason] += 1


class StubNode(Node):
    """Keeps an account of its rounds."""

    exchange: TimedExchange
    intake: TimedIntake
    intake_type = TimedIntake

    def run(self) -> None:
        while (state := self.coordinator.wait_for(self.done)) is not None and state.phase == "running":
            self.play(state)


def stub_node(
    store: PeerStore,
    manifest: Manifest,
    identity: Identity,
    environment: Arithmetic,
    stop: threading.Event,
    clock: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
    rng: random.Random | None = None,
) -> StubNode:
    """Assemble a node as `worker` does."""
    chosen, name = settings(manifest.round_interval), identity.peer_id
    coordinator = ClockCoordinator(store, manifest, identity, stop, chosen.network.poll_interval, clock, rng)
    node = StubNode(
        name=name,
        identity=identity,
        settings=chosen,
        manifest=manifest,
        environment=(timed := TimedArithmetic(environment, monotonic)),
        role=Role(timed),
        policy=Policy(environment, manifest.round_interval, sleep),  # type: ignore[arg-type]
        exchange=TimedExchange(
            store,
            manifest,
            identity,
            name,
            stop,
            lambda *why: node.intake.reject(*why),
            chosen.network.poll_interval,
            chosen.sharing.fetch_max_peers,
            coordinator.refusal,
            clock=clock,
            monotonic=monotonic,
        ),
        coordinator=coordinator,
        journal=Journal(),  # type: ignore[arg-type]
        checkpoints=Checkpoints(Path(), identity, name),
        stop=stop,
        clock=clock,
    )
    return node


def introduction(node: StubNode, joined: float, host: str, pid: int) -> PeerInfo:
    return PeerInfo(
        peer_id=node.identity.peer_id,
        swarm=node.manifest.swarm(),
        node=node.name,
        model="none",
        device="cpu",
        host=host,
        pid=pid,
        joined=joined,
        timestamp=joined,
    )


def quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values) or [float("nan")]
    return {"median": ordered[len(ordered) // 2], "p95": ordered[int(0.95 * (len(ordered) - 1))]}


def figures(peers: int, rounds: int, interval: float, played: Sequence[Round], asked: RequestCounts) -> dict[str, Any]:
    """Return the figures per node and round that real and simulated swarms share."""
    each = peers * rounds
    return {
        "peers": peers,
        "rounds": rounds,
        "interval_s": interval,
        "played": len(played) / each,  # of the rounds that all of them could have played
        "publish_s": quantiles([done.publish_s for done in played]),
        "collect_s": quantiles([done.collect_s for done in played]),
        "groups_taken": sum(len(done.took) for done in played) / each,
        "publications_read": sum(len(done.read) for done in played) / each,
        "asked": {kind: [n / each, asked.bytes[kind] / each] for kind, n in sorted(asked.calls.items())},
    }
