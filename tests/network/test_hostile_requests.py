"""Messages that a stranger sends to hivemind's own handlers, and what a hostile peer answers: no node ends or stands
still."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import msgpack
import pytest
from hostile_peers import Swarm, attacker
from processes import until
from swarms import LOOPBACK, engine_of, peer_id

from benchmarks.lib.paths import report_folder
from rl_swarm.network.p2p.engine import WHAT_TIME, PeerEngine
from rl_swarm.network.p2p.records import DhtRecord, acceptable, dht_key
from rl_swarm.network.p2p.reliability import PAID_RATE, WORST_DEBT, Reliability
from rl_swarm.network.p2p.requests import (
    MAX_REFUSED,
    STRANGER_RATE,
    STRANGERS_RATE,
    PendingCalls,
    Requests,
    write_message,
)
from rl_swarm.network.p2p.storage import StrictSerializer, place_of
from rl_swarm.network.p2p.table import Table
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.wire import seal

VICTIM = """
import sys
from rl_swarm.protocol.identity import Identity
from rl_swarm.network.p2p.engine import PeerEngine
from rl_swarm.network.p2p.quota import DhtQuota
listen = ["/ip4/127.0.0.1/tcp/0"]
engine = PeerEngine(Identity.generate(), listen=listen, quota=DhtQuota(), relay=False, map_ports=False).start()
print(engine.addresses[0], flush=True)
for line in sys.stdin:
    print(len(engine.find(line.strip())), flush=True)
engine.close()
"""


@contextmanager
def victim():
    """A peer in a process of its own, and an attacker that knows it."""
    process = subprocess.Popen(
        [sys.executable, "-c", VICTIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        address = process.stdout.readline().strip()
        engine = PeerEngine(Identity.generate(), [address], LOOPBACK, relay=False, map_ports=False).start()
        try:
            assert engine.meet(60)
            yield process, engine, address.rpartition("/")[2]
        finally:
            engine.close()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def swarm(tmp_path):
    made = Swarm(tmp_path)
    yield made
    made.close()


def call(engine, peer, name, message, answer):
    """Sends one protobuf to one of hivemind's handlers; the answer, or what the peer or the daemon says instead."""
    from hivemind.p2p import PeerID

    sent = engine.p2p.call_protobuf_handler(PeerID.from_base58(peer), f"DHTProtocol.{name}", message, answer)
    try:
        return engine._call(sent, 30)
    except OSError as error:
        return error


def nested(code: int, levels: int) -> bytes:
    data = msgpack.packb([1])
    for _ in range(levels):
        data = msgpack.packb([msgpack.ExtType(code, data)])
    return msgpack.packb(msgpack.ExtType(code, data))


def lives(process, engine, peer) -> bool:
    return float(engine.ask(peer, WHAT_TIME, 32) or b"") > 0 and process.poll() is None


def test_values_within_values_do_not_end_a_node():
    """hivemind reads them by recursion: two hundred levels, in one kilobyte, overflow the stack of its thread."""
    from hivemind.proto import dht_pb2

    with victim() as (process, engine, peer):
        for code in (0x40, 0x50):
            for levels in (100, 200, 1000):
                deep = nested(code, levels)
                for subkey, value in ((deep, b"x"), (b"", deep), (msgpack.packb("a"), deep)):
                    request = dht_pb2.StoreRequest(
                        keys=[b"1" * 20],
                        subkeys=[subkey],
                        values=[value],
                        expiration_time=[time.time() + 60],
                        in_cache=[False],
                    )
                    call(engine, peer, "rpc_store", request, dht_pb2.StoreResponse)
                    assert lives(process, engine, peer)


def answers(engine, value: bytes) -> None:
    """Makes a hostile peer answer every question with this dictionary."""
    from hivemind.proto import dht_pb2

    async def answer(data, peer):
        asked = dht_pb2.FindRequest.FromString(data)
        found = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=value, expiration_time=time.time() + 60)
        response = dht_pb2.FindResponse(results=[found] * len(asked.keys), peer=engine.node.protocol.node_info)
        return response.SerializeToString()

    handle(engine, "rpc_find", answer)


