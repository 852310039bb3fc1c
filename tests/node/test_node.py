"""A node and its round, with the bundled model, the real scorer and a swarm in this process."""

import random
import threading
from pathlib import Path

import msgspec
import pytest

from rl_swarm.config.settings import Settings
from rl_swarm.environments import task_list
from rl_swarm.environments.base import Role
from rl_swarm.environments.reasoning import Reasoning
from rl_swarm.learning.checkpoints import PLACE, Checkpoints, Place
from rl_swarm.learning.policy import ModelError, Policy
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.local import LocalCoordinator, LocalExchange, LocalSwarm
from rl_swarm.node.founding import new_manifest
from rl_swarm.node.node import Node
from rl_swarm.node.round import publication
from rl_swarm.node.worker import found, join
from rl_swarm.protocol import rounds
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.rollouts import Publication
from rl_swarm.protocol.rounds import MAX_MISSED, PeerInfo
from rl_swarm.storage.files import LocalFiles
from rl_swarm.storage.private import swarm_folder
from rl_swarm.telemetry.journal import EVENTS, METRICS, Journal, read_lines

SETTINGS = Settings.of(
    local_groups=3,
    external_groups=2,
    generations=4,
    rounds=3,
    round_end="everyone",
    held_out_questions=8,
    held_out_samples=1,
    device="cpu",
)


@pytest.fixture(scope="module")
def environment():
    reasoning = Reasoning(task_list(SETTINGS.task, SETTINGS.model.model))
    yield reasoning
    reasoning.close()


class RecordingExchange(LocalExchange):
    """Remembers every publication, because a later one of the same round replaces it."""

    def __init__(self, swarm: LocalSwarm, stop: threading.Event) -> None:
        super().__init__(swarm, stop)
        self.log: list[Publication] = []

    def publish(self, publication: Publication) -> None:
        self.log.append(publication)
        super().publish(publication)


def manifest(settings: Settings) -> Manifest:
    return new_manifest(settings, "test", Identity.generate().peer_id, 0.0, stages=1)


def make_node(swarm: LocalSwarm, environment: Reasoning, folder: Path, settings: Settings = SETTINGS) -> Node:
    identity, stop = Identity.generate(), threading.Event()
    node = Node(
        name=identity.node,
        identity=identity,
        settings=settings,
        manifest=swarm.manifest,
        environment=environment,
        role=Role(environment),
        policy=Policy.load(settings, environment.system_prompt),
        exchange=RecordingExchange(swarm, stop),
        coordinator=LocalCoordinator(swarm, stop),
        journal=Journal(folder / identity.node),
        checkpoints=Checkpoints(folder / "checkpoints" / identity.node, identity, identity.node),
        stop=stop,
    )
    node.coordinator.register(
        PeerInfo(
            peer_id=identity.peer_id,
            swarm=swarm.manifest.swarm(),
            node=node.name,
            model="tiny",
            joined=0.0,
            timestamp=0.0,
        )
    )
    return node


def rounds_of(node: Node) -> list[dict]:
    return [line for line in node.journal.read(METRICS) if line["kind"] == "round"]


@pytest.mark.parametrize(("publish", "sizes"), [("generation", [1, 2, 3]), ("stage", [3]), ("round", [3])])
def test_rollouts_are_published_as_often_as_asked_for(
    environment: Reasoning, tmp_path: Path, publish: str, sizes: list[int]
) -> None:
    settings = SETTINGS.changed(publish_frequency=publish)
    node = make_node(LocalSwarm(manifest(settings)), environment, tmp_path, settings)
    published_before_learning: list[int] = []
    learn = node.policy.learn

    def noticed(groups: list) -> object:
        published_before_learning.append(len(node.exchange.log))
        return learn(groups)

    node.policy.learn = noticed
    node.play(node.coordinator.current())
    assert [len(p.rollouts) for p in node.exchange.log] == sizes
    assert published_before_learning == [0 if publish == "round" else len(sizes)]


