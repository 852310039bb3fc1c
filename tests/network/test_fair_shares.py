"""Fair shares in the table and of streams: what one author takes, others do not lose."""

import base64
import math
import time

import pytest
from processes import until
from swarms import OWNER, AmongPeers, engine_of, identity_of, introduction, peer_id, report

from benchmarks.lib.paths import report_path
from rl_swarm.network.documents import PEERS, report_key
from rl_swarm.network.p2p import documents, quota
from rl_swarm.network.p2p.quota import DhtQuota
from rl_swarm.network.p2p.records import KEPT_SECONDS, LATEST, REPORT_SECONDS, DhtRecord, dht_key
from rl_swarm.network.p2p.storage import FairStorage, place_of
from rl_swarm.network.p2p.streams import (
    MAX_ANSWERS,
    MAX_OF_PEER,
    MAX_WAITING,
    STRANGERS_ANSWERS,
    PeerStream,
    StreamSlots,
)
from rl_swarm.protocol.identity import Identity, verify
from rl_swarm.protocol.wire import seal


class Keeper:
    """The storage of one peer, with a clock that is set by hand."""

    def __init__(self, members=(), rounds=None):
        self.now = time.time()
        self.quota = DhtQuota(lambda: self.now)
        self.storage = FairStorage(self.quota)
        self.members, self.rounds = {peer_id(node) for node in members}, rounds
        self.quota.swarms["s"] = self

    def is_member(self, peer_id):
        return peer_id in self.members

    def report_rounds(self):
        return self.rounds

    def offer(self, who, folder="rewards/round_0/stage_0", name="a", content="", seconds=60.0, timestamp=None):
        from hivemind.dht.routing import DHTID
        from hivemind.utils import MSGPackSerializer

        identity = who if isinstance(who, Identity) else identity_of(who)
        made = DhtRecord(
            swarm="s",
            path=f"{folder}/{name}.json",
            sha256="0" * 64,
            size=1,
            timestamp=self.now if timestamp is None else timestamp,
            content=content,
        )
        value = MSGPackSerializer.dumps(seal(made, identity))
        key = DHTID.generate(source=dht_key("s", folder))
        subkey = f"{identity.peer_id}/{name}.json"
        return self.storage.store(key, value, self.now + seconds, subkey=subkey)

    def kept(self, folder="rewards/round_0/stage_0"):
        """The names under a key, by author."""
        from hivemind.dht.routing import DHTID

        held = self.storage.get(DHTID.generate(source=dht_key("s", folder)))
        found = {}
        for subkey in sorted(held.value.data) if held is not None else ():
            author, name = subkey.split("/")
            found.setdefault(author, []).append(name.removesuffix(".json"))
        return found

    def bytes(self):
        return sum(len(entry.value) for held in self.storage.data.values() for entry in held.value.data.values())


def test_an_author_has_little_room_under_a_key_and_displaces_only_itself():
    keeper = Keeper()
    assert keeper.offer("bob", name="bob")
    for number in range(9):
        keeper.now += 1
        assert keeper.offer("ann", name=f"n{number}")
    assert keeper.kept() == {peer_id("ann"): ["n7", "n8"], peer_id("bob"): ["bob"]}
    assert not keeper.offer("ann", name="old", timestamp=keeper.now - 30)


def test_an_author_has_little_room_in_all():
    keeper = Keeper()
    for number in range(2 * quota.MAX_OF_AUTHOR):
        keeper.now += 0.01
        assert keeper.offer("ann", f"rewards/round_{number}/stage_0")
    assert len(keeper.quota.by_author[peer_id("ann")]) == quota.MAX_REPORTS_OF_AUTHOR
    assert not keeper.kept() and keeper.kept(f"rewards/round_{2 * quota.MAX_OF_AUTHOR - 1}/stage_0")
    assert not keeper.offer("ann", "anything/else")


