"""Reads what peers write for the coordinator, introductions and reports, however many documents lie there."""

import bisect
import logging
import time
from collections.abc import Iterator, Set
from typing import TypeVar

from rl_swarm.network import retries
from rl_swarm.network.documents import RECORD_BYTES, DocumentKey, DocumentStore, Kind
from rl_swarm.network.listing import ThrottledListing
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.rounds import PeerInfo, Report, State
from rl_swarm.protocol.untrusted import quoted
from rl_swarm.protocol.wire import Incomplete, Rejected, unseal_with_digest
from rl_swarm.storage.files import MAX_NAMES

log = logging.getLogger(__name__)
T = TypeVar("T", PeerInfo, Report)

MAX_NEW = 2000  # documents of peers that are no members, read in one look
STRANGERS_SECONDS = 0.05  # that one look spends on those
MAX_LOGGED = 20  # refused documents that are named in the log, per stage
MAX_REMEMBERED = 100_000  # refused documents that are counted


class Submissions:
    """Reads signed documents of peers, and leaves a refused one out until it changes."""

    def __init__(self, store: DocumentStore, swarm: str) -> None:
        self.store, self.swarm = store, swarm
        self._listing = ThrottledListing()
        self._refused: dict[DocumentKey, tuple[int, ...] | None] = {}  # the stamp of what was refused
        self._counted: set[DocumentKey] = set()  # whose refusal has been counted
        self._refusals = 0  # in this stage
        self._next: dict[tuple[DocumentKey, bool], str] = {}  # by group and refused: where the next look begins
        self._incomplete: dict[DocumentKey, float] = {}  # since when a document is not whole

    def nodes(self, group: DocumentKey) -> list[str] | None:
        """List who has a document in a group; None where that is not known now."""
        try:
            return self._listing.nodes(self.store, group)
        except OSError as error:  # the next look is soon
            log.debug("%ss cannot be listed: %s", group.kind.value, error)
            return None

    def to_read(self, group: DocumentKey, members: Set[str]) -> Iterator[str]:
        """Yield the nodes whose documents one look reads: the members, and a bounded number of other nodes.

        Anybody can fill a group. Where it is too full to list, members are asked for by name. Other nodes take turns,
        and a refused document is read again when it has changed. So newcomers are found however many documents
        there are.
        """
        names = self.nodes(group)
        full = names is None or len(names) >= MAX_NAMES
        names = names or []
        yield from sorted(members) if full else [node for node in names if node in members]
        strangers = [node for node in names if node not in members]
        yield from self._turn(group, [node for node in strangers if group.of(node) not in self._refused], False)
        for node in self._turn(group, [node for node in strangers if group.of(node) in self._refused], True):
            if self._has_changed(group.of(node)):
                yield node

    def _turn(self, group: DocumentKey, nodes: list[str], refused: bool) -> Iterator[str]:
        """Yield the next few of many nodes, beginning where the last look ended."""
        begin = bisect.bisect_right(nodes, self._next.get((group, refused), ""))
        deadline = time.monotonic() + STRANGERS_SECONDS
        for number, node in enumerate([*nodes[begin:], *nodes[:begin]]):
            if number == MAX_NEW or (number and time.monotonic() >= deadline):
                return
            self._next[group, refused] = node
            yield node

    def _has_changed(self, key: DocumentKey) -> bool:
        stamp = self._refused[key]
        return stamp is None or self.store.stamp(key) != stamp

    def is_incomplete(self, key: DocumentKey) -> bool:
        """Tell whether a document was there at the last look and not whole."""
        return key in self._incomplete

    def read(self, key: DocumentKey, kind: type[T], state: State) -> tuple[T, str] | None:
        """Return a signed document and its digest; None if it is missing, incomplete or refused."""
        try:
            record, digest = unseal_with_digest(self.store.read(key, RECORD_BYTES), kind, RECORD_BYTES)
            self._check(record, key.node, state)
        except FileNotFoundError:
            return None
        except (OSError, Incomplete) as error:
            since = self._incomplete.setdefault(key, time.monotonic())
            if time.monotonic() - since >= retries.GIVE_UP_AFTER:
                self.refuse(key, str(error))
            return None
        except Rejected as error:
            self.refuse(key, str(error))
            return None
        self._incomplete.pop(key, None)
        return record, digest

    def _check(self, record: PeerInfo | Report, node: str, state: State) -> None:
        """Check that a peer has one node name, and that no other peer has that name."""
        if record.swarm != self.swarm:
            raise Rejected(RejectReason.SWARM, "written for another swarm")
        if record.node != node:
            raise Rejected(RejectReason.PLACE, f"written by {quoted(record.node)}")
        if isinstance(record, Report) and (record.round, record.stage) != (state.round, state.stage):
            raise Rejected(RejectReason.PLACE, f"written for round {record.round}, stage {record.stage}")
        for peer_id, member in state.members.items():
            if (peer_id == record.peer_id) != (member.node == node):
                raise Rejected(
                    RejectReason.NAME, f"{peer_id} is {member.node}; this is of {record.peer_id}, who says it is {node}"
                )

    def refuse(self, key: DocumentKey, why: str) -> None:
        """Leave a document out until it changes."""
        self._refused[key] = self.store.stamp(key)
        self.log_once(key, why)

    def log_once(self, key: DocumentKey, why: str) -> None:
        if key not in self._counted and len(self._counted) < MAX_REMEMBERED:
            self._counted.add(key)
            self._refusals += 1
            if self._refusals <= MAX_LOGGED:
                log.warning("%s is not used: %s", self.store.name(key), why)

    def end_stage(self) -> None:
        """Forget what was known of the reports of the stage that ended."""
        for key in self._incomplete:
            if key.kind is Kind.REPORT:
                self.refuse(key, "it was not whole when the stage ended")
        if self._refusals > MAX_LOGGED:
            log.warning("%d more documents are not used", self._refusals - MAX_LOGGED)
        self._refusals = 0
        self._incomplete = {key: since for key, since in self._incomplete.items() if key.kind is Kind.INTRODUCTION}
        self._counted = {key for key in self._counted if key.kind is Kind.INTRODUCTION}
        self._refused = {key: stamp for key, stamp in self._refused.items() if key.kind is Kind.INTRODUCTION}
        self._next = {turn: node for turn, node in self._next.items() if turn[0].kind is Kind.INTRODUCTION}
