"""A swarm among peers as seen by somebody who only looks: for `status`, `validate` and the live view."""

import math
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from msgspec.structs import replace as changed

from rl_swarm import config
from rl_swarm.identity import Identity
from rl_swarm.network.address import Address, known_addresses, locate
from rl_swarm.network.base import NetworkError
from rl_swarm.network.files import Files, LocalFiles
from rl_swarm.network.folder import MANIFEST, RECORD_BYTES, report_path
from rl_swarm.network.p2p.clock import ClockCoordinator
from rl_swarm.network.p2p.documents import PeerFiles
from rl_swarm.network.p2p.joining import await_manifest, engine_of
from rl_swarm.rounds import Report, State
from rl_swarm.wire import Rejected, unseal

OBSERVE_SECONDS = 15.0  # for somebody to tell which swarm it is
MOST_ASKED = 256  # members
AT_ONCE = 16
ASK_SECONDS = 5.0  # between questions for reports
KEPT_ROUNDS = 100  # of reports that are counted


@contextmanager
def observed(text: str) -> Iterator[tuple[Address, Callable[[], State] | None]]:
    """A swarm's documents, and its state by the clock where nobody conducts it."""
    settings, identity, stop = config.load().settings, Identity.new(), threading.Event()
    with (
        tempfile.TemporaryDirectory() as folder,
        engine_of(identity, known_addresses(text), settings, Path(folder)) as engine,
    ):
        waited = threading.Timer(OBSERVE_SECONDS, stop.set)
        waited.start()
        found = await_manifest(engine, settings, stop)
        waited.cancel()
        if found is None:
            raise NetworkError(
                f"{text}: nobody there knows a swarm. Is the address right, and is a node running?"
            )
        manifest, signed = found
        files = PeerFiles(engine, manifest.swarm(), manifest.peer_id, identity, LocalFiles(Path(folder)))
        files.handed[MANIFEST] = signed
        clock = None
        if manifest.round_end == "interval":
            clock = Onlooker(ClockCoordinator(files, manifest, identity, stop, whole=True)).current
        yield replace(locate(text), files=files), clock


class Onlooker:
    """Knows of a swarm without a coordinator what its members tell: that they are there, and their reports."""

    def __init__(self, coordinator: ClockCoordinator) -> None:
        self.coordinator = coordinator
        self.reports = dict[tuple[int, int, str], Report]()  # by round, stage and peer
        self._asked_at = -math.inf

    def current(self) -> State:
        state = self.coordinator.current()
        if state.timestamp - self._asked_at >= ASK_SECONDS:
            self._asked_at = state.timestamp
            self._ask(state)
        return self._counted(state)

    def _ask(self, state: State) -> None:
        """For the reports of this round and the one before that are not known yet."""
        self.reports = {place: r for place, r in self.reports.items() if place[0] > state.round - KEPT_ROUNDS}
        recent = range(max(0, state.round - 1), min(state.round + 1, self.coordinator.manifest.rounds))
        wanted = [
            (number, stage, peer_id)
            for number in recent
            for stage in range(self.coordinator.manifest.stages)
            for peer_id in sorted(state.members)[:MOST_ASKED]
            if (number, stage, peer_id) not in self.reports
        ]
        paths = {report_path(number, stage, peer): (number, stage, peer) for number, stage, peer in wanted}
        for path, answer in asked(self.coordinator.files, paths, RECORD_BYTES):
            if isinstance(answer, bytes):
                self._note(paths[path], answer)

    def _note(self, place: tuple[int, int, str], data: bytes) -> None:
        try:
            report = unseal(data, Report, RECORD_BYTES)
        except Rejected:  # `validate` tells more
            return
        if (report.round, report.stage, report.peer_id, report.swarm) == (
            *place,
            self.coordinator.manifest.swarm(),
        ):
            self.reports[place] = report

    def _counted(self, state: State) -> State:
        """The members with the reports that were seen, as a coordinator would count them."""
        members = dict(state.members)
        for (_, _, peer_id), report in self.reports.items():
            if member := members.get(peer_id):
                members[peer_id] = changed(
                    member, participation=member.participation + 1, reward=member.reward + report.reward
                )
            if report.vote != peer_id and (member := members.get(report.vote)):
                members[report.vote] = changed(member, wins=member.wins + 1)
        return changed(state, members=members)


def asked(files: Files, paths: Iterable[str], limit: int) -> Iterator[tuple[str, bytes | OSError]]:
    """Documents of many peers, several at a time: each, or why it cannot be had."""

    def read(path: str) -> bytes | OSError:
        try:
            return files.read(path, limit)
        except OSError as error:
            return error

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from zip(listed := list(paths), pool.map(read, listed), strict=True)
