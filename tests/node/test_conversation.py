"""Later stages: every node has the same context, and questions that do not follow from it are refused."""

import random
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rl_swarm.config.settings import Settings
from rl_swarm.environments.base import Environment, Role, draw
from rl_swarm.node.conversation import MAX_MISSED, Conversation
from rl_swarm.node.founding import new_manifest
from rl_swarm.node.intake import Checks, Selection, regenerate, score_external
from rl_swarm.node.strategies import Strategy
from rl_swarm.protocol.manifest import question_seed
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.rollouts import Answer, Publication, Sampling, fit_limits, unpack
from rl_swarm.protocol.wire import Rejected

MANIFEST = new_manifest(Settings.of(tasks="chain_sum"), "test", "owner", 0.0, stages=3)
PEERS = [f"peer-{number}" for number in range(9)]
ROUND = 4


class Chain(Environment):
    """Passes on, in every stage and for each question, one message of the stage before."""

    stages, context_peers = 3, 3
    roles = {"worker": Role, "prompter": Role}  # noqa: RUF012

    def questions(self, seeds, seconds=None):
        return [Question("chain", 0, seed, f"Say {seed}", str(seed)) for seed in seeds]

    def follow_up(self, follow_ups, seconds=None):
        return [self.next(one) for one in follow_ups]

    def next(self, one):
        if one.role:
            allowed = ("easy", "hard")
            return Question("chain", 0, one.seed, one.claimed if one.claimed in allowed else allowed[0], None)
        before = [message for message in one.messages if message.question.stage == one.stage - 1]
        parents = tuple(draw(one.seed, before, 1))
        text = parents[0].texts[0] if parents else "nothing"
        return Question("chain", 0, one.seed, f"{text}, and {one.seed}", text, parents=parents)

    def score(self, answered, seconds=None):
        return [float(text == question.answer) for question, text in answered]


def checked(rollouts, conversation):
    questions = regenerate(rollouts, MANIFEST, conversation.environment, lambda round: conversation)
    return score_external(rollouts, questions, conversation.environment)


@dataclass
class Swarm:
    """Holds publications that all peers can fetch."""

    published: dict = field(default_factory=dict)
    rejected: list = field(default_factory=list)
    members: list = field(default_factory=lambda: list(PEERS))

    def conversation(self, hidden=()):
        def fetch(stage, peer_id):
            found = self.published.get((stage, peer_id))
            return [found] if found is not None and (stage, peer_id) not in hidden else []

        def reject(*why):
            self.rejected.append(why)

        return Conversation(MANIFEST, Chain([]), ROUND, fetch, reject, members=self.members)

    def publish(self, peer_id, stage, count=2, at=0.0, hidden=(), role="", prompt=None, context_peers=3):
        conversation = self.conversation(hidden)
        conversation.environment.context_peers = context_peers
        seeds = [question_seed(MANIFEST, ROUND, peer_id, number) for number in range(count)]
        if stage or role:
            questions = conversation.questions(peer_id, role, stage, seeds)
        else:
            questions = conversation.environment.questions(seeds)
        texts = ["x"] if role else [f"{peer_id} in {stage}", "x"]
        self.published[stage, peer_id] = Publication(
            peer_id=peer_id,
            kind="rollouts",
            swarm="swarm",
            node=peer_id,
            round=ROUND,
            stage=stage,
            timestamp=at,
            model="m",
            policy_version=0,
            sampling=Sampling(1.0, 1.0, 0, 8),
            rollouts={
                str(k): [Answer(prompt or question.prompt, text, 0.0) for text in texts]
                for k, question in enumerate(questions)
            },
            context_peers=list(map(list, conversation.context_peers(peer_id, stage))),
            parents={str(k): [p.digest for p in q.parents] for k, q in enumerate(questions) if q.parents},
            role=role,
        )
        return self.published[stage, peer_id]

    def check(self, publication, hidden=(), seen=()):
        rollouts = list(unpack(publication, MANIFEST.limits))
        conversation = self.conversation(hidden)
        for place in seen:
            conversation.note_in_time(self.published[place])
        return checked(rollouts, conversation)

    def refusal(self, publication, hidden=(), seen=()):
        with pytest.raises(Rejected) as caught:
            self.check(publication, hidden, seen)
        return caught.value.reason


@pytest.fixture
def swarm():
    swarm = Swarm()
    for stage in range(2):
        for at, peer_id in enumerate(PEERS):
            swarm.publish(peer_id, stage, at=float(at))
    assert not swarm.rejected
    return swarm


