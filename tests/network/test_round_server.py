"""The conductor can be killed at any moment and started again: all it knows is in the folder."""

import contextlib
import errno
import logging
import math
import os
import subprocess
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from swarms import (
    OWNER,
    POLL,
    Background,
    eventually,
    identity_of,
    introduction,
    make_manifest,
    peer_id,
    publication,
    report,
)

from benchmarks.lib.paths import HISTORY, STATE, report_path, rollouts_path
from rl_swarm.config.settings import Settings
from rl_swarm.network import coordinator, history, listing, retries, round_server, submissions
from rl_swarm.network.base import NetworkError
from rl_swarm.network.coordinator import DocumentCoordinator, position
from rl_swarm.network.documents import PEERS, report_key
from rl_swarm.network.exchange import DocumentExchange
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.history import read_history
from rl_swarm.network.listing import ThrottledListing
from rl_swarm.network.owner_documents import read_state
from rl_swarm.network.retries import TRIES
from rl_swarm.network.round_server import RoundServer
from rl_swarm.network.settings import NetworkSettings
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.rounds import Report, StageRecord
from rl_swarm.protocol.wire import seal, unseal, unseal_with_digest
from rl_swarm.storage import files as files_module
from rl_swarm.storage.files import LocalFiles
from rl_swarm.storage.settings import StorageSettings

CALLS = ("read", "write", "append", "names", "remove", "move")


class Killed(BaseException):
    """Stands for kill -9: nothing catches it."""


ELSEWHERE = make_manifest(name="elsewhere")


class Watched(LocalFiles):
    """Real files that count calls, and at one call do as they are told."""

    def __init__(self, root, at=0, act=None):
        super().__init__(root)
        self.calls, self.at, self.act = Counter(), at, act

    def __getattribute__(self, name):
        call = super().__getattribute__(name)
        if name not in CALLS:
            return call

        def watched(*args):
            self.calls[name] += 1
            if self.calls.total() == self.at:
                self.act(name, call, args)
            return call(*args)

        return watched


def die_after(name, call, args):
    try:
        call(*args)
    finally:
        raise Killed


