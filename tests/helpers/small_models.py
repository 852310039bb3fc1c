"""Makes small random models and a tokenizer, and computes plainly what the learner computes cleverly."""

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 48
PAD = 0
FAST = ("llama", "qwen2", "qwen3", "gpt2", "gemma3")  # the families that `decoder` knows
DISTINCT = ("qwen2", "qwen3", "gpt2", "gemma3")  # llama's layers are qwen2's without biases
KINDS = (*FAST, "gpt_neox")  # and one that goes through transformers
NO_MEMORY = (  # what torch says on a CPU
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 "
    "bytes.",
    "could not create a primitive",
)
SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def small_model(kind="llama", seed=0, vocabulary=VOCABULARY, eos=None, **changes):
    """Make a model whose weights are so large that every position, layer and head matters.

    `changes` are of its configuration.
    """
    torch.manual_seed(seed)
    shape = {
        "vocab_size": vocabulary,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": PAD,
    }
    shape |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
    shape |= changes
    inner = {"intermediate_size": 48}
    grouped = {**inner, "num_key_value_heads": 2}
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    config = {
        "llama": lambda: LlamaConfig(**shape, **grouped),
        "qwen2": lambda: Qwen2Config(**shape, **grouped),
        "qwen3": lambda: Qwen3Config(**shape, **grouped, head_dim=12),
        "gemma3": lambda: Gemma3TextConfig(
            **shape, **grouped, **windows, head_dim=12, query_pre_attn_scalar=9, tie_word_embeddings=True
        ),
        "gpt2": lambda: GPT2Config(**shape),
        "gpt_neox": lambda: GPTNeoXConfig(**shape, **inner),
    }[kind]()
    return AutoModelForCausalLM.from_config(config).eval()


def plain_logprobs(model, prompt, completion, temperature=1.0):
    """Compute log-probabilities one sequence at a time, without padding, cache or sharing."""
    ids = torch.tensor([[*prompt, *completion]])
    logits = model(input_ids=ids, use_cache=False).logits[0].float() / temperature
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(completion)[:, None])[:, 0]


def is_greedy(model, prompt, tokens, limit, eos, tie=1e-3):
    """Assert that transformers generates these tokens too, or differs only from a tie of the two best on."""
    generated = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=limit,
        eos_token_id=sorted(eos),
        pad_token_id=PAD,
    )[0, len(prompt) :].tolist()
    if list(tokens) == generated:
        return
    place = next(n for n, pair in enumerate(zip(tokens, generated, strict=False)) if pair[0] != pair[1])
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *tokens[:place]]])
        logits = model(input_ids=ids, use_cache=False).logits[0, -1]
    best = logits.max() - tie
    assert logits[tokens[place]] > best and logits[generated[place]] > best, (tokens, generated)


def small_tokenizer():
    """Make a byte-level tokenizer, which can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["What is 2 plus 2? <answer>4</answer>", "What is 3 plus 4? <answer>7</answer>"] * 3
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=TEMPLATE,
    )


def save_small(folder, seed=0):
    """Save a model directory that `MODEL_NAME` can name."""
    tokenizer = small_tokenizer()
    model = small_model("llama", seed, len(tokenizer), tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def gradients_at_step(trainer):
    """Return a list that gets a copy of all gradients at every optimiser step."""
    seen = []

    def look(optimizer, args, kwargs):
        parameters = optimizer.param_groups[0]["params"]
        seen.append([None if p.grad is None else p.grad.clone() for p in parameters])

    trainer.optimizer.register_step_pre_hook(look)
    return seen


def steady(trainer):
    """Make the trainer's steps follow small gradients.

    Otherwise rounding alone moves such weights.
    """
    trainer.optimizer.param_groups[0]["eps"] = 0.01
    return trainer


def count_tokens(model):
    """Return a list that gets the number of tokens of every forward pass, padding included."""
    tokens = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: tokens.append(args[0].numel()))
    return tokens


MIXTURES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3")


def mixture_model(kind, vocabulary=VOCABULARY, eos=None):
    """Make a small model with a mixture of experts."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": vocabulary, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 48, "max_position_embeddings": 256, "pad_token_id": PAD,
        "bos_token_id": None, "eos_token_id": eos, "initializer_range": 0.2, "num_experts_per_tok": 2,
    }  # fmt: skip
    latent = {
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    }  # fmt: skip
    config = {
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**shape, num_experts=4, moe_intermediate_size=16, head_dim=8),
        "mixtral": lambda: transformers.MixtralConfig(**shape, num_local_experts=4),
        "olmoe": lambda: transformers.OlmoeConfig(**shape, num_experts=4),
        "deepseek_v3": lambda: transformers.DeepseekV3Config(**shape, **latent, moe_intermediate_size=16),
    }[kind]()
    return AutoModelForCausalLM.from_config(config).eval()
