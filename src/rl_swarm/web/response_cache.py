"""Computes a response once when many clients want it at the same time."""

import asyncio
import gzip
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

CACHE_SECONDS = 1.0
MAX_CACHED = 200  # answers
LARGEST_CACHED = 1 << 18  # bytes; larger responses are not cached
SMALLEST_PACKED = 1 << 12  # bytes

Key = tuple[int, str, bytes]  # version of the swarm, path and query


@dataclass(frozen=True)
class CachedResponse:
    start: Message
    body: bytes
    packed: bool  # with gzip
    until: float

    def messages(self, takes_gzip: bool) -> list[Message]:
        """Return the messages of the response. Middleware adds headers to them, hence a new list each time."""
        headers, body = list(self.start["headers"]), self.body
        if self.packed:
            headers.append((b"vary", b"Accept-Encoding"))
        if self.packed and takes_gzip:
            headers = [(name, value) for name, value in headers if name != b"content-length"]
            headers += [(b"content-encoding", b"gzip"), (b"content-length", str(len(body)).encode())]
        elif self.packed:
            body = gzip.decompress(body)
        return [{**self.start, "headers": headers}, {"type": "http.response.body", "body": body}]


class ResponseCache:
    def __init__(self, app: ASGIApp, version: Callable[[], int]) -> None:
        self.app, self.version = app, version
        self.made: dict[Key, asyncio.Task[CachedResponse]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        asks = scope["type"] == "http" and scope["method"] == "GET" and path.startswith("/api/")
        if not asks or path == "/api/stream":  # which has no end
            await self.app(scope, receive, send)
            return
        answer = await asyncio.shield(self._wanted((self.version(), path, scope["query_string"]), scope))
        for message in answer.messages(_takes_gzip(scope)):
            await send(message)

    def _wanted(self, key: Key, scope: Scope) -> "asyncio.Task[CachedResponse]":
        """Return the cached or pending response, or start a new one."""
        if key not in self.made or _is_old(self.made[key]):
            self.made = {k: task for k, task in self.made.items() if not _is_old(task)}
            for oldest in list(self.made)[: max(0, len(self.made) + 1 - MAX_CACHED)]:
                del self.made[oldest]
            self.made[key] = asyncio.create_task(self._make(scope))
        return self.made[key]

    async def _make(self, scope: Scope) -> CachedResponse:
        """Ask the application. The first client may hang up: others wait for this response too."""
        messages: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def collect(message: Message) -> None:
            messages.append(message)

        await self.app(scope, receive, collect)
        body = b"".join(message.get("body", b"") for message in messages[1:])
        packed = len(body) >= SMALLEST_PACKED
        if packed:
            body = await asyncio.to_thread(gzip.compress, body, 1)
        keep = CACHE_SECONDS if len(body) <= LARGEST_CACHED else 0.0
        return CachedResponse(messages[0], body, packed, time.monotonic() + keep)


def _takes_gzip(scope: Scope) -> bool:
    return any(name == b"accept-encoding" and b"gzip" in value for name, value in scope["headers"])


def _is_old(task: "asyncio.Task[CachedResponse]") -> bool:
    if not task.done():
        return False
    return task.cancelled() or task.exception() is not None or time.monotonic() >= task.result().until
