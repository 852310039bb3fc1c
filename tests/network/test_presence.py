"""Two nodes never work with one identity: on one machine by a lock, between machines by signs of life."""

import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time

import pytest
from processes import end, run, start, until

from rl_swarm.network import presence
from rl_swarm.network.base import NetworkError
from rl_swarm.network.documents import PEERS
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.presence import TwinError, Watch, only_one_here
from rl_swarm.node.worker import check_name
from rl_swarm.protocol import rounds
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.rounds import PeerInfo, State
from rl_swarm.protocol.wire import seal

ME = Identity.generate()
HOLDER = (
    "import sys; from pathlib import Path; from rl_swarm.protocol.identity import Identity\n"
    "from rl_swarm.network.presence import only_one_here\n"
    "with only_one_here(Identity.load(Path(sys.argv[1])), 'swarm'):\n"
    "    print('held', flush=True); sys.stdin.read()"
)


@pytest.fixture(autouse=True)
def own_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(presence.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of `ME`."""
    (tmp_path / "me.pem").write_bytes(ME.pem())
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "me.pem")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    end(process)


def test_a_second_process_is_told_who_has_the_identity(holder, monkeypatch):
    monkeypatch.setattr(presence, "LOCK_SECONDS", 0.0)
    with pytest.raises(TwinError) as refused, only_one_here(ME, "swarm"):
        pass
    for part in (ME.peer_id, platform.node(), f"process {holder.pid}", "IDENTITY_PATH="):
        assert part in str(refused.value)


def test_another_swarm_and_another_identity_are_free(holder):
    with only_one_here(ME, "another"), only_one_here(Identity.generate(), "swarm"):
        pass


def test_whoever_was_killed_is_not_in_the_way(holder):
    holder.send_signal(signal.SIGKILL)
    with only_one_here(ME, "swarm"):
        pass


def test_the_lock_is_free_again_after_a_normal_end_and_leaves_nothing(holder, tmp_path):
    holder.communicate("")
    with only_one_here(ME, "swarm"):
        pass
    with only_one_here(ME, "swarm"):
        assert len(list(tmp_path.glob("rl-swarm-*/*.lock"))) == 1
    assert not list(tmp_path.glob("rl-swarm-*/*.lock"))


def test_a_machine_without_a_place_for_locks_still_has_a_node(tmp_path, caplog):
    (tmp_path / f"rl-swarm-{os.getuid()}").write_bytes(b"a file")
    with only_one_here(ME, "swarm"):
        assert "no lock" in caplog.text


def test_a_place_for_locks_that_is_somebody_elses_is_not_used(tmp_path, monkeypatch, caplog):
    mine = os.getuid()
    monkeypatch.setattr(presence.os, "getuid", lambda: mine + 1)
    with only_one_here(ME, "swarm"):
        assert "no lock" in caplog.text and "another user" in caplog.text
    assert not list(tmp_path.glob("rl-swarm-*/*.lock"))


def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path, caplog):
    with only_one_here(ME, "swarm"):
        (lock,) = tmp_path.glob("rl-swarm-*/*.lock")
    (tmp_path / "file").write_text("mine")
    lock.symlink_to(tmp_path / "file")
    with only_one_here(ME, "swarm"):
        assert "no lock" in caplog.text
    assert (tmp_path / "file").read_text() == "mine"


def test_a_process_that_is_refused_leaves_the_holders_record(holder, tmp_path, monkeypatch):
    monkeypatch.setattr(presence, "LOCK_SECONDS", 0.0)
    for _ in range(2):
        with pytest.raises(TwinError, match=f"process {holder.pid}"), only_one_here(ME, "swarm"):
            pass


def introduce(store, host="elsewhere", pid=7, timestamp=None, joined=5.0, who=ME):
    now = time.time() if timestamp is None else timestamp
    peer = PeerInfo(
        peer_id=who.peer_id, swarm="swarm", node="me", model="tiny", host=host, pid=pid, joined=joined, timestamp=now
    )
    store.write(PEERS.of("me"), seal(peer, who))
    return peer


class Stop(threading.Event):
    """Counts how often somebody waits for it."""

    waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waits += 1
        return super().wait(timeout)


def waits(watch: Watch, peer_timeout: float = 60.0) -> int:
    stop = Stop()
    watch.wait(peer_timeout, stop)
    return stop.waits


def test_nothing_is_waited_for_on_a_normal_start(tmp_path):
    """No record, one of this machine (a node that was killed), an old one, or a stranger's under our name."""
    store = FolderStore.at(tmp_path)
    assert waits(Watch(store, "me", ME, "swarm")) == 0
    introduce(store, host=platform.node(), pid=os.getpid() + 1)
    assert waits(Watch(store, "me", ME, "swarm")) == 0
    introduce(store, timestamp=time.time() - 61)
    assert waits(Watch(store, "me", ME, "swarm")) == 0
    introduce(store, who=Identity.generate())
    assert waits(Watch(store, "me", ME, "swarm")) == 0


def test_a_node_that_has_stopped_elsewhere_is_waited_for_a_little_and_then_forgotten(tmp_path):
    store = FolderStore.at(tmp_path)
    introduce(store)
    assert waits(Watch(store, "me", ME, "swarm"), peer_timeout=0.4) > 0


def test_a_sign_of_life_that_changes_elsewhere_is_a_clash(tmp_path):
    store = FolderStore.at(tmp_path)
    introduce(store)
    watch = Watch(store, "me", ME, "swarm")
    introduce(store)
    with pytest.raises(TwinError, match="on elsewhere, process 7, since"):
        watch.wait(60.0, threading.Event())


def test_clocks_may_differ(tmp_path):
    """The other machine's clock is a day behind: its sign of life counts, because it changes."""
    store, yesterday = FolderStore.at(tmp_path), time.time() - 86400
    introduce(store, timestamp=yesterday)
    watch = Watch(store, "me", ME, "swarm")
    assert waits(watch) == 0
    introduce(store, timestamp=yesterday + 1)
    with pytest.raises(TwinError):
        watch.wait(60.0, threading.Event())


def test_of_two_nodes_that_started_together_the_later_one_yields(tmp_path):
    """One sign is not enough: it may be a dead node's last, synced late."""
    store = FolderStore.at(tmp_path)
    watch = Watch(store, "me", ME, "swarm")
    ours = introduce(store, host=platform.node(), pid=os.getpid(), joined=6.0)
    assert not watch.must_yield(ours)
    introduce(store, timestamp=1.0)
    assert not watch.must_yield(ours)
    assert not watch.must_yield(ours), "the same sign again"
    introduce(store, timestamp=2.0)
    assert watch.must_yield(ours)
    introduce(store, timestamp=3.0, joined=6.5)
    assert not watch.must_yield(ours), "the other one came later, and yields"


def test_a_second_node_is_refused_and_a_killed_one_comes_back(tmp_path):
    """Real processes, one key, one folder. A node has the lock before it loads anything."""
    address = tmp_path / "experiments" / "one"
    coordinator = start(tmp_path, "coordinate", str(address), "--set", "poll_interval=0.1")
    started = [coordinator]

    def holder() -> int:
        found = list(tmp_path.glob("rl-swarm-*/*.lock"))
        text = found[0].read_text() if found else ""
        return json.loads(text)["pid"] if text else 0

    try:
        until(lambda: (address / "manifest.json").exists())
        first = start(tmp_path, "join", str(address))  # with the coordinator's key, as in `up`
        started.append(first)
        until(lambda: holder() == first.pid)
        code, output = run(tmp_path, "join", str(address))
        assert code == 1 and f"process {first.pid}" in output and "IDENTITY_PATH=" in output, output
        assert "Traceback" not in output
        first.kill()
        again = start(tmp_path, "join", str(address))
        started.append(again)
        until(lambda: holder() == again.pid)
        assert coordinator.poll() is None
    finally:
        for process in started:
            end(process)


def test_a_peer_that_takes_part_under_another_name_is_told_which():
    state = rounds.record_presence(State(swarm="swarm"), ME.peer_id, "first-name", 1.0)
    check_name(state, ME, "first-name")
    check_name(state, Identity.generate(), "second-name")
    with pytest.raises(NetworkError, match="NODE_ID=first-name"):
        check_name(state, ME, "second-name")
