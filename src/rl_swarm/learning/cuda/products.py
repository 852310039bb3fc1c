"""Keeps weights in low precision for matrix products, and accumulates gradients in float32.

Shapes: E the width of a vector, P programs, each with a partial sum, K kinds of vectors.
"""

from collections.abc import Sequence
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

ALIGNED = 64  # rows of a matrix: other numbers are several times as slow


def keep_low(weights: Sequence[Tensor]) -> None:
    """Copy matrices to the precision of products, once for all passes until a step changes them."""
    kind = weights[0].device.type
    if not torch.is_autocast_enabled(kind):
        return
    dtype, changed = torch.get_autocast_dtype(kind), list[tuple[Tensor, Tensor]]()
    for weight in weights:
        if weight.ndim != 2 or weight.dtype == dtype:
            continue
        kept, version = getattr(weight, "low", (None, -1))
        if kept is None:
            kept = weight.new_zeros(-(-len(weight) // ALIGNED) * ALIGNED, weight.shape[1], dtype=dtype)
        if version != weight._version:
            changed.append((kept[: len(weight)], weight.detach()))
            setattr(weight, "low", (kept, weight._version))  # noqa: B010 a tensor has no such field
    if changed:
        targets, sources = zip(*changed, strict=True)
        torch._foreach_copy_(targets, sources)


def drop_low(weights: Sequence[Tensor]) -> None:
    for weight in weights:
        if hasattr(weight, "low"):
            del weight.low


def low_of(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight in low precision, padded with rows of zeros, which makes products faster."""
    kept, version = getattr(weight, "low", (None, -1))
    if kept is not None and kept.dtype == dtype and version == weight._version:
        return cast(Tensor, kept)
    rows, width = weight.shape
    if rows % ALIGNED == 0:
        return weight.to(dtype)
    copy = weight.new_zeros(-(-rows // ALIGNED) * ALIGNED, width, dtype=dtype)
    copy[:rows] = weight
    return copy


@triton.jit
def add_parts(parts_PKE, first_E, second_E, third_E, P, E, KINDS: tl.constexpr, TILE: tl.constexpr, B: tl.constexpr):
    """Add the sums of all parts to up to three gradients."""
    kind = tl.program_id(1)
    index = tl.program_id(0) * B + tl.arange(0, B)
    sums = tl.zeros((TILE, B), tl.float32)
    for start in range(0, P, TILE):
        rows = start + tl.arange(0, TILE)[:, None]
        at = (rows * KINDS + kind).to(tl.int64) * E + index[None, :]
        sums += tl.load(parts_PKE + at, mask=(rows < P) & (index[None, :] < E), other=0.0)
    total = tl.sum(sums, 0)
    if kind == 0:
        total += tl.load(first_E + index, mask=index < E, other=0.0)
        tl.store(first_E + index, total, mask=index < E)
    elif kind == 1:
        total += tl.load(second_E + index, mask=index < E, other=0.0)
        tl.store(second_E + index, total, mask=index < E)
    else:
        total += tl.load(third_E + index, mask=index < E, other=0.0)
        tl.store(third_E + index, total, mask=index < E)


def vector_gradients(vectors: Sequence[Tensor], parts_PKE: Tensor) -> Sequence[Tensor | None]:
    """Sum the gradients of vectors over all parts; add them to existing gradients, else return them."""
    parts, kinds, width = parts_PKE.shape
    if not all(vector.is_leaf and vector.grad is not None for vector in vectors):
        return tuple(parts_PKE.sum(0))
    kept = [vector.grad for vector in vectors]
    kept += [kept[0]] * (3 - kinds)
    add_parts[(triton.cdiv(width, 64), kinds)](parts_PKE, *kept, parts, width, KINDS=kinds, TILE=32, B=64)
    return (None,) * kinds


def weight_gradient(weight: Tensor, x: Tensor, dout: Tensor, transposed: bool) -> Tensor | None:
    """Compute the gradient of a weight; add it to an existing gradient, else return it."""
    left, right = (x, dout) if transposed else (dout, x)
    if weight.grad is None:
        return (left.t() @ right).to(weight.dtype)
    add_product(weight.grad, left.t(), right)
    return None


def add_product(sums: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product in low precision to sums in float32."""
    if sums.device.type == "cuda":
        even = len(sums) // ALIGNED * ALIGNED  # an odd number of rows is several times slower
        for rows in (slice(even), slice(even, None)):
            if len(part := sums[rows]):
                torch.ops.aten.addmm.dtype_out(part, left[rows], right, torch.float32, out=part)
    else:
        sums += left @ right
