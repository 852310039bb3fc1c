"""Remembers how much time the peers of the table cost, so that a slow one holds nobody up twice.

A peer runs up a debt when it answers much later than the quickest third, tells of peers that do not answer, or sends
records
that nobody signed. Debts shrink slowly. Who owes too much is not asked, as long as there are others.
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
LIE = 0.5  # seconds that it costs to tell of a peer that does not answer
ENOUGH = 2  # others that have to be there for one to be left out
MAX_WAITING = 4  # answers of a peer that are outstanding, until it is not asked for more
MAX_PEERS = 1024  # that are remembered


class Reliability:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.took = dict[Any, float]()  # seconds of the last answer, by peer; who answered last comes last
        self._waiting = Counter[Any]()  # answers that are outstanding, by peer
        self._debts = dict[Any, tuple[float, float]]()  # by peer: how much, and when
        self._told_by = dict[Any, Any]()  # peers that never answered, and who told of them

    def answers(self, peer: Any) -> bool:
        """Tells whether a peer has answered, the last time that it was asked."""
        return peer in self.took

    def is_left_out(self, peer: Any) -> bool:
        if not self._is_slow(peer):
            return False
        others = [other for other in list(self.took) if other != peer and not self._is_slow(other)]
        return len(others) >= ENOUGH

    def _is_slow(self, peer: Any) -> bool:
        return self._debt(peer) > MAX_DEBT or self._waiting[peer] >= MAX_WAITING

    async def ask(self, peer: Any, question: Awaitable[T]) -> T | None:
        """Waits for a peer's answer and notes how long it took. A question that is given up was not answered."""
        began, answer = self.clock(), None
        self._waiting[peer] += 1
        try:
            answer = await question
        finally:
            self._waiting[peer] -= 1
            if self._waiting[peer] <= 0:
                del self._waiting[peer]
            self.asked(peer, self.clock() - began, bool(answer))
        return answer

    def asked(self, peer: Any, seconds: float, answered: bool) -> None:
        """Notes how long a peer took, and whether it answered."""
        late = seconds - max(FREE_SECONDS, FREE_TIMES * self.usual())
        self.took.pop(peer, None)
        teller = self._told_by.pop(peer, None)
        if answered:
            self.took[peer] = seconds
            _forget(self.took)
        else:  # what it sent cannot be read, or it has gone, perhaps for a moment
            self.blame(peer, FAILED, MAX_DEBT + FAILED)
            if teller is not None:
                self.blame(teller, LIE)
        if late > 0:
            self.blame(peer, late)

    def told(self, teller: Any, peers: Any) -> None:
        """Notes who told of peers that have not answered yet."""
        for peer in peers:
            if peer not in self.took:
                self._told_by.setdefault(peer, teller)
        _forget(self._told_by)

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
        """Says how long the quickest third takes. On a busy machine everybody takes long."""
        took = sorted(self.took.values())
        return took[len(took) // 3] if took else 0.0


def _forget(kept: dict[Any, Any]) -> None:
    while len(kept) > MAX_PEERS:
        del kept[next(iter(kept))]
