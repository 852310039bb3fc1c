"""Stores a swarm's documents among peers.

A peer keeps what it writes on its own disk, and sends it to each peer that asks. In the DHT it leaves signed notices
of the documents that other peers have to find, with size and digest. A document that fits into its notice travels
inside. A node that knows the author of a document asks that peer, so traffic follows demand. The DHT tells which peers
there are.
"""

import hashlib
import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from rl_swarm.network.documents import (
    ACCESS_LIST,
    HISTORY,
    MANIFEST,
    PEERS,
    RECORD_BYTES,
    STATE,
    DocumentKey,
    DocumentStore,
    Kind,
)
from rl_swarm.network.layout import folder_of, path_of
from rl_swarm.network.p2p.engine import PeerEngine
from rl_swarm.network.p2p.late_answers import Ask
from rl_swarm.network.p2p.records import (
    DEEPEST,
    KEPT_SECONDS,
    MAX_CONTENT,
    MAX_NOTICE,
    MAX_OF_AUTHOR_IN_KEY,
    REPORT_SECONDS,
    DhtRecord,
    acceptable,
    dht_key,
    group_key,
    parts_of,
    request_for,
    requested,
    subnet_of,
)
from rl_swarm.network.p2p.table import REPLICAS
from rl_swarm.protocol.identity import Identity, is_peer_id
from rl_swarm.protocol.rounds import State
from rl_swarm.protocol.wire import MAX_BYTES, Count, Id, Rejected, seal, unseal

if TYPE_CHECKING:
    from rl_swarm.network.p2p.members import Members

log = logging.getLogger(__name__)

OWNERS = {MANIFEST, ACCESS_LIST, STATE, HISTORY}  # which only the owner writes, and every peer serves
SERVED_KINDS = {ACCESS_LIST: "access_list", STATE: "state"}  # kinds of the owner's documents that peers keep and serve
OF_A_ROUND = (Kind.ROLLOUTS, Kind.REPORT)
ANNOUNCED_BY_NODES = (Kind.INTRODUCTION, Kind.REPORT)
MAX_OF_ROUNDS = 400  # documents of single rounds that a peer serves: as far back as nodes ask
FRESH_SECONDS = 0.2  # for which a listing from the DHT is good enough to find an author in
MAX_NAMES = 4096  # node names that are kept with their authors
MAX_LISTED = 8  # groups of which the last listing is kept
MANIFEST_PEERS = 16  # peers that leave notices of the manifest, and that ask the owner for news, on average
AWAY_SECONDS = 300.0  # for which an owner that could not be reached is not asked again
DIRECT_SECONDS = 5.0  # after which members without a notice of their report are asked for it, and again
MAX_DIRECT = 64  # members that are asked then, in turn
AT_ONCE = 8
ROUNDS_AHEAD = 2  # of the round that this peer knows of, for which it keeps others' reports
STATE_SECONDS = 60.0  # for which it knows the round


class SignedHeader(msgspec.Struct, frozen=True):
    """Holds what is checked in a document of the owner before it is served."""

    peer_id: Id
    kind: str = ""
    swarm: str = ""
    number: Count = 0


