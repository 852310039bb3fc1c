"""With LoRA only adapters are trained, all computations use them, and a checkpoint is an ordinary model."""

import copy
import dataclasses
import logging
import sys

import peft
import pytest
import torch
import transformers
from recurrent_models import recurrent_model
from small_models import (
    FAST,
    KINDS,
    MIXTURES,
    PAD,
    gradients_at_step,
    mixture_model,
    plain_logprobs,
    save_small,
    small_model,
    small_tokenizer,
)
from test_checkpoints import newest, place, resumed, save, teach
from transformers import AutoModelForCausalLM

from rl_swarm.config.settings import Settings
from rl_swarm.errors import ConfigError
from rl_swarm.learning import lora
from rl_swarm.learning.batches import TrainingGroup
from rl_swarm.learning.checkpoints import CheckpointError
from rl_swarm.learning.policy import Policy
from rl_swarm.learning.sampler import SamplingParams, sample
from rl_swarm.learning.settings import LearningSettings
from rl_swarm.learning.trainer import Trainer
from rl_swarm.learning.verification import UnsupportedModelError

RANK = 3
PROMPTS = [[5, 6, 7, 8], [9, 10]]
GROUPS = [
    TrainingGroup(PROMPTS[0], [[11, 12, 13], [14, 15]], [1.0, -1.0], None),
    TrainingGroup(PROMPTS[1], [[16], [17, 18, 19, 20]], [-0.5, 0.5], None),
]


