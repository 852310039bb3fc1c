"""One update: the gradient of the plain loss, whatever the batches, and nothing when something goes wrong."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from small_models import (
    KINDS,
    NO_MEMORY,
    PAD,
    VOCABULARY,
    count_tokens,
    gradients_at_step,
    plain_logprobs,
    small_model,
    steady,
)

from rl_swarm.learning.batches import TrainingGroup, micro_batches
from rl_swarm.learning.devices import out_of_memory
from rl_swarm.learning.parallel.data_parallel import DataParallelError
from rl_swarm.learning.sampler import SamplingParams, sample
from rl_swarm.learning.settings import LearningSettings
from rl_swarm.learning.trainer import PartialStepError, Trainer, Update

SETTINGS = {"learning_rate": 1e-2, "max_grad_norm": 1e9}


def trainer_of(model, temperature=1.0, **changes):
    return Trainer(model, PAD, LearningSettings(**{**SETTINGS, **changes}), temperature)


def plain_loss(model, groups, temperature=1.0, kl_weight=0.0, reference=None, low=0.2, high=0.28):
    """The loss of an update by its definition, one sequence at a time."""
    total, tokens = 0.0, 0
    for group in groups:
        trained = group.trained or [True] * len(group.completions)
        for number, completion in enumerate(group.completions):
            if not trained[number]:
                continue
            a = group.advantages[number]
            new = plain_logprobs(model, group.prompt, completion, temperature)
            old = new.detach() if group.logprobs is None else torch.tensor(group.logprobs[number])
            if group.claimed:
                loss = -(new.detach() - old).exp().clamp(max=1 + high) * a * (1 + new - new.detach())
            else:
                ratio = (new - old).exp()
                loss = -a * (ratio.clamp(max=1 + high) if a > 0 else ratio.clamp(min=1 - low))
            if kl_weight:
                with torch.no_grad():
                    difference = plain_logprobs(reference, group.prompt, completion, temperature)
                difference = difference - new
                loss = loss + kl_weight * (difference.exp() - difference - 1)
            total, tokens = total + loss.sum(), tokens + len(completion)
    return total / tokens


def plain_gradients(model, groups, **options):
    twin = copy.deepcopy(model)
    twin.zero_grad()
    plain_loss(twin, groups, **options).backward()
    return [p.grad for p in twin.parameters()]


def far_apart(found, expected):
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def random_groups(seed=0, mismatch=0.3, model=None):
    """Own groups with the sampler's log-probabilities, an external one without, one with claims, one cut short."""
    rng = np.random.default_rng(seed)

    def tokens(low, high):
        return rng.integers(1, VOCABULARY, rng.integers(low, high)).tolist()

    groups = []
    for number in range(5):
        prompt, completions = tokens(1, 9), [tokens(1, 8) for _ in range(4)]
        logprobs = None
        if number != 2:
            with torch.no_grad():
                exact = [plain_logprobs(model, prompt, c).numpy() for c in completions]
            logprobs = [(row + rng.normal(0, mismatch, len(row))).tolist() for row in exact]
        groups.append(
            TrainingGroup(
                prompt,
                completions,
                rng.normal(0, 1, 4).tolist(),
                logprobs,
                claimed=number == 3,
                trained=(True, False, True, True) if number == 4 else (),
            )
        )
    return groups


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_tokens", [4096, 40, 1])
def test_the_gradient_is_that_of_the_plain_loss(kind, batch_tokens):
    model = small_model(kind)
    groups = random_groups(model=model)
    expected = plain_gradients(model, groups)
    loss = float(plain_loss(model, groups).detach())
    trainer = trainer_of(model)
    trainer.batch_tokens = batch_tokens
    seen = gradients_at_step(trainer)
    update = trainer.update(groups)
    assert len(seen) == 1
    assert far_apart(seen[0], expected) < 2e-5
    assert max(float(g.abs().max()) for g in expected) > 1e-2
    assert update.loss == pytest.approx(loss, abs=1e-5)
    assert update.tokens == sum(
        len(c) for g in groups for c, use in zip(g.completions, g.trained or [True] * 4, strict=True) if use
    )


