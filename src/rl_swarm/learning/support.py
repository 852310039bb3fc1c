"""Decides whether the fast path computes what a model computes, from every field of its configuration.

A family lists the fields that `decoder` and `weights` read. Some fields change nothing that is computed here. Any
other field must be as its class has it by default: a version of transformers or the author of a model may have added
one that changes the computation.
"""

from collections.abc import Iterator
from typing import Any

LLAMA_LIKE = frozenset({"llama", "qwen2", "qwen3"})
ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})  # those that depend on the position alone
LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})  # those that depend on the longest sequence of a call
ACTIVATIONS = {"silu": ("silu",), "gelu": ("gelu_new", "gelu_pytorch_tanh")}
REFUSED, WHOLE = "rl_swarm_refused", "rl_swarm_whole"  # attributes of a model: its copies get them too
LAYER_KINDS = {"full_attention", "sliding_attention"}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LLAMA = _names(
    """attention_bias head_dim hidden_act hidden_size intermediate_size max_position_embeddings num_attention_heads
    num_hidden_layers num_key_value_heads rms_norm_eps rope_parameters rope_scaling rope_theta tie_word_embeddings
    vocab_size"""
)
_WINDOWS = _names("layer_types sliding_window")
_QWEN = _LLAMA | _WINDOWS | _names("max_window_layers use_sliding_window")
_GEMMA = _names("hidden_activation query_pre_attn_scalar rope_local_base_freq sliding_window_pattern")
READ = {
    "llama": _LLAMA | {"mlp_bias"},
    "qwen2": _QWEN - {"attention_bias"},
    "qwen3": _QWEN,
    "gemma3_text": (_LLAMA | _WINDOWS | _GEMMA) - {"hidden_act"},
    "gpt2": _names(
        """activation_function layer_norm_epsilon n_ctx n_embd n_head n_inner n_layer n_positions tie_word_embeddings
        vocab_size"""
    ),
}
FAMILIES = frozenset(READ)
# Names, types and tokens; initialisation; dropout, which is off here; options of `generate`; plans for tensor
# parallelism, which some versions write while they load a model; notes of other tools.
IRRELEVANT = _names(
    """architectures auto_map dtype finetuning_task id2label label2id model_type name_or_path num_labels problem_type
    task_specific_params tokenizer_class torch_dtype transformers_version
    bos_token_id decoder_start_token_id eos_token_id pad_token_id prefix sep_token_id unk_token_id
    attention_dropout attn_pdrop embd_pdrop initializer_range resid_pdrop summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj
    bad_words_ids begin_suppress_tokens cache_implementation diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
    length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_past output_scores remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens
    temperature top_k top_p typical_p use_cache
    base_model_ep_plan base_model_fsdp_plan base_model_pp_plan base_model_tp_plan
    gradient_checkpointing ignore_keys_at_rope_validation is_llama_config pretraining_tp transformers.js_config
    unsloth_fixed unsloth_version"""
)
ROPE_READ = _names(
    """attention_factor beta_fast beta_slow factor high_freq_factor long_factor low_freq_factor mscale mscale_all_dim
    original_max_position_embeddings rope_theta rope_type short_factor truncate type"""
)
_defaults_of = dict[type, dict[str, Any]]()


def obstacle(config: Any) -> str | None:
    """Name what keeps a model of this configuration off the fast path, None where nothing does."""
    kind = config.model_type
    if kind not in FAMILIES:
        return f"models of type {kind!r}"
    read, defaults = READ[kind] | IRRELEVANT, _defaults(type(config))
    for name, value in vars(config).items():
        unset = value is None or value is False
        if name.startswith("_") or name in read or (unset if name not in defaults else value == defaults[name]):
            continue
        return f"{name}={value!r:.80}"
    for rope in rope_parameters(config):
        for name, value in rope.items():
            if name not in ROPE_READ and not (name == "partial_rotary_factor" and value in (None, 1.0)):
                return f"{name}={value!r:.80} of rope_parameters"
    kinds = set(layer_kinds(config))
    return None if kinds <= LAYER_KINDS else f"layer_types with {', '.join(sorted(kinds - LAYER_KINDS))}"


def refusal(model: Any) -> str | None:
    """Name what keeps this model off the fast path: its configuration, or a comparison that failed."""
    if model.config.model_type == "gemma3_text" and not hasattr(model.model.rotary_emb, "layer_types"):
        return "models of type 'gemma3_text' in transformers before version 5"
    found: str | None = getattr(model, REFUSED, None)
    return found or obstacle(model.config)


def refuse(model: Any, reason: str) -> None:
    """Keep this model, and copies made of it, off the fast path."""
    setattr(model, REFUSED, reason)


def shares_prompts(model: Any) -> bool:
    """Return whether completions can share the cache of their prompt."""
    return not getattr(model, WHOLE, False)


def run_whole(model: Any) -> None:
    """Mark this model, and copies made of it, as one that runs over whole sequences."""
    setattr(model, WHOLE, True)


def copy_obstacle(config: Any) -> str | None:
    """Name what the sampler's copy of the weights does not compute, although the decoder does."""
    activation = activation_of(config)
    if not plain_activation(config):
        return f"the activation {activation!r}"
    if types := rope_types(config) - ROTATIONS:
        return f"rope_type={min(types)!r}"
    return "mlp_bias=True" if getattr(config, "mlp_bias", False) else None


def _defaults(kind: type) -> dict[str, Any]:
    if kind not in _defaults_of:
        _defaults_of[kind] = dict(vars(kind()))
    return _defaults_of[kind]


def layer_kinds(config: Any) -> list[str]:
    """Return the kind of attention of every layer, where the family has several."""
    kinds = config.layer_types if "layer_types" in READ.get(config.model_type, ()) else None
    return list(kinds or ["full_attention"] * config.num_hidden_layers)


def activation_of(config: Any) -> str | None:
    for name in ("activation_function", "hidden_activation", "hidden_act"):
        if found := getattr(config, name, None):
            return str(found)
    return None


def plain_activation(config: Any) -> bool:
    """Return whether the activation is the one that the family's kernels compute."""
    return activation_of(config) in ACTIVATIONS["silu" if config.model_type in LLAMA_LIKE else "gelu"]


def rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters of the rotations, of every kind of layer that has its own."""
    for name in ("rope_parameters", "rope_scaling"):  # the second before version 5
        found = getattr(config, name, None) or {}
        own = [part for part in found.values() if isinstance(part, dict)]
        yield from own or [found]


def length_limit(config: Any) -> tuple[str, int] | None:
    """Return the rotation that depends on the longest sequence of a call, and the length up to which it does not."""
    for rope in rope_parameters(config):
        kind = str(rope.get("rope_type", rope.get("type")))
        if kind in LENGTH_DEPENDENT:
            own = rope.get("original_max_position_embeddings")
            return kind, int(
                own or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
            )
    return None


def positions(config: Any) -> int | None:
    """Return the size of a model's table of positions, None where it computes them or has none."""
    if any(hasattr(config, name) for name in ("rope_parameters", "rope_scaling", "rope_theta")):
        return None
    return getattr(config, "max_position_embeddings", None)


def rope_types(config: Any) -> set[str]:
    parts = rope_parameters(config)
    return {str(part.get("rope_type", part.get("type", "default"))) for part in parts}
