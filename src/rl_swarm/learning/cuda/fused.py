"""Computes what training does between matrix products on a GPU, in Triton kernels with their gradients.

Shapes: N packed tokens, H query heads, K key heads, D of a head, E hidden, V words.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

ALIGNED = 64  # words
NORM_ROWS = 16  # whose gradients one program adds up
COLUMN_ROWS = 128


@triton.jit
def norm_forward(
    x_NE, more_NE, extra_E, weight_E, bias_E, sum_NE, out_NE, mean_N, scale_N, E, eps,
    MORE: tl.constexpr, EXTRA: tl.constexpr, CENTRED: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """sum = x + more + extra; out = its layer norm (centred, with a bias) or RMS norm."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BE)
    inside = index < E
    x = tl.load(x_NE + row * E + index, mask=inside, other=0.0)
    if MORE:
        x += tl.load(more_NE + row * E + index, mask=inside, other=0.0).to(tl.float32)
        if EXTRA:
            x += tl.load(extra_E + index, mask=inside, other=0.0)
        tl.store(sum_NE + row * E + index, x, mask=inside)
    if CENTRED:
        mean = tl.sum(x, 0) / E
        tl.store(mean_N + row, mean)
        x = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 0) / E + eps)
    tl.store(scale_N + row, scale)
    x *= scale * tl.load(weight_E + index, mask=inside, other=0.0)
    if CENTRED:
        x += tl.load(bias_E + index, mask=inside, other=0.0)
    tl.store(out_NE + row * E + index, x, mask=inside)


