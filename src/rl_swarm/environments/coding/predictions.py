"""A frozen model's guess whether a program is right, and how good such guesses are.

The guess is not read from anything the model writes. The program stands in the prompt as a JSON string, in which no
control token survives, and the verdict is the probability of `yes` against `no` as the very next token. So a program can
lie to the model as any text can, but it cannot answer in its place.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_swarm.environments.coding import prompts

if TYPE_CHECKING:
    from rl_swarm.learning.policy import Policy

BATCH_TOKENS = 8192  # of a forward pass
LONGEST_PROMPT = 1024  # tokens; of what is longer nothing is said
BINS = 10


def probabilities(
    policy: "Policy", asked: Sequence[tuple[str, str]], seconds: float | None = None
) -> list[float]:
    """For every task and program, how likely the model holds the program to be right: 0.5 where they are too long.

    With `seconds`, of the first ones only, where all would take longer.
    """
    import torch

    until = math.inf if seconds is None else time.monotonic() + seconds
    rows = [policy.prompt_ids(prompts.evaluator_prompt(task, program)) for task, program in asked]
    short = [number for number, row in enumerate(rows) if len(row) <= LONGEST_PROMPT]
    yes, no = (_first_tokens(policy, word) for word in (prompts.YES, prompts.NO))
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
            odds_B = logprobs_BV[:, yes].logsumexp(1) - logprobs_BV[:, no].logsumexp(1)
        for number, odds in zip(batch, odds_B.sigmoid().tolist(), strict=True):
            found[number] = odds
    return found


def _batches(numbers: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """The numbers of rows in their order, as many at a time as fit into a forward pass."""
    batch, width = list[int](), 0
    for number in numbers:
        width = max(width, lengths[number])
        if batch and (len(batch) + 1) * width > BATCH_TOKENS:
            yield batch
            batch, width = [], lengths[number]
        batch.append(number)
    if batch:
        yield batch


def _first_tokens(policy: "Policy", word: str) -> list[int]:
    """With what a model may begin the word."""
    tokenizer: Any = policy.tokenizer
    spellings = [word, word.capitalize(), f" {word}", f" {word.capitalize()}"]
    ids = [tokenizer(spelling, add_special_tokens=False)["input_ids"] for spelling in spellings]
    first = {found[0] for found in ids if found and len(tokenizer.decode(found[:1]).strip()) > 1}
    return sorted(first or {found[0] for found in ids[:1]})


@dataclass(frozen=True)
class Quality:
    """How guesses compare with execution."""

    guesses: int
    right_share: float  # of the programs, by execution
    accuracy: float
    balanced: float  # mean of the accuracies on right and on wrong programs: 0.5 for the same answer always, or one kind
    disagreement: float
    calibration: float  # how far the stated probabilities are off, on average (ECE, ten bins)
    brier: float

    def figures(self) -> dict[str, float]:
        return {name: round(float(value), 4) for name, value in vars(self).items()}


def quality(guesses: Sequence[tuple[float, bool]]) -> Quality:
    """Of probabilities beside what execution said; of one at least."""
    hits = [(p > 0.5) == right for p, right in guesses]
    kinds = [
        [hit for hit, (_, right) in zip(hits, guesses, strict=True) if right == kind]
        for kind in (True, False)
    ]
    bins: dict[int, list[tuple[float, bool]]] = {}
    for p, right in guesses:
        bins.setdefault(min(int(p * BINS), BINS - 1), []).append((p, right))
    gaps = [abs(sum(p for p, _ in group) - sum(right for _, right in group)) for group in bins.values()]
    return Quality(
        guesses=len(guesses),
        right_share=_mean([right for _, right in guesses]),
        accuracy=_mean(hits),
        balanced=_mean([_mean(kind) for kind in kinds]) if all(kinds) else 0.5,
        disagreement=1 - _mean(hits),
        calibration=sum(gaps) / len(guesses),
        brier=_mean([(p - right) ** 2 for p, right in guesses]),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
