"""Rounds by the clock, where nobody conducts.

Every node knows from the manifest which round it is, and from the others' introductions who is here. So no peer is
needed for the swarm to go on; clocks may be apart by a fraction of a round.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Literal

from msgspec.structs import replace

from rl_swarm import admission, rounds
from rl_swarm.identity import Identity
from rl_swarm.manifest import Manifest
from rl_swarm.network.folder import FolderCoordinator, is_past
from rl_swarm.network.p2p.documents import PeerFiles
from rl_swarm.rounds import PeerInfo, State
from rl_swarm.wire import Rejected, unseal

log = logging.getLogger(__name__)

INTRODUCTION_BYTES = 8 << 10
MOST_MEMBERS = 1000  # that a node keeps in mind


class ClockCoordinator(FolderCoordinator):
    files: PeerFiles

    def __init__(
        self,
        files: PeerFiles,
        manifest: Manifest,
        identity: Identity,
        node: str,
        stop: threading.Event,
        poll: float = 2.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(files, manifest, identity, node, stop, poll)
        self.clock = clock
        self._members_at = -float("inf")

    def current(self) -> State:
        manifest, now = self.manifest, self.clock()
        number = max(0, int((now - manifest.created) // manifest.round_interval))
        phase: Literal["finished", "running"] = "finished" if number >= manifest.rounds else "running"
        if now - self._members_at >= self.poll:
            self._members_at = now
            self._read_roll()
            self._last = self._met(now)
        self._last = replace(
            self._last,
            phase=phase,
            round=min(number, manifest.rounds),
            started=manifest.created + number * manifest.round_interval,
            timestamp=now,
        )
        return self._last

    def wait_for(self, after: tuple[int, int]) -> State | None:
        while not self.stop.is_set():
            state = self.current()
            if is_past(state, after):
                return state
            next_round = state.started + self.manifest.round_interval
            self.stop.wait(max(0.01, next_round - self.clock()))
        return None

    def _met(self, now: float) -> State:
        """The members: who has introduced itself lately, and is admitted."""
        state = State(swarm=self.manifest.swarm())
        for peer in sorted(self._introductions(), key=lambda peer: (peer.joined, peer.peer_id)):
            if now - peer.timestamp > 2 * self.manifest.peer_timeout or len(state.members) >= MOST_MEMBERS:
                continue
            if any(member.node == peer.node for member in state.members.values()):
                continue  # a name that somebody had before
            invitation, why = admission.admit(
                self.manifest, self.roll, state.members, peer.peer_id, peer.invitation, now
            )
            if why is not None:
                if peer.peer_id == self.identity.peer_id:
                    self.turned_away = why
                continue
            state = rounds.seen(state, peer.peer_id, peer.node, min(now, peer.timestamp), invitation)
        self.files.authors = {member.node: peer_id for peer_id, member in state.members.items()}
        return state

    def _introductions(self) -> list[PeerInfo]:
        found = []
        for author, data in self.files.introductions():
            try:
                peer = unseal(data, PeerInfo, INTRODUCTION_BYTES)
            except Rejected as error:
                log.debug("an introduction of %s is not used: %s", author, error)
                continue
            if (peer.peer_id, peer.swarm) == (author, self.manifest.swarm()):
                found.append(peer)
        return found
