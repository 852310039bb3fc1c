"""Discovers the members of a swarm of any size, where there is no coordinator.

Introductions lie in parts of the DHT: the first bits of a number made of a peer's id say in which. The number of bits,
the depth, follows the size of the swarm. So a part holds five to twelve introductions, and a small swarm is one part. A
node reads one part at a time, drawn at random, and keeps some of the peers that it met and that still answer. So what
it reads does not grow with the swarm. Every peer estimates the size from what it reads, and leaves its introduction
one bit above and below its own estimate, too.

Finding a part among many peers means connecting to new ones, and that costs more than the part. So a node of a large
swarm reads a part every fourth round, and more often while it knows too few members.
"""

import logging
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median_low

from rl_swarm.network.documents import PEERS
from rl_swarm.network.layout import path_of
from rl_swarm.network.p2p.documents import PeerStore
from rl_swarm.network.p2p.records import DEEPEST, KEPT_SECONDS, DhtRecord, dht_key, parts_of, subnet_of
from rl_swarm.network.p2p.table import REPLICAS
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.rounds import PeerInfo
from rl_swarm.protocol.wire import Rejected, unseal

log = logging.getLogger(__name__)

INTRODUCTION_BYTES = 8 << 10
FULLEST, EMPTIEST = 12, 5  # introductions in a part, on average, beyond which it is halved or doubled
ESTIMATES = 5  # whose median is the size
NEW = 3  # looks for which a peer counts as new
MAX_OF_A_LOOK = 32  # introductions that are kept of one part, drawn at random
MAX_KNOWN = 1000  # members that an observer keeps
MAX_CONTACTS = 24  # members that a node keeps, where there are several parts
LOOK_ROUNDS = 4  # from one look to the next, of a node of a large swarm that knows half of `MAX_CONTACTS`
MAX_WALKED = 256  # parts that an observer reads
# Depths at which a newcomer looks. Peers are at three depths in a row, so one of these is among them.
STEPS = range(0, DEEPEST + 1, 3)
ENOUGH = 3  # introductions in a part that are no accident
PROBE = 4  # looks, of which one is also at another depth: swarms that lost each other meet again
COPIES = 3  # of an introduction, where there are several parts: a reader finds at least one
FEW_COPIES = 2  # above and below, where nine of ten readers find one
VISITS = 16  # peers, about, that leave their introduction at another depth where there are peers


@dataclass(frozen=True)
class KnownPeer:
    """Holds what is known of a peer whose introduction was read."""

    info: PeerInfo
    document: bytes  # the introduction, signed
    seen: float  # its last heartbeat or answer
    subnet: str = ""  # of the addresses in its notice


