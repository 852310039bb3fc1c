"""Decodes on a CPU with fused weights in low precision, one step for all sequences.

Matrix products run in bfloat16, everything between them in float32. Attention reads the keys of a prompt once
for all of its completions. Shapes: P prompts, C completions of each, B = P C sequences (fewer when some have ended),
K key heads, G query heads per key head, D of a head, L prompt length, T tokens written so far.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_swarm.learning.decoder import Layout, attention, causal_mask
from rl_swarm.learning.weights import Weights


class CpuContinuation:
    def __init__(self, weights: Weights, prompts: Sequence[Sequence[int]], count: int, room: int) -> None:
        self.weights, self.decoder, self.count, self.room = weights, weights.decoder, count, room
        device = weights.embeddings.device
        self.prompts = Layout.of([len(prompt) for prompt in prompts], device)
        self.rows = torch.arange(len(prompts) * count, device=device)
        self.complete = True  # whether no sequence was dropped
        self.written = 0
        lengths_P = torch.tensor(self.prompts.lengths, device=device)
        self.start_B = lengths_P.repeat_interleave(count)
        ragged = len(set(self.prompts.lengths)) > 1
        self.masked_BL = (~self.prompts.filled_BT)[self.rows // count] if ragged else None
        self.prompt_keys: list[Tensor] = []
        self.prompt_values: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        ids_N = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        hidden_NE = weights.run_layers(ids_N, self.prompts.positions(), self._prefill)
        ends_PE = hidden_NE[lengths_P.cumsum(0) - 1]
        self.logits_BV = weights.logits(ends_PE).repeat_interleave(count, 0)

    def extend(self, token_B: Tensor) -> None:
        hidden_BE = self.weights.run_layers(token_B, self.start_B + self.written, self._attend)
        self.written += 1
        self.logits_BV = self.weights.logits(hidden_BE)

    def keep(self, rows: Tensor) -> None:
        """Drop all sequences but these."""
        for caches in (self.keys, self.values):
            for number, cache in enumerate(caches):
                smaller = cache.new_empty(len(rows), *cache.shape[1:])
                smaller[:, :, : self.written] = cache[rows, :, : self.written]
                caches[number] = smaller
        self.rows, self.start_B, self.complete = self.rows[rows], self.start_B[rows], False
        self.masked_BL = None if self.masked_BL is None else self.masked_BL[rows]

    def _prefill(self, layer: int, q_N: Tensor, k_N: Tensor, v_N: Tensor) -> Tensor:
        """Compute attention inside the prompts, and fill the cache."""
        decoder, layout = self.decoder, self.prompts
        keys, values = layout.spread(k_N), layout.spread(v_N)
        self.prompt_keys.append(keys.contiguous())
        self.prompt_values.append(values.contiguous())
        for caches in (self.keys, self.values):
            caches.append(keys.new_empty(len(self.rows), decoder.key_heads, self.room, decoder.head_size))
        mask = causal_mask(layout.filled_BT, decoder.windows[layer])
        return layout.pack(attention(layout.spread(q_N), keys, values, mask, decoder.scale))

    def _attend(self, number: int, q_B: Tensor, k_B: Tensor, v_B: Tensor) -> Tensor:
        """Compute attention of one new token per sequence over its prompt and its completion."""
        decoder, batch = self.decoder, len(q_B)
        self.keys[number][:, :, self.written] = k_B
        self.values[number][:, :, self.written] = v_B
        q_BKGD = q_B.reshape(batch, decoder.key_heads, -1, decoder.head_size) * decoder.scale
        keys, own = self.keys[number][:, :, : self.written + 1], self.values[number][:, :, : self.written + 1]
        scores = torch.cat([self._over_prompts(q_BKGD, self.prompt_keys[number].mT), q_BKGD @ keys.mT], -1)
        masked = self._mask(number)
        if masked is not None:
            scores.masked_fill_(masked[:, None, None], -torch.inf)
        weights = scores.softmax(-1)
        length = self.prompt_keys[number].shape[2]
        out = self._over_prompts(weights[..., :length], self.prompt_values[number]) + weights[..., length:] @ own
        return out.reshape(batch, -1)

    def _over_prompts(self, x_BKGN: Tensor, y_PKNM: Tensor) -> Tensor:
        """Return x @ y, where every sequence takes the y of its prompt."""
        (_, key_heads, group, inner), (prompts, _, _, outer) = x_BKGN.shape, y_PKNM.shape
        if not self.complete:
            x_BKGN = x_BKGN.new_zeros(prompts * self.count, *x_BKGN.shape[1:]).index_copy_(0, self.rows, x_BKGN)
        x = x_BKGN.view(prompts, self.count, key_heads, group, inner).transpose(1, 2)
        out = x.reshape(prompts, key_heads, self.count * group, inner) @ y_PKNM
        out = out.view(prompts, key_heads, self.count, group, outer).transpose(1, 2)
        out = out.reshape(-1, key_heads, group, outer)
        return out if self.complete else out[self.rows]

    def _mask(self, number: int) -> Tensor | None:
        """Return the mask of hidden keys, [B, L + T + 1]: padding of prompts, and keys outside the window."""
        window, length = self.decoder.windows[number], self.prompts.width
        total = length + self.written + 1
        if window is None or total <= window:
            window = None
            if self.masked_BL is None:
                return None
        masked = torch.zeros(len(self.rows), total, dtype=torch.bool, device=self.rows.device)
        if self.masked_BL is not None:
            masked[:, :length] = self.masked_BL
        if window is not None:
            place_B1 = (self.start_B + self.written)[:, None]
            index = torch.arange(total, device=self.rows.device)
            key_place = torch.where(index < length, index, index - length + self.start_B[:, None])
            masked |= place_B1 - key_place >= window
        return masked
