"""Batches threads that want the same work at about the same time: one of them does it for all.

The first to come leads. It waits as long as others keep coming, takes along all who want what it wants, does the
work, and hands out the results as they are made, its own at last. The first to get one has a head start: the device
waits for what it does next, and threads that all go on at once hold each other up. Those who come meanwhile are the
next party. Two parties take almost twice as long as one, so the longer the work took last time, the longer others are
waited for.
"""

import copy
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

Order = TypeVar("Order")
Result = TypeVar("Result")

LEAST_PAUSE, MAX_PAUSE = 0.005, 0.2  # seconds without a newcomer, after which nobody is waited for
PAUSE_SHARE = 0.2  # of the time that the last party took
HEAD_START = 0.005  # seconds


@dataclass(eq=False)
class Ticket(Generic[Order, Result]):
    who: object
    kind: Hashable
    order: Order
    result: Result | None = None
    error: BaseException | None = None
    done: bool = False


class DynamicBatcher(Generic[Order, Result]):
    def __init__(self, serve: Callable[[Hashable, list[Order]], Iterable[Result]], waits: bool = True) -> None:
        self.serve, self.waits = serve, waits  # for others
        self.members = set[object]()  # all who have asked and not left
        self.waiting = list[Ticket[Order, Result]]()
        self.busy = False
        self.pause = LEAST_PAUSE
        self.changed = threading.Condition()

    def ask(self, who: object, kind: Hashable, order: Order) -> Result:
        """The result of this order. An error is raised in all threads of a party."""
        mine = Ticket[Order, Result](who, kind, order)
        with self.changed:
            self.members.add(who)
            self.waiting.append(mine)
            self.changed.notify_all()
            self.changed.wait_for(lambda: mine.done or not self.busy)
            if not mine.done:
                self.busy = True
                self._wait_for_others()
        if not mine.done:
            self._lead(mine)
        if mine.error is not None:
            raise mine.error
        return mine.result  # type: ignore[return-value]

    @contextmanager
    def left(self, who: object) -> Iterator[None]:
        """Somebody is no longer waited for. While this lasts nobody is served."""
        with self.changed:
            self.changed.wait_for(lambda: not self.busy)
            self.members.discard(who)
            self.busy = True
        try:
            yield
        finally:
            self._free()

    def _wait_for_others(self) -> None:
        seen = 0
        while self.waits and seen < len(self.waiting) < len(self.members):
            seen = len(self.waiting)
            self.changed.wait_for(lambda seen=seen: len(self.waiting) > seen, self.pause)  # type: ignore[misc]

    def _lead(self, mine: Ticket[Order, Result]) -> None:
        with self.changed:
            by_member = {ticket.who: ticket for ticket in reversed(self.waiting) if ticket.kind == mine.kind}
            party = [*(ticket for who, ticket in by_member.items() if who != mine.who), mine]
            self.waiting = [ticket for ticket in self.waiting if ticket not in party]
        started = time.monotonic()
        try:
            for ticket, result in zip(party, self.serve(mine.kind, [t.order for t in party]), strict=True):
                ticket.result = result
                self._hand_out(ticket)
                if ticket is party[0] and ticket is not mine:
                    time.sleep(HEAD_START)
        except BaseException as error:  # noqa: BLE001 raised by `ask`, in every thread one of its own
            for ticket in party:
                if not ticket.done:
                    ticket.error = error if ticket is mine else another(error)
                    self._hand_out(ticket)
        finally:
            took = time.monotonic() - started
            self.pause = min(max(LEAST_PAUSE, PAUSE_SHARE * took), MAX_PAUSE)
            self._free()

    def _hand_out(self, ticket: Ticket[Order, Result]) -> None:
        with self.changed:
            ticket.done = True
            self.changed.notify_all()

    def _free(self) -> None:
        with self.changed:
            self.busy = False
            self.changed.notify_all()


def another(error: BaseException) -> BaseException:
    """The same error for another thread, with a traceback of its own."""
    try:
        return copy.copy(error)
    except TypeError:  # one that is made in an unusual way
        return RuntimeError(f"{type(error).__name__}: {error}")
