"""Swarms among peers as seen from outside: `status`, the live view and `validate` get what the peers that are there
give."""

import io
import threading
import time

import pytest
from msgspec.structs import replace
from rich.console import Console
from swarms import (
    LOOPBACK,
    OWNER,
    AmongPeers,
    engine_of,
    eventually,
    identity_of,
    introduction,
    make_manifest,
    peer_id,
    publication,
    report,
)

from benchmarks.lib.paths import report_path, rollouts_path
from rl_swarm.cli.live import print_once
from rl_swarm.monitor.run_reader import open_view
from rl_swarm.monitor.validate_peers import validate
from rl_swarm.network.documents import MANIFEST, STATE
from rl_swarm.network.exchange import DocumentExchange
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.p2p.clock_rounds import ClockCoordinator
from rl_swarm.network.p2p.documents import PeerStore
from rl_swarm.network.p2p.observer import KEPT_ROUNDS, SwarmObserver
from rl_swarm.protocol.rounds import State, record_presence
from rl_swarm.protocol.wire import seal


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("P2P_LISTEN", LOOPBACK[0])
    monkeypatch.setenv("P2P_RELAY", "false")


class ByTheClock:
    """Nodes that play the second round of a swarm that nobody conducts."""

    def __init__(self, folder):
        self.manifest = make_manifest(
            peer_id=peer_id("founder"), round_end="interval", round_interval=1000.0, created=time.time() - 1500.0
        )
        self.folder, self.files = folder, {}
        self.add("founder").write(MANIFEST, seal(self.manifest, identity_of("founder")))

    def add(self, node):
        engine, who, local = engine_of(node), identity_of(node), FolderStore.at(self.folder / node)
        files = PeerStore(engine, self.manifest.swarm(), self.manifest.peer_id, who, local)
        files.serve()
        self.files[node] = files
        return files

    def play(self, node, reward, vote):
        me, files, stop = peer_id(node), self.add(node), threading.Event()
        coordinator = ClockCoordinator(files, self.manifest, identity_of(node), stop)
        coordinator.register(replace(introduction(self.manifest, node), node=me))
        exchange = DocumentExchange(files, self.manifest, identity_of(node), me, stop, print)
        exchange.publish(replace(publication(self.manifest, node, 1), node=me))
        coordinator.submit(replace(report(self.manifest, node, 1, reward=reward, vote=vote), node=me))


def test_a_swarm_that_nobody_conducts_is_seen_from_outside(tmp_path, monkeypatch):
    monkeypatch.setenv("SWARM_OWNER", peer_id("founder"))
    swarm = ByTheClock(tmp_path / "swarm")
    address = "p2p://" + engine_of("founder").addresses[0]
    swarm.play("ann", 0.25, vote="bob")
    swarm.play("bob", 0.75, vote="")
    ann, bob = peer_id("ann"), peer_id("bob")

    shown = io.StringIO()
    with open_view(address) as view:
        for _ in range(20):  # on a busy machine a peer may answer too late
            view.refresh()
            nodes = {node["peer_id"]: node for node in view.as_dict()["nodes"]}
            if all(node["reward"] is not None for node in nodes.values()):
                break
        assert (view.as_dict()["phase"], view.as_dict()["round"]) == ("running", 1)
        assert {who: nodes[who]["reward"] for who in (ann, bob)} == {ann: 0.25, bob: 0.75}
        assert nodes[bob]["wins"] == 1 and nodes.keys() == {ann, bob}
        print_once(view, Console(file=shown, width=200))
    assert "0.25" in shown.getvalue() and "0.75" in shown.getvalue() and "round 1/3" in shown.getvalue()

    for _ in range(20):
        verdict, run = validate(address, nodes=2)
        if verdict.checked.get("report") == 2 == verdict.checked.get("publication"):
            break
    assert verdict.sound, verdict.errors
    assert {"member": 2, "publication": 2, "report": 2}.items() <= verdict.checked.items()
    assert any("has no coordinator" in note for note in verdict.notes)
    assert any("at round 1 of 3" in note for note in verdict.notes)
    assert run is not None and sorted(p.peer_id for _, p in run.published or []) == sorted([ann, bob])
    assert not validate(address, rounds=3, nodes=5)[0].sound

    # Bob hands out what is not his, and Ann has gone with what she had.
    ours = tmp_path / "swarm" / "bob"
    stolen = (tmp_path / "swarm" / "ann" / rollouts_path(1, 0, ann)).read_bytes()
    (ours / rollouts_path(1, 0, bob)).write_bytes(stolen)
    (ours / report_path(1, 0, bob)).write_bytes(b"{}")
    monkeypatch.setattr(engine_of("ann"), "answer", lambda request, peer: None)
    verdict, _ = validate(address)
    assert [error.split(": ")[0] for error in verdict.errors] == [rollouts_path(1, 0, bob), report_path(1, 0, bob)]
    assert "published for another place" in verdict.errors[0] and "altered or forged" in verdict.errors[1]
    assert any("1 member published nothing" in note for note in verdict.notes)


