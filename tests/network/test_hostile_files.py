"""Anybody can put anything into a shared folder. None of it may stop, block or fool a node or the conductor."""

import base64
import gc
import gzip
import logging
import os
import random
import shutil
import threading
import time
import tracemalloc

import msgspec
import pytest
from msgspec.structs import replace
from swarms import OWNER, POLL, Background, identity_of, introduction, make_manifest, peer_id, publication, report

from benchmarks.lib.paths import MANIFEST, STATE, report_path, rollouts_path
from rl_swarm.network import listing
from rl_swarm.network.base import NetworkError
from rl_swarm.network.coordinator import DocumentCoordinator
from rl_swarm.network.exchange import DocumentExchange
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.owner_documents import await_manifest
from rl_swarm.network.round_server import RoundServer
from rl_swarm.network.settings import NetworkSettings
from rl_swarm.protocol.rounds import State
from rl_swarm.protocol.wire import canonical, digest, seal, sign
from rl_swarm.storage import beneath
from rl_swarm.storage.files import LocalFiles
from rl_swarm.storage.settings import StorageSettings

ROUND, STAGE = 1, 0
HERE = make_manifest()
OTHER_SWARM = make_manifest(name="other")
MEMORY = 48 << 20  # bytes that reading any file may take: a few times the 4 MiB that a document may have


def put(data):
    return lambda path: path.write_bytes(data)


def sparse(path):
    with path.open("wb") as file:
        file.truncate(1 << 30)


def link_to(target):
    return lambda path: path.symlink_to(target)


def link_to_pipe(path):
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to(path.with_name("pipe"))


def full_directory(path):
    path.mkdir()
    (path / "x.json").write_bytes(b"{}")


WHOLE = seal(publication(HERE, "mallory", ROUND, STAGE), identity_of("mallory"))
PACKED = gzip.compress(WHOLE)
NOT_WHOLE = {"json", "gzip", "digest", "unreadable"}  # reasons to read again for a while

