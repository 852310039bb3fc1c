"""Computes attention for training in Triton kernels with their gradients: completions share their prompt.

Keys and values of a prompt are read, and their gradients summed, in place, without a copy per completion.
Shapes: N packed tokens, H query heads, K key heads, D of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_swarm.learning.batches import BatchShape, flat
from rl_swarm.learning.decoder import Attend, Decoder

BLOCK = 64  # tokens per program


@dataclass(frozen=True)
class Segments:
    """Locates prompts and completions in the packed row.

    A segment attends causally to itself, and to all of its parent: the parent of a completion is its prompt. The
    children of a prompt are adjacent.
    """

    table: Tensor  # per segment: start and length of itself, of its parent, and of its children together
    blocks: Tensor  # per block: segment and first token
    positions_N: Tensor

    @classmethod
    def of(cls, shape: BatchShape, tokens: int = 0, count: int = 0) -> "Segments":
        """Compute the segments of a row, padded to `tokens`, with tables padded to `count` segments."""
        lengths = [*shape.prompts, *shape.completions]
        parents = [-1] * len(shape.prompts) + list(shape.rows)
        for start in range(sum(lengths), tokens, BLOCK):  # padding attends to itself
            lengths.append(min(BLOCK, tokens - start))
            parents.append(-1)
        lengths += [0] * (count - len(lengths))
        parents += [-1] * (count - len(parents))
        starts = [0, *accumulate(lengths)]
        children = [(0, 0)] * len(lengths)
        for number, parent in enumerate(parents):
            if parent >= 0:
                first, size = children[parent]
                children[parent] = (first or starts[number], size + lengths[number])
        table, blocks = [], []
        places: list[int] = []
        for number, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
            before = lengths[parent] if parent >= 0 else 0
            table.append((starts[number], length, starts[parent] if parent >= 0 else 0, before, *children[number]))
            blocks += [(number, first) for first in range(0, length, BLOCK)]
            places += range(before, before + length)
        blocks.sort(key=lambda block: -children[block[0]][1])  # the longest programs first
        if count:
            blocks += [(count - 1, 0)] * (cls.max_blocks(tokens, count) - len(blocks))
        return cls(flat(table, np.int32).view(-1, 6), flat(blocks, np.int32).view(-1, 2), flat([places], np.int64))

    @classmethod
    def stack_rows(cls, rows: Sequence["Segments"], tokens: int) -> "Segments":
        """Join the segments of rows with `tokens` tokens each."""
        shift, count = torch.tensor([tokens, 0] * 3, dtype=torch.int32), len(rows[0].table)
        segment = torch.tensor([count, 0], dtype=torch.int32)
        return cls(
            torch.cat([row.table + number * shift for number, row in enumerate(rows)]),
            torch.cat([row.blocks + number * segment for number, row in enumerate(rows)]),
            torch.cat([row.positions_N for row in rows]),
        )

    @staticmethod
    def max_blocks(tokens: int, count: int) -> int:
        return tokens // BLOCK + count

    def to(self, device: torch.device) -> "Segments":
        return Segments(*(value.to(device, non_blocking=True) for value in vars(self).values()))

    def attention(self, decoder: Decoder) -> Attend:
        def attend(layer: int, q_N: Tensor, k_N: Tensor, v_N: Tensor) -> Tensor:
            return attention(q_N, k_N, v_N, self, decoder.scale, decoder.windows[layer])

        return attend


@triton.jit
def _segment(blocks, table):
    block = tl.program_id(0)
    segment = tl.load(blocks + 2 * block)
    first = tl.load(blocks + 2 * block + 1)
    row = table + 6 * segment
    return (
        first,
        tl.load(row),
        tl.load(row + 1),
        tl.load(row + 2),
        tl.load(row + 3),
        tl.load(row + 4),
        tl.load(row + 5),
    )


@triton.jit
def _scores(q, keys, seen, scale):
    return tl.where(
        seen, tl.dot(q, tl.trans(keys), input_precision="ieee") * (scale * 1.4426950408889634), -float("inf")
    )


@triton.jit
def _in_window(seen, distance, window, WINDOW: tl.constexpr):
    if WINDOW:
        seen &= distance < window
    return seen


@triton.jit
def _softmax_step(scores, values, top, total, acc):
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return new_top, total * shrink + tl.sum(weights, 1), acc


@triton.jit
def attention_forward(
    q_NHD, k_NKD, v_NKD, out_NHD, lse_HN, blocks, table, N, H, q_stride, kv_stride, scale, window,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    first, base, length, parent, parent_length, _, _ = _segment(blocks, table)
    head = tl.program_id(1)
    kv = head // GROUP
    rows = first + tl.arange(0, B)
    index = tl.arange(0, BD)[None, :]
    inside = (rows[:, None] < length) & (index < D)
    here = (base + rows[:, None]).to(tl.int64)
    q = tl.load(q_NHD + here * q_stride + head * D + index, mask=inside, other=0.0)
    top = tl.full((B,), -1e30, tl.float32)
    total = tl.zeros((B,), tl.float32)
    acc = tl.zeros((B, BD), tl.float32)
    column = tl.arange(0, B)
    for start in range(0, parent_length, B):
        at = start + column
        valid = (at[:, None] < parent_length) & (index < D)
        offset = (parent + at[:, None]).to(tl.int64) * kv_stride + kv * D + index
        keys = tl.load(k_NKD + offset, mask=valid, other=0.0)
        values = tl.load(v_NKD + offset, mask=valid, other=0.0)
        seen = _in_window(at[None, :] < parent_length, parent_length + rows[:, None] - at[None, :], window, WINDOW)
        top, total, acc = _softmax_step(_scores(q, keys, seen, scale), values, top, total, acc)
    for start in range(0, tl.minimum(first + B, length), B):
        at = start + column
        valid = (at[:, None] < length) & (index < D)
        offset = (base + at[:, None]).to(tl.int64) * kv_stride + kv * D + index
        keys = tl.load(k_NKD + offset, mask=valid, other=0.0)
        values = tl.load(v_NKD + offset, mask=valid, other=0.0)
        seen = (at[None, :] <= rows[:, None]) & (at[None, :] < length)
        seen = _in_window(seen, rows[:, None] - at[None, :], window, WINDOW)
        top, total, acc = _softmax_step(_scores(q, keys, seen, scale), values, top, total, acc)
    tl.store(out_NHD + (here * H + head) * D + index, acc / total[:, None], mask=inside)
    tl.store(lse_HN + head * N + base + rows, top + tl.log2(total), mask=rows < length)


@triton.jit
def _query_step(q, dout, lse, delta, keys, values, seen, scale, dq):
    weights = tl.exp2(_scores(q, keys, seen, scale) - lse[:, None])
    dweights = tl.dot(dout, tl.trans(values), input_precision="ieee")
    dscores = (weights * (dweights - delta[:, None])).to(keys.dtype)
    return tl.dot(dscores, keys, dq, input_precision="ieee")


@triton.jit
def attention_backward_queries(
    q_NHD, k_NKD, v_NKD, out_NHD, dout_NHD, lse_HN, delta_HN, dq_NHD, blocks, table, N, H, q_stride, kv_stride,
    scale, window, GROUP: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Compute gradients of queries, and in `delta` the dot products of outputs and their gradients."""
    first, base, length, parent, parent_length, _, _ = _segment(blocks, table)
    head = tl.program_id(1)
    kv = head // GROUP
    rows = first + tl.arange(0, B)
    index = tl.arange(0, BD)[None, :]
    inside = (rows[:, None] < length) & (index < D)
    here = (base + rows[:, None]).to(tl.int64)
    q = tl.load(q_NHD + here * q_stride + head * D + index, mask=inside, other=0.0)
    out = tl.load(out_NHD + (here * H + head) * D + index, mask=inside, other=0.0)
    dout = tl.load(dout_NHD + (here * H + head) * D + index, mask=inside, other=0.0)
    lse = tl.load(lse_HN + head * N + base + rows, mask=rows < length, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(delta_HN + head * N + base + rows, delta, mask=rows < length)
    dq = tl.zeros((B, BD), tl.float32)
    column = tl.arange(0, B)
    for start in range(0, parent_length, B):
        at = start + column
        valid = (at[:, None] < parent_length) & (index < D)
        offset = (parent + at[:, None]).to(tl.int64) * kv_stride + kv * D + index
        keys = tl.load(k_NKD + offset, mask=valid, other=0.0)
        values = tl.load(v_NKD + offset, mask=valid, other=0.0)
        seen = (at[None, :] < parent_length) & (rows[:, None] < length)
        seen = _in_window(seen, parent_length + rows[:, None] - at[None, :], window, WINDOW)
        dq = _query_step(q, dout, lse, delta, keys, values, seen, scale, dq)
    for start in range(0, tl.minimum(first + B, length), B):
        at = start + column
        valid = (at[:, None] < length) & (index < D)
        offset = (base + at[:, None]).to(tl.int64) * kv_stride + kv * D + index
        keys = tl.load(k_NKD + offset, mask=valid, other=0.0)
        values = tl.load(v_NKD + offset, mask=valid, other=0.0)
        seen = (at[None, :] <= rows[:, None]) & (rows[:, None] < length)
        seen = _in_window(seen, rows[:, None] - at[None, :], window, WINDOW)
        dq = _query_step(q, dout, lse, delta, keys, values, seen, scale, dq)
    tl.store(dq_NHD + here * q_stride + head * D + index, dq * scale, mask=inside)


@triton.jit
def _key_step(
    q_NHD, dout_NHD, lse_HN, delta_HN, at, valid, seen, keys, values, head, N, H, q_stride, scale, dk, dv,
    D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    index = tl.arange(0, BD)[None, :]
    at_long = at[:, None].to(tl.int64)
    inside = valid[:, None] & (index < D)
    q = tl.load(q_NHD + at_long * q_stride + head * D + index, mask=inside, other=0.0)
    dout = tl.load(dout_NHD + (at_long * H + head) * D + index, mask=inside, other=0.0)
    lse = tl.load(lse_HN + head * N + at, mask=valid, other=0.0)
    delta = tl.load(delta_HN + head * N + at, mask=valid, other=0.0)
    weights = tl.exp2(_scores(q, keys, seen, scale) - lse[:, None])
    dv = tl.dot(tl.trans(weights.to(dout.dtype)), dout, dv, input_precision="ieee")
    dweights = tl.dot(dout, tl.trans(values), input_precision="ieee")
    dscores = (weights * (dweights - delta[:, None])).to(q.dtype)
    dk = tl.dot(tl.trans(dscores), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def attention_backward_keys(
    q_NHD, k_NKD, v_NKD, dout_NHD, lse_HN, delta_HN, dk_NHD, dv_NHD, positions_N, dkv_stride, blocks, table, N, H,
    q_stride, kv_stride, scale, window,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Compute gradients of a block of keys through one query head: from later tokens of its segment, and from all
    tokens of its children."""
    first, base, length, _, _, child, child_length = _segment(blocks, table)
    head = tl.program_id(1)
    kv = head // GROUP
    columns = first + tl.arange(0, B)
    index = tl.arange(0, BD)[None, :]
    inside = (columns[:, None] < length) & (index < D)
    here = (base + columns[:, None]).to(tl.int64)
    keys = tl.load(k_NKD + here * kv_stride + kv * D + index, mask=inside, other=0.0)
    values = tl.load(v_NKD + here * kv_stride + kv * D + index, mask=inside, other=0.0)
    dk = tl.zeros((B, BD), tl.float32)
    dv = tl.zeros((B, BD), tl.float32)
    row = tl.arange(0, B)
    for start in range(first, length, B):
        rows = start + row
        seen = (columns[None, :] <= rows[:, None]) & (rows[:, None] < length)
        seen = _in_window(seen, rows[:, None] - columns[None, :], window, WINDOW)
        dk, dv = _key_step(
            q_NHD, dout_NHD, lse_HN, delta_HN, base + rows, rows < length, seen, keys, values, head, N, H,
            q_stride, scale, dk, dv, D, BD,
        )  # fmt: skip
    for start in range(0, child_length, B):
        rows = start + row
        seen = (columns[None, :] < length) & (rows[:, None] < child_length)
        if WINDOW:
            places = tl.load(positions_N + child + rows, mask=rows < child_length, other=0)
            seen &= places[:, None] - columns[None, :] < window
        dk, dv = _key_step(
            q_NHD, dout_NHD, lse_HN, delta_HN, child + rows, rows < child_length, seen, keys, values, head, N,
            H, q_stride, scale, dk, dv, D, BD,
        )  # fmt: skip
    tl.store(dk_NHD + here * dkv_stride + head * D + index, dk * scale, mask=inside)
    tl.store(dv_NHD + here * dkv_stride + head * D + index, dv, mask=inside)


class _Attention(torch.autograd.Function):
    """Takes queries, keys and values, or without a copy one tensor in which they are adjacent."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor | None, v: Tensor | None, segments: Segments, scale: float, window: int
    ) -> Tensor:
        saved = [part.contiguous() for part in (q, k, v) if part is not None]
        q, k, v = _parts(saved)
        (N, H, D), group = q.shape, q.shape[1] // k.shape[1]
        out, lse = q.new_empty(N, H, D), q.new_empty(H, N, dtype=torch.float32)
        ctx.shape = dict(GROUP=group, WINDOW=window > 0, D=D, BD=max(16, triton.next_power_of_2(D)), B=BLOCK)
        ctx.common = (segments.blocks, segments.table, N, H, q.stride(0), k.stride(0), scale, window)
        ctx.positions = segments.positions_N
        attention_forward[(len(segments.blocks), H)](q, k, v, out, lse, *ctx.common, **ctx.shape)
        ctx.save_for_backward(out, lse, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        out, lse, *saved = ctx.saved_tensors
        q, k, v = _parts(saved)
        (N, H, D), K, dout = q.shape, k.shape[1], dout.contiguous()
        together = len(saved) == 1
        found = [torch.empty_like(saved[0])] if together else [torch.empty_like(q) for _ in range(3)]
        dq, dk, dv = _parts(found)
        delta, grid = torch.empty_like(lse), (len(ctx.common[0]), H)
        attention_backward_queries[grid](q, k, v, out, dout, lse, delta, dq, *ctx.common, **ctx.shape)
        attention_backward_keys[grid](
            q, k, v, dout, lse, delta, dk, dv, ctx.positions, dk.stride(0), *ctx.common, **ctx.shape
        )
        if together:
            return found[0], None, None, None, None, None
        if K < H:  # a key's gradient is the sum of those through its query heads
            dk, dv = (found.view(N, K, H // K, D).sum(2, dtype=torch.float32).to(k.dtype) for found in (dk, dv))
        return dq, dk, dv, None, None, None


def _parts(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return queries, keys and values; one tensor has equally many heads of each."""
    return tensors[0].chunk(3, 1) if len(tensors) == 1 else tensors


def _whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """Return the tensor whose thirds these are, if there is one."""
    whole = q._base
    if whole is None or k._base is not whole or v._base is not whole or not q.shape == k.shape == v.shape:
        return None
    size, width = q.element_size(), q.shape[1] * q.shape[2]
    starts = [part.data_ptr() - whole.data_ptr() for part in (q, k, v)]
    if whole.numel() != 3 * q.numel() or starts != [0, width * size, 2 * width * size]:
        return None
    return whole.view(len(q), 3 * q.shape[1], q.shape[2])


def attention(
    q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, segments: Segments, scale: float, window: int | None
) -> Tensor:
    """Return attention of every token over its prompt and the tokens before it: [N, H * D]."""
    whole = _whole(q_NHD, k_NKD, v_NKD)
    parts = (q_NHD, k_NKD, v_NKD) if whole is None else (whole, None, None)
    out: Tensor = _Attention.apply(*parts, segments, scale, window or 0)
    return out.flatten(1)
