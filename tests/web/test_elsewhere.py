"""Watching swarms that are not in a folder of this machine: in a bucket, on a WebDAV server."""

import platform
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from browsing import address_of
from processes import end, run, start, until
from small_runs import HOSTILE, SmallRun
from stores import BUCKET, S3, Store, WebDav

from rl_swarm.network.address import open_address


@pytest.fixture(params=["bucket", "webdav"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Store]]:
    """The URL of a swarm that is not there yet, and the server that it is on."""
    name = f"swarm-{uuid.uuid4().hex[:8]}"
    if request.param == "bucket":
        server: S3 = request.getfixturevalue("s3")
        yield f"s3://{BUCKET}/{name}", server
        return
    (tmp_path / "webdav").mkdir()
    webdav = WebDav(tmp_path / "webdav", "ann", "secret")
    monkeypatch.setenv("WEBDAV_USERNAME", "ann")
    monkeypatch.setenv("WEBDAV_PASSWORD", "secret")
    yield f"webdav://{webdav.host}/{name}", webdav
    webdav.stop()


@pytest.fixture
def asked() -> Iterator[Callable[..., dict]]:
    with httpx.Client(timeout=60) as client:
        yield lambda url: client.get(url).raise_for_status().json()


def test_a_swarm_at_a_url_is_watched_while_it_is_played(
    tmp_path: Path, place: tuple[str, Store], asked: Callable[..., dict]
) -> None:
    address, store = place
    swarm = SmallRun(tmp_path / "here" / "run", nodes=2, total=9, files=open_address(address).store.files)
    for _ in range(2):
        swarm.play(HOSTILE)
    (tmp_path / "viewer").mkdir()
    process = start(tmp_path / "viewer", "watch", address, "--port", "19300")
    try:
        url = address_of(process)
        told = asked(f"{url}/api/overview")
        assert (told["address"], told["phase"], told["round"], told["nodes"]) == (address, "running", 2, 2)
        assert not told["has_logs"] and told["rollouts"] == 2 * 2 * 2
        curve = asked(f"{url}/api/curves?metric=reward_local")
        assert curve["rounds"] == [0, 1] and curve["mean"] == [0.25, 0.25]
        rollouts = asked(f"{url}/api/rollouts?limit=100")["rollouts"]
        assert len(rollouts) == 8 and all(row["answer"] for row in rollouts), "with the keys, made again here"
        assert {event["event"] for event in asked(f"{url}/api/events")["events"]} == {"joined"}
        node = asked(f"{url}/api/nodes/{swarm.names[0]}")
        assert node["host"] == platform.node() and node["settings"] == {} and node["row"]["participation"] == 2
        assert asked(f"{url}/api/runs")["total"] == 1
        mapped = asked(f"{url}/api/map")
        assert mapped["nodes"]["has_log"] == [False, False], "the map has votes instead"
        best, voter = (mapped["nodes"]["node"].index(name) for name in swarm.names)
        assert [each["round"] for each in mapped["rounds"]] == [0, 1]
        assert all({best, voter} == set(each["edges"][0::3]) for each in mapped["rounds"])
        assert all(set(each["edges"][1::3]) == {best} for each in mapped["rounds"])

        swarm.play()
        until(lambda: asked(f"{url}/api/curves?metric=reward_local")["rounds"] == [0, 1, 2])
        if isinstance(store, S3):
            store.stop()  # what was read before stands
            assert asked(f"{url}/api/overview")["round"] == 3
            assert asked(f"{url}/health")["status"] == "alive"
            store.start()
        swarm.play()
        until(lambda: asked(f"{url}/api/overview")["round"] == 4)
    finally:
        end(process)


def test_a_store_that_gives_no_answer_is_named(tmp_path: Path, s3: S3) -> None:
    code, output = run(tmp_path, "watch", f"s3://{BUCKET}/no-such-swarm")
    assert code == 1 and "no-such-swarm is no swarm" in output and "Traceback" not in output
    code, output = run(tmp_path, "watch", "s3://no-such-bucket/swarm")
    assert code == 1 and "no-such-bucket" in output and "Traceback" not in output