@pytest.mark.parametrize("levels", [200, 1000])
def test_an_answer_with_values_within_values_ends_nobody(levels):
    with victim() as (process, engine, peer):
        answers(engine, nested(0x50, levels))
        process.stdin.write("key\n")
        process.stdin.flush()
        assert process.stdout.readline() == "0\n"
        assert lives(process, engine, peer)


def test_one_question_for_many_keys_is_not_answered():
    """A record under a key would be sent as often as the key is named: gigabytes for a kilobyte."""
    from hivemind.dht.routing import DHTID
    from hivemind.proto import dht_pb2

    key = DHTID.generate(source="a").to_bytes()
    with victim() as (process, engine, peer):
        few = dht_pb2.FindRequest(keys=[key], peer=engine.node.protocol.node_info)
        answer = call(engine, peer, "rpc_find", few, dht_pb2.FindResponse)
        assert len(answer.results) == 1
        many = dht_pb2.FindRequest(keys=[key] * 10_000, peer=engine.node.protocol.node_info)
        assert isinstance(call(engine, peer, "rpc_find", many, dht_pb2.FindResponse), OSError)
        assert lives(process, engine, peer)


class Work:
    """Requests of peers by a clock that is set by hand; how many were worked on."""

    def __init__(self, members=()):
        self.now, self.done, self.disconnected = 100.0, 0, []
        self.requests = Requests(lambda peer: peer in members, lambda: self.now)
        self.requests.open = True
        self.handlers = {
            kind: self.requests.bounded(f"DHTProtocol.{kind}", self.work, self.disconnect)
            for kind in ("rpc_ping", "rpc_find", "rpc_store", "rpc_other")
        }

    async def work(self, data, peer):
        self.done += 1
        return b""

    async def disconnect(self, peer):
        self.disconnected.append(peer)

    def ask(self, peer, kind="rpc_ping", size=10):
        work = self.handlers[kind](b"x" * size, peer)
        try:
            work.send(None)
        except StopIteration:
            return True
        except Exception:
            return False


def test_a_stranger_has_a_budget_and_a_member_a_larger_one():
    work = Work(members=("member",))
    stranger = sum(work.ask("stranger") for _ in range(5000))
    member = sum(work.ask("member") for _ in range(5000))
    assert 0 < stranger < member < 5000
    work.now += 1
    again = sum(work.ask("stranger") for _ in range(5000))
    assert 0 < again <= STRANGER_RATE


def test_many_strangers_get_no_more_work_done_than_a_few():
    work = Work()
    strangers = [f"stranger {number}" for number in range(100)]
    for stranger in strangers:
        while work.ask(stranger):
            pass
    work.done = 0
    for _ in range(10):
        work.now += 1
        for stranger in strangers:
            while work.ask(stranger):
                pass
    assert work.done <= 2 * 10 * STRANGERS_RATE


def test_who_does_not_stop_asking_is_disconnected():
    work = Work()
    while work.ask("stranger"):
        pass
    for _ in range(MAX_REFUSED):
        work.ask("stranger")
    assert work.disconnected == ["stranger"]


@pytest.mark.parametrize("kind", ["rpc_ping", "rpc_find", "rpc_store", "rpc_other"])
def test_requests_longer_than_ours_are_refused(kind):
    work = Work(members=("member",))
    assert not work.ask("stranger", kind, 1 << 20) and work.done == 0


def test_an_answer_that_comes_as_it_is_given_up_ends_nothing():
    async def given_up():
        pending = PendingCalls()
        pending["a"], pending["b"] = asyncio.Future(), asyncio.Future()
        pending["a"].cancel()
        return "a" in pending, "b" in pending

    assert asyncio.run(given_up()) == (False, True)


