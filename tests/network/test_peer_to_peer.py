"""The peer-to-peer engine on loopback: real daemons, real streams."""

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import until
from swarms import (
    LOOPBACK,
    OWNER,
    AmongPeers,
    Background,
    engine_of,
    eventually,
    identity_of,
    make_manifest,
    peer_id,
    publication,
)

from benchmarks.lib.paths import rollouts_path
from rl_swarm.network.documents import ACCESS_LIST, PEERS, STATE, rollouts_key
from rl_swarm.network.p2p.engine import MAX_REQUEST, EngineError, PeerEngine
from rl_swarm.network.p2p.joining import among_peers
from rl_swarm.network.p2p.quota import DhtQuota
from rl_swarm.network.p2p.records import KEPT_SECONDS, MAX_NOTICE, DhtRecord, dht_key, parts_of, subnet_of
from rl_swarm.protocol.admission import AccessList
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.rounds import State
from rl_swarm.protocol.wire import seal, sign

ALONE = {"listen": LOOPBACK, "relay": False, "map_ports": False}


def daemons(parent: int) -> list[int]:
    """Processes of the engine whose parent this is."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent_id = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent_id == parent and b"p2pd" in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except (OSError, ValueError):
                continue
    return found


def exists(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


NODE = """
import sys, time
from rl_swarm.protocol.identity import Identity
from rl_swarm.network.p2p.engine import PeerEngine
engine = PeerEngine(Identity.generate(), listen=["/ip4/127.0.0.1/tcp/0"], relay=False, map_ports=False).start()
print(engine.folder, flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_no_daemon_survives_its_node(ending):
    node = subprocess.Popen([sys.executable, "-c", NODE], stdout=subprocess.PIPE, text=True)
    try:
        assert node.stdout is not None and node.stdout.readline()
        (daemon,) = daemons(node.pid)
        node.send_signal(ending)
        node.wait(120)
        assert eventually(lambda: not exists(daemon))
    finally:
        node.kill()
        node.wait()


def test_the_engine_has_the_nodes_own_identity_and_ends_without_a_trace():
    for identity in (Identity.generate(), identity_of("ann")):
        engine = PeerEngine(identity, **ALONE).start()
        (daemon,) = [one for one in daemons(os.getpid()) if str(engine.folder) in cmdline(one)]
        assert all(address.endswith(f"/p2p/{identity.peer_id}") for address in engine.addresses)
        assert engine.folder.stat().st_mode & 0o077 == 0 and not (engine.folder / "key").exists()
        engine.close()
        assert not exists(daemon) and not engine.folder.exists() and not engine.thread.is_alive()
        with pytest.raises(OSError, match="has been closed"):
            engine.find("anything")


def cmdline(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_bytes().decode()


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        ("/ip4/127.0.0.1/tcp/{taken}", "the port is taken"),
        ("/ip4/192.0.2.7/tcp/0", "no such address"),
        ("127.0.0.1:31000", "is no multiaddress"),
    ],
)
def test_a_daemon_that_cannot_start_says_what_would_help(listen, words):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        where = listen.format(taken=other.getsockname()[1])
        engine = PeerEngine(Identity.generate(), listen=[where], relay=False, map_ports=False)
        with pytest.raises(EngineError, match=words) as error:
            engine.start()
    assert f"P2P_LISTEN={where}" in str(error.value)
    assert not engine.folder.exists()


def test_engines_of_one_process_can_start_at_the_same_time():
    engines = [PeerEngine(Identity.generate(), **ALONE) for _ in range(8)]
    starting = [Background(one.start) for one in engines]
    try:
        assert [thread.result() for thread in starting] == engines
    finally:
        for one in engines:
            one.close()


def test_a_trace_of_the_daemon_is_not_shown(caplog):
    """It has paths of the machine where the daemon was built."""
    nowhere = "/ip4/127.0.0.1/tcp/99999/p2p/12D3KooWEChVMMMzV8acJ53mJHrw1pQ27UAGkCxWXLJutbeUMvVu"
    engine = PeerEngine(Identity.generate(), [nowhere], LOOPBACK, map_ports=False)
    with pytest.raises(EngineError) as error:
        engine.start()
    shown = str(error.value)
    assert "does not start" in shown and ".go" not in shown and len(shown) < 400
    assert ".go" not in caplog.text