def test_what_follows_is_made_again_by_everybody_through_all_stages(swarm):
    publication = swarm.publish("peer-0", 2)
    groups = swarm.check(publication)
    assert [len(peers) for peers in publication.context_peers] == [3, 3]
    for number, group in enumerate(groups):
        (critic,) = group.question.parents
        assert critic.digest == publication.parents[str(number)][0]
        (first,) = critic.question.parents
        assert (critic.question.stage, first.question.stage, first.question.parents) == (1, 0, ())
        assert group.question.prompt.startswith(f"{critic.peer_id} in 1, and ")


def test_whom_a_peer_hears_depends_on_the_round_and_on_itself_and_is_never_itself(swarm):
    conversation = swarm.conversation()
    orders = {peer_id: conversation.peer_order(peer_id) for peer_id in PEERS}
    assert all(sorted([peer_id, *order]) == PEERS for peer_id, order in orders.items())
    assert len({tuple(order[:3]) for order in orders.values()}) > 4
    later = Conversation(MANIFEST, Chain([]), ROUND + 1, lambda *_: [], print, members=PEERS)
    assert sum(later.peer_order(peer_id)[0] != order[0] for peer_id, order in orders.items()) > 4


def test_those_who_said_nothing_are_passed_over(swarm):
    order = swarm.conversation().peer_order("peer-0")
    del swarm.published[0, order[0]]
    swarm.published[0, order[2]] = replace(swarm.published[0, order[2]], rollouts={})
    publication = swarm.publish("peer-0", 1)
    assert publication.context_peers == [[order[1], order[3], order[4]]]
    assert len(swarm.check(publication)) == 2


def test_no_more_peers_are_asked_than_it_takes(swarm):
    asked = []
    conversation = swarm.conversation()
    fetch = conversation.fetch
    conversation.fetch = lambda stage, peer_id: asked.append(peer_id) or fetch(stage, peer_id)
    order = conversation.peer_order("peer-0")
    conversation.context_peers("peer-0", 1)
    conversation.context_peers("peer-0", 1)
    assert asked == order[:3]


def test_another_prompt_another_parent_and_no_parent_are_refused(swarm):
    publication = swarm.publish("peer-0", 1)
    heard = [swarm.published[0, peer_id].digest(number) for peer_id in publication.context_peers[0] for number in "01"]
    other = next(name for name in heard if name not in publication.parents["0"])
    lies = {
        "question": replace(
            publication,
            rollouts={
                number: [Answer("easy", answer.response, 0.0) for answer in given]
                for number, given in publication.rollouts.items()
            },
        ),
        "parents": replace(publication, parents={**publication.parents, "0": [other]}),
        "parents ": replace(publication, parents={**publication.parents, "0": ["f" * 64]}),
        "parents  ": replace(publication, parents={}),
    }
    for reason, lie in lies.items():
        assert swarm.refusal(lie) == reason.strip()


def test_peers_that_it_was_not_to_hear_are_refused(swarm):
    publication = swarm.publish("peer-0", 1)
    order = swarm.conversation().peer_order("peer-0")
    for heard in (
        [order[:3][::-1]],  # in another order
        [[*order[:2], "stranger"]],
        [["peer-0", *order[:2]]],
        [order[:2] + order[1:2]],
        [order[:3], order[:3]],  # of its own stage
    ):
        assert swarm.refusal(replace(publication, context_peers=heard)) == "parents"
    assert swarm.refusal(swarm.publish("peer-0", 1, context_peers=4)) == "parents", "too many"


def test_nobody_picks_whom_to_hear_by_not_hearing_others(swarm):
    order = swarm.conversation().peer_order("peer-0")
    everybody = [(0, peer_id) for peer_id in order]
    some = everybody[:MAX_MISSED]
    assert swarm.check(swarm.publish("peer-0", 1, hidden=some), seen=everybody), "a few may be missed"
    choosy = swarm.publish("peer-0", 1, hidden=everybody[: MAX_MISSED + 1])
    assert swarm.refusal(choosy, seen=everybody) == "parents"


def test_late_speakers_whatever_time_they_claim_get_nobody_refused(swarm):
    everybody = [(0, peer_id) for peer_id in swarm.conversation().peer_order("peer-0")]
    late = everybody[: MAX_MISSED + 1]
    publication = swarm.publish("peer-0", 1, hidden=late)
    for place in late:
        swarm.published[place] = replace(swarm.published[place], timestamp=-1.0)
    assert len(swarm.check(publication)) == 2
    assert len(swarm.check(publication, seen=everybody[MAX_MISSED + 1 :])) == 2


