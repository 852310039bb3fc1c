"""Who is here, in swarms of ten to a thousand: what a node reads and writes does not grow with them.

The table is a dictionary here: what is tested is where introductions are left and looked for.
"""

import functools
import hashlib
import itertools
import random
import threading
from collections import Counter
from statistics import mean

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace
from swarms import make_manifest

from rl_swarm.network.documents import PEERS
from rl_swarm.network.p2p import documents, members
from rl_swarm.network.p2p import records as notices
from rl_swarm.network.p2p.clock_rounds import FEW, ClockCoordinator
from rl_swarm.network.p2p.documents import PeerStore
from rl_swarm.network.p2p.members import FULLEST, LOOK_ROUNDS, MAX_CONTACTS, MAX_OF_A_LOOK
from rl_swarm.network.p2p.records import DEEPEST, KEPT_SECONDS, dht_key, parts_of
from rl_swarm.protocol import admission
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.rounds import PeerInfo
from rl_swarm.protocol.wire import seal, unseal

TIMEOUT, INTERVAL = 120.0, 60.0


def identities(word):
    """The same ones every time: what is drawn by chance here is always the same."""
    for number in itertools.count():
        seed = hashlib.sha256(f"{word} {number}".encode()).digest()
        yield Identity._from_key(Ed25519PrivateKey.from_private_bytes(seed))


OWNER, *IDENTITIES = itertools.islice(identities("peer"), 1001)


class Table:
    """An engine of one peer, on a dictionary that all of them share."""

    addresses = ()

    def __init__(self, world):
        self.world, self.reads, self.stores = world, [], []  # records of each call

    def store(self, key, subkey, value, seconds, copies=5):
        self.stores.append(key)
        self.world.table.setdefault(key, {})[subkey] = (value, self.world.now + seconds)
        return True

    def find(self, key, quick=False):
        found = self.world.table.get(key, {})
        live = {subkey: value for subkey, (value, expires) in found.items() if expires > self.world.now}
        self.reads.append(len(live))
        return live

    def ask(self, peer_id, request, limit, seconds=0.0):
        if peer_id not in self.world.peers:
            raise OSError(f"{peer_id} cannot be reached")
        return

    def introduce(self, peer_id, addresses):
        pass


class Memory:
    """A peer's disk."""

    root = "memory"

    def __init__(self):
        self.documents = {}

    def write(self, key, data):
        self.documents[key] = data


class World:
    """The table, the clock and the peers of one swarm."""

    def __init__(self, **changes):
        self.now = 1000.0
        self.token = None  # an invitation by which peers come
        self.manifest = make_manifest(
            peer_id=OWNER.peer_id,
            round_end="interval",
            round_interval=INTERVAL,
            peer_timeout=TIMEOUT,
            created=self.now,
            rounds=10**6,
            **changes,
        )
        self.table = {}
        self.peers = {}

    def peer(self, identity):
        files = PeerStore(Table(self), self.manifest.swarm(), OWNER.peer_id, identity, Memory(), lambda: self.now)
        files.rng = random.Random(identity.peer_id)
        return ClockCoordinator(files, self.manifest, identity, threading.Event(), 2.0, lambda: self.now, files.rng)

    def join(self, identities):
        for identity in identities:
            peer = self.peers[identity.peer_id] = self.peer(identity)
            peer.current()  # as a newcomer looks before it introduces itself
            self.sign(peer)

    def sign(self, peer):
        me = peer.identity.peer_id
        peer.register(
            PeerInfo(
                peer_id=me,
                swarm=self.manifest.swarm(),
                node=me,
                model="tiny",
                joined=self.now,
                timestamp=self.now,
                ticket=admission.make_ticket(self.token, self.manifest, me) if self.token else "",
            )
        )

    def play(self, rounds):
        """Everybody looks once a round and gives a sign of life, in another order every time."""
        for _ in range(rounds):
            self.now += INTERVAL
            order = list(self.peers.values())
            random.Random(self.now).shuffle(order)
            for peer in order:
                peer.current()
                self.sign(peer)

    def depths(self):
        return Counter(peer.members.depth for peer in self.peers.values())


@pytest.fixture
def make_world(monkeypatch):
    cached = functools.lru_cache(100_000)(unseal)  # a thousand peers read the same documents
    for module in (documents, members, notices):
        monkeypatch.setattr(module, "unseal", cached)
    return World


@pytest.fixture
def world(make_world):
    return make_world()


def ids(peers):
    return {one.peer_id for one in peers}


