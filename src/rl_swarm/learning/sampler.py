"""Samples many completions at once: all questions in one batch, each prompt computed once.

Models of the known families take the fast path of `decoder`, on CUDA the captured kernels of `cuda`; all
others go through transformers. CPUs that are fast in bfloat16 take `cpu.decode`. Sequences that have ended leave
the batch, so the cost follows the tokens produced and not the longest answer. Every sampled token comes with its
log-probability. The same batch and seed give the same answers.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rl_swarm.learning.cpu.decode import CpuContinuation
from rl_swarm.learning.decoder import Decoder, KVCache, Layout
from rl_swarm.learning.devices import prefers_bfloat16
from rl_swarm.learning.sequences import Model, run_prompts
from rl_swarm.learning.support import refusal, shares_prompts
from rl_swarm.learning.weights import Weights

if TYPE_CHECKING:
    from rl_swarm.learning.cuda.engine import CudaEngine


COMPACT_BELOW = 0.75  # the share of unfinished sequences below which a batch is compacted


@dataclass(frozen=True)
class Sample:
    tokens: tuple[int, ...]  # the end-of-sequence token included
    logprobs: tuple[float, ...]
    ended: bool


@dataclass(frozen=True)
class SamplingParams:
    max_new_tokens: int
    eos: frozenset[int]
    pad: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False


class Request(NamedTuple):
    """Holds the prompts of one node, and the number of completions of each."""

    model: Model
    prompts: Sequence[Sequence[int]]
    each: int  # completions of every prompt
    seed: int
    ready: Any = None  # a CUDA event: the work that the requesting thread has launched is done

    @property
    def total(self) -> int:
        return len(self.prompts) * self.each


class Continuation(Protocol):
    """Decodes a batch of sequences, a token at a time."""

    logits_BV: Tensor  # of the next token

    def extend(self, token_B: Tensor) -> None: ...

    def keep(self, rows: Tensor) -> None: ...


@torch.no_grad()
def sample(
    model: Model, prompts: Sequence[Sequence[int]], count: int, params: SamplingParams, seed: int
) -> list[list[Sample]]:
    """Sample `count` completions of every prompt."""
    engine = engine_of(model)
    if engine is not None:
        return engine.sample(model, prompts, count, params, seed)
    device, limit = model.device, params.max_new_tokens
    total = len(prompts) * count
    generator = torch.Generator(device=device).manual_seed(seed)
    uniform_BT = torch.rand(total, limit, generator=generator, device=device)
    if not shares_prompts(model):
        return generate(model, prompts, count, params, uniform_BT)
    batch = continuation(model, prompts, count, params)
    tokens_BT = torch.full((total, limit), params.pad, device=device)
    logprobs_BT = torch.zeros(total, limit, device=device)
    eos = torch.tensor(sorted(params.eos), device=device)
    length_B = torch.full((total,), limit, device=device)
    rows = torch.arange(total, device=device)  # the sequences still in the batch
    ended_B = torch.zeros(total, dtype=torch.bool, device=device)  # by row of the batch

    for step in range(limit):
        token_B, logprob_B = draw(batch.logits_BV, params, uniform_BT[rows, step])
        tokens_BT[rows, step], logprobs_BT[rows, step] = token_B, logprob_B
        ends_B = torch.isin(token_B, eos) & ~ended_B
        if ends_B.any():
            length_B[rows[ends_B]] = step + 1
            ended_B = ended_B | ends_B
            active = (~ended_B).nonzero().squeeze(1)
            if len(active) == 0:
                break
            if len(active) <= COMPACT_BELOW * len(rows):  # compacting copies the cache
                rows, token_B, ended_B = rows[active], token_B[active], ended_B[active]
                batch.keep(active)
        if step + 1 < limit:
            batch.extend(token_B)
    return samples(tokens_BT, logprobs_BT, length_B, params.eos, count)


def samples(
    tokens_BT: Tensor, logprobs_BT: Tensor, length_B: Tensor, eos: frozenset[int], count: int
) -> list[list[Sample]]:
    # Through numpy, which makes lists several times as fast.
    rows = zip(*(values.cpu().numpy().tolist() for values in (tokens_BT, logprobs_BT, length_B)), strict=True)
    flat = [
        Sample(tuple(tokens[:length]), tuple(logprobs[:length]), not eos.isdisjoint(tokens[length - 1 : length]))
        for tokens, logprobs, length in rows
    ]
    return [flat[start : start + count] for start in range(0, len(flat), count)]


def low_precision_weights(model: Model) -> Weights | None:
    """Return the weights in low precision where the CPU computes faster with them, else None."""
    if model.device.type != "cpu" or not prefers_bfloat16(model) or not Weights.supports(Decoder(model)):
        return None
    if model not in _weights:
        _weights[model] = Weights(Decoder(model), torch.bfloat16)
    _weights[model].refresh()
    return _weights[model]


def release(model: Model) -> None:
    """Free the memory that is kept for sampling from this model."""
    _weights.pop(model, None)
    engine = _engines.pop(model, None)
    if engine is not None:
        engine.remove(model)


def use_engine(model: Model, engine: "CudaEngine") -> None:
    """Sample from this model with an engine that it shares with other models."""
    release(model)
    _shared[model] = engine


_weights: "weakref.WeakKeyDictionary[Model, Weights]" = weakref.WeakKeyDictionary()
_engines: "weakref.WeakKeyDictionary[Model, CudaEngine]" = weakref.WeakKeyDictionary()
_shared: "weakref.WeakKeyDictionary[Model, CudaEngine]" = weakref.WeakKeyDictionary()


def engine_of(model: Model) -> "CudaEngine | None":
    """Return the engine that samples from this model on a GPU, None where there are no kernels for it."""
    if model.device.type != "cuda":
        return None
    if model not in _engines:
        if slow_path(model) is not None:
            return None
        from rl_swarm.learning.cuda.engine import CudaEngine

        _engines[model] = _shared.get(model) or CudaEngine()
    return _engines[model]


def slow_path(model: Model) -> str | None:
    """Explain in words why this model is off the fast path; None where it is on it."""
    kind = f"models of type {model.config.model_type!r}"
    if reason := refusal(model):
        return f"there is no fast path for {reason}: this one is sampled from and trained through transformers"
    if model.device.type != "cuda":
        return None
    if find_spec("triton") is None:
        return "Triton is not installed: sampling and training run without the kernels for GPUs"
    from rl_swarm.learning.cuda.engine import CudaEngine

    if not CudaEngine.supports(model):
        return f"there are no sampling kernels for {kind} with this configuration: a step is many torch calls"
    return None


def continuation(model: Model, prompts: Sequence[Sequence[int]], count: int, params: SamplingParams) -> Continuation:
    """Run every prompt once and prepare `count` continuations of each."""
    rows = torch.arange(len(prompts), device=model.device).repeat_interleave(count)
    if Decoder.supports(model):
        weights = low_precision_weights(model)
        if weights is not None:
            return CpuContinuation(weights, prompts, count, params.max_new_tokens)
        return PackedContinuation(Decoder(model), prompts, rows, params.max_new_tokens)
    return TransformersContinuation(model, prompts, rows, params.pad)


class PackedContinuation:
    """Decodes on the fast path."""

    def __init__(self, decoder: Decoder, prompts: Sequence[Sequence[int]], rows: Tensor, room: int) -> None:
        self.decoder = decoder
        layout = Layout.of([len(p) for p in prompts], rows.device, on_the_right=True)
        self.cache = KVCache(decoder, layout, rows, room)
        ids_N = torch.tensor([token for prompt in prompts for token in prompt], device=rows.device)
        hidden = decoder.run(ids_N, layout.positions(), self.cache.prefill)
        last_P = torch.tensor(layout.lengths, device=rows.device).cumsum(0) - 1
        self.logits_BV = decoder.head(hidden[last_P])[rows]

    def extend(self, token_B: Tensor) -> None:
        hidden = self.decoder.run(token_B, self.cache.next_B, self.cache.decode)
        self.cache.advance()
        self.logits_BV = self.decoder.head(hidden)

    def keep(self, rows: Tensor) -> None:
        self.cache.keep(rows)


class TransformersContinuation:
    """Decodes through transformers, for any model."""

    def __init__(self, model: Model, prompts: Sequence[Sequence[int]], rows: Tensor, pad: int) -> None:
        self.model = model
        self.prefix = run_prompts(model, prompts, pad).select(rows)
        self.logits_BV = self.prefix.logits_BV

    def extend(self, token_B: Tensor) -> None:
        self.prefix = self.prefix.extended(self.model, token_B)
        self.logits_BV = self.prefix.logits_BV

    def keep(self, rows: Tensor) -> None:
        self.prefix = self.prefix.select(rows)


def generate(
    model: Model, prompts: Sequence[Sequence[int]], count: int, params: SamplingParams, uniform_BT: Tensor
) -> list[list[Sample]]:
    """Sample with transformers' own loop, which handles any model state, prompts of one length at a time."""
    from transformers import GenerationConfig, LogitsProcessorList

    device, limit = model.device, params.max_new_tokens
    tokens_BT = torch.full(uniform_BT.shape, params.pad, device=device)
    logprobs_BT = torch.zeros_like(uniform_BT)
    ends = sorted(params.eos)
    config = GenerationConfig(max_new_tokens=limit, eos_token_id=ends or None, pad_token_id=params.pad)
    configured, model.generation_config = model.generation_config, config  # the settings of its author are not used
    try:
        for length in sorted(set(map(len, prompts))):
            some = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
            rows = torch.tensor([number * count + k for number in some for k in range(count)], device=device)
            ids = torch.tensor([prompts[number] for number in some], device=device)
            ids = ids.repeat_interleave(count, 0)

            def replace_logits(ids_BT: Tensor, logits_BV: Tensor, rows: Tensor = rows, length: int = length) -> Tensor:
                step = ids_BT.shape[1] - length
                token_B, logprob_B = draw(logits_BV, params, uniform_BT[rows, step])
                tokens_BT[rows, step], logprobs_BT[rows, step] = token_B, logprob_B
                chosen = torch.full_like(logits_BV, -torch.inf)
                return chosen.scatter(1, token_B[:, None], 0.0)

            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                logits_processor=LogitsProcessorList([replace_logits]),
            )
    finally:
        model.generation_config = configured
    ended_BT = torch.isin(tokens_BT, torch.tensor(ends, device=device))
    length_B = torch.where(ended_BT.any(1), ended_BT.int().argmax(1) + 1, limit)
    return samples(tokens_BT, logprobs_BT, length_B, params.eos, count)


