"""What training does on a GPU between matrix products, as Triton kernels with their gradients.

The log-probabilities of tokens come from logits that exist only a chunk at a time, on the way there and again
on the way back. Shapes: N packed tokens, H query heads, K key heads, D of a head, E hidden, V words.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ALIGNED = 64  # words


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
        turn[(N, triton.cdiv(H, 16))](
            x, cos, sin, out, H, sign, D=D, BH=16, BD=triton.next_power_of_2(D), num_warps=2
        )
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
        ctx.save_for_backward(gate, up, weight)
        ctx.kind = kind
        return _gated(gate, up, kind) @ weight.to(gate.dtype).t()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        gate, up, weight = ctx.saved_tensors
        dout = dout.to(gate.dtype)
        dweight = (
            (dout.t() @ _gated(gate, up, ctx.kind)).to(weight.dtype) if ctx.needs_input_grad[2] else None
        )
        dinner, dgate, dup = dout @ weight.to(gate.dtype), torch.empty_like(gate), torch.empty_like(up)
        grid = (triton.cdiv(gate.numel(), 2048),)
        gate_backward[grid](gate, up, dinner, dgate, dup, gate.numel(), KIND=ctx.kind, B=2048)
        return dgate, dup, dweight, None


def _gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    out = torch.empty_like(gate)
    gate_forward[(triton.cdiv(gate.numel(), 2048),)](gate, up, out, gate.numel(), KIND=kind, B=2048)
    return out


def gated_product(gate: Tensor, up: Tensor, weight: Tensor, kind: str) -> Tensor:
    """(activation(gate) * up) weight, keeping only gate and up for the way back."""
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


def aligned(weight_VE: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy with rows of zeros at its end: products with an odd number of words take several times as long."""
    words, width = weight_VE.shape
    if words % ALIGNED == 0:
        return weight_VE.to(dtype)
    copy = weight_VE.new_zeros(-(-words // ALIGNED) * ALIGNED, width, dtype=dtype)
    copy[:words] = weight_VE
    return copy


def add_product(sums: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds a product in low precision to sums in float32."""
    if sums.device.type == "cuda":
        torch.ops.aten.addmm.dtype_out(sums, left, right, torch.float32, out=sums)
    else:
        sums += left @ right


class _WordLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor, heat: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        weight, V = aligned(weight_VE, hidden_NE.dtype), len(weight_VE)
        logprobs, entropy, lse = (hidden_NE.new_empty(len(hidden_NE), dtype=torch.float32) for _ in range(3))
        for start in range(0, len(hidden_NE), chunk):
            here = slice(start, start + chunk)
            logits = hidden_NE[here] @ weight.t()
            found = (logprobs[here], entropy[here], lse[here])
            word_forward[(len(logits),)](
                logits, targets_N[here], *found, V, len(weight), heat, B=4096, num_warps=8
            )
        ctx.save_for_backward(hidden_NE, weight_VE, targets_N, lse)
        ctx.heat, ctx.chunk = heat, chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, given_N: Tensor, _: Tensor) -> Any:
        hidden_NE, weight_VE, targets_N, lse = ctx.saved_tensors
        weight, V = aligned(weight_VE, hidden_NE.dtype), len(weight_VE)
        given_N = given_N.contiguous()
        dhidden, dweight = torch.empty_like(hidden_NE), torch.zeros_like(weight_VE)
        for start in range(0, len(hidden_NE), ctx.chunk):
            here = slice(start, start + ctx.chunk)
            logits = hidden_NE[here] @ weight.t()
            word_backward[(len(logits), triton.cdiv(V, 4096))](
                logits, targets_N[here], lse[here], given_N[here], V, len(weight), ctx.heat, B=4096
            )
            dhidden[here] = logits @ weight
            add_product(dweight, logits[:, :V].t(), hidden_NE[here])
        return dhidden, dweight, None, None, None


def word_logprobs(
    hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor, temperature: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """The log-probability of every target and the entropy there, `chunk` tokens at a time."""
    logprobs, entropy = _WordLogprobs.apply(hidden_NE, weight_VE, targets_N, 1 / temperature, chunk)
    return logprobs, entropy
