"""Roles: nodes that do not learn publish messages, read those of peers, and remember."""

import threading
from pathlib import Path

import msgspec
import pytest

from rl_swarm.config.settings import Settings
from rl_swarm.environments.base import Environment, Role
from rl_swarm.errors import ConfigError
from rl_swarm.learning.checkpoints import Checkpoints
from rl_swarm.learning.policy import Policy
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.local import LocalCoordinator, LocalExchange, LocalSwarm
from rl_swarm.node.founding import new_manifest
from rl_swarm.node.node import Node
from rl_swarm.node.round import StageContext
from rl_swarm.node.worker import _restored, found, join
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.rounds import PeerInfo
from rl_swarm.telemetry.journal import METRICS, Journal

SETTINGS = Settings.of(local_groups=2, external_groups=4, generations=4, rounds=2, round_end="everyone", device="cpu")
WRITE, JUDGE = range(2)


class Writer(Role):
    def play_stage(self, context):
        return context.train() if context.stage == WRITE else context.publish([])


class Judge(Role):
    """Says of every peer's text whether it is short, once and greedily."""

    learns = False
    judged = 0

    def play_stage(self, context):
        groups = []
        if context.stage == JUDGE:
            texts = sum(len(message.texts) for message in context.peer_messages(context.round, WRITE))
            groups = yield from context.sample(context.questions(texts), count=1, greedy=True)
            self.judged += len(groups)
        yield from context.publish(groups, judged=self.judged)

    def snapshot(self):
        return {"judged": self.judged}

    def restore(self, snapshot):
        self.judged = int(snapshot["judged"])


class Reviews(Environment):
    stages, context_peers = 2, 4
    roles = {"writer": Writer, "judge": Judge}  # noqa: RUF012

    def questions(self, seeds, seconds=None):
        return [Question("write", 0, seed, f"Calculate {seed % 50} + 1.", None) for seed in seeds]

    def follow_up(self, follow_ups, seconds=None):
        return [self.judgement(one) for one in follow_ups]

    def judgement(self, one):
        texts = [(message, text) for message in one.messages for text in message.texts]
        if one.number >= len(texts):
            return Question("judge", 0, one.seed, "Nothing to judge.", None)
        message, text = texts[one.number]
        return Question("judge", 0, one.seed, f"Calculate {len(text)} + 1.", None, parents=(message,))

    def score(self, answered, seconds=None):
        return [float(place % 2) for place, _ in enumerate(answered)]


@pytest.fixture
def swarm():
    settings = Settings.of(environment="reasoning", rounds=2, round_end="everyone")
    return LocalSwarm(new_manifest(settings, "test", "owner", 0.0, stages=2), min_peers=3)


def player(swarm: LocalSwarm, folder: Path, number: int, role: str = "") -> Node:
    identity, stop, environment = Identity.derived("roles", number), threading.Event(), Reviews([])
    node = Node(
        name=identity.node,
        identity=identity,
        settings=SETTINGS,
        manifest=swarm.manifest,
        environment=environment,
        policy=Policy.load(SETTINGS, ""),
        exchange=LocalExchange(swarm, stop),
        coordinator=LocalCoordinator(swarm, stop),
        journal=Journal(folder / identity.node),
        checkpoints=Checkpoints(folder / "checkpoints", identity, identity.node),
        stop=stop,
        role=environment.roles[role or "writer"](environment),
        role_name=role,
    )
    about = {"swarm": swarm.manifest.swarm(), "node": node.name, "model": "tiny", "joined": 0.0}
    node.coordinator.register(PeerInfo(peer_id=identity.peer_id, timestamp=0.0, **about))
    return node


def test_a_frozen_role_hears_answers_once_and_tells_figures_while_the_others_learn(swarm, tmp_path) -> None:
    nodes = [player(swarm, tmp_path, 0), player(swarm, tmp_path, 1), player(swarm, tmp_path, 2, "judge")]
    judge = nodes[2]
    for stage in (WRITE, JUDGE):
        state = swarm.state
        assert (state.round, state.stage) == (0, stage)
        for node in nodes:
            node.play(state)
    assert (swarm.state.round, swarm.state.stage) == (1, 0)
    seen = nodes[1].intake.conversations[0]._in_time
    assert seen == {(WRITE, nodes[0].identity.peer_id)}, "what was there when it looked"
    lines = {node.name: node.journal.read(METRICS) for node in nodes}
    assert [line.get("idle", False) for line in lines[nodes[0].name]] == [False, True]
    first, second = lines[judge.name]
    assert first["idle"] and (first["role_metrics"], second["role_metrics"]) == ({"judged": 0}, {"judged": 16})
    assert judge.policy.version == 0 < max(node.policy.version for node in nodes[:2])
    assert second["tokens_per_second"] < 1e6, "the time that the model took is counted"

    published = swarm.published[0, JUDGE, judge.name]
    assert (published.role, len(published.rollouts), len(published.context_peers[WRITE])) == ("judge", 16, 2)
    assert all(len(given) == 1 for given in published.rollouts.values()) and len(published.parents) == 16
    messages = StageContext(nodes[0], swarm.state).peer_messages(0, JUDGE)
    assert {message.question.role for message in messages} == {"judge"} and len(messages) == 16
    assert {parent.peer_id for message in messages for parent in message.question.parents} == set(
        published.context_peers[WRITE]
    )
    assert swarm.published[0, WRITE, judge.name].rollouts == {}, "and in a stage without work everybody says so"


def test_what_other_roles_publish_is_not_learned_from(swarm, tmp_path) -> None:
    writer, judge = player(swarm, tmp_path, 0), player(swarm, tmp_path, 1, "judge")
    other = player(swarm, tmp_path, 2)
    other.play(swarm.state)
    disguised = swarm.published[0, WRITE, other.name]

    judge.exchange.publish(
        msgspec.structs.replace(disguised, node=judge.name, peer_id=judge.identity.peer_id, role="judge")
    )
    writer.play(swarm.state)
    (line,) = writer.journal.read(METRICS)
    assert set(line["external_by_peer"]) <= {other.identity.peer_id} and line["external_rejected"] == {}


def test_what_a_role_remembers_outlives_a_restart_and_a_frozen_model_is_not_written(swarm, tmp_path) -> None:
    judge = player(swarm, tmp_path, 0, "judge")
    judge.role.judged, judge.done = 7, (3, 1)
    judge.save()
    (saved,) = judge.checkpoints.written(swarm.manifest.swarm())
    place = saved.place
    assert [path.name for path in saved.private.iterdir()] == ["place.json"]
    policy, found_place = _restored(judge.checkpoints, swarm.manifest.swarm(), SETTINGS, "", None)
    assert found_place == place and (place.round, place.stage) == (3, 1) and policy.name == "tiny"
    again = Judge(judge.environment)
    again.restore(place.role)
    assert again.judged == 7


def test_where_later_stages_read_earlier_ones_no_node_publishes_in_pieces(tmp_path) -> None:

    settings = Settings.of(environment="debate", identity_path=str(tmp_path / "me.pem"), publish_frequency="generation")
    found(FolderStore.at(tmp_path), settings, "test", Identity.load_or_create(tmp_path / "me.pem"))
    with pytest.raises(ConfigError, match="ROLLOUT_PUBLISH_FREQUENCY=generation"):
        join(tmp_path, settings, threading.Event())