def test_a_node_learns_from_others_and_votes_for_the_best(environment: Reasoning, tmp_path: Path) -> None:
    swarm = LocalSwarm(manifest(SETTINGS), min_peers=2)
    first, second = (make_node(swarm, environment, tmp_path) for _ in range(2))
    state = swarm.state
    first.play(state)
    second.play(state)
    line = rounds_of(second)[0]
    signal = sum(len({answer.reward for answer in answers}) > 1 for answers in first.exchange.log[0].rollouts.values())
    assert line["external_accepted"] == min(2, signal)
    assert set(line["external_by_peer"]) <= {first.identity.peer_id}
    earned = any(answer.reward for answers in first.exchange.log[0].rollouts.values() for answer in answers)
    wins = swarm.state.members[first.identity.peer_id].wins
    assert wins == (1 if earned else 0)
    assert swarm.state.round == 1, "everyone has reported"


def test_what_a_liar_publishes_is_counted_by_reason_and_the_round_goes_on(
    environment: Reasoning, tmp_path: Path
) -> None:
    swarm = LocalSwarm(manifest(SETTINGS), min_peers=2)
    honest, liar = (make_node(swarm, environment, tmp_path) for _ in range(2))
    state = swarm.state
    liar.play(state)
    easy = msgspec.to_builtins(liar.exchange.log[0])
    for answers in easy["rollouts"].values():
        for number, answer in enumerate(answers):
            answer |= {"prompt": "What is 1 + 1?", "response": "<answer>2</answer>" if number else "3", "reward": 1.0}
    liar.exchange.publish(msgspec.convert(easy, Publication))
    honest.play(state)
    line = rounds_of(honest)[0]
    assert line["external_accepted"] == 0 and line["external_rejected"] == {"question": 1}
    events = honest.journal.read(EVENTS)
    assert [(e["node"], e["reason"]) for e in events if e["event"] == "rejected"] == [(liar.name, "question")]


def test_a_peer_that_keeps_lying_is_not_asked_for_a_while(environment: Reasoning, tmp_path: Path) -> None:
    settings = SETTINGS.changed(max_peer_failures=2, ban_rounds=3, max_rollout_age=0)
    swarm = LocalSwarm(manifest(settings), min_peers=2)
    honest, liar = (make_node(swarm, environment, tmp_path, settings) for _ in range(2))
    liar.play(swarm.state)
    lie = msgspec.to_builtins(liar.exchange.log[0])
    for answers in lie["rollouts"].values():
        for answer in answers:
            answer["prompt"] = "What is 1 + 1?"
    asked = []
    for number in range(40):
        liar.exchange.publish(msgspec.convert({**lie, "round": number}, Publication))
        honest.intake.rejected.clear()
        honest.intake.collect(msgspec.structs.replace(swarm.state, round=number))
        asked.append(honest.intake.rejected["question"])
    first = asked.index(1, 1)  # after one failure every second round, by chance; after two not at all
    assert asked[0] == 1 and asked[first : first + 4] == [1, 0, 0, 0]
    assert 2 < sum(asked) <= 11, "and then again, now and then: every fourth round at most"
    events = [e for e in honest.journal.read(EVENTS) if e["event"] == "not_asked"]
    assert len(events) == sum(asked) - 1 and events[0]["peer"] == liar.identity.peer_id


