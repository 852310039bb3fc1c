"""Computes GRPO as pure functions: advantage, ratio, loss. Shapes: M tokens, each with the advantage of its completion.

Group relative policy optimisation (arXiv:2402.03300) with the token-level mean and the asymmetric
clip of DAPO (arXiv:2503.14476). `token_losses` in `trainer.py` weights the tokens, and adds up the metrics.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def advantages(rewards: Sequence[float], normalize: bool) -> list[float]:
    """Return each reward minus the group's mean, optionally in standard deviations."""
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize:
        return centred
    deviation = (sum(x * x for x in centred) / max(1, len(rewards) - 1)) ** 0.5
    return [x / (deviation + 1e-6) for x in centred]


def clipped_loss(
    logprobs_M: Tensor, old_logprobs_M: Tensor, advantages_M: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of every token, and whether clipping removed its gradient."""
    ratio_M = torch.exp(logprobs_M - old_logprobs_M)
    clipped_M = ratio_M.clamp(1 - clip_low, 1 + clip_high)
    loss_M = -torch.minimum(ratio_M * advantages_M, clipped_M * advantages_M)
    gradient_clipped_M = (clipped_M * advantages_M) < (ratio_M * advantages_M)
    return loss_M, gradient_clipped_M


def token_loss(
    logprobs_M: Tensor,
    sampled_M: Tensor,
    own_M: Tensor,
    claimed_M: Tensor,
    advantages_M: Tensor,
    reference_M: Tensor | None,
    clip: tuple[float, float],
    kl_weight: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of every token, whether clipping acts on it, and its KL estimate.

    `own_M` marks tokens that this node sampled: their ratio to the sampler is clipped. `claimed_M` marks tokens of
    peers that come with log-probabilities: their ratio is capped. Other tokens of peers have ratio 1: REINFORCE.
    """
    # Claimed log-probabilities stay out of the ratio: an overflow there would make the whole gradient infinite.
    behaviour_M = torch.where(own_M, sampled_M, logprobs_M.detach())
    loss_M, clip_M = clipped_loss(logprobs_M, behaviour_M, advantages_M, *clip)
    capped_M = capped_loss(logprobs_M, sampled_M, advantages_M, 1 + clip[1])
    loss_M = torch.where(claimed_M, capped_M, loss_M)
    kl_M = torch.zeros_like(loss_M).detach() if reference_M is None else kl_k3(logprobs_M, reference_M)
    if reference_M is not None:
        loss_M = loss_M + kl_weight * kl_M
    return loss_M, clip_M, kl_M


def capped_loss(logprobs_M: Tensor, claimed_M: Tensor, advantages_M: Tensor, cap: float) -> Tensor:
    """Return the loss of tokens whose behaviour log-probabilities a peer claims.

    The importance weight is truncated and held constant: whatever is claimed, a token counts for at most `cap`.
    """
    weight_M = torch.exp((logprobs_M - claimed_M).detach().clamp(max=10)).clamp(max=cap)
    return -weight_M * advantages_M * torch.exp(logprobs_M - logprobs_M.detach())


def kl_k3(logprobs_M: Tensor, reference_M: Tensor) -> Tensor:
    """Return Schulman's k3 estimate of KL(policy, reference) per token: unbiased and never negative."""
    difference_M = reference_M - logprobs_M
    return torch.exp(difference_M) - difference_M - 1