def test_a_swarm_with_a_coordinator_is_validated_while_it_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("SWARM_OWNER", OWNER.peer_id)
    swarm = AmongPeers(tmp_path / "swarm", min_peers=2, rounds=30)
    address = "p2p://" + engine_of("coordinator").addresses[0]
    try:
        swarm.store("coordinator").write(MANIFEST, seal(swarm.manifest, OWNER))
        nodes = {node: swarm.coordinator(node) for node in ("ann", "bob")}
        for node, coordinator in nodes.items():
            coordinator.register(introduction(swarm.manifest, node))
        for number in range(3):
            for node, coordinator in nodes.items():
                assert coordinator.wait_for((number - 1, 0)).round == number
                swarm.exchange(node).publish(publication(swarm.manifest, node, number))
                coordinator.submit(report(swarm.manifest, node, number))
        assert eventually(lambda: nodes["ann"].current().round == 3)
        verdict, run = validate(address, nodes=2)
        assert verdict.sound, verdict.errors
        assert verdict.checked["round"] == 3 and verdict.checked["report"] == 2
        assert run is not None and run.state.round == 3 and len(run.history) == 3

        path = report_path(2, 0, "ann")  # another than the one that was counted
        other = report(swarm.manifest, "ann", 2, reward=1.0)
        (swarm.folder / "ann" / path).write_bytes(seal(other, identity_of("ann")))
        verdict, _ = validate(address)
        assert verdict.errors == [f"{path}: not the report that the coordinator counted"]
    finally:
        swarm.close()

    # The coordinator has gone: members still hand out their own, and perhaps copies of the state.
    monkeypatch.setattr(engine_of("coordinator"), "answer", lambda request, peer: None)
    swarm.store("ann").copies.pop(STATE, None)
    swarm.store("ann").serve_copy(MANIFEST, seal(swarm.manifest, OWNER))
    swarm.store("ann").renew()
    verdict, _ = validate(address)
    assert [error for error in verdict.errors if path not in error] == []
    assert any("cannot be reached" in note for note in verdict.notes)


def test_what_an_onlooker_has_counted_stays_counted(tmp_path):
    """Reports of the last rounds are kept, and what those before come to."""
    swarm, ann, bob = ByTheClock(tmp_path / "swarm"), peer_id("ann"), peer_id("bob")
    files, me = swarm.files["founder"], identity_of("founder")
    observer = SwarmObserver(ClockCoordinator(files, swarm.manifest, me, threading.Event(), find_all=True))
    last = KEPT_ROUNDS + 49
    state = State(swarm=swarm.manifest.swarm(), phase="running", round=last)
    for who in (ann, bob):
        state = record_presence(state, who, who, time.time())
    for number in range(last + 1):
        said = replace(report(swarm.manifest, "ann", number, reward=0.5, vote="bob"), node=ann)
        observer._record((number, 0, ann), seal(said, identity_of("ann")))
    observer._ask(state)
    observer._ask(state)
    members = observer._counted(state).members
    assert len(observer.reports) == KEPT_ROUNDS
    assert (members[ann].participation, members[ann].reward) == (last + 1, (last + 1) / 2)
    assert members[bob].wins == last + 1
