"""One hostile peer neither stops a swarm nor keeps others out, while it is there and after it has left."""

import asyncio
import struct
import threading
import time
from contextlib import suppress

import pytest
from hostile_peers import IdleStreams, Swarm, attacker, fill
from processes import until
from swarms import LOOPBACK, OWNER, AmongPeers, engine_of, identity_of, make_manifest, peer_id

from benchmarks.lib.paths import report_folder
from rl_swarm.config.settings import Settings
from rl_swarm.network.base import NetworkError
from rl_swarm.network.documents import MANIFEST
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.p2p.documents import PeerStore
from rl_swarm.network.p2p.engine import STREAM, WHAT_TIME, PeerEngine
from rl_swarm.network.p2p.joining import await_manifest
from rl_swarm.network.p2p.quota import DhtQuota
from rl_swarm.network.p2p.records import DhtRecord, dht_key
from rl_swarm.network.settings import NetworkSettings
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.wire import seal


@pytest.fixture
def swarm(tmp_path):
    made = Swarm(tmp_path)
    yield made
    made.close()


def test_nobody_books_the_table_for_coming_rounds(swarm):
    until(lambda: swarm.round() == 0)
    with attacker() as engine:
        for round in range(3):
            fill(engine, swarm.manifest.swarm(), report_folder(round, 0), 400)
        swarm.report(0)
        until(lambda: swarm.round() == 1)
    swarm.report(1)  # it has left
    until(lambda: swarm.round() == 2)


def test_nobody_holds_all_the_streams(swarm):
    until(lambda: swarm.round() == 0)
    victims = [engine_of(node) for node in ("coordinator", "ann", "bob")]
    with attacker() as engine:
        held = IdleStreams(engine, victims, 70)
        try:
            until(lambda: held.open >= len(victims))
            for _ in range(10):
                for asking, asked in (("ann", "bob"), ("bob", "ann")):
                    assert float(engine_of(asking).ask(peer_id(asked), WHAT_TIME, 32) or b"") > 0
            swarm.report(0)
            until(lambda: swarm.round() == 1)
        finally:
            held.close()


def test_a_stream_whose_request_does_not_come_is_closed():
    with attacker() as engine:
        held = IdleStreams(engine, [engine_of("ann")], 3)
        try:
            until(lambda: len(engine_of("ann").streams.waiting) > 0)
            until(lambda: held.closed >= 3)  # by the other side
        finally:
            held.close()
    until(lambda: not engine_of("ann").streams.waiting)


def hand_out(engine: PeerEngine, folder, **changes) -> PeerStore:
    """Founds another swarm and leaves a notice of its manifest."""
    me = engine.identity
    manifest = make_manifest(peer_id=me.peer_id, **changes)
    files = PeerStore(engine, manifest.swarm(), me.peer_id, me, FolderStore.at(folder))
    files.serve()
    files.write(MANIFEST, seal(manifest, me))
    return files


@pytest.fixture
def newcomer():
    """Knows the coordinator's address, and has met the others."""
    known = engine_of("coordinator").addresses
    engine = PeerEngine(Identity.generate(), known, LOOPBACK, quota=DhtQuota(), relay=False, map_ports=False).start()
    assert engine.meet(60)
    yield engine
    engine.close()


def test_the_manifest_of_the_peer_whose_address_was_given_is_taken(tmp_path, newcomer):
    swarm = AmongPeers(tmp_path / "swarm", name="meant")
    try:
        swarm.store("coordinator").write(MANIFEST, seal(swarm.manifest, OWNER))
        with attacker() as engine:
            hand_out(engine, tmp_path / "theirs", name="other")
            found = await_manifest(newcomer, NetworkSettings(poll_interval=0.1), threading.Event())
        assert found is not None and found[0] == swarm.manifest
    finally:
        swarm.close()


