"""Makes one GRPO update: micro-batches by token budget, clipped gradients, one optimiser step.

Own rollouts come with the log-probabilities of the sampler, so the clip acts on the real mismatch
between sampler and trainer. External ones have none unless their sender's are used; without them the
ratio is 1 and the update is plain policy gradient on their advantages. The logits of all tokens never exist at the same
time: the head runs forward and backward a chunk of tokens at a time.
"""

import copy
import logging
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from rl_swarm.learning import grpo
from rl_swarm.learning.batches import Batch, BatchShape, TrainingGroup, count_tokens, in_order, micro_batches
from rl_swarm.learning.cpu.attention import PackedAttention
from rl_swarm.learning.decoder import Attend, Decoder, Layout, SharedPrompts
from rl_swarm.learning.devices import low_precision, out_of_memory, release_memory
from rl_swarm.learning.memory import LOGITS, MAX_TOKENS
from rl_swarm.learning.sequences import Model, completion_logits, pad_right, run_prompts, whole_logits
from rl_swarm.learning.settings import LEARNING_RATE, LearningSettings
from rl_swarm.learning.support import shares_prompts

if TYPE_CHECKING:
    from rl_swarm.learning.cuda.attention import Segments
    from rl_swarm.learning.cuda.graphs import GraphCache

log = logging.getLogger(__name__)

Result = TypeVar("Result")
# (some tokens, their log-probabilities, their entropies) -> loss
Loss = Callable[[slice, Tensor, Tensor], Tensor]

ALIGNED = 64  # tokens: matrix products of odd sizes are slower


@dataclass
class Update:
    """Metrics of one update, or the means of several."""

    tokens: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    entropy: float = 0.0
    nll: float = 0.0  # mean negative log-probability of the tokens, before the step
    clip_fraction: float = 0.0
    logprob_mismatch: float = 0.0  # mean |sampler - trainer| of own tokens' log-probabilities
    kl: float = 0.0

    def filled(self, found: Sequence[float]) -> "Update":
        """Fill in summed metrics, followed by the gradient's norm."""
        *means, own_tokens, self.grad_norm = found
        for name, value in zip(UPDATE_METRICS, means, strict=False):
            setattr(self, name, value)
        self.logprob_mismatch /= max(own_tokens, 1)
        if not math.isfinite(self.grad_norm):
            log.error("the gradient is not finite: this update is left out")
        return self

    def add(self, later: "Update") -> None:
        """Average metrics over the tokens of both updates. The mismatch stays that of the first, which alone is
        on-policy."""
        tokens = self.tokens + later.tokens
        if not self.tokens:
            self.logprob_mismatch = later.logprob_mismatch
        for name in ("loss", "grad_norm", "entropy", "nll", "clip_fraction", "kl"):
            both = self.tokens * getattr(self, name) + later.tokens * getattr(later, name)
            setattr(self, name, both / max(1, tokens))
        self.tokens = tokens


# Sums over the tokens of a micro-batch; the last is the number of tokens that this node sampled.
UPDATE_METRICS = ("loss", "entropy", "nll", "clip_fraction", "kl", "logprob_mismatch", "own_tokens")


class PartialStepError(RuntimeError):
    """Raised when an optimiser step changed only part of the weights; the node resumes from its last checkpoint."""


