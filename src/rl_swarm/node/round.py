"""Plays one stage of a round (most swarms have one), top to bottom, and offers roles the steps of it."""

from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from rl_swarm.environments.base import Environment, ModelRequest
from rl_swarm.learning.policy import Published, SampleRequest, TrainRequest, update_batches
from rl_swarm.learning.trainer import Update
from rl_swarm.node.intake import Accepted
from rl_swarm.node.report import best_peer, report, write_metrics
from rl_swarm.protocol.manifest import derive_seed, question_seed
from rl_swarm.protocol.questions import PeerMessage, Question
from rl_swarm.protocol.rollouts import Completion, Group, Publication, Sampling, to_answers
from rl_swarm.protocol.rounds import State

if TYPE_CHECKING:
    from rl_swarm.node.node import Node


def play_round(node: "Node", state: State) -> Iterator[ModelRequest]:
    """Play one stage of a round: ask, sample, score, publish, collect, train, report.

    Each request that it yields is done by the process that runs the node, alone or with those of other nodes.
    """
    settings, watch = node.settings, node.watch

    with watch("questions"):
        questions = own_questions(node, state)

    own: list[Group] = []
    for batch in question_batches(questions, settings.sharing.publish_frequency):
        node.check_stop()
        yield (sampling := sample_request(node, state, batch, start=len(own)))
        with watch("score"):
            own += score(node.environment, node.peer_id, batch, sampling.completions)
        if settings.sharing.publish_frequency != "round":
            with watch("publish"):
                node.exchange.publish(publication(node, state, own))
    yield Published()

    node.check_stop()
    with watch("collect"):
        accepted = node.intake.collect(state, own)

    training, update = [*own, *accepted.chosen], Update()
    for groups in update_batches(training, settings.learning.groups_per_update) * settings.learning.epochs:
        yield (learning := TrainRequest(node.policy, groups, watch))
        update.add(learning.update)

    if settings.sharing.publish_frequency == "round":
        with watch("publish"):
            node.exchange.publish(publication(node, state, own))
    with watch("report"):
        node.coordinator.submit(report(node, state, own, training, vote=best_peer(accepted.scored)))
    node.done = (state.round, state.stage)
    write_metrics(node, state, own, accepted, update)


def own_questions(node: "Node", state: State, count: int | None = None) -> list[Question]:
    """Make this node's questions in a stage; those of a later stage follow from what peers published before."""
    seeds = question_seeds(node, state, count)
    if state.stage == 0 and not node.role_name:
        return node.environment.questions(seeds)
    return node.intake.conversation(state.round).questions(node.peer_id, node.role_name, state.stage, seeds)


def question_seeds(node: "Node", state: State, count: int | None = None) -> list[int]:
    """Return the seeds of this node's questions in a round."""
    numbers = range(node.settings.learning.local_groups if count is None else count)
    return [question_seed(node.manifest, state.round, node.peer_id, number) for number in numbers]


def question_batches(questions: Sequence[Question], publish_frequency: str) -> Iterator[Sequence[Question]]:
    """Split the questions into those that are answered before the next publication."""
    size = 1 if publish_frequency == "generation" else max(len(questions), 1)
    return (questions[start : start + size] for start in range(0, len(questions), size))


def sample_request(
    node: "Node",
    state: State,
    questions: Sequence[Question],
    start: int = 0,
    count: int | None = None,
    greedy: bool = False,
) -> SampleRequest:
    """Ask this node's model for `count` completions of each question; `start` is the number of the first one."""
    seed = derive_seed(node.manifest.seed, "sample", node.peer_id, state.round, state.stage, start)
    return SampleRequest(node.policy, questions, count or node.settings.sampling.generations, seed, node.watch, greedy)


def score(
    environment: Environment, peer_id: str, questions: Sequence[Question], completions: Sequence[Sequence[Completion]]
) -> list[Group]:
    """Score this node's own completions of each question, all in one go."""
    answered = [(q, completion) for q, group in zip(questions, completions, strict=True) for completion in group]
    rewards = environment.score([(question, completion.text) for question, completion in answered])
    asked = zip(rewards, answered, strict=True)
    earned = iter([reward + environment.ending_reward(question, c.ended) for reward, (question, c) in asked])
    return [
        Group(peer_id, question, tuple(group), tuple(next(earned) for _ in group), external=False)
        for question, group in zip(questions, completions, strict=True)
    ]


def publication(node: "Node", state: State, groups: Sequence[Group]) -> Publication:
    """Make the document that shares this node's groups in a stage."""
    settings = node.settings
    parents = {str(number): [p.digest for p in group.question.parents] for number, group in enumerate(groups)}
    has_context = bool(groups) and state.stage > 0
    context = node.intake.conversation(state.round).context_peers(node.peer_id, state.stage) if has_context else ()
    return Publication(
        peer_id=node.peer_id,
        kind="rollouts",
        swarm=state.swarm,
        node=node.name,
        round=state.round,
        stage=state.stage,
        timestamp=node.clock(),
        model=node.policy.name,
        policy_version=node.policy.version,
        sampling=Sampling(
            settings.sampling.temperature,
            settings.sampling.top_p,
            settings.sampling.top_k,
            settings.completion_tokens(),
        ),
        tokenizer=node.policy.tokenizer_hash if settings.sharing.share_logprobs else "",
        rollouts={
            str(number): to_answers(group, settings.sharing.share_logprobs) for number, group in enumerate(groups)
        },
        context_peers=list(map(list, context)),
        parents={number: digests for number, digests in parents.items() if digests},
        role=node.role_name,
    )


class StageContext:
    """Offers a role the steps of one stage; `RoleContext` says what each of them does."""

    def __init__(self, node: "Node", state: State) -> None:
        self._node, self._state = node, state
        self.round, self.stage, self.peer_id = state.round, state.stage, node.peer_id
        self.model, self.watch = node.policy, node.watch

    def questions(self, count: int | None = None) -> list[Question]:
        return own_questions(self._node, self._state, count)

    def sample(
        self, questions: Sequence[Question], count: int | None = None, greedy: bool = False
    ) -> Generator[ModelRequest, None, list[Group]]:
        self._node.check_stop()
        yield (sampling := sample_request(self._node, self._state, questions, count=count, greedy=greedy))
        with self.watch("score"):
            return self.score(questions, sampling.completions)

    def score(self, questions: Sequence[Question], completions: Sequence[Sequence[Completion]]) -> list[Group]:
        return score(self._node.environment, self.peer_id, questions, completions)

    def peer_messages(self, round: int, stage: int, role: str | None = None) -> list[PeerMessage]:
        node = self._node
        conversation = node.intake.conversation(round)
        order = conversation.peer_order(node.peer_id)
        roles = () if role is None else (role,)
        publishers = conversation.publishers(stage, order, node.settings.sharing.fetch_max_peers, roles)
        return [message for peer_id in publishers for message in conversation.messages_of(stage, peer_id)]

    def train(self) -> Iterator[ModelRequest]:
        return play_round(self._node, self._state)

    def publish(self, groups: Sequence[Group], **figures: float) -> Iterator[ModelRequest]:
        node, state = self._node, self._state
        node.check_stop()
        with self.watch("publish"):
            node.exchange.publish(publication(node, state, groups))
        yield Published()
        with self.watch("report"):
            node.coordinator.submit(report(node, state, groups, groups, vote=""))
        node.done = (state.round, state.stage)
        write_metrics(node, state, groups, Accepted(), Update(), figures)
