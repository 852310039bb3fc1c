"""A node learns from what it made and scored itself, whatever a peer says."""

import random
from collections import Counter

import pytest
from msgspec.structs import replace

from rl_swarm.config.settings import Settings
from rl_swarm.environments.base import PEER_SECONDS, Environment
from rl_swarm.environments.reasoning import Reasoning
from rl_swarm.node.founding import new_manifest
from rl_swarm.node.intake import Checks, Selection, regenerate, score_external
from rl_swarm.node.report import best_peer
from rl_swarm.node.round import score
from rl_swarm.node.strategies import Strategy
from rl_swarm.protocol.manifest import question_seed
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.rollouts import Answer, Completion, Group, Publication, Rollout, Sampling, unpack
from rl_swarm.protocol.tasks import Task
from rl_swarm.protocol.wire import Rejected

MANIFEST = new_manifest(Settings.of(tasks="chain_sum"), "test", "owner", 0.0, stages=1)
ROUND = 7


class Doubling(Environment):
    """Asks for twice the seed."""

    def __init__(self):
        self.scored = []

    def questions(self, seeds, seconds=None):
        return [Question("doubling", 0, seed, f"2 x {seed} = ?", str(2 * seed)) for seed in seeds]

    def score(self, answered, seconds=None):
        self.scored += answered
        return [float(text == question.answer) for question, text in answered]


def question_of(peer_id, number, round=ROUND, environment=None):
    seed = question_seed(MANIFEST, round, peer_id, number)
    return (environment or Doubling()).questions([seed])[0]


def publish(peer_id, rights, round=ROUND, environment=None):
    """Return a peer's publication, with as many right answers of four to each question as `rights` says."""
    rollouts = {}
    for number, right in enumerate(rights):
        question = question_of(peer_id, number, round, environment)
        texts = [question.answer] * right + ["wrong"] * (4 - right)
        rollouts[str(number)] = [Answer(question.prompt, text, 0.5) for text in texts]
    return Publication(
        peer_id=peer_id,
        kind="rollouts",
        swarm="swarm",
        node=peer_id,
        round=round,
        stage=0,
        timestamp=0.0,
        model="m",
        policy_version=0,
        sampling=Sampling(1.0, 1.0, 0, 8),
        rollouts=rollouts,
    )


def selected(publications, wanted, used=frozenset(), seed=0, environment=None, sources=None, **changes):
    rejected = []
    checks = Checks(
        MANIFEST,
        environment or Doubling(),
        lambda *why: rejected.append(why),
        used=set(used),
        sources=sources or {},
        **changes,
    )
    return Selection(wanted, checks, Strategy(), random.Random(seed)).run(publications), rejected


def test_what_a_peer_says_about_the_end_of_its_answers_earns_it_nothing():
    environment = Doubling()
    environment.ending_bonus = 0.2
    question = question_of("alice", 0)
    answers = [Completion(question.answer, ended) for ended in (True, True, False, False)]
    rollout = Rollout("alice", ROUND, 0, 0, question.prompt, tuple(answers))
    (theirs,) = score_external([rollout], [question], environment)
    assert theirs.rewards == (1.0,) * 4 and not theirs.has_signal
    (own,) = score(environment, "me", [question], [answers])
    assert own.rewards == (1.2, 1.2, 0.8, 0.8)


def test_groups_are_scored_here_and_come_with_their_peer():
    found, rejected = selected([publish("alice", [2])], 1)
    (group,) = found.chosen
    assert group.rewards == (1.0, 1.0, 0.0, 0.0)
    assert group.question == question_of("alice", 0)
    assert (group.peer_id, group.external) == ("alice", True)
    assert found.ids == [("alice", ROUND, 0, 0)]
    assert rejected == []


def test_rewards_that_a_peer_claims_are_ignored():
    honest = publish("alice", [0, 4])
    lying = {
        number: [Answer(a.prompt, a.response, reward) for a, reward in zip(given, (1, 0, 1, 0), strict=True)]
        for number, given in honest.rollouts.items()
    }
    found, _ = selected([replace(honest, rollouts=lying)], 2)
    assert found.chosen == []
    assert [group.rewards for group in found.scored] == [(0.0,) * 4, (1.0,) * 4]


