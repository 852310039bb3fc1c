"""Runs a transformers model on packed tokens, with our own attention around its own layers: the fast path.

All tokens of a batch, prompts and completions, are end to end in one row without padding. So matrix products, nearly
all of the work, cost what the tokens cost. Projections are the model's own modules, called one by one, so adapters on
them take part.

Shapes: N packed tokens, P prompts, B completions, L prompt length, T completion length, H heads, D of a head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl_swarm.learning import support
from rl_swarm.learning.support import LLAMA_LIKE

# (layer, queries [N, H, D], keys, values) -> attended [N, H * D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# The residual stream is the sum of these; the last is a bias, the same for every token.
Residual = tuple[Tensor, Tensor | None, Tensor | None]


class Decoder:
    """Runs a model of a known family on packed tokens.

    With `fused`, everything between the matrix products runs in the kernels of `cuda`. With `checkpointed`, the
    activations of a layer are recomputed in the backward pass (activation checkpointing).
    """

    exact = False  # whether matrix products stay in float32 where bfloat16 is faster

    def __init__(self, model: Any, fused: bool | None = None, checkpointed: bool = False) -> None:
        self.fused, self.checkpointed = has_kernels(model) if fused is None else fused, checkpointed
        config = model.config
        self.model, self.family = model, config.model_type
        self.head: Callable[[Tensor], Tensor] = model.get_output_embeddings()
        if self.family == "gpt2":
            self.body, self.layers = model.transformer, model.transformer.h
            self.heads = config.num_attention_heads
            self.key_heads, self.head_size = self.heads, config.hidden_size // self.heads
            self.last_norm = self.body.ln_f
        else:
            self.body, self.layers = model.model, model.model.layers
            self.heads = config.num_attention_heads
            self.key_heads = config.num_key_value_heads
            self.head_size = getattr(config, "head_dim", None) or config.hidden_size // self.heads
            self.last_norm = self.body.norm
        self.known_activation = support.plain_activation(config)
        self.kinds = support.layer_kinds(config)
        self.windows = [config.sliding_window if kind == "sliding_attention" else None for kind in self.kinds]
        self.scale: float = config.query_pre_attn_scalar**-0.5 if self.family == "gemma3_text" else self.head_size**-0.5

    @staticmethod
    def supports(model: Any) -> bool:
        """Return whether the fast path computes what this model computes."""
        return support.refusal(model) is None

    def run(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Return the hidden state of every token after the last norm.

        Between layers the residual stream stays unsummed, so that the next norm adds it up as it reads it.
        """
        run_layer = {"gpt2": self._gpt2_layer, "gemma3_text": self._gemma_layer}.get(self.family, self._llama_layer)
        residual: Residual
        if self.family == "gpt2":
            residual = self._embedded(self.body.wte, ids_N), self._embedded(self.body.wpe, positions_N), None
        else:
            residual = self._embedded(self.body.embed_tokens, ids_N), None, None
        rotations = self.rotations(residual[0], positions_N)
        for number, layer in enumerate(self.layers):
            given = (layer, residual, number, rotations.get(self.kinds[number]), attend)
            residual = checkpoint(run_layer, *given, use_reentrant=False) if self.checkpointed else run_layer(*given)
        return self._residual_norm(self.last_norm, residual)[1]

    def rotations(self, hidden: Tensor, positions_N: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return cosines and sines of the positions, [N, 1, D], for every kind of layer."""
        if self.family == "gpt2":
            return {}
        rotary = self.body.rotary_emb
        by_kind = {}
        for kind in set(self.kinds):
            extra = (kind,) if self.family == "gemma3_text" else ()
            cos, sin = rotary(hidden, positions_N[None], *extra)
            by_kind[kind] = (cos[0][:, None], sin[0][:, None])
        return by_kind

    def _norm(self, norm: Any, x: Tensor) -> Tensor:
        """Apply a norm; its result has the precision of the next matrix product."""
        if self.family == "gpt2":
            y: Tensor = norm(x)
        elif self.family == "gemma3_text":
            y = F.rms_norm(x.float(), x.shape[-1:], 1 + norm.weight, norm.eps)
        else:
            y = F.rms_norm(x.float(), x.shape[-1:], norm.weight, norm.variance_epsilon)
        kind = x.device.type
        return y.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else y

    def _residual_norm(self, norm: Any, residual: Residual) -> tuple[Tensor, Tensor]:
        """Return the summed residual stream and its norm."""
        hidden, more, _ = residual
        if self.fused:
            from rl_swarm.learning.cuda import fused

            kind = hidden.device.type
            low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
            if self.family == "gpt2":
                return fused.residual_norm(*residual, norm.weight, norm.bias, norm.eps, low)
            gemma = self.family == "gemma3_text"
            weight, eps = (1 + norm.weight, norm.eps) if gemma else (norm.weight, norm.variance_epsilon)
            return fused.residual_norm(*residual, weight, None, eps, low)
        hidden = hidden if more is None else hidden + more
        return hidden, self._norm(norm, hidden)

    def _embedded(self, module: Any, ids_N: Tensor) -> Tensor:
        if self.fused and type(module) is torch.nn.Embedding:
            from rl_swarm.learning.cuda import vocabulary

            return vocabulary.embedded(ids_N, module.weight, module.padding_idx)
        out: Tensor = module(ids_N)
        return out

    def _linear(self, module: Any, x: Tensor) -> Tensor:
        """Apply a linear module; a plain one has a faster backward pass in the kernels."""
        if self.fused and (is_transposed(module) or type(module) is torch.nn.Linear):
            from rl_swarm.learning.cuda import fused

            return fused.linear(x, module.weight, module.bias, is_transposed(module))
        out: Tensor = module(x)
        return out

    def _branch(self, hidden: Tensor, module: Any, x: Tensor) -> Residual:
        """Return the residual stream and the module's product, which the next norm adds up."""
        if self.fused and is_transposed(module):
            from rl_swarm.learning.cuda import fused

            return hidden, fused.linear(x, module.weight, None, True), module.bias
        return hidden, self._linear(module, x), None

    def _projected(self, attention: Any, x: Tensor, rotation: Any) -> tuple[Tensor, Tensor, Tensor]:
        shape = (len(x), -1, self.head_size)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (self._linear(projection, x).view(shape) for projection in projections)
        if self.family in ("qwen3", "gemma3_text"):
            q, k = self._norm(attention.q_norm, q), self._norm(attention.k_norm, k)
        cos, sin = rotation
        if self.fused:
            from rl_swarm.learning.cuda import fused

            return *fused.rotated(q, k, cos[:, 0], sin[:, 0]), v
        return rotated(q, cos, sin), rotated(k, cos, sin), v

    def _gated(self, mlp: Any, x: Tensor) -> Tensor:
        gate, up, down = self._linear(mlp.gate_proj, x), self._linear(mlp.up_proj, x), mlp.down_proj
        if (
            self.fused
            and self.known_activation
            and type(down) is torch.nn.Linear
            and getattr(down, "bias", None) is None
        ):
            from rl_swarm.learning.cuda import fused

            kind = "silu" if self.family in LLAMA_LIKE else "gelu"
            return fused.gated_product(gate, up, down.weight, kind)
        return self._linear(down, mlp.act_fn(gate) * up)

    def _llama_layer(self, layer: Any, residual: Residual, number: int, rotation: Any, attend: Attend) -> Residual:
        attention = layer.self_attn
        hidden, x = self._residual_norm(layer.input_layernorm, residual)
        attended = attend(number, *self._projected(attention, x, rotation))
        hidden, x = self._residual_norm(
            layer.post_attention_layernorm, self._branch(hidden, attention.o_proj, attended)
        )
        return hidden, self._gated(layer.mlp, x), None

    def _gemma_layer(self, layer: Any, residual: Residual, number: int, rotation: Any, attend: Attend) -> Residual:
        attention = layer.self_attn
        hidden, x = self._residual_norm(layer.input_layernorm, residual)
        attended = self._linear(attention.o_proj, attend(number, *self._projected(attention, x, rotation)))
        more = self._norm(layer.post_attention_layernorm, attended)
        hidden, x = self._residual_norm(layer.pre_feedforward_layernorm, (hidden, more, None))
        return hidden, self._norm(layer.post_feedforward_layernorm, self._gated(layer.mlp, x)), None

    def _gpt2_layer(self, layer: Any, residual: Residual, number: int, rotation: Any, attend: Attend) -> Residual:
        hidden, x = self._residual_norm(layer.ln_1, residual)
        q, k, v = self._linear(layer.attn.c_attn, x).view(len(x), 3 * self.heads, -1).chunk(3, 1)
        hidden, x = self._residual_norm(layer.ln_2, self._branch(hidden, layer.attn.c_proj, attend(number, q, k, v)))
        inside, out = layer.mlp.c_fc, layer.mlp.c_proj
        if self.fused and self.known_activation and is_transposed(inside) and is_transposed(out):
            from rl_swarm.learning.cuda import fused

            inner = fused.linear(x, inside.weight, None, True)
            return hidden, fused.gelu_product(inner, inside.bias, out.weight), out.bias
        inner = self._linear(inside, x)
        inner = F.gelu(inner, approximate="tanh") if self.known_activation else layer.mlp.act(inner)
        return self._branch(hidden, out, inner)


def is_transposed(module: Any) -> bool:
    """Return whether this is GPT-2's linear layer, whose weight is [inputs, outputs]."""
    return type(module).__name__ == "Conv1D"


def has_kernels(model: Any) -> bool:
    """Return whether Triton kernels can run on this model's device."""
    return model.device.type == "cuda" and find_spec("triton") is not None


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


@dataclass(frozen=True)
class Layout:
    """Maps packed sequences to a padded rectangle, one row each, aligned left or right."""

    lengths: tuple[int, ...]
    width: int
    slots_N: Tensor  # of every packed token in the flattened rectangle
    filled_BT: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, on_the_right: bool = False) -> "Layout":
        width = max(1, *lengths)
        columns_BT = torch.arange(width).expand(len(lengths), width)
        lengths_B1 = torch.tensor(lengths)[:, None]
        filled_BT = columns_BT >= width - lengths_B1 if on_the_right else columns_BT < lengths_B1
        slots_N = filled_BT.flatten().nonzero().squeeze(1)
        return cls(tuple(lengths), width, slots_N.to(device), filled_BT.to(device))

    def positions(self) -> Tensor:
        """Return 0, 1, 2, ... for every sequence, packed."""
        return torch.cat([torch.arange(length) for length in self.lengths]).to(self.slots_N.device)

    def spread(self, packed_N: Tensor) -> Tensor:
        """Unpack [N, H, D] to [B, H, T, D], with zeros as padding."""
        rows, width = len(self.lengths), self.width
        if len(packed_N) == rows * width:
            return packed_N.view(rows, width, *packed_N.shape[1:]).transpose(1, 2)
        flat = packed_N.new_zeros(rows * width, *packed_N.shape[1:]).index_copy(0, self.slots_N, packed_N)
        return flat.view(rows, width, *packed_N.shape[1:]).transpose(1, 2)

    def pack(self, attended_BHTD: Tensor) -> Tensor:
        """Pack [B, H, T, D] to [N, H * D]."""
        rows, _, width, _ = attended_BHTD.shape
        return attended_BHTD.transpose(1, 2).reshape(rows * width, -1)[self.slots_N]


