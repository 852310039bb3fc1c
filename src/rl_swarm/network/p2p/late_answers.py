"""Collects late answers: a node waits a moment, and takes a late answer when it asks again.

In a round every node asks a few peers one after the other. If it waited for each of them, one slow peer would delay
all nodes, and with them the round.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate

Ask = Callable[[str, bytes, int], bytes | None]

MOMENT_SECONDS = 1.0  # for an answer to be waited for
LATE_SECONDS = 0.1  # of a peer whose last answer took longer
MAX_PENDING = 32  # requests that wait for their answers, one of a peer
MAX_LATE = 1024  # peers whose last answer took long


class LateAnswers:
    """Asks peers in threads of its own, and keeps an answer until it is asked for again."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._pool = ThreadPoolExecutor(MAX_PENDING, thread_name_prefix="ask")
        self._pending = dict[str, tuple[bytes, Future[bytes | None]]]()
        self.late = dict[str, None]()  # peers whose last answer took longer than a moment

    def ask(self, peer_id: str, request: bytes, limit: int) -> bytes | None:
        """Return a peer's answer within a moment, or its late answer to the same request; else raise
        `TimeoutError`."""
        asked, answer = self._pending.get(peer_id, (b"", None))
        if answer is None or (asked != request and answer.done()):
            if answer is None and len(self._pending) >= MAX_PENDING:
                self._forget()
            answer = self._pool.submit(self._timed, peer_id, request, limit)
            self._pending[peer_id] = (request, answer)
        elif asked != request:
            raise TimeoutError(f"{peer_id} has not answered the last request yet")
        try:
            return answer.result(LATE_SECONDS if peer_id in self.late else MOMENT_SECONDS)
        except TooLate as error:
            if answer.done():
                raise
            raise TimeoutError(f"{peer_id} has not answered yet") from error
        finally:
            if answer.done():
                self._pending.pop(peer_id, None)

    def close(self) -> None:
        """Cancel what waits for answers."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _timed(self, peer_id: str, request: bytes, limit: int) -> bytes | None:
        started = time.monotonic()
        try:
            answer = self._ask(peer_id, request, limit)
        except OSError:
            self._note(peer_id, late=True)
            raise
        self._note(peer_id, late=time.monotonic() - started > MOMENT_SECONDS)
        return answer

    def _note(self, peer_id: str, late: bool) -> None:
        self.late.pop(peer_id, None)
        if late:
            self.late[peer_id] = None
            if len(self.late) > MAX_LATE:
                self.late.pop(next(iter(self.late)), None)

    def _forget(self) -> None:
        """Make room: drop late answers that were not asked for again."""
        done = [peer_id for peer_id, (_, answer) in self._pending.items() if answer.done()]
        if not done:
            raise TimeoutError("too many peers have not answered yet")
        for peer_id in done:
            self._pending.pop(peer_id, None)
