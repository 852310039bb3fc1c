"""Whole swarms, without models, in folders that are synced badly in every way we know of."""

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from flaky import FAULTS, Drive
from swarms import OWNER, POLL, Background, identity_of, introduction, make_manifest, peer_id, publication, report

from rl_swarm.config.settings import Settings
from rl_swarm.network.coordinator import DocumentCoordinator
from rl_swarm.network.exchange import DocumentExchange
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.history import read_history
from rl_swarm.network.round_server import RoundServer
from rl_swarm.storage.files import LocalFiles

NODES = ["ann", "bob", "cleo", "dan"]


@dataclass
class Outcome:
    received: dict[str, list] = field(default_factory=lambda: defaultdict(list))  # by node
    played: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))  # rounds, by node
    rejected: list[tuple[str, str, str]] = field(default_factory=list)


def play(swarm_dir, faults, manifest, seed, collect):
    """A conductor and nodes, each with its own view of the drive, until the last round has ended."""
    drive, stop, outcome = Drive(LocalFiles(swarm_dir), faults, seed), threading.Event(), Outcome()
    settings = Settings.of(min_peers=len(NODES), poll_interval=POLL)
    store = FolderStore(drive.view("coordinator"))
    conductor = RoundServer(store, manifest, OWNER, settings.network, settings.storage, stop)

    def live(node):
        me, files = identity_of(node), drive.view(node)
        coordinator = DocumentCoordinator(FolderStore(files), manifest, me, node, stop, POLL)
        exchange = DocumentExchange(
            FolderStore(files), manifest, me, node, stop, lambda *why: outcome.rejected.append(why), POLL
        )
        coordinator.register(introduction(manifest, node))
        done, others = (-1, -1), [other for other in NODES if other != node]
        while (state := coordinator.wait_for(done)) is not None and state.phase == "running":
            done = (state.round, state.stage)
            outcome.played[node].add(state.round)
            exchange.publish(publication(manifest, node, *done, text=f"{node} in {done}"))
            outcome.received[node] += collect(exchange, done, others)
            coordinator.submit(report(manifest, node, *done, vote=others[0]))

    threads = [Background(conductor.run), *(Background(lambda node=node: live(node)) for node in NODES)]
    try:
        for thread in threads:
            thread.result(240.0)
    finally:
        stop.set()
    return drive, conductor.state, outcome


def in_lockstep(exchange, done, others):
    return list(exchange.collect(*done, others, patience=20.0, in_order=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_swarm_in_lockstep_loses_nothing(fault, tmp_path, caplog):
    manifest = make_manifest(rounds=2, stages=2, round_end="lockstep")
    drive, state, outcome = play(tmp_path, FAULTS[fault], manifest, 11, in_lockstep)

    assert drive.met, "a drive without faults"
    assert outcome.rejected == []
    assert [record for record in caplog.records if "not used" in record.message] == []
    places = [(number, stage) for number in range(2) for stage in range(2)]
    for node in NODES:
        assert outcome.received[node] == [
            publication(manifest, other, *place, text=f"{other} in {place}")
            for place in places
            for other in NODES
            if other != node
        ]
    history, _ = read_history(FolderStore(drive.local))
    assert [(ended.round, ended.stage) for ended in history] == places
    assert all(ended.reports.keys() == {peer_id(node) for node in NODES} for ended in history)
    assert state.phase == "finished"
    assert {m.node: (m.participation, m.reward) for m in state.members.values()} == dict.fromkeys(NODES, (2, 2.0))


def test_out_of_lockstep_a_publication_arrives_while_its_round_is_asked_for(tmp_path, caplog):
    manifest = make_manifest(rounds=7, round_end="interval", round_interval=0.6)

    def from_three_rounds(exchange, done, others):
        time.sleep(0.1)
        return [
            publication
            for number in range(max(0, done[0] - 2), done[0] + 1)
            for publication in exchange.collect(number, done[1], others)
        ]

    _, state, outcome = play(tmp_path, FAULTS["everything at once"], manifest, 5, from_three_rounds)

    assert state.phase == "finished"
    assert outcome.rejected == []
    refused = [record.message for record in caplog.records if "not used" in record.message]
    assert [line for line in refused if "when the stage ended" not in line] == []  # a drive may be slower than a round
    for reader in NODES:
        arrived = {(publication.node, publication.round) for publication in outcome.received[reader]}
        expected = {
            (node, number)
            for node in NODES
            for number in outcome.played[node]
            if node != reader and {number + 1, number + 2} <= outcome.played[reader]
        }
        assert len(expected) >= 6  # nobody was so slow that there is nothing to see
        assert arrived >= expected


def test_the_same_calls_meet_the_same_faults(tmp_path):
    def outcomes(folder, seed):
        files = Drive(LocalFiles(folder), FAULTS["reads fail for a moment"], seed).view("ann")
        (folder / "x.json").parent.mkdir(exist_ok=True)
        (folder / "x.json").write_bytes(b"{}")
        worked = []
        for _ in range(20):
            try:
                files.read("x.json", 10)
                worked.append(True)
            except OSError:
                worked.append(False)
                time.sleep(0.1)
        return worked

    first = outcomes(tmp_path / "a", 3)
    assert first == outcomes(tmp_path / "b", 3)
    assert True in first and False in first
