"""Tells a worker the round, through the documents that it and the coordinator write."""

import logging
import math
import threading
import time
from collections.abc import Callable

from rl_swarm.network.documents import ACCESS_LIST, PEERS, RECORD_BYTES, STATE, DocumentKey, DocumentStore, report_key
from rl_swarm.network.owner_documents import read_access_list, read_state
from rl_swarm.network.retries import poll_pauses, retry
from rl_swarm.protocol import admission
from rl_swarm.protocol.admission import AccessList, AdmissionError
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.rounds import PeerInfo, RefusalReason, Report, State
from rl_swarm.protocol.wire import Incomplete, Rejected, seal, unseal

log = logging.getLogger(__name__)


class DocumentCoordinator:
    def __init__(
        self,
        store: DocumentStore,
        manifest: Manifest,
        identity: Identity,
        node: str,
        stop: threading.Event,
        poll: float = 2.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store, self.manifest, self.identity, self.node = store, manifest, identity, node
        self.stop, self.poll, self.clock = stop, poll, clock
        self._last = State(swarm=manifest.swarm())
        self._read_at = -math.inf  # when this node last read the state
        self._since = -math.inf  # the present stage began after this moment, with rounds on an interval
        self._logged_problem = ""  # why the last state was not used
        self._reported: set[DocumentKey] = set()
        self._joined = math.nan  # of the introduction by which this node is known
        self.access_list = AccessList(swarm=manifest.swarm())
        self.turned_away: RefusalReason | None = None
        self._logged_waiting = False

    def request_admission(self, token: str | None) -> str:
        """Make the ticket for this node's introduction; raise `AdmissionError` if the coordinator would refuse it."""
        ticket, me = "", self.identity.peer_id
        if token:
            try:
                ticket = admission.make_ticket(token, self.manifest, me)
            except Rejected as error:
                raise AdmissionError(
                    f"INVITATION cannot be used ({error}). Copy it whole, from the owner of this swarm, "
                    f"{self.manifest.peer_id}; if another person invited you, this is not the manifest of their swarm."
                ) from error
        self._read_access_list()
        members = self.current().members
        _, why = admission.admit(self.manifest, self.access_list, members, me, ticket, self.clock())
        if why is not None:
            raise self.not_admitted(why)
        return ticket

    def not_admitted(self, why: RefusalReason) -> AdmissionError:
        return AdmissionError(
            admission.refusal_message(why, self.manifest, self.identity.peer_id, str(self.store.root))
        )

    def refusal(self, peer_id: str) -> RefusalReason | None:
        """Return why a peer's rollouts are not used; None if they are."""
        return admission.refusal_reason(self.manifest, self.access_list, peer_id, self._last.members.get(peer_id))

    def _read_access_list(self) -> None:
        try:
            access_list = read_access_list(self.store, self.manifest)
        except OSError as error:  # the one that was read before stands, and the next look is soon
            log.debug("%s cannot be read now: %s", self.store.name(ACCESS_LIST), error)
            return
        except Rejected as error:
            log.warning("%s is not used: %s", self.store.name(ACCESS_LIST), error)
            return
        if access_list.number > self.access_list.number:
            self.access_list = access_list

    def register(self, peer: PeerInfo) -> None:
        self._joined = peer.joined
        data = seal(peer, self.identity, limit=RECORD_BYTES)
        retry(lambda: self.store.write(PEERS.of(self.node), data), self.stop)

    def submit(self, report: Report) -> None:
        """Write the report, unless this node has reported already: a restarted node may play a round twice."""
        key = report_key(report.round, report.stage, self.node)
        if key in self._reported or (not self._reported and self._has_reported(key)):
            return
        data = seal(report, self.identity, limit=RECORD_BYTES)
        retry(lambda: self.store.write(key, data), self.stop, self.manifest.peer_timeout)
        self._reported.add(key)

    def _has_reported(self, key: DocumentKey) -> bool:
        """Tell whether this node reported before this process began."""
        try:
            report = unseal(self.store.read(key, RECORD_BYTES), Report)
        except (OSError, Rejected):
            return False
        here = (report.swarm, report.peer_id, report.round, report.stage)
        return here == (self.manifest.swarm(), self.identity.peer_id, key.round, key.stage)

    def current(self) -> State:
        """Return the newest valid state: a synced folder may show an older one again, half of one, or a forged one."""
        read_before, self._read_at = self._read_at, time.monotonic()
        try:
            state = read_state(self.store, self.manifest)
        except (OSError, Incomplete):
            return self._last
        except Rejected as error:
            if str(error) != self._logged_problem:
                self._logged_problem = str(error)
                log.warning("%s is not used: %s", self.store.name(STATE), error)
            return self._last
        if state.access_list_number > self.access_list.number:
            self._read_access_list()
        refusal = state.refused.get(self.identity.peer_id)
        if refusal is not None and refusal.joined == self._joined:
            self.turned_away = refusal.why
        if position(state) == position(self._last) and len(state.members) > len(self._last.members):
            self._last = state
        if position(state) > position(self._last):
            self._last, self._since = state, max(read_before, self._since + self.manifest.round_interval)
        return self._last

    def wait_for(self, after: tuple[int, int]) -> State | None:
        pauses = poll_pauses(self.poll)
        while not self.stop.is_set():
            left = self._seconds_until_news(after)
            if left == 0.0:
                state = self.current()
                if self.turned_away:
                    return None
                if is_past(state, after) and self._may_play(state):
                    return state
                left = self._seconds_until_news(after) or next(pauses)
            self.stop.wait(left)
        return None

    def _may_play(self, state: State) -> bool:
        """Tell whether this node is a member. In an open swarm it becomes one by what it does."""
        member = self.manifest.admission == "open" or self.identity.peer_id in state.members
        if not member and not self._logged_waiting:
            self._logged_waiting = True
            log.info("waiting for the coordinator to admit this node")
        return member or state.phase == "finished"

    def _seconds_until_news(self, after: tuple[int, int]) -> float:
        """Return for how long the state cannot change: with rounds on an interval, until it has passed."""
        if self.manifest.round_end != "interval" or self._last.phase != "running" or is_past(self._last, after):
            return 0.0
        expected = self._since + self.manifest.round_interval + next(poll_pauses(self.poll))
        return max(0.0, expected - time.monotonic())


def is_past(state: State, after: tuple[int, int]) -> bool:
    return state.phase == "finished" or (state.phase == "running" and (state.round, state.stage) > after)


def position(state: State) -> tuple[int, int, int]:
    """Return how far a swarm has come, as a key to order states by."""
    return ({"waiting": 0, "running": 1, "finished": 2}[state.phase], state.round, state.stage)