def causal_mask(filled_BT: Tensor, window: int | None) -> Tensor:
    """Return the mask [B, 1, T, T]: a token attends to itself and earlier tokens of its row, within the window."""
    width = filled_BT.shape[1]
    index = torch.arange(width, device=filled_BT.device)
    distance = index[:, None] - index
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    seen_BTT = seen & filled_BT[:, None, :]
    seen_BTT = seen_BTT | torch.eye(width, dtype=torch.bool, device=filled_BT.device)  # no row is empty
    return seen_BTT[:, None]


class SharedPrompts:
    """Computes attention over prompts and their completions in one pass, for training.

    The packed row holds all prompts, then all completions; completion i continues prompt `rows[i]`.
    """

    def __init__(self, decoder: Decoder, prompts: Layout, completions: Layout, rows: Tensor) -> None:
        self.decoder, self.prompts, self.completions, self.rows = decoder, prompts, completions, rows
        self.split = sum(prompts.lengths)
        lengths_P = torch.tensor(prompts.lengths, device=rows.device)
        self.starts_B = lengths_P[rows]
        self._masks: dict[int | None, tuple[Tensor, Tensor]] = {}

    def positions(self) -> Tensor:
        lengths = torch.tensor(self.completions.lengths, device=self.rows.device)
        behind = self.completions.positions() + self.starts_B.repeat_interleave(lengths)
        return torch.cat([self.prompts.positions(), behind])

    def __call__(self, layer: int, q_N: Tensor, k_N: Tensor, v_N: Tensor) -> Tensor:
        decoder, cut = self.decoder, self.split
        prompt_mask, completion_mask = self._mask(decoder.windows[layer])
        keys, values = self.prompts.spread(k_N[:cut]), self.prompts.spread(v_N[:cut])
        first = attention(self.prompts.spread(q_N[:cut]), keys, values, prompt_mask, decoder.scale)
        second = attention(
            self.completions.spread(q_N[cut:]),
            torch.cat([keys[self.rows], self.completions.spread(k_N[cut:])], 2),
            torch.cat([values[self.rows], self.completions.spread(v_N[cut:])], 2),
            completion_mask,
            decoder.scale,
        )
        return torch.cat([self.prompts.pack(first), self.completions.pack(second)])

    def _mask(self, window: int | None) -> tuple[Tensor, Tensor]:
        if window not in self._masks:
            own = causal_mask(self.completions.filled_BT, window)
            prompt_B11L = self.prompts.filled_BT[self.rows][:, None, None, :]
            before = prompt_B11L.expand(-1, 1, self.completions.width, -1)
            if window is not None:
                device = self.rows.device
                here = self.starts_B[:, None] + torch.arange(self.completions.width, device=device)
                distance = here[:, :, None] - torch.arange(self.prompts.width, device=device)
                before = before & (distance < window)[:, None]
            self._masks[window] = causal_mask(self.prompts.filled_BT, window), torch.cat([before, own], 3)
        return self._masks[window]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


