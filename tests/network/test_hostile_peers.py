"""One hostile peer neither stops a swarm nor keeps others out, while it is there and after it has left."""

import threading

import pytest
from hostile_peers import IdleStreams, Swarm, attacker, fill
from processes import until
from swarms import LOOPBACK, OWNER, AmongPeers, engine_of, make_manifest, peer_id

from rl_swarm.config import Settings
from rl_swarm.identity import Identity
from rl_swarm.network.folder import MANIFEST, report_folder
from rl_swarm.network.p2p.engine import WHAT_TIME, Engine
from rl_swarm.network.p2p.joining import await_manifest
from rl_swarm.wire import seal


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
                    engine_of(asking).silent.clear()
                    assert float(engine_of(asking).ask(peer_id(asked), WHAT_TIME, 32) or b"") > 0
            swarm.report(0)
            until(lambda: swarm.round() == 1)
        finally:
            held.close()


def test_the_manifest_of_the_peer_whose_address_was_given_is_taken(tmp_path):
    """Somebody else leaves one of its own beside it."""
    swarm = AmongPeers(tmp_path, name="meant")
    newcomer = Engine(
        Identity.new(), engine_of("coordinator").addresses, LOOPBACK, relay=False, map_ports=False
    ).start()
    try:
        swarm.files("coordinator").write(MANIFEST, seal(swarm.manifest, OWNER))
        with attacker() as engine:
            other = make_manifest(peer_id=engine.identity.peer_id, name="other")
            from rl_swarm.network.files import LocalFiles
            from rl_swarm.network.p2p.documents import PeerFiles

            theirs = PeerFiles(
                engine,
                other.swarm(),
                engine.identity.peer_id,
                engine.identity,
                LocalFiles(tmp_path / "theirs"),
            )
            engine.answer = theirs.answer
            theirs.write(MANIFEST, seal(other, engine.identity))
            assert newcomer.meet(60)
            found = await_manifest(newcomer, Settings(poll_interval=0.1), threading.Event())
        assert found is not None and found[0] == swarm.manifest
    finally:
        newcomer.close()
        swarm.close()
