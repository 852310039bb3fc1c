"""Samples many completions at once: all questions in one batch, each prompt computed once.

Models of the known families take the fast path of `decoder`, on CUDA the recorded kernels of `cuda`; all
others go through transformers. CPUs that are fast in bfloat16 take `cpu.decode`. Sequences that have ended leave
the batch, so cost follows the tokens produced and not the longest answer. The log-probability of every
sampled token comes along. The same batch and seed give the same answers.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rl_swarm.learning.cpu.decode import Steps
from rl_swarm.learning.decoder import Decoder, GrowingCache, Layout
from rl_swarm.learning.devices import prefers_bfloat16
from rl_swarm.learning.sequences import Model, run_prompts
from rl_swarm.learning.support import refusal, shares_prompts
from rl_swarm.learning.weights import Weights

if TYPE_CHECKING:
    from rl_swarm.learning.cuda.engine import CudaEngine


CROWDED = 0.75  # a batch in which fewer than this share still grow is made smaller


@dataclass(frozen=True)
class Sample:
    tokens: tuple[int, ...]  # the end-of-sequence token included
    logprobs: tuple[float, ...]
    ended: bool


@dataclass(frozen=True)
class Decoding:
    max_new_tokens: int
    eos: frozenset[int]
    pad: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False


class Request(NamedTuple):
    """What one node wants in a pass."""

    model: Model
    prompts: Sequence[Sequence[int]]
    each: int  # completions of every prompt
    seed: int
    ready: Any = None  # an event: the GPU has done what the asking thread gave it to do

    @property
    def total(self) -> int:
        return len(self.prompts) * self.each


class Continuation(Protocol):
    """A batch of sequences that grow by a token at a time."""

    logits_BV: Tensor  # of the next token

    def extend(self, token_B: Tensor) -> None: ...

    def keep(self, rows: Tensor) -> None: ...


@torch.no_grad()
def sample(
    model: Model, prompts: Sequence[Sequence[int]], count: int, decoding: Decoding, seed: int
) -> list[list[Sample]]:
    """`count` completions of every prompt."""
    engine = engine_of(model)
    if engine is not None:
        return engine.sample(model, prompts, count, decoding, seed)
    device, limit = model.device, decoding.max_new_tokens
    total = len(prompts) * count
    generator = torch.Generator(device=device).manual_seed(seed)
    uniform_BT = torch.rand(total, limit, generator=generator, device=device)
    if not shares_prompts(model):
        return generate(model, prompts, count, decoding, uniform_BT)
    going = continuation(model, prompts, count, decoding)
    tokens_BT = torch.full((total, limit), decoding.pad, device=device)
    logprobs_BT = torch.zeros(total, limit, device=device)
    eos = torch.tensor(sorted(decoding.eos), device=device)
    length_B = torch.full((total,), limit, device=device)
    rows = torch.arange(total, device=device)  # the sequences still in the batch
    done_B = torch.zeros(total, dtype=torch.bool, device=device)  # of those

    for step in range(limit):
        token_B, logprob_B = draw(going.logits_BV, decoding, uniform_BT[rows, step])
        tokens_BT[rows, step], logprobs_BT[rows, step] = token_B, logprob_B
        ends_B = torch.isin(token_B, eos) & ~done_B
        if ends_B.any():
            length_B[rows[ends_B]] = step + 1
            done_B = done_B | ends_B
            staying = (~done_B).nonzero().squeeze(1)
            if len(staying) == 0:
                break
            if len(staying) <= CROWDED * len(rows):  # to leave costs a copy of the others' cache
                rows, token_B, done_B = rows[staying], token_B[staying], done_B[staying]
                going.keep(staying)
        if step + 1 < limit:
            going.extend(token_B)
    return samples(tokens_BT, logprobs_BT, length_B, decoding.eos, count)


def samples(
    tokens_BT: Tensor, logprobs_BT: Tensor, length_B: Tensor, eos: frozenset[int], count: int
) -> list[list[Sample]]:
    # By way of numpy, which makes lists several times as fast.
    rows = zip(*(values.cpu().numpy().tolist() for values in (tokens_BT, logprobs_BT, length_B)), strict=True)
    flat = [
        Sample(tuple(tokens[:length]), tuple(logprobs[:length]), not eos.isdisjoint(tokens[length - 1 : length]))
        for tokens, logprobs, length in rows
    ]
    return [flat[start : start + count] for start in range(0, len(flat), count)]


def low_weights(model: Model) -> Weights | None:
    """The model's weights in low precision, where a CPU computes faster with them."""
    if model.device.type != "cpu" or not prefers_bfloat16(model) or not Weights.supports(Decoder(model)):
        return None
    if model not in _weights:
        _weights[model] = Weights(Decoder(model), torch.bfloat16)
    _weights[model].refresh()
    return _weights[model]


def release(model: Model) -> None:
    """Gives the memory back that is kept for sampling from this model."""
    _weights.pop(model, None)
    engine = _engines.pop(model, None)
    if engine is not None:
        engine.leave(model)


def share(model: Model, engine: "CudaEngine") -> None:
    """This engine, which serves other models too, samples from this model from now on."""
    release(model)
    _shared[model] = engine


_weights: "weakref.WeakKeyDictionary[Model, Weights]" = weakref.WeakKeyDictionary()
_engines: "weakref.WeakKeyDictionary[Model, CudaEngine]" = weakref.WeakKeyDictionary()
_shared: "weakref.WeakKeyDictionary[Model, CudaEngine]" = weakref.WeakKeyDictionary()