def test_the_author_with_the_most_bytes_loses_first(monkeypatch):
    monkeypatch.setattr(quota, "MAX_KEY_BYTES", 16_000)  # half of it for strangers
    keeper = Keeper()
    assert keeper.offer("greedy", name="one", content="x" * 3000)
    keeper.now += 1
    assert keeper.offer("greedy", name="two", content="x" * 3000)
    small = [f"node-{number}" for number in range(4)]
    assert all(keeper.offer(node) for node in small)
    assert keeper.kept()[peer_id("greedy")] == ["two"]  # its oldest went
    assert {peer_id(node) for node in small} < keeper.kept().keys()
    more = [keeper.offer(f"more-{number}") for number in range(40)]
    assert True in more and more[-1] is False  # of those with equal shares the first ones stay
    assert keeper.kept()[peer_id("greedy")] == ["two"]  # no more than anybody may have
    assert {peer_id(node) for node in small} < keeper.kept().keys()
    assert keeper.bytes() == sum(keeper.quota.shares.values()) <= 8_000


def test_strangers_never_get_the_room_of_members(monkeypatch):
    monkeypatch.setattr(quota, "MAX_KEY_BYTES", 8_000)
    keeper = Keeper(members=("ann", "bob", "cleo"))
    crowd = [Identity.generate() for _ in range(20)]
    assert True in (taken := [keeper.offer(who) for who in crowd]) and not taken[-1]
    assert all(keeper.offer(node, content="x" * 1000) for node in ("ann", "bob", "cleo"))
    assert {peer_id(node) for node in ("ann", "bob", "cleo")} < keeper.kept().keys()
    assert not any(keeper.offer(who, name="again") for who in crowd[5:])
    assert {peer_id(node) for node in ("ann", "bob", "cleo")} < keeper.kept().keys()


def test_all_keys_together_are_shared_fairly_too(monkeypatch):
    monkeypatch.setattr(quota, "MAX_BYTES", 20_000)
    keeper = Keeper(members=("ann",))
    for number in range(8):
        keeper.now += 1
        assert keeper.offer("greedy", f"rewards/round_{number}/stage_0", content="x" * 500)
    assert all(keeper.offer(f"node-{number}", "peers", f"node-{number}") for number in range(8))
    kept = [keeper.offer(Identity.generate(), "peers", "x") for _ in range(20)]
    assert kept[-1] is False
    assert keeper.offer("ann", "peers", "ann", content="x" * 2000)
    assert len(keeper.kept("peers")) > 8 and peer_id("ann") in keeper.kept("peers")
    assert keeper.bytes() == sum(keeper.quota.shares.values()) <= 20_000
    keeper.now += 61
    assert keeper.offer(Identity.generate(), "peers", "x")


def test_nobody_books_the_future():
    keeper = Keeper(rounds=range(5))
    assert keeper.offer("ann", "rewards/round_4/stage_1")
    assert not keeper.offer("ann", "rewards/round_5/stage_0")
    assert keeper.offer("ann", "peers", "ann", seconds=KEPT_SECONDS)
    for seconds in (KEPT_SECONDS + LATEST + 1, math.inf, math.nan, -1.0):
        assert not keeper.offer("bob", "peers", "bob", seconds=seconds)
    assert keeper.offer("bob", seconds=REPORT_SECONDS)
    assert not keeper.offer("bob", name="longer", seconds=REPORT_SECONDS + LATEST + 1)
    assert not keeper.offer("cleo", "peers", "cleo", timestamp=keeper.now + LATEST + 1)


def test_what_was_left_disappears_soon_whoever_brings_it_again():
    """An expiry is not signed, so it counts from the time that is."""
    keeper = Keeper()
    before = keeper.now
    assert keeper.offer("ann", seconds=REPORT_SECONDS)
    keeper.now += REPORT_SECONDS + LATEST - 1
    assert not keeper.offer("ann", name="b", timestamp=before, seconds=30.0)
    keeper.now += 2
    assert not keeper.offer("ann", timestamp=before, seconds=1.0)
    assert keeper.offer("bob") and keeper.quota.by_author.keys() == {peer_id("bob")}


def test_an_older_notice_does_not_come_back_by_a_later_expiry():
    keeper, now = Keeper(), time.time()
    keeper.now = now
    assert keeper.offer("ann", "peers", "ann", content="new", seconds=60.0)
    assert not keeper.offer("ann", "peers", "ann", content="old", timestamp=now - 30, seconds=500.0)
    assert keeper.offer("ann", "peers", "ann", content="new", seconds=30.0)  # the same again: nothing to do
    keeper.now += 1
    assert keeper.offer("ann", "peers", "ann", content="newer", seconds=20.0)  # though it expires earlier