def die_halfway(name, call, args):
    """An append may leave half a line; everything else happens whole or not at all."""
    if name == "append":
        path, data, at = args
        call(path, data[: len(data) // 2], at)
    raise Killed


class Story:
    """A swarm whose nodes act between the conductor's looks, by a clock that the story turns."""

    nodes = ("ann", "bob", "cleo")

    def __init__(self, folder, **changes):
        self.manifest = make_manifest(rounds=2, stages=2, round_interval=10.0, **changes)
        self.files, self.clock, self.places = LocalFiles(folder), 1000.0, []
        self.store = FolderStore(self.files)
        self.settings = Settings.of(min_peers=2)
        for node in self.nodes[:2]:
            self.join(node)

    def join(self, node):
        me = introduction(self.manifest, node, timestamp=self.clock)
        self.files.write(f"peers/{node}.json", seal(me, identity_of(node)))

    def submit(self, node, number, stage):
        path = report_path(number, stage, node)
        if f"{node}.json" not in self.files.names(path.rpartition("/")[0]):
            others = [other for other in self.nodes if other != node]
            said = report(self.manifest, node, number, stage, reward=0.25 * (number + 1), vote=others[number % 2])
            self.files.write(path, seal(said, identity_of(node)))

    def state(self):
        return read_state(self.store, self.manifest)

    def conduct(self, files, monkeypatch):
        """Until the swarm has finished or the conductor is killed."""
        monkeypatch.setattr(time, "time", lambda: self.clock)
        conductor = RoundServer(
            FolderStore(files), self.manifest, OWNER, self.settings.network, self.settings.storage, threading.Event()
        )
        for _ in range(100):
            self.clock += 5.0
            conductor.step(self.clock)
            if conductor.state.phase == "finished":
                return
            state = self.state()
            self.places.append(position(state))
            for node in self.nodes[:2]:
                self.submit(node, state.round, state.stage)
        raise AssertionError("the swarm does not get anywhere")

    def while_nobody_conducts(self):
        """Somebody who was late for the stage in which the conductor died reports after all."""
        self.clock += 100.0
        self.join("cleo")
        if STATE.rpartition("/")[2] in self.files.names("state"):
            state = self.state()
            self.places.append(position(state))
            self.submit("cleo", state.round, state.stage)

    def check(self):
        """The history has every stage once, and the totals in the state are those of the history."""
        history, _ = read_history(self.store)
        assert [(ended.round, ended.stage) for ended in history] == [(r, s) for r in range(2) for s in range(2)]
        assert self.places == sorted(self.places)
        participation, rewards, wins = Counter(), Counter(), Counter()
        for ended in history:
            for author, name in ended.reports.items():
                node = next(node for node in self.nodes if peer_id(node) == author)
                data = self.files.read(report_path(ended.round, ended.stage, node), 1 << 20)
                said, found = unseal_with_digest(data, Report)
                assert found == name
                rewards[author] += said.reward
                if ended.stage == 1:
                    participation[author] += 1
                    wins[said.vote] += said.vote in ended.members
        state = self.state()
        assert state.phase == "finished"
        for member_id, member in state.members.items():
            assert member.participation == participation[member_id]
            assert member.reward == pytest.approx(rewards[member_id])
            assert member.wins == wins[member_id]
        assert participation[peer_id("ann")] >= 1


@pytest.mark.parametrize("round_end", ["everyone", "interval"])
@pytest.mark.parametrize("death", [die_halfway, die_after])
def test_a_conductor_that_is_killed_at_any_call_is_replaced_without_a_trace(death, round_end, tmp_path, monkeypatch):
    calls = 0
    while True:
        calls += 1
        story = Story(tmp_path / str(calls), round_end=round_end)
        try:
            story.conduct(Watched(story.files.root, calls, death), monkeypatch)
        except Killed:
            story.while_nobody_conducts()
            story.conduct(story.files, monkeypatch)
            story.check()
        else:
            story.check()
            break

    assert calls > 30  # it died in many places before it lived


def test_a_conductor_that_is_killed_again_and_again_gets_there(tmp_path, monkeypatch):
    story, deaths = Story(tmp_path), 0
    for calls in [*range(3, 20), *[25] * 20]:
        try:
            story.conduct(Watched(tmp_path, calls, die_halfway), monkeypatch)
        except Killed:
            deaths += 1
        else:
            break

    assert deaths > 10
    story.check()


@pytest.fixture
def swarm(tmp_path):
    """A swarm on the real clock, with ann and bob in it, in the middle of round 1."""
    return Small(tmp_path)


class Small:
    def __init__(self, folder, **changes):
        self.manifest = make_manifest(**{"rounds": 6, **changes})
        self.files = LocalFiles(folder)
        self.store = FolderStore(self.files)
        for node in ("ann", "bob"):
            self.join(node)
        self.conductor = self.restarted()
        self.play(0)

    def restarted(self, files=None, **settings):
        settings = Settings.of(min_peers=2, poll_interval=POLL, **settings)
        store = FolderStore(files or self.files)
        return RoundServer(store, self.manifest, OWNER, settings.network, settings.storage, threading.Event())

    def play(self, number, conductor=None):
        conductor = conductor or self.conductor
        conductor.step(time.time())
        for node in ("ann", "bob"):
            self.submit(node, number)
            path = rollouts_path(number, 0, node)
            self.files.write(path, seal(publication(self.manifest, node, number), identity_of(node)))
        conductor.step(time.time())

    def join(self, node, timestamp=1.0):
        me = introduction(self.manifest, node, timestamp)
        self.files.write(f"peers/{node}.json", seal(me, identity_of(node)))

    def submit(self, node, number, vote=""):
        said = report(self.manifest, node, number, vote=vote)
        self.files.write(report_path(number, 0, node), seal(said, identity_of(node)))

    def history(self):
        return [(ended.round, ended.stage) for ended in read_history(self.store)[0]]


@pytest.mark.parametrize("machine", ["this machine", "another machine"])
def test_a_torn_last_line_of_the_history_goes_and_the_stage_is_written_again(swarm, machine, tmp_path):
    line = swarm.files.read(HISTORY, 1 << 20)
    swarm.files.append(HISTORY, line[:100])
    assert swarm.history() == [(0, 0)]

    private = None if machine == "this machine" else str(tmp_path.with_name(f"{tmp_path.name}-private"))
    swarm.play(1, swarm.restarted(private_path=private))
    assert swarm.history() == [(0, 0), (1, 0)]
    assert read_history(swarm.store)[1] == 0  # the torn one is gone


@pytest.mark.parametrize("introduced", [True, False])
def test_the_silence_of_the_conductor_is_not_counted_against_members(introduced, swarm, monkeypatch):
    swarm.submit("ann", 1)
    if not introduced:  # known from the state alone
        (swarm.files.root / "peers/bob.json").unlink()
    much_later = time.time() + 10 * swarm.manifest.peer_timeout
    monkeypatch.setattr(time, "time", lambda: much_later)
    conductor = swarm.restarted()
    conductor.step(much_later + 1)
    assert conductor.state.round == 1  # bob is waited for

    conductor.step(much_later + 2 + swarm.manifest.peer_timeout)
    assert conductor.state.round == 2  # but not forever


@pytest.mark.parametrize("damaged", [False, True])
def test_what_was_said_before_the_conductor_was_restarted_is_no_sign_of_life(damaged, swarm, monkeypatch):
    """Old introductions of bob, kept by somebody and shown one after the other, do not bring him back."""
    swarm.join("bob", timestamp=5.0)
    now = time.time() + 2 * swarm.manifest.peer_timeout
    swarm.submit("ann", 1)
    swarm.conductor.step(now - swarm.manifest.peer_timeout)  # bob gives his last sign of life
    swarm.conductor.step(now + 1)
    assert swarm.conductor.state.round == 2  # nobody waits for him any more
    if damaged:
        (swarm.files.root / STATE).unlink()

    now += 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    conductor = swarm.restarted()
    for number, old in ((2, 3.0), (3, 4.0), (4, 5.0)):
        swarm.join("bob", timestamp=old)
        swarm.submit("ann", number)
        now += swarm.manifest.peer_timeout / 4
        conductor.step(now)
        assert conductor.state.round == number + 1
    swarm.join("bob", timestamp=6.0)
    swarm.submit("ann", 5)
    conductor.step(now + swarm.manifest.peer_timeout / 4)
    assert conductor.state.phase == "running"  # now he is back


@pytest.mark.parametrize("machine", ["this machine", "another machine"])
@pytest.mark.parametrize("damage", ["gone", "half", "a stranger's", "of another swarm", "junk"])
def test_a_state_that_is_damaged_is_made_again(swarm, damage, machine, caplog, tmp_path):
    """From the private copy, and on a machine that has none from the history."""
    swarm.join("cleo")  # does not report, but gets a vote
    swarm.submit("ann", 1, vote="cleo")
    swarm.submit("bob", 1, vote="ann")
    swarm.conductor.step(time.time())
    swarm.conductor.step(time.time() + 2 * swarm.manifest.peer_timeout)
    assert swarm.conductor.state.members[peer_id("cleo")].wins == 1
    before, whole = swarm.conductor.state, swarm.files.read(STATE, 1 << 20)
    state = replace(before, round=5)
    broken = {
        "half": whole[: len(whole) // 2],
        "a stranger's": seal(state, Identity.generate()),
        "of another swarm": seal(replace(state, swarm="other"), OWNER),
        "junk": b"\x1f\x8bjunk",
    }
    if damage == "gone":
        (swarm.files.root / STATE).unlink()
    else:
        swarm.files.write(STATE, broken[damage])

    private = None if machine == "this machine" else str(tmp_path.with_name(f"{tmp_path.name}-private"))
    after = swarm.restarted(private_path=private).state
    assert position(after) == position(before) == position(read_state(swarm.store, swarm.manifest))
    forget = {"last_seen": 0.0}
    assert {p: replace(m, **forget) for p, m in after.members.items()} == {
        p: replace(m, **forget) for p, m in before.members.items()
    }
    assert len([r for r in caplog.records if STATE in r.message]) == (damage != "gone")


def test_lines_that_the_owner_did_not_write_are_no_history(swarm):
    stranger = Identity.generate()
    line = StageRecord(
        swarm=swarm.manifest.swarm(), round=4, stage=0, started=0.0, ended=1.0, why="everyone", members=[], reports={}
    )
    swarm.files.append(HISTORY, seal(line, stranger) + b"\n")
    swarm.files.append(HISTORY, seal(replace(line, swarm="other"), OWNER) + b"\n")
    swarm.files.append(HISTORY, b"junk\n\n")

    conductor = swarm.restarted()
    assert conductor.state.round == 1
    swarm.play(1, conductor)
    assert [ended for ended in swarm.history() if ended != (4, 0)] == [(0, 0), (1, 0)]


def test_a_line_that_is_laid_there_again_is_counted_once(swarm):
    swarm.files.append(HISTORY, swarm.files.read(HISTORY, 1 << 20))
    (swarm.files.root / STATE).unlink()

    assert [m.participation for m in swarm.restarted().state.members.values()] == [1, 1]


class DeadlyState(LocalFiles):
    def write(self, path, data):
        if path == STATE:
            raise Killed
        super().write(path, data)


def test_a_late_report_does_not_get_into_a_stage_that_has_ended(swarm):
    """Killed between history and state: what counts is what the history says, not what lies there now."""
    conductor = swarm.restarted(DeadlyState(swarm.files.root))
    for node in ("ann", "bob"):
        swarm.submit(node, 1)
    with pytest.raises(Killed):
        conductor.step(time.time())
    swarm.submit("cleo", 1)

    state = swarm.restarted().state
    assert state.round == 2
    assert [m.participation for m in state.members.values()] == [2, 2]
    assert peer_id("cleo") not in state.members


def test_who_joins_in_the_middle_of_a_stage_is_waited_for(swarm):
    swarm.conductor.step(time.time())
    swarm.join("cleo")
    swarm.submit("ann", 1)
    swarm.submit("bob", 1)
    swarm.conductor.step(time.time())
    assert swarm.conductor.state.round == 1

    swarm.submit("cleo", 1)
    swarm.conductor.step(time.time())
    assert swarm.conductor.state.round == 2


def test_a_look_at_a_stage_that_goes_on_is_one_call(swarm):
    files = Watched(swarm.files.root)
    conductor = swarm.restarted(files)
    conductor.step(time.time())
    files.calls.clear()
    for _ in range(10):
        conductor.step(time.time())

    assert files.calls == {"names": 10}


def rounds_in(swarm, folder):
    return sorted(int(name.removeprefix("round_")) for name in swarm.files.names(folder))


@pytest.mark.parametrize("archive", [False, True])
def test_only_the_rollouts_of_the_last_rounds_are_kept(swarm, archive):
    conductor = swarm.restarted(cleanup_rollouts=True, keep_rollout_rounds=2, archive_rollouts=archive)
    for number in range(1, 6):
        swarm.play(number, conductor)

    assert conductor.state.phase == "finished"
    assert rounds_in(swarm, "rollouts") == [4, 5]
    assert rounds_in(swarm, "archives") == ([0, 1, 2, 3] if archive else [])
    assert rounds_in(swarm, "rewards") == [0, 1, 2, 3, 4, 5]
    if archive:
        moved = swarm.files.read("archives/round_3/stage_0/ann.json", 1 << 20)
        assert moved == seal(publication(swarm.manifest, "ann", 3), identity_of("ann"))


def test_nothing_is_removed_unless_it_was_asked_for(swarm):
    for number in range(1, 6):
        swarm.play(number)

    assert rounds_in(swarm, "rollouts") == [0, 1, 2, 3, 4, 5]


def test_who_publishes_into_a_round_that_was_archived_does_not_stop_the_swarm(swarm):
    conductor = swarm.restarted(cleanup_rollouts=True, keep_rollout_rounds=1, archive_rollouts=True)
    swarm.play(1, conductor)
    for number, late in ((2, "cleo"), (3, "dan"), (4, "eve")):
        swarm.files.write(rollouts_path(0, 0, late), b"late")
        swarm.play(number, conductor)

    assert swarm.files.names("archives/round_0/stage_0") == [f"{n}.json" for n in ("ann", "bob", "cleo", "dan", "eve")]
    assert rounds_in(swarm, "rollouts") == []


def test_tidying_up_touches_rounds_only(swarm):
    others = ["backup7", "round_²", "round_03", "round_0 (1)", "round_", "roundx0", "round_-1"]
    for name in others:
        swarm.files.write(f"rollouts/{name}/keep.json", b"mine")
    conductor = swarm.restarted(cleanup_rollouts=True, keep_rollout_rounds=1)
    swarm.play(1, conductor)
    swarm.play(2, conductor)

    assert swarm.files.names("rollouts") == sorted(others)


def test_only_the_owner_conducts(swarm):
    stranger = Identity.generate()
    with pytest.raises(NetworkError) as error:
        RoundServer(
            swarm.store,
            swarm.manifest,
            stranger,
            NetworkSettings(identity_path="my.pem"),
            StorageSettings(),
            threading.Event(),
        )

    for part in (OWNER.peer_id, stranger.peer_id, "IDENTITY_PATH=my.pem"):
        assert part in str(error.value)


class Failing(LocalFiles):
    """Writes and listings fail as often as they are told to."""

    def __init__(self, root, failures, number=errno.EIO):
        super().__init__(root)
        self.failures, self.number = failures, number

    def fail(self, name):
        if self.failures.get(name, 0) > 0:
            self.failures[name] -= 1
            raise OSError(self.number, "the disk does not answer")

    def write(self, path, data):
        self.fail("write")
        super().write(path, data)

    def append(self, path, data, at=None):
        if self.failures.get("append", 0) > 0:
            super().append(path, data[:50])
        self.fail("append")
        super().append(path, data, at)

    def names(self, folder):
        self.fail("names")
        return super().names(folder)

    def move(self, folder, target):
        self.fail("move")
        super().move(folder, target)


@pytest.mark.parametrize("call", ["write", "append", "names", "move"])
def test_a_folder_that_fails_for_a_moment_stops_nothing(swarm, call):
    # A line of the history that cannot be added is there when the whole of it has been written again.
    files = Failing(swarm.files.root, {call: 1 if call == "append" else 3})
    conductor = swarm.restarted(files, cleanup_rollouts=True, keep_rollout_rounds=1, archive_rollouts=True)
    running = Background(conductor.run)
    for number in range(1, 6):
        swarm.submit("ann", number)
        swarm.submit("bob", number)

    assert running.result().phase == "finished"
    assert files.failures[call] == 0
    assert swarm.history() == [(number, 0) for number in range(6)]
    assert [m.participation for m in conductor.state.members.values()] == [6, 6]


def test_a_folder_that_disappears_is_said_and_found_again_as_it_was(swarm, tmp_path):
    for node in ("ann", "bob"):
        swarm.submit(node, 1)
    conductor = swarm.restarted()
    swarm.files.root.rename(tmp_path.with_name("gone"))
    with pytest.raises(FileNotFoundError):
        for _ in range(3):
            conductor.run()
    assert not swarm.files.root.exists()

    tmp_path.with_name("gone").rename(swarm.files.root)
    assert swarm.restarted().state.round == 1


class Forgetful(LocalFiles):
    """A call fails, and the next look at state and history is as if nothing had ever been written."""

    def __init__(self, root, failing):
        super().__init__(root)
        self.failing, self.forgotten = failing, set()

    def fail(self, call):
        if self.failing == call:
            self.failing, self.forgotten = None, {STATE, HISTORY}
            raise OSError(errno.EIO, "the disk does not answer")

    def write(self, path, data):
        self.fail("write")
        super().write(path, data)

    def append(self, path, data, at=None):
        self.fail("append")
        super().append(path, data, at)

    def read(self, path, limit):
        if path in self.forgotten:
            self.forgotten.remove(path)
            raise FileNotFoundError(errno.ENOENT, "nothing here", path)
        return super().read(path, limit)


@pytest.mark.parametrize("failing", ["write", "append"])
def test_a_folder_that_forgets_for_a_moment_does_not_take_the_swarm_back(swarm, failing):
    conductor, seen = swarm.restarted(Forgetful(swarm.files.root, failing)), []
    swarm.submit("ann", 1)
    conductor.step(time.time())  # so that this report was read before the trouble begins
    running = Background(conductor.run)
    for number in range(1, 6):
        for node in ("ann", "bob"):
            swarm.submit(node, number)
        seen.append(read_state(swarm.store, swarm.manifest).round)

    assert running.result().phase == "finished"
    assert seen == sorted(seen) and seen[0] >= 1
    assert swarm.history() == [(number, 0) for number in range(6)]


def test_a_disk_that_stays_full_is_said(swarm):
    conductor = swarm.restarted(Failing(swarm.files.root, {"write": 1000}, errno.ENOSPC))
    swarm.submit("ann", 1)
    swarm.submit("bob", 1)

    with pytest.raises(OSError, match="does not answer"):
        conductor.run()
    assert conductor.store.files.failures["write"] <= 1000 - TRIES


def test_a_folder_that_does_not_answer_is_waited_for_as_long_as_a_peer(swarm):
    """A server that starts again, a line that is down."""
    conductor = swarm.restarted(Failing(swarm.files.root, {"write": TRIES + 2}))
    running = Background(conductor.run)
    for number in range(1, 6):
        for node in ("ann", "bob"):
            swarm.submit(node, number)
    assert running.result().phase == "finished"


@pytest.mark.parametrize(("failures", "peer_timeout"), [(TRIES + 2, 60.0), (1000, 0.2)])
def test_a_node_waits_for_a_folder_that_does_not_answer(failures, peer_timeout, tmp_path):
    files, manifest = Failing(tmp_path, {"write": failures}), make_manifest(peer_timeout=peer_timeout)
    exchange = DocumentExchange(FolderStore(files), manifest, identity_of("ann"), "ann", threading.Event(), print)
    passes = failures < 1000
    with contextlib.nullcontext() if passes else pytest.raises(OSError, match="does not answer"):
        exchange.publish(publication(manifest, "ann"))
    assert (files.failures["write"] == 0) == passes and failures - files.failures["write"] >= TRIES


def test_rounds_on_an_interval_take_few_calls(tmp_path):
    """Per round: the conductor lists peers and reports, reads reports and the owner's list, writes history and state;
    nodes look
    at the state a few times, however often they could."""
    swarm = Small(tmp_path, round_end="interval", round_interval=0.3, rounds=5, peer_timeout=0.4)
    files, theirs = Watched(tmp_path), Watched(tmp_path)
    running = Background(swarm.restarted(files).run)
    node = DocumentCoordinator(FolderStore(theirs), swarm.manifest, identity_of("ann"), "ann", threading.Event(), 0.02)
    done, state = (-1, -1), node.wait_for((-1, -1))
    while state.phase == "running":
        done = (state.round, state.stage)
        node.submit(report(swarm.manifest, "ann", *done))
        state = node.wait_for(done)
    running.result()

    assert files.calls["names"] <= 2 * 5 + 2
    # Ann's reports and the owner's list; that list, both peers, bob's report, state and history at the start.
    assert files.calls["read"] <= 2 * 5 + 7
    assert files.calls["write"] + files.calls["append"] <= 2 * 5 + 1
    assert 0 < theirs.calls["write"] <= 4  # it had reported for round 0
    assert theirs.calls["read"] <= 15 + 5 * 3  # the first round is met in its middle and polled for


def test_a_node_that_joins_in_the_middle_of_an_interval_sees_the_next_round_in_time(tmp_path, monkeypatch):
    """Whoever waits moves the clock on, and the conductor with it."""
    swarm = Small(tmp_path, round_end="interval", round_interval=0.8, rounds=3)
    now = time.time()

    class Moving(threading.Event):
        def wait(self, timeout=None):
            nonlocal now
            while timeout > 0:
                step = min(timeout, POLL / 4)
                now, timeout = now + step, timeout - step
                swarm.conductor.step(now)
            return False

    monkeypatch.setattr(coordinator, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now))
    stop = Moving()
    stop.wait(0.5)
    node = DocumentCoordinator(swarm.store, swarm.manifest, identity_of("ann"), "ann", stop, POLL)
    assert node.wait_for((-1, -1)).round == 0
    for number in (1, 2):
        state = node.wait_for((number - 1, 0))
        assert state.round == number
        assert now - state.timestamp <= 2 * POLL


def test_a_consumer_that_has_enough_makes_no_further_calls(tmp_path):
    swarm, files = Small(tmp_path), Watched(tmp_path)
    exchange = DocumentExchange(
        FolderStore(files), swarm.manifest, identity_of("cleo"), "cleo", threading.Event(), print, POLL
    )
    exchange.publish(publication(swarm.manifest, "cleo"))
    assert files.calls == {"write": 1, "read": 1}  # whether it published before it was restarted
    exchange.publish(publication(swarm.manifest, "cleo"))
    assert files.calls == {"write": 2, "read": 1}
    files.calls.clear()

    assert next(exchange.collect(0, 0, ["ann", "bob"])).node == "ann"
    assert files.calls["read"] == 1
    assert len(list(exchange.collect(0, 0, ["ann", "bob"]))) == 2
    assert files.calls["read"] == 2  # ann's was kept
    for _ in range(3):
        assert len(list(exchange.collect(0, 0, ["ann", "bob"]))) == 2
    assert files.calls == {"read": 2}


def test_an_exchange_keeps_no_more_than_it_needs(tmp_path):
    swarm = Small(tmp_path)
    exchange = DocumentExchange(swarm.store, swarm.manifest, identity_of("ann"), "ann", threading.Event(), print)
    for number in range(200):
        exchange.publish(publication(swarm.manifest, "ann", number))
        assert len(list(exchange.collect(number, 0, ["ann", "nobody"]))) == 1
        assert list(exchange.collect(number, 0, ["../bad"])) == []

    assert len(exchange._cache) < 170
    assert sum(kept is not None for kept in exchange._cache.values()) <= 65


def test_the_log_says_who_joined_and_how_rounds_ended(swarm, caplog):
    caplog.set_level(logging.INFO)
    conductor = swarm.restarted()
    swarm.join("cleo")
    swarm.submit("cleo", 1)
    swarm.play(1, conductor)

    said = [record.message for record in caplog.records]
    assert [m for m in said if " joined (" in m] == [f"cleo joined ({peer_id('cleo')}, 'tiny')"]
    assert "round 1 stage 0 ended (everyone), 3 reports" in said


def test_a_conductor_in_a_thread_plays_to_the_end(tmp_path):
    swarm = Small(tmp_path, rounds=3)
    running = Background(swarm.conductor.run)
    for number in (1, 2):
        assert eventually(lambda number=number: read_state(swarm.store, swarm.manifest).round == number)
        swarm.submit("bob", number)
        swarm.submit("ann", number)

    assert running.result().phase == "finished"
    assert swarm.history() == [(0, 0), (1, 0), (2, 0)]


def test_a_flood_of_identities_does_not_crowd_out_those_who_play(swarm, monkeypatch):
    monkeypatch.setattr(round_server, "MAX_MEMBERS", 4)
    conductor, now = swarm.restarted(), time.time()
    flood = [f"sybil-{number}" for number in range(6)]
    for node in flood:
        swarm.join(node)
    conductor.step(now)
    state = read_state(swarm.store, swarm.manifest)
    assert len(state.members) == 4 and {peer_id("ann"), peer_id("bob")} <= state.members.keys()
    assert [refusal.why for refusal in state.refused.values()] == ["full"] * 4

    swarm.join("cleo")  # by now the flood is silent and has never reported
    conductor.step(now + 10 * swarm.manifest.peer_timeout)
    state = read_state(swarm.store, swarm.manifest)
    assert {peer_id("ann"), peer_id("bob"), peer_id("cleo")} <= state.members.keys()


def test_junk_in_a_history_is_counted_without_a_look_at_what_it_says(swarm, monkeypatch):
    swarm.files.append(HISTORY, b"x\n" * 200_000)
    looks = []
    monkeypatch.setattr(history, "unseal", lambda line, kind: looks.append(line) or unseal(line, kind))
    ended, unreadable = read_history(swarm.store)
    assert [(e.round, e.stage) for e in ended] == [(0, 0)] and unreadable == 200_000
    assert len(looks) == 1


class Counted(LocalFiles):
    """Counts what is opened."""

    opened = 0

    def read(self, path, limit, start=0):
        self.opened += 1
        return super().read(path, limit, start)

    def stat(self, path):
        self.opened += 1
        return super().stat(path)


def test_a_folder_full_of_junk_costs_a_bounded_look_and_hides_no_newcomer(swarm, caplog, monkeypatch):
    monkeypatch.setattr(submissions, "MAX_NEW", 50)
    monkeypatch.setattr(listing, "REST", 0.0)  # every look lists
    monkeypatch.setattr(submissions, "STRANGERS_SECONDS", math.inf)
    files = Counted(swarm.files.root)
    conductor = swarm.restarted(files)
    for number in range(1000):
        (swarm.files.root / "peers" / f"junk-{number:04}.json").write_bytes(b"{}")
        for name in (f"junk-{number:04}", f"zzz-{number:04}"):
            path = swarm.files.root / report_path(1, 0, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"junk")
    now = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(retries, "GIVE_UP_AFTER", 0.0)  # none of it becomes whole
        for look in range(60):
            files.opened = 0
            conductor.step(now + look * swarm.manifest.peer_timeout / 4)
            swarm.join("ann", timestamp=now + look)
            swarm.join("bob", timestamp=now + look)
            assert files.opened < 400, "two folders, new and known ones, members, state and list"
    named = [record for record in caplog.records if "is not used" in record.message]
    assert 0 < len(named) <= submissions.MAX_LOGGED
    swarm.join("cleo")
    conductor.step(now + 15 * swarm.manifest.peer_timeout + 1)
    assert peer_id("cleo") in conductor.state.members
    swarm.submit("ann", 1)
    swarm.submit("bob", 1)
    swarm.submit("cleo", 1)
    conductor.step(now + 15 * swarm.manifest.peer_timeout + 2)
    assert conductor.state.round == 2
    path = swarm.files.root / "peers" / "junk-0500.json"  # refused, and then it becomes somebody's
    me = introduction(swarm.manifest, "junk-0500", 1.0)
    path.write_bytes(seal(me, identity_of("junk-0500")))
    for look in range(60):
        conductor.step(now + (16 + look / 4) * swarm.manifest.peer_timeout)
    assert peer_id("junk-0500") in conductor.state.members


def test_members_are_read_by_name_where_a_folder_is_too_full_to_list(swarm, monkeypatch):
    for module in (files_module, submissions):
        monkeypatch.setattr(module, "MAX_NAMES", 3)
    for folder_name in ("peers", "rewards/round_1/stage_0"):
        for number in range(200):
            swarm.files.write(f"{folder_name}/{number:03}.json", b"{}")
    conductor = swarm.restarted()
    swarm.submit("ann", 1)
    swarm.submit("bob", 1)
    conductor.step(time.time())
    assert conductor.state.round == 2


def test_a_newcomer_is_found_although_a_look_has_time_for_one_document_only(swarm, monkeypatch):
    monkeypatch.setattr(submissions, "STRANGERS_SECONDS", 0.0)
    conductor, now = swarm.restarted(), time.time()
    for number in range(30):  # not junk: signed, and looked at again and again
        swarm.files.write(f"peers/a{number:02}.json", seal(introduction(ELSEWHERE, "x"), identity_of("x")))
    swarm.join("cleo")
    for look in range(33):
        conductor.step(now + look * swarm.manifest.peer_timeout)
    assert peer_id("cleo") in conductor.state.members


def test_a_crowded_folder_is_listed_less_often():
    now = [0.0]

    class Slow:
        listed = 0

        def names(self, folder):
            self.listed += 1
            now[0] += 1.0
            return [f"n{number}.json" for number in range(2000)] if folder == "peers" else ["ann.json"]

    files, throttled = Slow(), ThrottledListing(lambda: now[0])
    store = FolderStore(files)
    assert len(throttled.nodes(store, PEERS)) == 2000
    assert throttled.nodes(store, PEERS) is None and files.listed == 1
    assert throttled.nodes(store, report_key(1, 0)) == ["ann"], "another folder is"
    now[0] = 19.5
    assert throttled.nodes(store, PEERS) is None
    now[0] = 20.0
    assert len(throttled.nodes(store, PEERS)) == 2000


def test_a_flood_of_newcomers_fills_no_log(swarm, caplog, monkeypatch):
    monkeypatch.setattr(round_server, "MAX_JOINED", 5)
    caplog.set_level(logging.INFO)
    conductor = swarm.restarted()
    for number in range(40):
        swarm.join(f"sybil-{number}")
    conductor.step(time.time())
    assert len(conductor.state.members) == 42
    assert sum(" joined (" in record.message for record in caplog.records) <= 5


@pytest.fixture
def deep(tmp_path):
    """Makes directories inside each other, more than a path could name, and removes them in the end."""
    yield _made_deep
    subprocess.run(["rm", "-rf", tmp_path], check=True)


def _made_deep(path, levels):
    path.mkdir(parents=True)
    here = os.open(path, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=here)
        inside = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inside
    os.close(here)


def test_a_tree_in_place_of_the_state_is_moved_away_at_the_next_look(swarm, deep):
    conductor = swarm.restarted()
    conductor.step(time.time())
    (swarm.files.root / STATE).unlink()
    deep(swarm.files.root / STATE, 50)
    conductor.step(time.time())
    assert read_state(swarm.store, swarm.manifest).round == 1


@pytest.mark.parametrize("archive", [False, True])
def test_a_tree_too_deep_to_remove_keeps_no_other_round_from_being_tidied(swarm, archive, deep, caplog):
    deep(swarm.files.root / "rollouts" / "round_0" / "stage_9", 1500)
    if archive:
        deep(swarm.files.root / "archives" / "round_0" / "stage_9", 1500)
    conductor = swarm.restarted(cleanup_rollouts=True, keep_rollout_rounds=2, archive_rollouts=archive)
    for number in range(1, 6):
        swarm.play(number, conductor)
    assert rounds_in(swarm, "rollouts")[-2:] == [4, 5]
    assert set(rounds_in(swarm, "rollouts")) <= {0, 4, 5}
    assert sum("cannot be removed" in record.message for record in caplog.records) <= 5


def test_a_restart_reads_the_reports_of_members_and_not_what_lies_beside_them(swarm):
    conductor = swarm.restarted()
    swarm.submit("ann", 1)
    swarm.submit("bob", 1)
    conductor._write_state = lambda state: None  # killed between the history and the state
    conductor.step(time.time())
    for number in range(50):
        swarm.files.write(f"rewards/round_1/stage_0/junk-{number}.json", b"{}")
        swarm.files.write(f"peers/junk-{number}.json", b"{}")
    files = Counted(swarm.files.root)
    again = swarm.restarted(files)
    assert again.state.round == 2 and files.opened < 20
