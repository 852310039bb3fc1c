"""Computes everything between the matrix products of a layer in Triton kernels with their gradients.

Shapes: N packed tokens, H query heads, K key heads, D of a head, E hidden.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_swarm.learning.cuda.products import low_of, vector_gradients, weight_gradient

NORM_ROWS = 16  # whose gradients one program sums
COLUMN_ROWS = 128


@triton.jit
def norm_forward(
    x_NE, more_NE, extra_E, weight_E, bias_E, sum_NE, out_NE, mean_N, scale_N, E, eps,
    MORE: tl.constexpr, EXTRA: tl.constexpr, CENTRED: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Compute sum = x + more + extra, and out, its layer norm (centred, with a bias) or RMS norm."""
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
    """Compute the gradient of the sum in one or two precisions, and parts of those of weight, bias and extra."""
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


class _ResidualNorm(torch.autograd.Function):
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
        found = list(vector_gradients(ctx.vectors, parts_PKE))
        dweight, dbias, dextra = found[0], found[1] if centred else None, found[-1] if extra else None
        return dx, None if ctx.low is None else dmore, dextra, dweight, dbias, None, None


def residual_norm(
    x_NE: Tensor,
    more_NE: Tensor | None,
    extra_E: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    low: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return x + more + extra in float32, and its norm in low precision: with a bias a layer norm, else an RMS norm."""
    sums, out = _ResidualNorm.apply(x_NE, more_NE, extra_E, weight, bias, eps, low)
    return x_NE if sums is None else sums, out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        low = low_of(weight, x.dtype)[: len(weight)]
        ctx.save_for_backward(x, low)
        ctx.weight, ctx.bias, ctx.transposed = weight, bias, transposed
        matrix = low if transposed else low.t()
        return x @ matrix if bias is None else torch.addmm(bias.to(x.dtype), x, matrix)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        x, low = ctx.saved_tensors
        dout = dout.to(x.dtype).contiguous()
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dx = dout @ (low.t() if ctx.transposed else low) if needs_x else None
        dweight = weight_gradient(ctx.weight, x, dout, ctx.transposed) if needs_weight else None
        dbias = None
        if needs_bias:
            (dbias,) = vector_gradients([ctx.bias], column_parts(dout))
        return dx, dweight, dbias, None


def linear(x_NE: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return the product with a weight of [outputs, inputs], or of [inputs, outputs] if `transposed`."""
    out: Tensor = _Linear.apply(x_NE, weight, bias, transposed)
    return out


@triton.jit
def column_backward(
    x_NE, bias_E, dout_NE, out_NE, dx_NE, parts_PE, N, E, KIND: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """Compute partial sums of columns. With an activation, write its value and its gradient, and sum the gradient."""
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
    """Return partial sums of columns, [P, 1, E]; with x, of the gradient of `out = gelu(x + bias)`, written to `dx`."""
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


class _GeluProduct(torch.autograd.Function):
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
        (dbias,) = vector_gradients([ctx.bias], column_parts(dout @ low.t(), x, ctx.bias, out, dx))
        if ctx.needs_input_grad[2]:
            dweight = weight_gradient(ctx.weight, out, dout, True)
        return dx, dbias, dweight


def gelu_product(x_NE: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
    """Return gelu(x + bias) weight, keeping only x for the backward pass."""
    out: Tensor = _GeluProduct.apply(x_NE, bias, weight)
    return out


@triton.jit
def rotary(x_NHD, cos_ND, sin_ND, out_NHD, H, sign, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr):
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
    """Rotates queries and keys; the backward pass rotates gradients back."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        return _Rotation.rotate(q, cos, sin, 1.0), _Rotation.rotate(k, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _Rotation.rotate(dq, cos, sin, -1.0), _Rotation.rotate(dk, cos, sin, -1.0), None, None

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
        x = x.contiguous()
        (N, H, D), out = x.shape, torch.empty_like(x)
        rotary[(N, triton.cdiv(H, 16))](
            x, cos, sin, out, H, sign, D=D, BH=16, BD=triton.next_power_of_2(D), num_warps=2
        )
        return out


def rotated(q_NHD: Tensor, k_NKD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> tuple[Tensor, Tensor]:
    q, k = _Rotation.apply(q_NHD, k_NKD, cos_ND, sin_ND)
    return q, k


@triton.jit
def _activated(gate, KIND: tl.constexpr):
    """Return the activation and its derivative."""
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
            dweight = weight_gradient(ctx.weight, _gated(gate, up, ctx.kind), dout, False)
        dinner, dgate, dup = dout @ low, torch.empty_like(gate), torch.empty_like(up)
        grid = (triton.cdiv(gate.numel(), 2048),)
        gate_backward[grid](gate, up, dinner, dgate, dup, gate.numel(), KIND=ctx.kind, B=2048)
        return dgate, dup, dweight, None


def _gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    out = torch.empty_like(gate)
    gate_forward[(triton.cdiv(gate.numel(), 2048),)](gate, up, out, gate.numel(), KIND=kind, B=2048)
    return out


def gated_product(gate: Tensor, up: Tensor, weight: Tensor, kind: str) -> Tensor:
    """Return (activation(gate) * up) weight, keeping only gate and up for the backward pass."""
    out: Tensor = _GatedProduct.apply(gate, up, weight, kind)
    return out