def test_who_writes_again_and_again_leaves_no_garbage():
    keeper = Keeper()
    for _ in range(1000):
        keeper.now += 0.001
        assert keeper.offer("ann", "peers", "ann")
    (held,) = keeper.storage.data.values()
    assert len(held.value.expiration_heap) < 100 and len(keeper.storage.expiration_heap) < 100


def test_nobody_hides_records_behind_hivemind_s_cache():
    """It would answer from its cache, which anybody can fill, before it looks at what it keeps."""
    one, two = engine_of("ann"), engine_of("bob")
    from hivemind.dht.routing import DHTID
    from hivemind.utils import MSGPackSerializer

    def offer(who, seconds, in_cache):
        made = DhtRecord(swarm="c", path="peers/x.json", sha256="", size=1, timestamp=time.time())
        key = dht_key("c", "peers")
        value = MSGPackSerializer.dumps(seal(made, who))
        return one._call(
            one.node.protocol.call_store(
                two.node.peer_id,
                [DHTID.generate(source=key)],
                [value],
                time.time() + seconds,
                subkeys=[f"{who.peer_id}/x.json"],
                in_cache=in_cache,
            ),
            60,
        )

    honest, hostile = Identity.generate(), Identity.generate()
    until(lambda: offer(honest, 100.0, False) == [True])  # on a busy machine a peer may answer too late, once
    until(lambda: (answer := offer(hostile, 600.0, True)) is not None and answer == [False])
    until(lambda: f"{honest.peer_id}/x.json" in one.find(dht_key("c", "peers")))


def test_nobody_chooses_its_place_in_the_table():
    """A peer that says to be somewhere else, or in many places, is not asked to keep anything there."""
    from hivemind.dht.routing import DHTID

    one, two = engine_of("ann"), engine_of("bob")
    wanted = DHTID.generate(source=dht_key("s", "peers"))
    protocol = two.node.protocol
    for place in (wanted, DHTID(int(wanted) ^ 1)):
        two._call(protocol.update_routing_table(place, one.node.peer_id), 60)
        assert place not in protocol.routing_table
    two._call(protocol.update_routing_table(place_of(peer_id("ann")), one.node.peer_id), 60)
    assert place_of(peer_id("ann")) in protocol.routing_table
    assert one.node.node_id == place_of(peer_id("ann"))


def test_a_member_s_report_is_asked_for_where_the_table_has_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "DIRECT_SECONDS", 0.2)
    swarm = AmongPeers(tmp_path, min_peers=2, rounds=100, peer_timeout=600.0)
    try:
        for node in ("ann", "bob"):
            swarm.coordinator(node).register(introduction(swarm.manifest, node))
        ann, bob = swarm.coordinator("ann"), swarm.coordinator("bob")
        assert ann.wait_for((-1, 0)) is not None
        monkeypatch.setattr(engine_of("ann"), "store", lambda *record: False)
        ann.submit(report(swarm.manifest, "ann"))
        bob.submit(report(swarm.manifest, "bob"))
        state = bob.wait_for((0, 0))
        assert state is not None and state.members[peer_id("ann")].participation == 1
    finally:
        swarm.close()


def test_reports_of_coming_rounds_are_refused_by_who_knows_the_round(tmp_path):
    swarm = AmongPeers(tmp_path, min_peers=1, rounds=100, peer_timeout=600.0)
    try:
        ann = swarm.coordinator("ann")
        ann.register(introduction(swarm.manifest, "ann"))
        assert ann.wait_for((-1, 0)) is not None
        files = swarm.store("ann")
        assert files.is_member(peer_id("ann")) and files.is_member(OWNER.peer_id)
        assert not files.is_member(peer_id("stranger"))
        rounds = files.report_rounds()
        assert rounds is not None and 1 in rounds and 50 not in rounds
    finally:
        swarm.close()


