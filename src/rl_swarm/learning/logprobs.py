"""Log-probabilities of packed completions under a model of a known family, with gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl_swarm.learning.attention import PackedAttention
from rl_swarm.learning.batches import Batch, Shape
from rl_swarm.learning.decoder import Attend, Decoder, Layout, SharedPrompts
from rl_swarm.learning.sequences import token_logprobs

LOGITS_BYTES = 1 << 27  # of logits that exist at the same time
ALIGNED = 64  # tokens


def packed_logprobs(
    decoder: Decoder, batch: Batch, attend: Attend, positions_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """The log-probability of every token learned from and the entropy there, [M], in one pass."""
    hidden_NE = decoder.run(batch.ids_N, positions_N, attend)
    return chunked_logprobs(decoder, hidden_NE.index_select(0, batch.before_M), batch.targets_M, temperature)


def attention_of(decoder: Decoder, shape: Shape) -> tuple[Attend, Tensor]:
    """Attention over a row of this shape, and the positions of its tokens."""
    device = decoder.model.device
    if decoder.fused:
        from rl_swarm.learning.cuda.attention import Segments

        segments = Segments.of(shape).to(device)
        return segments.attention(decoder), segments.positions_N
    if PackedAttention.fits(decoder, shape):
        packed = PackedAttention(decoder, shape)
        return packed, packed.positions_N
    layouts = Layout.of(shape.prompts, device), Layout.of(shape.completions, device)
    attend = SharedPrompts(decoder, *layouts, torch.tensor(shape.rows, device=device))
    return attend, attend.positions()


def chunked_logprobs(
    decoder: Decoder, hidden_ME: Tensor, targets_M: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies without ever holding the logits of all tokens: chunks are computed again
    on the way back when there is more than one."""
    head: Any = decoder.head

    def part(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(head(hidden), targets, temperature)

    width: int = getattr(head, "out_features", 1)
    if decoder.fused and type(head) is torch.nn.Linear and getattr(head, "bias", None) is None:
        from rl_swarm.learning.cuda.fused import word_logprobs

        chunk = LOGITS_BYTES // (2 * width)  # in bfloat16
        chunk = max(1, chunk // ALIGNED * ALIGNED or chunk)  # products of odd sizes take longer
        return word_logprobs(hidden_ME, head.weight, targets_M, temperature, chunk)
    chunk = max(1, LOGITS_BYTES // (4 * width))
    if len(targets_M) <= chunk:
        return part(hidden_ME, targets_M)
    parts = [
        checkpoint(part, hidden, targets, use_reentrant=False)
        for hidden, targets in zip(torch.split(hidden_ME, chunk), torch.split(targets_M, chunk), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
