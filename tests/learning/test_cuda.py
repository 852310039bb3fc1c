"""The kernels of the CUDA path compute what transformers and the plain path compute.

They run here on the CPU, through Triton's interpreter, which `conftest` asks for. It is slow, so everything is small.
"""

# ruff: noqa: E402 (what needs Triton is imported where there is one)

import copy
import threading

import numpy as np
import pytest
import torch
from small_models import (
    DISTINCT,
    FAST,
    PAD,
    VOCABULARY,
    gradients_at_step,
    is_greedy,
    plain_logprobs,
    small_model,
    steady,
)

triton = pytest.importorskip(
    "triton", "3.7", "needs Triton 3.7 or newer, which is made for Linux on x86-64; pip install triton"
)
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: ./run_tests.sh -m gpu", allow_module_level=True)
assert isinstance(triton.language.sum, triton.runtime.interpreter.InterpretedFunction), (
    "triton was imported before tests/learning/conftest.py could ask for its interpreter"
)

from rl_swarm.config.settings import Settings
from rl_swarm.learning import decoder, lora, trainer
from rl_swarm.learning.batches import Batch, TrainingGroup
from rl_swarm.learning.cuda import attention, engine
from rl_swarm.learning.cuda import graphs as cuda_graphs
from rl_swarm.learning.cuda.attention import Segments
from rl_swarm.learning.cuda.decoding import transpose
from rl_swarm.learning.cuda.engine import CudaEngine, Request, batch_size_for
from rl_swarm.learning.cuda.graphs import GraphCache
from rl_swarm.learning.decoder import Decoder
from rl_swarm.learning.parallel import batcher
from rl_swarm.learning.sampler import Sample, SamplingParams, truncated
from rl_swarm.learning.settings import LearningSettings
from rl_swarm.learning.trainer import Trainer
from rl_swarm.learning.weights import Weights

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1], [11], list(range(20, 38))]
EOS = frozenset(range(3, VOCABULARY, 6))

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy, about numbers that are masked


@pytest.fixture(autouse=True)
def several_blocks_even_of_little(monkeypatch):
    """Blocks so small that a few tokens, and a small vocabulary, take more than one."""
    monkeypatch.setattr(engine, "VOCABULARY_BLOCK", 64)
    monkeypatch.setattr(engine, "MANY_PROGRAMS", 8)
    monkeypatch.setattr(attention, "BLOCK", 16)
    monkeypatch.setattr(cuda_graphs, "BLOCK", 16)


@torch.no_grad()
def drawn(model, prompts, count, params, seed=1, engine=None):
    engine = engine or CudaEngine(1, torch.float32)
    return engine.sample(model, prompts, count, params, seed)


@torch.no_grad()
def check_logprobs(model, prompts, groups, temperature=1.0):
    assert len(prompts) == len(groups)
    for prompt, group in zip(prompts, groups, strict=True):
        for s in group:
            expected = plain_logprobs(model, prompt, s.tokens, temperature)
            np.testing.assert_allclose(s.logprobs, expected, atol=1e-4)


