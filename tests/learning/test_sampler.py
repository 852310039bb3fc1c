"""Sampling in one batch is the same as sampling one by one: same numbers, less work."""

import numpy as np
import pytest
import torch
from small_models import FAST, KINDS, PAD, VOCABULARY, count_tokens, is_greedy, plain_logprobs, small_model

from rl_swarm.learning.batches import TrainingGroup
from rl_swarm.learning.decoder import Decoder
from rl_swarm.learning.sampler import COMPACT_BELOW, SamplingParams, draw, sample, truncated
from rl_swarm.learning.sequences import completion_logits, pad_right, run_prompts
from rl_swarm.learning.settings import LearningSettings
from rl_swarm.learning.trainer import Trainer, token_logprobs
from rl_swarm.learning.weights import Weights

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1], [11], [20, 21, 22, 23, 24, 25]]
EOS = frozenset({3, 14, 25, 36})
DECODING = SamplingParams(max_new_tokens=12, eos=EOS, pad=PAD)


def all_samples(model, params=DECODING, count=4, seed=1):
    drawn = sample(model, PROMPTS, count, params, seed)
    assert [len(group) for group in drawn] == [count] * len(PROMPTS)
    return [(prompt, s) for prompt, group in zip(PROMPTS, drawn, strict=True) for s in group]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_a_plain_forward_pass(kind, temperature):
    model = small_model(kind)
    samples = all_samples(model, SamplingParams(12, EOS, PAD, temperature))
    assert len({len(s.tokens) for _, s in samples}) > 1
    for prompt, s in samples:
        with torch.no_grad():
            expected = plain_logprobs(model, prompt, s.tokens, temperature)
        np.testing.assert_allclose(s.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_prompts_and_padding_change_no_log_probability(kind):
    """The path of the trainer: prompts of different lengths once each, completions of different lengths."""
    model = small_model(kind)
    rng = np.random.default_rng(0)
    rows = [0, 0, 0, 1, 2, 2, 3]
    completions = [rng.integers(1, VOCABULARY, length).tolist() for length in (4, 1, 9, 1, 7, 3, 2)]
    ids_BT = pad_right(completions, PAD, torch.long, model.device)
    with torch.no_grad():
        prefix = run_prompts(model, PROMPTS, PAD).select(torch.tensor(rows))
        logprobs_BT, entropy_BT = token_logprobs(completion_logits(model, prefix, ids_BT), ids_BT, 1.0)
        for number, (row, completion) in enumerate(zip(rows, completions, strict=True)):
            expected = plain_logprobs(model, PROMPTS[row], completion)
            np.testing.assert_allclose(logprobs_BT[number, : len(completion)], expected, atol=1e-4)
        everything = model(input_ids=torch.tensor([[*PROMPTS[0], *completions[0]]])).logits[0, 2:-1].log_softmax(-1)
    np.testing.assert_allclose(entropy_BT[0, :4], -(everything.exp() * everything).sum(-1), atol=1e-4)


def test_one_token_completions_need_only_their_prompt():
    model = small_model()
    tokens = count_tokens(model)
    with torch.no_grad():
        prefix = run_prompts(model, PROMPTS, PAD)
        ids_BT = torch.tensor([[1], [2], [3], [4]])
        logprobs_BT, _ = token_logprobs(completion_logits(model, prefix, ids_BT), ids_BT, 1.0)
    assert tokens == [len(PROMPTS) * max(map(len, PROMPTS))]
    for prompt, completion, found in zip(PROMPTS, ids_BT.tolist(), logprobs_BT, strict=True):
        np.testing.assert_allclose(found, plain_logprobs(model, prompt, completion).detach(), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_transformers_generate(kind):
    same_as_generated(small_model(kind, seed=3))


def same_as_generated(model):
    for prompt, s in all_samples(model, SamplingParams(12, EOS, PAD, greedy=True), count=1):
        is_greedy(model, prompt, s.tokens, 12, EOS)


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("copied", [False, True])
def test_after_training_both_still_equal_transformers(kind, copied, monkeypatch):
    model, before = small_model(kind), small_model(kind)
    if copied:  # as on a CPU that is fast in bfloat16, here in full precision
        weights = Weights(Decoder(model), torch.float32)

        def refreshed(model):
            weights.refresh()
            return weights

        monkeypatch.setattr("rl_swarm.learning.sampler.low_precision_weights", refreshed)
    trainer = Trainer(model, PAD, LearningSettings(learning_rate=0.02))
    for step in range(2):
        all_samples(model, count=2, seed=step)
        trainer.update([TrainingGroup([5, 6, 7], [[8, 9], [10]], [1.0, -1.0], None)])
        samples = all_samples(model, count=2, seed=step)
        for prompt, s in samples:
            with torch.no_grad():
                np.testing.assert_allclose(s.logprobs, plain_logprobs(model, prompt, s.tokens), atol=1e-4)
        with torch.no_grad():
            moved = [np.abs(s.logprobs - plain_logprobs(before, p, s.tokens).numpy()).max() for p, s in samples]
        assert max(moved) > 0.01
        same_as_generated(model)


def test_a_sequence_ends_with_the_first_end_token_which_belongs_to_it():
    model = small_model()
    samples = [s for _, s in all_samples(model, count=16)]
    ended, cut = [s for s in samples if s.ended], [s for s in samples if not s.ended]
    assert ended and cut
    for s in ended:
        assert s.tokens[-1] in EOS
        assert not EOS & set(s.tokens[:-1])
    for s in cut:
        assert len(s.tokens) == DECODING.max_new_tokens
        assert not EOS & set(s.tokens)
    assert all(len(s.tokens) == len(s.logprobs) for s in samples)


def test_an_end_token_at_the_very_last_place_counts_as_ended():
    model = small_model()

    def drawn(seed, length):
        return sample(model, [PROMPTS[0]], 1, SamplingParams(length, EOS, PAD), seed)[0][0]

    seed = next(seed for seed in range(1000) if (s := drawn(seed, 12)).ended and len(s.tokens) > 1)
    first = drawn(seed, 12)
    assert drawn(seed, len(first.tokens)) == first
    short = drawn(seed, len(first.tokens) - 1)
    assert (short.tokens, short.ended) == (first.tokens[:-1], False)


def test_draws_depend_on_the_seed_alone():
    model = small_model()
    torch.manual_seed(1)
    first = all_samples(model, seed=5)
    state = torch.get_rng_state()
    assert all_samples(model, seed=5) == first
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert all_samples(model, seed=5) == first
    assert all_samples(model, seed=6) != first


def test_the_completions_of_a_prompt_differ():
    (group,) = sample(small_model(), [PROMPTS[0]], 8, DECODING, seed=0)
    assert len({s.tokens for s in group}) > 4


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_sequences_that_have_ended_leave_the_batch_when_enough_have(kind):
    model = small_model(kind)
    tokens = count_tokens(model)
    samples = [s for _, s in all_samples(model, count=8)]
    padded = len(PROMPTS) * max(map(len, PROMPTS))
    assert tokens[0] == (sum(map(len, PROMPTS)) if kind == "llama" else padded)  # every prompt once
    batch, batches = len(samples), []
    for step in range(1, 12):
        going = sum(len(s.tokens) > step for s in samples)
        batch = going if going <= COMPACT_BELOW * batch else batch
        batches += [batch] * (going > 0)
    assert tokens[1:] == batches and batches[-1] < batches[0]


def test_tokens_are_drawn_as_often_as_their_probability_says():
    logits_BV = torch.linspace(0, 2, 8).expand(20_000, 8)
    uniform_B = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    for temperature in (1.0, 0.5):
        token_B, logprob_B = draw(logits_BV, SamplingParams(1, EOS, PAD, temperature), uniform_B)
        expected = (torch.linspace(0, 2, 8) / temperature).softmax(0)
        shares = torch.bincount(token_B, minlength=8) / 20_000
        assert ((shares - expected).abs() < 5 * (expected * (1 - expected) / 20_000).sqrt()).all()
        np.testing.assert_allclose(logprob_B, expected[token_B].log(), atol=1e-5)


def kept(probabilities, **limits):
    logprobs_BV = torch.tensor([probabilities]).log()
    limits = {"top_k": 0, "top_p": 1.0, **limits}
    return [i for i, value in enumerate(truncated(logprobs_BV, **limits)[0].tolist()) if value > float("-inf")]


def test_top_k_and_top_p_keep_the_likeliest_tokens():
    p = [0.1, 0.4, 0.05, 0.3, 0.15]
    assert kept(p) == [0, 1, 2, 3, 4]
    assert kept(p, top_k=1) == [1]
    assert kept(p, top_k=3) == [1, 3, 4]
    assert kept(p, top_k=99) == [0, 1, 2, 3, 4]
    assert kept(p, top_p=0.01) == [1]
    assert kept(p, top_p=0.39) == [1]
    assert kept(p, top_p=0.41) == [1, 3]
    assert kept(p, top_p=0.84) == [1, 3, 4]
    assert kept(p, top_p=0.86) == [0, 1, 3, 4]
    assert kept(p, top_k=2, top_p=0.5) == [1]  # 0.4 of 0.7 is more than half
    assert kept(p, top_k=2, top_p=0.6) == [1, 3]


def test_nothing_is_drawn_outside_of_top_k():
    logits_BV = torch.randn(1, 20, generator=torch.Generator().manual_seed(0)).expand(2000, 20)
    uniform_B = torch.rand(2000, generator=torch.Generator().manual_seed(0))
    token_B, _ = draw(logits_BV, SamplingParams(1, EOS, PAD, top_k=3), uniform_B)
    assert set(token_B.tolist()) == set(logits_BV[0].topk(3).indices.tolist())


def test_no_rounding_draws_a_token_without_a_chance():
    logits_BV = torch.tensor([[-torch.inf, 0.0, 0.0, 0.0, -torch.inf]]).expand(3, 5)
    edges = torch.tensor([0.0, 1 / 3, 1.0])  # a uniform number is below 1, but its product with a sum may not be
    token_B, _ = draw(logits_BV, SamplingParams(1, EOS, PAD), edges)
    assert token_B.tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", FAST)
def test_fused_weights_compute_what_the_model_does(kind, monkeypatch):
    """In full precision here; a CPU that is fast in bfloat16 uses them in that."""
    model = small_model(kind)

    def weights(model):
        copied.refresh()
        return copied

    copied = Weights(Decoder(model), torch.float32)
    monkeypatch.setattr("rl_swarm.learning.sampler.low_precision_weights", weights)
    for prompt, s in all_samples(model, SamplingParams(9, EOS, PAD, greedy=True)):
        is_greedy(model, prompt, s.tokens, 9, EOS)
    for _ in range(2):  # again with other weights, as after a step of training
        for prompt, s in all_samples(model):
            with torch.no_grad():
                expected = plain_logprobs(model, prompt, s.tokens)
            np.testing.assert_allclose(s.logprobs, expected, atol=1e-4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
