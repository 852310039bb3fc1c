"""Shares the room that a peer gives to notices of other peers, fairly.

Shares are counted by the authors who signed the notices, and not by the connections that bring them. An author has
little room under a key and in all, and displaces its own oldest notice when it needs more. Where a key is full, the
author with the most bytes loses first, so that one identity displaces only itself. A part is reserved for members.
Reports of rounds that are far ahead are refused, so that no author books the future.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from rl_swarm.network.p2p.records import MAX_NOTICE, MAX_OF_AUTHOR_IN_KEY, DhtRecord

MAX_OF_AUTHOR = 64  # notices of one author: an introduction in some parts, a manifest, what an owner writes
MAX_REPORTS_OF_AUTHOR = 8
MAX_KEY_BYTES = 1 << 20  # under one key: it is read whole, and hivemind's messages end at 2 MiB
MAX_BYTES = 32 << 20  # of all notices
STRANGERS = 0.5  # part of both for authors that are no members, as far as this peer knows
TIDY_SECONDS = 5.0  # between looks for what has expired, where there is no room

Place = tuple[bytes, str]  # a key and a subkey


class SwarmView(Protocol):
    """Provides what a peer knows of the swarm that it is in."""

    def is_member(self, peer_id: str) -> bool: ...

    def report_rounds(self) -> range | None:
        """Return the rounds of which reports may lie in the DHT now; None if that is not known."""
        ...


@dataclass(frozen=True)
class Claim:
    """Records a notice that lies here."""

    place: Place
    author: str
    timestamp: float
    expires: float
    size: int
    is_report: bool
    is_member: bool


class DhtQuota:
    """Keeps account of the notices that lie here, and decides which of them have to go."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.swarms = dict[str, SwarmView]()
        self.by_key = dict[bytes, dict[str, Claim]]()
        self.by_author = dict[str, dict[Place, Claim]]()
        self.shares = Counter[str]()  # bytes by author
        self.sizes = Counter[bool]()  # bytes of members and of strangers
        self._tidied = -math.inf
        self.refused = 0  # records since the start

    def admit(self, key: bytes, subkey: str, notice: DhtRecord, size: int, expires: float) -> Iterable[Place] | None:
        """Make room for a notice. Return the places that have to be emptied for it, or None if it is refused."""
        now = self.clock()
        view = self.swarms.get(notice.swarm)
        claim = Claim(
            (key, subkey),
            notice.peer_id,
            notice.timestamp,
            expires,
            size,
            notice.report_round() is not None,
            view is not None and view.is_member(notice.peer_id),
        )
        evicted = None
        # An expiry that is not a number is neither later nor earlier.
        if size <= MAX_NOTICE + 8 and now < expires <= notice.latest_expiry() and _is_now(notice, view):
            evicted = self._displaced(claim, now)
        if evicted is None:
            self.refused += 1
            return None
        for old in evicted:
            self._remove(old)
        self.by_key.setdefault(key, {})[subkey] = claim
        self.by_author.setdefault(claim.author, {})[claim.place] = claim
        self.shares[claim.author] += size
        self.sizes[claim.is_member] += size
        return [old.place for old in evicted if old.place != claim.place]

    def _displaced(self, claim: Claim, now: float) -> list[Claim] | None:
        """Find the notices that go for this one; None if this one is refused."""
        key, subkey = claim.place
        self._expire(self.by_key.get(key, {}).values(), now)
        self._expire(self.by_author.get(claim.author, {}).values(), now)
        before = self.by_key.get(key, {}).get(subkey)
        if before is not None and before.timestamp > claim.timestamp:  # an old one that is shown again
            return None
        gone = [before] if before is not None else []
        under = [kept for kept in self.by_key.get(key, {}).values() if kept is not before]
        own = [kept for kept in self.by_author.get(claim.author, {}).values() if kept is not before]
        for kept, most in (
            ([one for one in own if one.place[0] == key], MAX_OF_AUTHOR_IN_KEY),
            ([one for one in own if one.is_report] if claim.is_report else [], MAX_REPORTS_OF_AUTHOR),
            (own, MAX_OF_AUTHOR),
        ):
            left = [one for one in kept if one not in gone]
            if len(left) >= most:
                oldest = min(left, key=lambda one: (one.timestamp, one.place))
                if oldest.timestamp > claim.timestamp:
                    return None
                gone.append(oldest)
        return gone if self._make_fit(claim, under, gone) and self._make_fit_in_all(claim, gone, now) else None

    def _make_fit(self, claim: Claim, under: Iterable[Claim], gone: list[Claim]) -> bool:
        """Add to `gone` what has to go until the claim fits under its key."""
        staying = [one for one in under if one not in gone]
        shares = Counter[str]({claim.author: claim.size})
        for one in staying:
            shares[one.author] += one.size
        while True:
            strangers = sum(one.size for one in staying if not one.is_member)
            members = sum(one.size for one in staying) - strangers
            if _fits(claim, members, strangers, MAX_KEY_BYTES):
                return True
            losers = [one for one in staying if not one.is_member] or (staying if claim.is_member else [])
            # The largest share first; of that author's notices the oldest.
            loser = max(losers, key=lambda one: (shares[one.author], one.author, -one.timestamp), default=None)
            if loser is None or not _may_displace(claim, loser, shares):
                return False
            staying.remove(loser)
            gone.append(loser)
            shares[loser.author] -= loser.size

    def _make_fit_in_all(self, claim: Claim, gone: list[Claim], now: float) -> bool:
        """Do the same for the whole table. Only its sums are kept, so that a full table costs little."""
        while True:
            freed = Counter[bool]()
            shares = self.shares.copy() if self.shares.total() + claim.size > MAX_BYTES * STRANGERS else None
            for old in gone:
                freed[old.is_member] += old.size
                if shares is not None:
                    shares[old.author] -= old.size
            members, strangers = (self.sizes[kind] - freed[kind] for kind in (True, False))
            if shares is None or _fits(claim, members, strangers, MAX_BYTES):
                return True
            if self._expire_all(now):
                continue
            shares[claim.author] += claim.size
            oldest = {author: next(iter(kept.values())) for author, kept in self.by_author.items()}
            losers = [author for author, one in oldest.items() if not one.is_member and shares[author] > 0]
            if not losers and claim.is_member:
                losers = list(oldest)
            largest = max(losers, key=lambda author: (shares[author], author), default=claim.author)
            theirs = [one for one in self.by_author.get(largest, {}).values() if one not in gone]
            loser = min(theirs, key=lambda one: one.timestamp, default=None)
            if loser is None or largest == claim.author or not _may_displace(claim, loser, shares):
                return False
            gone.append(loser)

    def _expire_all(self, now: float) -> bool:
        """Forget what has expired, now and then; return whether there was anything."""
        if now < self._tidied + TIDY_SECONDS:
            return False
        self._tidied, before = now, len(self.by_author)
        sizes = self.shares.total()
        for theirs in list(self.by_author.values()):
            self._expire(theirs.values(), now)
        return self.shares.total() < sizes or len(self.by_author) < before

    def _expire(self, claims: Iterable[Claim], now: float) -> None:
        for claim in [claim for claim in claims if claim.expires <= now]:
            self._remove(claim)

    def _remove(self, claim: Claim) -> None:
        key, subkey = claim.place
        under, theirs = self.by_key.get(key, {}), self.by_author.get(claim.author, {})
        if under.get(subkey) is claim:
            del under[subkey]
            del theirs[claim.place]
            self.shares[claim.author] -= claim.size
            self.sizes[claim.is_member] -= claim.size
        if not under:
            self.by_key.pop(key, None)
        if not theirs:
            self.by_author.pop(claim.author, None)
            self.shares.pop(claim.author, None)


def _is_now(notice: DhtRecord, view: SwarmView | None) -> bool:
    """Tell whether a report is of a round that is played about now; other documents have no round."""
    number = notice.report_round()
    rounds = view.report_rounds() if view is not None and number is not None else None
    return rounds is None or number in rounds


def _fits(claim: Claim, members: int, strangers: int, most: int) -> bool:
    if claim.is_member:
        return members + strangers + claim.size <= most
    return members + strangers + claim.size <= most and strangers + claim.size <= most * STRANGERS


def _may_displace(claim: Claim, loser: Claim, shares: Counter[str]) -> bool:
    """Tell whether a notice may displace another: one with a larger share, or a member's one of a stranger."""
    if claim.is_member != loser.is_member:
        return claim.is_member
    return _rank(shares[loser.author]) > _rank(shares[claim.author])


def _rank(share: int) -> int:
    """Round a share up to whole notices, so that a smaller notice takes nothing from a larger one."""
    return -(-share // MAX_NOTICE)