def test_the_temperature_of_sampling_is_the_temperature_of_learning():
    model = small_model()
    groups = [TrainingGroup([1, 2], [[3, 4], [5]], [1.0, -1.0], None)]
    trainer = trainer_of(model, temperature=0.5)
    seen, expected = gradients_at_step(trainer), plain_gradients(model, groups, temperature=0.5)
    trainer.update(groups)
    assert far_apart(seen[0], expected) < 2e-5
    assert far_apart(expected, plain_gradients(small_model(), groups, temperature=1.0)) > 1e-3


def test_the_metrics_of_an_update_are_measured():
    model = small_model()
    groups = random_groups(model=model)[:2]
    update = trainer_of(model).update(groups)
    model = small_model()
    mismatch, clipped, entropy, tokens = 0.0, 0, 0.0, 0
    with torch.no_grad():
        for group in groups:
            for number, completion in enumerate(group.completions):
                new = plain_logprobs(model, group.prompt, completion)
                old = torch.tensor(group.logprobs[number])
                ratio, a = (new - old).exp(), group.advantages[number]
                mismatch += float((new - old).abs().sum())
                clipped += int((ratio > 1.28).sum() if a > 0 else (ratio < 0.8).sum())
                ids = torch.tensor([[*group.prompt, *completion]])
                every = model(input_ids=ids).logits[0, len(group.prompt) - 1 : -1].log_softmax(-1)
                entropy -= float((every.exp() * every).sum())
                tokens += len(completion)
    assert clipped > 0
    assert update.logprob_mismatch == pytest.approx(mismatch / tokens, abs=1e-4)
    assert update.clip_fraction == pytest.approx(clipped / tokens, abs=1e-6)
    assert update.entropy == pytest.approx(entropy / tokens, abs=1e-4)
    assert update.kl == 0.0


def test_own_rollouts_are_on_policy_up_to_rounding():
    """The sampler's numbers against the trainer's, end to end: the ratio is one and nothing is clipped."""
    model = small_model()
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5]]
    drawn = sample(model, prompts, 4, SamplingParams(8, frozenset({3}), PAD), seed=0)
    groups = [
        TrainingGroup(p, [s.tokens for s in group], [1.0, -1.0, 0.5, -0.5], [s.logprobs for s in group])
        for p, group in zip(prompts, drawn, strict=True)
    ]
    update = trainer_of(model).update(groups)
    assert update.logprob_mismatch < 1e-4
    assert update.clip_fraction == 0.0


def test_claimed_log_probabilities_cannot_spoil_the_update():
    """Claims so extreme that their ratio overflows are capped, and own groups count as before."""
    for claim in (-1e300, -150.0, 150.0, 1e300):
        model = small_model()
        own = random_groups(model=model)[0]
        stranger = TrainingGroup([1, 2], [[3, 4], [5]], [1.0, -1.0], [[claim, claim], [claim]], claimed=True)
        expected = plain_gradients(model, [own, stranger])
        trainer = trainer_of(model)
        seen = gradients_at_step(trainer)
        update = trainer.update([own, stranger])
        assert math.isfinite(update.grad_norm) and math.isfinite(update.logprob_mismatch)
        assert far_apart(seen[0], expected) < 2e-5


def test_gradients_are_clipped_by_their_norm():
    model = small_model()
    groups = random_groups(model=model)
    trainer = trainer_of(model, max_grad_norm=0.01)
    seen = gradients_at_step(trainer)
    update = trainer.update(groups)
    norm = math.sqrt(sum(float((g**2).sum()) for g in seen[0]))
    assert norm == pytest.approx(0.01, rel=1e-3)
    assert update.grad_norm > 0.1  # as it was before