@pytest.mark.slow
def test_what_a_node_reads_and_leaves_does_not_grow_with_the_swarm(world):
    read, left = {}, {}
    for count in (10, 100, 1000):
        world.join(IDENTITIES[len(world.peers) : count])
        world.play(3)
        engines = [peer.store.engine for peer in world.peers.values()]
        for engine in engines:
            engine.reads.clear()
            engine.stores.clear()
        world.play(4)
        read[count] = mean(sum(engine.reads) for engine in engines) / 4
        left[count] = mean(len(engine.stores) for engine in engines) / 4
        assert max(max(engine.reads) for engine in engines) < 8 * FULLEST
        assert all(len(engine.reads) <= 4 + 2 * DEEPEST for engine in engines)
        at = world.depths()
        assert max(at) - min(at) <= 2 and sum(sorted(at.values())[-2:]) >= 0.9 * count
    assert list(world.depths()) and set(world.depths()) <= {6, 7, 8}
    assert max(read.values()) <= 2 * FULLEST and max(left.values()) <= 2.5
    assert read[1000] <= 1.2 * read[10] and left[1000] <= 1.4 * left[10]
    assert min(peer.members.count_others() for peer in world.peers.values()) >= FEW


def test_a_small_swarm_is_read_whole_and_everybody_of_a_large_one_is_met(world):
    world.join(IDENTITIES[:12])
    world.play(1)
    assert all(
        ids(m.info for m in peer.members.known.values()) == ids(IDENTITIES[:12]) for peer in world.peers.values()
    )
    world.join(IDENTITIES[12:200])
    world.play(5)
    one = world.peers[IDENTITIES[0].peer_id].members
    met = set()
    for _ in range(4):
        for _ in range(160):
            one.look()
            met |= one.known.keys()
        world.play(1)
    assert met == ids(IDENTITIES[:200])


def test_in_a_swarm_of_two_parts_everybody_knows_everybody(world):
    world.join(IDENTITIES[:20])
    world.play(6)
    for _ in range(8):
        world.play(1)
        for peer in world.peers.values():
            assert peer.members.known.keys() == ids(IDENTITIES[:20])


def test_the_depth_follows_a_swarm_that_grows_and_one_that_shrinks(world):
    world.join(IDENTITIES[:10])
    world.play(3)
    assert set(world.depths()) == {0}
    world.join(IDENTITIES[10:200])
    world.play(5)
    assert set(world.depths()) <= {3, 4, 5}
    for identity in IDENTITIES[8:200]:
        del world.peers[identity.peer_id]
    world.play(12)
    assert set(world.depths()) == {0}
    assert all(ids(m.info for m in peer.members.known.values()) == ids(IDENTITIES[:8]) for peer in world.peers.values())


@pytest.mark.parametrize("count", [1, 5, 20, 50, 150])
def test_a_newcomer_finds_its_way_with_a_few_reads(world, count):
    world.join(IDENTITIES[:count])
    world.play(8)
    newcomer = world.peer(IDENTITIES[-1])
    newcomer.current()
    usual = world.depths().most_common(1)[0][0]
    assert abs(newcomer.members.depth - usual) <= 1
    assert newcomer.members.count_others() >= min(count, 3)
    assert len(newcomer.store.engine.reads) <= 6 and max(newcomer.store.engine.reads) <= 3 * FULLEST
    world.sign(newcomer)
    world.peers[IDENTITIES[-1].peer_id] = newcomer
    world.play(3)
    knowing = [p for p in world.peers.values() if IDENTITIES[-1].peer_id in p.members.known]
    assert len(knowing) > min(count, 10)


def test_a_flood_of_identities_in_one_part_decides_nothing(world):
    """Somebody makes keys until four hundred of them are in one part."""
    world.join(IDENTITIES[:100])
    world.play(5)
    swarm, now = world.manifest.swarm(), world.now
    part = "peers/010"
    sybils = itertools.islice((who for who in identities("sybil") if part in parts_of(swarm, who.peer_id)), 400)
    for who in sybils:
        store = world.peer(who).store
        info = PeerInfo(peer_id=who.peer_id, swarm=swarm, node=who.peer_id, model="", joined=0.0, timestamp=now)
        store.members.depth = 3
        store.write(PEERS.of(who.peer_id), seal(info, who))
    assert len(world.table[dht_key(swarm, part)]) > 400
    honest = ids(IDENTITIES[:100])
    for _ in range(8):
        known = {me: set(peer.members.known) for me, peer in world.peers.items()}
        world.play(1)
        assert sum(world.depths()[depth] for depth in (2, 3, 4)) >= 97  # who is led astray once comes back
        for me, peer in world.peers.items():
            met = peer.members.known.keys() - known[me]
            assert len(met - honest) <= 2 * MAX_OF_A_LOOK
    assert min(len(peer.members.known.keys() & honest) for peer in world.peers.values()) > 5