class KVCache:
    """Computes attention of one new token per sequence over all earlier ones, for sampling.

    Keys and values of prompt and completion share one rectangle per layer. Prompts are aligned right, so that every
    sequence grows in the same column.
    """

    def __init__(self, decoder: Decoder, prompts: Layout, rows: Tensor, room: int) -> None:
        self.decoder, self.prompts, self.rows, self.room = decoder, prompts, rows, room
        self.length = prompts.width
        self.filled_BL = prompts.filled_BT[rows]
        self.padded = not bool(prompts.filled_BT.all())
        self.next_B = torch.tensor(prompts.lengths, device=rows.device)[rows]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def prefill(self, layer: int, q_N: Tensor, k_N: Tensor, v_N: Tensor) -> Tensor:
        """Compute attention inside the prompts, and fill the cache."""
        decoder, prompts = self.decoder, self.prompts
        keys, values = prompts.spread(k_N), prompts.spread(v_N)
        for cache, given in ((self.keys, keys), (self.values, values)):
            whole = given.new_empty(len(self.rows), given.shape[1], prompts.width + self.room, given.shape[3])
            whole[:, :, : prompts.width] = given[self.rows]
            cache.append(whole)
        mask = causal_mask(prompts.filled_BT, decoder.windows[layer])
        return prompts.pack(attention(prompts.spread(q_N), keys, values, mask, decoder.scale))

    def decode(self, layer: int, q_B: Tensor, k_B: Tensor, v_B: Tensor) -> Tensor:
        keys, values, end = self.keys[layer], self.values[layer], self.length + 1
        keys[:, :, self.length], values[:, :, self.length] = k_B, v_B
        window = self.decoder.windows[layer]
        start = 0 if window is None else max(0, end - window)
        mask = None
        if self.padded and start < self.prompts.width:
            new = self.filled_BL.new_ones(len(k_B), end - self.filled_BL.shape[1])
            mask = torch.cat([self.filled_BL, new], 1)[:, None, None, start:]
        out = attention(q_B[:, :, None], keys[:, :, start:end], values[:, :, start:end], mask, self.decoder.scale)
        return out.flatten(1)

    def advance(self) -> None:
        self.length += 1
        self.next_B = self.next_B + 1

    def keep(self, rows: Tensor) -> None:
        """Drop all sequences but these."""
        self.keys = [cache[rows] for cache in self.keys]
        self.values = [cache[rows] for cache in self.values]
        self.filled_BL, self.next_B = self.filled_BL[rows], self.next_B[rows]
