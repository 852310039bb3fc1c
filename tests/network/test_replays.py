"""What was true once or elsewhere is signed as well as ever. Shown again, it is refused and counted with its reason."""

import base64
import os
import platform
import threading

import msgspec
import pytest
from msgspec.structs import replace
from swarms import OWNER, POLL, identity_of, introduction, make_manifest, peer_id, publication, report

from benchmarks.lib.paths import HISTORY, MANIFEST, STATE, report_path, rollouts_path
from rl_swarm.errors import UserError
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.network.coordinator import DocumentCoordinator, is_past
from rl_swarm.network.exchange import DocumentExchange
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.owner_documents import read_manifest, read_state
from rl_swarm.network.round_server import RoundServer
from rl_swarm.network.settings import NetworkSettings
from rl_swarm.protocol.rounds import Member, Report, StageRecord, State
from rl_swarm.protocol.wire import Rejected, canonical, digest, seal, sign, unseal
from rl_swarm.storage.files import LocalFiles
from rl_swarm.storage.settings import StorageSettings
from rl_swarm.telemetry.journal import read_lines

HERE, ELSEWHERE = make_manifest(stages=2), make_manifest(stages=2, name="elsewhere")


def state(manifest=HERE, **fields):
    return seal(State(swarm=manifest.swarm(), **{"phase": "running", **fields}), OWNER)


def coordinator(folder, node="ann"):
    return DocumentCoordinator(FolderStore.at(folder), HERE, identity_of(node), node, threading.Event(), POLL)


@pytest.mark.parametrize(
    "old",
    [state(round=0), state(round=1, stage=0), state(phase="waiting"), state(round=1, stage=1)],
    ids=["an earlier round", "an earlier stage", "before the start", "the same stage, before ann joined"],
)
def test_a_state_that_is_over_takes_no_node_back(old, tmp_path):
    files, ann = LocalFiles(tmp_path), coordinator(tmp_path)
    files.write(STATE, state(round=1, stage=1, members={peer_id("ann"): Member("ann", 0, 1.0)}))
    now = ann.current()
    assert (now.round, now.stage) == (1, 1)
    files.write(STATE, old)
    assert ann.current() == now


def test_a_state_that_is_over_gives_no_work_to_a_node_that_comes_back(tmp_path):
    """Its checkpoint says what it has finished, so nothing is answered, published or reported twice."""
    LocalFiles(tmp_path).write(STATE, state(round=1, stage=0))
    ann = coordinator(tmp_path)
    assert not is_past(ann.current(), after=(1, 0))
    assert not is_past(ann.current(), after=(2, 0))
    assert is_past(ann.current(), after=(0, 1))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (state(ELSEWHERE, round=9), "swarm"),
        (seal(State(swarm=HERE.swarm(), phase="running", round=9), identity_of("mallory")), "owner"),
    ],
)
def test_a_state_of_another_swarm_or_author_is_refused(data, reason, tmp_path):
    files = LocalFiles(tmp_path)
    files.write(STATE, data)
    with pytest.raises(Rejected) as caught:
        read_state(FolderStore(files), HERE)
    assert caught.value.reason == reason


def ended(round, stage, manifest=HERE, author=OWNER):
    fields = {"started": 1.0, "ended": 2.0, "why": "everyone", "members": [], "reports": {}}
    return seal(StageRecord(swarm=manifest.swarm(), round=round, stage=stage, **fields), author) + b"\n"


@pytest.mark.parametrize(
    "replayed",
    [ended(0, 0) + ended(0, 0), ended(2, 0, ELSEWHERE), ended(2, 0, author=identity_of("mallory"))],
    ids=["a line once more", "of another swarm", "of another author"],
)
def test_neither_an_old_state_nor_lines_of_history_move_a_conductor(replayed, tmp_path):
    files = LocalFiles(tmp_path)
    files.write(STATE, state(round=0, stage=0))
    files.append(HISTORY, ended(0, 0) + ended(0, 1) + replayed)
    settings = NetworkSettings(min_peers=1)
    restored = RoundServer(FolderStore(files), HERE, OWNER, settings, StorageSettings(), threading.Event()).state
    assert (restored.phase, restored.round, restored.stage) == ("running", 1, 0)


MINE = publication(HERE, "bob", 1, 1)
REPLAYED = {
    "another swarm": (publication(ELSEWHERE, "bob", 1, 1), "bob", "swarm"),
    "another round": (publication(HERE, "bob", 0, 1), "bob", "place"),
    "another stage": (publication(HERE, "bob", 1, 0), "bob", "place"),
    "another peer's": (publication(HERE, "carol", 1, 1), "carol", "place"),
    "a report": (report(HERE, "bob", 1, 1), "bob", "schema"),
}


@pytest.mark.parametrize(("record", "author", "reason"), REPLAYED.values(), ids=REPLAYED)
def test_rollouts_from_another_place_are_refused_and_counted(record, author, reason, tmp_path):
    rejected = []
    exchange = DocumentExchange(
        FolderStore.at(tmp_path),
        HERE,
        identity_of("ann"),
        "ann",
        threading.Event(),
        lambda *why: rejected.append(why),
        POLL,
    )
    LocalFiles(tmp_path).write(rollouts_path(1, 1, "bob"), seal(record, identity_of(author), compress=True))
    assert list(exchange.collect(1, 1, ["bob"])) == []
    assert [(node, why) for node, why, _ in rejected] == [("bob", reason)]


