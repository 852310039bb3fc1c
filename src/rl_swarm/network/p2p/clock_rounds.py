"""Computes rounds from the clock, where there is no coordinator.

Every node knows the round from the manifest, and the members from their introductions. So the swarm depends on no peer;
clocks may differ by a fraction of a round. In such a swarm the node name of a peer is its id.
"""

import random
import threading
import time
from collections.abc import Callable
from typing import Literal

from msgspec.structs import replace

from rl_swarm.network.coordinator import DocumentCoordinator, is_past
from rl_swarm.network.documents import PEERS, RECORD_BYTES
from rl_swarm.network.p2p.documents import PeerStore
from rl_swarm.network.p2p.members import Members
from rl_swarm.network.retries import retry
from rl_swarm.protocol import admission, rounds
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.rounds import PeerInfo, State
from rl_swarm.protocol.wire import seal

FEW = 8  # other members, until which a node looks for more as often as it polls


class ClockCoordinator(DocumentCoordinator):
    store: PeerStore

    def __init__(
        self,
        store: PeerStore,
        manifest: Manifest,
        identity: Identity,
        stop: threading.Event,
        poll: float = 2.0,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        find_all: bool = False,  # looks for all members and not only some: for observers
    ) -> None:
        super().__init__(store, manifest, identity, identity.peer_id, stop, poll, clock)
        admits = None if manifest.admission == "open" else self._admits
        self.members = store.members = Members(store, manifest, rng, admits)
        self._look = self.members.walk if find_all else self.members.look
        self._looked_at = -float("inf")
        self._looked_in = -1  # stage, counted from the first of the first round

    def current(self) -> State:
        manifest, now = self.manifest, self.clock()
        number = max(0, int((now - manifest.created) // manifest.round_interval))  # of the stage, from the first
        played, stage = divmod(number, manifest.stages)
        phase: Literal["finished", "running"] = "finished" if played >= manifest.rounds else "running"
        if number != self._looked_in or (self.members.count_others() < FEW and now - self._looked_at >= self.poll):
            self._looked_in, self._looked_at = number, now
            self._read_access_list()
            self._look()
            self._last = self._state_of_members(now)
        self._last = replace(
            self._last,
            phase=phase,
            round=min(played, manifest.rounds),
            stage=stage if phase == "running" else 0,
            started=manifest.created + number * manifest.round_interval,
            timestamp=now,
        )
        return self._last

    def wait_for(self, after: tuple[int, int]) -> State | None:
        while not self.stop.is_set():
            state = self.current()
            if is_past(state, after):
                return state
            next_stage = state.started + self.manifest.round_interval
            self.stop.wait(max(0.01, next_stage - self.clock()))
        return None

    def register(self, peer: PeerInfo) -> None:
        if self.identity.peer_id not in self.members.known:
            self._looked_in = -1  # so that this node is in the next state
        data = seal(peer, self.identity, limit=RECORD_BYTES)
        self.members.join(peer, data)
        retry(lambda: self.store.write(PEERS.of(self.node), data), self.stop)

    def _admits(self, peer: PeerInfo) -> bool:
        ticket = peer.ticket
        return admission.admit(self.manifest, self.access_list, {}, peer.peer_id, ticket, self.clock())[1] is None

    def _state_of_members(self, now: float) -> State:
        """Return a state with the admitted peers that were seen lately."""
        state = State(swarm=self.manifest.swarm())
        known = sorted(self.members.known.values(), key=lambda known: (known.info.joined, known.info.peer_id))
        for each in known:
            peer = each.info
            invitation, why = admission.admit(
                self.manifest, self.access_list, state.members, peer.peer_id, peer.ticket, now
            )
            if why is not None:
                if peer.peer_id == self.identity.peer_id:
                    self.turned_away = why
                continue
            state = rounds.record_presence(state, peer.peer_id, peer.peer_id, min(now, each.seen), invitation)
        return state
