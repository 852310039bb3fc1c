"""Tells browsers that something changed: one look at the swarm for all listeners (server-sent events)."""

import asyncio
from collections.abc import AsyncIterator

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from rl_swarm.monitor.follower import PAUSE_SECONDS, Looking

PATH = "/api/stream"
ALIVE_SECONDS = 15.0  # between signs of life to those who hear nothing
# Who is told asks for a page, so not all are told at once: so many, and after so many seconds the next.
AT_A_TIME, APART = 4, 0.02


class Stream:
    """Looks while somebody listens, and at nothing while nobody does."""

    def __init__(self, follower: Looking) -> None:
        self.follower = follower
        self.listeners: set[asyncio.Event] = set()
        self.closed = False  # set from any thread: listeners are let go within a second
        self._looking: asyncio.Task[None] | None = None

    def router(self) -> APIRouter:
        router = APIRouter()

        @router.get(
            PATH,
            response_class=StreamingResponse,
            responses={200: {"content": {"text/event-stream": {}}}, 429: {"description": "Too many listen."}},
        )
        def changes() -> StreamingResponse:
            """An event `changed` whenever there is something new to read, with the number of the version."""
            return StreamingResponse(self.listen(), media_type="text/event-stream")

        return router

    async def listen(self) -> AsyncIterator[str]:
        changed = asyncio.Event()
        changed.set()
        self.listeners.add(changed)
        if not self.looks:
            self._looking = asyncio.create_task(self._look())
        try:
            while not self.closed:
                try:
                    await asyncio.wait_for(changed.wait(), ALIVE_SECONDS)
                except asyncio.TimeoutError:
                    yield ": still here\n\n"
                    continue
                changed.clear()
                yield f"event: changed\ndata: {self.follower.version}\n\n"
        finally:
            self.listeners.discard(changed)

    @property
    def looks(self) -> bool:
        """Whether the swarm is being looked at without anybody asking."""
        return self._looking is not None and not self._looking.done()

    async def _tell(self) -> None:
        for number, listener in enumerate(list(self.listeners), 1):
            listener.set()
            if number % AT_A_TIME == 0 and not self.closed:
                await asyncio.sleep(APART)

    async def _look(self) -> None:
        told = self.follower.version
        while self.listeners and not self.closed:
            version = await run_in_threadpool(self.follower.look)
            if version != told:  # by this look, or by somebody's who asked for a page
                told = version
                await self._tell()
            await asyncio.sleep(PAUSE_SECONDS)
        for listener in self.listeners:
            listener.set()
