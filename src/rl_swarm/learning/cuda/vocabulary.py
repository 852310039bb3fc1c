"""Computes embeddings, and log-probabilities of target tokens without keeping their softmax.

Shapes: N packed tokens, E hidden, V words.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_swarm.learning.cuda.products import low_of, weight_gradient


class _Embedding(torch.autograd.Function):
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
        if ctx.padding is not None:  # padding is not trained
            dout = dout.masked_fill((ids == ctx.padding)[:, None], 0.0)
        sums.index_add_(0, ids, dout.to(sums.dtype))
        return None, sums if kept is None else None, None


def embedded(ids_N: Tensor, weight_VE: Tensor, padding: int | None) -> Tensor:
    """Look up embeddings; the backward pass touches only these rows."""
    out: Tensor = _Embedding.apply(ids_N, weight_VE, padding)
    return out


@triton.jit
def logprob_forward(logits_NV, targets_N, logprobs_N, entropy_N, lse_N, V, width, inverse_temperature, B: tl.constexpr):
    """Compute log-probability of the target and entropy of a row of logits in one pass."""
    token = tl.program_id(0).to(tl.int64)
    logits_NV += token * width
    top = -1e30
    total = 0.0
    moment = 0.0  # of the logits themselves, weighted
    for start in range(0, V, B):
        words = start + tl.arange(0, B)
        raw = tl.load(logits_NV + words, mask=words < width, other=0.0).to(tl.float32)
        logits = tl.where(words < V, raw * inverse_temperature, -float("inf"))
        new_top = tl.maximum(top, tl.max(logits, 0))
        weights = tl.exp(logits - new_top)
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(weights, 0)
        moment = moment * shrink + tl.sum(tl.where(words < V, weights * logits, 0.0), 0)
        top = new_top
    lse = top + tl.log(total)
    target = tl.load(logits_NV + tl.load(targets_N + token)).to(tl.float32) * inverse_temperature
    tl.store(logprobs_N + token, target - lse)
    tl.store(entropy_N + token, lse - moment / total)
    tl.store(lse_N + token, lse)


@triton.jit
def logprob_backward(logits_NV, targets_N, lse_N, dlogprobs_N, V, width, inverse_temperature, B: tl.constexpr):
    """Compute the gradient of the logits in place."""
    token = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * B + tl.arange(0, B)
    place = logits_NV + token * width + words
    raw = tl.load(place, mask=words < width, other=0.0).to(tl.float32)
    weights = tl.where(words < V, tl.exp(raw * inverse_temperature - tl.load(lse_N + token)), 0.0)
    is_target = (words == tl.load(targets_N + token)).to(tl.float32)
    tl.store(place, tl.load(dlogprobs_N + token) * inverse_temperature * (is_target - weights), mask=words < width)


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor, inverse_temperature: float
    ) -> tuple[Tensor, Tensor]:
        weight, V = low_of(weight_VE, hidden_NE.dtype), len(weight_VE)
        logits = hidden_NE @ weight.t()
        found = [hidden_NE.new_empty(len(hidden_NE), dtype=torch.float32) for _ in range(3)]
        logprob_forward[(len(logits),)](
            logits, targets_N, *found, V, len(weight), inverse_temperature, B=4096, num_warps=8
        )
        logprobs, entropy, lse = found
        ctx.save_for_backward(hidden_NE, targets_N, lse)
        ctx.logits, ctx.weight, ctx.inverse_temperature = logits, weight_VE, inverse_temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, dlogprobs_N: Tensor, _: Tensor) -> Any:
        (hidden_NE, targets_N, lse), weight_VE = ctx.saved_tensors, ctx.weight
        weight, V, logits = low_of(weight_VE, hidden_NE.dtype), len(weight_VE), ctx.logits
        del ctx.logits  # overwritten, and the memory is for the next chunk
        logprob_backward[(len(logits), triton.cdiv(V, 4096))](
            logits, targets_N, lse, dlogprobs_N.contiguous(), V, len(weight), ctx.inverse_temperature, B=4096
        )
        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = weight_gradient(weight_VE, hidden_NE, logits[:, :V], False)
        return logits @ weight, dweight, None, None


def target_logprobs(
    hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of every target and the entropy; logits are kept until the backward pass."""
    logprobs, entropy = _TargetLogprobs.apply(hidden_NE, weight_VE, targets_N, 1 / temperature)
    return logprobs, entropy
