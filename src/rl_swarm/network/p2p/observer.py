"""Observes a swarm among peers without taking part: for `status`, `validate` and the live view."""

import math
import tempfile
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec.structs import replace as changed

from rl_swarm.network.address import Address, open_address
from rl_swarm.network.base import NetworkError
from rl_swarm.network.documents import MANIFEST, RECORD_BYTES, DocumentKey, DocumentStore, report_key
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.p2p.clock_rounds import ClockCoordinator
from rl_swarm.network.p2p.documents import PeerStore
from rl_swarm.network.p2p.joining import await_manifest, engine_of
from rl_swarm.network.settings import NetworkSettings
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.rounds import Report, State
from rl_swarm.protocol.wire import Rejected, unseal

OBSERVE_SECONDS = 15.0  # for a peer to send the manifest
MAX_ASKED = 256  # members
AT_ONCE = 16
ASK_SECONDS = 5.0  # between questions for reports
KEPT_ROUNDS = 100  # of reports that are counted


@contextmanager
def observed(text: str, settings: NetworkSettings) -> Iterator[tuple[Address, Callable[[], State] | None]]:
    """Yield the address with the swarm's documents, and its state by the clock where there is no coordinator."""
    address = open_address(text)
    identity, stop = Identity.generate(), threading.Event()
    with tempfile.TemporaryDirectory() as folder, engine_of(identity, address.peers, settings, Path(folder)) as engine:
        waited = threading.Timer(OBSERVE_SECONDS, stop.set)
        waited.start()
        found = await_manifest(engine, settings, stop)
        waited.cancel()
        if found is None:
            raise NetworkError(f"{text}: no peer there knows a swarm. Is the address right, and is a node running?")
        manifest, signed = found
        store = PeerStore(engine, manifest.swarm(), manifest.peer_id, identity, FolderStore.at(Path(folder)))
        store.copies[MANIFEST] = signed
        clock = None
        if manifest.round_end == "interval":
            clock = SwarmObserver(ClockCoordinator(store, manifest, identity, stop, find_all=True)).current
        yield replace(address, store=store), clock


@dataclass
class ReportTotals:
    """Sums up the reports of one peer."""

    reports: int = 0
    reward: float = 0.0
    wins: int = 0


class SwarmObserver:
    """Follows a swarm without a coordinator by the introductions and reports of its members."""

    def __init__(self, coordinator: ClockCoordinator) -> None:
        self.coordinator = coordinator
        self.reports = dict[tuple[int, int, str], Report]()  # of the last rounds, by round, stage and peer
        self.before = dict[str, ReportTotals]()  # of earlier rounds, by peer
        self._asked_at = -math.inf

    def current(self) -> State:
        state = self.coordinator.current()
        if state.timestamp - self._asked_at >= ASK_SECONDS:
            self._asked_at = state.timestamp
            self._ask(state)
        return self._counted(state)

    def _ask(self, state: State) -> None:
        """Ask for the reports of this round and the one before that are not known yet."""
        for place in [place for place in self.reports if place[0] <= state.round - KEPT_ROUNDS]:
            _count(self.reports.pop(place), self.before, state.members)
        recent = range(max(0, state.round - 1), min(state.round + 1, self.coordinator.manifest.rounds))
        wanted = [
            (number, stage, peer_id)
            for number in recent
            for stage in range(self.coordinator.manifest.stages)
            for peer_id in sorted(state.members)[:MAX_ASKED]
            if (number, stage, peer_id) not in self.reports
        ]
        keys = {report_key(*place): place for place in wanted}
        for key, answer in read_all(self.coordinator.store, keys, RECORD_BYTES):
            if isinstance(answer, bytes):
                self._record(keys[key], answer)

    def _record(self, place: tuple[int, int, str], data: bytes) -> None:
        try:
            report = unseal(data, Report, RECORD_BYTES)
        except Rejected:  # `validate` tells more
            return
        if (report.round, report.stage, report.peer_id, report.swarm) == (*place, self.coordinator.manifest.swarm()):
            self.reports[place] = report

    def _counted(self, state: State) -> State:
        """Return the state with the reports counted, as a coordinator would."""
        counted = {peer_id: replace(count) for peer_id, count in self.before.items()}
        for report in self.reports.values():
            _count(report, counted, state.members)
        members = dict(state.members)
        for peer_id in members.keys() & counted.keys():
            member, count = members[peer_id], counted[peer_id]
            members[peer_id] = changed(
                member,
                participation=member.participation + count.reports,
                reward=member.reward + count.reward,
                wins=member.wins + count.wins,
            )
        return changed(state, members=members)


def _count(report: Report, counted: dict[str, ReportTotals], members: Container[str]) -> None:
    mine = counted.setdefault(report.peer_id, ReportTotals())
    mine.reports += 1
    mine.reward += report.reward
    if report.vote != report.peer_id and report.vote in members:
        counted.setdefault(report.vote, ReportTotals()).wins += 1


def read_all(
    store: DocumentStore, keys: Iterable[DocumentKey], limit: int
) -> Iterator[tuple[DocumentKey, bytes | OSError]]:
    """Read documents of many peers, several at a time: each, or why it cannot be had."""

    def read(key: DocumentKey) -> bytes | OSError:
        try:
            return store.read(key, limit)
        except OSError as error:
            return error

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from zip(listed := list(keys), pool.map(read, listed), strict=True)
