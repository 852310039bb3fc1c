"""A model is computed as transformers computes it, whatever its configuration says, or not at all."""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
import transformers
from recurrent_models import RECURRENT, recurrent_model
from small_models import FAST, KINDS, PAD, plain_logprobs, small_model, small_tokenizer

from rl_swarm.config.settings import Settings
from rl_swarm.learning import lora, support, verification
from rl_swarm.learning.batches import TrainingGroup
from rl_swarm.learning.decoder import Decoder
from rl_swarm.learning.policy import Policy
from rl_swarm.learning.sampler import SamplingParams, sample
from rl_swarm.learning.settings import LearningSettings
from rl_swarm.learning.trainer import Trainer
from rl_swarm.learning.weights import Weights
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.rollouts import Group

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12]]
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
UNKNOWN = [  # family, fields, and the one that is named
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
    ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=True"),
    ("llama", WINDOW, "layer_types="),
    ("llama", {"logit_scale": 0.5}, "logit_scale=0.5"),
    ("qwen2", {"attention_multiplier": 2.0}, "attention_multiplier=2.0"),
    ("gemma3", {"final_logit_softcapping": 5.0}, "final_logit_softcapping=5.0"),
    ("gemma3", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping=5.0"),
]


@pytest.fixture(autouse=True)
def nothing_is_known_yet(monkeypatch):
    monkeypatch.setattr(verification, "_found", {})


def policy_of(model, **settings):
    settings = {"max_new_tokens": 8, "learning_rate": 1e-3, **settings}
    return Policy(model, small_tokenizer(), "small", "", Settings.of(model="small", cpu_only=True, **settings))


def small(kind, **changes):
    tokenizer = small_tokenizer()
    return small_model(kind, 0, len(tokenizer), tokenizer.eos_token_id, **changes)


def check_computed(model):
    """Sampler and trainer agree with plain forward passes."""
    groups = []
    drawn = sample(model, PROMPTS, 3, SamplingParams(6, frozenset({1}), PAD), 0)
    for prompt, samples in zip(PROMPTS, drawn, strict=True):
        for s in samples:
            with torch.no_grad():
                expected = plain_logprobs(model, prompt, list(s.tokens))
            torch.testing.assert_close(torch.tensor(s.logprobs), expected, rtol=1e-4, atol=1e-4)
        completions = [list(s.tokens) for s in samples]
        groups.append(TrainingGroup(prompt, completions, [1.0, 0.5, -1.5], [list(s.logprobs) for s in samples]))
    before = copy.deepcopy(model)
    update = Trainer(model, PAD, LearningSettings(learning_rate=1e-2)).update(groups)
    assert update.logprob_mismatch < 1e-4
    loss = sum(
        (-a * plain_logprobs(before, g.prompt, ids)).sum()
        for g in groups
        for ids, a in zip(g.completions, g.advantages, strict=True)
    )
    (loss / update.tokens).backward()
    norm = torch.stack([p.grad.norm() for p in before.parameters() if p.grad is not None]).norm()
    assert update.grad_norm == pytest.approx(float(norm), rel=1e-3)


@pytest.mark.parametrize("kind, fields, named", UNKNOWN)
def test_a_field_that_the_fast_path_does_not_know_means_the_slow_path_and_is_named(kind, fields, named, caplog):
    model = small(kind, **fields)
    with caplog.at_level(logging.WARNING, "rl_swarm"):
        policy_of(model)
    assert f"there is no fast path for {named}" in caplog.text
    assert not Decoder.supports(model) and not Weights.supports(Decoder(model))
    check_computed(model)


@pytest.mark.parametrize("kind", FAST)
def test_every_field_of_a_known_class_is_read_or_irrelevant_or_must_stay_as_it_is(kind):
    config = small_model(kind).config
    assert support.obstacle(config) is None and support.obstacle(type(config)()) is None
    known = support.READ[config.model_type] | support.IRRELEVANT
    strict = [name for name in vars(config) if not name.startswith("_") and name not in known]
    assert strict
    for name in strict:
        changed = copy.deepcopy(config)
        value = getattr(config, name)
        vars(changed)[name] = not value if isinstance(value, bool) else (value or 0) + 1
        assert support.obstacle(changed).startswith(f"{name}=")
    # transformers 5.17 notes it while it loads a model
    vars(config)["base_model_tp_plan"] = {"embed_tokens": "rowwise"}
    assert support.obstacle(config) is None
    vars(config)["new_in_a_later_version"] = None  # not set
    assert support.obstacle(config) is None
    vars(config)["new_in_a_later_version"] = "wide"
    assert support.obstacle(config) == "new_in_a_later_version='wide'"


def test_a_rotation_of_a_part_of_a_head_is_no_known_rotation():
    config = transformers.LlamaConfig(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})
    assert "partial_rotary_factor=0.5" in support.obstacle(config)
    scaling = {"type": "dynamic", "factor": 2.0}
    before_version_5 = SimpleNamespace(model_type="llama", hidden_act="silu", rope_scaling=scaling)
    assert support.copy_obstacle(before_version_5) == "rope_type='dynamic'"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_that_agrees_with_transformers_keeps_its_path(kind, adapted):
    model = small(kind)
    if adapted:
        lora.adapt(model, 2, 0)
    policy_of(model)
    assert Decoder.supports(model) == (kind in FAST)
    assert support.shares_prompts(model)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_a_model_that_computes_something_else_is_taken_off_the_fast_path(kind, low, caplog, monkeypatch):
    """No field of the configuration shows it, with and without bfloat16."""
    for module in ("devices", "sampler", "verification"):
        monkeypatch.setattr(f"rl_swarm.learning.{module}.prefers_bfloat16", lambda model: low)
    right = small(kind)
    policy_of(right)
    assert Decoder.supports(right)
    wrong = small(kind, max_position_embeddings=128)
    for layer in wrong.model.layers:
        layer.self_attn.scaling *= 2
    with caplog.at_level(logging.WARNING, "rl_swarm"):
        policy_of(wrong)
    assert "there is no fast path for a model whose" in caplog.text
    assert "nats per token off transformers' forward pass" in caplog.text
    assert not Decoder.supports(wrong)
    assert not Decoder.supports(copy.deepcopy(wrong))  # what nodes that share a GPU train
    if not low:
        check_computed(wrong)