def test_notices_of_peers_that_never_answer_hold_up_no_round(swarm):
    """The coordinator reads documents that stand in their notices, and waits for nobody else."""
    until(lambda: swarm.round() == 0)
    name = swarm.manifest.swarm()
    with attacker() as engine, socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]

        def leave(folder, who):
            made = DhtRecord(
                swarm=name,
                path=f"{folder}/{who.peer_id}.json",
                sha256="0" * 64,
                size=1,
                timestamp=time.time(),
                addresses=[f"/ip4/127.0.0.1/tcp/{port}/p2p/{who.peer_id}"] if folder == "peers" else [],
            )
            return engine.store(dht_key(name, folder), f"{who.peer_id}/{who.peer_id}.json", seal(made, who), 100.0)

        taken = 0
        for _ in range(12):
            who = Identity.generate()
            taken += leave("peers", who) + leave(report_folder(0, 0), who) + leave(report_folder(1, 0), who)
        assert taken >= 12
        asked = []
        files = swarm.store("coordinator")
        ask = files.engine.ask
        files.engine.ask = lambda peer, *rest: asked.append(peer) or ask(peer, *rest)
        try:
            swarm.report(0)
            until(lambda: swarm.round() == 1)
            swarm.report(1)
            until(lambda: swarm.round() == 2)
        finally:
            del files.engine.ask
        assert set(asked) <= {peer_id("ann"), peer_id("bob")}


def handle(engine, kind: str, handler) -> None:
    """Makes a hostile peer answer requests of a kind in its own way."""
    dict.__setitem__(engine.p2p._client.control.unary_handlers, f"DHTProtocol.{kind}", handler)


def made_up(key: bytes) -> list[tuple[bytes, bytes]]:
    """Peers that do not exist, nearer to a key than those that do."""
    from hivemind.p2p import PeerID

    peers = [PeerID(bytes.fromhex("002408011220") + os.urandom(32)) for _ in range(300)]
    places = [(place_of(str(peer)).to_bytes(), peer.to_bytes()) for peer in peers]
    return sorted(places, key=lambda one: int.from_bytes(one[0], "big") ^ int.from_bytes(key, "big"))[:20]


def tells_of_nobody(engine):
    from hivemind.proto import dht_pb2

    async def answer(data, peer):
        results = []
        for key in dht_pb2.FindRequest.FromString(data).keys:
            ids, peers = zip(*made_up(key), strict=True)
            results.append(dht_pb2.FindResult(type=dht_pb2.NOT_FOUND, nearest_node_ids=ids, nearest_peer_ids=peers))
        return dht_pb2.FindResponse(results=results, peer=engine.node.protocol.node_info).SerializeToString()

    handle(engine, "rpc_find", answer)


def sends_junk(engine):
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.utils import MSGPackSerializer

    with DictionaryDHTValue().freeze() as junk:
        for number in range(1000):
            junk.store(f"{peer_id('ann')}/{number}", MSGPackSerializer.dumps(b"{}"), time.time() + 500)
        answers(engine, MSGPackSerializer.dumps(junk))


@pytest.mark.parametrize("attack", [tells_of_nobody, sends_junk])
def test_a_peer_that_lies_in_the_table_is_left_out(swarm, attack):
    """What it hides is found without it: by the second look at the latest."""
    until(lambda: swarm.round() == 0)
    with attacker() as engine:
        attack(engine)
        for node in ("coordinator", "ann", "bob"):
            victim = engine_of(node)
            victim._call(victim._reach(engine.addresses[0]), 60)
        reliability = engine_of("coordinator").table.reliability

        def is_left_out():
            for node in ("ann", "bob"):  # who may be late on a busy machine
                reliability._debts.pop(engine_of(node).node.peer_id, None)
            return reliability.is_left_out(engine.node.peer_id)

        until(is_left_out)
        for number in range(5):
            swarm.report(number)
            until(lambda number=number: swarm.round() == number + 1)

        def keepers_are_there(node):  # on a busy machine an honest one is silent for a moment
            table = engine_of(node).table
            keepers = engine_of(node)._call(table.keepers(dht_key("any", "peers")), 60)
            return keepers and all(table._is_there(keeper) for keeper in keepers)

        for node in ("coordinator", "ann", "bob"):
            until(lambda node=node: keepers_are_there(node))


