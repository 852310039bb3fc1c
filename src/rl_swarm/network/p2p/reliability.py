"""Remembers how much time the peers of the DHT cost, so that a slow one delays no node twice.

A peer runs up a debt when it answers much later than the quickest third, names peers that do not answer, or sends
records without a valid signature. Debts shrink slowly. A peer that owes too much is not asked, as long as there are
others.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

FREE_SECONDS, FREE_TIMES = 0.5, 4.0  # by which an answer may be late, at least, and beside the quickest third
MAX_DEBT = 2.0  # seconds; beyond it a peer is not asked
WORST_DEBT = 12.0
PAID_RATE = 0.02  # by which a debt shrinks, per second
FAILED = 0.2  # seconds that it costs not to answer
LIE = 0.5  # seconds that it costs to name a peer that does not answer
ENOUGH = 2  # other peers that have to be there for one to be left out
MAX_WAITING = 4  # answers of a peer that are outstanding, until it is not asked for more
MAX_PEERS = 1024  # that are remembered


class Reliability:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.took = dict[Any, float]()  # seconds of the last answer, by peer; the latest last
        self._waiting = Counter[Any]()  # answers that are outstanding, by peer
        self._debts = dict[Any, tuple[float, float]]()  # by peer: how much, and when
        self._named_by = dict[Any, Any]()  # peers that never answered, and the peer that named each

    def answers(self, peer: Any) -> bool:
        """Tell whether a peer answered the last time that it was asked."""
        return peer in self.took

    def is_left_out(self, peer: Any) -> bool:
        if not self._is_slow(peer):
            return False
        others = [other for other in list(self.took) if other != peer and not self._is_slow(other)]
        return len(others) >= ENOUGH

    def _is_slow(self, peer: Any) -> bool:
        return self._debt(peer) > MAX_DEBT or self._waiting[peer] >= MAX_WAITING

    async def ask(self, peer: Any, question: Awaitable[T]) -> T | None:
        """Wait for a peer's answer and record how long it took. A cancelled question counts as not answered."""
        began, answer = self.clock(), None
        self._waiting[peer] += 1
        try:
            answer = await question
        finally:
            self._waiting[peer] -= 1
            if self._waiting[peer] <= 0:
                del self._waiting[peer]
            self.record_answer(peer, self.clock() - began, bool(answer))
        return answer

    def record_answer(self, peer: Any, seconds: float, answered: bool) -> None:
        """Record how long a peer took, and whether it answered."""
        late = seconds - max(FREE_SECONDS, FREE_TIMES * self.usual())
        self.took.pop(peer, None)
        source = self._named_by.pop(peer, None)
        if answered:
            self.took[peer] = seconds
            _forget(self.took)
        else:  # what it sent cannot be read, or it has gone, perhaps for a moment
            self.blame(peer, FAILED, MAX_DEBT + FAILED)
            if source is not None:
                self.blame(source, LIE)
        if late > 0:
            self.blame(peer, late)

    def record_named(self, source: Any, peers: Any) -> None:
        """Record which peer named peers that have not answered yet."""
        for peer in peers:
            if peer not in self.took:
                self._named_by.setdefault(peer, source)
        _forget(self._named_by)

    def blame(self, peer: Any, seconds: float, most: float = WORST_DEBT) -> None:
        before = self._debt(peer)
        debt = max(before, min(before + seconds, most))
        self._debts.pop(peer, None)
        self._debts[peer] = debt, self.clock()
        _forget(self._debts)

    def _debt(self, peer: Any) -> float:
        debt, since = self._debts.get(peer, (0.0, 0.0))
        return max(0.0, debt - PAID_RATE * (self.clock() - since))

    def usual(self) -> float:
        """Return how long the quickest third takes: on a busy machine all peers take long."""
        took = sorted(self.took.values())
        return took[len(took) // 3] if took else 0.0


def _forget(by_peer: dict[Any, Any]) -> None:
    while len(by_peer) > MAX_PEERS:
        del by_peer[next(iter(by_peer))]
