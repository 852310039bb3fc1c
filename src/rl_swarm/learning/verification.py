"""Verifies sampler and trainer against transformers' own forward pass, on a few tokens, when a model is loaded.

The fields of a configuration decide support (`support`); this catches what the fields do not tell. The reference is
computed in float32. Where products run in bfloat16, transformers runs in it too. Its rounding error, times a margin
that a wrong scale or a missing term exceeds, is allowed here.
"""

import logging
import math
import threading
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from rl_swarm.errors import UserError
from rl_swarm.learning import sampler, support
from rl_swarm.learning.batches import TrainingGroup
from rl_swarm.learning.devices import low_precision, out_of_memory, prefers_bfloat16, release_memory
from rl_swarm.learning.lora import is_adapted
from rl_swarm.learning.sequences import Model
from rl_swarm.learning.settings import LearningSettings
from rl_swarm.learning.sizes import alike
from rl_swarm.learning.trainer import Trainer

log = logging.getLogger(__name__)

LENGTHS = (5, 3)  # of the prompts
EACH, TOKENS = 2, 4  # completions of a prompt, and their length
EXACT = 1e-3  # nats per token that float32 may differ
ROUNDED = 1e-2  # that bfloat16 may always differ
MARGIN = 4.0  # times the rounding error of transformers, where that is more

_found = dict[Hashable, tuple[str | None, bool]]()  # models alike are compared once in a process
_one_at_a_time = threading.Lock()


class UnsupportedModelError(UserError):
    """Raised when a model cannot be sampled from or trained here."""


def verify(model: Model, name: str, pad: int) -> None:
    """Choose the fastest way to compute this model that agrees with transformers; raise if there is none."""
    key = (alike(model), str(model.device), is_adapted(model), support.refusal(model))
    with _one_at_a_time:
        if key not in _found:
            _compare_ways(model, name, pad)
            _found[key] = support.refusal(model), support.shares_prompts(model)
    refused, shares = _found[key]
    if refused:
        support.refuse(model, refused)
    if not shares:
        support.run_whole(model)


def _compare_ways(model: Model, name: str, pad: int) -> None:
    if support.refusal(model) is None:
        wrong = difference(model, pad)
        if wrong is None:
            return
        support.refuse(model, f"a model whose {wrong}")
        sampler.release(model)
    wrong = difference(model, pad)
    if wrong is not None:
        support.run_whole(model)
        log.warning(
            "%s: completions cannot share the cache of their prompt: %s. The prompt is computed for each of them, "
            "which takes longer",
            name,
            wrong,
        )
        wrong = difference(model, pad)
    if wrong is not None:
        adapted = is_adapted(model)
        raise UnsupportedModelError(
            f"MODEL_NAME={name}: models of type {model.config.model_type!r} cannot be trained here"
            f"{' with LoRA' if adapted else ''}: {wrong}. "
            f"{'Set lora_rank=0, or use' if adapted else 'Use'} a model of another type."
        )


def difference(model: Model, pad: int) -> str | None:
    """Say how the log-probabilities of sampler or trainer differ from transformers', None where they agree."""
    try:
        return _difference(model, pad)
    except Exception as error:  # noqa: BLE001 every family fails in its own way
        if out_of_memory(error):
            log.warning("out of memory: log-probabilities are not compared with those of transformers")
            return None
        return f"computation here ends with {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        if model.device.type == "cuda":
            sampler.release(model)
            release_memory()


@torch.no_grad()
def _difference(model: Model, pad: int) -> str | None:
    prompts = _prompts(model)
    drawn = sampler.sample(model, prompts, EACH, sampler.SamplingParams(TOKENS, frozenset(), pad), 0)
    completions = [[list(sample.tokens) for sample in group] for group in drawn]
    exact = _reference(model, prompts, completions, nullcontext())
    if not exact.isfinite().all():
        return None  # a broken model is no fault of the path
    groups = [TrainingGroup(p, ids, [1.0] * EACH, None) for p, ids in zip(prompts, completions, strict=True)]
    found = {
        "sampler": torch.tensor([value for group in drawn for sample in group for value in sample.logprobs]),
        "trainer": Trainer(model, pad, LearningSettings()).logprobs(groups)[0].cpu(),
    }
    off = {part: float((logprobs - exact).abs().mean()) for part, logprobs in found.items()}
    part = max(off, key=lambda part: math.inf if math.isnan(off[part]) else off[part])
    allowed = EXACT
    if prefers_bfloat16(model) and not off[part] <= ROUNDED:
        rounded = _reference(model, prompts, completions, low_precision(model))
        allowed = MARGIN * float((rounded - exact).abs().mean())
    elif prefers_bfloat16(model):
        allowed = ROUNDED
    if off[part] <= allowed:
        return None
    return f"{part} is {off[part]:.3g} nats per token off transformers' forward pass"


def _prompts(model: Model) -> list[list[int]]:
    words = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(words, (length,), generator=generator).tolist() for length in LENGTHS]


def _reference(
    model: Model,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Sequence[int]]],
    precision: AbstractContextManager[object],
) -> Tensor:
    """Run whole sequences without cache or padding."""
    found = []
    for prompt, group in zip(prompts, completions, strict=True):
        ids_BN = torch.tensor([[*prompt, *ids] for ids in group], device=model.device)
        with precision:
            logits_BNV = model(input_ids=ids_BN, use_cache=False).logits
        logprobs_BTV = logits_BNV[:, len(prompt) - 1 : -1].float().log_softmax(-1)
        found.append(logprobs_BTV.gather(2, ids_BN[:, len(prompt) :, None]).flatten())
    return torch.cat(found).cpu()
