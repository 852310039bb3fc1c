"""Models that are trained in the same kernels learn what each would learn alone."""

import copy
import random

import pytest
import torch
from small_models import PAD, VOCABULARY, small_model, steady

from rl_swarm.config.settings import Settings
from rl_swarm.learning import sampler
from rl_swarm.learning.batches import TrainingGroup
from rl_swarm.learning.parallel.stacked import ModelStack, stacking_key
from rl_swarm.learning.trainer import Trainer

KINDS = ("llama", "qwen2", "qwen3", "gpt2")


@pytest.fixture(autouse=True)
def float32(monkeypatch):
    """Compute in float32 on every CPU."""
    monkeypatch.setattr("rl_swarm.learning.devices.prefers_bfloat16", lambda model: False)


def trainers(kind, count=3, **settings):
    models = [small_model(kind, seed) for seed in range(count)]
    given = [Settings.of(learning_rate=rate, **settings) for rate, _ in zip((1e-3, 3e-3, 1e-2), models, strict=False)]
    return [steady(Trainer(model, PAD, s.learning)) for model, s in zip(models, given, strict=True)]


def training_groups(seed, groups=3):
    """Groups of different sizes, some of them external, one with the padding token."""
    rng = random.Random(seed)
    found = []
    for number in range(groups):
        prompt = [rng.randrange(1, VOCABULARY) for _ in range(rng.randrange(2, 9))]
        completions = [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 7))] for _ in range(4)]
        logprobs = [[-rng.random() for _ in ids] for ids in completions]
        advantages = [1.0, -0.5, 0.25, -0.75]
        claimed = number == 1
        found.append(TrainingGroup(prompt, completions, advantages, None if number == 2 else logprobs, claimed))
    return found


def weights(trainer):
    return [parameter.detach().clone() for parameter in trainer.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_updates_of_a_stack_are_those_of_each_model_alone(kind):
    alone, stacked = trainers(kind), trainers(kind)
    assert len({stacking_key(trainer) for trainer in stacked}) == 1
    stack = ModelStack(stacked)
    for turn in range(3):
        given = [
            training_groups(turn),
            training_groups(10 + turn, groups=turn + 1),
            [] if turn == 1 else training_groups(20 + turn),
        ]
        expected = [trainer.update(groups) for trainer, groups in zip(alone, given, strict=True)]
        found = stack.update(given)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.tokens == theirs.tokens
            for name in ("loss", "grad_norm", "entropy", "nll", "clip_fraction", "logprob_mismatch"):
                assert getattr(mine, name) == pytest.approx(getattr(theirs, name), abs=1e-4), name
    for one, other in zip(alone, stacked, strict=True):
        for a, b in zip(weights(one), weights(other), strict=True):
            assert torch.allclose(a, b, atol=1e-5)
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            assert one.optimizer.state[a]["step"] == other.optimizer.state[b]["step"]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_stack_are_those_of_each_model_alone(kind):
    alone, stacked = trainers(kind), trainers(kind)
    given = [training_groups(seed) for seed in range(3)]
    stack = ModelStack(stacked)
    stack.batch_tokens = 40  # several passes
    stack._step = lambda active_Z: torch.zeros(3)
    stack.update(given)
    for place, (trainer, groups) in enumerate(zip(alone, given, strict=True)):
        trainer._gradients(groups, sum(len(ids) for g in groups for ids in g.completions))
        leaves = stack.decoder.weights.values()
        for parameter, leaf in zip(trainer.parameters(), leaves, strict=True):
            assert torch.allclose(leaf.grad[place], parameter.grad, atol=1e-5)


def test_a_stack_goes_on_with_moments_that_were_there_and_leaves_its_own_in_the_optimisers():
    alone, stacked = trainers("llama"), trainers("llama")
    for trainer in (*alone, *stacked):
        trainer.update(training_groups(1))
    ModelStack(stacked).update([training_groups(2)] * 3)
    resumed = trainers("llama")
    for old, new in zip(stacked, resumed, strict=True):
        new.model.load_state_dict(copy.deepcopy(old.model.state_dict()))
        for a, b in zip(old.parameters(), new.parameters(), strict=True):
            new.optimizer.state[b] = {name: v.clone() for name, v in old.optimizer.state[a].items()}
    for trainer in alone:
        trainer.update(training_groups(2))
    for trainer in (*alone, *resumed):
        trainer.update(training_groups(3))
    for one, other in zip(alone, resumed, strict=True):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(weights(one), weights(other), strict=True))


def test_a_gradient_that_is_not_finite_costs_only_its_own_model_an_update(caplog):
    stacked = trainers("llama")
    stack = ModelStack(stacked)
    before = [weights(trainer) for trainer in stacked]
    with torch.no_grad():
        stacked[1].parameters()[0].fill_(float("inf"))
    before[1] = weights(stacked[1])
    found = stack.update([training_groups(1)] * 3)
    assert "not finite" in caplog.text and found[0].grad_norm > 0
    changed = [
        any(not torch.equal(a, b) for a, b in zip(old, weights(trainer), strict=True))
        for old, trainer in zip(before, stacked, strict=True)
    ]
    assert changed == [True, False, True]


def test_a_sampler_sees_that_a_stacked_model_has_changed():
    stacked = trainers("llama")
    stack = ModelStack(stacked)
    params = sampler.SamplingParams(6, frozenset(), PAD, greedy=True)
    before = sampler.sample(stacked[0].model, [[1, 2, 3]], 1, params, 0)
    stack.rates_Z.fill_(0.5)
    stack.update([training_groups(1)] * 3)
    after = sampler.sample(stacked[0].model, [[1, 2, 3]], 1, params, 0)
    assert before[0][0].logprobs != after[0][0].logprobs


def test_trainers_that_cannot_be_stacked():
    plain = trainers("llama", 1)[0]
    assert stacking_key(trainers("gemma3", 1)[0]) is None
    assert stacking_key(trainers("gpt_neox", 1)[0]) is None
    assert stacking_key(trainers("llama", 1, kl_weight=0.1)[0]) is None, "it has a reference model"
    assert stacking_key(trainers("qwen2", 1)[0]) != stacking_key(plain)
    assert stacking_key(trainers("llama", 1, clip_high=0.5)[0]) != stacking_key(plain)