def test_at_a_bootnode_the_manifest_is_taken_that_most_peers_tell_of(tmp_path, newcomer):
    """Where as many tell of another, the user has to say which one is meant."""
    swarm = AmongPeers(tmp_path / "swarm", name="meant")
    newcomer.given = list(engine_of("cleo").addresses)
    engine_of("cleo").answer = lambda request, peer: None
    settings = Settings.of(poll_interval=0.1)
    try:
        signed = seal(swarm.manifest, OWNER)
        swarm.store("coordinator").write(MANIFEST, signed)
        with attacker() as engine:
            hand_out(engine, tmp_path / "theirs", name="other")
            with pytest.raises(NetworkError, match="several swarms"):
                await_manifest(newcomer, settings.network, threading.Event())
            for node in ("ann", "bob"):
                files = swarm.store(node)
                files.serve_copy(MANIFEST, signed)
                files._leave(MANIFEST, signed)
            found = []

            def is_told_of_by_most() -> bool:
                with suppress(NetworkError):  # not all of them have been heard yet, on a busy machine
                    found.append(await_manifest(newcomer, settings.network, threading.Event()))
                return bool(found)

            until(is_told_of_by_most)
        assert found[0] is not None and found[0][0] == swarm.manifest
    finally:
        swarm.close()


def test_a_keeper_that_answers_with_garbage_hides_nothing():
    """What the others keep is found, and what its author signed last."""
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DHTLocalStorage
    from hivemind.utils import MSGPackSerializer

    key, who = dht_key("garbage", "peers"), identity_of("ann")
    subkey, now = f"{who.peer_id}/ann.json", time.time()

    def made(timestamp: float) -> bytes:
        values = {"swarm": "garbage", "path": "peers/ann.json", "sha256": "", "size": 1}
        return seal(DhtRecord(**values, timestamp=timestamp), who)

    with attacker() as engine:
        hostile = engine.node.protocol.storage = DHTLocalStorage()
        place = DHTID.generate(source=key)
        old = MSGPackSerializer.dumps(made(now - 60))
        for name, value in ((subkey, old), ("x", b"\xc1"), (7, b"x"), ("y", b"\x81" * 50)):
            assert hostile.store(place, value, time.time() + 1000.0, subkey=name)

        def is_found() -> bool:  # on a busy machine a peer may answer too late, once
            engine_of("ann").store(key, subkey, made(now), 100.0)
            return engine_of("bob").find(key) == {subkey: made(now)}

        until(is_found)
        for _ in range(10):  # whoever is asked beside
            assert engine_of("bob").find(key) == {subkey: made(now)}


def test_a_peer_that_answers_slowly_on_purpose_gets_less_and_less_time(monkeypatch):
    """It asks us meanwhile, as one does that is there; and now and then it answers in time."""
    monkeypatch.setattr("rl_swarm.network.p2p.engine.SILENT_SECONDS", (0.01, 100.0))
    monkeypatch.setattr("rl_swarm.network.p2p.engine.EARLY_SECONDS", 0.05)
    ann = engine_of("ann")
    with attacker() as engine:
        slow, slowly = engine.identity.peer_id, True

        async def answer(info, reader, writer):
            await reader.readexactly(4)
            writer.write(struct.pack(">?I", True, 2 if slowly else 0))  # it begins, and goes no further
            await writer.drain()
            while not reader.at_eof():
                await asyncio.sleep(0.05)
            writer.close()

        async def replace():
            await engine.p2p.remove_binary_stream_handler(STREAM)
            await engine.p2p.add_binary_stream_handler(STREAM, answer)

        engine._call(replace(), 60)
        until(lambda: slow in {address.rpartition("/")[2] for address in ann.peers()})
        for patience in (0.6, 0.3, 0.15):
            ann.patience[slow] = 2 * patience
            monkeypatch.setattr("rl_swarm.network.p2p.engine.LEAST_PATIENCE", 0.1)
            ann.silent[slow] = (0.0, ann.silent.get(slow, (0.0, 0.01))[1])
            with pytest.raises(TimeoutError):
                ann.ask(slow, b"rollouts/round_0/stage_0/slow.json", 100)
            assert ann.patience[slow] == pytest.approx(patience, rel=0.01)
        assert ann.silent[slow][1] > 0.05
        before = ann.silent[slow]
        assert engine.ask(ann.identity.peer_id, WHAT_TIME, 32)
        assert ann.silent[slow] == before, "asking us does not end a long pause"

        slowly, ann.silent[slow] = False, (0.0, min(before[1], 0.2))  # others of this process may have asked too
        ann.patience[slow] = 5.0
        assert ann.ask(slow, b"rollouts/round_0/stage_0/slow.json", 100) == b""
        assert 5 < ann.patience[slow] < 9, "one answer in time does not make up for it"
        ann.patience.pop(slow)
        ann.silent.pop(slow)
