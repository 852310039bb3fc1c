"""GRPO as pure functions: advantage, ratio, loss. Shapes: B sequences, T tokens.

Group relative policy optimisation (arXiv:2402.03300) with the token-level mean and the asymmetric
clip of DAPO (arXiv:2503.14476). Groups in which every reward is equal never get here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def advantages(rewards: Sequence[float], normalize: bool) -> list[float]:
    """How much better than its group each completion did, optionally in standard deviations."""
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize:
        return centred
    deviation = (sum(x * x for x in centred) / (len(rewards) - 1)) ** 0.5
    return [x / (deviation + 1e-6) for x in centred]


def clipped_loss(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_B: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """The loss of every token, and where the clip took its gradient away."""
    ratio_BT = torch.exp(logprobs_BT - old_logprobs_BT)
    advantages_BT = advantages_B[:, None]
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    loss_BT = -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    acts_BT = (clipped_BT * advantages_BT) < (ratio_BT * advantages_BT)
    return loss_BT, acts_BT


def capped_loss(logprobs_BT: Tensor, claimed_BT: Tensor, advantages_B: Tensor, cap: float) -> Tensor:
    """The loss of tokens whose behaviour log-probabilities a stranger claims.

    A truncated importance weight, held constant: whatever is claimed, a token counts for at most `cap`.
    """
    weight_BT = torch.exp((logprobs_BT - claimed_BT).detach().clamp(max=10)).clamp(max=cap)
    return -weight_BT * advantages_B[:, None] * torch.exp(logprobs_BT - logprobs_BT.detach())


def kl_k3(logprobs_BT: Tensor, reference_BT: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(policy, reference) per token: unbiased and never negative."""
    difference_BT = reference_BT - logprobs_BT
    return torch.exp(difference_BT) - difference_BT - 1


def token_mean(values_BT: Tensor, mask_BT: Tensor, tokens: int) -> Tensor:
    """The sum over the masked tokens as a share of all tokens of the update, so that micro-batches add up."""
    return (values_BT * mask_BT).sum() / max(tokens, 1)