@pytest.mark.parametrize(
    "shown",
    [report(ELSEWHERE, "ann", 1, 0), report(HERE, "ann", 0, 0), report(HERE, "ann", 1, 1), report(HERE, "bob", 1, 0)],
    ids=["of another swarm", "of another round", "of another stage", "of another peer"],
)
def test_an_old_report_does_not_keep_a_node_from_reporting(shown, tmp_path):
    """A node that was restarted looks whether it has reported. Somebody may have laid one there."""
    ann, files, mine = coordinator(tmp_path), LocalFiles(tmp_path), report(HERE, "ann", 1, 0, reward=0.75)
    files.write(report_path(1, 0, "ann"), seal(shown, identity_of("bob" if shown.node == "bob" else "ann")))
    ann.submit(mine)
    assert unseal(files.read(report_path(1, 0, "ann"), 1 << 16), Report) == mine


def run_with(folder, peer, author="ann", name="ann"):
    files = LocalFiles(folder)
    files.write(MANIFEST, seal(HERE, OWNER))
    files.write(STATE, state())
    files.write(f"peers/{name}.json", sign(peer, identity_of(author)))
    return RunView.open(folder)


def test_whoever_looks_at_a_run_sees_who_is_here(tmp_path):
    view = run_with(tmp_path, introduction(HERE, "ann")).nodes["ann"]
    assert view.peer.peer_id == peer_id("ann")
    assert view.alive


@pytest.mark.parametrize(
    "peer", [introduction(ELSEWHERE, "ann"), introduction(HERE, "bob")], ids=["another swarm", "another node"]
)
def test_an_introduction_from_elsewhere_is_not_shown(peer, tmp_path):
    assert run_with(tmp_path, peer).nodes == {}


@pytest.mark.parametrize("age", [1e9, -1e9])
def test_an_old_sign_of_life_is_none_and_neither_is_one_from_the_future(age, tmp_path):
    peer = introduction(HERE, "ann")
    assert not run_with(tmp_path, replace(peer, timestamp=peer.timestamp - age)).nodes["ann"].alive


@pytest.mark.parametrize("pid", [10**20, 0, -1])
def test_a_process_that_cannot_be_is_not_alive(pid, tmp_path):
    peer = replace(introduction(HERE, "ann"), host=platform.node(), pid=pid)
    nodes = run_with(tmp_path, peer).nodes  # a number that is no process's is no introduction either
    assert not any(node.alive for node in nodes.values())


def test_a_manifest_that_was_exchanged_does_not_change_a_run_that_is_looked_at(tmp_path):
    view = run_with(tmp_path, introduction(HERE, "ann"))
    view.store.files.write(MANIFEST, seal(ELSEWHERE, OWNER))
    view.store.files.write(STATE, state(ELSEWHERE, round=2))
    view.refresh()
    assert view.manifest == HERE
    assert view.state.round == 0


@pytest.mark.parametrize("line", [b'"\xff"', b'{"a":"\xff"}', b"[" * 100_000, b"7", b'{"a":' + b"9" * 5000 + b"}"])
def test_a_line_of_a_log_that_is_none_is_left_out(line, tmp_path):
    (tmp_path / "log").write_bytes(b'{"a":1}\n' + line + b'\n{"a":2}\n{"half')
    files = LocalFiles(tmp_path)
    records, after = read_lines(files, "log")
    assert records == [{"a": 1}, {"a": 2}]
    assert read_lines(files, "log", after) == ([], after)


def test_a_log_that_is_no_file_is_empty(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    assert [read_lines(LocalFiles(tmp_path), name) for name in ("pipe", "link", "missing")] == [([], 0)] * 3


def test_who_is_restarted_in_a_round_does_not_publish_it_anew(tmp_path):
    """With an older model the answers would be others, and who asked before would have other ones than who asks now."""

    def started(node, name):
        who = identity_of(node)
        return DocumentExchange(FolderStore.at(tmp_path), HERE, who, name, threading.Event(), print, POLL)

    first, other = (publication(HERE, "ann", text=text) for text in ("first", "other"))
    started("ann", "ann").publish(first)
    again = started("ann", "ann")
    again.publish(other)
    assert list(started("bob", "bob").collect(0, 0, ["ann"])) == [first]
    again.publish(replace(other, round=1))
    assert [one.round for one in started("bob", "bob").collect(1, 0, ["ann"])] == [1]

    # What somebody else has put there, or for another swarm, is no reason to be silent.
    path = tmp_path / rollouts_path(2, 0, "ann")
    for data in (
        sign(replace(first, round=2), identity_of("bob")),
        b"half",
        sign(replace(first, round=3), identity_of("ann")),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        started("ann", "ann").publish(replace(other, round=2))
        assert [one.rollouts for one in started("bob", "bob").collect(2, 0, ["ann"])] == [other.rollouts]


def test_a_swarm_of_another_format_is_refused_and_the_message_says_which_version_wrote_it(tmp_path):
    fields = {**msgspec.to_builtins(HERE), "peer_id": OWNER.peer_id}
    for number, version in ((1, "rl-swarm 0.1"), (3, "a newer version of rl-swarm")):
        message = canonical({**fields, "format": number})
        signature = base64.b64encode(OWNER.sign(message)).decode()
        signed = {**fields, "format": number, "digest": digest(message), "signature": signature}
        LocalFiles(tmp_path).write(MANIFEST, msgspec.json.encode(signed))
        told = f"format {number}, written by {version}; this version reads format 2"
        with pytest.raises(Rejected, match=told):
            read_manifest(FolderStore.at(tmp_path))
        with pytest.raises(UserError, match=told):
            RunView.open(tmp_path)