def test_models_alike_are_compared_once(monkeypatch):
    compared = []
    real = verification.difference
    monkeypatch.setattr(verification, "difference", lambda *args: compared.append(1) or real(*args))
    for _ in range(2):
        policy_of(small("llama"))
    assert compared == [1]


@pytest.mark.parametrize("kind", RECURRENT)
def test_models_with_a_recurrent_state_are_sampled_from_and_trained(kind, caplog):
    tokenizer = small_tokenizer()
    model = recurrent_model(kind, len(tokenizer), tokenizer.eos_token_id)
    with caplog.at_level(logging.WARNING, "rl_swarm"):
        policy = policy_of(model)
    assert "cannot share the cache of their prompt" in caplog.text
    check_computed(model)
    sampled = policy.sample(["What is 2 plus 2?", "Hi"], 2, seed=3)
    assert sampled == policy_of(model).sample(["What is 2 plus 2?", "Hi"], 2, seed=3)
    question = Question("chain_sum", 0, 1, "What is 2 plus 2?", "4")
    group = Group("me", question, tuple(sampled[0]), (1.0, 0.0), False)
    assert policy.learn([group]).tokens == sum(len(c.tokens) for c in sampled[0])


def test_sampling_with_transformers_own_loop_ends_where_the_model_ends_and_ignores_its_preferences():
    model = small_model("gpt_neox")
    params = SamplingParams(12, frozenset(range(1, 20)), PAD)
    support.run_whole(model)
    model.generation_config.repetition_penalty = 9.0
    groups = sample(model, PROMPTS, 8, params, 0)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for s in group:
            assert s.ended == (s.tokens[-1] in params.eos)
            assert len(s.tokens) == 12 or s.ended
            assert not params.eos.intersection(s.tokens[:-1])
            with torch.no_grad():
                expected = plain_logprobs(model, prompt, list(s.tokens))
            torch.testing.assert_close(torch.tensor(s.logprobs), expected, rtol=1e-4, atol=1e-4)
    assert model.generation_config.repetition_penalty == 9.0
    plain = sample(small_model("gpt_neox"), PROMPTS, 8, params, 0)
    assert [[s.tokens for s in g] for g in groups] == [[s.tokens for s in g] for g in plain]


def test_an_unsupported_model_is_refused_at_loading_with_the_reason():
    model = small("gpt_neox")
    model.gpt_neox.layers[0].register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(
        verification.UnsupportedModelError, match=r"MODEL_NAME=small: models of type 'gpt_neox'.*ZeroDiv"
    ):
        policy_of(model)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_rotations_that_depend_on_the_longest_sequence_are_warned_of_at_loading(rope, caplog):
    model = small("llama", rope_parameters={"rope_theta": 1e4, **rope})
    with caplog.at_level(logging.WARNING, "rl_swarm"):
        policy_of(model)
    length = rope.get("original_max_position_embeddings", 256)
    assert f"rope_type={rope['rope_type']}: past {length} tokens" in caplog.text
    caplog.clear()
    policy_of(small("llama"))
    assert "rope_type" not in caplog.text