def test_an_update_is_a_step_of_adam():
    model = small_model()
    groups = random_groups(model=model)
    expected = [p.detach().clone() for p in model.parameters()]
    gradients = plain_gradients(model, groups)
    trainer_of(model).update(groups)
    for before, gradient, now in zip(expected, gradients, model.parameters(), strict=True):
        large = gradient.abs() > 1e-4  # the first step of Adam has the size of the rate, whatever the gradient
        np.testing.assert_allclose((now.detach() - before)[large], -1e-2 * gradient[large].sign(), atol=1e-4)


def test_gradients_do_not_leak_into_the_next_update():
    model = small_model()
    groups = random_groups(model=model)
    trainer = trainer_of(model)
    trainer.update(groups)
    seen, expected = gradients_at_step(trainer), plain_gradients(model, groups)
    trainer.update(groups)
    assert far_apart(seen[0], expected) < 2e-5


def test_completions_that_are_left_out_change_nothing():
    groups = [TrainingGroup([1, 2], [[3, 4], [5, 6]], [1.0, -1.0], None, trained=(True, False))]
    model = small_model()
    trainer = trainer_of(model)
    seen = gradients_at_step(trainer)
    update = trainer.update(groups)
    assert update.tokens == 2
    assert far_apart(seen[0], plain_gradients(small_model(), groups)) < 2e-5


def test_an_update_of_which_everything_is_left_out_is_none():
    model = small_model()
    before = copy.deepcopy(model.state_dict())
    tokens = count_tokens(model)
    update = trainer_of(model).update([TrainingGroup([1], [[2]], [1.0], None, trained=(False,))])
    assert (update.tokens, tokens) == (0, [])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_gradient_that_is_not_finite_changes_no_weight_and_is_forgotten():
    model = small_model()
    trainer = trainer_of(model)
    good = random_groups(model=model)
    trainer.update(good)
    before = copy.deepcopy(model.state_dict())
    moments = copy.deepcopy(trainer.optimizer.state_dict()["state"])
    update = trainer.update([TrainingGroup([1], [[2], [3]], [math.inf, -1.0], None)])
    assert not math.isfinite(update.grad_norm)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for number, values in trainer.optimizer.state_dict()["state"].items():
        assert all(torch.equal(moments[number][name], value) for name, value in values.items())
    seen, expected = gradients_at_step(trainer), plain_gradients(model, good)
    trainer.update(good)
    assert far_apart(seen[0], expected) < 2e-5


def fails(trainer, monkeypatch, times, error):
    """Memory runs out in the last micro-batch, after the gradients of the others were added."""
    real, calls = trainer._accumulate, itertools.count()

    def accumulate(*args):
        found = real(*args)
        if next(calls) < times:
            raise error
        return found

    monkeypatch.setattr(trainer, "_accumulate", accumulate)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), *map(RuntimeError, NO_MEMORY)])
def test_when_memory_runs_out_the_same_update_is_done_in_smaller_pieces(monkeypatch, times, error):
    calm, model = small_model(), small_model()
    groups = random_groups(model=model)
    steady(trainer_of(calm)).update(groups)
    trainer = steady(trainer_of(model, batch_tokens=512))
    fails(trainer, monkeypatch, times, error)
    update = trainer.update(groups)
    assert 0 < trainer.batch_tokens <= 512 >> times
    assert update.tokens == sum(len(c) for g in groups for c in g.completions) - len(groups[4].completions[1])
    for a, b in zip(calm.parameters(), model.parameters(), strict=True):
        np.testing.assert_allclose(a.detach(), b.detach(), atol=1e-4)