@triton.jit
def norm_backward(
    dsum_NE, dout_NE, sum_NE, mean_N, scale_N, weight_E, dx_NE, dmore_NE, parts_PKE, N, E,
    GIVEN: tl.constexpr, LOW: tl.constexpr, EXTRA: tl.constexpr, CENTRED: tl.constexpr, KINDS: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The gradient of what was added up, in one or two precisions, and parts of those of weight, bias and extra."""
    part = tl.program_id(0)
    index = tl.arange(0, BE)[None, :]
    weight = tl.load(weight_E + index, mask=index < E, other=0.0)
    dweight = tl.zeros((TILE, BE), tl.float32)
    dbias = tl.zeros((TILE, BE), tl.float32)
    dextra = tl.zeros((TILE, BE), tl.float32)
    for start in range(0, ROWS, TILE):
        rows = part * ROWS + start + tl.arange(0, TILE)[:, None]
        inside = (rows < N) & (index < E)
        at = rows.to(tl.int64) * E + index
        x = tl.load(sum_NE + at, mask=inside, other=0.0)
        dout = tl.load(dout_NE + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_N + rows, mask=rows < N, other=0.0)
        if CENTRED:
            x -= tl.load(mean_N + rows, mask=rows < N, other=0.0)
        x = tl.where(inside, x * scale, 0.0)
        dx = dout * weight
        lost = x * (tl.sum(dx * x, 1)[:, None] / E)
        if CENTRED:
            lost += tl.sum(dx, 1)[:, None] / E
        dx = scale * (dx - lost)
        if GIVEN:
            dx += tl.load(dsum_NE + at, mask=inside, other=0.0)
        tl.store(dx_NE + at, dx, mask=inside)
        if LOW:
            tl.store(dmore_NE + at, dx, mask=inside)
        dweight += dout * x
        dbias += dout
        if EXTRA:
            dextra += tl.where(inside, dx, 0.0)
    column = tl.arange(0, BE)
    place = parts_PKE + part.to(tl.int64) * KINDS * E + column
    tl.store(place, tl.sum(dweight, 0), mask=column < E)
    if CENTRED:
        tl.store(place + E, tl.sum(dbias, 0), mask=column < E)
    if EXTRA:
        tl.store(place + (KINDS - 1) * E, tl.sum(dextra, 0), mask=column < E)


@triton.jit
def add_parts(parts_PKE, first_E, second_E, third_E, P, E, KINDS: tl.constexpr, TILE: tl.constexpr, B: tl.constexpr):
    """Adds the sums of all parts to up to three gradients."""
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


def gradients_of(vectors: Sequence[Tensor], parts_PKE: Tensor) -> Sequence[Tensor | None]:
    """The gradients of vectors, given in parts: added where their gradients are kept, else returned."""
    parts, kinds, width = parts_PKE.shape
    if not all(vector.is_leaf and vector.grad is not None for vector in vectors):
        return tuple(parts_PKE.sum(0))
    kept = [vector.grad for vector in vectors]
    kept += [kept[0]] * (3 - kinds)
    add_parts[(triton.cdiv(width, 64), kinds)](parts_PKE, *kept, parts, width, KINDS=kinds, TILE=32, B=64)
    return (None,) * kinds


class _AddedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        more: Tensor | None,
        extra: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        low: torch.dtype,
    ) -> Any:
        x = x.contiguous()
        more = None if more is None else more.contiguous()
        N, E = x.shape
        sums, out = x if more is None else torch.empty_like(x), torch.empty_like(x, dtype=low)
        mean, scale = x.new_empty(N), x.new_empty(N)
        ctx.shape = dict(EXTRA=extra is not None, CENTRED=bias is not None, BE=triton.next_power_of_2(E))
        norm_forward[(N,)](
            x, more, extra, weight, bias, sums, out, mean, scale, E, eps, MORE=more is not None, **ctx.shape
        )
        ctx.save_for_backward(sums, mean, scale)
        ctx.weight, ctx.vectors = weight, [v for v in (weight, bias, extra) if v is not None]
        ctx.low = None if more is None else more.dtype
        ctx.set_materialize_grads(False)
        return None if more is None else sums, out

    @staticmethod
    def backward(ctx: Any, dsum: Tensor | None, dout: Tensor) -> Any:
        sums, mean, scale = ctx.saved_tensors
        (N, E), parts = sums.shape, triton.cdiv(len(sums), NORM_ROWS)
        extra, centred, low = ctx.shape["EXTRA"], ctx.shape["CENTRED"], ctx.low not in (None, sums.dtype)
        dsum = None if dsum is None else dsum.contiguous()
        dx = torch.empty_like(sums)
        dmore = torch.empty_like(sums, dtype=ctx.low) if low else dx
        parts_PKE = sums.new_empty(parts, len(ctx.vectors), E)
        norm_backward[(parts,)](
            dsum, dout.contiguous(), sums, mean, scale, ctx.weight, dx, dmore, parts_PKE, N, E,
            GIVEN=dsum is not None, LOW=low, KINDS=len(ctx.vectors), ROWS=NORM_ROWS,
            TILE=2 if centred else 4, **ctx.shape,
        )  # fmt: skip
        found = list(gradients_of(ctx.vectors, parts_PKE))
        dweight, dbias, dextra = found[0], found[1] if centred else None, found[-1] if extra else None
        return dx, None if ctx.low is None else dmore, dextra, dweight, dbias, None, None


def added_norm(
    x_NE: Tensor,
    more_NE: Tensor | None,
    extra_E: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    low: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """x + more + extra in float32, and its norm in low precision: a layer norm if there is a bias, or an RMS norm."""
    sums, out = _AddedNorm.apply(x_NE, more_NE, extra_E, weight, bias, eps, low)
    return x_NE if sums is None else sums, out


def keep_low(weights: Sequence[Tensor]) -> None:
    """Copies of matrices in the precision of products, made once for all passes until a step changes them."""
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


def forget_low(weights: Sequence[Tensor]) -> None:
    for weight in weights:
        if hasattr(weight, "low"):
            del weight.low


def low_of(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in low precision, with rows of zeros at its end: products with an odd number of words take several
    times as long."""
    kept, version = getattr(weight, "low", (None, -1))
    if kept is not None and kept.dtype == dtype and version == weight._version:
        return cast(Tensor, kept)
    rows, width = weight.shape
    if rows % ALIGNED == 0:
        return weight.to(dtype)
    copy = weight.new_zeros(-(-rows // ALIGNED) * ALIGNED, width, dtype=dtype)
    copy[:rows] = weight
    return copy


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool) -> Tensor:
        low = low_of(weight, x.dtype)[: len(weight)]
        ctx.save_for_backward(x, low)
        ctx.weight, ctx.bias, ctx.turned = weight, bias, turned
        matrix = low if turned else low.t()
        return x @ matrix if bias is None else torch.addmm(bias.to(x.dtype), x, matrix)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        x, low = ctx.saved_tensors
        dout = dout.to(x.dtype).contiguous()
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dx = dout @ (low.t() if ctx.turned else low) if needs_x else None
        dweight = added_gradient(ctx.weight, x, dout, ctx.turned) if needs_weight else None
        dbias = None
        if needs_bias:
            (dbias,) = gradients_of([ctx.bias], column_parts(dout))
        return dx, dweight, dbias, None


def linear(x_NE: Tensor, weight: Tensor, bias: Tensor | None, turned: bool) -> Tensor:
    """The product with a weight of [outputs, inputs], or turned round."""
    out: Tensor = _Linear.apply(x_NE, weight, bias, turned)
    return out


def added_gradient(weight: Tensor, x: Tensor, dout: Tensor, turned: bool) -> Tensor | None:
    """The gradient of a weight: added where its gradients are kept, else returned."""
    left, right = (x, dout) if turned else (dout, x)
    if weight.grad is None:
        return (left.t() @ right).to(weight.dtype)
    add_product(weight.grad, left.t(), right)
    return None


@triton.jit
def column_backward(
    x_NE, bias_E, dout_NE, out_NE, dx_NE, parts_PE, N, E, KIND: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """Parts of the sums of columns; with a kind of activation, of its gradient, which is written, and so is what the
    activation gave."""
    part = tl.program_id(0)
    index = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    sums = tl.zeros((TILE, B), tl.float32)
    if KIND != "none":
        bias = tl.load(bias_E + index, mask=index < E, other=0.0)
    for start in range(0, ROWS, TILE):
        rows = part * ROWS + start + tl.arange(0, TILE)[:, None]
        inside = (rows < N) & (index < E)
        at = rows.to(tl.int64) * E + index
        given = tl.load(dout_NE + at, mask=inside, other=0.0).to(tl.float32)
        if KIND != "none":
            x = tl.load(x_NE + at, mask=inside, other=0.0).to(tl.float32) + bias
            value, slope = _activated(x, KIND)
            given *= slope
            tl.store(out_NE + at, value, mask=inside)
            tl.store(dx_NE + at, given, mask=inside)
        sums += given
    column = tl.program_id(1) * B + tl.arange(0, B)
    tl.store(parts_PE + part.to(tl.int64) * E + column, tl.sum(sums, 0), mask=column < E)


def column_parts(
    dout_NE: Tensor,
    x_NE: Tensor | None = None,
    bias_E: Tensor | None = None,
    out_NE: Tensor | None = None,
    dx_NE: Tensor | None = None,
) -> Tensor:
    """The sums of columns in parts, [P, 1, E]; of a gradient through `out = gelu(x + bias)`, which goes to `dx`."""
    N, E = dout_NE.shape
    parts_PKE = dout_NE.new_empty(triton.cdiv(N, COLUMN_ROWS), 1, E, dtype=torch.float32)
    column_backward[(len(parts_PKE), triton.cdiv(E, 64))](
        x_NE, bias_E, dout_NE, out_NE, dx_NE, parts_PKE, N, E,
        KIND="none" if x_NE is None else "gelu", ROWS=COLUMN_ROWS, TILE=32, B=64,
    )  # fmt: skip
    return parts_PKE


@triton.jit
def biased_gelu(x_NE, bias_E, out_NE, E, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * B + tl.arange(0, B)
    inside = index < E
    x = tl.load(x_NE + row * E + index, mask=inside, other=0.0).to(tl.float32)
    value, _ = _activated(x + tl.load(bias_E + index, mask=inside, other=0.0), "gelu")
    tl.store(out_NE + row * E + index, value, mask=inside)


class _ActivatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
        x = x.contiguous()
        low = low_of(weight, x.dtype)[: len(weight)]
        ctx.save_for_backward(x, low)
        ctx.bias, ctx.weight = bias, weight
        out, (N, E) = torch.empty_like(x), x.shape
        biased_gelu[(N, triton.cdiv(E, 1024))](x, bias, out, E, B=1024)
        return out @ low

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        x, low = ctx.saved_tensors
        dout = dout.to(x.dtype).contiguous()
        out, dx, dweight = torch.empty_like(x), torch.empty_like(x), None
        (dbias,) = gradients_of([ctx.bias], column_parts(dout @ low.t(), x, ctx.bias, out, dx))
        if ctx.needs_input_grad[2]:
            dweight = added_gradient(ctx.weight, out, dout, True)
        return dx, dbias, dweight


def activated_product(x_NE: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
    """gelu(x + bias) weight, resident_bytes only x for the way back."""
    out: Tensor = _ActivatedProduct.apply(x_NE, bias, weight)
    return out


class _Words(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding
        return weight.index_select(0, ids)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        kept = ctx.weight.grad
        sums = torch.zeros_like(ctx.weight) if kept is None else kept
        if ctx.padding is not None:  # it learns nothing
            dout = dout.masked_fill((ids == ctx.padding)[:, None], 0.0)
        sums.index_add_(0, ids, dout.to(sums.dtype))
        return None, sums if kept is None else None, None


def embedded(ids_N: Tensor, weight_VE: Tensor, padding: int | None) -> Tensor:
    """The rows of these words; on the way back, only these rows are touched."""
    out: Tensor = _Words.apply(ids_N, weight_VE, padding)
    return out


@triton.jit
def turn(x_NHD, cos_ND, sin_ND, out_NHD, H, sign, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BH + tl.arange(0, BH)[:, None]
    index = tl.arange(0, BD)[None, :]
    inside = (heads < H) & (index < D)
    other = (index + D // 2) % D
    start = (token * H + heads) * D
    x = tl.load(x_NHD + start + index, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(x_NHD + start + other, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ND + token * D + index, mask=index < D, other=0.0)
    sin = tl.load(sin_ND + token * D + index, mask=index < D, other=0.0)
    x = x * cos + tl.where(index < D // 2, -sign, sign) * y * sin
    tl.store(out_NHD + start + index, x, mask=inside)


class _Rotation(torch.autograd.Function):
    """The gradient of a rotation is the rotation back."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        return _Rotation.turned(q, cos, sin, 1.0), _Rotation.turned(k, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _Rotation.turned(dq, cos, sin, -1.0), _Rotation.turned(dk, cos, sin, -1.0), None, None

    @staticmethod
    def turned(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
        x = x.contiguous()
        (N, H, D), out = x.shape, torch.empty_like(x)
        turn[(N, triton.cdiv(H, 16))](x, cos, sin, out, H, sign, D=D, BH=16, BD=triton.next_power_of_2(D), num_warps=2)
        return out


def rotated(q_NHD: Tensor, k_NKD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> tuple[Tensor, Tensor]:
    q, k = _Rotation.apply(q_NHD, k_NKD, cos_ND, sin_ND)
    return q, k


@triton.jit
def _activated(gate, KIND: tl.constexpr):
    """The activation and its derivative."""
    if KIND == "silu":
        s = tl.sigmoid(gate)
        value = gate * s
        slope = s * (1 + gate * (1 - s))
    else:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        s = tl.sigmoid(z)
        value = gate * s
        slope = s + value * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * gate * gate)
    return value, slope


@triton.jit
def gate_forward(gate, up, out, size, KIND: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < size
    value, _ = _activated(tl.load(gate + at, mask=inside, other=0.0).to(tl.float32), KIND)
    tl.store(out + at, value * tl.load(up + at, mask=inside, other=0.0).to(tl.float32), mask=inside)


@triton.jit
def gate_backward(gate, up, dout, dgate, dup, size, KIND: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < size
    value, slope = _activated(tl.load(gate + at, mask=inside, other=0.0).to(tl.float32), KIND)
    given = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dgate + at, given * slope * tl.load(up + at, mask=inside, other=0.0).to(tl.float32), mask=inside)
    tl.store(dup + at, given * value, mask=inside)


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, kind: str) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        low = low_of(weight, gate.dtype)[: len(weight)]
        ctx.save_for_backward(gate, up, low)
        ctx.weight, ctx.kind = weight, kind
        return _gated(gate, up, kind) @ low.t()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        gate, up, low = ctx.saved_tensors
        dout = dout.to(gate.dtype).contiguous()
        dweight = None
        if ctx.needs_input_grad[2]:
            dweight = added_gradient(ctx.weight, _gated(gate, up, ctx.kind), dout, False)
        dinner, dgate, dup = dout @ low, torch.empty_like(gate), torch.empty_like(up)
        grid = (triton.cdiv(gate.numel(), 2048),)
        gate_backward[grid](gate, up, dinner, dgate, dup, gate.numel(), KIND=ctx.kind, B=2048)
        return dgate, dup, dweight, None


def _gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    out = torch.empty_like(gate)
    gate_forward[(triton.cdiv(gate.numel(), 2048),)](gate, up, out, gate.numel(), KIND=kind, B=2048)
    return out


def gated_product(gate: Tensor, up: Tensor, weight: Tensor, kind: str) -> Tensor:
    """(activation(gate) * up) weight, resident_bytes only gate and up for the way back."""
    out: Tensor = _GatedProduct.apply(gate, up, weight, kind)
    return out


@triton.jit
def word_forward(logits_NV, targets_N, logprobs_N, entropy_N, lse_N, V, width, heat, B: tl.constexpr):
    """Log-probability of the target and entropy of a row of logits, read once. `heat` is 1 / temperature."""
    token = tl.program_id(0).to(tl.int64)
    logits_NV += token * width
    top = -1e30
    total = 0.0
    moment = 0.0  # of the logits themselves, weighted
    for start in range(0, V, B):
        words = start + tl.arange(0, B)
        raw = tl.load(logits_NV + words, mask=words < width, other=0.0).to(tl.float32)
        logits = tl.where(words < V, raw * heat, -float("inf"))
        new_top = tl.maximum(top, tl.max(logits, 0))
        weights = tl.exp(logits - new_top)
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(weights, 0)
        moment = moment * shrink + tl.sum(tl.where(words < V, weights * logits, 0.0), 0)
        top = new_top
    lse = top + tl.log(total)
    target = tl.load(logits_NV + tl.load(targets_N + token)).to(tl.float32) * heat
    tl.store(logprobs_N + token, target - lse)
    tl.store(entropy_N + token, lse - moment / total)
    tl.store(lse_N + token, lse)


@triton.jit
def word_backward(logits_NV, targets_N, lse_N, given_N, V, width, heat, B: tl.constexpr):
    """The gradient of the logits, written over them."""
    token = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * B + tl.arange(0, B)
    place = logits_NV + token * width + words
    raw = tl.load(place, mask=words < width, other=0.0).to(tl.float32)
    weights = tl.where(words < V, tl.exp(raw * heat - tl.load(lse_N + token)), 0.0)
    hit = (words == tl.load(targets_N + token)).to(tl.float32)
    tl.store(place, tl.load(given_N + token) * heat * (hit - weights), mask=words < width)


def add_product(sums: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds a product in low precision to sums in float32."""
    if sums.device.type == "cuda":
        even = len(sums) // ALIGNED * ALIGNED  # an odd number of rows takes several times as long
        for rows in (slice(even), slice(even, None)):
            if len(part := sums[rows]):
                torch.ops.aten.addmm.dtype_out(part, left[rows], right, torch.float32, out=part)
    else:
        sums += left @ right


class _WordLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor, heat: float
    ) -> tuple[Tensor, Tensor]:
        weight, V = low_of(weight_VE, hidden_NE.dtype), len(weight_VE)
        logits = hidden_NE @ weight.t()
        found = [hidden_NE.new_empty(len(hidden_NE), dtype=torch.float32) for _ in range(3)]
        word_forward[(len(logits),)](logits, targets_N, *found, V, len(weight), heat, B=4096, num_warps=8)
        logprobs, entropy, lse = found
        ctx.save_for_backward(hidden_NE, targets_N, lse)
        ctx.logits, ctx.weight, ctx.heat = logits, weight_VE, heat
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, given_N: Tensor, _: Tensor) -> Any:
        (hidden_NE, targets_N, lse), weight_VE = ctx.saved_tensors, ctx.weight
        weight, V, logits = low_of(weight_VE, hidden_NE.dtype), len(weight_VE), ctx.logits
        del ctx.logits  # overwritten, and the memory is for the next chunk
        word_backward[(len(logits), triton.cdiv(V, 4096))](
            logits, targets_N, lse, given_N.contiguous(), V, len(weight), ctx.heat, B=4096
        )
        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = added_gradient(weight_VE, hidden_NE, logits[:, :V], False)
        return logits @ weight, dweight, None, None


def word_logprobs(hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The log-probability of every target and the entropy there. Their logits exist until the way back is done."""
    logprobs, entropy = _WordLogprobs.apply(hidden_NE, weight_VE, targets_N, 1 / temperature)
    return logprobs, entropy