def test_a_peer_cannot_invent_a_question():
    invented = replace(
        publish("alice", [1]), rollouts={"0": [Answer("2 x 1 = ?", "2", 1.0), Answer("2 x 1 = ?", "3", 0.0)]}
    )
    found, rejected = selected([invented], 1)
    assert found.chosen == found.scored == []
    assert [(node, reason) for node, reason, _ in rejected] == [("alice", "question")]


def test_a_peer_cannot_change_its_prompt_by_a_character():
    honest = publish("alice", [1])
    changed = [Answer(a.prompt + " ", a.response, a.reward) for a in honest.rollouts["0"]]
    found, rejected = selected([replace(honest, rollouts={"0": changed})], 1)
    assert found.chosen == []
    assert rejected[0][1] == "question"


@pytest.mark.parametrize("changes", [{"peer_id": "mallory"}, {"round": ROUND - 1}, {"round": ROUND + 1}], ids=str)
def test_a_peer_cannot_pass_on_the_answers_of_another_or_of_another_round(changes):
    found, rejected = selected([replace(publish("alice", [2]), **changes)], 1)
    assert found.chosen == []
    assert rejected[0][1] == "question"


def test_a_peer_cannot_swap_its_questions():
    honest = publish("alice", [1, 1])
    swapped = {"0": honest.rollouts["1"], "1": honest.rollouts["0"]}
    assert selected([replace(honest, rollouts=swapped)], 1)[1][0][1] == "question"


def test_one_false_question_spoils_the_publication_and_no_other():
    honest = publish("alice", [1, 1])
    spoiled = replace(honest, rollouts={**honest.rollouts, "1": publish("bob", [1]).rollouts["0"]})
    found, rejected = selected([spoiled, publish("bob", [1])], 4)
    assert [group.peer_id for group in found.chosen] == ["bob"]
    assert [node for node, _, _ in rejected] == ["alice"]


def test_a_publication_beyond_the_limits_is_counted_and_the_round_goes_on():
    crowded = publish("alice", [1] * (MANIFEST.limits.questions + 1))
    found, rejected = selected([crowded, publish("bob", [1])], 1)
    assert [group.peer_id for group in found.chosen] == ["bob"]
    assert rejected[0][1] == "limits"


def test_nothing_is_scored_for_a_publication_that_is_refused():
    environment = Doubling()
    replayed = replace(publish("alice", [2]), peer_id="mallory")
    with pytest.raises(Rejected):
        regenerate(list(unpack(replayed, MANIFEST.limits)), MANIFEST, environment)
    assert environment.scored == []


class Hurried(Doubling):
    """Makes only so many questions, and scores only so many answers, in the time that a peer has."""

    def __init__(self, made, scored):
        super().__init__()
        self.made, self.most = made, scored

    def questions(self, seeds, seconds=None):
        assert seconds == PEER_SECONDS
        return super().questions(seeds)[: self.made]

    def score(self, answered, seconds=None):
        assert seconds == PEER_SECONDS
        return super().score(answered)[: self.most]


@pytest.mark.parametrize(("made", "scored", "groups"), [(5, 20, 5), (2, 20, 2), (5, 11, 2), (0, 20, 0), (5, 3, 0)])
def test_what_a_peer_cannot_have_checked_in_its_time_is_left_out_and_counted(made, scored, groups):
    """A rollout whose completions were not all scored says nothing."""
    found, rejected = selected([publish("alice", [1, 2, 3, 1, 2])], 5, environment=Hurried(made, scored))
    assert [sum(group.rewards) for group in found.scored] == [1, 2, 3, 1, 2][:groups]
    assert {key[3] for key in found.ids} == set(range(groups))
    assert [(node, reason) for node, reason, _ in rejected] == ([("alice", "slow")] if groups < 5 else [])


def test_the_own_answers_of_a_node_have_all_the_time_they_need():
    asked = []

    class Noting(Doubling):
        def score(self, answered, seconds=None):
            asked.append(seconds)
            return super().score(answered)

    score(Noting(), "me", [question_of("me", 0)], [[Completion("1", True)]])
    assert asked == [None]


def test_groups_without_signal_are_never_chosen_but_count_as_looked_at():
    publications = [publish("alice", [0, 4, 2, 0]), publish("bob", [4, 0])]
    found, _ = selected(publications, 6)
    assert [(group.peer_id, group.rewards) for group in found.chosen] == [("alice", (1.0, 1.0, 0.0, 0.0))]
    assert len(found.scored) == 6