class Trainer:
    def __init__(self, model: Model, pad: int, settings: LearningSettings, temperature: float = 1.0) -> None:
        self.model, self.pad, self.settings, self.temperature = model, pad, settings, temperature
        self.batch_tokens = settings.batch_tokens or MAX_TOKENS
        self.checkpointed = False  # whether layers recompute activations in the backward pass
        self.metrics = torch.zeros(len(UPDATE_METRICS), device=model.device)
        self.optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad],
            lr=settings.learning_rate or LEARNING_RATE,
            betas=(0.9, 0.99),
            weight_decay=0.0,
            fused=model.device.type != "mps",
        )
        self.reference: Model = copy.deepcopy(model).eval() if settings.kl_weight > 0 else None
        self.graphs = self._make_graphs()

    def _make_graphs(self) -> "GraphCache | None":
        """Make the cache of CUDA graphs, where the forward and backward pass can be captured."""
        if not Decoder.supports(self.model) or not Decoder(self.model).fused:
            return None
        from rl_swarm.learning.cuda.graphs import GraphCache

        return GraphCache(self._captured_pass, self.model.device)

    def parameters(self) -> list[Tensor]:
        """Return the trained parameters."""
        trained: list[Tensor] = self.optimizer.param_groups[0]["params"]
        return trained

    def release(self) -> None:
        """Free the gradients and CUDA graphs that are kept between updates; Adam's moments stay."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.graphs is not None:
            from rl_swarm.learning.cuda.products import drop_low

            self.graphs.release()
            drop_low(self.parameters())

    def update(self, groups: Sequence[TrainingGroup]) -> Update:
        """Make one optimiser step on the groups, in smaller micro-batches when memory runs out."""
        return self._retry_smaller(self._update, groups)

    def _retry_smaller(
        self, work: Callable[[Sequence[TrainingGroup]], Result], groups: Sequence[TrainingGroup]
    ) -> Result:
        """Repeat the work in smaller micro-batches as long as memory runs out."""
        while True:
            try:
                return work(groups)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)  # they hold tensors
                self._shrink(groups)

    def _shrink(self, groups: Sequence[TrainingGroup]) -> None:
        """Halve the micro-batches, then recompute activations, then raise the error at hand."""
        self.release()
        release_memory()
        alone = all(sum(len(g.completions) for g in batch) == 1 for batch in micro_batches(groups, self.batch_tokens))
        if not alone:
            self.batch_tokens = min(self.batch_tokens, sum(g.size for g in groups)) // 2
            log.warning("out of memory: micro-batches now hold at most %d tokens", self.batch_tokens)
        elif not self.checkpointed and Decoder.supports(self.model):
            self.checkpointed = True
            log.warning("out of memory: activations are now recomputed in the backward pass")
        else:
            raise

    def _update(self, groups: Sequence[TrainingGroup]) -> Update:
        report = Update(tokens=count_tokens(groups))
        if report.tokens == 0:
            return report
        return report.filled(self._launch_update(groups, report.tokens).tolist())

    def _launch_update(self, groups: Sequence[TrainingGroup], tokens: int) -> Tensor:
        """Launch a whole update without waiting for the device; return the metrics and the gradient's norm."""
        self._make_moments()
        metrics = self._gradients(groups, tokens)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), self.settings.max_grad_norm)
        self._step(norm)
        self.optimizer.zero_grad(set_to_none=self.graphs is None)
        return torch.cat([metrics, norm.to(metrics).reshape(1)])

    def _make_moments(self) -> None:
        """Allocate Adam's moments of all parameters that have none, or of none of them when memory runs out."""
        missing = [p for p in self.parameters() if not self.optimizer.state.get(p)]
        fused = self.optimizer.defaults["fused"]
        made = [
            {
                "step": torch.zeros((), device=p.device if fused else "cpu"),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
            for p in missing
        ]
        self.optimizer.state.update(zip(missing, made, strict=True))

    def _step(self, norm: Tensor) -> None:
        """Take Adam's step unless the gradient is not finite; a fused optimiser checks that on the device."""
        if self.optimizer.defaults["fused"]:
            self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        elif not norm.isfinite():
            return
        try:
            self.optimizer.step()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise PartialStepError("memory ran out in the middle of an optimiser step") from error
        for parameter in self.parameters():  # a fused step does not, and the sampler's copy depends on it
            increment_version(parameter)

    def _gradients(self, groups: Sequence[TrainingGroup], tokens: int) -> Tensor:
        """Sum gradients and metrics over all micro-batches; return the metrics."""
        self.metrics.zero_()
        if self.graphs is not None:
            from rl_swarm.learning.cuda.products import keep_low

            with low_precision(self.model):
                keep_low(self.parameters())
        for batch in micro_batches(groups, self.batch_tokens):
            self._accumulate(batch, tokens)
        return self.metrics

    def _accumulate(self, groups: Sequence[TrainingGroup], tokens: int) -> None:
        """Add the gradients and metrics of one micro-batch."""
        batch, shape = Batch.of(groups, tokens)
        if self.graphs is not None:
            for parameter in self.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)  # captured add to these
            self.graphs.run(batch, shape)
            return
        batch = batch.to(self.model.device)
        if Decoder.supports(self.model):
            self._backward(batch, *attention_of(Decoder(self.model), shape))
        else:
            found = self._plain_logprobs(self.model, groups)
            self._loss(batch, *found, self._plain_reference(groups)).backward()  # type: ignore[no-untyped-call]

    def _captured_pass(self, batch: Batch, segments: "Segments") -> None:
        self._backward(batch, segments.attention(Decoder(self.model)), segments.positions_N)

    def _backward(self, batch: Batch, attend: Attend, positions_N: Tensor) -> None:
        """Run the forward and backward pass of a model of a known family."""
        temperature, reference_M = self.temperature, None
        if self.reference is not None:
            decoder = Decoder(self.reference)
            reference_M, _ = packed_logprobs(decoder, batch, attend, positions_N, temperature)

        def loss_of(here: slice, logprobs_M: Tensor, entropy_M: Tensor) -> Tensor:
            reference = None if reference_M is None else reference_M[here]
            return self._loss(batch.part(here), logprobs_M, entropy_M, reference)

        decoder = Decoder(self.model, checkpointed=self.checkpointed)
        add_gradients(decoder, batch, attend, positions_N, temperature, loss_of)

    def _loss(self, batch: Batch, logprobs_M: Tensor, entropy_M: Tensor, reference_M: Tensor | None) -> Tensor:
        """Return the loss of some tokens, and add them to the metrics."""
        loss_M, metrics_FM = token_losses(batch, logprobs_M, entropy_M, reference_M, self.settings)
        self.metrics += metrics_FM.sum(1)
        return loss_M.sum()

    def excess_nll(self, groups: Sequence[TrainingGroup]) -> list[list[list[float]]]:
        """Return by how many nats the negative log-likelihood of each token exceeds the entropy at its position."""
        return self._retry_smaller(self._excess_nll, groups)

    @torch.no_grad()
    def _excess_nll(self, groups: Sequence[TrainingGroup]) -> list[list[list[float]]]:
        found: list[float] = []
        for part in in_order(groups, self.batch_tokens):
            logprobs_M, entropy_M = self.logprobs(part)
            found += (-logprobs_M - entropy_M).tolist()
        values = iter(found)
        return [[[next(values) for _ in ids] for ids in group.completions] for group in groups]

    @torch.no_grad()
    def logprobs(self, groups: Sequence[TrainingGroup]) -> tuple[Tensor, Tensor]:
        """Return the log-probability of every completion token and the entropy at its position."""
        if not Decoder.supports(self.model):
            return self._plain_logprobs(self.model, groups)
        batch, shape = Batch.of(groups, 1)
        decoder = Decoder(self.model)
        attention = attention_of(decoder, shape)
        return packed_logprobs(decoder, batch.to(self.model.device), *attention, self.temperature)

    def _plain_reference(self, groups: Sequence[TrainingGroup]) -> Tensor | None:
        if self.reference is None:
            return None
        with torch.no_grad():
            return self._plain_logprobs(self.reference, groups)[0]

    def _plain_logprobs(self, model: Model, groups: Sequence[TrainingGroup]) -> tuple[Tensor, Tensor]:
        """Return the same as `logprobs` through transformers, for any model."""
        device = model.device
        completions = [ids for g in groups for ids in g.completions]
        ids_BT = pad_right(completions, self.pad, torch.long, device)
        lengths_B = torch.tensor(list(map(len, completions)), device=device)
        rows = [number for number, g in enumerate(groups) for _ in g.completions]
        with low_precision(model):
            if shares_prompts(self.model):
                prefix = run_prompts(model, [g.prompt for g in groups], self.pad)
                prefix = prefix.select(torch.tensor(rows, device=device))
                logits_BTV = completion_logits(model, prefix, ids_BT)
            else:
                logits_BTV = whole_logits(model, [groups[row].prompt for row in rows], completions, self.pad)
        used_BT = torch.arange(ids_BT.shape[1], device=device) < lengths_B[:, None]
        logprobs_BT, entropy_BT = token_logprobs(logits_BTV, ids_BT, self.temperature)
        return logprobs_BT[used_BT], entropy_BT[used_BT]