class Told:
    """What a peer remembers of others, by a clock that is set by hand."""

    def __init__(self):
        self.now = 100.0
        self.reliability = Reliability(lambda: self.now)
        for peer in ("ann", "bob", "cleo"):
            self.reliability.record_answer(peer, 0.01, True)

    def left_out(self):
        return [peer for peer in ("ann", "bob", "cleo", "slow") if self.reliability.is_left_out(peer)]


def test_who_answers_much_later_than_others_is_asked_less():
    told = Told()
    waited = 0
    for _ in range(600):
        told.now += 1
        if not told.reliability.is_left_out("slow"):
            told.reliability.record_answer("slow", 2.9, True)
            waited += 1
    assert 0 < waited <= 600 * 2.9 * PAID_RATE + 3 and told.left_out() == ["slow"]
    told.now += WORST_DEBT / PAID_RATE
    assert told.left_out() == []


def test_a_question_that_was_given_up_is_not_waited_for():
    """It would count as outstanding for ever, and its peer would never be asked again."""
    told = Told()

    async def give_up():
        for _ in range(10):
            asking = asyncio.ensure_future(told.reliability.ask("ann", asyncio.sleep(600)))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])

    asyncio.run(give_up())
    told.now += WORST_DEBT / PAID_RATE
    assert told.left_out() == []


def test_on_a_busy_machine_nobody_is_left_out():
    told = Told()
    for _ in range(100):
        told.now += 1
        for peer in ("ann", "bob", "cleo", "slow"):
            told.reliability.record_answer(peer, 2.0, True)
    assert told.left_out() == []


def test_the_last_ones_are_asked_whatever_they_owe():
    told = Told()
    for peer in ("bob", "cleo"):
        told.reliability.blame(peer, WORST_DEBT)
    assert told.left_out() == []


def test_who_tells_of_peers_that_are_not_there_is_blamed_and_not_who_tells_of_others():
    told = Told()
    told.reliability.record_named("ann", ["new", "bob"])
    told.reliability.record_named("cleo", [f"nobody {number}" for number in range(10)])
    told.reliability.record_answer("new", 0.01, True)
    for number in range(10):
        told.reliability.record_answer(f"nobody {number}", 0.0, False)
    told.reliability.record_answer("dan", 0.01, True)
    assert told.left_out() == ["cleo"]


class Keepers:
    """A table whose keepers are given, with answers that come when the test says."""

    def __init__(self, *peers):
        self.table = Table(None, reliability=Reliability())
        self.peers, self.asked, self.open = list(peers), [], {}

    async def ask(self, peer):
        self.asked.append(peer)
        if peer.startswith("slow"):
            await self.open.setdefault(peer, asyncio.Event()).wait()
        return None if peer.startswith("gone") else {"of": peer}

    def answers(self, wanted, enough):
        async def work():
            found = await self.table._answers("key", self.ask, self.peers, wanted, enough)
            running = len(self.table.background)
            for event in self.open.values():
                event.set()
            await asyncio.sleep(0)
            return sorted(peer for peer, _ in found), running

        return asyncio.run(asyncio.wait_for(work(), 60))


def test_a_late_keeper_is_not_waited_for_where_others_answer():
    """Its answer may come in the background: in a test that waits for it, it never does."""
    keepers = Keepers("slow", "ann", "bob", "cleo")
    assert keepers.answers(3, 2) == (["ann", "bob"], 1) and keepers.asked == ["slow", "ann", "bob"]
    assert Keepers("slow", "ann", "bob", "cleo").answers(3, 3) == (["ann", "bob", "cleo"], 1)
    assert Keepers("slow 1", "slow 2", "slow 3", "ann").answers(3, 2) == (["ann"], 3)
    assert Keepers("gone", "ann", "slow", "bob").answers(3, 2) == (["ann", "bob"], 1)