def test_a_flood_of_those_who_were_not_invited_hides_nobody(make_world):
    world = make_world(admission="invited")
    _, token = admission.invite(world.manifest, OWNER, uses=100, expires=10**9)
    for who in itertools.islice(identities("sybil"), 200):
        world.sign(world.peer(who))  # in the one part that a small swarm has
    world.token = token
    world.join(IDENTITIES[:10])
    world.play(4)
    for peer in world.peers.values():
        assert peer.members.known.keys() == ids(IDENTITIES[:10]) == peer.current().members.keys()
        assert peer.members.depth == 0


def test_one_that_knows_enough_looks_once_a_round_and_one_that_knows_few_as_often_as_it_polls(world):
    world.join(IDENTITIES[:20])
    world.play(4)
    one = world.peers[IDENTITIES[0].peer_id]
    looks = []
    one._look = lambda: looks.append(world.now)
    for _ in range(60):
        world.now += 1.0
        one.current()
    assert len(looks) == 1
    for identity in IDENTITIES[1:18]:
        one.members.known.pop(identity.peer_id, None)
    for _ in range(60):
        world.now += 1.0
        one.current()
    assert len(looks) == 31


def test_in_a_large_swarm_one_that_knows_enough_looks_now_and_then_and_forgets_nobody_who_answers(world):
    world.join(IDENTITIES[:200])
    world.play(12)
    one = world.peers[IDENTITIES[0].peer_id]
    reads, looked = one.store.engine.reads, 0
    for _ in range(2 * LOOK_ROUNDS):
        before = len(reads)
        for peer_id in list(one.members.known):
            one.members.record_answer(peer_id)
        kept = {me for me in one.members.known}
        world.play(1)
        looked += len(reads) > before
        assert (
            one.members.count_others() >= MAX_CONTACTS // 2
            and len(kept & one.members.known.keys()) >= MAX_CONTACTS // 2
        )
    assert looked == 2
    one.members.known = {me: one.members.known[me] for me in list(one.members.known)[:10]}
    before = len(reads)
    world.play(1)
    assert len(reads) > before


def test_swarms_that_lost_each_other_meet_again(world):
    """A network that falls apart and comes together again: the smaller part has shrunk to another depth."""
    world.join(IDENTITIES[:100])
    world.play(4)
    many = dict(list(world.peers.items())[:95])
    few = dict(list(world.peers.items())[95:])
    table, aside = world.table, {}
    for _ in range(8):
        world.peers, world.table = few, aside
        world.play(1)
        world.now -= INTERVAL
        world.peers, world.table = many, table
        world.play(1)
    assert {peer.members.depth for peer in few.values()} == {0}
    assert not few.keys() & set().union(*(peer.members.known for peer in many.values()))
    for key, records in aside.items():
        table.setdefault(key, {}).update(records)
    world.peers = many | few
    world.play(16)
    assert all(len(peer.members.known.keys() & many.keys()) > 10 for peer in few.values())
    assert len(set().union(*(peer.members.known for peer in many.values())) & few.keys()) == 5


def test_a_network_that_is_down_for_a_while_makes_nobody_forget(world, monkeypatch):
    world.join(IDENTITIES[:40])
    world.play(4)
    one = world.peers[IDENTITIES[0].peer_id]
    before, depth = set(one.members.known), one.members.depth

    def down(key):
        raise OSError("no network")

    monkeypatch.setattr(one.store.engine, "find", down)
    world.now += INTERVAL
    assert one.current().round == 5 and len(one.current().members) > len(before) / 2
    assert one.members.depth == depth
    monkeypatch.setattr(one.store.engine, "find", lambda key, quick=False: {})  # or nobody answers
    for _ in range(LOOK_ROUNDS):
        one.members.look()
    assert one.members.depth == 0
    monkeypatch.undo()
    one.members.look()
    assert abs(one.members.depth - depth) <= 1


def test_introductions_that_are_old_of_others_or_of_other_swarms_are_left_out(world):
    ann, bob, cleo, dora = IDENTITIES[:4]
    world.join([ann])
    one = world.peers[ann.peer_id]
    swarm = world.manifest.swarm()

    def introduce(who, **changes):
        info = PeerInfo(peer_id=who.peer_id, swarm=swarm, node=who.peer_id, model="", joined=0.0, timestamp=world.now)
        world.peer(who).store.write(PEERS.of(who.peer_id), seal(replace(info, **changes), who))

    introduce(bob, timestamp=world.now - 3 * TIMEOUT)
    introduce(cleo, swarm="another")
    introduce(dora, node=bob.peer_id)
    one.members.look()
    assert one.members.known.keys() == {ann.peer_id}
    for who in (bob, cleo, dora):
        introduce(who)
    one.members.look()
    assert one.members.known.keys() == ids(IDENTITIES[:4])
    introduce(bob, timestamp=world.now - 1.0, model="older")
    one.members.look()
    assert one.members.known[bob.peer_id].info.model == ""
    world.now += KEPT_SECONDS
    one.members.look()
    assert one.members.known.keys() == {ann.peer_id}
