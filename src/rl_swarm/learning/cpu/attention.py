"""Computes attention over packed prompts and completions on a CPU, with gradients and without padding.

It consists of rectangles, in which every query attends to every key, and of causal triangles: a completion over its
prompt, a block of a completion over earlier blocks, and over itself. Each is one call of torch's flash attention; the
results are joined by the log-sum-exp that each call returns. The backward pass makes the same calls with the joined
results, since the gradient of a softmax needs only the sum over all parts.
Shapes: N packed tokens, H heads, D of a head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rl_swarm.learning.batches import BatchShape
from rl_swarm.learning.decoder import Decoder

BLOCK = 256  # queries at a time; shorter blocks would skip more masked keys, but cost more

_forward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Part:
    """Selects the tokens from `first` to `last` of `count` sequences of `length` tokens, which begin at `start`."""

    start: int
    count: int
    length: int
    first: int
    last: int

    def of(self, x_N: Tensor) -> Tensor:
        """View [N, H, ...] as [count, H, last - first, ...]."""
        whole = x_N[self.start : self.start + self.count * self.length]
        return whole.view(self.count, self.length, *x_N.shape[1:])[:, self.first : self.last].transpose(1, 2)


Call = tuple[Part, Part, bool]  # queries, keys, and whether causal


def calls(shape: BatchShape) -> Iterator[Call]:
    """Yield the attention calls for a row of this shape."""
    lengths = [*shape.prompts, *shape.completions]
    starts = [0, *accumulate(lengths)]
    for start, length in zip(starts, shape.prompts, strict=False):
        yield from _triangle(start, 1, length)
    number = len(shape.prompts)
    for row, prompt in enumerate(shape.prompts):
        first = number
        while number - len(shape.prompts) < len(shape.rows) and shape.rows[number - len(shape.prompts)] == row:
            number += 1
        tokens = starts[number] - starts[first]
        if tokens == 0:
            continue
        yield Part(starts[first], 1, tokens, 0, tokens), Part(starts[row], 1, prompt, 0, prompt), False
        if len(set(lengths[first:number])) == 1:
            yield from _triangle(starts[first], number - first, lengths[first])
            continue
        for one in range(first, number):
            yield from _triangle(starts[one], 1, lengths[one])


def _triangle(start: int, count: int, length: int) -> Iterator[Call]:
    for first in range(0, length, BLOCK):
        queries = Part(start, count, length, first, min(first + BLOCK, length))
        if first:
            yield queries, Part(start, count, length, 0, first), False
        yield queries, queries, True


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: list[Call], scale: float) -> Tensor:
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
        for queries, keys, causal in plan:
            found, its_lse = _forward(queries.of(q), keys.of(k), keys.of(v), 0.0, causal, scale=scale)
            here, here_lse = queries.of(out), queries.of(lse)
            joined = torch.logaddexp(here_lse, its_lse)
            here.mul_((here_lse - joined).exp_()[..., None]).addcmul_(found, (its_lse - joined).exp_()[..., None])
            here_lse.copy_(joined)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        given = given.contiguous()
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for queries, keys, causal in ctx.plan:
            found = _backward(
                queries.of(given), queries.of(q), keys.of(k), keys.of(v), queries.of(out), queries.of(lse),
                0.0, causal, scale=ctx.scale,
            )  # fmt: skip
            for place, part, more in zip((dq, dk, dv), (queries, keys, keys), found, strict=True):
                part.of(place).add_(more)
        return dq, dk, dv, None, None


class PackedAttention:
    """Computes attention over a row of this shape, as the decoder calls it."""

    def __init__(self, decoder: Decoder, shape: BatchShape) -> None:
        self.decoder, self.plan = decoder, list(calls(shape))
        behind = [shape.prompts[row] for row in shape.rows]
        places = [torch.arange(length) for length in shape.prompts]
        places += [torch.arange(a, a + b) for a, b in zip(behind, shape.completions, strict=True)]
        self.positions_N = torch.cat(places)

    @staticmethod
    def fits(decoder: Decoder, shape: BatchShape) -> bool:
        """Return whether no window ends inside a sequence."""
        lengths = [shape.prompts[row] + length for row, length in zip(shape.rows, shape.completions, strict=True)]
        longest = max([*shape.prompts, *lengths])
        return decoder.model.device.type == "cpu" and all(w is None or w >= longest for w in decoder.windows)

    def __call__(self, layer: int, q_N: Tensor, k_N: Tensor, v_N: Tensor) -> Tensor:
        group = q_N.shape[1] // k_N.shape[1]
        if group > 1:
            k_N, v_N = k_N.repeat_interleave(group, 1), v_N.repeat_interleave(group, 1)
        q, k, v = (x.float().contiguous() for x in (q_N, k_N, v_N))
        out: Tensor = _PackedAttention.apply(q, k, v, self.plan, self.decoder.scale)  # type: ignore[no-untyped-call]
        return out.flatten(1)