def test_a_search_for_keepers_goes_on_without_one_that_never_answers(swarm):
    """The node's own search waits for each of the nearest ones; this one ends while the peer is still being asked."""
    until(lambda: swarm.round() == 0)
    with attacker() as engine:
        asked, ended = threading.Event(), asyncio.Event()

        async def never(data, peer):
            asked.set()
            await ended.wait()
            return b""

        handle(engine, "rpc_find", never)
        victim, hostile = engine_of("coordinator"), engine.node.peer_id
        victim._call(victim._reach(engine.addresses[0]), 60)

        async def search():
            from hivemind.dht.routing import DHTID

            found = await victim.table._search(DHTID(int(place_of(str(hostile))) ^ 1))
            return found, [task for task in victim.table.background if not task.done()]

        found, running = victim._call(search(), 60)
        assert asked.is_set() and running
        assert hostile not in found.values() and victim.node.peer_id in found.values()
        engine.loop.call_soon_threadsafe(ended.set)


def test_who_has_many_answers_outstanding_is_not_asked_for_more():
    told = Told()

    async def ask():
        answered = asyncio.get_running_loop().create_future()
        for _ in range(4):
            assert told.left_out() == []
            asking = asyncio.ensure_future(told.reliability.ask("slow", asyncio.shield(answered)))
            await asyncio.sleep(0)
        assert told.left_out() == ["slow"]
        answered.set_result(True)
        await asking
        assert told.left_out() == []

    asyncio.run(ask())


def test_who_sends_what_cannot_be_read_is_left_out_for_a_moment():
    told = Told()
    for _ in range(100):
        told.reliability.record_answer("slow", 0.01, False)
    assert told.left_out() == ["slow"]
    told.now += 0.2 / PAID_RATE + 1
    assert told.left_out() == []


def test_the_signature_of_a_record_that_was_read_before_is_not_checked_again(monkeypatch):
    """Strangers can fill half of a key: its records come with every look."""
    who, now = Identity.generate(), time.time()
    value = seal(DhtRecord(swarm="s", path="peers/a.json", sha256="", size=1, timestamp=now), who)
    key, subkey = dht_key("s", "peers"), f"{who.peer_id}/a.json"
    assert acceptable(key, subkey, value, now) is not None
    monkeypatch.setattr("rl_swarm.network.p2p.records.unseal", None)
    assert acceptable(key, subkey, value, now) is not None
    assert acceptable(key, subkey, value, now + 10_000) is None and acceptable(key, "other", value, now) is None


def test_an_answer_with_more_bytes_than_a_key_may_have_is_not_read():
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.utils import MSGPackSerializer

    with DictionaryDHTValue().freeze() as records:
        for number in range(200):
            records.store(str(number), b"x" * 10_000, time.time() + 500)
    with pytest.raises(ValueError, match="no dictionary"):
        StrictSerializer.loads(MSGPackSerializer.dumps(records))


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 16383, 16384, 2 << 20])
def test_a_message_to_the_daemon_is_written_at_once_as_hivemind_reads_it(size):
    from google.protobuf.wrappers_pb2 import BytesValue
    from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe

    message, writes = BytesValue(value=b"x" * size), []

    class Stream:
        write = staticmethod(writes.append)

        async def drain(self):
            pass

    async def read():
        await write_message(Stream(), message)
        reader, read = asyncio.StreamReader(), BytesValue()
        reader.feed_data(b"".join(writes))
        await read_pbmsg_safe(reader, read)
        return read

    assert asyncio.run(read()) == message and len(writes) == 1


def test_the_engine_writes_so_to_its_daemon():
    from hivemind.p2p.p2p_daemon_bindings import control

    with attacker():
        assert control.write_pbmsg is write_message
