"""Runs any model of transformers over prompts and completions, each prompt once where its cache allows it.

The known families have a faster way (`decoder`). The completions of a group share their prompt. It is
computed once, every completion uses its keys and values, and gradients flow back through them: the same numbers as
full sequences, without the repetition. Prompts are padded on the left and completions on the right, so no padding
separates them. The state of linear attention and of state-space layers cannot be shared like that, so models with
such layers run over whole sequences. Shapes: P prompts, B completions, L prompt length, T completion length,
V words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_swarm.learning.support import FAMILIES

Model = Any  # a transformers causal language model: the library is not typed


@dataclass
class Prefix:
    """Holds the cache of prompts after their forward pass."""

    cache: Any
    mask_BL: Tensor
    next_position_B: Tensor
    logits_BV: Tensor  # of the first token of each completion

    def select(self, rows: Tensor) -> "Prefix":
        """Return the prefix of a batch whose i-th row continues row `rows[i]`; it takes over the cache."""
        self.cache.batch_select_indices(rows)
        return Prefix(self.cache, self.mask_BL[rows], self.next_position_B[rows], self.logits_BV[rows])

    def extended(self, model: Model, token_B: Tensor) -> "Prefix":
        """Return the prefix with one more token per sequence."""
        mask_BL = torch.cat([self.mask_BL, self.mask_BL.new_ones(len(token_B), 1)], 1)
        output = model(
            input_ids=token_B[:, None],
            attention_mask=mask_BL,
            position_ids=self.next_position_B[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        return Prefix(output.past_key_values, mask_BL, self.next_position_B + 1, output.logits[:, -1])


def run_prompts(model: Model, prompts: Sequence[Sequence[int]], pad: int) -> Prefix:
    device = model.device
    length = max(map(len, prompts))
    ids_PL = torch.tensor([[pad] * (length - len(p)) + list(p) for p in prompts], device=device)
    mask_PL = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts], device=device)
    positions_PL = (mask_PL.cumsum(1) - 1).clamp(min=0)
    output = model(
        input_ids=ids_PL,
        attention_mask=mask_PL,
        position_ids=positions_PL,
        past_key_values=_new_cache(model),
        use_cache=True,
        logits_to_keep=1,
    )
    return Prefix(output.past_key_values, mask_PL, positions_PL[:, -1] + 1, output.logits[:, -1])


def _new_cache(model: Model) -> Any:
    """Make the cache of a known family, which keeps all keys; None leaves the choice to the model.

    Left alone, a model may take windows from fields that its class ignores, and drop keys that it attends to.
    """
    if model.config.model_type not in FAMILIES:
        return None
    from transformers import DynamicCache

    return DynamicCache()


def whole_logits(
    model: Model, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], pad: int
) -> Tensor:
    """Return the logits of every completion token, [B, T, V], from whole sequences padded on the right."""
    rows = [[*prompt, *ids[:-1]] for prompt, ids in zip(prompts, completions, strict=True)]
    ids_BN = pad_right(rows, pad, torch.long, model.device)
    mask_BN = pad_right([[1] * len(row) for row in rows], 0, torch.long, model.device)
    logits_BNV = model(input_ids=ids_BN, attention_mask=mask_BN, use_cache=False).logits
    first_B1 = torch.tensor([[len(prompt) - 1] for prompt in prompts], device=model.device)
    places_BT = first_B1 + torch.arange(max(map(len, completions)), device=model.device)
    return torch.cat(
        [
            row_NV[places_T.clamp(max=len(row_NV) - 1)][None]
            for row_NV, places_T in zip(logits_BNV, places_BT, strict=True)
        ]
    )


def completion_logits(model: Model, prefix: Prefix, ids_BT: Tensor) -> Tensor:
    """Return the logits of every completion token, [B, T, V], from the cache of its prompt."""
    first_B1V = prefix.logits_BV[:, None]
    if ids_BT.shape[1] == 1:
        return first_B1V
    rest = ids_BT.shape[1] - 1
    mask = torch.cat([prefix.mask_BL, prefix.mask_BL.new_ones(len(ids_BT), rest)], 1)
    positions = prefix.next_position_B[:, None] + torch.arange(rest, device=ids_BT.device)
    output = model(
        input_ids=ids_BT[:, :-1],
        attention_mask=mask,
        position_ids=positions,
        past_key_values=prefix.cache,
        use_cache=True,
    )
    return torch.cat([first_B1V, output.logits], 1)


def pad_right(rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    length = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows], dtype=dtype, device=device)
