"""Strategies on groups made by hand: which are taken, how many, and what they count."""

import random
from collections import Counter

import msgspec
import pytest

from rl_swarm.config import resolve as config
from rl_swarm.config.settings import UP_PRESET, Settings
from rl_swarm.environments.base import Environment
from rl_swarm.environments.presets import PRESETS
from rl_swarm.environments.reasoning import Reasoning
from rl_swarm.learning.policy import Policy
from rl_swarm.node.founding import new_manifest
from rl_swarm.node.intake import Checks, Selection
from rl_swarm.node.strategies import STRATEGIES, CandidateGroup, StrategyError, named, weighted
from rl_swarm.protocol.manifest import question_seed, task_index
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.rollouts import Answer, Completion, Group, Publication, Sampling

MANIFEST = new_manifest(Settings.of(tasks="chain_sum"), "test", "owner", 0.0, stages=1)


class Doubling(Environment):
    """Asks for twice the seed."""

    def __init__(self):
        pass

    def questions(self, seeds, seconds=None):
        return [Question("doubling", 0, seed, f"2 x {seed} = ?", str(2 * seed)) for seed in seeds]

    def score(self, answered, seconds=None):
        return [float(text == question.answer) for question, text in answered]


def published(peer_id, rights):
    """Return a publication with as many right answers of four to each question as `rights` says."""
    rollouts = {}
    for number, right in enumerate(rights):
        (question,) = Doubling().questions([question_seed(MANIFEST, 0, peer_id, number)])
        given = [question.answer] * right + ["wrong"] * (4 - right)
        rollouts[str(number)] = [Answer(question.prompt, text, 0.5) for text in given]
    return Publication(
        peer_id=peer_id, kind="rollouts", swarm="swarm", node=peer_id, round=0, stage=0, timestamp=0.0, model="m",
        policy_version=0, sampling=Sampling(1.0, 1.0, 0, 8), rollouts=rollouts,
    )  # fmt: skip


def taken(strategy, publications, external, local=(), seed=0, share=1.0):
    one = named(strategy)
    checks = Checks(
        MANIFEST,
        Doubling(),
        lambda *why: pytest.fail(str(why)),
        sources={p.peer_id: p.peer_id for p in publications},
        max_source_share=share,
    )
    return Selection(one.wanted(external, local), checks, one, random.Random(seed)).run(publications)


def own(right):
    question = Question("doubling", 0, 1, "?", "2")
    return Group("me", question, (Completion("x", True),) * 4, (1.0,) * right + (0.0,) * (4 - right), False)


SOME = [published("ann", [0, 4, 2]), published("bob", [4, 3, 1])]


def rewards(found):
    return sorted(4 * group.mean_reward for group in found.chosen)


def test_alone_takes_nothing_and_looks_at_nobody():
    found = taken("alone", SOME, 4)
    assert found.chosen == found.scored == []


def test_sapo_takes_groups_with_signal_of_all_peers():
    assert rewards(taken("sapo", SOME, 8)) == [1, 2, 3]
    found = taken("sapo", SOME, 1)
    assert len(found.chosen) == 1 and len(found.scored) == 6, "all were looked at before one was drawn"


def test_sapo_draws_groups_and_not_peers():
    """A peer with three groups is drawn from three times as often as one with a single group."""
    peers = [published("ann", [2]), published("bob", [1, 2, 3])]
    counts = Counter(taken("sapo", peers, 1, seed=seed).chosen[0].peer_id for seed in range(400))
    assert 250 < counts["bob"] < 350


def test_frugal_stops_asking_when_it_has_enough():
    found = taken("frugal", SOME, 1)
    assert {group.peer_id for group in found.scored} == {"ann"}


def test_uniform_takes_groups_without_signal_too():
    assert rewards(taken("uniform", SOME, 8)) == [0, 1, 2, 3, 4, 4]


def test_top_takes_the_best_rewarded_groups_even_without_signal():
    assert rewards(taken("top", SOME, 3)) == [3, 4, 4]
    assert rewards(taken("top-signal", SOME, 2)) == [2, 3]


def test_adaptive_takes_one_more_for_every_own_group_without_signal():
    many = [published("ann", [1, 2, 3, 1, 2]), published("bob", [2, 2, 2])]
    assert len(taken("adaptive", many, 2, local=[own(0), own(2), own(4)]).chosen) == 4
    assert len(taken("adaptive", many, 2, local=[own(1), own(2), own(3)]).chosen) == 2


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_takes_no_more_than_it_wants_and_the_same_every_time(name):
    first, second = (taken(name, SOME, 2, local=[own(2)], seed=3) for _ in range(2))
    assert first.chosen == second.chosen and len(first.chosen) <= 2
    assert len(set(first.ids)) == len(first.chosen)


