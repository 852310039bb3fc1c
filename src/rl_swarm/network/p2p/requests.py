"""Shares the work that a peer does for the table, fairly: every request costs its sender.

A request is refused before it is read when it is longer than any node's, or when its sender has used up its budget. A
budget is counted in kilobytes received and pages sent, and grows again with time. Members have a large one. Strangers
share one, so that many identities get no more work done than a few.
"""

import asyncio
import io
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

# Bytes of a request, by what it asks for. One key is looked up at a time; a store may hand on many records.
MAX_BYTES = {"rpc_ping": 128, "rpc_find": 128, "rpc_store": 2 << 20}
STRANGERS_STORE = 64 << 10
MEMBER_RATE, STRANGER_RATE = 1024.0, 128.0  # units per second
STRANGERS_RATE = 1024.0  # of all together
BURST_SECONDS = 4.0  # for which a budget is saved up
UNIT_IN, UNIT_OUT = 1 << 10, 4 << 10  # bytes of a request and of an answer that cost a unit
ACTIVE_SECONDS = 10.0  # after its last request in which a stranger shares the strangers' budget
MAX_REFUSED = 256  # requests in a row, until a peer is disconnected
MAX_PEERS = 4096  # whose budgets are kept

Handler = Callable[[bytes, Any], Awaitable[bytes]]


class RequestRefused(Exception):
    """Reports a request that is not worked on."""


@dataclass
class Budget:
    left: float
    at: float  # when that was
    refused: int = 0


class Requests:
    """Decides which requests are worked on."""

    def __init__(self, is_member: Callable[[str], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self.is_member, self.clock = is_member, clock
        self.open = False  # until the protocol is guarded against misuse
        self.budgets = dict[str, Budget]()  # the latest sender last

    def bounded(self, name: str, handler: Handler, disconnect: Callable[[Any], Awaitable[None]]) -> Handler:
        """Wrap a handler of hivemind's."""
        kind = name.rpartition(".")[2]

        async def handle(data: bytes, peer: Any) -> bytes:
            peer_id = str(peer)
            budget = self._budget(peer_id)
            if not self._may(kind, peer_id, len(data), budget):
                budget.refused += 1
                if budget.refused >= MAX_REFUSED:
                    budget.refused = 0
                    await disconnect(peer)
                raise RequestRefused("too much is asked")
            budget.refused = 0
            budget.left -= 1 + len(data) / UNIT_IN
            answer = await handler(data, peer)
            budget.left -= len(answer) / UNIT_OUT
            return answer

        return handle

    def _may(self, kind: str, peer_id: str, size: int, budget: Budget) -> bool:
        most = MAX_BYTES.get(kind, 0)
        if kind == "rpc_store" and not self.is_member(peer_id):
            most = STRANGERS_STORE
        return self.open and size <= most and budget.left > 0

    def _budget(self, peer_id: str) -> Budget:
        now = self.clock()
        budget = self.budgets.pop(peer_id, None)
        rate = MEMBER_RATE
        if not self.is_member(peer_id):
            recent = takewhile(lambda other: other.at > now - ACTIVE_SECONDS, reversed(self.budgets.values()))
            active = 1 + sum(1 for _ in recent)
            rate = min(STRANGER_RATE, STRANGERS_RATE / active)
        if budget is None:
            budget = Budget(rate * BURST_SECONDS, now)
        budget.left = min(rate * BURST_SECONDS, budget.left + rate * (now - budget.at))
        budget.at = now
        self.budgets[peer_id] = budget
        while len(self.budgets) > MAX_PEERS:
            del self.budgets[next(iter(self.budgets))]
        return budget


class BoundedHandlers(dict[str, Handler]):
    """Stands for the table of a daemon's handlers, and bounds each one that is registered."""

    def __init__(self, requests: Requests, disconnect: Callable[[Any], Awaitable[None]]) -> None:
        super().__init__()
        self.requests, self.disconnect = requests, disconnect

    def __setitem__(self, name: str, handler: Handler) -> None:
        super().__setitem__(name, self.requests.bounded(name, handler, self.disconnect))


class PendingCalls(dict[Any, Any]):
    """Stands for the table of calls that wait for an answer.

    A call that was given up is not among them: to answer it would end the task that reads all answers.
    """

    def __contains__(self, call: object) -> bool:
        future = self.get(call)
        return future is not None and not future.done()


async def write_message(stream: asyncio.StreamWriter, message: Any) -> None:
    """Write a message to the daemon at once. hivemind writes every byte of its length separately, and each of them
    wakes the daemon."""
    from google.protobuf.proto import serialize_length_prefixed

    data = io.BytesIO()
    serialize_length_prefixed(message, data)
    stream.write(data.getvalue())
    await stream.drain()