def test_who_finds_nobody_goes_on_alone_and_meets_them_later(monkeypatch):
    monkeypatch.setattr("rl_swarm.network.p2p.engine.RECONNECT_SECONDS", (0.1, 0.2))
    later = Identity.generate()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"/ip4/127.0.0.1/tcp/{port}"
    early = PeerEngine(Identity.generate(), [f"{address}/p2p/{later.peer_id}", "nonsense"], **ALONE).start()
    try:
        assert not early.meet(0.1)
        assert early.store("key", "sub", b"value", 60)  # kept by itself
        assert early.find("key") == {"sub": b"value"}
        other = PeerEngine(later, (), [address], relay=False, map_ports=False).start()
        try:
            assert early.meet(20)
            assert other.meet(20)
            assert eventually(lambda: other.find("key") == {"sub": b"value"})
        finally:
            other.close()
    finally:
        early.close()


def test_who_is_killed_knows_where_the_others_are(tmp_path):
    """Addresses are written down as soon as there are any, and not only by those who leave in an orderly way."""
    one, two = PeerEngine(Identity.generate(), **ALONE).start(), identity_of("two")
    try:
        other = PeerEngine(two, [one.addresses[0]], **ALONE).start()
        try:
            manifest = make_manifest()
            with among_peers(other, two, manifest, seal(manifest, OWNER), tmp_path):
                remembered = tmp_path / "addresses.json"
                assert eventually(remembered.exists)
                assert one.addresses[0] in json.loads(remembered.read_text())["addresses"]
        finally:
            other.close()
    finally:
        one.close()


def test_who_comes_back_at_another_address_is_known_there():
    one = PeerEngine(Identity.generate(), **ALONE).start()
    try:
        two = PeerEngine(identity_of("two"), **ALONE).start()
        try:
            gone = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id('two')}"
            one.introduce(peer_id("two"), [gone])
            assert one.known == [gone] and not one.meet(0.1)
            one.introduce(peer_id("two"), two.addresses)
            assert one.known == list(two.addresses)
            assert eventually(lambda: bool(one.peers()))
        finally:
            two.close()
    finally:
        one.close()


def test_nobody_forgets_to_wait_for_one_that_is_slow_to_answer(caplog):
    """What only waits for an answer must not be tidied away as if nobody wanted it."""
    who, engine = Identity.generate().peer_id, PeerEngine(Identity.generate(), **ALONE).start()
    try:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            mute.settimeout(30)
            engine.introduce(who, [f"/ip4/127.0.0.1/tcp/{mute.getsockname()[1]}/p2p/{who}"])
            with mute.accept()[0] as connection:
                assert connection.recv(1)  # it is spoken to
                gc.collect()
                assert len(engine.reaching) == 1
        assert eventually(lambda: not engine.reaching)
    finally:
        engine.close()
    gc.collect()
    assert "destroyed" not in caplog.text


def is_stopped(process):
    """With all of its threads, which takes a moment."""
    threads = Path(f"/proc/{process}/task").glob("*/stat")
    return all(thread.read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)


def test_who_lets_others_wait_is_not_asked_again_until_it_speaks(monkeypatch):
    """A laptop that was closed: its connections are there, and nothing comes over them."""
    one, two = (
        PeerEngine(identity_of(name), answer=lambda request, peer: request, **ALONE).start() for name in ("one", "two")
    )
    (daemon,) = [found for found in daemons(os.getpid()) if str(two.folder) in cmdline(found)]
    try:
        one.introduce(peer_id("two"), two.addresses)
        assert eventually(lambda: bool(one.peers()))
        assert one.ask(peer_id("two"), b"hello", 10) == b"hello"
        os.kill(daemon, signal.SIGSTOP)
        assert eventually(lambda: is_stopped(daemon))
        with monkeypatch.context() as short, pytest.raises(TimeoutError, match="in time"):
            short.setattr("rl_swarm.network.p2p.engine.FIRST_SECONDS", 0.5)
            one.ask(peer_id("two"), b"hello", 10)
        os.kill(daemon, signal.SIGCONT)
        with pytest.raises(TimeoutError, match="a moment ago"):
            one.ask(peer_id("two"), b"hello", 10)
        assert two.ask(peer_id("one"), b"here", 10) == b"here"
        assert one.ask(peer_id("two"), b"hello", 10) == b"hello"
    finally:
        os.kill(daemon, signal.SIGCONT)
        one.close()
        two.close()


