"""Decoding on a CPU, a step of all sequences at a time, with fused weights in low precision.

Matrix products run in bfloat16, everything between them in float32. Attention reads the keys of a prompt once
for all of its completions. Shapes: P prompts, C completions of each, B = P C sequences of which some may have
left, K key heads, G query heads per key head, D of a head, L prompt length, T tokens written so far.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_swarm.learning.decoder import Layout, attention, causal_mask, rotated
from rl_swarm.learning.weights import Layer, Linear, Norm, Weights


class Steps:
    def __init__(self, weights: Weights, prompts: Sequence[Sequence[int]], count: int, room: int) -> None:
        self.weights, self.decoder, self.count, self.room = weights, weights.decoder, count, room
        device = weights.words.device
        self.prompts = Layout.of([len(prompt) for prompt in prompts], device)
        self.rows = torch.arange(len(prompts) * count, device=device)
        self.whole = True  # whether no sequence has left
        self.written = 0
        lengths_P = torch.tensor(self.prompts.lengths, device=device)
        self.start_B = lengths_P.repeat_interleave(count)
        ragged = len(set(self.prompts.lengths)) > 1
        self.hidden_BL = (~self.prompts.filled_BT)[self.rows // count] if ragged else None
        self.prompt_keys: list[Tensor] = []
        self.prompt_values: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        ids_N = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=weights.dtype == torch.bfloat16):
            hidden_NE = self.decoder.run_layers(ids_N, self.prompts.positions(), self._read)
        ends_PE = hidden_NE[lengths_P.cumsum(0) - 1].float()
        self.logits_BV = self._logits(ends_PE).repeat_interleave(count, 0)

    def extend(self, token_B: Tensor) -> None:
        weights, decoder = self.weights, self.decoder
        position_B = self.start_B + self.written
        hidden_BE = F.embedding(token_B, weights.words).float() * weights.word_scale
        if weights.places is not None:
            hidden_BE = hidden_BE + weights.places[position_B]
        turns = decoder.rotations(hidden_BE, position_B)
        for number, layer in enumerate(weights.layers):
            attended = self._attend(number, layer, self._normed(hidden_BE, layer.before_attention), turns)
            hidden_BE = hidden_BE + self._after(layer.after_attention, product(attended, layer.o))
            inner = product(self._normed(hidden_BE, layer.before_mlp), layer.up)
            if weights.gated:
                gate, up = inner.chunk(2, -1)
                inner = (
                    F.silu(gate) if weights.activation == "silu" else F.gelu(gate, approximate="tanh")
                ) * up
            else:
                inner = F.gelu(inner, approximate="tanh")
            hidden_BE = hidden_BE + self._after(layer.after_mlp, product(inner, layer.down))
        self.written += 1
        self.logits_BV = self._logits(hidden_BE)

    def keep(self, rows: Tensor) -> None:
        """Only these sequences go on."""
        for caches in (self.keys, self.values):
            for number, cache in enumerate(caches):
                smaller = cache.new_empty(len(rows), *cache.shape[1:])
                smaller[:, :, : self.written] = cache[rows, :, : self.written]
                caches[number] = smaller
        self.rows, self.start_B, self.whole = self.rows[rows], self.start_B[rows], False
        self.hidden_BL = None if self.hidden_BL is None else self.hidden_BL[rows]

    def _read(self, layer: int, q_N: Tensor, k_N: Tensor, v_N: Tensor) -> Tensor:
        """Attention inside the prompts, which also keeps their keys and values."""
        decoder, layout = self.decoder, self.prompts
        keys, values = layout.spread(k_N.float()), layout.spread(v_N.float())
        self.prompt_keys.append(keys.contiguous())
        self.prompt_values.append(values.contiguous())
        for caches in (self.keys, self.values):
            caches.append(keys.new_empty(len(self.rows), decoder.key_heads, self.room, decoder.head_size))
        mask = causal_mask(layout.filled_BT, decoder.windows[layer])
        return layout.pack(attention(layout.spread(q_N.float()), keys, values, mask, decoder.scale))

    def _attend(
        self, number: int, layer: Layer, x_BE: Tensor, turns: dict[str, tuple[Tensor, Tensor]]
    ) -> Tensor:
        decoder, batch = self.decoder, len(x_BE)
        heads, key_heads, width = decoder.heads, decoder.key_heads, decoder.head_size
        qkv = product(x_BE, layer.qkv).float().view(batch, heads + 2 * key_heads, width)
        qk, values = qkv[:, : heads + key_heads], qkv[:, heads + key_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            scale = torch.cat([layer.q_norm.expand(heads, -1), layer.k_norm.expand(key_heads, -1)])
            qk = F.rms_norm(qk, (width,), None, self.weights.eps) * scale
        turn = turns.get(decoder.kinds[number])
        if turn is not None:
            qk = rotated(qk, *turn)
        self.keys[number][:, :, self.written] = qk[:, heads:]
        self.values[number][:, :, self.written] = values
        q_BKGD = qk[:, :heads].reshape(batch, key_heads, -1, width) * decoder.scale
        keys, own = self.keys[number][:, :, : self.written + 1], self.values[number][:, :, : self.written + 1]
        scores = torch.cat([self._over_prompts(q_BKGD, self.prompt_keys[number].mT), q_BKGD @ keys.mT], -1)
        hidden = self._hidden(number)
        if hidden is not None:
            scores.masked_fill_(hidden[:, None, None], -torch.inf)
        weights = scores.softmax(-1)
        length = self.prompt_keys[number].shape[2]
        out = (
            self._over_prompts(weights[..., :length], self.prompt_values[number])
            + weights[..., length:] @ own
        )
        return out.reshape(batch, heads * width)

    def _over_prompts(self, x_BKGN: Tensor, y_PKNM: Tensor) -> Tensor:
        """x @ y, with the y of its prompt for every sequence."""
        (_, key_heads, group, inner), (prompts, _, _, outer) = x_BKGN.shape, y_PKNM.shape
        if not self.whole:
            x_BKGN = x_BKGN.new_zeros(prompts * self.count, *x_BKGN.shape[1:]).index_copy_(
                0, self.rows, x_BKGN
            )
        x = x_BKGN.view(prompts, self.count, key_heads, group, inner).transpose(1, 2)
        out = x.reshape(prompts, key_heads, self.count * group, inner) @ y_PKNM
        out = out.view(prompts, key_heads, self.count, group, outer).transpose(1, 2)
        out = out.reshape(-1, key_heads, group, outer)
        return out if self.whole else out[self.rows]

    def _hidden(self, number: int) -> Tensor | None:
        """Which keys a sequence does not see, [B, L + T + 1]: the padding of prompts, and what its window has left."""
        window, length = self.decoder.windows[number], self.prompts.width
        total = length + self.written + 1
        if window is None or total <= window:
            window = None
            if self.hidden_BL is None:
                return None
        hidden = torch.zeros(len(self.rows), total, dtype=torch.bool, device=self.rows.device)
        if self.hidden_BL is not None:
            hidden[:, :length] = self.hidden_BL
        if window is not None:
            place_B1 = (self.start_B + self.written)[:, None]
            index = torch.arange(total, device=self.rows.device)
            key_place = torch.where(index < length, index, index - length + self.start_B[:, None])
            hidden |= place_B1 - key_place >= window
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        return product(self._normed(hidden, self.weights.last_norm), self.weights.head).float()

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Before a product; None is an RMS norm whose scale the product contains."""
        if norm is None:
            return F.rms_norm(x, x.shape[-1:], None, self.weights.eps)
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, self.weights.eps)

    def _after(self, norm: Norm | None, x: Tensor) -> Tensor:
        return x if norm is None else F.rms_norm(x.float(), x.shape[-1:], norm.weight, self.weights.eps)


def product(x: Tensor, linear: Linear) -> Tensor:
    out = F.linear(x.to(linear.weight.dtype), linear.weight)
    return out if linear.bias is None else out + linear.bias
