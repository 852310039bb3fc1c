"""Copies a model's weights for sampling: low precision, fused, norms folded in.

The scale of an RMS norm multiplies the columns of the next projection, so the copy contains it. The projections of
queries, keys and values are one matrix, and so are gate and up. Embeddings are read from the trainer's own weights.
Copies of several models of one shape can share a `Stack`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_swarm.learning import support
from rl_swarm.learning.decoder import Attend, Decoder, rotated
from rl_swarm.learning.lora import merged_weight
from rl_swarm.learning.support import LLAMA_LIKE


@dataclass(frozen=True)
class Norm:
    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Linear:
    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None = None


@dataclass(frozen=True)
class LayerWeights:
    qkv: Linear
    o: Linear
    up: Linear  # gate, then up, where the model has a gate
    down: Linear
    before_attention: Norm | None = None  # None: folded into the next product
    before_mlp: Norm | None = None
    after_attention: Norm | None = None
    after_mlp: Norm | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


class Stack:
    """Allocates memory for the copies of several models of one shape.

    Each tensor of a copy is a slice of [models, ...], so kernels find all models from the tensor of the first.
    """

    def __init__(self, models: int) -> None:
        self.models, self.tensors = models, list[Tensor]()

    def slices(self, model: int) -> Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]:
        """Return an allocator for one model. All models allocate the same tensors in the same order."""
        numbers = count()

        def new(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
            number = next(numbers)
            if number == len(self.tensors):
                self.tensors.append(torch.empty(self.models, *shape, dtype=dtype, device=device))
            if self.tensors[number].shape[1:] != shape:
                raise ValueError("models that are sampled from together must be of one shape")
            return self.tensors[number][model]

        return new


class Weights:
    """Holds a copy of the weights; `refresh` updates it when the trainer has changed the model."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype, stack: Stack | None = None, number: int = 0) -> None:
        self.decoder, self.dtype = decoder, dtype
        self._new = (stack or Stack(1)).slices(number)
        self._writes: list[Callable[[], object]] = []
        self._versions: list[int] = []
        self._parameters = list(decoder.model.parameters())
        self._graph: Any = None
        body, config, gpt2 = decoder.body, decoder.model.config, decoder.family == "gpt2"
        self.embeddings: Tensor = body.wte.weight if gpt2 else body.embed_tokens.weight
        self.positions: Tensor | None = body.wpe.weight if gpt2 else None
        self.embedding_scale = 1.0 if gpt2 else float(getattr(body.embed_tokens, "embed_scale", 1.0))
        self.gated, self.activation = not gpt2, "silu" if decoder.family in LLAMA_LIKE else "gelu"
        self.eps = float(config.layer_norm_epsilon if gpt2 else config.rms_norm_eps)
        make = self._gpt2_layer if gpt2 else self._llama_layer
        self.layers = [make(layer) for layer in decoder.layers]
        self.last_norm = self._norm(decoder.last_norm) if gpt2 else None
        self.head = self._linear([decoder.head], None if gpt2 else decoder.last_norm)

    @staticmethod
    def supports(decoder: Decoder) -> bool:
        """Return whether the copy computes what this model computes."""
        model = decoder.model
        return support.refusal(model) is None and support.copy_obstacle(model.config) is None

    def refresh(self) -> None:
        versions = [parameter._version for parameter in self._parameters]
        if versions != self._versions:
            self._versions = versions
            self._rewrite()

    def _rewrite(self) -> None:
        """Write the copy with hundreds of small kernels, which a GPU captures and replays."""
        if self._graph is not None:
            self._graph.replay()
            return
        for write in self._writes:
            write()
        if self.embeddings.device.type == "cuda":
            from rl_swarm.learning.cuda.graphs import capture

            self._graph = torch.cuda.CUDAGraph()
            with capture(self._graph):
                for write in self._writes:
                    write()

    def run_layers(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Return the hidden state after the last layer."""
        decoder = self.decoder
        hidden_NE = F.embedding(ids_N, self.embeddings).float() * self.embedding_scale
        if self.positions is not None:
            hidden_NE = hidden_NE + self.positions[positions_N]
        rotations = decoder.rotations(hidden_NE, positions_N)
        for number, layer in enumerate(self.layers):
            x = product(self.normed(hidden_NE, layer.before_attention), layer.qkv)
            q, k, v = self._heads(x, layer, rotations.get(decoder.kinds[number]))
            attended = product(attend(number, q, k, v), layer.o)
            hidden_NE = hidden_NE + self._after(layer.after_attention, attended)
            inner = product(self.normed(hidden_NE, layer.before_mlp), layer.up)
            mixed = product(self._activated(inner), layer.down)
            hidden_NE = hidden_NE + self._after(layer.after_mlp, mixed)
        return hidden_NE

    def logits(self, hidden_NE: Tensor) -> Tensor:
        return product(self.normed(hidden_NE, self.last_norm), self.head).float()

    def normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Normalise the input of a product; None is an RMS norm whose scale the product contains."""
        if norm is None:
            return F.rms_norm(x, x.shape[-1:], None, self.eps)
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, self.eps)

    def _after(self, norm: Norm | None, x: Tensor) -> Tensor:
        return x if norm is None else F.rms_norm(x.float(), x.shape[-1:], norm.weight, self.eps)

    def _activated(self, inner: Tensor) -> Tensor:
        if not self.gated:
            return F.gelu(inner, approximate="tanh")
        gate, up = inner.chunk(2, -1)
        return (F.silu(gate) if self.activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def _heads(self, qkv: Tensor, layer: LayerWeights, rotation: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
        """Return queries, keys and values in float32, normalised and rotated."""
        decoder = self.decoder
        qk_heads, width = decoder.heads + decoder.key_heads, decoder.head_size
        heads = qkv.float().view(len(qkv), -1, width)
        qk, values = heads[:, :qk_heads], heads[:, qk_heads:]
        if layer.q_norm is not None and layer.k_norm is not None:
            parts = (layer.q_norm.expand(decoder.heads, -1), layer.k_norm.expand(decoder.key_heads, -1))
            qk = F.rms_norm(qk, (width,), None, self.eps) * torch.cat(parts)
        if rotation is not None:
            qk = rotated(qk, *rotation)
        return qk[:, : decoder.heads], qk[:, decoder.heads :], values

    @property
    def inner(self) -> int:
        return self.layers[0].down.weight.shape[1]

    def _llama_layer(self, layer: Any) -> LayerWeights:
        attention, mlp, gemma = layer.self_attn, layer.mlp, self.decoder.family == "gemma3_text"
        normed = self.decoder.family in ("qwen3", "gemma3_text")
        before_mlp = layer.pre_feedforward_layernorm if gemma else layer.post_attention_layernorm
        return LayerWeights(
            qkv=self._linear([attention.q_proj, attention.k_proj, attention.v_proj], layer.input_layernorm),
            o=self._linear([attention.o_proj]),
            up=self._linear([mlp.gate_proj, mlp.up_proj], before_mlp),
            down=self._linear([mlp.down_proj]),
            after_attention=self._norm(layer.post_attention_layernorm) if gemma else None,
            after_mlp=self._norm(layer.post_feedforward_layernorm) if gemma else None,
            q_norm=self._norm(attention.q_norm).weight if normed else None,
            k_norm=self._norm(attention.k_norm).weight if normed else None,
        )

    def _gpt2_layer(self, layer: Any) -> LayerWeights:
        return LayerWeights(
            qkv=self._linear([layer.attn.c_attn]),
            o=self._linear([layer.attn.c_proj]),
            up=self._linear([layer.mlp.c_fc]),
            down=self._linear([layer.mlp.c_proj]),
            before_attention=self._norm(layer.ln_1),
            before_mlp=self._norm(layer.ln_2),
        )

    def _linear(self, modules: list[Any], norm: Any = None) -> Linear:
        sizes = [matrix(module).shape[0] for module in modules]
        device = self.embeddings.device
        weight = self._new((sum(sizes), matrix(modules[0]).shape[1]), self.dtype, device)
        for part, module in zip(torch.split(weight, sizes), modules, strict=True):
            self._writes.append(partial(self._write_matrix, part, module, norm))
        biases: list[Any] = [getattr(module, "bias", None) for module in modules]
        if biases[0] is None:
            return Linear(weight)
        bias = self._new((sum(sizes),), torch.float32, device)
        for part, given in zip(torch.split(bias, sizes), biases, strict=True):
            self._writes.append(partial(part.copy_, given.detach()))
        return Linear(weight, bias)

    def _norm(self, module: Any) -> Norm:
        weight = self._new(tuple(module.weight.shape), torch.float32, module.weight.device)
        self._writes.append(lambda: weight.copy_(self._scale(module)))
        given = getattr(module, "bias", None)
        if given is None:
            return Norm(weight)
        bias = self._new(tuple(given.shape), torch.float32, given.device)
        self._writes.append(partial(bias.copy_, given.detach()))
        return Norm(weight, bias)

    def _scale(self, norm: Any) -> Tensor:
        weight: Tensor = norm.weight.detach()
        return 1 + weight if self.decoder.family == "gemma3_text" else weight

    def _write_matrix(self, part: Tensor, module: Any, norm: Any) -> None:
        if norm is None:
            copy_matrix(part, matrix(module))
        else:
            torch.mul(matrix(module), self._scale(norm), out=part)


def product(x: Tensor, linear: Linear) -> Tensor:
    kind = linear.weight.dtype
    return F.linear(x.to(kind), linear.weight, None if linear.bias is None else linear.bias.to(kind))


def copy_matrix(target: Tensor, given: Tensor) -> None:
    """Copy a matrix; on a GPU a transposed one is copied in tiles, which is several times as fast."""
    if target.device.type == "cuda" and not given.is_contiguous() and given.t().is_contiguous():
        from rl_swarm.learning.cuda.decoding import transpose

        (rows, columns), side = given.t().shape, 64
        transpose[(-(-rows // side), -(-columns // side))](given, target, rows, columns, B=side)
    else:
        target.copy_(given)


def matrix(module: Any) -> Tensor:
    """Return the weight of a linear module as [outputs, inputs]; GPT-2 stores it transposed."""
    weight = merged_weight(module).detach()
    return weight.t() if type(getattr(module, "base_layer", module)).__name__ == "Conv1D" else weight
