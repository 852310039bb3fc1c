"""The API: everything by HTTP, nothing by accident. Hosts, limits and shapes are checked; no input breaks it."""

import asyncio
import csv
import io
import itertools
import json
import os
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from browsing import address_of
from fastapi.sse import ServerSentEvent
from msgspec.structs import replace
from processes import QUICK, end, run, start, until
from rich.console import Console
from small_runs import HOSTILE, SmallRun
from starlette.testclient import TestClient

from rl_swarm.cli import dashboard
from rl_swarm.errors import UserError
from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.protocol.identity import animal_name
from rl_swarm.protocol.rounds import PeerInfo
from rl_swarm.protocol.wire import Rejected, seal, sign, unseal
from rl_swarm.telemetry.journal import METRICS
from rl_swarm.web import server, tables
from rl_swarm.web.api import create_app
from rl_swarm.web.response_cache import ResponseCache
from rl_swarm.web.settings import WebSettings
from rl_swarm.web.stream import AT_A_TIME, Stream

LOCAL = "http://localhost"


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    played = SmallRun(tmp_path_factory.mktemp("runs") / "run", nodes=2, total=4)
    for _ in range(2):
        played.play(HOSTILE)
    return played


@pytest.fixture(scope="module")
def client(swarm: SmallRun) -> Iterator[TestClient]:
    with TestClient(create_app(Follower(RunView(swarm.root))), LOCAL) as found:
        yield found


def get(client: TestClient, path: str) -> Any:
    response = client.get(path)
    assert response.status_code == 200, response.text
    return response.json()


def test_every_response_is_as_the_description_says(client: TestClient, swarm: SmallRun) -> None:
    described = get(client, "/api/openapi.json")
    assert get(client, "/api/overview")["round"] == 2
    assert get(client, "/api/nodes")["total"] == 2
    told = get(client, f"/api/nodes/{swarm.names[0]}")
    schema = described["components"]["schemas"]["NodeDetail"]
    assert set(told) == set(schema["properties"]) == set(schema["required"])
    assert get(client, f"/api/nodes/{swarm.names[0]}/curves?metric=entropy")["metrics"] == {"entropy": [0.5, 0.5]}
    assert len(get(client, "/api/curves?metric=reward_local")["lines"]) == 2
    assert get(client, "/api/curves?metric=held_out")["mean"][0] == pytest.approx(0.2)
    assert get(client, "/api/overview")["held_out_protocol"] == "16 questions"
    assert get(client, "/api/events?kind=joined&limit=1")["total"] == 2
    assert get(client, "/api/runs")["runs"][0]["run"] == "run"
    assert get(client, "/health")["status"] == "alive"
    assert "/api/rollouts" in described["paths"] and "get" in described["paths"]["/api/rollouts"]


def test_the_names_of_the_original_dashboard_answer(client: TestClient, swarm: SmallRun) -> None:
    peers = [identity.peer_id for identity in swarm.identities]
    assert get(client, "/api/healthz")["message"] == "OK"
    assert get(client, "/api/round_and_stage") == {"round": 2, "stage": 0}
    for path in ("/api/leaderboard", "/api/leaderboard-cumulative"):
        board = get(client, path)
        assert board["total"] == 2 and {leader["id"] for leader in board["leaders"]} == set(peers)
    assert {line["id"] for line in get(client, "/api/rewards-history")["leaders"]} == set(peers)
    name = animal_name(peers[0])
    assert get(client, f"/api/name-to-id?name={name}") == {"id": peers[0]}
    assert get(client, "/api/name-to-id?name=nobody") == {"id": None}
    assert client.post("/api/id-to-name", json=peers[:1]).json() == {peers[0]: name}
    assert client.post("/api/id-to-name", json=["x"] * 1001).status_code == 422
    assert client.post("/api/id-to-name", content=b"[" + b" " * 200_000 + b"]").status_code == 413
    messages = get(client, "/api/gossip?limit=3")["messages"]
    assert len(messages) == 3 and set(messages[0]) >= {"id", "message", "node"}