def draw(logits_BV: Tensor, params: SamplingParams, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draw the next token of every sequence; its log-probability is that before top-k and top-p."""
    probs_BV = (logits_BV.float() / params.temperature).softmax(-1)
    if params.greedy:
        token_B = probs_BV.argmax(-1)
    else:
        kept_BV = probs_BV
        if params.top_k or params.top_p < 1:
            kept_BV = truncated(probs_BV.log(), params.top_k, params.top_p).exp()
        cdf_BV = kept_BV.cumsum(-1)
        target_B1 = uniform_B[:, None] * cdf_BV[:, -1:]
        token_B = torch.searchsorted(cdf_BV, target_B1, right=True).squeeze(1)
        token_B = torch.minimum(token_B, (cdf_BV < cdf_BV[:, -1:]).sum(-1))  # where the target is rounded up
    return token_B, probs_BV.gather(1, token_B[:, None]).squeeze(1).log()


def truncated(logprobs_BV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Exclude tokens by top-k and top-p; the likeliest token always stays."""
    if top_k and top_k < logprobs_BV.shape[1]:
        lowest_B1 = logprobs_BV.topk(top_k, -1).values[:, -1:]
        logprobs_BV = logprobs_BV.masked_fill(logprobs_BV < lowest_B1, -torch.inf)
    if top_p < 1.0:
        ordered_BV, order_BV = logprobs_BV.softmax(-1).sort(-1, descending=True)
        outside_BV = ordered_BV.cumsum(-1) - ordered_BV >= top_p
        logprobs_BV = logprobs_BV.masked_fill(outside_BV.scatter(1, order_BV, outside_BV), -torch.inf)
    return logprobs_BV