def often(kinds, *chosen):
    """Families of models, of which only the chosen ones are tested every time: the interpreter is slow."""
    return [kind if kind in chosen else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


def train(model):
    """One step of the real trainer, large enough to see."""
    groups = [TrainingGroup([5, 6, 7], [[8, 9], [10]], [1.0, -1.0], None)]
    Trainer(model, PAD, LearningSettings(learning_rate=0.05)).update(groups)


@pytest.mark.parametrize("kind", often(FAST, "gemma3"))
def test_log_probabilities_are_those_of_a_plain_forward_pass(kind):
    model = small_model(kind)
    groups = drawn(model, PROMPTS, 2, SamplingParams(3, frozenset(), PAD))
    assert all(len(s.tokens) == 3 for group in groups for s in group)
    assert len({s.tokens for group in groups for s in group}) > 3
    check_logprobs(model, PROMPTS, groups)


def test_the_temperature_counts_and_words_that_are_looked_at_in_stretches(monkeypatch):
    monkeypatch.setattr(engine, "VOCABULARY_BLOCK", 16)
    model = small_model()
    groups = drawn(model, PROMPTS, 1, SamplingParams(3, EOS, PAD, temperature=0.6))
    check_logprobs(model, PROMPTS, groups, 0.6)


@pytest.mark.parametrize("kind", often(FAST, "gemma3"))
def test_greedy_equals_transformers_generate(kind, monkeypatch):
    monkeypatch.setattr(engine, "VOCABULARY_BLOCK", 16)
    model = small_model(kind, seed=3)
    groups = drawn(model, PROMPTS[1:], 1, SamplingParams(4, EOS, PAD, greedy=True))
    for prompt, (found,) in zip(PROMPTS[1:], groups, strict=True):
        is_greedy(model, prompt, found.tokens, 4, EOS)


@pytest.mark.parametrize("kind", often(["qwen3", "gpt2", "gemma3"], "gemma3"))
def test_an_engine_goes_on_with_other_prompts_and_with_weights_that_have_learned(kind):
    model = small_model(kind)
    one = CudaEngine(1, torch.float32)
    drawn(model, PROMPTS[:2], 1, SamplingParams(2, frozenset(), PAD), engine=one)
    longer = [[*PROMPTS[3], *PROMPTS[1]], PROMPTS[0]]
    check_logprobs(model, longer, drawn(model, longer, 1, SamplingParams(3, frozenset(), PAD), engine=one))
    before = copy.deepcopy(model)
    train(model)
    groups = drawn(model, PROMPTS[:1], 1, SamplingParams(3, frozenset(), PAD), engine=one)  # less than before
    check_logprobs(model, PROMPTS[:1], groups)
    with pytest.raises(AssertionError):
        check_logprobs(before, PROMPTS[:1], groups)


def test_weights_are_copied_only_when_they_have_changed(monkeypatch):
    model = small_model()
    weights = Weights(Decoder(model), torch.float32)
    written = []
    monkeypatch.setattr(weights, "_rewrite", lambda: written.append(1))
    weights.refresh()
    weights.refresh()
    assert len(written) == 1
    train(model)
    weights.refresh()
    assert len(written) == 2
    with torch.no_grad():
        model.get_output_embeddings().weight.add_(1)
    weights.refresh()
    assert len(written) == 3


@pytest.mark.slow
def test_sequences_that_have_ended_leave_the_batch_and_change_no_other(monkeypatch):
    model, one = small_model(), CudaEngine(1, torch.float32)
    ends = frozenset(range(2, VOCABULARY, 3))
    params = SamplingParams(4, ends, PAD)
    expected = drawn(model, PROMPTS, 2, params, engine=one)  # too short for a look at who has ended
    sizes, step = [], one._step
    monkeypatch.setattr(engine, "CHECK_EVERY", 1)
    monkeypatch.setattr(one, "_step", lambda rows, how: (sizes.append(rows), step(rows, how)))
    groups = drawn(model, PROMPTS, 2, params, engine=one)
    found = [s for group in groups for s in group]
    assert [s.tokens for s in found] == [s.tokens for group in expected for s in group]
    check_logprobs(model, PROMPTS, groups)
    assert {s.ended for s in found} == {True, False}
    for s in found:
        assert s.ended == (s.tokens[-1] in ends)
        assert s.ended or len(s.tokens) == 4
        assert not ends & set(s.tokens[:-1])
    going = [sum(len(s.tokens) > done for s in found) for done in range(1, 4)]
    assert sizes == [batch_size_for(count) for count in going if count]
    assert sizes[-1] < batch_size_for(len(found))


def test_when_all_have_ended_nothing_more_is_computed(monkeypatch):
    one = CudaEngine(1, torch.float32)
    monkeypatch.setattr(engine, "CHECK_EVERY", 1)
    monkeypatch.setattr(one, "_step", None)
    groups = drawn(small_model(), PROMPTS, 1, SamplingParams(5, frozenset(range(VOCABULARY)), PAD), engine=one)
    assert all(s.ended and len(s.tokens) == 1 for (s,) in groups)


@pytest.mark.slow
def test_draws_depend_on_the_seed_and_not_on_the_rest_of_the_batch():
    model = small_model()
    params = SamplingParams(3, frozenset(), PAD)
    one = CudaEngine(1, torch.float32)
    everyone = drawn(model, PROMPTS, 2, params, 5, one)
    fewer = drawn(model, PROMPTS[:2], 2, params, 5, one)
    fresh = drawn(model, PROMPTS[:1], 2, params, seed=5)
    others = drawn(model, PROMPTS[:2], 2, params, 6, one)
    tokens = [[[s.tokens for s in group] for group in groups] for groups in (everyone, fewer, fresh, others)]
    assert tokens[1] == tokens[0][:2]
    assert tokens[2] == tokens[0][:1]
    assert all(a != b for a, b in zip(tokens[3], tokens[1], strict=True))


def test_draws_do_not_depend_on_earlier_draws():
    model = small_model()
    params = SamplingParams(2, frozenset(), PAD)
    fresh, used = CudaEngine(1, torch.float32), CudaEngine(1, torch.float32)
    drawn(model, PROMPTS[:1], 1, SamplingParams(3, frozenset(), PAD), engine=used)
    first, second = (drawn(model, PROMPTS[:1], 4, params, 5, one)[0] for one in (fresh, used))
    assert [s.tokens for s in first] == [s.tokens for s in second]


def test_tokens_are_drawn_as_often_as_their_probability_says():
    model, count = small_model(vocabulary=8), 160
    with torch.no_grad():
        expected = count * model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(0)
    (group,) = drawn(model, PROMPTS[:1], count, SamplingParams(1, frozenset(), PAD))
    found = torch.bincount(torch.tensor([s.tokens[0] for s in group]), minlength=8)
    assert ((found - expected) ** 2 / expected).sum() < 24.3  # chi-square of 7 degrees: once in a thousand


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.4}, {"top_k": 4, "top_p": 0.7}])
def test_top_k_and_top_p_keep_the_same_tokens_as_the_plain_sampler(cut):
    model = small_model(vocabulary=20)
    params = SamplingParams(1, frozenset(), PAD, temperature=2.5, **cut)
    with torch.no_grad():
        logits_BV = model(torch.tensor([PROMPTS[0]])).logits[:, -1] / 2.5
    kept_V = truncated(logits_BV.log_softmax(-1), params.top_k, params.top_p)[0] > -torch.inf
    (group,) = drawn(model, PROMPTS[:1], 48, params)
    assert 1 < kept_V.sum() < 6
    assert {s.tokens[0] for s in group} == set(kept_V.nonzero()[:, 0].tolist())
    check_logprobs(model, PROMPTS[:1], [group], 2.5)  # as they are before anything is cut