def test_tables_and_curves_are_saved_as_csv_that_no_spreadsheet_runs(client: TestClient, swarm: SmallRun) -> None:
    paths = ["/api/nodes", "/api/curves", "/api/events", "/api/rollouts", "/api/runs", "/api/runs/curves?run=run"]
    for path in [*paths, f"/api/nodes/{swarm.names[0]}/curves"]:
        response = client.get(path, params={"format": "csv", **({"run": "run"} if "run=" in path else {})})
        assert response.headers["content-type"].startswith("text/csv"), path
        rows = list(csv.reader(io.StringIO(response.text)))
        assert len(rows) > 1 and len({len(row) for row in rows}) == 1, path
    table = client.get("/api/rollouts?format=csv&limit=100").text
    assert next(csv.reader(io.StringIO(table[table.index('"<script>') :])))[0] == HOSTILE
    formula = SmallRun(swarm.root.parent / "formula", nodes=1, total=3)
    formula.play("=cmd()")
    with TestClient(create_app(Follower(RunView(formula.root))), LOCAL) as other:
        assert "'=cmd()" in other.get("/api/rollouts?format=csv").text


@pytest.mark.parametrize(
    "cell", ["=1+1", "+1", "-1", "@sum", "\t=1", "\r=1", "\n=1", " =1+1", "\u00a0=1", "＝1+1", "＠sum"]
)
def test_no_cell_begins_as_a_formula_wherever_it_stands(cell: str) -> None:
    written = tables.csv_text([cell], [[cell], [[cell]]])
    rows = list(csv.reader(io.StringIO(written, newline="")))
    assert rows[:2] == [[f"'{cell}"], [f"'{cell}"]] and rows[2][0].startswith("[")
    assert list(csv.reader(io.StringIO(tables.csv_text(["a", ""], [["b", -1.5]])))) == [["a", ""], ["b", "-1.5"]]