def test_what_this_node_cannot_fetch_is_not_used_and_nobody_is_blamed(swarm):
    publication = swarm.publish("peer-0", 1)
    unknown = {(0, publication.context_peers[0][0])}
    assert swarm.refusal(publication, hidden=unknown) == "parents"
    conversation = swarm.conversation(unknown)
    checks = Checks(MANIFEST, conversation.environment, lambda *why: None, lambda round: conversation)
    found = Selection(1, checks, Strategy(), random.Random(0)).run([publication])
    assert found.chosen == [] and found.asked == {"peer-0": False}


def test_a_statement_whose_own_question_does_not_follow_is_not_heard(swarm):
    order = swarm.conversation().peer_order("peer-0")
    swarm.publish(order[0], 1, prompt="Say what I like")
    publication = swarm.publish("peer-0", 2)
    assert order[0] not in publication.context_peers[1] and order[0] in publication.context_peers[0]
    assert swarm.rejected[0][:2] == (order[0], "question")
    assert len(swarm.check(publication)) == 2


def test_who_tells_different_things_to_different_peers_harms_nobody_else(swarm):
    publication = swarm.publish("peer-0", 1)
    liar = publication.context_peers[0][0]
    second = {k: [replace(a, response="else") for a in v] for k, v in swarm.published[0, liar].rollouts.items()}
    swarm.published[0, liar] = replace(swarm.published[0, liar], rollouts=second)
    with pytest.raises(Rejected, match="parents"):
        swarm.check(publication)


def test_other_roles_speak_once_choose_among_what_is_allowed_and_cannot_be_invented(swarm):
    said = swarm.publish("peer-0", 0, role="prompter", prompt="hard")
    assert len(said.rollouts["0"]) == 1
    (first, *_) = swarm.check(said)
    assert (first.question.role, first.question.prompt) == ("prompter", "hard")
    assert swarm.refusal(swarm.publish("peer-0", 0, role="prompter", prompt="mine")) == "question"
    assert swarm.refusal(replace(said, role="boss")) == "role"
    assert swarm.refusal(replace(said, role="")) == "limits", "the ordinary role learns, and so it answers in groups"


def test_a_publication_that_is_cut_names_no_parents_of_what_was_left_out(swarm):
    publication = swarm.publish("peer-0", 1, count=4)
    cut = fit_limits(publication, replace(MANIFEST.limits, questions=2))
    assert set(cut.rollouts) == set(cut.parents) == {"0", "1"}
    assert len(swarm.check(cut)) == 2


NAMES = st.lists(st.sampled_from([*PEERS, "stranger", "", "x" * 64]), max_size=5)


@given(
    heard=st.lists(NAMES, max_size=4),
    parents=st.dictionaries(st.sampled_from(["0", "1", "2", "x"]), st.lists(st.text(max_size=64), max_size=3)),
    role=st.sampled_from(["", "prompter", "boss"]),
    stage=st.integers(0, 5),
    context_peers=st.sampled_from([0, 1, 3]),
)
def test_whatever_a_peer_claims_it_is_refused_or_followed(heard, parents, role, stage, context_peers):
    swarm = Swarm()
    for at, peer_id in enumerate(PEERS):
        swarm.publish(peer_id, 0, at=float(at))
    publication = swarm.publish("peer-0", 1)
    claimed = replace(publication, context_peers=heard, parents=parents, role=role, stage=stage)
    conversation = swarm.conversation()
    conversation.environment.context_peers = context_peers
    rollouts = list(unpack(claimed, MANIFEST.limits))
    with suppress(Rejected):
        assert len(checked(rollouts, conversation)) == 2


def test_an_environment_can_say_whose_role_is_heard(monkeypatch):
    swarm = Swarm()
    for peer_id in PEERS[:6]:
        swarm.publish(peer_id, 0)
    for peer_id in PEERS[6:8]:
        swarm.publish(peer_id, 0, count=1, role="prompter")
    everybody = swarm.publish("peer-8", 1)
    assert len(everybody.context_peers[0]) == 3
    monkeypatch.setattr(Chain, "context_roles", ("prompter",))
    publication = swarm.publish("peer-8", 1)
    assert sorted(publication.context_peers[0]) == PEERS[6:8]
    assert len(swarm.check(publication)) == 2
    assert swarm.refusal(everybody) == "parents"
    conversation = swarm.conversation()
    assert conversation.publishers(0, PEERS, 9, ("",)) == PEERS[:6]