@pytest.mark.parametrize(("round_end", "asked"), [("lockstep", False), ("everyone", True)])
def test_in_lockstep_a_node_does_not_wait_for_rollouts_of_a_member_that_keeps_missing_ends(
    environment: Reasoning, tmp_path: Path, round_end: str, asked: bool
) -> None:
    """Elsewhere nodes look for what is there, and those of a slow node are as good as any."""
    settings = SETTINGS.changed(round_end=round_end)
    swarm = LocalSwarm(manifest(settings), min_peers=2)
    node, other = (make_node(swarm, environment, tmp_path, settings) for _ in range(2))
    member = msgspec.structs.replace(swarm.state.members[other.identity.peer_id], missed=MAX_MISSED)
    state = msgspec.structs.replace(swarm.state, members={**swarm.state.members, other.identity.peer_id: member})
    other.exchange.publish(publication(other, state, []))
    published = [found.node for found in node.intake.fetch(state, random.Random(0), {})]
    assert published == [other.name] * asked


def test_in_lockstep_whoever_was_waited_for_in_vain_is_not_the_next_times(
    environment: Reasoning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SETTINGS.changed(round_end="lockstep", peer_timeout=0.3)
    swarm = LocalSwarm(manifest(settings), min_peers=3)
    node, honest, tardy = (make_node(swarm, environment, tmp_path, settings) for _ in range(3))
    monkeypatch.setattr(node.intake, "is_silent", lambda member, state: False)  # it gives signs of life
    asked = []
    collect = node.exchange.collect

    def watched(round, stage, nodes, patience=0.0, in_order=False):
        asked.append((set(nodes), patience))
        return collect(round, stage, nodes, patience, in_order)

    monkeypatch.setattr(node.exchange, "collect", watched)

    def look(round: int, comes: bool) -> set[str]:
        state = msgspec.structs.replace(swarm.state, round=round)
        honest.exchange.publish(publication(honest, state, []))
        if comes:
            tardy.exchange.publish(publication(tardy, state, []))
        asked.clear()
        return {found.node for found in node.intake.fetch(state, random.Random(round), {})}

    everybody, waits = {honest.name, tardy.name}, settings.swarm.peer_timeout
    assert look(0, comes=False) == {honest.name} and asked[0] == (everybody, waits)
    for round in (1, 2, 3):  # it is read when it is there
        assert look(round, comes=True) == everybody
        assert asked == [({honest.name}, waits), ({tardy.name}, 0.0)]
    assert look(4, comes=True) == everybody and asked[0] == (everybody, waits)


def test_only_who_was_asked_can_be_late(
    environment: Reasoning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SETTINGS.changed(round_end="lockstep", peer_timeout=0.1, fetch_max_peers=1, external_groups=0)
    swarm = LocalSwarm(manifest(settings), min_peers=3)
    node, *_ = (make_node(swarm, environment, tmp_path, settings) for _ in range(3))
    monkeypatch.setattr(node.intake, "is_silent", lambda member, state: False)
    assert list(node.intake.fetch(swarm.state, random.Random(0), {})) == []
    assert len(+node.intake.late) == 1


def test_a_stranger_under_a_members_name_is_refused(environment: Reasoning, tmp_path: Path) -> None:
    swarm = LocalSwarm(manifest(SETTINGS), min_peers=2)
    honest, member = (make_node(swarm, environment, tmp_path) for _ in range(2))
    state = swarm.state
    member.play(state)
    stolen = msgspec.structs.replace(member.exchange.log[0], peer_id=Identity.generate().peer_id)
    member.exchange.publish(stolen)
    honest.play(state)
    assert rounds_of(honest)[0]["external_rejected"] == {"peer": 1}


def test_out_of_lockstep_a_node_takes_from_rounds_before_and_nothing_twice(
    environment: Reasoning, tmp_path: Path
) -> None:
    settings = SETTINGS.changed(external_groups=100)
    swarm = LocalSwarm(manifest(settings), min_peers=2)
    reader, writer = (make_node(swarm, environment, tmp_path, settings) for _ in range(2))
    writer.play(swarm.state)
    reader.play(swarm.state)
    assert swarm.state.round == 1
    seen = set(reader.intake.used)
    reader.play(swarm.state)  # nobody has published in round 1 yet
    assert rounds_of(reader)[1]["external_accepted"] == 0, "what it had learned from is not taken again"
    assert {key[1] for key in seen} <= {0}

    late = make_node(swarm, environment, tmp_path, settings)
    late.play(swarm.state)
    assert rounds_of(late)[0]["external_accepted"] == len(seen) + sum(
        len({a.reward for a in answers}) > 1 for p in reader.exchange.log for answers in p.rollouts.values()
    )


def test_a_node_that_is_told_to_stop_leaves_its_round_and_saves(environment: Reasoning, tmp_path: Path) -> None:
    swarm = LocalSwarm(manifest(SETTINGS))
    node = make_node(swarm, environment, tmp_path)
    node.play(swarm.state)
    node.stop.set()
    node.run()
    assert len(rounds_of(node)) == 1
    assert (node.checkpoints.private / "round_0" / "place.json").exists()


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.processes
def test_a_node_that_is_restarted_remembers_whom_it_does_not_ask(
    tmp_path: Path, damaged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = SETTINGS.changed(identity_path=str(tmp_path / "me.pem"))
    me, address = Identity.load_or_create(tmp_path / "me.pem"), tmp_path / "swarm"
    swarm = found(FolderStore.at(address), settings, "swarm", Identity.generate()).swarm()
    place = Place(swarm, me.peer_id, "tiny", 4, 0, 1, standing={"liar": (3, 50)})
    policy = Policy.load(settings, "")
    saved = Checkpoints(tmp_path / "elsewhere", me, me.node, LocalFiles(address))  # on another machine
    saved.save(policy, place)
    if damaged:
        path = address / saved.shared(4) / PLACE
        path.write_bytes(path.read_bytes().replace(b"[3,50]", b"[0,00]"))

    stop = threading.Event()
    stop.set()
    join(address, settings, stop)  # and saves where it is
    private = swarm_folder(settings.storage, address, swarm) / me.node / "checkpoints"
    written = Checkpoints(private, me, me.node).written(swarm)
    assert [kept.place.standing for kept in written] == ([] if damaged else [place.standing])
    assert ("is skipped" in caplog.text) == damaged


def test_peers_of_one_subnet_are_one_source_unless_they_were_invited(environment: Reasoning, tmp_path: Path) -> None:
    swarm = LocalSwarm(manifest(SETTINGS))
    one, two, three, four = (make_node(swarm, environment, tmp_path) for _ in range(4))
    peers = [node.identity.peer_id for node in (one, two, three, four)]
    swarm.apply(lambda state, now: rounds.record_presence(state, peers[3], four.name, now, "f" * 16))
    one.exchange.subnets = lambda: {peer: "8.8.4.0/24" for peer in peers[1:]}
    state = one.coordinator.current()
    assert one.intake.sources(state) == {
        peers[0]: peers[0],
        peers[1]: "8.8.4.0/24",
        peers[2]: "8.8.4.0/24",
        peers[3]: state.members[peers[3]].invitation or "8.8.4.0/24",
    }
    for node in (two, three, four):
        node.play(state)
    one.intake.settings = SETTINGS.changed(external_groups=4, max_source_share=0.25)
    found = one.intake.collect(state)
    near = [group for group in found.chosen if group.peer_id in peers[1:3]]
    assert len(near) <= 2  # an even part of two sources


def test_a_node_that_fails_says_so_in_its_log(tmp_path):
    identity = Identity.load_or_create(tmp_path / "swarm.pem")
    address = tmp_path / "swarm"
    address.mkdir()
    found(FolderStore.at(address), SETTINGS, "swarm", identity)
    settings = SETTINGS.changed(model=str(tmp_path / "no-model"), identity_path=str(tmp_path / "swarm.pem"))
    with pytest.raises(ModelError):
        join(address, settings, threading.Event())
    (line,) = read_lines(LocalFiles(address), f"logs/{identity.node}/{EVENTS}")[0]
    assert line["event"] == "failed" and "no-model" in line["error"]