@pytest.mark.parametrize("times", [1, 3])
def test_when_memory_runs_out_while_others_answers_are_weighed_it_goes_on_in_smaller_pieces(monkeypatch, times):
    trainer = trainer_of(small_model(), batch_tokens=512)
    groups = random_groups(model=trainer.model)
    expected = trainer.excess_nll(groups)
    real, sizes = trainer.logprobs, []

    def logprobs(part):
        sizes.append(sum(group.size for group in part))
        if len(sizes) <= times:
            raise RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GB)")
        return real(part)

    monkeypatch.setattr(trainer, "logprobs", logprobs)
    found = trainer.excess_nll(groups)
    assert trainer.batch_tokens <= 512 >> times and len(sizes) > times + 1
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)
    monkeypatch.setattr(
        trainer, "logprobs", lambda part: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory"))
    )
    with pytest.raises(torch.OutOfMemoryError):
        trainer.excess_nll(groups)


def test_memory_that_is_too_small_for_anything_is_an_error(monkeypatch):
    model = small_model()
    trainer = trainer_of(model)
    before = copy.deepcopy(model.state_dict())
    fails(trainer, monkeypatch, 10**6, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        trainer.update(random_groups(model=model))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_another_error_is_no_reason_to_try_again(monkeypatch):
    model = small_model()
    trainer = trainer_of(model, batch_tokens=512)
    fails(trainer, monkeypatch, 1, RuntimeError("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        trainer.update(random_groups(model=model))
    assert trainer.batch_tokens == 512


def test_micro_batches_hold_everything_once_and_keep_to_the_budget():
    groups = random_groups(model=small_model())
    whole = sorted(
        (tuple(g.prompt), tuple(c), a) for g in groups for c, a in zip(g.completions, g.advantages, strict=True)
    )
    for budget in (1, 10, 20, 40, 80, 10_000):
        batches = list(micro_batches(groups, budget))
        found = [
            (tuple(g.prompt), tuple(c), a)
            for batch in batches
            for g in batch
            for c, a in zip(g.completions, g.advantages, strict=True)
        ]
        assert sorted(found) == whole
        for batch in batches:
            alone = len(batch) == 1 and len(batch[0].completions) == 1
            assert alone or sum(g.size for g in batch) <= budget
    assert len(list(micro_batches(groups, 10_000))) == 1


def test_a_subgroup_keeps_the_fields_of_its_completions():
    group = TrainingGroup(
        [1, 2], [[3, 4], [5], [6, 7, 8]], [0.5, -0.5, 1.0], [[-1.0, -2.0], [-3.0], [-4.0, -5.0, -6.0]], True, (1, 0, 1)
    )
    pieces = [g for batch in micro_batches([group], 7) for g in batch]
    assert [len(p.completions) for p in pieces] == [2, 1]
    first, second = pieces
    assert first == TrainingGroup([1, 2], [[3, 4], [5]], [0.5, -0.5], [[-1.0, -2.0], [-3.0]], True, (1, 0))
    assert second == TrainingGroup([1, 2], [[6, 7, 8]], [1.0], [[-4.0, -5.0, -6.0]], True, (1,))


def test_the_penalty_for_leaving_the_reference():
    model = small_model()
    start = copy.deepcopy(model)
    groups = random_groups(model=model)
    trainer = trainer_of(model, kl_weight=0.5)
    assert trainer.update(groups).kl == pytest.approx(0.0, abs=1e-6)
    seen = gradients_at_step(trainer)
    expected = plain_gradients(model, groups, kl_weight=0.5, reference=start)
    assert far_apart(expected, plain_gradients(model, groups)) > 1e-3
    update = trainer.update(groups)
    assert update.kl > 1e-3
    assert far_apart(seen[0], expected) < 2e-5
    for a, b in zip(trainer.reference.parameters(), start.parameters(), strict=True):
        assert torch.equal(a, b)


def test_without_a_penalty_no_reference_is_kept():
    assert trainer_of(small_model()).reference is None


def test_good_answers_become_likelier_and_bad_ones_less_likely():
    """Would fail if a sign were wrong anywhere."""
    model = small_model()
    prompt, good, bad = [1, 2, 3], [7, 8, 9], [10, 11, 12]

    def likelihoods():
        with torch.no_grad():
            return [float(plain_logprobs(model, prompt, c).sum()) for c in (good, bad)]

    before = likelihoods()
    trainer = trainer_of(model, learning_rate=1e-3)
    for _ in range(5):
        trainer.update([TrainingGroup(prompt, [good, bad], [1.0, -1.0], None)])
    after = likelihoods()
    assert after[0] > before[0] + 0.1
    assert after[1] < before[1] - 0.1


def test_the_end_token_is_learned():
    """A completion is good because it stopped there: stopping becomes likelier, not only the words before."""
    model = small_model()
    prompt, end = [1, 2, 3], 9

    def stopping():
        with torch.no_grad():
            return float(plain_logprobs(model, prompt, [7, end])[1])

    before = stopping()
    trainer = trainer_of(model, learning_rate=1e-3)
    for _ in range(5):
        trainer.update([TrainingGroup(prompt, [[7, end], [7, 8]], [1.0, -1.0], None)])
    assert stopping() > before + 0.1


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_logits_in_chunks_give_the_same_gradients(kind, monkeypatch):
    groups = random_groups(model=small_model(kind))
    trainer = trainer_of(small_model(kind))
    seen = gradients_at_step(trainer)
    monkeypatch.setattr("rl_swarm.learning.trainer.LOGITS", 20 * VOCABULARY)
    trainer.update(groups)
    assert far_apart(seen[0], plain_gradients(small_model(kind), groups)) < 2e-5


def test_figures_of_several_updates_are_means_over_their_tokens():
    found = Update()
    found.add(Update(tokens=30, loss=1.0, grad_norm=2.0, logprob_mismatch=0.1))
    found.add(Update())
    found.add(Update(tokens=10, loss=5.0, clip_fraction=0.4, logprob_mismatch=0.7))
    assert found == Update(tokens=40, loss=2.0, grad_norm=1.5, clip_fraction=0.1, logprob_mismatch=0.1)


@pytest.mark.parametrize("fails_at", [0, 5, -1])
def test_memory_that_runs_out_while_the_optimiser_state_is_made_leaves_none_of_it(monkeypatch, fails_at):
    calm, model = small_model(), small_model()
    groups = random_groups(model=model)
    trainer_of(calm).update(groups)
    trainer = trainer_of(model, batch_tokens=512)
    victim, real, left = trainer.parameters()[fails_at], torch.zeros_like, [2]

    def zeros_like(given, **how):
        if given is victim and left[0]:
            left[0] -= 1
            assert not any(trainer.optimizer.state.values())
            raise RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GB)")
        return real(given, **how)

    monkeypatch.setattr(torch, "zeros_like", zeros_like)
    trainer.update(groups)
    assert left == [0]
    for a, b in zip(calm.parameters(), model.parameters(), strict=True):
        np.testing.assert_allclose(a.detach(), b.detach(), atol=1e-4)


def test_a_step_that_fails_half_way_is_not_taken_again(monkeypatch):
    model = small_model()
    trainer = trainer_of(model)
    real, steps = trainer.optimizer.step, []

    def step():
        real()
        steps.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer.optimizer, "step", step)
    with pytest.raises(PartialStepError, match="in the middle of an optimiser step"):
        trainer.update(random_groups(model=model))
    assert steps == [1]


@pytest.mark.parametrize(
    "error, is_memory",
    [
        (RuntimeError("out of memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 17.93 GB, other allocations: 1.00 MB)"), True),
        (RuntimeError("Invalid buffer size: 12.00 GiB"), True),
        (RuntimeError("Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), True),
        (RuntimeError("unable to mmap 64 bytes from file </torch_1>: Cannot allocate memory (12)"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (DataParallelError("worker 1 failed: OutOfMemoryError: CUDA out of memory"), False),
        (PartialStepError("memory ran out in the middle of an optimiser step"), False),
    ],
)
def test_errors_that_report_missing_memory(error, is_memory):
    assert out_of_memory(error) == is_memory
