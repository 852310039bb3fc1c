"""Answers over HTTP with everything that the page shows, read only unless a token is set.

The description is at /api/openapi.json.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from fastapi import Depends, FastAPI, HTTPException, Query
from fastapi.responses import FileResponse, PlainTextResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.staticfiles import StaticFiles

from rl_swarm import __version__
from rl_swarm.monitor import records as r
from rl_swarm.monitor import snapshot, standings, swarm_map
from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.rollouts import RolloutFilter, RolloutReader
from rl_swarm.monitor.runs import Runs
from rl_swarm.web import legacy_api, security, tables
from rl_swarm.web.response_cache import ResponseCache
from rl_swarm.web.run_router import RunRouter
from rl_swarm.web.stream import Stream

T = TypeVar("T")
STATIC = Path(__file__).parent / "static"

Offset = Annotated[int, Query(ge=0, le=1_000_000)]
Limit = Annotated[int, Query(ge=1, le=1000)]
Points = Annotated[int, Query(ge=2, le=1000, description="Maximum number of points of a curve.")]
Name = Annotated[str, Query(max_length=100)]
Metric = Annotated[str, Query(pattern=r"^[a-z0-9_.]{1,64}$", description="A metric of metrics.jsonl, or held_out.")]
Reward = Annotated[float | None, Query(ge=-1e6, le=1e6, allow_inf_nan=False)]
Format = Annotated[Literal["json", "csv"], Query(description="csv: the same as a table.")]
OR_CSV: dict[int | str, dict[str, object]] = {200: {"content": {"text/csv": {"schema": {"type": "string"}}}}}
STOP_RESPONSES: dict[int | str, dict[str, object]] = {
    401: {"description": "Wrong or no token."},
    403: {"description": "No token is set: the API is read only."},
    409: {"description": "There is nothing to stop from here."},
}
OR_NOT: dict[int | str, dict[str, object]] = {404: {"description": "There is no such node."}}


def create_app(
    follower: Follower,
    hosts: Sequence[str] = ("127.0.0.1", "localhost", "[::1]"),
    token: str | None = None,
    stop: Callable[[], None] | None = None,
    among: Runs | None = None,
) -> FastAPI:
    """Create the API of one swarm.

    `hosts` are the names it answers to; `*` is any. With the `token` the run can be stopped, where `stop` does that.
    `among` are the other runs of the same server.
    """
    reader, stream, runs = RolloutReader(follower), Stream(follower), among or Runs(follower)
    replays = swarm_map.Replays(follower)

    def close() -> None:
        stream.closed = True
        reader.close()

    about = "The data of a swarm's dashboard. Read only, except for stopping the run with a token."
    app = page_app("RL Swarm", about, "index.html", stream, runs, close)
    if among is None:
        serve_runs(app, runs)
    security.protect(app, hosts, token)

    def current() -> Follower:
        stream.catch_up()
        return follower

    Swarm = Annotated[Follower, Depends(current)]

    @app.get("/api/overview", response_model=r.Overview)
    def overview(swarm: Swarm) -> Response:
        can_stop = token is not None and stop is not None
        return as_json(snapshot.overview(swarm, can_stop, runs.experiment))

    @app.post("/api/stop", status_code=202, responses=STOP_RESPONSES)
    def stop_run(
        given: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],
    ) -> r.Stopping:
        """Stop the run as Ctrl-C does: the nodes save their state. The token is that of SWARM_WEB_TOKEN."""
        if token is None:
            raise HTTPException(403, "The API is read only: no SWARM_WEB_TOKEN is set.")
        if given is None or not security.is_token(given.credentials, token):
            raise HTTPException(401, "Wrong or no token.", {"WWW-Authenticate": "Bearer"})
        if stop is None:
            raise HTTPException(409, "Only the dashboard of `rl-swarm up` can stop its run.")
        stop()
        return r.Stopping(True)

    @app.get("/api/nodes", response_model=r.NodePage, responses=OR_CSV)
    def nodes(
        swarm: Swarm,
        search: Name = "",
        sort: standings.Column = "held_out_now",
        descending: bool = True,
        first: Annotated[list[Name], Query(max_length=12, description="Nodes that come before all others.")] = [],  # noqa: B006
        offset: Offset = 0,
        limit: Limit = 100,
        format: Format = "json",
    ) -> object:
        """Return the leaderboard, sorted by a column; nodes without a value come last. As CSV it has all nodes."""
        if format == "csv":
            page = standings.page(swarm, search, sort, descending, first, limit=None)
            return as_csv("leaderboard", tables.records_csv(r.NodeRow, page.nodes, but=("spark",)))
        return as_json(standings.page(swarm, search, sort, descending, first, offset, limit, sparks=True))

    @app.get("/api/nodes/{node}", responses=OR_NOT)
    def node(swarm: Swarm, node: str) -> r.NodeDetail:
        """Return one node, by its name in files, its peer id or its animal name."""
        return found_or_404(snapshot.node(swarm, node))

    @app.get("/api/nodes/{node}/tables/{table}", response_class=PlainTextResponse, responses=OR_CSV | OR_NOT)
    def node_table(swarm: Swarm, node: str, table: tables.NodeTable) -> Response:
        """Return a table of a node's page, as CSV."""
        found = found_or_404(snapshot.node(swarm, node))
        return as_csv(f"{found.row.node}-{table}", tables.node_csv(found, table))

    @app.get("/api/nodes/{node}/curves", response_model=r.NodeCurves, responses=OR_CSV | OR_NOT)
    def curves(
        swarm: Swarm,
        node: str,
        metric: Annotated[list[Annotated[str, Query(max_length=64)]], Query(max_length=64)] = [],  # noqa: B006
        points: Points = 500,
        format: Format = "json",
    ) -> object:
        """Return the curves of one node; all that it has where no metric is named."""
        found = found_or_404(snapshot.curves(swarm, node, metric, points))
        return as_json(found) if format == "json" else as_csv(found.node, tables.curves_csv(found))

    @app.get("/api/curves", response_model=r.Lines, responses=OR_CSV)
    def all_curves(
        swarm: Swarm,
        metric: Metric = "reward_local",
        points: Points = 500,
        limit: Annotated[int, Query(ge=0, le=200, description="Maximum number of nodes; the mean is of all.")] = 50,
        node: Annotated[list[Name], Query(max_length=12, description="Nodes to show as well.")] = [],  # noqa: B006
        format: Format = "json",
    ) -> object:
        """Return one metric of the best nodes and of those named; mean and percentiles are those of all nodes."""
        lines = snapshot.lines(swarm, metric, points, limit, node)
        return as_json(lines) if format == "json" else as_csv(metric, tables.lines_csv(lines))

    @app.get("/api/map", response_model=r.SwarmMap)
    def current_map(
        swarm: Swarm,
        since: Annotated[int, Query(ge=0, lt=1 << 53, description="The first round whose edges are wanted.")] = 0,
    ) -> Response:
        """Return every node with score and phase, and who learned from whom in the newest rounds."""
        return as_json(swarm_map.swarm_map(swarm, since))

    @app.get("/api/map/replay", response_model=r.Replay)
    def replay(swarm: Swarm) -> Response:
        """Return scores and who learned from whom, round by round from the first."""
        return Response(replays.newest(), media_type="application/json")

    @app.get("/api/rollouts", response_model=r.RolloutPage, responses=OR_CSV)
    def rollouts(
        swarm: Swarm,
        round: Annotated[int | None, Query(ge=0, lt=1 << 53)] = None,
        node: Name = "",
        task: Name = "",
        min_reward: Reward = None,
        max_reward: Reward = None,
        after: Annotated[str | None, Query(max_length=100, description="`next` of the previous page.")] = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 10,
        order: Annotated[
            Literal["teaching", "newest"] | None,
            Query(description="teaching: first those of the last rounds with right and wrong answers."),
        ] = None,
        format: Format = "json",
    ) -> object:
        """Return questions and the models' answers, the newest round first.

        Unless a round or an order is asked for, the order is `teaching`.
        """
        filters = RolloutFilter(round, node, task, min_reward, max_reward)
        is_teaching = order == "teaching" or (order is None and round is None)
        page = reader.teaching_page(filters, after, limit) if is_teaching else reader.page(filters, after, limit)
        return page if format == "json" else as_csv("rollouts", tables.rollouts_csv(page.rollouts))

    @app.get("/api/events", response_model=r.EventPage, responses=OR_CSV)
    def events(
        swarm: Swarm, node: Name = "", kind: Name = "", offset: Offset = 0, limit: Limit = 100, format: Format = "json"
    ) -> object:
        """Return events, newest first."""
        page = snapshot.events(swarm, node, kind, offset, limit, lessons=True)
        return page if format == "json" else as_csv("events", tables.records_csv(r.Event, page.events))

    @app.get("/api/runs", response_model=r.RunPage, responses=OR_CSV)
    def all_runs(
        swarm: Swarm, offset: Offset = 0, limit: Annotated[int, Query(ge=1, le=20)] = 20, format: Format = "json"
    ) -> object:
        """Return the runs in the same folder, the newest first."""
        page = runs.page(offset, limit, follower)
        return page if format == "json" else as_csv("runs", tables.records_csv(r.RunRow, page.runs))

    @app.get("/api/runs/curves", response_model=r.Lines, responses=OR_CSV)
    def run_curves(
        swarm: Swarm,
        run: Annotated[list[Annotated[str, Query(max_length=255)]], Query(max_length=12)] = [],  # noqa: B006
        metric: Metric = "reward_local",
        points: Points = 500,
        format: Format = "json",
    ) -> object:
        """Return one metric of several runs, each the mean of its nodes."""
        lines = runs.lines(run, metric, points)
        return lines if format == "json" else as_csv(metric, tables.lines_csv(lines))

    @app.get("/api/runs/settings", response_model=r.SettingsTable, responses=OR_CSV)
    def run_settings(
        swarm: Swarm,
        run: Annotated[list[Annotated[str, Query(max_length=255)]], Query(max_length=12)] = [],  # noqa: B006
        format: Format = "json",
    ) -> object:
        """Compare the public settings of several runs."""
        table = runs.settings(run)
        return table if format == "json" else as_csv("settings", tables.settings_csv(table))

    @app.get("/health")
    def health(swarm: Swarm) -> r.Health:
        return snapshot.health(swarm)

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics(swarm: Swarm) -> Response:
        """Return the swarm's numbers for Prometheus."""
        from rl_swarm.web import prometheus

        return Response(prometheus.text(swarm), media_type=prometheus.CONTENT_TYPE)

    app.include_router(legacy_api.router(current, reader))
    return app


