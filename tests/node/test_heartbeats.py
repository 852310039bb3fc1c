"""A heartbeat tells the phase that a node is in: at once in a folder on this machine, else with the next heartbeat."""

import threading
from pathlib import Path

import msgspec
import pytest
from swarms import FOR_EVER, POLL, eventually, identity_of, introduction, make_manifest

from rl_swarm.network.coordinator import DocumentCoordinator
from rl_swarm.network.documents import PEERS, RECORD_BYTES
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.presence import Watch
from rl_swarm.node.heartbeats import MAX_FAILURES, CurrentPhase, heartbeats, phase_pause
from rl_swarm.protocol.rounds import PeerInfo
from rl_swarm.protocol.wire import unseal
from rl_swarm.telemetry.journal import Stopwatch


class Node:
    """What sends the heartbeats of ann, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.manifest, self.identity, self.stop = make_manifest(), identity_of("ann"), threading.Event()
        self.store, self.phase = FolderStore.at(folder), CurrentPhase()
        self.peer = introduction(self.manifest, "ann")
        self.coordinator = DocumentCoordinator(self.store, self.manifest, self.identity, "ann", self.stop, POLL)
        self.coordinator.register(self.peer)

    def beats(self, every: float, soonest: float | None):
        watch = Watch(self.store, "ann", self.identity, self.manifest.swarm())
        return heartbeats(self.coordinator, self.peer, every, self.stop, watch, self.phase, soonest)

    def written(self) -> PeerInfo:
        return unseal(self.store.read(PEERS.of("ann"), RECORD_BYTES), PeerInfo)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_phase_that_begins_is_told_though_the_next_heartbeat_is_far(node: Node) -> None:
    watch = Stopwatch(node.phase.begin)
    with node.beats(FOR_EVER, soonest=0.01):
        for part, word in (("generate", "sampling"), ("score", "scoring"), ("collect", "collecting"), ("x", "x")):
            with watch(part):
                assert eventually(lambda word=word: node.written().phase == word)


def test_elsewhere_it_waits_for_the_next_heartbeat(node: Node) -> None:
    with node.beats(FOR_EVER, soonest=None):
        node.phase.begin("train")
        node.stop.wait(0.3)
        assert node.written().phase is msgspec.UNSET
    with node.beats(0.05, soonest=None):
        assert eventually(lambda: node.written().phase == "training")
        first = node.written().timestamp
        assert eventually(lambda: node.written().timestamp > first), "and heartbeats go on without a new phase"


def test_a_node_ends_when_its_heartbeats_fail(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def fail(peer: PeerInfo) -> None:
        tries.append(peer)
        raise OSError("the drive is gone")

    monkeypatch.setattr(node.coordinator, "register", fail)
    with pytest.raises(OSError, match="gone"), node.beats(0.02, soonest=0.01):
        assert node.stop.wait(60)
    assert len(tries) == MAX_FAILURES


def test_only_in_a_folder_that_is_looked_at_often_is_a_phase_told_at_once() -> None:
    assert phase_pause(is_url=False, poll=0.02) == 1.0
    assert phase_pause(is_url=False, poll=2.0) is None and phase_pause(is_url=True, poll=0.02) is None
