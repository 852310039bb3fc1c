"""Sends browsers an event when something changed: one poll of the swarm for all listeners (server-sent events)."""

import asyncio
from collections.abc import AsyncIterator

from fastapi import APIRouter
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from rl_swarm.monitor.follower import PAUSE_SECONDS, Poller

PATH = "/api/stream"
# A listener that is notified requests data, so they are notified a few at a time, so many seconds apart.
AT_A_TIME, APART = 4, 0.02


class Stream:
    """Polls while there are listeners, and does nothing while there are none."""

    def __init__(self, follower: Poller) -> None:
        self.follower = follower
        self.listeners: set[asyncio.Event] = set()
        self.closing = False  # listeners are told, and read once more what there is
        self.closed = False  # set from any thread; listeners end within a second
        self._loop: asyncio.AbstractEventLoop | None = None
        self._polling: asyncio.Task[None] | None = None

    def router(self) -> APIRouter:
        router = APIRouter()
        full: dict[int | str, dict[str, object]] = {429: {"description": "Too many event streams."}}
        router.get(PATH, response_class=EventSourceResponse, responses=full)(self.changes)
        return router

    async def changes(self) -> AsyncIterator[ServerSentEvent]:
        """Yield an event `changed`, with the number of the version, whenever there is something new to read; at last
        `closing`."""
        self._loop = asyncio.get_running_loop()
        changed = asyncio.Event()
        changed.set()
        self.listeners.add(changed)
        if not self.is_polling:
            self._polling = asyncio.create_task(self._poll())
        try:
            while not self.closed:
                await changed.wait()
                changed.clear()
                yield ServerSentEvent(event="closing" if self.closing else "changed", data=self.follower.version)
        finally:
            self.listeners.discard(changed)

    def announce_end(self) -> bool:
        """Tell the listeners, from any thread, that the server is about to close; return whether there are any."""
        if self._loop is None or not self.listeners:
            return False
        self.follower.poll_now()
        self.closing = True
        for listener in list(self.listeners):
            self._loop.call_soon_threadsafe(listener.set)
        return True

    @property
    def is_polling(self) -> bool:
        """Return whether the stream polls the swarm by itself."""
        return self._polling is not None and not self._polling.done()

    def catch_up(self) -> None:
        """Poll now, unless the last poll was a second or two ago at most."""
        if not self.is_polling or not self.follower.version:
            self.follower.poll()

    async def _notify(self) -> None:
        for number, listener in enumerate(list(self.listeners), 1):
            listener.set()
            if number % AT_A_TIME == 0 and not self.closed:
                await asyncio.sleep(APART)

    async def _poll(self) -> None:
        notified = self.follower.version
        while self.listeners and not self.closed:
            version = await run_in_threadpool(self.follower.poll)
            if version != notified:  # by this poll, or by one of a request
                notified = version
                await self._notify()
            await asyncio.sleep(PAUSE_SECONDS)
        for listener in self.listeners:
            listener.set()