def test_many_names_of_one_author_push_no_name_out(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_NAMES", 8)
    swarm = AmongPeers(tmp_path)
    try:
        files = swarm.store("ann")
        for number in range(20):
            files.authors[f"n{number}"] = "somebody"
        swarm.store("bob").write(PEERS.of("bob"), b"{}")
        until(lambda: "bob" in files.nodes(PEERS))
        assert len(files.authors) <= 8 and files.authors["bob"] == peer_id("bob")
    finally:
        swarm.close()


def test_who_speaks_under_many_names_is_heard_under_the_first(tmp_path):
    swarm = AmongPeers(tmp_path)
    try:
        bob, ann = swarm.store("bob"), swarm.store("ann")
        for number in range(5):
            bob.write(PEERS.of(f"name-{number}"), b"{}")
            assert set(ann.nodes(PEERS)) <= {"name-0"}
        assert set(ann.authors) == {"name-0"}
    finally:
        swarm.close()


class Opened:
    """A stream that notes whether it was closed."""

    def __init__(self, peer, is_member=False):
        self.closed = False
        self.stream = PeerStream(peer, is_member, self.close)

    def close(self):
        self.closed = True


def test_a_peer_has_few_streams():
    slots, opened = StreamSlots(), [Opened("one") for _ in range(MAX_OF_PEER + 1)]
    assert [slots.open(one.stream) for one in opened] == [True] * MAX_OF_PEER + [False]
    assert slots.open(Opened("another").stream)
    slots.leave(opened[0].stream)
    assert slots.open(opened[-1].stream)


def test_a_new_stream_is_let_in_and_the_longest_waiting_of_the_greediest_goes():
    slots = StreamSlots()
    member = Opened("member", is_member=True)
    assert slots.open(member.stream)
    greedy = [Opened("greedy") for _ in range(MAX_OF_PEER)]
    others = [Opened(f"peer {number}") for number in range(MAX_WAITING - MAX_OF_PEER - 1)]
    assert all(slots.open(one.stream) for one in [*others, *greedy])
    assert slots.open(Opened("late").stream)
    assert greedy[0].closed and not any(one.closed for one in [member, *others, *greedy[1:]])
    assert len(slots.waiting) == MAX_WAITING


@pytest.mark.parametrize("is_member", [True, False])
def test_answers_are_kept_for_members(is_member):
    slots = StreamSlots()
    strangers = [Opened(f"peer {number}") for number in range(STRANGERS_ANSWERS + 1)]
    for one in strangers:
        slots.open(one.stream)
    answered = [slots.answer(one.stream) for one in strangers]
    assert answered == [True] * STRANGERS_ANSWERS + [False]
    late = Opened("late", is_member)
    assert slots.open(late.stream) and slots.answer(late.stream) is is_member
    members = [Opened(f"member {number}", True) for number in range(MAX_ANSWERS)]
    assert all(slots.open(one.stream) for one in members[: MAX_ANSWERS // 2])
    taken = [slots.answer(one.stream) for one in members[: MAX_ANSWERS // 2]]
    assert sum(taken) == MAX_ANSWERS - STRANGERS_ANSWERS - is_member


def test_reports_have_their_own_folder_in_the_table():
    made = DhtRecord(swarm="s", path=report_path(3, 1, "ann"), sha256="", size=1, timestamp=0.0)
    assert made.key == report_key(3, 1, "ann") and made.report_round() == 3
    for path in ("rewards/round_03/stage_0/a.json", "rewards/round_3/a.json", "rewards/round_-1/stage_0/a.json"):
        assert DhtRecord(swarm="s", path=path, sha256="", size=1, timestamp=0.0).report_round() is None


def test_a_peer_id_in_another_encoding_is_no_second_author():
    """A key has one id: that in base58. As a CID, in hexadecimal or with something around it, it is none."""
    from hivemind.p2p import PeerID

    who, message = Identity.generate(), b"message"
    raw = bytes([1, 0x72]) + PeerID.from_base58(who.peer_id).to_bytes()
    cid = "b" + base64.b32encode(raw).decode().lower().rstrip("=")
    signature = who.sign(message)
    assert verify(who.peer_id, message, signature)
    for other in (cid, f"f{raw.hex()}", f"z{who.peer_id}", f"1{who.peer_id}", f"{who.peer_id} "):
        assert not verify(other, message, signature)
