"""Makes small random models with linear attention, convolutions or state-space layers."""

import torch
import transformers
from transformers import AutoModelForCausalLM

RECURRENT = ("lfm2", "qwen3_next", "jamba", "mamba", "mamba2", "falcon_h1", "granitemoehybrid")


def recurrent_model(kind, vocabulary, eos):
    torch.manual_seed(0)
    tokens = {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": eos}
    small = {**tokens, "hidden_size": 32, "num_hidden_layers": 2}
    shape = {**small, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    mamba = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    name, fields = {
        "lfm2": ("Lfm2", {**shape, "layer_types": ["conv", "full_attention"]}),
        "qwen3_next": (
            "Qwen3Next",
            {
                **shape, **linear, **experts, "head_dim": 8, "linear_value_head_dim": 8,
                "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"],
            },
        ),
        "jamba": (
            "Jamba",
            {
                **shape, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 2,
                "use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4,
            },
        ),
        "mamba": ("Mamba", {**small, "state_size": 4}),
        "mamba2": ("Mamba2", {**small, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}),
        "falcon_h1": ("FalconH1", {**shape, **mamba, "mamba_d_ssm": 64}),
        "granitemoehybrid": (
            "GraniteMoeHybrid",
            {
                **shape, **mamba, "layer_types": ["mamba", "attention"], "num_local_experts": 2,
                "num_experts_per_tok": 1, "shared_intermediate_size": 32,
            },
        ),
    }[kind]  # fmt: skip
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**fields)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model
