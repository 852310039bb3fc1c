"""Computes the probability of one next word against another under a model."""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

BATCH_TOKENS = 8192  # of a forward pass
MAX_PROMPT = 1024  # tokens; longer prompts get 0.5


class Model(Protocol):
    """Names the part of a policy that this module uses."""

    model: Any
    tokenizer: Any

    @property
    def device(self) -> torch.device: ...

    @property
    def pad(self) -> int: ...

    def prompt_ids(self, prompt: str) -> list[int]: ...


def word_probability(
    policy: Model, prompts: Sequence[str], word: str, other: str, seconds: float | None = None
) -> list[float]:
    """Return how probable `word` is as the next word of each prompt, against `other`: 0.5 where a prompt is too long.

    With `seconds`, return only the first prompts when all would take longer.
    """
    until = math.inf if seconds is None else time.monotonic() + seconds
    rows = [policy.prompt_ids(prompt) for prompt in prompts]
    short = [number for number, row in enumerate(rows) if len(row) <= MAX_PROMPT]
    words, others = (_first_tokens(policy.tokenizer, text) for text in (word, other))
    found = [0.5] * len(rows)
    for batch in _batches(short, [len(row) for row in rows]):
        if time.monotonic() > until:
            return found[: batch[0]]
        width = max(len(rows[n]) for n in batch)
        ids_BT = torch.tensor([[policy.pad] * (width - len(rows[n])) + rows[n] for n in batch])
        mask_BT = torch.tensor([[0] * (width - len(rows[n])) + [1] * len(rows[n]) for n in batch])
        places_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits_BV = policy.model(
                input_ids=ids_BT.to(policy.device),
                attention_mask=mask_BT.to(policy.device),
                position_ids=places_BT.to(policy.device),
                logits_to_keep=1,
            ).logits[:, -1]
            logprobs_BV = logits_BV.float().log_softmax(-1)
            odds_B = logprobs_BV[:, words].logsumexp(1) - logprobs_BV[:, others].logsumexp(1)
        for number, odds in zip(batch, odds_B.sigmoid().tolist(), strict=True):
            found[number] = odds
    return found


def _batches(numbers: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the numbers of rows in order, as many at a time as fit into a forward pass."""
    batch, width = list[int](), 0
    for number in numbers:
        width = max(width, lengths[number])
        if batch and (len(batch) + 1) * width > BATCH_TOKENS:
            yield batch
            batch, width = [], lengths[number]
        batch.append(number)
    if batch:
        yield batch


def _first_tokens(tokenizer: Any, word: str) -> list[int]:
    """Return the tokens that may begin the word."""
    spellings = [word, word.capitalize(), f" {word}", f" {word.capitalize()}"]
    ids = [tokenizer(spelling, add_special_tokens=False)["input_ids"] for spelling in spellings]
    first = {found[0] for found in ids if found and len(tokenizer.decode(found[:1]).strip()) > 1}
    return sorted(first or {found[0] for found in ids[:1]})