def notice(identity, **changes):
    values = {"swarm": "s", "path": "peers/ann.json", "sha256": "0" * 64, "size": 1, "timestamp": time.time()}
    return DhtRecord(**{**values, **changes})


def test_only_ones_own_notices_can_be_left_and_only_where_they_belong():
    ann, bob = identity_of("ann"), identity_of("bob")
    two = engine_of("bob")
    one = PeerEngine(Identity.generate(), two.addresses, **ALONE).start()  # which checks nothing
    key, mine = dht_key("s", "peers"), f"{ann.peer_id}/ann.json"
    good = seal(notice(ann), ann)

    def taken(subkey=mine, value=good, key=key, seconds=200.0):  # the later expiry wins
        before = two.find(key).get(subkey)
        with contextlib.suppress(OSError):
            one.store(key, subkey, value, seconds)
        return two.find(key).get(subkey) not in (None, before)

    assert taken(seconds=100.0)
    assert taken(value=seal(notice(ann, size=3), ann), seconds=130.0)
    assert not taken(value=seal(notice(bob), bob))  # in another's place
    assert not taken(subkey=f"{bob.peer_id}/ann.json", value=good)
    assert not taken(key=dht_key("s", "rewards"))
    assert not taken(key=dht_key("another", "peers"))
    assert not taken(value=good.replace(b'"size":1', b'"size":2'))
    assert not taken(value=b"\x00" * 100)
    assert not taken(value=b"{" * (MAX_NOTICE + 1))
    assert not taken(value=seal(notice(ann, timestamp=time.time() + 3600), ann))
    assert not taken(value=seal(notice(ann, timestamp=time.time() - 7200), ann))
    assert not taken(value=good, seconds=10_000.0)
    own, others = (parts_of("s", who.peer_id) for who in (ann, bob))
    assert taken(key=dht_key("s", own[1])) and taken(key=dht_key("s", own[-1]))
    assert not taken(key=dht_key("s", others[-1]))
    assert not taken(key=dht_key("another", own[-1]))
    assert not taken(value=sign(notice(ann, path="x" * 300), ann))
    one.close()


def test_who_leaves_a_notice_is_not_sent_what_lies_beside_it(monkeypatch):
    engines = [engine_of(node) for node in ("ann", "bob", "cleo")]

    def stored(engine, who, subkey, value, seconds):
        """On a busy machine nobody may take it at first."""
        until(lambda: engine.store(dht_key("beside", "peers"), f"{who.peer_id}/{subkey}", value, seconds))

    for node, engine in zip(("ann", "bob", "cleo"), engines, strict=True):
        who = identity_of(node)
        made = notice(who, swarm="beside", path=f"peers/{node}.json")
        stored(engine, who, f"{node}.json", seal(made, who), 100.0)
    one, values = engines[0], []
    real = one.node.protocol.call_find

    async def noted(peer, keys):
        found = await real(peer, keys)
        values.extend(value for value, _ in (found or {}).values())
        return found

    monkeypatch.setattr(one.node.protocol, "call_find", noted)
    who = identity_of("ann")
    again = seal(notice(who, swarm="beside", size=2), who)
    stored(one, who, "ann.json", again, 150.0)
    assert values == [None] * len(values)  # nothing, where it knows who keeps them
    for engine in engines:  # on a busy machine a peer may answer too late, once
        until(lambda engine=engine: len(engine.find(dht_key("beside", "peers"))) == 3)
        assert engine.find(dht_key("beside", "peers"))[f"{who.peer_id}/ann.json"] == again
    assert any(value is not None for value in values)


@pytest.mark.parametrize("bytes_", [b"", b"\xc1", b"\x81" * 1000, b"\xdd\xff\xff\xff\xff", b"\xa3abc", b"\x93\x01"])
def test_bytes_that_are_no_record_are_refused(bytes_):
    from hivemind.dht.routing import DHTID

    from rl_swarm.network.p2p.storage import FairStorage

    storage = FairStorage(DhtQuota())
    for subkey in ("name", b"name", 1, bytes_):
        assert not storage.store(DHTID.generate(source="key"), bytes_, time.time() + 10, subkey=subkey)
    assert not storage.store(DHTID.generate(source="key"), bytes_, time.time() + 10)