class Members:
    def __init__(
        self,
        store: PeerStore,
        manifest: Manifest,
        rng: random.Random | None = None,
        admits: Callable[[PeerInfo], bool] | None = None,
    ) -> None:
        self.store, self.clock, self.rng = store, store.clock, rng or random.Random()
        self.admits = admits  # where peers have to be invited; others are not even counted
        self.swarm, self.me = manifest.swarm(), store.identity.peer_id
        self.timeout, self.interval = manifest.peer_timeout, manifest.round_interval
        self.known = dict[str, KnownPeer]()
        self.depth, self.size = 0, 1  # and how many peers there are, about
        self._sizes = deque[int](maxlen=ESTIMATES)
        self._left = dict[int, float]()  # when this peer's introduction was left, by depth
        self._elsewhere = set[int]()  # depths of peers that do not look at this one's
        self._looks = 0
        self._settled = 0  # looks since the depth has changed by more than one
        self._skipped = 0
        self._max_known = MAX_CONTACTS
        self._unread = dict[int, list[int]]()  # parts of this depth, in the order in which they will be read

    def count_others(self) -> int:
        return len(self.known.keys() - {self.me})

    def join(self, peer: PeerInfo, data: bytes) -> None:
        """Add this peer itself, whatever it reads."""
        self.known[self.me] = KnownPeer(peer, data, peer.timestamp)

    def record_answer(self, peer_id: str) -> None:
        if peer_id in self.known:
            self.known[peer_id] = replace(self.known[peer_id], seen=self.clock())

    def latest(self, count: int) -> list[str]:
        """Return the other peers that were seen last."""
        others = [peer_id for peer_id in self.known if peer_id != self.me]
        return sorted(others, key=lambda peer_id: -self.known[peer_id].seen)[:count]

    def introduction(self, peer_id: str) -> bytes:
        try:
            return self.known[peer_id].document
        except KeyError:
            raise FileNotFoundError(path_of(PEERS.of(peer_id))) from None

    def places(self) -> Iterator[tuple[str, float, int]]:
        """Yield where this peer's introduction has to be left now, for how long, and how many copies.

        It is left in its part, and in those above and below before it is too old there. It is left once at depths
        of peers that have to learn of this one.
        """
        parts, now = parts_of(self.swarm, self.me), self.clock()
        seldom = min(1.5 * self.timeout, KEPT_SECONDS / 3)
        often = seldom / 2 if self.depth else 0.0
        due = {self.depth: often, self.depth - 1: seldom, self.depth + 1: seldom}
        late = {depth for depth, after in due.items() if now - self._left.get(depth, -after) >= after}
        for depth in (late & set(range(DEEPEST + 1))) | self._elsewhere:
            copies = (COPIES if depth == self.depth else FEW_COPIES) if self.depth else REPLICAS
            yield parts[depth], min(KEPT_SECONDS, 2 * self.timeout), copies
            self._left[depth] = now  # once it has been stored
            self._elsewhere.discard(depth)

    def look(self) -> None:
        """Read a part, if it is time.

        Parts at other depths are read, too, while this peer is new, when its part is empty, when a peer in it looks at
        another depth, and now and then.
        """
        self._forget()
        lasting = sum(peer.seen >= self._oldest() + self.interval for peer in self.known.values())
        enough = self.size > MAX_CONTACTS and self._settled >= NEW and lasting > MAX_CONTACTS // 2
        self._skipped = (self._skipped + 1) % LOOK_ROUNDS if enough else 0
        if self._skipped:
            return
        counts = dict[int, int]()
        try:
            counts[self.depth], depths = self._counted(self.depth)
            self._looks += 1
            strangers = [depth for depth in depths if abs(depth - self.depth) > 1]
            more = {self.rng.choice(strangers)} if strangers else set[int]()
            if self._looks % PROBE == 0:
                more.add(self.rng.choice(STEPS))
            if self._looks <= NEW or not counts[self.depth]:
                more.update(STEPS)
            counts |= {depth: self._counted(depth)[0] for depth in more - {self.depth}}
        except OSError as error:  # the network is down; known peers stay
            log.debug("no members can be looked for: %s", error)
            return
        before = self.depth
        self._estimate(counts, depths)
        self._settled = self._settled + 1 if abs(self.depth - before) <= 1 else 0

    def walk(self) -> None:
        """Read all parts, once: for observers."""
        self._max_known = MAX_KNOWN
        self.look()
        parts = [_part(number, self.depth) for number in range(1 << self.depth)]
        for part in self.rng.sample(parts, min(len(parts), MAX_WALKED)):
            with suppress(OSError):
                self._read(part)

    def _counted(self, depth: int) -> tuple[int, list[int]]:
        """Return how many other peers are in a part of some depth, and at which depths they look.

        Where the count would change the estimate much, two parts have to agree: an attacker may have flooded one.
        """
        drawn = self._drawn(depth)
        count, depths = self._read(_part(drawn, depth))
        if depth and self._sizes and count << depth > 4 * self.size:
            another = (drawn + self.rng.randrange(1, 1 << depth)) % (1 << depth)
            count = min(count, self._read(_part(another, depth))[0])
        return count, depths

    def _drawn(self, depth: int) -> int:
        """Draw a part of this depth; of the own depth all before any again, so that few members are all met."""
        if depth != self.depth:
            return self.rng.randrange(1 << depth)
        if not self._unread.get(depth):
            self._unread = {depth: self.rng.sample(range(1 << depth), 1 << depth)}
        return self._unread[depth].pop()

    def _read(self, part: str) -> tuple[int, list[int]]:
        """Return how many other peers are in a part, and at which depths they look. Keep as many as fit."""
        oldest = self._oldest()
        found = [
            notice
            for notice in self.store.notices(dht_key(self.swarm, part))
            if notice.peer_id != self.me and notice.timestamp >= oldest
        ]
        if self.admits is not None:
            found = [notice for notice in found if (peer := self._introduced(notice)) and self.admits(peer)]
        for notice in self.rng.sample(found, min(len(found), MAX_OF_A_LOOK)):
            if peer := self._introduced(notice):
                self._meet(peer, notice)
        return len(found), [notice.depth for notice in found]

    def _introduced(self, notice: DhtRecord) -> PeerInfo | None:
        """Return the introduction in a notice, if it is its author's, of this swarm, and recent."""
        try:
            peer = unseal(notice.content.encode(), PeerInfo, INTRODUCTION_BYTES)
        except Rejected as error:
            log.debug("an introduction of %s is not used: %s", notice.peer_id, error)
            return None
        # Documents are asked for by their author's id, so that no peer can take another's name.
        its_own = peer.peer_id == peer.node == notice.peer_id and peer.swarm == self.swarm
        return peer if its_own and peer.timestamp >= self._oldest() else None

    def _meet(self, peer: PeerInfo, notice: DhtRecord) -> None:
        before = self.known.get(peer.peer_id)
        if before is None or peer.timestamp > before.info.timestamp:
            subnet = next(filter(None, map(subnet_of, notice.addresses)), "")
            seen = max(peer.timestamp, before.seen if before else 0.0)
            self.known[peer.peer_id] = KnownPeer(peer, notice.content.encode(), seen, subnet)
        self.store.engine.introduce(notice.peer_id, notice.addresses)

    def _oldest(self) -> float:
        return self.clock() - 2 * self.timeout

    def _estimate(self, counts: dict[int, int], depths: list[int]) -> None:
        """Estimate the size of the swarm from the counts of parts, by depth, and choose the depth to look at.

        `depths` are those of the peers in the own part.
        """
        seen = {d: n for d, n in counts.items() if n >= ENOUGH or (n and d == self.depth)}
        seen = seen or {d: n for d, n in counts.items() if n}
        if not seen:  # alone, or lost: lost peers meet where a small swarm is
            self.depth, self.size = 0, 1
            self._sizes.clear()
            return
        best = max(seen, key=lambda d: seen[d] << d)
        size = seen[best] << best
        if (best and size > 4 * self.size) or (best != self.depth and 4 * size < self.size):
            self._sizes.clear()
        self._sizes.append(size)
        self.size = median_low(self._sizes)
        wanted = self.depth
        while wanted < DEEPEST and self.size > FULLEST << wanted:
            wanted += 1
        while wanted > 0 and self.size < EMPTIEST << wanted:
            wanted -= 1
        # A peer at the edge of the usual depths sees too few peers, and follows them.
        if len(self._sizes) > 1 and depths:
            usual = median_low(depths)
            if wanted <= self.depth < usual:
                wanted = self.depth + 1
            elif usual < self.depth <= wanted:
                wanted = self.depth - 1
        self.depth = wanted
        if self.rng.random() * self.size < VISITS:
            self._elsewhere.update(d for d, n in counts.items() if n and abs(d - self.depth) > 1)

    def _forget(self) -> None:
        """Drop peers that were not seen lately, and of too many those that were seen longest ago."""
        oldest = self._oldest()
        most = self._max_known if self.depth else MAX_KNOWN
        for rank, peer_id in enumerate(self.latest(len(self.known))):
            if self.known[peer_id].seen < oldest or rank >= most - 1:
                del self.known[peer_id]


def _part(number: int, depth: int) -> str:
    return f"peers/{number:0{depth}b}" if depth else "peers"
