"""Computes rounds from the clock, where there is no coordinator.

Every node knows from the manifest which round it is, and from the others' introductions who is here. So no peer is
needed for the swarm to go on; clocks may be apart by a fraction of a round. In such a swarm a peer goes by its id.
"""

import random
import threading
import time
from collections.abc import Callable
from typing import Literal

from msgspec.structs import replace

from rl_swarm.network.folder import RECORD_BYTES, FolderCoordinator, is_past, patiently
from rl_swarm.network.p2p.documents import PeerFiles
from rl_swarm.network.p2p.members import Members
from rl_swarm.protocol import admission, rounds
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.rounds import PeerInfo, State
from rl_swarm.protocol.wire import seal

FEW = 8  # others, until which a node looks for more as often as it polls


class ClockCoordinator(FolderCoordinator):
    files: PeerFiles

    def __init__(
        self,
        files: PeerFiles,
        manifest: Manifest,
        identity: Identity,
        stop: threading.Event,
        poll: float = 2.0,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        whole: bool = False,  # everybody is looked for, and not only some: for those who watch
    ) -> None:
        super().__init__(files, manifest, identity, identity.peer_id, stop, poll, clock)
        admits = None if manifest.admission == "open" else self._admits
        self.members = files.members = Members(files, manifest, rng, admits)
        self._look = self.members.walk if whole else self.members.look
        self._looked_at = -float("inf")
        self._looked_in = -1  # stage, counted from the first of the first round

    def current(self) -> State:
        manifest, now = self.manifest, self.clock()
        number = max(0, int((now - manifest.created) // manifest.round_interval))  # of the stage, from the first
        played, stage = divmod(number, manifest.stages)
        phase: Literal["finished", "running"] = "finished" if played >= manifest.rounds else "running"
        if number != self._looked_in or (self.members.others() < FEW and now - self._looked_at >= self.poll):
            self._looked_in, self._looked_at = number, now
            self._read_access_list()
            self._look()
            self._last = self._met(now)
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
            self._looked_in = -1  # a member as soon as anybody asks
        data = seal(peer, self.identity, limit=RECORD_BYTES)
        self.members.join(peer, data)
        patiently(lambda: self.files.write(f"peers/{self.node}.json", data), self.stop)

    def _admits(self, peer: PeerInfo) -> bool:
        shown = peer.invitation
        return admission.admit(self.manifest, self.access_list, {}, peer.peer_id, shown, self.clock())[1] is None

    def _met(self, now: float) -> State:
        """The members: who has introduced itself lately, and is admitted."""
        state = State(swarm=self.manifest.swarm())
        known = sorted(self.members.known.values(), key=lambda met: (met.info.joined, met.info.peer_id))
        for met in known:
            peer = met.info
            invitation, why = admission.admit(
                self.manifest, self.access_list, state.members, peer.peer_id, peer.invitation, now
            )
            if why is not None:
                if peer.peer_id == self.identity.peer_id:
                    self.turned_away = why
                continue
            state = rounds.record_presence(state, peer.peer_id, peer.peer_id, min(now, met.seen), invitation)
        return state