def test_a_stranger_gets_what_is_ours_and_nothing_else(tmp_path):
    swarm = AmongPeers(tmp_path)
    try:
        swarm.exchange("ann").publish(publication(swarm.manifest, "ann"))
        (tmp_path / "ann" / "secret").write_text("no")
        peer, reader = identity_of("ann").peer_id, engine_of("bob")
        path = rollouts_path(0, 0, "ann")
        whole = reader.ask(peer, path.encode(), 1 << 20)
        assert whole == (tmp_path / "ann" / path).read_bytes()
        assert len(reader.ask(peer, path.encode(), 10) or b"") == 11
        for request in (b"secret", b"../ann/secret", b"/etc/passwd", b"\xff", b"", b"x" * MAX_REQUEST):
            assert reader.ask(peer, request, 1 << 20) is None
        with pytest.raises(OSError, match=r"early|closed|reset"):
            reader.ask(peer, b"x" * (MAX_REQUEST + 1), 1 << 20)
        with pytest.raises(OSError):
            reader.ask(Identity.generate().peer_id, path.encode(), 1 << 20)
    finally:
        swarm.close()


def test_what_the_owner_signed_for_another_swarm_or_path_is_not_handed_on(tmp_path):
    """Else a member could hide the owner's list behind one of another swarm, which has a higher number."""
    swarm = AmongPeers(tmp_path)
    try:
        store, owner = swarm.store("ann"), OWNER
        ours = seal(AccessList(swarm=store.swarm, number=1), owner)
        for wrong in (
            seal(AccessList(swarm="another", number=10**15), owner),
            seal(State(swarm=store.swarm), owner),
            seal(AccessList(swarm=store.swarm, number=2), identity_of("bob")),
        ):
            store._keep(ACCESS_LIST, wrong)
            assert ACCESS_LIST not in store.copies
        store._keep(ACCESS_LIST, ours)
        store._keep(ACCESS_LIST, seal(AccessList(swarm=store.swarm), owner))  # an older one
        assert store.copies[ACCESS_LIST] == ours
        store._keep(STATE, ours)
        assert STATE not in store.copies
    finally:
        swarm.close()


def test_notices_that_matter_are_renewed_and_old_rounds_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_swarm.network.p2p.documents.MAX_OF_ROUNDS", 3)
    swarm = AmongPeers(tmp_path)
    try:
        files, peer, reader = swarm.store("ann"), identity_of("ann").peer_id, engine_of("bob")
        files.write(PEERS.of("ann"), b"{}")
        for number in range(5):
            files.write(rollouts_key(number, 0, "ann"), b"body")
        asked = [reader.ask(peer, rollouts_path(number, 0, "ann").encode(), 100) for number in range(5)]
        assert asked == [None, None, b"body", b"body", b"body"]
        left = []
        monkeypatch.setattr(files.engine, "store", lambda key, subkey, *rest: left.append((key, subkey)))
        files.renew()
        assert left == []  # it was just left
        files.clock = lambda: time.time() + KEPT_SECONDS / 2
        files.renew()
        assert left == [(dht_key(swarm.manifest.swarm(), "peers"), f"{peer}/ann.json")]
    finally:
        swarm.close()


@pytest.mark.parametrize(
    ("address", "where"),
    [
        ("/ip4/8.8.4.4/tcp/31000/p2p/12D3KooWx", "8.8.4.0/24"),
        ("/ip4/8.8.4.200/udp/4001/quic/p2p/12D3KooWy", "8.8.4.0/24"),
        ("/ip6/2a00:1450:4001:81b::200e/tcp/1/p2p/12D3KooWx", "2a00:1450:4001::/48"),
        ("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWx", ""),
        ("/ip4/192.168.1.7/tcp/1/p2p/12D3KooWx", ""),
        ("/ip4/8.8.4.4/tcp/1/p2p/12D3KooWr/p2p-circuit/p2p/12D3KooWx", ""),
        ("/dns4/example.org/tcp/1/p2p/12D3KooWx", ""),
        ("/ip4/nonsense/tcp/1", ""),
        ("", ""),
    ],
)
def test_an_address_is_in_a_subnet(address, where):
    assert subnet_of(address) == where