def test_labels_of_strangers_are_one_bounded_label(tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    run = SmallRun(tmp_path / "run", nodes=1)
    (identity,) = run.identities
    peer = RunView.open(run.root).nodes[identity.node].peer
    assert peer is not None
    hostile = '"} 1\nrl_swarm_round 99\n# \\ {a="' + "x" * 200
    run.files.write(f"peers/{identity.node}.json", seal(replace(peer, model=hostile), identity))
    with TestClient(create_app(Follower(RunView(run.root))), LOCAL) as other:
        found = {each.name: each.samples for each in text_string_to_metric_families(other.get("/metrics").text)}
    assert found["rl_swarm_node_alive"][0].labels["model"] == hostile
    assert [sample.value for sample in found["rl_swarm_round"]] == [0]
    with pytest.raises(Rejected):
        unseal(sign(replace(peer, model="x" * 257), identity), PeerInfo, 1 << 20)


def test_prometheus_reads_the_numbers(client: TestClient, swarm: SmallRun) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {family.name: family.samples for family in text_string_to_metric_families(response.text)}
    assert found["rl_swarm_round"][0].value == 2 and found["rl_swarm_nodes_alive"][0].value == 2
    assert {s.labels["node"] for s in found["rl_swarm_node_reward"]} == set(swarm.names)
    assert found["rl_swarm_tokens"][0].value == 200


def test_only_this_host_is_answered_and_the_page_can_run_nothing_else(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    assert (
        client.get("/static/app.js").headers["content-type"].startswith(("text/javascript", "application/javascript"))
    )
    assert client.get("/api/overview", headers={"host": "evil.example"}).status_code == 400
    asked = client.get("/api/overview", headers={"origin": "http://evil.example"})
    assert "access-control-allow-origin" not in asked.headers
    assert client.get("/static/../api.py").status_code == 404
    for method in ("post", "put", "delete", "patch"):
        assert getattr(client, method)("/api/overview").status_code == 405


TOKEN = "correct-horse-battery"
BEARER = {"authorization": f"Bearer {TOKEN}"}


def stopping(
    root: Path, hosts: Sequence[str] = ("localhost",), token: str | None = TOKEN
) -> tuple[TestClient, list[str]]:
    """A client of a dashboard whose run can be stopped, and where it is noted that it was."""
    said: list[str] = []
    app = create_app(Follower(RunView(root)), hosts, token, lambda: said.append("stop"))
    return TestClient(app, LOCAL), said


def test_a_run_is_stopped_by_those_who_know_the_token(swarm: SmallRun, client: TestClient) -> None:
    able, said = stopping(swarm.root)
    assert get(able, "/api/overview")["can_stop"] and not get(client, "/api/overview")["can_stop"]
    basic = b64encode(f"ann:{TOKEN}".encode()).decode()
    for wrong in ("", "Bearer ", "Bearer x", f"Bearer {TOKEN}x", f"Basic {basic}", TOKEN, "Bearer \xe9"):
        refused = able.post("/api/stop", headers={"authorization": wrong.encode("latin-1")})
        assert refused.status_code == 401 and TOKEN not in refused.text, wrong
    assert said == [] and able.get("/api/stop").status_code == 405
    assert able.post("/api/stop", headers=BEARER).status_code == 202 and said == ["stop"]
    assert stopping(swarm.root, token=None)[0].post("/api/stop", headers=BEARER).status_code == 403
    watching = TestClient(create_app(Follower(RunView(swarm.root)), token=TOKEN), LOCAL)
    assert watching.post("/api/stop", headers=BEARER).status_code == 409
    assert not get(watching, "/api/overview")["can_stop"]


def test_where_others_reach_it_the_token_is_the_password(swarm: SmallRun) -> None:
    locked, said = stopping(swarm.root, hosts=("*",))
    paths = ("/", "/api/overview", "/metrics", "/health", "/static/app.js", f"/run/{swarm.root.name}/api/overview")
    for path in paths:
        refused = locked.get(path)
        assert refused.status_code == 401 and refused.headers["www-authenticate"].startswith("Basic "), path
        assert locked.get(path, auth=("anybody", TOKEN)).status_code == 200, path
        assert locked.get(path, headers=BEARER).status_code == 200, path
        assert locked.get(path, auth=("anybody", "guess")).status_code == 401, path
    for wrong in ("Basic", "Basic !", "Basic /w==", "Digest x"):
        assert locked.get("/health", headers={"authorization": wrong}).status_code == 401
    # A browser sends a password by itself, also when another site makes it ask: that must not stop anything.
    assert locked.post("/api/stop", auth=("anybody", TOKEN)).status_code == 401 and said == []
    assert locked.post("/api/stop", headers=BEARER).status_code == 202


def test_other_runs_of_the_folder_are_opened_under_their_names(tmp_path: Path) -> None:
    watched, other = SmallRun(tmp_path / "watched", total=4), SmallRun(tmp_path / "other", nodes=3, total=4)
    other.play()
    with TestClient(create_app(Follower(RunView(watched.root))), LOCAL) as client:
        told = get(client, "/run/other/api/overview")
        assert (told["name"], told["nodes"], told["round"], told["can_stop"]) == ("other", 3, 1, False)
        assert "<main" in client.get("/run/other/").text and client.get("/run/other/static/app.js").status_code == 200
        assert [row["run"] for row in get(client, "/run/other/api/runs")["runs"] if row["current"]] == ["other"]
        assert len(get(client, "/run/other/api/rollouts")["rollouts"]) == 6
        for nothing in ("/run/none/", "/run/%2e%2e/api/overview", "/run/other/run/other/"):
            assert client.get(nothing).status_code == 404, nothing
        for number in range(5):  # more than are kept open
            SmallRun(tmp_path / f"more-{number}", total=4)
            assert get(client, f"/run/more-{number}/api/overview")["name"] == f"more-{number}"
        assert len(get(client, "/run/other/api/rollouts")["rollouts"]) == 6, "closed and opened again"


def test_every_table_of_a_node_is_saved(client: TestClient, swarm: SmallRun) -> None:
    described = get(client, "/api/openapi.json")["paths"]["/api/nodes/{node}/tables/{table}"]["get"]
    names = next(p["schema"]["enum"] for p in described["parameters"] if p["name"] == "table")
    told = get(client, f"/api/nodes/{swarm.names[0]}")
    for name in names:
        response = client.get(f"/api/nodes/{swarm.names[0]}/tables/{name}")
        assert response.headers["content-type"].startswith("text/csv")
        assert len(list(csv.reader(io.StringIO(response.text)))) == 1 + len(told[name]), name
    assert len(told["learned_from"]) == 1 and len(told["rejected"]) == 1
    assert client.get("/api/nodes/nobody/tables/used_by").status_code == 404


NASTY = [
    "",
    "0",
    "-1",
    "1e999",
    "nan",
    "99999999999999999999",
    "\x00",
    "ü" * 50,
    "../../etc",
    "a" * 5000,
    "[1]",
    "%00",
    "csv",
]


def test_nothing_that_is_asked_breaks_it(client: TestClient) -> None:
    described = get(client, "/api/openapi.json")
    for path, methods in described["paths"].items():
        if path == "/api/stream" or "get" not in methods:
            continue
        names = [parameter["name"] for parameter in methods["get"].get("parameters", [])] or ["x"]
        for name, value in itertools.product(names, NASTY):
            where = path.replace("{node}", "x" if name != "node" else "x" + value.replace("\x00", "%00"))
            response = client.get(where, params={name: value})
            assert response.status_code < 500, (where, name, value)
    for body in (b"", b"{", b"null", b"[1, {}]", b'"\xff"', json.dumps(["x" * 101]).encode()):
        assert client.post("/api/id-to-name", content=body).status_code == 422


def test_what_many_ask_for_at_once_is_made_once() -> None:
    asked: list[str] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await asyncio.sleep(0.05)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
        await send({"type": "http.response.body", "body": scope["query_string"]})

    async def ask(cache: ResponseCache, query: bytes) -> list[Any]:
        scope = {"type": "http", "method": "GET", "path": "/api/x", "query_string": query, "headers": []}
        told: list[Any] = []

        async def send(message: Any) -> None:
            told.append(message)

        await cache(scope, None, send)  # type: ignore[arg-type]
        return told

    async def many() -> None:
        version = 1
        cache = ResponseCache(application, lambda: version)
        impatient = asyncio.create_task(ask(cache, b"a"))
        await asyncio.sleep(0.01)
        impatient.cancel()
        answers = await asyncio.gather(*(ask(cache, query) for query in [b"a", b"a", b"b", b"a"]))
        assert [answer[1]["body"] for answer in answers] == [b"a", b"a", b"b", b"a"]
        assert len(asked) == 2
        version = 2
        await ask(cache, b"a")
        assert len(asked) == 3, "what was made before something changed is not told any more"

    asyncio.run(many())


def test_a_long_answer_is_packed_for_those_who_take_it(client: TestClient) -> None:
    path = "/api/openapi.json"
    packed = client.get(path, headers={"Accept-Encoding": "br, gzip"})
    plain = client.get(path, headers={"Accept-Encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip" and "content-encoding" not in plain.headers
    assert int(packed.headers["content-length"]) < len(packed.content) / 2
    assert packed.json() == plain.json() and int(plain.headers["content-length"]) == len(plain.content)
    assert {answer.headers["vary"] for answer in (packed, plain)} == {"Accept-Encoding"}
    assert "vary" not in client.get("/api/overview").headers, "a short one is not worth it"


def test_many_who_listen_are_all_told_although_not_at_once(tmp_path: Path) -> None:
    swarm = SmallRun(tmp_path / "run", total=5)
    follower = Follower(RunView(swarm.root))
    follower.poll()

    async def hear(told: AsyncIterator[ServerSentEvent]) -> None:
        async for event in told:
            if event.data > 1:
                return

    async def many() -> None:
        stream = Stream(follower)
        listeners = [stream.changes() for _ in range(3 * AT_A_TIME + 1)]
        assert {(await anext(told)).event for told in listeners} == {"changed"}
        swarm.play()
        await asyncio.wait_for(asyncio.gather(*map(hear, listeners)), 60)
        stream.closed = True

    asyncio.run(many())


def test_the_stream_tells_when_something_changed(tmp_path: Path) -> None:
    swarm = SmallRun(tmp_path / "run", total=5)
    process = start(tmp_path, "watch", "run", "--port", "18080")
    try:
        url = address_of(process)
        with httpx.stream("GET", f"{url}/api/stream", timeout=60) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            first = next(lines)
            swarm.play()
            assert next(lines) != first
    finally:
        process.terminate()
        assert process.wait(120) == 143


def test_a_port_that_is_taken_gives_way_to_the_next() -> None:
    with server.bound("127.0.0.1", 18500) as first, server.bound("127.0.0.1", first.getsockname()[1]) as second:
        assert second.getsockname()[1] > first.getsockname()[1]
        assert server.url_of(second) == f"http://localhost:{second.getsockname()[1]}"
        assert "*" not in server.hosts_of(second)
    with server.bound("0.0.0.0", 18500) as everywhere:
        assert server.hosts_of(everywhere) == ["*"]
    with pytest.raises(UserError, match="no-such-host"):
        server.bound("no-such-host.invalid", 18500)


def test_up_serves_its_dashboard_and_takes_it_along_when_it_ends(tmp_path: Path) -> None:
    process = start(
        tmp_path, "up", "--run", "r", "--nodes", "1", "--rounds", "400", "--port", "18600", *QUICK, SWARM_WEB="true"
    )
    try:
        url = address_of(process)
        assert httpx.get(f"{url}/health", timeout=60).json()["status"] in ("waiting", "alive")
    finally:
        end(process)  # kills it: whatever it had started ends with it

    def gone() -> bool:
        try:
            httpx.get(f"{url}/health", timeout=240)
        except httpx.ConnectError:
            return True
        except httpx.HTTPError:  # it is on its way out
            return False
        return False

    until(gone)


def test_without_its_packages_it_says_how_to_get_them(tmp_path: Path) -> None:
    SmallRun(tmp_path / "run")
    code = (
        "import importlib.util as u; found = u.find_spec; "
        "u.find_spec = lambda name, *rest: None if name == 'uvicorn' else found(name, *rest); "
        "import sys; sys.argv = ['rl-swarm', 'watch', 'run']; from rl_swarm.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 1 and "pip install 'rl-swarm[web]'" in done.stderr and "Traceback" not in done.stderr


def test_up_goes_on_without_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "is_installed", lambda: False)
    console = Console(file=io.StringIO(), width=200)
    with dashboard.dashboard_of_run(tmp_path, WebSettings(), tmp_path / "log", console, threading.Event()):
        said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.count("\n") == 1 and "pip install 'rl-swarm[web]'" in said and "--no-web" in said


def test_watching_what_is_no_swarm_says_so(tmp_path: Path) -> None:
    code, output = run(tmp_path, "watch", "nothing")
    assert code == 1 and "nothing is no swarm" in output


def test_lines_of_logs_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    swarm = SmallRun(tmp_path / "run", nodes=2, total=3)
    swarm.play()
    with TestClient(create_app(Follower(RunView(swarm.root))), LOCAL) as client:
        assert get(client, "/api/overview")["unreadable_lines"] == 0
    for journal in swarm.journals.values():
        journal.logs[METRICS].append(b'{"kind": "round", "rou\n')
    with TestClient(create_app(Follower(RunView(swarm.root))), LOCAL) as client:
        assert get(client, "/api/overview")["unreadable_lines"] == 2


def test_runs_are_found_by_any_name_that_a_folder_can_have(tmp_path: Path) -> None:
    names = ["my run", "_läufer", "plain"]
    for name in names:
        SmallRun(tmp_path / "runs" / name, nodes=1, total=2).play()
    with TestClient(create_app(Follower(RunView(tmp_path / "runs" / "plain"))), LOCAL) as client:
        assert sorted(row["run"] for row in get(client, "/api/runs")["runs"]) == sorted(names)
        curves = client.get("/api/runs/curves", params={"run": [*names, "../runs/plain", ".."]}).json()
        assert [line["node"] for line in curves["lines"]] == names
        assert get(client, "/run/my%20run/api/overview")["name"] == "my-run"
        assert client.get("/run/%2e%2e/api/overview").status_code == 404


def test_the_page_and_a_notebook_show_a_folder_that_others_have_filled_with_anything(tmp_path: Path) -> None:
    """Pipes, links, sockets and odd names, in place of logs, states, runs and beside them: nothing is waited for."""
    from rl_swarm.notebook.swarm_view import look

    played = SmallRun(tmp_path / "runs" / "run", nodes=2, total=4)
    played.play()
    secret = tmp_path / "secret"
    secret.write_text("a line of somebody else\n" * 10)
    one, other = (played.root / "logs" / name for name in played.names)
    (one / METRICS).unlink()
    os.mkfifo(one / METRICS)
    (other / "training_events.jsonl").unlink(missing_ok=True)
    (other / "training_events.jsonl").symlink_to(secret)
    (played.root / "settings.json").unlink(missing_ok=True)
    os.mkfifo(played.root / "settings.json")
    for number in range(500):
        (played.root / "peers" / f"junk-{number}.json").write_bytes(b"{}")
    os.mkfifo(played.root / "peers" / "pipe.json")
    for name in (b"a\nb\x1b[31m", b"\xff\xfe", b"x" * 255, b"pipe"):
        folder = os.fsencode(tmp_path / "runs") + b"/" + name
        os.mkdir(folder)
        os.mkfifo(folder + b"/manifest.json")
    (tmp_path / "runs" / "linked").symlink_to(played.root)
    with TestClient(create_app(Follower(RunView(played.root))), LOCAL) as client:
        for path in ("overview", "nodes", "events", "runs", "rollouts", "curves?metric=reward_local"):
            response = client.get(f"/api/{path}")
            assert response.status_code == 200 and "somebody else" not in response.text, path
        assert [row["run"] for row in get(client, "/api/runs")["runs"]] == ["run"]
        assert get(client, "/api/nodes")["total"] == 2
    assert "somebody else" not in repr(look(played.root))