class PeerStore:
    def __init__(
        self,
        engine: PeerEngine,
        swarm: str,
        owner: str,
        identity: Identity,
        local: DocumentStore,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self.engine, self.swarm, self.owner, self.identity = engine, swarm, owner, identity
        self.local, self.clock, self.rng = local, clock, rng or random.Random()
        self.root = local.root
        self.members: Members | None = None  # without a coordinator: the peers that this one knows
        self.own = set[DocumentKey]()  # what this peer has written
        self.announced = set[DocumentKey]()  # of which there must always be a notice
        self.copies = dict[DocumentKey, bytes]()  # of what the owner wrote
        self.authors = dict[str, str]()  # of a node's documents, by the node's name
        self.names_of = dict[str, str]()  # the first name of an author: it is known by no other
        self._listed = dict[DocumentKey, tuple[float, dict[DocumentKey, DhtRecord]]]()  # by group: when, and what
        self._left = dict[DocumentKey, float]()  # when notices were last left
        self._of_rounds = deque[DocumentKey]()  # its documents of single rounds, the oldest first
        self._report: DocumentKey | None = None  # its newest one
        self._state: tuple[float, State] | None = None  # when it was read
        self._direct = dict[str, bytes]()  # reports that members were asked for, of one stage, by node
        self._asked_for = PEERS, -math.inf  # this stage, and when
        self._asking: threading.Thread | None = None
        self._owner_away = -math.inf  # until when the owner is not asked
        self.serves = False  # a peer that plays has other peers to ask; an observer waits for answers
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Let the engine answer for this swarm, and share room and streams by membership."""
        self.engine.answer, self.engine.is_member = self.answer, self.is_member
        self.serves = True
        if self.engine.quota is not None:
            self.engine.quota.swarms[self.swarm] = self

    def is_member(self, peer_id: str) -> bool:
        """Tell whether a peer is a member, as far as this one knows."""
        if peer_id == self.owner:
            return True
        if self.members is not None:
            return peer_id in self.members.known
        return self._state is not None and peer_id in self._state[1].members

    def report_rounds(self) -> range | None:
        """Return the rounds of which reports may lie in the DHT now; None if that is not known."""
        if self.members is not None:  # without a coordinator, reports are asked for
            return range(0)
        known = self._state is not None and self.clock() - self._state[0] <= STATE_SECONDS
        if self._state is None or not (known or self.identity.peer_id == self.owner):
            return None
        return range(self._state[1].round + ROUNDS_AHEAD + 1)

    def name(self, key: DocumentKey) -> str:
        return path_of(key)

    def read(self, key: DocumentKey, limit: int) -> bytes:
        me = self.identity.peer_id
        if key in self.own or (key in OWNERS and me == self.owner):
            data = self.local.read(key, limit)
            if key == STATE:
                self._know(data)
            return data
        if key == MANIFEST and key in self.copies:  # it never changes
            return self.copies[key][: limit + 1]
        if key in OWNERS:
            return self._owners(key, limit)
        author = self._author(key)
        if author == me:  # from before this process began
            return self.local.read(key, limit)
        if key.kind is Kind.INTRODUCTION and self.members is not None:
            return self.members.introduction(key.node)[: limit + 1]
        with self._lock:
            if key.group == self._asked_for[0] and key.node in self._direct:
                return self._direct[key.node][: limit + 1]
            notice = self._listed.get(key.group, (0.0, {}))[1].get(key)
        if notice is not None and notice.content and notice.peer_id == author:
            return notice.content.encode()[: limit + 1]
        if key.kind in ANNOUNCED_BY_NODES and me == self.owner:
            # The coordinator waits for no peer: small documents stand in their notices.
            raise FileNotFoundError(path_of(key))
        ask = self.engine.ask_soon if self.serves and key.kind is Kind.ROLLOUTS else self.engine.ask
        return self._asked([author] if author else [], key, limit, ask)

    def write(self, key: DocumentKey, data: bytes) -> None:
        self.local.write(key, data)
        if key == STATE:
            self._know(data)
        self._announce(key, data)

    def append(self, key: DocumentKey, data: bytes, at: int | None = None) -> None:
        self.local.append(key, data, at)
        self._announce(key, self.local.read(key, MAX_BYTES))

    def nodes(self, group: DocumentKey) -> list[str]:
        """List the nodes of which there are notices. Rollouts have none, so of those only this peer's are listed."""
        if group.kind not in ANNOUNCED_BY_NODES:
            return self.local.nodes(group)
        if group.kind is Kind.INTRODUCTION and self.members is not None:
            return sorted(self.members.known)
        is_coordinator = group.kind is Kind.REPORT and self.identity.peer_id == self.owner
        direct = self._asked_directly(group) if is_coordinator else set[str]()
        try:
            return sorted({key.node for key in self._list(group)} | direct)
        except OSError:
            if not direct:
                raise
            return sorted(direct)

    def rounds(self, kind: Kind) -> list[int]:
        return self.local.rounds(kind)

    def remove_rollouts(self, round: int, archive: bool) -> None:
        self.own -= {key for key in self.own if key.kind is Kind.ROLLOUTS and key.round == round}
        self.local.remove_rollouts(round, archive)

    def stamp(self, key: DocumentKey) -> None:
        return None

    def notices(self, dht_key: str) -> list[DhtRecord]:
        """Return the signed notices under a DHT key; of each author the newest."""
        now = self.clock()
        looks_again = self.identity.peer_id == self.owner and self.members is None
        records = self.engine.find(dht_key, quick=looks_again)
        found = (acceptable(dht_key, subkey, value, now) for subkey, value in records.items())
        by_author = dict[str, list[DhtRecord]]()
        for notice in found:
            if notice is not None and notice.swarm == self.swarm:
                by_author.setdefault(notice.peer_id, []).append(notice)
        return [
            notice
            for theirs in by_author.values()
            for notice in sorted(theirs, key=lambda one: (-one.timestamp, one.path))[:MAX_OF_AUTHOR_IN_KEY]
        ]

    def _asked_directly(self, group: DocumentKey) -> set[str]:
        """Ask members without a notice of their report for it, in the background. Return the nodes that gave theirs."""
        with self._lock:
            if self._asked_for[0] != group:
                self._asked_for, self._direct = (group, self.clock()), {}
            if self.clock() - self._asked_for[1] >= DIRECT_SECONDS and not self._is_asking():
                listed = {key for key, notice in self._listed.get(group, (0.0, {}))[1].items() if notice.content}
                members = self._state[1].members if self._state is not None else {}
                missing = [
                    (peer, member.node)
                    for peer, member in members.items()
                    if member.node not in self._direct
                    and group.of(member.node) not in listed
                    and peer != self.identity.peer_id
                ]
                self._asked_for = group, self.clock()
                chosen = self.rng.sample(sorted(missing), min(len(missing), MAX_DIRECT))
                # A member that does not answer must not hold up the rounds.
                self._asking = threading.Thread(target=self._ask_directly, args=(group, chosen), daemon=True)
                self._asking.start()
            return set(self._direct)

    def _is_asking(self) -> bool:
        return self._asking is not None and self._asking.is_alive()

    def _ask_directly(self, group: DocumentKey, wanted: list[tuple[str, str]]) -> None:
        def ask(peer: str, node: str) -> None:
            with suppress(OSError):
                data = self._asked([peer], group.of(node), RECORD_BYTES)
                with self._lock:
                    if self._asked_for[0] == group:
                        self._direct[node] = data

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda item: ask(*item), wanted))

    def subnets(self) -> dict[str, str]:
        """Return the subnets of peers: of connected ones as seen here, of others as their introductions say."""
        known = self.members.known if self.members is not None else {}
        claimed = {peer_id: member.subnet for peer_id, member in known.items() if member.subnet}
        try:
            addresses = self.engine.peers()
        except OSError:
            return claimed
        return claimed | {address.rpartition("/")[2]: subnet for address in addresses if (subnet := subnet_of(address))}

    def answer(self, request: bytes, peer_id: str) -> bytes | None:
        """Answer a peer's request with a document of this peer or of the owner."""
        key = requested(request)
        if key is None:
            return None
        if key in self.own or (key in OWNERS and self.identity.peer_id == self.owner):
            try:
                return self.local.read(key, MAX_BYTES)
            except OSError:
                return None
        return self.copies.get(key)

    def serve_copy(self, key: DocumentKey, data: bytes) -> None:
        """Serve and announce a document of the owner, so that the owner is not needed."""
        self.copies[key] = data
        self.announced.add(key)

    def renew(self) -> None:
        """Leave the notices that are due; of reports only the newest one's.

        Of the manifest a few peers leave notices, whatever the size of the swarm.
        """
        due = self._report is not None and self.clock() - self._left.get(self._report, -math.inf) >= REPORT_SECONDS / 3
        if due and self._report in self.own and self.members is None:
            with suppress(OSError):
                self._leave(self._report, self.local.read(self._report, MAX_BYTES))
        for key in list(self.announced):
            if self.clock() - self._left.get(key, -math.inf) < KEPT_SECONDS / 3:
                continue
            if key in self.copies and not self._is_among(MANIFEST_PEERS):
                continue
            with suppress(OSError):
                data = self.local.read(key, MAX_BYTES) if key in self.own else self.copies[key]
                self._leave(key, data)

    def _announce(self, key: DocumentKey, data: bytes) -> None:
        self.own.add(key)
        if key.kind in OF_A_ROUND:
            self._of_rounds.append(key)
            while len(self._of_rounds) > MAX_OF_ROUNDS:
                self.own.discard(old := self._of_rounds.popleft())
                self._left.pop(old, None)
            if key.kind is Kind.REPORT:
                self._report = key
        else:
            self.announced.add(key)
        # Rollouts are asked for by their author's name; reports are listed by the coordinator, where there is one.
        if key.kind is not Kind.ROLLOUTS and not (key.kind is Kind.REPORT and self.members):
            self._leave(key, data)

    def _leave(self, key: DocumentKey, data: bytes) -> None:
        """Leave a notice of a document in the DHT."""
        notice = DhtRecord(
            peer_id=self.identity.peer_id,
            swarm=self.swarm,
            path=path_of(key),
            sha256=hashlib.sha256(data).hexdigest(),
            size=len(data),
            timestamp=self.clock(),
            content=_text(data) if len(data) <= MAX_CONTENT else "",
            depth=self.members.depth if self.members is not None and key.kind is Kind.INTRODUCTION else 0,
            addresses=list(self.engine.addresses)[:8] if key.kind in (Kind.MANIFEST, Kind.INTRODUCTION) else [],
        )
        sealed = seal(notice, self.identity, limit=MAX_NOTICE)
        try:
            for part, seconds, copies in self._places(key):
                self.engine.store(dht_key(self.swarm, part), notice.subkey(), sealed, seconds, copies)
                self._left[key] = self.clock()
        except OSError as error:  # a peer that asks this one gets the document all the same
            log.debug("no notice of %s could be left: %s", notice.path, error)

    def _places(self, key: DocumentKey) -> Iterator[tuple[str, float, int]]:
        """Yield the parts of the DHT in which a notice belongs, for how long, and how many copies."""
        if key.kind is Kind.INTRODUCTION and self.members is not None:
            yield from self.members.places()
        else:
            yield folder_of(key), REPORT_SECONDS if key.kind is Kind.REPORT else KEPT_SECONDS, REPLICAS

    def _list(self, group: DocumentKey) -> Iterable[DocumentKey]:
        found = self.notices(group_key(self.swarm, group))
        for notice in found:
            self.engine.introduce(notice.peer_id, notice.addresses)
        with self._lock:
            listed = dict[DocumentKey, DhtRecord]()
            for notice in found:
                key = notice.key
                if key is None or key.group != group:
                    continue
                if self.names_of.setdefault(notice.peer_id, key.node) != key.node:
                    continue
                self.authors.setdefault(key.node, notice.peer_id)
                if key not in listed or notice.peer_id == self.authors.get(key.node):
                    listed[key] = notice
            self._forget_names()
            self._listed.pop(group, None)
            self._listed[group] = self.clock(), listed
            while len(self._listed) > MAX_LISTED:
                del self._listed[next(iter(self._listed))]
        return listed

    def _forget_names(self) -> None:
        """Forget the oldest names that are of no member, where there are too many."""
        if max(len(self.authors), len(self.names_of)) > MAX_NAMES:
            members = {member.node for member in self._state[1].members.values()} if self._state else set()
            strangers = [node for node in self.authors if node not in members]
            for node in strangers[: max(0, len(self.authors) - MAX_NAMES // 2)]:
                del self.authors[node]
            self.names_of = {peer_id: node for node, peer_id in self.authors.items()}

    def _owners(self, key: DocumentKey, limit: int) -> bytes:
        """Read a document of the owner, from the owner or from a peer that has a copy.

        In a large swarm without a coordinator few peers ask the owner, and the others ask those.
        """
        ask_owner = self.clock() >= self._owner_away
        if self.members is not None and key != STATE:
            ask_owner &= self.rng.random() * self._size() < MANIFEST_PEERS
        try:
            if not ask_owner:
                raise OSError("the owner is not asked")
            data = self._asked([self.owner], key, limit)
        except FileNotFoundError:
            raise
        except OSError:
            if ask_owner:
                self._owner_away = self.clock() + (AWAY_SECONDS if self.members is not None else 0.0)
            data = self._asked(self._others(), key, limit)
        self._keep(key, data)
        if key == STATE:
            self._know(data)
        return data

    def _keep(self, key: DocumentKey, data: bytes) -> None:
        """Keep a copy to serve, if the owner signed it and no newer one is there."""
        try:
            found = unseal(data, SignedHeader)
            before = unseal(self.copies[key], SignedHeader).number if key in self.copies else 0
        except Rejected:  # or a history, which only the owner serves
            return
        # The owner signs other documents too, and those of other swarms.
        right = key == MANIFEST or (found.kind, found.swarm) == (SERVED_KINDS.get(key), self.swarm)
        if right and found.peer_id == self.owner and found.number >= before:
            self.copies[key] = data

    def _know(self, data: bytes) -> None:
        """Take the members from the state."""
        try:
            state = unseal(data, State)
        except Rejected:
            return
        if state.peer_id == self.owner and state.swarm == self.swarm:
            self._state = self.clock(), state
            self.authors |= {member.node: peer_id for peer_id, member in state.members.items()}
            self.names_of |= {peer_id: member.node for peer_id, member in state.members.items()}

    def _author(self, key: DocumentKey) -> str | None:
        """Return the author of a document: the peer whose id is the node's name, else the member of that name, else the
        first peer that used it."""
        if is_peer_id(key.node):
            return key.node
        for group in (PEERS, key.group):
            if key.node not in self.authors and self.members is None and self._is_stale(group):
                self._list(group)
        return self.authors.get(key.node)

    def _is_stale(self, group: DocumentKey) -> bool:
        return self.clock() - self._listed.get(group, (-math.inf, {}))[0] > FRESH_SECONDS

    def _size(self) -> int:
        """Estimate how many peers there are."""
        return self.members.size if self.members is not None else len(self.authors)

    def _is_among(self, some: int) -> bool:
        """Tell whether this peer is one of about so many of the swarm. Its id decides, so they are always the same."""
        bits = parts_of(self.swarm, self.identity.peer_id)[-1].rpartition("/")[2]
        return int(bits, 2) * self._size() < some << DEEPEST

    def _others(self) -> list[str]:
        """Choose peers to ask for what all have; without a coordinator those that answered last, as they are
        connected."""
        if self.members is not None:
            return self.members.latest(2)
        known = self._state[1].members if self._state is not None else self.authors.values()
        others = [peer for peer in dict.fromkeys(known) if peer != self.identity.peer_id]
        return self.rng.sample(others, min(len(others), 8))

    def _asked(self, peers: Iterable[str], key: DocumentKey, limit: int, ask: Ask | None = None) -> bytes:
        """Return the first answer to a request that peers are sent one after the other."""
        error: OSError = FileNotFoundError(path_of(key))
        ask = ask or self.engine.ask
        for peer in peers:
            try:
                data = ask(peer, request_for(key), limit)
            except OSError as failure:
                error = failure
                continue
            if self.members is not None:
                self.members.record_answer(peer)
            if data is not None:
                return data
            error = FileNotFoundError(path_of(key))
        raise error


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:  # it is compressed, and asked for
        return ""