def engine_of(model: Model) -> "CudaEngine | None":
    """What samples from this model on a GPU, where its kernels know the model and can be compiled."""
    if model.device.type != "cuda":
        return None
    if model not in _engines:
        if slow_path(model) is not None:
            return None
        from rl_swarm.learning.cuda.engine import CudaEngine

        _engines[model] = _shared.get(model) or CudaEngine()
    return _engines[model]


def slow_path(model: Model) -> str | None:
    """Why this model is not sampled from as fast as others are, in words; nothing where it is."""
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


def continuation(model: Model, prompts: Sequence[Sequence[int]], count: int, decoding: Decoding) -> Continuation:
    """The prompts, each of them run once and then continued `count` times."""
    rows = torch.arange(len(prompts), device=model.device).repeat_interleave(count)
    if Decoder.supports(model):
        weights = low_weights(model)
        if weights is not None:
            return Steps(weights, prompts, count, decoding.max_new_tokens)
        return Packed(Decoder(model), prompts, rows, decoding.max_new_tokens)
    return Plain(model, prompts, rows, decoding.pad)


class Packed:
    """The fast path."""

    def __init__(self, decoder: Decoder, prompts: Sequence[Sequence[int]], rows: Tensor, room: int) -> None:
        self.decoder = decoder
        layout = Layout.of([len(p) for p in prompts], rows.device, on_the_right=True)
        self.cache = GrowingCache(decoder, layout, rows, room)
        ids_N = torch.tensor([token for prompt in prompts for token in prompt], device=rows.device)
        hidden = decoder.run(ids_N, layout.positions(), self.cache.read_prompts)
        last_P = torch.tensor(layout.lengths, device=rows.device).cumsum(0) - 1
        self.logits_BV = decoder.head(hidden[last_P])[rows]

    def extend(self, token_B: Tensor) -> None:
        hidden = self.decoder.run(token_B, self.cache.next_B, self.cache.read_token)
        self.cache.grown()
        self.logits_BV = self.decoder.head(hidden)

    def keep(self, rows: Tensor) -> None:
        self.cache.keep(rows)


class Plain:
    """Through transformers, for any model."""

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
    model: Model, prompts: Sequence[Sequence[int]], count: int, decoding: Decoding, uniform_BT: Tensor
) -> list[list[Sample]]:
    """Sample with transformers' own loop, which knows the state of every model; prompts of one length at a time."""
    from transformers import GenerationConfig, LogitsProcessorList

    device, limit = model.device, decoding.max_new_tokens
    tokens_BT = torch.full(uniform_BT.shape, decoding.pad, device=device)
    logprobs_BT = torch.zeros_like(uniform_BT)
    ends = sorted(decoding.eos)
    config = GenerationConfig(max_new_tokens=limit, eos_token_id=ends or None, pad_token_id=decoding.pad)
    own, model.generation_config = model.generation_config, config  # what its author prefers is not asked for
    try:
        for length in sorted(set(map(len, prompts))):
            some = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
            rows = torch.tensor([number * count + k for number in some for k in range(count)], device=device)
            ids = torch.tensor([prompts[number] for number in some], device=device)
            ids = ids.repeat_interleave(count, 0)

            def drawn(ids_BT: Tensor, logits_BV: Tensor, rows: Tensor = rows, length: int = length) -> Tensor:
                step = ids_BT.shape[1] - length
                token_B, logprob_B = draw(logits_BV, decoding, uniform_BT[rows, step])
                tokens_BT[rows, step], logprobs_BT[rows, step] = token_B, logprob_B
                chosen = torch.full_like(logits_BV, -torch.inf)
                return chosen.scatter(1, token_B[:, None], 0.0)

            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                logits_processor=LogitsProcessorList([drawn]),
            )
    finally:
        model.generation_config = own
    ended_BT = torch.isin(tokens_BT, torch.tensor(ends, device=device))
    length_B = torch.where(ended_BT.any(1), ended_BT.int().argmax(1) + 1, limit)
    return samples(tokens_BT, logprobs_BT, length_B, decoding.eos, count)


def draw(logits_BV: Tensor, decoding: Decoding, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """The next token of every sequence and its log-probability (before top-k and top-p cut anything away)."""
    chances_BV = (logits_BV.float() / decoding.temperature).softmax(-1)
    if decoding.greedy:
        token_B = chances_BV.argmax(-1)
    else:
        kept_BV = chances_BV
        if decoding.top_k or decoding.top_p < 1:
            kept_BV = truncated(chances_BV.log(), decoding.top_k, decoding.top_p).exp()
        heap_BV = kept_BV.cumsum(-1)
        aim_B1 = uniform_B[:, None] * heap_BV[:, -1:]
        token_B = torch.searchsorted(heap_BV, aim_B1, right=True).squeeze(1)
        token_B = torch.minimum(token_B, (heap_BV < heap_BV[:, -1:]).sum(-1))  # where the aim is rounded up
    return token_B, chances_BV.gather(1, token_B[:, None]).squeeze(1).log()


def truncated(logprobs_BV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Without the tokens that top-k and top-p exclude; the likeliest token always stays."""
    if top_k and top_k < logprobs_BV.shape[1]:
        lowest_B1 = logprobs_BV.topk(top_k, -1).values[:, -1:]
        logprobs_BV = logprobs_BV.masked_fill(logprobs_BV < lowest_B1, -torch.inf)
    if top_p < 1.0:
        ordered_BV, order_BV = logprobs_BV.softmax(-1).sort(-1, descending=True)
        outside_BV = ordered_BV.cumsum(-1) - ordered_BV >= top_p
        logprobs_BV = logprobs_BV.masked_fill(outside_BV.scatter(1, order_BV, outside_BV), -torch.inf)
    return logprobs_BV