# What it is, how to make it, the reasons that may be given for it.
JUNK = {
    "empty": (put(b""), NOT_WHOLE),
    "truncated": (put(WHOLE[: len(WHOLE) // 2]), NOT_WHOLE),
    "truncated gzip": (put(PACKED[: len(PACKED) // 2]), NOT_WHOLE),
    "gzip header alone": (put(b"\x1f\x8b"), NOT_WHOLE),
    "binary junk": (put(random.Random(0).randbytes(50_000)), {*NOT_WHOLE, "depth"}),
    "zeros": (put(bytes(10_000)), NOT_WHOLE),
    "not UTF-8": (put(b'{"peer_id": "\xff\xfe"}'), NOT_WHOLE),
    "a lone surrogate": (put(b'{"peer_id": "\\ud800"}'), NOT_WHOLE),
    "an endless number": (put(b'{"round": ' + b"9" * 60_000 + b"}"), {"number"}),
    "no digest": (put(b"{}"), NOT_WHOLE),
    "huge": (sparse, {"size"}),
    "a bomb": (put(gzip.compress(b'{"model": "' + bytes(64 << 20) + b'"}')), {"size"}),
    "a bomb of brackets": (put(gzip.compress(b"[" * (3 << 20))), {"items", "size"}),
    "deeply nested": (put(b'{"a":' * 5_000 + b"1" + b"}" * 5_000), {"depth"}),
    "a list": (put(b"[1, 2]"), {"schema"}),
    "a string": (put(b'"hello"'), {"schema"}),
    "null": (put(b"null"), {"schema"}),
    "a directory": (full_directory, NOT_WHOLE),
    "a pipe": (os.mkfifo, NOT_WHOLE),
    "a link to a pipe": (link_to_pipe, NOT_WHOLE),
    "a link to a device": (link_to("/dev/zero"), NOT_WHOLE),
    "a link to itself": (link_to("mallory.json"), NOT_WHOLE),
    "a link to another's file": (link_to("bob.json"), NOT_WHOLE | {"place"}),
    "a link to nowhere": (link_to("/nowhere/at/all"), NOT_WHOLE),
}


def signed(record, author="mallory"):
    return put(sign(record, identity_of(author), compress=True))


def forged(record, author="mallory", **changes):
    """A document that was altered after it was signed; its digest is made to fit."""
    fields = msgspec.json.decode(seal(record, identity_of(author)))
    signature = fields.pop("signature")
    fields.pop("digest")
    fields |= changes
    fields["digest"] = digest(canonical(fields))
    return put(msgspec.json.encode({**fields, "signature": signature}))


def unsigned(record):
    fields = {**msgspec.to_builtins(record), "peer_id": peer_id("mallory")}
    return put(msgspec.json.encode({**fields, "digest": digest(canonical(fields))}))


def crowded(record):
    """More values than a document may have, all signed."""
    me = identity_of("mallory")
    fields = {**msgspec.to_builtins(record), "peer_id": me.peer_id, "more": [0] * 250_000}
    message = canonical(fields)
    signature = base64.b64encode(me.sign(message)).decode()
    return put(msgspec.json.encode({**fields, "digest": digest(message), "signature": signature}))


MINE = publication(HERE, "mallory", ROUND, STAGE)
FALSE_ROLLOUTS = {
    "for another swarm": (signed(publication(OTHER_SWARM, "mallory", ROUND, STAGE)), {"swarm"}),
    "for another round": (signed(publication(HERE, "mallory", 0, STAGE)), {"place"}),
    "for another stage": (signed(publication(HERE, "mallory", ROUND, 1)), {"place"}),
    "of another peer": (signed(publication(HERE, "bob", ROUND, STAGE), "bob"), {"place"}),
    "of another kind": (signed(report(HERE, "mallory", ROUND)), {"schema"}),
    "altered": (put(WHOLE.replace(b"What", b"When")), NOT_WHOLE),
    "altered, with a new digest": (forged(MINE, timestamp=9.0), {"signature"}),
    "in the name of another": (forged(MINE, peer_id=peer_id("bob")), {"signature"}),
    "in the name of nobody": (forged(MINE, peer_id="12D3KooW"), {"signature"}),
    "without a signature": (unsigned(MINE), {"signature"}),
    "with a negative round": (signed(replace(MINE, round=-1)), {"schema"}),
    "with a bad name": (signed(replace(MINE, node="../mallory")), {"schema"}),
    "with numbers for texts": (signed(replace(MINE, rollouts={"0": [1, 2]})), {"schema"}),
    "with too many values": (crowded(MINE), {"items"}),
}


@pytest.fixture
def memory():
    """Fails if a test takes far more memory than a document may have."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MEMORY


def reader(folder):
    """Ann's exchange, and what it rejects."""
    rejected = []
    exchange = DocumentExchange(
        FolderStore.at(folder),
        HERE,
        identity_of("ann"),
        "ann",
        threading.Event(),
        lambda *why: rejected.append(why),
        POLL,
    )
    return exchange, rejected


def lay(folder, where, make):
    path = folder / where
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)


@pytest.mark.parametrize(("make", "reasons"), [*JUNK.values(), *FALSE_ROLLOUTS.values()], ids=[*JUNK, *FALSE_ROLLOUTS])
def test_rollouts_that_are_none_are_counted_once_and_the_others_served(make, reasons, tmp_path, impatient, memory):
    exchange, rejected = reader(tmp_path)
    bob = publication(HERE, "bob", ROUND, STAGE)
    lay(tmp_path, rollouts_path(ROUND, STAGE, "bob"), signed(bob, "bob"))
    lay(tmp_path, rollouts_path(ROUND, STAGE, "mallory"), make)

    deadline = time.monotonic() + 240
    while not rejected and time.monotonic() < deadline:
        assert list(exchange.collect(ROUND, STAGE, ["mallory", "bob"])) == [bob]
        time.sleep(0.02)
    assert list(exchange.collect(ROUND, STAGE, ["mallory", "bob"], patience=1.0, in_order=True)) == [bob]

    assert [(node, reason in reasons) for node, reason, _ in rejected] == [("mallory", True)], rejected
    assert rejected[0][2]


@pytest.mark.parametrize("name", ["../../x", "..", "", ".", "a b", "a/b", "bob\n", "-x", "x" * 300, "b\0b"])
def test_a_name_that_is_none_leads_nowhere(name, tmp_path):
    exchange, rejected = reader(tmp_path)
    lay(tmp_path, "rollouts/x.json", signed(MINE))
    for _ in range(3):
        assert list(exchange.collect(ROUND, STAGE, [name])) == []

    assert [(node, reason) for node, reason, _ in rejected] == [(name, "name")]


class Conducted:
    """A conductor that is stepped by hand, with ann and bob as honest members of its swarm."""

    def __init__(self, folder):
        self.folder, self.files, self.now = folder, LocalFiles(folder), time.time()
        self.store = FolderStore(self.files)
        self.conductor = RoundServer(
            self.store, HERE, OWNER, NetworkSettings(min_peers=2), StorageSettings(), threading.Event()
        )
        for node in ("ann", "bob"):
            self.files.write(f"peers/{node}.json", seal(introduction(HERE, node), identity_of(node)))

    def step(self):
        """A look at the folder, late enough to look at every file again."""
        self.now += HERE.peer_timeout / 4
        self.conductor.step(self.now)
        return self.conductor.state

    def report(self, node, number=0):
        self.files.write(report_path(number, 0, node), seal(report(HERE, node, number), identity_of(node)))

    def members(self):
        return sorted((peer_id, member.node) for peer_id, member in self.conductor.state.members.items())


HONEST = sorted((peer_id(node), node) for node in ("ann", "bob"))
FALSE_INTRODUCTIONS = {
    "for another swarm": signed(introduction(OTHER_SWARM, "mallory")),
    "of another peer": signed(introduction(HERE, "bob"), "bob"),
    "of another kind": signed(report(HERE, "mallory")),
    "altered": forged(introduction(HERE, "mallory"), model="gpt"),
    "of a member under a second name": signed(introduction(HERE, "mallory"), "bob"),
}


def warnings(caplog, path):
    return [record.message for record in caplog.records if path in record.message and record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "make", [*(make for make, _ in JUNK.values()), *FALSE_INTRODUCTIONS.values()], ids=[*JUNK, *FALSE_INTRODUCTIONS]
)
def test_introductions_that_are_none_are_said_once_and_the_rounds_go_on(make, tmp_path, impatient, memory, caplog):
    swarm = Conducted(tmp_path)
    lay(tmp_path, "peers/mallory.json", make)
    swarm.step()
    time.sleep(0.11)
    for number in range(3):
        swarm.step()
        swarm.report("ann", number)
        swarm.report("bob", number)

    assert swarm.step().phase == "finished"
    assert swarm.members() == HONEST
    assert len(warnings(caplog, "peers/mallory.json")) == 1
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


FALSE_REPORTS = {
    "for another swarm": signed(report(OTHER_SWARM, "mallory")),
    "for another round": signed(report(HERE, "mallory", round=2)),
    "of another peer": signed(report(HERE, "bob"), "bob"),
    "of another kind": signed(introduction(HERE, "mallory")),
    "altered": forged(report(HERE, "mallory"), reward=1.0),
    "with a boundless reward": signed(report(HERE, "mallory", reward=1e300)),
    "of a member under a second name": signed(report(HERE, "mallory"), "bob"),
}


@pytest.mark.parametrize(
    "make", [*(make for make, _ in JUNK.values()), *FALSE_REPORTS.values()], ids=[*JUNK, *FALSE_REPORTS]
)
def test_reports_that_are_none_are_said_once_and_the_rounds_go_on(make, tmp_path, impatient, memory, caplog):
    swarm = Conducted(tmp_path)
    lay(tmp_path, report_path(0, 0, "mallory"), make)
    swarm.step()
    swarm.report("ann")
    swarm.step()
    swarm.step()
    swarm.report("bob")

    assert swarm.step().round == 1
    assert swarm.members() == HONEST
    assert [member.participation for member in swarm.conductor.state.members.values()] == [1, 1]
    assert len(warnings(caplog, report_path(0, 0, "mallory"))) == 1
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_a_stranger_cannot_speak_under_a_members_name(tmp_path, caplog):
    swarm = Conducted(tmp_path)
    swarm.step()
    swarm.report("ann")
    lay(tmp_path, "peers/bob.json", signed(introduction(HERE, "bob"), "mallory"))
    lay(tmp_path, report_path(0, 0, "bob"), signed(report(HERE, "bob", reward=99.0), "mallory"))
    swarm.step()
    swarm.step()

    assert swarm.conductor.state.round == 0  # bob has not reported
    assert swarm.members() == HONEST
    assert len(warnings(caplog, "peers/bob.json")) == len(warnings(caplog, report_path(0, 0, "bob"))) == 1
    assert peer_id("mallory") in warnings(caplog, "peers/bob.json")[0]

    swarm.report("bob")
    assert swarm.step().round == 1
    assert swarm.conductor.state.members[peer_id("bob")].reward == 0.5


def test_an_old_sign_of_life_that_is_laid_there_again_keeps_nobody_alive(tmp_path):
    swarm = Conducted(tmp_path)
    old = seal(introduction(HERE, "bob", timestamp=1.0), identity_of("bob"))
    older = seal(introduction(HERE, "bob", timestamp=0.5), identity_of("bob"))
    swarm.step()
    swarm.report("ann")
    for _ in range(3):
        for data in (old, older):
            swarm.files.write("peers/bob.json", data)
            swarm.step()

    assert swarm.conductor.state.round == 1


@pytest.mark.parametrize(
    "name",
    [
        ".json",
        "a b.json",
        "ann (1).json",
        ".ann.json.1234.tmp",
        "-x.json",
        "x" * 200 + ".json",
        "ann.json.bak",
        "é.json",
    ],
)
def test_files_with_other_names_are_left_alone(name, tmp_path, caplog):
    swarm = Conducted(tmp_path)
    for folder in ("peers", "rewards/round_0/stage_0"):
        lay(tmp_path, f"{folder}/{name}", put(b"junk"))
    swarm.step()
    swarm.report("ann")
    swarm.report("bob")

    assert swarm.step().round == 1
    assert swarm.members() == HONEST
    assert caplog.records == []


STATES = {
    "of a stranger": signed(State(swarm=HERE.swarm(), phase="running", round=9)),
    "of another swarm": put(seal(State(swarm="other", phase="running", round=9), OWNER)),
    "of another kind": put(seal(report(HERE, "ann"), OWNER)),
    "altered": put(seal(State(swarm=HERE.swarm(), phase="running", round=9), OWNER).replace(b":9", b":8")),
}


@pytest.mark.parametrize("make", [*(make for make, _ in JUNK.values()), *STATES.values()], ids=[*JUNK, *STATES])
def test_a_state_that_is_none_is_passed_over_and_soon_mended(make, tmp_path, caplog):
    swarm = Conducted(tmp_path)
    swarm.step()
    ann, late = (
        DocumentCoordinator(swarm.store, HERE, identity_of("ann"), "ann", threading.Event(), POLL) for _ in range(2)
    )
    assert ann.current().phase == "running"
    (tmp_path / STATE).unlink()
    lay(tmp_path, STATE, make)
    lay(tmp_path, "state/bob.json", put(b"{}"))
    for _ in range(3):
        assert (ann.current().phase, ann.current().round) == ("running", 0)
        assert (late.current().phase, late.current().round) == ("waiting", 0)
    assert len(warnings(caplog, STATE)) <= 2  # once for each

    swarm.step()
    assert late.current().phase == "running"


@pytest.mark.parametrize("make", [make for make, _ in JUNK.values()], ids=JUNK)
def test_a_manifest_that_is_none_is_waited_for_or_refused(make, tmp_path):
    lay(tmp_path, MANIFEST, make)
    lay(tmp_path, "bob.json", put(b"{}"))
    stop = threading.Event()
    waiting = Background(lambda: await_manifest(FolderStore.at(tmp_path), stop, POLL))
    time.sleep(0.05)
    stop.set()

    try:
        assert waiting.result() is None
    except NetworkError as error:
        assert MANIFEST in str(error)


def test_a_manifest_that_comes_late_is_found(tmp_path):
    lay(tmp_path, MANIFEST, put(b'{"half'))
    waiting = Background(lambda: await_manifest(FolderStore.at(tmp_path), threading.Event(), POLL))
    time.sleep(0.1)
    assert waiting.is_alive()
    LocalFiles(tmp_path).write(MANIFEST, seal(HERE, OWNER))

    assert waiting.result() == HERE


@pytest.mark.parametrize("make", [make for make, _ in JUNK.values()], ids=JUNK)
def test_whatever_lies_in_its_place_a_node_can_publish(make, tmp_path):
    files, stop, mine = LocalFiles(tmp_path), threading.Event(), identity_of("mallory")
    lay(tmp_path, rollouts_path(ROUND, STAGE, "mallory"), make)
    lay(tmp_path, report_path(ROUND, STAGE, "mallory"), make)
    DocumentExchange(FolderStore(files), HERE, mine, "mallory", stop, print).publish(MINE)
    DocumentCoordinator(FolderStore(files), HERE, mine, "mallory", stop).submit(report(HERE, "mallory", ROUND))

    assert list(reader(tmp_path)[0].collect(ROUND, STAGE, ["mallory"])) == [MINE]
    assert (tmp_path / report_path(ROUND, STAGE, "mallory")).is_file()


def test_writing_follows_no_link_out_of_the_folder(tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    files = LocalFiles(tmp_path / "swarm")
    for path in ("peers/ann.json", "state/history.jsonl"):
        lay(tmp_path / "swarm", path, link_to(precious))

    files.write("peers/ann.json", b"{}")
    with pytest.raises(OSError):
        files.append("state/history.jsonl", b"line\n")
    with pytest.raises(OSError):
        files.read("state/history.jsonl", 10)
    assert precious.read_bytes() == b"mine"
    assert files.read("peers/ann.json", 10) == b"{}"


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
@pytest.mark.parametrize("kind", ["a pipe", "a directory", "a link to a device", "empty"])
def test_reading_leaves_no_file_open(kind, tmp_path):
    lay(tmp_path, "x.json", JUNK[kind][0])
    gc.collect()  # what earlier tests have left may be closed at any time
    files, before = LocalFiles(tmp_path), len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        try:
            files.read("x.json", 10)
        except OSError:
            continue

    assert len(os.listdir("/proc/self/fd")) < before + 100  # threads of earlier tests may open a few


def test_a_link_that_somebody_keeps_putting_there_fills_no_log(tmp_path, caplog):
    files = LocalFiles(tmp_path / "swarm")
    files.write("linked-again/x", b"")
    for _ in range(20):
        shutil.rmtree(tmp_path / "swarm" / "linked-again")
        (tmp_path / "swarm" / "linked-again").symlink_to(tmp_path)
        files.write("linked-again/x", b"mine")
    assert files.read("linked-again/x", 9) == b"mine" and not (tmp_path / "x").exists()
    assert sum("in its place" in record.message for record in caplog.records) == 1


def test_of_a_tree_larger_than_ours_a_part_is_removed_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(beneath, "MAX_REMOVED", 50)
    files = LocalFiles(tmp_path)
    for number in range(120):
        files.write(f"a/{number}", b"")
    for _ in range(2):
        with pytest.raises(OSError, match="more than 50"):
            files.remove("a")
    files.remove("a")
    assert files.names("") == []
    for number in range(120):
        files.write(f"b/{number}", b"")
    files.write("b", b"a file again")  # whatever lies in its place
    assert files.read("b", 99) == b"a file again"


@pytest.mark.parametrize("path", [STATE, MANIFEST])
@pytest.mark.parametrize(
    "data", [b"{}", b"", seal(HERE, identity_of("mallory"))], ids=["junk", "empty", "a stranger's"]
)
def test_a_state_or_manifest_that_somebody_replaces_is_mended_at_the_next_look(path, data, tmp_path):
    """Not only when signs of life are looked for, which is seldom: nodes wait for it."""
    swarm = Conducted(tmp_path)
    swarm.files.write(MANIFEST, seal(HERE, OWNER))
    swarm.step()
    right = swarm.files.read(path, 1 << 20)
    for _ in range(3):
        swarm.files.write(path, data)
        for _ in range(2):
            swarm.conductor.step(swarm.now)
        assert swarm.files.read(path, 1 << 20) == right


def test_in_a_crowded_folder_looks_between_listings_are_at_members_files_alone(tmp_path, monkeypatch):
    """Listing thousands of files at every look would keep the coordinator from everything else."""
    swarm, listed = Conducted(tmp_path), []
    for number in range(3000):
        lay(tmp_path, f"rewards/round_0/stage_0/junk-{number}.json", put(b"{}"))
    swarm.step()
    names = swarm.files.names
    monkeypatch.setattr(swarm.files, "names", lambda folder: (listed.append(folder), names(folder))[1])
    monkeypatch.setattr(listing, "REST", 1e9)
    for _ in range(10):
        swarm.conductor.step(swarm.now)
    assert len(listed) == 1
    swarm.report("ann")
    swarm.report("bob")
    swarm.conductor.step(swarm.now)
    assert swarm.conductor.state.round == 1, "members are not kept waiting"