def token_losses(
    batch: Batch, logprobs_M: Tensor, entropy_M: Tensor, reference_M: Tensor | None, settings: LearningSettings
) -> tuple[Tensor, Tensor]:
    """Return the share of every token in the loss and in the metrics."""
    detached_M, weights_M = logprobs_M.detach(), batch.weights_M
    clip = settings.clip_low, settings.clip_high
    loss_M, clip_M, kl_M = grpo.token_loss(
        logprobs_M,
        batch.sampled_M,
        batch.own_M,
        batch.claimed_M,
        batch.advantages_M,
        reference_M,
        clip,
        settings.kl_weight,
    )

    own_M = (batch.own_M & (weights_M > 0)).float()
    means_FM = torch.stack([loss_M, entropy_M, -detached_M, clip_M.float(), kl_M]).detach() * weights_M
    mismatch_M = torch.where(batch.own_M, detached_M - batch.sampled_M, 0).abs() * own_M
    return loss_M * weights_M, torch.cat([means_FM, torch.stack([mismatch_M, own_M])])


def packed_logprobs(
    decoder: Decoder, batch: Batch, attend: Attend, positions_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of every target and the entropy at its position, [M], without gradients."""
    with torch.no_grad(), _precision(decoder):
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
    with _precision(decoder):
        states_ME = decoder.run(batch.ids_N, positions_N, attend).index_select(0, batch.before_M)
    leaves = []
    for here in chunks(decoder, len(states_ME)):
        leaf = states_ME[here].detach().requires_grad_()
        with _precision(decoder):
            found = head_logprobs(decoder, leaf, batch.targets_M[here], temperature)
        loss_of(here, *found).backward()  # type: ignore[no-untyped-call]
        leaves.append(leaf)
    states_ME.backward(torch.cat([leaf.grad for leaf in leaves]))  # type: ignore[no-untyped-call, misc]


def _precision(decoder: Decoder) -> AbstractContextManager[object]:
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


def token_logprobs(logits_BTV: Tensor, ids_BT: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each token, and the entropy at its position (no gradient)."""
    scaled_BTV = logits_BTV.float() / temperature
    all_BTV = scaled_BTV.log_softmax(-1)
    with torch.no_grad():
        entropy_BT = -(all_BTV.exp() * all_BTV).sum(-1)
    return all_BTV.gather(-1, ids_BT[..., None]).squeeze(-1), entropy_BT
