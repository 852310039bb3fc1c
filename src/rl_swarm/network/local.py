"""Moves rollouts and advances rounds in memory, inside one process."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from rl_swarm.protocol import rounds
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.rollouts import Publication
from rl_swarm.protocol.rounds import PeerInfo, Report, Rules, State

KEPT_ROUNDS = 100  # of rollouts: as far back as `max_rollout_age` lets a node ask


class LocalSwarm:
    """Holds the state and rollouts of all nodes. Rounds advance with every call of a node."""

    def __init__(self, manifest: Manifest, min_peers: int = 1, clock: Callable[[], float] = time.time) -> None:
        self.manifest, self.rules, self.clock = manifest, Rules.of(manifest, min_peers), clock
        self.state = State(swarm=manifest.swarm())
        self.published: dict[tuple[int, int, str], Publication] = {}
        self.changed = threading.Condition()

    def apply(self, event: Callable[[State, float], State]) -> State:
        with self.changed:
            now = self.clock()
            self.state, _ = rounds.advance(event(self.state, now), self.rules, now)
            self.changed.notify_all()
            return self.state


class LocalExchange:
    def __init__(self, swarm: LocalSwarm, stop: threading.Event, max_peers: int = 10, poll: float = 0.05) -> None:
        self.swarm, self.stop, self.max_peers, self.poll = swarm, stop, max_peers, poll

    def publish(self, publication: Publication) -> None:
        with self.swarm.changed:
            published = self.swarm.published
            published[publication.round, publication.stage, publication.node] = publication
            for key in [key for key in published if key[0] < publication.round - KEPT_ROUNDS]:
                del published[key]
            self.swarm.changed.notify_all()

    def collect(
        self, round: int, stage: int, nodes: Sequence[str], patience: float = 0.0, in_order: bool = False
    ) -> Iterator[Publication]:
        waiting = list(dict.fromkeys(nodes))[: self.max_peers]
        deadline = time.monotonic() + patience
        while waiting:
            last_look = time.monotonic() >= deadline
            for node in list(waiting):
                publication = self.swarm.published.get((round, stage, node))
                if publication is not None:
                    waiting.remove(node)
                    yield publication
                elif in_order and not last_look:
                    break
            if not waiting or last_look or self.stop.is_set():
                return
            with self.swarm.changed:
                self.swarm.changed.wait(min(self.poll, max(0.0, deadline - time.monotonic())))

    def subnets(self) -> Mapping[str, str]:
        return {}


class LocalCoordinator:
    def __init__(self, swarm: LocalSwarm, stop: threading.Event, poll: float = 0.05) -> None:
        self.swarm, self.stop, self.poll = swarm, stop, poll

    def register(self, peer: PeerInfo) -> None:
        self.swarm.apply(lambda state, now: rounds.record_presence(state, peer.peer_id, peer.node, now))

    def submit(self, report: Report) -> None:
        self.swarm.apply(lambda state, now: rounds.record_report(state, report, now))

    def current(self) -> State:
        return self.swarm.apply(lambda state, now: state)

    def wait_for(self, after: tuple[int, int]) -> State | None:
        while not self.stop.is_set():
            state = self.current()
            if state.phase == "finished" or (state.phase == "running" and (state.round, state.stage) > after):
                return state
            with self.swarm.changed:
                self.swarm.changed.wait(self.poll)
        return None
