"""Limits connections: from where, how many, and for how long, before a request is read.

A client has a deadline for the head of a request, for its body, and for taking the response. There are as many
connections as the process has file descriptors for. An address may have half of them; when all are taken, the address
with the most loses one. So an address with many connections locks no other one out. Event streams last, and have a
quota of their own.
"""

import asyncio
import ipaddress
from collections import Counter, defaultdict
from contextlib import suppress
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rl_swarm.web.stream import PATH as STREAM

HEAD_SECONDS = 10.0  # from the connection, or the end of the last response, to the end of the next head
BODY_SECONDS = 20.0  # from there to the end of the body
IDLE_SECONDS = 5  # without a byte, after a response
WRITE_SECONDS, WRITE_BYTES = (30.0, 64 << 10)  # a client takes so many waiting bytes in that time, or all of them
MAX_HEAD, MAX_REQUEST = 64 << 10, 1 << 20  # bytes
MAX_PIPELINED = 16  # requests of a connection that wait for an earlier one

MAX_CONNECTIONS = 2000
WANTED_FILES = 4096
BACKLOG = 64  # connections accepted at once, before any is counted
OWN_FILES = 32  # reserved at least, for reading the swarm

RESPONSE = "HTTP/1.1 {}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
LATE, TOO_LARGE, FULL = (
    RESPONSE.format(status).encode()
    for status in ("408 Request Timeout", "431 Request Header Fields Too Large", "503 Service Unavailable")
)


def file_limit() -> int:
    try:
        import resource
    except ImportError:  # not a Unix
        return WANTED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    wanted = WANTED_FILES if hard == infinite else min(WANTED_FILES, hard)
    if soft != infinite and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return WANTED_FILES if soft == infinite else soft


def max_connections() -> int:
    """Return how many connections there are file descriptors for, beside those that the process needs itself."""
    files = file_limit()
    return max(8, min(MAX_CONNECTIONS, files - max(BACKLOG + OWN_FILES, files // 4)))


def source_of(address: str) -> str:
    """Return the source of a client: its address, or the network that an IPv6 address is chosen from."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # no IP address, such as that of a Unix socket
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))


class ConnectionQuota:
    """Counts connections by source: one source gets at most half of them."""

    def __init__(self, most: int) -> None:
        self.most, self.most_each = most, max(1, most // 2)
        self.counts: Counter[str] = Counter()

    def free_for(self, source: str) -> bool:
        return self.counts.total() < self.most and self.counts[source] < self.most_each

    def take(self, source: str) -> None:
        self.counts[source] += 1

    def give_back(self, source: str) -> None:
        self.counts[source] -= 1
        if not self.counts[source]:
            del self.counts[source]


class Connections:
    """Holds all open connections, the oldest of a source first."""

    def __init__(self, most: int) -> None:
        self.quota = ConnectionQuota(most)
        self._open: dict[str, dict[BoundedProtocol, None]] = defaultdict(dict)

    def admit(self, connection: "BoundedProtocol", source: str) -> bool:
        counts = self.quota.counts
        if not self.quota.free_for(source):
            most = max(counts, key=lambda each: counts[each])
            if counts[source] >= self.quota.most_each or counts[source] + 1 >= counts[most]:
                return False
            oldest = next((each for each in self._open[most] if each.waits_for), next(iter(self._open[most])))
            self.release(oldest, most)
            oldest.drop()
        self.quota.take(source)
        self._open[source][connection] = None
        return True

    def release(self, connection: "BoundedProtocol", source: str) -> None:
        if connection not in self._open.get(source, ()):
            return
        self.quota.give_back(source)
        del self._open[source][connection]
        if not self._open[source]:
            del self._open[source]


class BoundedStreams:
    """Bounds event streams, which last as long as a client likes: half of all connections, and half of those for one
    source."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app, self.quota = app, ConnectionQuota(most)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith(STREAM):
            await self.app(scope, receive, send)
            return
        source = source_of(scope["client"][0] if scope["client"] else "")
        if not self.quota.free_for(source):
            await JSONResponse({"detail": "Too many event streams already."}, 429)(scope, receive, send)
            return
        self.quota.take(source)
        try:
            await self.app(scope, receive, send)
        finally:
            self.quota.give_back(source)


class BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Extends uvicorn's protocol by a deadline for everything that a client has to do."""

    among: Connections

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.source, self.admitted = "", False
        self.waits_for = ""  # "head", "body" or nothing
        self._request: object = None
        self._cycles: list[Any] = []  # requests that are under way
        self._received = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        peer = transport.get_extra_info("peername")
        self.source = source_of(str(peer[0]) if peer else "")
        self.admitted = self.among.admit(self, self.source)
        if not self.admitted:
            transport.write(FULL)
            transport.close()
            return
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` is called for every byte that waits
        super().connection_made(transport)
        self._set_deadline()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._cycles = [*(cycle for cycle in self._cycles if not cycle.response_complete), self.cycle]

    def drop(self) -> None:
        """Let the client go, whatever it waits for."""
        self._disconnect()
        self.transport.abort()

    def _disconnect(self) -> None:
        """Tell every request that its client has gone: uvicorn tells the last one, and an event stream before it would
        stay."""
        getattr(self, "pipeline", []).clear()
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._disconnect()
        for timer in (self._deadline, self._writing):
            if timer:
                timer.cancel()
        self.among.release(self, self.source)
        if self.admitted:
            super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_deadline(len(data))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        if self._writing:
            self._writing.cancel()
        super().resume_writing()

    def _set_deadline(self, received: int = 0) -> None:
        """Start the clock when the client's next step changes, and count the bytes that it sends for it."""
        if self.transport.is_closing():
            return
        done = self.cycle is None or self.cycle.response_complete
        waits_for = "body" if self.cycle and self.cycle.more_body else "head" if done else ""
        if (waits_for, self.cycle) != (self.waits_for, self._request) or self._deadline is None:
            self.waits_for, self._request, self._received = waits_for, self.cycle, 0
            if self._deadline:
                self._deadline.cancel()
            seconds = HEAD_SECONDS if waits_for == "head" else BODY_SECONDS
            self._deadline = self.loop.call_later(seconds, self._late)
        self._received += received
        most = MAX_HEAD if waits_for == "head" else MAX_REQUEST
        if self._received > most or len(getattr(self, "pipeline", ())) > MAX_PIPELINED:
            self._end(TOO_LARGE)

    def _late(self) -> None:
        if self.waits_for:
            self._end(LATE)

    def _end(self, response: bytes) -> None:
        """Send an error if no response has begun, and close."""
        if not self.transport.is_closing() and (self.cycle is None or not self.cycle.response_started):
            self.transport.write(response)
            self.transport.close()
        if self.transport.get_write_buffer_size() or not self.transport.is_closing():
            self.transport.abort()
        self._disconnect()

    def _watch_writing(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._writing = self.loop.call_later(WRITE_SECONDS, self._check_writing, waiting)

    def _check_writing(self, before: int) -> None:
        if self.transport.get_write_buffer_size() > before - WRITE_BYTES:
            self.drop()
        else:
            self._watch_writing()


def bounded_protocol(most: int) -> type[BoundedProtocol]:
    """Create the protocol of a server that has so many connections."""
    return type("Protocol", (BoundedProtocol,), {"among": Connections(most)})