def test_no_more_are_chosen_than_wanted_and_none_twice():
    found, _ = selected([publish("alice", [2] * 6)], 4)
    assert len(found.chosen) == len(set(found.ids)) == 4


def test_all_groups_of_a_peer_that_carry_signal_are_equally_likely():
    publications = [publish("alice", [1]), publish("bob", [1, 2, 3])]
    drawn = Counter()
    for seed in range(2000):
        found, _ = selected(publications, 2, seed=seed)
        drawn.update(found.ids)
    # two of bob's three groups beside alice's one, and two places
    assert len(drawn) == 4
    for (peer_id, *_), count in drawn.items():
        assert abs(count - {"alice": 2 / 3, "bob": 4 / 9}[peer_id] * 2000) < 110  # five standard deviations


def test_no_source_fills_a_batch_alone_where_there_are_others():
    publications = [publish(name, [1, 2, 3, 2]) for name in ("alice", "bob", "carol")]
    apart = {"alice": "alice", "bob": "bob", "carol": "carol"}
    found, _ = selected(publications, 4, sources=apart, max_source_share=0.5)
    assert Counter(g.peer_id for g in found.chosen) == {"alice": 2, "bob": 2}
    one_machine = {"alice": "invitation", "bob": "invitation", "carol": "carol"}
    found, _ = selected(publications, 4, sources=one_machine, max_source_share=0.5)
    assert Counter(g.peer_id for g in found.chosen) == {"alice": 2, "carol": 2}
    assert "bob" not in found.asked, "nothing more is wanted from there"
    found, _ = selected(publications[:1], 4, sources={"alice": "alice"}, max_source_share=0.5)
    assert len(found.chosen) == 4, "who is alone may give all"


def test_a_larger_group_is_cut_to_the_size_of_the_nodes_own():
    question = question_of("alice", 0)
    answers = [Answer(question.prompt, text, 1.0) for text in [question.answer] * 20 + ["wrong"] * 20]
    large, environment = replace(publish("alice", [1]), rollouts={"0": answers}), Doubling()
    found, _ = selected([large], 1, environment=environment, max_completions=8)
    assert len(found.chosen[0].completions) == len(environment.scored) == 8
    assert len(selected([large], 1)[0].chosen[0].completions) == 40


def test_a_copy_of_another_peers_long_answer_is_left_out():
    class Same(Doubling):
        """Asks all peers the same."""

        def questions(self, seeds, seconds=None):
            return [Question("doubling", 0, 1, "2 x 1 = ?", "2") for _ in seeds]

    def shows(peer_id, *texts):
        answers = [Answer("2 x 1 = ?", text, 1.0) for text in texts]
        return replace(publish(peer_id, [1]), rollouts={"0": answers})

    thought = "I think, and I think again, and then I know what it must be: two!"
    both = {"alice": "alice", "mallory": "mallory", "bob": "bob"}
    publications = [shows("alice", "2", thought), shows("mallory", "2", thought), shows("bob", "2", "3")]
    found, rejected = selected(publications, 3, environment=Same(), sources=both)
    assert {g.peer_id for g in found.chosen} == {"alice", "bob"}
    assert [(node, reason) for node, reason, _ in rejected] == [("mallory", "copy")]
    assert found.asked == {"alice": False, "mallory": True, "bob": False}


def test_what_this_model_would_not_write_is_left_out_and_counted_once():
    def max_span_nlls(groups):
        return [[30.0, 1.0, 0.0, 2.0] if g.peer_id == "mallory" else [3.0, 1.0, 0.0, 2.0] for g in groups]

    publications = [publish("mallory", [1, 2]), publish("alice", [1, 2])]
    sources = {"mallory": "mallory", "alice": "alice"}
    gate = {"max_span_nlls": max_span_nlls, "likelihood_threshold": 20.0}
    found, rejected = selected(publications, 2, sources=sources, **gate)
    assert {g.peer_id for g in found.chosen} == {"alice"} and len(found.chosen) == 2
    ((node, reason, detail),) = rejected
    assert (node, reason) == ("mallory", "unlikely") and "2 of its rollouts" in detail and "30 nats" in detail
    assert found.refused == {("mallory", ROUND, 0)} and found.max_nll == 3.0


def test_the_draw_depends_on_the_random_numbers_given_and_nothing_else():
    publications = [publish("alice", [1, 2, 3, 1, 2, 3])]
    assert selected(publications, 3, seed=1)[0].ids == selected(publications, 3, seed=1)[0].ids
    assert len({tuple(selected(publications, 3, seed=seed)[0].ids) for seed in range(20)}) > 5