def training_groups():
    def tokens(length):
        return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()

    generator = torch.Generator().manual_seed(0)
    return [
        TrainingGroup(tokens(17), [tokens(18), tokens(1), tokens(3)], [1.0, -0.5, 0.3], None),
        TrainingGroup(tokens(3), [tokens(2), tokens(4)], [-1.0, 0.7], None),
    ]


def passes(model, how, batch, attend, positions_N):
    """Log-probabilities, entropies, and all gradients of a forward and backward pass."""
    model.zero_grad()
    chunks = []

    def loss_of(here, logprobs_M, entropy_M):
        chunks.append((logprobs_M.detach(), entropy_M))
        return (logprobs_M * batch.advantages_M[here] * batch.weights_M[here]).sum()

    trainer.add_gradients(how, batch, attend, positions_N, 1.3, loss_of)
    logprobs_M, entropy_M = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return logprobs_M, entropy_M, [p.grad.clone() for p in model.parameters()]


def same_pass(found, expected):
    count = len(expected[0])
    np.testing.assert_allclose(found[0][:count], expected[0], atol=1e-4)
    np.testing.assert_allclose(found[1][:count], expected[1], atol=1e-4)
    largest = max(float(gradient.abs().max()) for gradient in expected[2])
    assert largest > 1e-2
    for a, b in zip(found[2], expected[2], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, largest))


