"""Computes log-probabilities of packed completions under a model of a known family, with gradients.

The logits of all tokens never exist at the same time: the head runs forward and backward a chunk of tokens at a time.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rl_swarm.learning.batches import Batch, BatchShape
from rl_swarm.learning.cpu.attention import PackedAttention
from rl_swarm.learning.decoder import Attend, Decoder, Layout, SharedPrompts
from rl_swarm.learning.devices import low_precision
from rl_swarm.learning.memory import LOGITS
from rl_swarm.learning.sequences import token_logprobs

# (some tokens, their log-probabilities, their entropies) -> loss
Loss = Callable[[slice, Tensor, Tensor], Tensor]

ALIGNED = 64  # tokens: matrix products of odd sizes are slower


def packed_logprobs(
    decoder: Decoder, batch: Batch, attend: Attend, positions_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of every target and the entropy at its position, [M], without gradients."""
    with torch.no_grad(), precision(decoder):
        states_ME = decoder.run(batch.ids_N, positions_N, attend).index_select(0, batch.before_M)
        parts = [
            head_logprobs(decoder, states_ME[here], batch.targets_M[here], temperature)
            for here in chunks(decoder, len(states_ME))
        ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def add_gradients(
    decoder: Decoder, batch: Batch, attend: Attend, positions_N: Tensor, temperature: float, loss_of: Loss
) -> None:
    """Add the gradients of a loss that is a sum over tokens.

    The head runs forward and backward chunk by chunk; then one backward pass goes through the layers.
    """
    with precision(decoder):
        states_ME = decoder.run(batch.ids_N, positions_N, attend).index_select(0, batch.before_M)
    leaves = []
    for here in chunks(decoder, len(states_ME)):
        leaf = states_ME[here].detach().requires_grad_()
        with precision(decoder):
            found = head_logprobs(decoder, leaf, batch.targets_M[here], temperature)
        loss_of(here, *found).backward()  # type: ignore[no-untyped-call]
        leaves.append(leaf)
    states_ME.backward(torch.cat([leaf.grad for leaf in leaves]))  # type: ignore[no-untyped-call, misc]


def precision(decoder: Decoder) -> AbstractContextManager[object]:
    return nullcontext() if decoder.exact else low_precision(decoder.model)


def attention_of(decoder: Decoder, shape: BatchShape) -> tuple[Attend, Tensor]:
    """Return attention over a row of this shape, and the positions of its tokens."""
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


def chunks(decoder: Decoder, tokens: int) -> Iterator[slice]:
    """Split tokens into as few parts of about equal size as the memory for their logits allows."""
    width: int = getattr(decoder.head, "out_features", 1)
    most = max(1, LOGITS // ((1 if decoder.fused else 4) * width))
    size = -(-tokens // max(1, -(-tokens // most)))
    size = min(most, -(-size // ALIGNED) * ALIGNED)
    return (slice(start, start + size) for start in range(0, max(1, tokens), max(1, size)))


def head_logprobs(decoder: Decoder, states_ME: Tensor, targets_M: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    head: Any = decoder.head
    if decoder.fused and type(head) is torch.nn.Linear and getattr(head, "bias", None) is None:
        from rl_swarm.learning.cuda.vocabulary import target_logprobs

        return target_logprobs(states_ME, head.weight, targets_M, temperature)
    return token_logprobs(head(states_ME), targets_M, temperature)
