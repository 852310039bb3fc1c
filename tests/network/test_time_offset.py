"""A clock that is off is said, by how much, and what to do about it. Real peers on loopback, whose clocks can be
set."""

import threading
import time
from contextlib import contextmanager

import pytest
from swarms import LOOPBACK, Background, eventually

from rl_swarm.cli import doctor
from rl_swarm.network.p2p import time_offset as clocks
from rl_swarm.network.p2p.engine import PeerEngine
from rl_swarm.network.p2p.joining import await_manifest
from rl_swarm.network.p2p.quota import DhtQuota
from rl_swarm.network.settings import NetworkSettings
from rl_swarm.protocol.identity import Identity


def shifted(seconds):
    return lambda: time.time() + seconds


@contextmanager
def newcomer(*others, ahead=0.0):
    known = [address for other in others for address in other.addresses]
    engine = PeerEngine(Identity.generate(), known, LOOPBACK, quota=DhtQuota(), relay=False, map_ports=False)
    engine.clock = shifted(ahead)
    try:
        yield engine.start()
    finally:
        engine.close()


@contextmanager
def peers(*offsets):
    """So many peers that know each other, with clocks that are off by so much."""
    engines = []
    try:
        for offset in offsets:
            known = [address for engine in engines for address in engine.addresses]
            engine = PeerEngine(Identity.generate(), known, LOOPBACK, relay=False, map_ports=False)
            engine.clock = shifted(offset)
            engines.append(engine.start())
        yield engines
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize("ahead", [0.0, 300.0, -7200.0])
def test_the_middle_of_the_others_counts_and_one_that_lies_changes_nothing(ahead):
    with peers(0.0, 0.0, 1e9) as others, newcomer(*others, ahead=ahead) as engine:
        found = clocks.compared(engine)
    assert found is not None and found.peers == 3
    assert abs(found.ahead - ahead) < 5.0 and found.agrees == (ahead == 0.0)


def test_of_two_the_closer_one_counts_and_of_one_that_one():
    with peers(0.0, 1e9) as others, newcomer(*others) as engine:
        found = clocks.compared(engine)
        assert found is not None and found.agrees and "those of 2 peers" in str(found)
    with peers(-300.0) as others, newcomer(*others) as engine:
        found = clocks.compared(engine)
        assert found is not None and not found.agrees and "one of the two is wrong" in str(found)
    with newcomer() as engine:
        assert clocks.compared(engine) is None


def test_an_answer_that_is_no_time_is_none():
    class Odd(float):
        def __format__(self, spec):
            return answer

    with peers(0.0) as others, newcomer(*others) as engine:
        others[0].clock = lambda: Odd(0.0)
        for answer in ("nan", "inf", "-1e400", "soon", ""):  # noqa: B007
            assert clocks.compared(engine) is None


def test_a_node_whose_clock_is_off_says_so_once_even_if_it_finds_no_swarm(caplog):
    """Notices of another time than its own are none to it, so it waits for a manifest in vain."""
    stop = threading.Event()
    with peers(0.0, 0.0, 0.0) as others, newcomer(*others, ahead=-500.0) as engine:
        waiting = Background(lambda: await_manifest(engine, NetworkSettings(poll_interval=0.05), stop))
        assert eventually(lambda: "behind those of 3 peers" in caplog.text)
        stop.set()
        assert waiting.result() is None
    assert caplog.text.count("is 500 s behind") == 1 and "timedatectl set-ntp true" in caplog.text


def test_doctor_shows_what_is_wrong_with_the_clock(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("P2P_LISTEN", LOOPBACK[0])
    with peers(0.0, 0.0, 0.0) as others:
        monkeypatch.setenv("P2P_KNOWN", ",".join(f"p2p://{e.addresses[0]}" for e in others))
        findings = list(doctor.peer_to_peer())
        assert findings[-1][0] and "the clock agrees with those of 3 peers" in findings[-1][1]
        for engine in others:
            engine.clock = shifted(-90.0)
        good, text = list(doctor.peer_to_peer())[-1]
    assert not good and "is 90 s ahead of those of 3 peers" in text and "timedatectl" in text