@pytest.mark.parametrize("kind", often(DISTINCT, "gemma3"))  # of which gemma3 has a sliding window
def test_training_passes_and_their_gradients_are_those_without_kernels(kind, monkeypatch):
    model = small_model(kind)
    monkeypatch.setattr(trainer, "LOGITS", 16 * VOCABULARY)  # the tokens in several chunks
    batch, shape = Batch.of(training_groups(), 28)
    plain, fused = Decoder(model, fused=False), Decoder(model, fused=True)
    expected = passes(model, plain, batch, *trainer.attention_of(plain, shape))
    how = trainer.attention_of(fused, shape)
    found = passes(model, fused, batch, *how)
    same_pass(found, expected)
    for a, b in zip(trainer.packed_logprobs(fused, batch, *how, 1.3), found, strict=False):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", often(["gpt2", "gemma3"], "gpt2"))  # whose layers have all that the others' have
@pytest.mark.slow
def test_rows_that_are_filled_up_and_layers_that_are_computed_twice_change_nothing(kind):
    """A batch with padding for a CUDA graph: extra tokens, segments and blocks."""
    model = small_model(kind)
    batch, shape = Batch.of(training_groups(), 28)
    plain, checkpointed = Decoder(model, fused=False), Decoder(model, fused=True, checkpointed=True)
    expected = passes(model, plain, batch, *trainer.attention_of(plain, shape))
    tokens = 4 * attention.BLOCK
    assert tokens > max(len(batch.ids_N), len(batch.targets_M))

    def filled(values):
        return torch.cat([values, values.new_zeros(tokens - len(values))])

    filled_batch = Batch(*(filled(values) for values in vars(batch).values()))
    segments = Segments.of(shape, tokens, 16)
    assert len(segments.table) == 16 and len(segments.positions_N) == tokens
    same_pass(
        passes(model, checkpointed, filled_batch, segments.attention(checkpointed), segments.positions_N), expected
    )


def test_a_recording_is_used_again_where_it_is_little_too_large():
    """A new graph fits exactly."""
    graphs = GraphCache(lambda *_: None, torch.device("cpu"))

    def used(tokens, targets, segments=100, owner=()):
        key = graphs._key_for(tokens, targets, segments, owner)
        new = key not in graphs.captured
        graphs.captured[key] = None
        return key[:3], new

    assert used(4352, 4096) == ((4352, 4096, 128), True)
    assert used(4096, 3840) == ((4352, 4096, 128), False)
    assert used(4480, 4096) == ((4480, 4096, 128), True)  # larger
    assert used(4352, 4096) == ((4352, 4096, 128), False)  # the smallest that will do
    assert used(3200, 3072) == ((3200, 3072, 128), True)  # more than an eighth smaller
    assert used(4096, 1024) == ((4096, 1024, 128), True)  # with much fewer tokens to learn from
    assert used(4352, 4096, 200) == ((4352, 4096, 256), True)
    assert used(4352, 4096, 100, ("another",)) == ((4352, 4096, 128), True)
    assert used(512, 0) == ((512, 0, 128), True)


@pytest.mark.slow
def test_a_prompt_longer_than_the_window_of_its_completions_is_seen_in_part():
    """Windows that end in the prompt, in the completion, and in another block than their token."""
    torch.manual_seed(0)
    _, shape = Batch.of(training_groups(), 1)
    segments = Segments.of(shape)
    owners = [*range(len(shape.prompts)), *shape.rows]
    numbers_N = torch.arange(len(owners)).repeat_interleave(torch.tensor([*shape.prompts, *shape.completions]))
    parents = torch.tensor([-1] * len(shape.prompts) + list(shape.rows))
    places_N = segments.positions_N
    distance = places_N[:, None] - places_N
    own = (numbers_N[:, None] == numbers_N) & (distance >= 0)
    seen = own | (parents[numbers_N][:, None] == numbers_N)
    q, k, v = (torch.randn(len(places_N), heads, 12, requires_grad=True) for heads in (4, 2, 2))
    for window in (1, 6, 18):
        near = seen & (distance < window)
        scores = torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(2, 1)) * 0.3
        weights = scores.masked_fill(~near, -torch.inf).softmax(-1)
        expected = torch.einsum("hnm,mhd->nhd", weights, v.repeat_interleave(2, 1)).flatten(1)
        found = attention.attention(q, k, v, segments, 0.3, window)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        given = torch.randn_like(found)
        for a, b in zip(*(torch.autograd.grad(x, (q, k, v), given) for x in (found, expected)), strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=0)


