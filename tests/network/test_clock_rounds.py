"""Rounds by the clock: no coordinator, and nobody who is needed."""

import threading
import time

import pytest
from msgspec.structs import replace
from swarms import OWNER, AmongPeers, Background, identity_of, introduction, publication

from rl_swarm.network.documents import ACCESS_LIST, PEERS
from rl_swarm.network.p2p.clock_rounds import ClockCoordinator
from rl_swarm.protocol.admission import AccessList
from rl_swarm.protocol.wire import seal

INTERVAL = 10.0


class Clock:
    def __init__(self, now):
        self.now = now

    def __call__(self):
        return self.now


class Peers(AmongPeers):
    """Without a conductor."""

    def __init__(self, folder, **changes):
        self.clock = Clock(time.time())
        super().__init__(folder, round_end="interval", round_interval=INTERVAL, created=self.clock.now, **changes)
        super().close()

    def member(self, node, stop=None, joined=0.0):
        clock = ClockCoordinator(
            self.store(node), self.manifest, identity_of(node), stop or threading.Event(), 0.0, self.clock
        )
        clock.register(self.introduction(node, joined))
        return clock

    def introduction(self, node, joined=0.0):
        peer = introduction(self.manifest, node, self.clock.now)
        return replace(peer, node=peer.peer_id, joined=joined)

    def store(self, node):
        store = super().store(node)
        store.clock = self.clock
        return store

    def close(self):
        pass


@pytest.fixture
def peers(tmp_path):
    return Peers(tmp_path, rounds=3)


def names(state):
    who = {identity_of(node).peer_id: node for node in ("ann", "bob", "cleo")}
    assert all(member.node == peer_id for peer_id, member in state.members.items())
    return sorted(who[peer_id] for peer_id in state.members)


def test_everybody_knows_the_round_and_who_is_there(peers):
    ann, bob = peers.member("ann"), peers.member("bob")
    for passed, phase, number in ((0, "running", 0), (9.9, "running", 0), (10.1, "running", 1), (30.1, "finished", 3)):
        start = peers.manifest.created
        peers.clock.now = start + passed
        for one in (ann, bob):
            state = one.current()
            assert (state.phase, state.round, state.stage) == (phase, number, 0)
            assert names(state) == ["ann", "bob"]
            assert state.swarm == peers.manifest.swarm()


def test_every_stage_of_a_round_takes_an_interval(tmp_path):
    peers = Peers(tmp_path, rounds=2, stages=3)
    ann = peers.member("ann")
    seen, start = [], peers.clock.now
    for number in range(7):
        peers.clock.now = start + number * INTERVAL + 0.1
        state = ann.wait_for(seen[-1] if seen else (-1, -1))
        seen.append((state.round, state.stage))
        assert state.started == pytest.approx(start + number * INTERVAL)
        assert state.phase == ("running" if number < 6 else "finished")
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


def test_the_next_round_is_waited_for_and_the_stop_ends_the_waiting(peers):
    stop = threading.Event()
    ann = peers.member("ann", stop)
    assert ann.wait_for((-1, -1)).round == 0
    waiting = Background(lambda: ann.wait_for((0, 0)))
    time.sleep(0.1)
    assert waiting.is_alive()
    stop.set()
    assert waiting.result() is None
    peers.clock.now += 2 * INTERVAL
    late = peers.member("bob")
    assert late.wait_for((0, 0)).round == 2
    peers.clock.now += 2 * INTERVAL
    assert late.wait_for((2, 0)).phase == "finished"


def test_who_gives_no_sign_of_life_is_no_member(peers):
    ann, bob = peers.member("ann"), peers.member("bob", joined=2.0)
    assert names(ann.current()) == ["ann", "bob"]
    peers.clock.now += 3 * peers.manifest.peer_timeout
    ann.register(peers.introduction("ann"))
    assert names(ann.current()) == ["ann"]
    assert names(bob.current()) == ["ann", "bob"]  # it knows of itself


@pytest.mark.parametrize("name", ["bob", identity_of("bob").peer_id], ids=["a name", "an id"])
def test_nobody_takes_anothers_name(peers, name):
    ann, cleo = peers.member("ann"), peers.member("cleo", joined=5.0)
    stolen = replace(peers.introduction("cleo"), node=name)
    peers.store("cleo").write(PEERS.of(name), seal(stolen, identity_of("cleo")))
    bob = peers.member("bob", joined=7.0)
    for one in (ann, bob, cleo):
        assert names(one.current()) == ["ann", "bob", "cleo"]
    key = PEERS.of(identity_of("bob").peer_id)
    assert ann.store.read(key, 1 << 16) == bob.store.read(key, 1 << 16)


def test_whom_the_owner_denies_is_nobodys_member(peers):
    ann, bob = peers.member("ann"), peers.member("bob")
    assert names(ann.current()) == ["ann", "bob"]
    roll = AccessList(swarm=peers.manifest.swarm(), number=1, denied=[identity_of("bob").peer_id])
    peers.store("coordinator").write(ACCESS_LIST, seal(roll, OWNER))
    assert names(ann.current()) == ["ann"]
    bob.current()
    assert bob.turned_away == "denied"
    assert ann.refusal(identity_of("bob").peer_id) == "denied"


def test_rollouts_are_found_by_the_members_names(peers):
    ann, bob = peers.member("ann"), peers.member("bob")
    me = identity_of("ann").peer_id
    sent = replace(publication(peers.manifest, "ann", 0), node=me)
    exchange = peers.exchange("ann")
    exchange.node = me
    exchange.publish(sent)
    assert names(bob.current()) == ["ann", "bob"]
    assert list(peers.exchange("bob").collect(0, 0, [me], 5.0)) == [sent]
    assert ann.current().leaderboard()