def test_a_strategy_brings_its_settings_unless_the_user_gives_others():
    capped = config.load(flags={"strategy": "capped"}, environ={}).settings
    assert (capped.sharing.share_logprobs, capped.learning.external_correction, capped.sharing.check_likelihood) == (
        True,
        "capped",
        False,
    )
    gated = config.load(UP_PRESET, flags={"strategy": "gated"}, environ={}).settings
    assert (gated.sharing.check_likelihood, gated.learning.negative_scale) == (True, 0.25), (
        "above the preset of the command"
    )
    mine = config.load(flags={"strategy": "gated", "negative_scale": 0.5}, environ={})
    assert mine.settings.learning.negative_scale == 0.5 and mine.sources["check_likelihood"] == "strategy gated"
    assert config.load(environ={}).settings == Settings()


def test_own_strategies_are_named_by_module_and_class(tmp_path, monkeypatch):
    (tmp_path / "ideas.py").write_text(
        "from rl_swarm.node.strategies import Sapo, weighted\n"
        "class Unsure(Sapo):\n"
        "    def choose(self, candidates, wanted, rng):\n"
        "        best = sorted(candidates, key=lambda one: abs(one.group.mean_reward - 0.5))\n"
        "        return [weighted(one, 0.5) for one in best[:wanted]]\n"
        "number = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    (group,) = taken("ideas:Unsure", SOME, 1).chosen
    assert (group.mean_reward, group.weight) == (0.5, 0.5)
    for wrong in ("ideas:Missing", "nowhere:Unsure", "ideas:number", "random:Random"):
        with pytest.raises(StrategyError, match=wrong):
            named(wrong)
    with pytest.raises(StrategyError, match="sapo"):
        named("spao")


def test_a_weight_scales_what_is_learned_from_a_group():
    policy = Policy.load(Settings.of(device="cpu", negative_scale=1.0), "")
    question = Question("t", 0, 1, "What is 1 + 1?", "2")
    group = Group("ann", question, (Completion("2", True), Completion("3", True)), (1.0, 0.0), True)
    one = CandidateGroup(("ann", 0, 0, 0), group, SOME[0])
    whole, half = policy._training_group(group), policy._training_group(weighted(one, 0.5).group)
    assert list(half.advantages) == [0.5 * a for a in whole.advantages] and half.completions == whole.completions


def test_capped_and_gated_reach_the_loss():
    """Claims are used with `capped`; with `gated` others' worse answers count a quarter."""
    capped = config.load(flags={"strategy": "capped", "device": "cpu"}, environ={}).settings
    gated = config.load(flags={"strategy": "gated", "device": "cpu"}, environ={}).settings
    question = Question("t", 0, 1, "What is 1 + 1?", "2")
    policy = Policy.load(capped, "")
    texts = []
    for word in ("2", "3"):
        ids = policy.encode(Completion(word, True))
        texts.append(Completion(word, True, ids, (-0.5,) * len(ids)))
    group = Group("ann", question, tuple(texts), (1.0, 0.0), True)
    assert policy._training_group(group).claimed
    training_group = Policy.load(gated, "")._training_group(group)
    assert not training_group.claimed and training_group.advantages[1] == pytest.approx(
        -0.25 * training_group.advantages[0]
    )


def test_specialists_are_asked_their_tasks_and_anybody_can_check_it():
    tasks = PRESETS["tiny"]
    manifest = new_manifest(Settings.of(tasks="tiny"), "test", "owner", 0.0, stages=1)
    special = msgspec.structs.replace(manifest, specialists={"ann": [5, 7]})
    seeds = [question_seed(special, r, "ann", k) for r in range(5) for k in range(8)]
    assert {task_index(seed, tasks) for seed in seeds} == {5, 7} and len(set(seeds)) == 40
    others = [question_seed(special, 0, "bob", k) for k in range(8)]
    assert others == [question_seed(manifest, 0, "bob", k) for k in range(8)]
    again = msgspec.json.decode(msgspec.json.encode(special), type=type(special))
    assert again == special and again.swarm() == special.swarm() != manifest.swarm()
    assert b"specialists" not in msgspec.json.encode(manifest), "the digest of other swarms is as it was"
    never = msgspec.structs.replace(manifest, specialists={"ann": [99]})
    assert question_seed(never, 0, "ann", 0) >= 0, "it ends, whatever a stranger's manifest says"


def test_the_task_of_a_seed_is_the_one_the_scoring_process_takes():
    tasks = PRESETS["tiny"]
    environment = Reasoning(tasks)
    try:
        assert [q.number for q in environment.questions(range(40))] == [task_index(s, tasks) for s in range(40)]
    finally:
        environment.close()
