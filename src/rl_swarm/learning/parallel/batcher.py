"""Batches requests of several threads that arrive at about the same time: one thread runs the batch for all.

The first thread to ask runs the batch. It waits as long as requests keep arriving, and runs those of the same kind.
It hands out the results as they are made, its own last. The thread with the first result gets a head
start: the device waits for what that thread does next, and threads that wake together delay each other. Requests that
arrive meanwhile form the next batch. Two batches take almost twice as long as one, so the pause grows with the time
that the last batch took.
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

MIN_PAUSE, MAX_PAUSE = 0.005, 0.2  # seconds without a new request, after which the batch runs
PAUSE_SHARE = 0.2  # of the time that the last batch took
HEAD_START = 0.005  # seconds


@dataclass(eq=False)
class PendingRequest(Generic[Order, Result]):
    member: object
    kind: Hashable
    order: Order
    result: Result | None = None
    error: BaseException | None = None
    done: bool = False


class DynamicBatcher(Generic[Order, Result]):
    def __init__(self, serve: Callable[[Hashable, list[Order]], Iterable[Result]], waits: bool = True) -> None:
        self.serve, self.waits = serve, waits  # for requests of other members
        self.members = set[object]()  # that have asked and were not removed
        self.waiting = list[PendingRequest[Order, Result]]()
        self.busy = False
        self.pause = MIN_PAUSE
        self.changed = threading.Condition()

    def submit(self, member: object, kind: Hashable, order: Order) -> Result:
        """Return the result of this order. An error is raised in all threads of its batch."""
        mine = PendingRequest[Order, Result](member, kind, order)
        with self.changed:
            self.members.add(member)
            self.waiting.append(mine)
            self.changed.notify_all()
            self.changed.wait_for(lambda: mine.done or not self.busy)
            if not mine.done:
                self.busy = True
                self._wait_for_requests()
        if not mine.done:
            self._run_batch(mine)
        if mine.error is not None:
            raise mine.error
        return mine.result  # type: ignore[return-value]

    @contextmanager
    def removing(self, member: object) -> Iterator[None]:
        """Stop waiting for a member. No batch runs while this lasts."""
        with self.changed:
            self.changed.wait_for(lambda: not self.busy)
            self.members.discard(member)
            self.busy = True
        try:
            yield
        finally:
            self._free()

    def _wait_for_requests(self) -> None:
        seen = 0
        while self.waits and seen < len(self.waiting) < len(self.members):
            seen = len(self.waiting)
            self.changed.wait_for(lambda seen=seen: len(self.waiting) > seen, self.pause)  # type: ignore[misc]

    def _run_batch(self, mine: PendingRequest[Order, Result]) -> None:
        with self.changed:
            by_member = {request.member: request for request in reversed(self.waiting) if request.kind == mine.kind}
            batch = [*(request for member, request in by_member.items() if member != mine.member), mine]
            self.waiting = [request for request in self.waiting if request not in batch]
        started = time.monotonic()
        try:
            results = self.serve(mine.kind, [request.order for request in batch])
            for request, result in zip(batch, results, strict=True):
                request.result = result
                self._finish(request)
                if request is batch[0] and request is not mine:
                    time.sleep(HEAD_START)
        except BaseException as error:  # noqa: BLE001 raised by `submit`, as a copy in every thread
            for request in batch:
                if not request.done:
                    request.error = error if request is mine else _copied(error)
                    self._finish(request)
        finally:
            took = time.monotonic() - started
            self.pause = min(max(MIN_PAUSE, PAUSE_SHARE * took), MAX_PAUSE)
            self._free()

    def _finish(self, request: PendingRequest[Order, Result]) -> None:
        with self.changed:
            request.done = True
            self.changed.notify_all()

    def _free(self) -> None:
        with self.changed:
            self.busy = False
            self.changed.notify_all()


def _copied(error: BaseException) -> BaseException:
    """Copy an error for another thread, with a traceback of its own."""
    try:
        return copy.copy(error)
    except TypeError:  # its constructor takes other arguments
        return RuntimeError(f"{type(error).__name__}: {error}")
