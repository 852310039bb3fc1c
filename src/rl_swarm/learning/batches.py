"""Packs groups into flat tensors: micro-batches cut by tokens, each one row without padding.

The row holds all prompts of a micro-batch, then all completions. A token is predicted by the state before it, so
the last token of a completion is never an input. Shapes: N input tokens, M target tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class TrainingGroup:
    """Holds the tokens of a group with their advantages."""

    prompt: Sequence[int]
    completions: Sequence[Sequence[int]]
    advantages: Sequence[float]
    logprobs: Sequence[Sequence[float]] | None  # under the behaviour policy, if known
    claimed: bool = False  # log-probabilities come from a peer: their influence is capped
    trained: Sequence[bool] = field(default=())  # False leaves a completion out; empty means all

    @property
    def used(self) -> Sequence[bool]:
        return self.trained or [True] * len(self.completions)

    @property
    def size(self) -> int:
        return len(self.prompt) + sum(map(len, self.completions))

    def scale_negatives(self, factor: float) -> "TrainingGroup":
        """Multiply negative advantages by the factor; at 0 their completions are left out."""
        if factor:
            return replace(self, advantages=[a if a > 0 else a * factor for a in self.advantages])
        kept = [number for number, advantage in enumerate(self.advantages) if advantage > 0]
        return replace(
            self,
            completions=[self.completions[number] for number in kept],
            advantages=[self.advantages[number] for number in kept],
            logprobs=self.logprobs and [self.logprobs[number] for number in kept],
            trained=self.trained and [self.trained[number] for number in kept],
        )


def count_tokens(groups: Sequence[TrainingGroup]) -> int:
    """Count the tokens that are trained on."""
    return sum(len(ids) for group in groups for ids, use in zip(group.completions, group.used, strict=True) if use)


@dataclass(frozen=True)
class BatchShape:
    """Holds the lengths of the sequences in a row; completion i continues prompt `rows[i]`."""

    prompts: tuple[int, ...]
    completions: tuple[int, ...]  # as inputs
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """Holds one micro-batch. Fields that end in `_M` have a number per target token."""

    ids_N: Tensor
    before_M: Tensor  # the position in the row whose hidden state predicts the target
    targets_M: Tensor
    advantages_M: Tensor
    weights_M: Tensor  # a token's share in the loss; 0 leaves it out
    sampled_M: Tensor  # log-probabilities under the behaviour policy, where known
    own_M: Tensor  # whether this node's sampler computed them
    claimed_M: Tensor  # whether a peer claims them

    @classmethod
    def of(cls, groups: Sequence[TrainingGroup], tokens: int) -> tuple["Batch", BatchShape]:
        """Pack groups into a batch on the CPU. The loss is a mean over `tokens`, all target tokens of the update."""
        rows = [number for number, group in enumerate(groups) for _ in group.completions]
        completions = [ids for group in groups for ids in group.completions]
        fed = [*(group.prompt for group in groups), *(ids[:-1] for ids in completions)]
        shape = BatchShape(
            tuple(len(g.prompt) for g in groups), tuple(len(ids) - 1 for ids in completions), tuple(rows)
        )
        ends = list(accumulate(map(len, fed)))
        before, here = list[int](), sum(shape.prompts)
        for row, ids in zip(rows, completions, strict=True):
            before.append(ends[row] - 1)
            before += range(here, here + len(ids) - 1)
            here += len(ids) - 1

        lengths = list(map(len, completions))

        def per_token(values: Sequence[float], dtype: type) -> Tensor:  # numpy does not wait for other threads
            return torch.from_numpy(np.repeat(np.array(values, dtype), lengths))

        known = [group.logprobs or [[0.0] * len(ids) for ids in group.completions] for group in groups]
        batch = cls(
            ids_N=flat(fed, np.int64),
            before_M=flat([before], np.int64),
            targets_M=flat(completions, np.int64),
            advantages_M=per_token([a for g in groups for a in g.advantages], np.float32),
            weights_M=per_token([use / max(tokens, 1) for g in groups for use in g.used], np.float32),
            sampled_M=flat([row for rows in known for row in rows], np.float32),
            own_M=per_token(
                [g.logprobs is not None and not g.claimed for g in groups for _ in g.completions], np.bool_
            ),
            claimed_M=per_token([g.claimed for g in groups for _ in g.completions], np.bool_),
        )
        return batch, shape

    @classmethod
    def prefill(cls, ids_N: Tensor) -> "Batch":
        """Make a batch of prompts without targets."""
        nothing, no = torch.empty(0), torch.empty(0, dtype=torch.int64)
        return cls(ids_N, no, no, nothing, nothing, nothing, no.bool(), no.bool())

    def part(self, here: slice) -> "Batch":
        """Return the same row with only these target tokens."""
        names = [name for name in vars(self) if name.endswith("_M")]
        return replace(self, **{name: getattr(self, name)[here] for name in names})

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(value.to(device, non_blocking=True) for value in vars(self).values()))


def stack_rows(batches: Sequence[Batch], tokens: int, targets: int) -> Batch:
    """Join rows into one, each padded with zeros to `tokens` inputs and `targets` targets."""
    fields = {}
    for name in vars(batches[0]):
        each = [getattr(batch, name) for batch in batches]
        size = tokens if name.endswith("_N") else targets
        values = torch.zeros(len(batches), size, dtype=each[0].dtype)
        for number, row in enumerate(each):
            values[number, : len(row)] = row + number * tokens if name == "before_M" else row
        fields[name] = values.flatten()
    return Batch(**fields)


def flat(rows: Sequence[Sequence[float]], dtype: type) -> Tensor:
    """Return all numbers of all rows end to end, through numpy, which is faster than `torch.tensor`."""
    with np.errstate(over="ignore"):  # a claimed value may exceed float32
        return torch.from_numpy(np.fromiter(chain.from_iterable(rows), dtype, sum(map(len, rows))))


def micro_batches(groups: Sequence[TrainingGroup], budget: int) -> Iterator[list[TrainingGroup]]:
    """Batch groups of similar length, in as few batches of about equal size as the budget allows.

    A single sequence may exceed the budget, and a peer decides how large its group is.
    """
    total = sum(group.size for group in groups)
    # A group that is cut repeats its prompt, and the rest of a batch may be too short for a completion.
    spare = max((len(g.prompt) + max(map(len, g.completions)) for g in groups), default=0)
    enough = min(budget, -(-total // max(1, -(-total // budget))) + spare)
    yield from in_order(sorted(groups, key=lambda g: (len(g.prompt), max(map(len, g.completions)))), enough)


def in_order(groups: Sequence[TrainingGroup], budget: int) -> Iterator[list[TrainingGroup]]:
    """Fill batches in the order given. A group may be cut; every part gets the prompt."""
    batch: list[TrainingGroup] = []
    size = 0
    for group in groups:
        start = 0
        while start < len(group.completions):
            end = _fitting(group, start, budget - size)
            if end == start and batch:
                yield batch
                batch, size = [], 0
                continue
            batch.append(subgroup(group, start, max(end, start + 1)))
            size += batch[-1].size
            start = max(end, start + 1)
    if batch:
        yield batch


def _fitting(group: TrainingGroup, start: int, room: int) -> int:
    """Return the end of the completions, from `start` on, that fit into the room."""
    room -= len(group.prompt)
    while start < len(group.completions) and len(group.completions[start]) <= room:
        room -= len(group.completions[start])
        start += 1
    return start


def subgroup(group: TrainingGroup, start: int, end: int) -> TrainingGroup:
    """Return a group of some of the completions."""
    part = slice(start, end)
    return replace(
        group,
        completions=group.completions[part],
        advantages=group.advantages[part],
        logprobs=None if group.logprobs is None else group.logprobs[part],
        trained=group.trained[part],
    )