def adapted(kind, seed=0):
    """A small model whose adapters are as large as its weights, so that they matter."""
    model = mixture_model(kind) if kind in MIXTURES else small_model(kind, seed)
    lora.adapt(model, RANK, seed)
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def merged(kind, model):
    """The same function as an ordinary model."""
    plain = small_model(kind, seed=99)
    plain.load_state_dict(lora.merged_state(model))
    return plain


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_small(tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings(folder):
    return Settings.of(model=str(folder), max_new_tokens=16, learning_rate=1e-2, cpu_only=True, lora_rank=RANK)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_at_first_change_nothing_and_later_are_added_to_the_weights(kind):
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    first = small_model(kind)
    expected = first(input_ids=ids).logits.clone()
    lora.adapt(first, RANK, 0)
    torch.testing.assert_close(first(input_ids=ids).logits, expected)
    model = adapted(kind)
    logits = model(input_ids=ids).logits
    assert (logits - expected).abs().max() > 0.1
    torch.testing.assert_close(merged(kind, model)(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_merged_weight_is_that_of_the_linear_map(kind):
    plain, model = small_model(kind), adapted(kind)
    names = dict(plain.named_modules())
    changed = 0
    for name, module in model.named_modules():
        if name in names and (name.endswith(("proj", "c_attn", "c_fc", "head"))):
            weight, base = lora.merged_weight(module), names[name].weight
            assert weight.shape == base.shape
            x = torch.randn(2, base.shape[0] if type(names[name]).__name__ == "Conv1D" else base.shape[1])
            twin = copy.deepcopy(names[name])
            twin.weight.data = weight.detach()
            torch.testing.assert_close(module(x), twin(x), rtol=1e-4, atol=1e-4)
            changed += not torch.equal(weight, base)
    assert changed == {"llama": 14, "gpt2": 8}[kind]


@pytest.mark.parametrize("kind", FAST)
def test_the_sampler_and_the_trainer_compute_with_the_adapters(kind):
    model = adapted(kind)
    params = SamplingParams(max_new_tokens=6, eos=frozenset({1}), pad=PAD)
    for prompt, group in zip(PROMPTS, sample(model, PROMPTS, 3, params, 0), strict=True):
        for s in group:
            expected = plain_logprobs(merged(kind, model), prompt, list(s.tokens))
            torch.testing.assert_close(torch.tensor(s.logprobs), expected, rtol=1e-4, atol=1e-4)
    plain = merged(kind, model)
    with torch.no_grad():
        known = [
            dataclasses.replace(
                group, logprobs=[plain_logprobs(plain, group.prompt, ids).tolist() for ids in group.completions]
            )
            for group in GROUPS
        ]
    assert Trainer(model, PAD, LearningSettings()).update(known).logprob_mismatch < 1e-4


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox"])
def test_only_the_adapters_learn_by_the_gradient_of_the_plain_loss(kind):
    model = adapted(kind)
    before = copy.deepcopy(model)
    trainer = Trainer(model, PAD, LearningSettings(learning_rate=1e-2, max_grad_norm=1e9))
    seen = gradients_at_step(trainer)
    trainer.update(GROUPS)
    loss = sum(
        (-a * plain_logprobs(before, g.prompt, ids)).sum()
        for g in GROUPS
        for ids, a in zip(g.completions, g.advantages, strict=True)
    )
    (loss / sum(len(ids) for g in GROUPS for ids in g.completions)).backward()
    trained = [p for p in before.parameters() if p.requires_grad]
    for found, expected in zip(seen[0], (p.grad for p in trained), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    for (name, old), new in zip(before.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(old, new) == (".lora_" not in name), name


def test_the_optimiser_keeps_moments_of_the_adapters_only(settings):
    sizes = {}
    for rank in (0, RANK):
        policy = Policy.load(settings.changed(lora_rank=rank), "")
        teach(policy, "4", "7")
        state = policy.trainer.optimizer.state_dict()["state"].values()
        sizes[rank] = sum(v.numel() for values in state for v in values.values() if v.dim())
    total = sum(p.numel() for p in Policy.load(settings, "").model.parameters() if p.requires_grad)
    assert sizes[RANK] == 2 * total < sizes[0] / 5


def test_the_number_of_trained_parameters_is_logged(settings, caplog):
    with caplog.at_level(logging.INFO, "rl_swarm"):
        Policy.load(settings, "")
    assert "LoRA of rank 3: 2,784 of " in caplog.text


@pytest.mark.parametrize("kind", [*FAST, *MIXTURES])
def test_a_saved_model_is_an_ordinary_one_and_saving_disturbs_nothing(kind, tmp_path):
    model = adapted(kind)
    before = copy.deepcopy(model.state_dict())
    lora.save_adapters(model, tmp_path, kind)
    model.save_pretrained(tmp_path, state_dict=lora.merged_state(model))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(loaded) is type(model) and not lora.is_adapted(loaded)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [*FAST, *MIXTURES])
def test_peft_loads_the_adapters_of_a_checkpoint(kind, tmp_path):
    model = adapted(kind)
    lora.save_adapters(model, tmp_path, "some/base")
    plain = mixture_model(kind) if kind in MIXTURES else small_model(kind)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / lora.FOLDER).eval()
    assert loaded.peft_config["default"].base_model_name_or_path == "some/base"
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_model_that_would_be_saved_without_some_of_its_weights_is_not_saved():
    model = adapted("llama")
    del model.model.layers[1].mlp
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight and 2 other weights"):
        lora.merged_state(model)


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_of_experts_learns_and_goes_on_from_its_checkpoint(kind, settings, tmp_path):
    tokenizer = small_tokenizer()
    mixture_model(kind, len(tokenizer), tokenizer.eos_token_id).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    settings = settings.changed(model=str(tmp_path / "base"))
    policy = Policy.load(settings, "")
    teach(policy, "4", "7")
    save(policy, place(1), tmp_path / "run", "node", keep=2)
    there = newest(tmp_path / "run")[0]
    other = resumed(settings, there)
    for one in (policy, other):
        teach(one, "5", "six", "x")
    for a, b in zip(policy.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
    ordinary = Policy.load(Settings.of(model=str(there), cpu_only=True, max_new_tokens=16), "").model
    again = resumed(settings, there).model
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    torch.testing.assert_close(ordinary(input_ids=ids).logits, again(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kl_weight", [0.0, 0.5])
def test_going_on_from_a_checkpoint_with_adapters_is_going_on(settings, tmp_path, kl_weight):
    """To the last bit."""
    settings = settings.changed(kl_weight=kl_weight)
    policy = Policy.load(settings, "")
    teach(policy, "4", "7")
    teach(policy, "four", "nine")
    save(policy, place(1), tmp_path, "node", keep=2)
    other = resumed(settings, newest(tmp_path)[0])
    for one in (policy, other):
        teach(one, "5", "six", "x")
    for a, b in zip(policy.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
    ordinary = Policy.load(Settings.of(model=str(newest(tmp_path)[0]), cpu_only=True, max_new_tokens=16), "")
    assert not lora.is_adapted(ordinary.model)
    again = resumed(settings, newest(tmp_path)[0])
    ids = torch.tensor([ordinary.prompt_ids("Hi")])
    logits = [p.model(input_ids=ids).logits for p in (ordinary, again)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_of_another_kind_is_refused_with_the_reason(settings, tmp_path):
    save(Policy.load(settings, ""), place(1), tmp_path / "with", "node", keep=2)
    save(Policy.load(settings.changed(lora_rank=0), ""), place(1), tmp_path / "without", "node", keep=2)
    there = newest(tmp_path / "with")[0]
    with pytest.raises(ConfigError, match=r"lora_rank=0, but .* was made with LoRA"):
        resumed(settings.changed(lora_rank=0), there)
    with pytest.raises(ConfigError, match=r"lora_rank=5, but .* was made with lora_rank=3"):
        resumed(settings.changed(lora_rank=5), there)
    with pytest.raises(ConfigError, match="made without LoRA"):
        resumed(settings, newest(tmp_path / "without")[0])
    other = save_small(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match="belong to another model"):
        resumed(settings.changed(model=str(other)), there)
    (there / lora.FOLDER / lora.FILE).write_bytes(b"half")
    with pytest.raises(CheckpointError):
        resumed(settings, there)


def test_without_peft_the_error_says_what_to_install(settings, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"lora_rank=3 needs peft.*pip install peft"):
        Policy.load(settings, "")


def test_a_model_that_peft_cannot_adapt_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"lora_rank=3: peft has no adapters .* 'mamba': .*Set lora_rank=0"):
        lora.adapt(recurrent_model("mamba", 64, 1), RANK, 0)


def test_a_model_that_cannot_run_with_its_adapters_is_refused_with_the_reason(settings, tmp_path):
    """Its router is a linear map that returns several tensors, which an adapter around it does not expect."""
    tokenizer = small_tokenizer()
    config = transformers.PhimoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, num_local_experts=4, pad_token_id=PAD, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(
        UnsupportedModelError, match=r"'phimoe' cannot be trained here with LoRA: .* Set lora_rank=0, or"
    ):
        Policy.load(settings.changed(model=str(tmp_path)), "")
    Policy.load(settings.changed(model=str(tmp_path), lora_rank=0), "")


def test_adapters_learn_faster_by_default():
    assert Settings.of(lora_rank=8).step_size() == pytest.approx(10 * Settings().step_size())
    assert Settings.of(lora_rank=8, learning_rate=1e-3).step_size() == 1e-3