def test_updates_of_a_trainer_with_kernels_are_those_of_one_without(monkeypatch):
    settings = Settings.of(learning_rate=1e-2, kl_weight=0.2, batch_tokens=9)  # two micro-batches
    groups = [
        TrainingGroup([5, 6, 7], [[8, 9], [10]], [1.0, -1.0], None),
        TrainingGroup([9, 8], [[7, 6], [5, 4, 3]], [0.5, -0.7], None),
    ]
    calm, model = small_model(), small_model()
    plain = steady(Trainer(calm, PAD, settings.learning))
    expected = gradients_at_step(plain)
    reports = [plain.update(groups) for _ in range(2)]
    monkeypatch.setattr(decoder, "has_kernels", lambda model: True)
    trainer = steady(Trainer(model, PAD, settings.learning))
    assert plain.graphs is None and trainer.graphs is not None
    seen = gradients_at_step(trainer)
    for report in reports:
        found = trainer.update(groups)
        assert found.loss == pytest.approx(report.loss, abs=1e-5)
        assert found.grad_norm == pytest.approx(report.grad_norm, rel=1e-3)
        assert found.entropy == pytest.approx(report.entropy, abs=1e-4)
        assert found.kl == pytest.approx(report.kl, abs=1e-4)
    for step in range(2):
        for a, b in zip(seen[step], expected[step], strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", often(["llama", "gpt2"], "llama"))
def test_sampling_uses_adapters_also_after_training(kind):
    model = small_model(kind)
    lora.adapt(model, rank=2, seed=0)
    one = CudaEngine(1, torch.float32)
    params = SamplingParams(2, frozenset(), PAD)
    before = drawn(model, PROMPTS[:2], 1, params, engine=one)
    check_logprobs(small_model(kind), PROMPTS[:2], before)  # a new adapter changes nothing
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    after = drawn(model, PROMPTS[:2], 1, params, engine=one)
    check_logprobs(model, PROMPTS[:2], after)
    assert [g[0].logprobs for g in after] != [g[0].logprobs for g in before]
    train(model)
    check_logprobs(model, PROMPTS[:2], drawn(model, PROMPTS[:2], 1, params, engine=one))


def test_unsupported_models_are_left_to_the_plain_sampler():
    assert all(CudaEngine.supports(small_model(kind)) for kind in FAST)
    for kind, unknown in (
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"activation_function": "relu"}),
        ("llama", {"hidden_act": "relu"}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    ):
        model = small_model(kind)
        for name, value in unknown.items():
            setattr(model.config, name, value)
        assert not CudaEngine.supports(model), unknown


def together(engine, params, requests):
    """Serve requests in one batch, whatever threads do."""
    with torch.no_grad():
        return list(engine._serve(params, requests))


def different_models(count, kind="llama"):
    """In norms and biases too, which are the same in all new models."""
    models = [small_model(kind, seed=seed) for seed in range(count)]
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
    return models