def page_app(title: str, about: str, page: str, stream: Stream, runs: Runs, close: Callable[[], None]) -> FastAPI:
    """Create the application of a page: its files, its event stream, and cached responses."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        for ending in (close, *runs.closing):
            ending()

    app = FastAPI(
        title=title,
        version=__version__,
        description=about,
        openapi_url="/api/openapi.json",
        docs_url=None,  # its page loads scripts from another site
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.close = close
    app.state.announce_end = stream.announce_end
    app.add_middleware(ResponseCache, version=lambda: stream.follower.version)
    app.include_router(stream.router())
    app.mount("/static", StaticFiles(directory=STATIC))
    app.get("/", include_in_schema=False)(lambda: FileResponse(STATIC / page))
    return app


def serve_runs(app: FastAPI, runs: Runs) -> None:
    """Serve every other run under its name, too."""
    app.add_middleware(RunRouter, runs=runs, make=lambda run: create_app(run, ("*",), among=runs))


def found_or_404(record: T | None) -> T:
    if record is None:
        raise HTTPException(404, "There is no such node.")
    return record


def as_json(record: object) -> Response:
    """Encode a record without validating it again: for long curves that would take most of the time."""
    return Response(msgspec.json.encode(record), media_type="application/json")


def as_csv(name: str, text: str) -> Response:
    return Response(
        text,
        media_type="text/csv; charset=utf-8",
        headers={"Content-Disposition": f'attachment; filename="{name}.csv"'},
    )
