"""Serves the other runs of the folder, each under `run/<name>/`, as if it were the one that is watched."""

import re
from collections import OrderedDict
from collections.abc import Callable

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.runs import Runs

MAX_OPEN = 4  # each may have a scoring process
PATH = re.compile(r"/run/([^/]{1,255})(/.*)")


class RunRouter:
    """Routes requests for another run to an application of its own; passes on all others."""

    def __init__(self, app: ASGIApp, runs: Runs, make: Callable[[Follower], FastAPI]) -> None:
        self.app, self.runs, self.make = app, runs, make
        self.open: OrderedDict[str, FastAPI] = OrderedDict()
        runs.closing.append(self.close)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if asked is None:
            await self.app(scope, receive, send)
            return
        name, path = asked.groups()
        run = await run_in_threadpool(self.runs.get, name)
        if run is None:
            await JSONResponse({"detail": "There is no such run."}, 404)(scope, receive, send)
            return
        if name not in self.open:
            self.open[name] = self.make(run)
        self.open.move_to_end(name)
        app = self.open[name]
        while len(self.open) > MAX_OPEN:
            self.open.popitem(last=False)[1].state.close()
        await app({**scope, "path": path, "raw_path": path.encode(), "app": app}, receive, send)

    def close(self) -> None:
        for app in self.open.values():
            app.state.close()
