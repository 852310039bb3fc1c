"""Provides the common parts of the recipes: options, tokenizer, a small Llama, pretraining, saving."""

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS, USER, ASSISTANT = "<|pad|>", "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>"

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages if message.role != "system" %}
{%- if message.role == "assistant" %}{{ "<|assistant|>" + message.content | trim + eos_token }}
{%- else %}{{ "<|user|>" + message.content | trim }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|assistant|>" }}{% endif %}"""


class Example(NamedTuple):
    prompt: list[int]
    completion: list[int]


def options(description: str, steps: int, layers: int, examples: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("out", type=Path, help="directory to write the model and its tokenizer to")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--examples", type=int, default=examples, help="imitated answers to train on")
    return parser


def finished(tokenizer: Tokenizer, phrases: Sequence[str]) -> PreTrainedTokenizerFast:
    """Add phrases, control tokens and the chat template to a tokenizer."""
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    tokenizer.add_special_tokens([PAD, BOS, EOS, USER, ASSISTANT])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch(texts)]


def make_model(tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int) -> LlamaForCausalLM:
    """Make a wide and shallow model: at this size, overhead dominates the cost of a layer."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    # Sample from the whole distribution; the library's default keeps the 50 likeliest tokens.
    model.generation_config.update(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    return model


def batches(
    examples: list[Example], pad: int, steps: int, size: int, device: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield token ids and labels, right-padded; only the completion has labels."""
    prompts = torch.tensor([len(prompt) for prompt, _ in examples])
    lengths = prompts + torch.tensor([len(completion) for _, completion in examples])
    place_1T = torch.arange(int(lengths.max()))[None]
    used_NT = place_1T < lengths[:, None]
    ids_NT = torch.full(used_NT.shape, pad, dtype=torch.int16)
    ids_NT[used_NT] = torch.tensor([i for example in examples for ids in example for i in ids], dtype=torch.int16)
    labels_NT = ids_NT.masked_fill(~used_NT | (place_1T < prompts[:, None]), -100)
    ids_NT, labels_NT = ids_NT.to(device), labels_NT.to(device)
    for _ in range(steps):
        rows = torch.randint(len(examples), (size,))
        longest = int(lengths[rows].max())
        rows = rows.to(device)
        yield ids_NT[rows, :longest].long(), labels_NT[rows, :longest].long()


def pretrain(
    model: LlamaForCausalLM,
    examples: list[Example],
    pad: int,
    steps: int,
    batch_size: int,
    learning_rate: float,
    device: str,
) -> None:
    """Train on next tokens with AdamW, a short warm-up, and a cosine schedule down to 0."""
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    started = time.monotonic()
    for step, (ids, labels) in enumerate(batches(examples, pad, steps, batch_size, device)):
        warm_up = min(1.0, (step + 1) / (0.02 * steps + 1))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * warm_up * 0.5 * (1 + math.cos(math.pi * step / steps))
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(input_ids=ids).logits
        # Padding is on the right, so causal attention at a label never sees it.
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 500 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.4f}, {time.monotonic() - started:.0f} s", flush=True)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    model.to("cpu").save_pretrained(out)
    tokenizer.save_pretrained(out)
    # The class name in every version of transformers.
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")