def test_no_peer_is_asked_once_enough_is_found():
    asked = []

    def peers():
        for name in ("alice", "bob", "carol", "dave"):
            asked.append(name)
            yield publish(name, [2, 0])

    found, _ = selected(peers(), 2)
    assert asked == ["alice", "bob"]
    assert len(found.chosen) == 2


def test_a_node_that_wants_nothing_asks_nobody():
    def peers():
        raise AssertionError("asked")
        yield

    assert selected(peers(), 0)[0].chosen == []


def test_a_rollout_is_learned_from_once():
    first, _ = selected([publish("alice", [2, 2])], 1)
    second, _ = selected([publish("alice", [2, 2])], 2, used=first.ids)
    assert len(second.chosen) == 1
    assert not set(first.ids) & set(second.ids)
    third, _ = selected([publish("alice", [2, 2])], 2, used=[*first.ids, *second.ids])
    assert third.chosen == third.scored == []


def test_rewards_go_to_the_completions_they_were_given_for():
    questions = Doubling().questions([3, 4])
    texts = ["6", "8"], ["6", "x", "8"]
    completions = [[Completion(text, True) for text in group] for group in texts]
    groups = score(Doubling(), "me", questions, completions)
    assert [group.rewards for group in groups] == [(1.0, 0.0), (0.0, 0.0, 1.0)]
    assert [group.external for group in groups] == [False, False]


def group(peer_id, *rewards):
    return Group(peer_id, question_of(peer_id, 0), (Completion("a", True),) * len(rewards), rewards, True)


def test_the_vote_goes_to_the_best_mean_reward_not_to_the_most_rollouts():
    groups = [group("alice", 0.5, 0.5)] * 3 + [group("bob", 1.0, 0.0, 1.0), group("bob", 0.0, 1.0, 1.0)]
    assert best_peer(groups) == "bob"
    assert best_peer([*groups, group("bob", 0.0, 0.0, 0.0)]) == "alice"


def test_nobody_gets_the_vote_if_nobody_earned_anything():
    assert best_peer([]) == ""
    assert best_peer([group("alice", 0.0, 0.0), group("bob", 0.0, 0.0)]) == ""


def test_a_tie_is_decided_the_same_way_everywhere():
    tied = [group("bob", 1.0, 0.0), group("alice", 0.0, 1.0), group("carol", 0.0, 1.0)]
    assert {best_peer(random.Random(seed).sample(tied, 3)) for seed in range(10)} == {"alice"}


def test_seeds_differ_between_peers_rounds_numbers_and_swarms():
    other = new_manifest(Settings.of(tasks="chain_sum", seed=43), "test", "owner", 0.0, stages=1)
    seeds = {
        question_seed(manifest, round, peer, number)
        for manifest in (MANIFEST, other)
        for round in range(10)
        for peer in ("alice", "bob")
        for number in range(10)
    }
    assert len(seeds) == 400
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_two_runs_with_one_seed_ask_the_same_questions():
    later = new_manifest(Settings.of(tasks="chain_sum", rounds=3), "another name", "somebody", 9.0, stages=1)
    assert question_seed(later, 1, "alice", 2) == question_seed(MANIFEST, 1, "alice", 2)
    assert later.swarm() != MANIFEST.swarm()


def test_real_tasks_are_checked_and_scored_the_same_way():
    """The same path with reasoning-gym and its scoring process."""
    environment = Reasoning([Task("chain_sum")])
    try:
        mine = [question_of("alice", number, environment=environment) for number in range(2)]
        given = {
            str(number): [
                Answer(q.prompt, f"<answer>{q.answer}</answer>", 0.0),
                Answer(q.prompt, "<answer>-1</answer>", 1.0),
                Answer(q.prompt, f"<answer>{q.answer}</answer> believe me", 1.0),
            ]
            for number, q in enumerate(mine)
        }
        honest = replace(publish("alice", []), rollouts=given)
        publications = [replace(honest, peer_id="mallory", node="mallory"), honest]
        found, rejected = selected(publications, 8, environment=environment)
    finally:
        environment.close()
    assert [group.rewards for group in found.chosen] == [(1.0, 0.0, 0.0)] * 2
    assert {group.question for group in found.chosen} == set(mine)
    assert [(node, reason) for node, reason, _ in rejected] == [("mallory", "question")]