def requests_of(models):
    """Of different sizes and seeds."""
    return [
        Request(model, PROMPTS[number : number + 1 + number % 2], 1 + number // 2, seed=number + 1)
        for number, model in enumerate(models)
    ]


@pytest.mark.parametrize("kind", often(["qwen3", "gpt2", "gemma3"], "gpt2"))
def test_models_sampled_together_give_the_same_as_alone(kind, monkeypatch):
    monkeypatch.setattr(engine, "CHECK_EVERY", 1)
    requests = requests_of(different_models(3, kind))
    endless = [drawn(r.model, r.prompts, r.each, SamplingParams(3, frozenset(), PAD), r.seed) for r in requests]
    ends = frozenset(endless[0][0][0].tokens[:1])  # the first node is done after a token

    def ended(sample):
        length = next((n for n, token in enumerate(sample.tokens, 1) if token in ends), 3)
        logprobs = sample.logprobs[:length]
        return Sample(sample.tokens[:length], logprobs, sample.tokens[length - 1] in ends)

    expected = [[[ended(sample) for sample in group] for group in groups] for groups in endless]
    found = together(CudaEngine(3, torch.float32), SamplingParams(3, ends, PAD), requests)
    assert found == expected, "tokens and log-probabilities, to the last bit"
    lengths = [[len(s.tokens) for group in groups for s in group] for groups in found]
    assert lengths[0] == [1] and 3 in lengths[1] + lengths[2]


@pytest.mark.slow
def test_members_do_not_change_results_and_places_are_reused(monkeypatch):
    params = SamplingParams(2, frozenset(), PAD, top_k=5)
    models = different_models(4)
    requests = requests_of(models)
    expected = [drawn(r.model, r.prompts, r.each, params, r.seed) for r in requests]
    one = CudaEngine(3, torch.float32)
    assert together(one, params, [requests[1]]) == [expected[1]]
    assert together(one, params, [requests[0], requests[2]]) == [expected[0], expected[2]]
    with pytest.raises(ValueError, match="serves 3 models"):
        together(one, params, [requests[3]])
    one.remove(models[1])
    assert together(one, params, requests[2:]) == expected[2:]
    train(models[2])
    (changed, same) = together(one, params, requests[2:])
    assert changed != expected[2] and same == expected[3]
    check_logprobs(models[2], requests[2].prompts, changed)
    with pytest.raises(ValueError, match="of one shape"):
        one.remove(models[0])
        together(one, params, [Request(small_model(vocabulary=20), PROMPTS[:1], 1, 0)])
    for model in models:
        one.remove(model)
    assert not one.stack.tensors and not hasattr(one.scratch, "keys")
    assert together(one, params, [requests[1]]) == [expected[1]]


def test_threads_that_sample_at_the_same_time_share_a_pass_and_its_failure(monkeypatch):
    monkeypatch.setattr(batcher, "MIN_PAUSE", 3600)
    monkeypatch.setattr(batcher, "MAX_PAUSE", 3600)
    params = SamplingParams(2, frozenset(), PAD)
    requests = requests_of(different_models(3))
    expected = [drawn(r.model, r.prompts, r.each, params, r.seed) for r in requests]
    one = CudaEngine(3, torch.float32, sequences=8)
    one.batcher.members.update(r.model for r in requests)
    real, passes, found = one._draw, [], {}

    def draw(rows, how):
        passes.append(rows)
        if len(passes) == 1:
            raise torch.OutOfMemoryError("full")
        real(rows, how)

    def sample(number):
        r = requests[number]
        try:
            found[number] = drawn(r.model, r.prompts, r.each, params, r.seed, one)
        except torch.OutOfMemoryError as error:
            found[number] = str(error)

    monkeypatch.setattr(one, "_draw", draw)
    for result, room in ((["full"] * 3, 0), (expected, 2)):
        threads = [threading.Thread(target=sample, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [found[number] for number in range(3)] == result
        assert one.scratch.capacity.sequences == room, "after a failure no more is reserved than is asked for"
    assert passes == [2, 2, 2], "one that failed, and two tokens"


def test_a_matrix_is_copied_the_other_way_round():
    given = torch.randn(70, 33).bfloat16().float()  # which needs no rounding
    found = torch.zeros(33, 70, dtype=torch.bfloat16)
    transpose[(3, 2)](given, found, 70, 33, B=32)
    assert found.equal(given.t().bfloat16())
