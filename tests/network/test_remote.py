"""Stores that are reached by a URL: what `Files` promises, on a disk, an S3 server, a WebDAV server and in memory."""

import multiprocessing
import sys
import threading
import uuid
from pathlib import Path

import fsspec
import pytest
from stores import BUCKET, WebDav
from swarms import OWNER, Background, InStore, introduction, make_manifest, publication, report

from rl_swarm.cli import admission
from rl_swarm.config.settings import Settings
from rl_swarm.errors import UserError
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.network import owners, remote, retries
from rl_swarm.network.address import open_address
from rl_swarm.network.documents import MANIFEST
from rl_swarm.network.history import read_history
from rl_swarm.network.owner_documents import read_access_list
from rl_swarm.node import worker
from rl_swarm.storage.files import Refused

STORES = ["disk", "bucket", "webdav", "memory"]


@pytest.fixture(scope="session")
def webdav(tmp_path_factory):
    server = WebDav(tmp_path_factory.mktemp("webdav"), "ann", "secret")
    yield server
    server.stop()


@pytest.fixture
def url(s3):
    """Of a swarm that is not there yet."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/swarm"


@pytest.fixture(params=STORES)
def address(request, tmp_path, monkeypatch):
    name = uuid.uuid4().hex
    if request.param == "disk":
        return str(tmp_path / "swarm")
    if request.param == "bucket":
        request.getfixturevalue("s3")
        return f"s3://{BUCKET}/{name}/swarm"
    if request.param == "memory":
        return f"memory://{name}/swarm"
    monkeypatch.setenv("WEBDAV_USERNAME", "ann")
    monkeypatch.setenv("WEBDAV_PASSWORD", "secret")
    return f"webdav://{request.getfixturevalue('webdav').host}/{name}/swarm"


@pytest.fixture
def files(address):
    return open_address(address).store.files


@pytest.fixture
def at_once(monkeypatch):
    """The library gives up at the first error, so that it is our own patience that is tried."""
    monkeypatch.setattr(remote, "ATTEMPTS", 1)


def test_what_was_written_is_read_and_replaced(files):
    for data in (b"one", b"two and more", b"", b"\x00" * 100_000):
        files.write("peers/ann.json", data)
        assert files.read("peers/ann.json", 1 << 20) == data
    files.write("manifest.json", b"{}")
    assert files.read("manifest.json", 2) == b"{}"


def test_at_most_one_byte_more_than_the_limit_is_read(files):
    files.write("rollouts/large", b"x" * 3_000_000)
    for limit in (0, 1, 10, 2_999_998, 2_999_999, 3_000_000, 4_000_000):
        assert len(files.read("rollouts/large", limit)) == min(limit + 1, 3_000_000)


def test_of_a_large_object_no_more_is_asked_for(s3, url):
    files = open_address(url).store.files
    files.write("large", b"x" * 3_000_000)
    s3.ranges.clear()
    files.read("large", 10)
    assert s3.ranges == ["bytes=0-10"]


def test_what_is_not_there_is_not_found(files):
    files.write("peers/ann.json", b"{}")
    for path in ("manifest.json", "peers/bob.json", "rewards/round_0/stage_0/ann.json"):
        with pytest.raises(FileNotFoundError) as caught:
            files.read(path, 10)
        assert caught.value.filename.endswith(path)


def test_a_folder_is_no_file_and_a_file_no_folder(files):
    files.write("peers/ann.json", b"{}")
    with pytest.raises(OSError):
        files.read("peers", 10)
    assert files.names("peers/ann.json") == []


def test_names_are_those_of_a_folder_and_always_the_newest(address, files):
    other = open_address(address).store.files
    assert files.names("peers") == [] == files.names("")
    other.write("peers/bob.json", b"{}")
    assert files.names("peers") == ["bob.json"]
    other.write("peers/ann.json", b"{}")
    other.write("rollouts/round_1/stage_0/ann.json", b"{}")
    other.write("rollouts/round_10/stage_0/ann.json", b"{}")
    assert files.names("peers") == ["ann.json", "bob.json"]
    assert files.names("rollouts") == ["round_1", "round_10"]
    assert files.names("rollouts/round_1") == ["stage_0"]
    assert files.names("") == ["peers", "rollouts"]
    other.remove("peers")
    assert files.names("peers") == []


def test_appending_keeps_what_was_there(files):
    for line in (b"one\n", b"two\n", b"\xff\n"):
        files.append("state/history.jsonl", line)
    assert files.read("state/history.jsonl", 100) == b"one\ntwo\n\xff\n"


def test_a_log_that_somebody_made_too_large_is_not_read_whole(url, monkeypatch):
    monkeypatch.setattr(remote, "APPENDED_BYTES", 10)
    files = open_address(url).store.files
    files.write("state/history.jsonl", b"x" * 11)
    with pytest.raises(OSError, match="too large"):
        files.append("state/history.jsonl", b"y")
    assert files.read("state/history.jsonl", 100) == b"x" * 11


def test_removing_a_folder_removes_no_other(files):
    for name in ("round_1", "round_10", "round_2"):
        files.write(f"rollouts/{name}/stage_0/ann.json", b"{}")
    files.remove("rollouts/round_1")
    files.remove("rollouts/round_1")
    files.remove("rollouts/round_7")
    assert files.names("rollouts") == ["round_10", "round_2"]


def test_a_folder_that_is_moved_is_joined_with_one_that_is_there(files):
    files.write("rollouts/round_1/stage_0/ann.json", b"new")
    files.write("rollouts/round_1/stage_1/ann.json", b"second stage")
    files.write("archives/round_1/stage_0/bob.json", b"old")
    files.move("rollouts/round_1", "archives/round_1")
    assert files.names("rollouts/round_1") == []
    assert files.names("archives/round_1/stage_0") == ["ann.json", "bob.json"]
    assert files.read("archives/round_1/stage_1/ann.json", 100) == b"second stage"
    with pytest.raises(OSError):
        files.move("rollouts/round_1", "archives/round_1")


def _reads(files, path, expected):
    sys.exit(files.read(path, 100) != expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # newer Pythons warn of forks beside threads
def test_a_forked_process_gets_connections_of_its_own(url):
    files = open_address(url).store.files
    files.write("manifest.json", b"{}")
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=_reads, args=(files, "manifest.json", b"{}")) for _ in range(2)]
    for child in children:
        child.start()
    assert files.read("manifest.json", 100) == b"{}"
    for child in children:
        child.join(120)
        assert child.exitcode == 0


def test_errors_of_the_server_may_pass_and_are_tried_again_by_the_library(s3, url):
    files = open_address(url).store.files
    s3.refusals += [(503, "SlowDown")]
    files.write("manifest.json", b"{}")
    s3.refusals += [(500, "InternalError")]
    assert files.read("manifest.json", 10) == b"{}"
    assert not s3.refusals


@pytest.mark.parametrize("answer", [(500, "InternalError"), (503, "ServiceUnavailable"), (429, "TooManyRequests")])
def test_an_error_that_stays_is_an_oserror_that_names_the_object(s3, url, answer, at_once):
    files = open_address(url).store.files
    for act in (lambda: files.write("a", b""), lambda: files.names("a"), lambda: files.remove("a")):
        s3.refusals += [answer] * 8
        with pytest.raises(OSError) as caught:
            act()
        s3.refusals.clear()
        assert caught.value.filename == f"{url}/a" and not isinstance(caught.value, Refused)


def play_three_rounds(swarm):
    """Two nodes that exchange everything: what each received, by round."""
    received = {}

    def play(name, other):
        coordinator, exchange = swarm.coordinator(name), swarm.exchange(name)
        coordinator.register(introduction(swarm.manifest, name))
        done = (-1, -1)
        while (state := coordinator.wait_for(done)).phase == "running":
            done = (state.round, state.stage)
            exchange.publish(publication(swarm.manifest, name, *done))
            received[name, state.round] = [found.node for found in exchange.collect(*done, [other], 20.0)]
            coordinator.submit(report(swarm.manifest, name, *done))

    for thread in [Background(lambda: play("ann", "bob")), Background(lambda: play("bob", "ann"))]:
        thread.result(60)
    swarm.close()
    return received


def everything_arrived(swarm, received):
    ended, unreadable = read_history(swarm.store("ann"))
    expected = {(name, k): [other] for k in range(3) for name, other in (("ann", "bob"), ("bob", "ann"))}
    return received == expected and [len(one.reports) for one in ended] == [2, 2, 2] and not unreadable


def test_a_swarm_plays_on_while_every_third_request_fails(s3, url, at_once):
    s3.shaky = True
    try:
        swarm = InStore(url, min_peers=2, rounds=3)
        received = play_three_rounds(swarm)
    finally:
        s3.shaky = False
    assert everything_arrived(swarm, received)


@pytest.mark.parametrize("address", ["webdav", "memory"], indirect=True)
def test_a_swarm_plays_in_other_stores_too(address):
    swarm = InStore(address, min_peers=2, rounds=3)
    assert everything_arrived(swarm, play_three_rounds(swarm))


def test_a_store_that_goes_away_and_comes_back_costs_no_round(s3, url, at_once, monkeypatch):
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.2)
    swarm = InStore(url, rounds=2)
    ann = swarm.coordinator("ann")
    ann.register(introduction(swarm.manifest, "ann"))
    assert ann.wait_for((-1, -1)).round == 0
    s3.stop()
    try:
        with pytest.raises(OSError, match="connect"):
            swarm.store("ann").read(MANIFEST, 10)
        submitting = Background(lambda: ann.submit(report(swarm.manifest, "ann")))
        submitting.join(0.3)
        assert submitting.is_alive()
        assert ann.current().round == 0
    finally:
        s3.start()
    submitting.result()
    assert ann.wait_for((0, 0)).round == 1
    ann.submit(report(swarm.manifest, "ann", 1))
    assert ann.wait_for((1, 0)).members[introduction(swarm.manifest, "ann").peer_id].participation == 2
    swarm.close()


@pytest.fixture
def own_connections():
    """None that was made with other settings, and none that is left to others."""
    kept = fsspec.get_filesystem_class("s3")
    kept.clear_instance_cache()
    yield
    kept.clear_instance_cache()


def commands(url, tmp_path):
    """What a person can do with an address."""
    settings = Settings.of(identity_path=str(tmp_path / "me.pem"))
    yield lambda: worker.join(url, settings, threading.Event())
    yield lambda: worker.coordinate(url, settings, threading.Event())
    yield lambda: RunView.open(url)


def test_a_wrong_key_ends_in_one_message_that_names_the_variable(url, tmp_path, monkeypatch, own_connections):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody-else")
    for act in commands(url, tmp_path):
        with pytest.raises(UserError, match=r"does not let us in.*AWS_ACCESS_KEY_ID"):
            act()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(UserError, match=r"credentials.*AWS_ACCESS_KEY_ID"):
        RunView.open(url)


@pytest.mark.parametrize(("variable", "value"), [("AWS_ENDPOINT_URL", "my-store"), ("AWS_PROFILE", "nobody")])
def test_a_variable_that_cannot_be_used_is_said(url, tmp_path, monkeypatch, own_connections, variable, value):
    monkeypatch.setenv(variable, value)
    for act in commands(url, tmp_path):
        with pytest.raises(UserError, match=r"s3://.*AWS_ENDPOINT_URL"):
            act()


def test_a_bucket_that_is_not_there_is_named_and_not_made(s3, tmp_path):
    for act in commands("s3://no-such-bucket/swarm", tmp_path):
        with pytest.raises(UserError, match=r"no bucket 'no-such-bucket'.*Make it first"):
            act()


def test_a_wrong_password_ends_in_one_message_that_names_the_variable(webdav, tmp_path, monkeypatch):
    monkeypatch.setenv("WEBDAV_USERNAME", "ann")
    monkeypatch.setenv("WEBDAV_PASSWORD", "wrong")
    for act in commands(f"webdav://{webdav.host}/swarm", tmp_path):
        with pytest.raises(UserError, match=r"does not let us in.*WEBDAV_PASSWORD"):
            act()


def test_a_store_that_cannot_be_reached_is_said(s3, url, tmp_path, at_once, monkeypatch, own_connections):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"Could not connect.*127.0.0.1:9"):
        RunView.open(url)


@pytest.mark.parametrize(
    ("package", "url", "words"),
    [
        ("fsspec", "s3://bucket/swarm", "pip install s3fs"),
        ("gcsfs", "gs://bucket/swarm", "pip install gcsfs"),
        ("webdav4.fsspec", "webdavs://server/swarm", r"pip install 'webdav4\[fsspec\]'"),
    ],
)
def test_without_its_package_a_url_is_answered_by_what_to_install(package, url, words, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=words):
        open_address(url)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("p2p://12D3KooW/swarm", "no address of a peer"),
        ("chain://1/swarm", "chain:// address are not supported"),
        ("https://example.org/swarm", "cannot write"),
        ("gopher://example.org/swarm", "no known kind of address"),
        ("s3://bucket", "such as s3://bucket/my-swarm"),
        ("s3:///swarm", "such as s3://bucket/my-swarm"),
        ("s3://bucket/my swarm", "letters, digits"),
        ("s3://[bucket/swarm", "is no URL"),
        ("s3://bucket/a//b", "letters, digits"),
        ("webdavs://me:secret@server/swarm", "neither credentials"),
        ("s3://bucket/swarm?key=secret", "neither credentials"),
    ],
)
def test_an_address_that_cannot_be_used_is_explained(url, words):
    with pytest.raises(UserError, match=words) as caught:
        open_address(url)
    assert "secret" not in str(caught.value)


def test_an_address_is_a_path_unless_it_says_otherwise(tmp_path):
    for where in (tmp_path / "swarm", str(tmp_path / "swarm"), f"file://{tmp_path}/swarm"):
        place = open_address(where)
        assert (place.text, place.here, place.name) == (str(tmp_path / "swarm"), tmp_path / "swarm", "swarm")
        assert not place.is_url
    one, other = open_address("memory://a/swarm/"), open_address("memory://b/swarm")
    assert (one.text, one.name, one.is_url) == ("memory://a/swarm", "swarm", True)
    assert one.here.parent == other.here.parent == Path("runs") and one.here != other.here


def test_the_owner_of_a_url_is_remembered(tmp_path):
    settings = Settings.of(identity_path=str(tmp_path / "me.pem"))
    owners.remember(make_manifest(), "s3://bucket/swarm", settings.network)
    owners.check(make_manifest(), "s3://bucket/swarm", settings.network)
    with pytest.raises(owners.OwnerError, match="s3://bucket/swarm"):
        owners.check(
            make_manifest(peer_id=introduction(make_manifest(), "ann").peer_id), "s3://bucket/swarm", settings.network
        )


def test_the_owner_decides_by_url_who_takes_part(url, capsys):
    store = open_address(url).store
    manifest = worker.found(store, Settings.of(admission="invited"), "swarm", OWNER)
    me = introduction(manifest, "ann").peer_id
    admission.invite(url, OWNER, uses=1, days=1.0)
    admission.change(url, OWNER, me, allow=True)
    assert read_access_list(store, manifest).allowed == [me]
    admission.change(url, OWNER, me, allow=False)
    admission.members(url, as_json=False)
    assert f"{me}  " in (told := capsys.readouterr().out) and "refused" in told
