"""One GRPO update: micro-batches by token budget, clipped gradients, one optimiser step.

Own rollouts come with the log-probabilities of the sampler, so the clip acts on the real mismatch
between sampler and trainer. External ones have none unless their sender's are used; without them the
ratio is 1 and the update is plain policy gradient on their advantages.
"""

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_swarm.config import Settings
from rl_swarm.learning import grpo
from rl_swarm.learning.sequences import Model, completion_logits, pad_right, run_prompts, token_logprobs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingGroup:
    """The tokens of a group and what is to be learned from it."""

    prompt: Sequence[int]
    completions: Sequence[Sequence[int]]
    advantages: Sequence[float]
    logprobs: Sequence[Sequence[float]] | None  # under the policy that sampled, if known
    claimed: bool = False  # by a stranger: their influence is capped
    trained: Sequence[bool] = field(default=())  # False leaves a completion out; empty means all

    @property
    def size(self) -> int:
        return len(self.prompt) + sum(map(len, self.completions))


@dataclass
class Update:
    """What one update did."""

    tokens: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    entropy: float = 0.0
    clip_share: float = 0.0
    mismatch: float = 0.0  # mean |sampler - trainer| of own tokens' log-probabilities
    kl: float = 0.0


class Trainer:
    def __init__(self, model: Model, pad: int, settings: Settings) -> None:
        self.model, self.pad, self.settings = model, pad, settings
        self.batch_tokens = settings.batch_tokens
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.step_size(),
            betas=(0.9, 0.99),
            weight_decay=0.0,
            fused=model.device.type != "mps",
        )
        self.reference: Model = copy.deepcopy(model).eval() if settings.kl_weight > 0 else None

    def update(self, groups: Sequence[TrainingGroup]) -> Update:
        """One step on the groups; the same step in smaller pieces when memory runs out."""
        while True:
            try:
                return self._update(groups)
            except torch.OutOfMemoryError:
                if self.batch_tokens <= min(group.size for group in groups):
                    raise
                self.optimizer.zero_grad(set_to_none=True)
                self.batch_tokens //= 2
                log.warning("out of memory: micro-batches now hold at most %d tokens", self.batch_tokens)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()

    def _update(self, groups: Sequence[TrainingGroup]) -> Update:
        tokens = sum(
            len(ids)
            for group in groups
            for ids, use in zip(group.completions, _used(group), strict=True)
            if use
        )
        report = Update(tokens=tokens)
        if tokens == 0:
            return report
        own_tokens = 0
        for batch in micro_batches(groups, self.batch_tokens):
            own_tokens += self._accumulate(batch, tokens, report)
        report.mismatch /= max(own_tokens, 1)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        report.grad_norm = float(norm)
        if torch.isfinite(norm):
            self.optimizer.step()
        else:
            log.error("the gradient is not finite: this update is left out")
        self.optimizer.zero_grad(set_to_none=True)
        return report

    def _accumulate(self, groups: Sequence[TrainingGroup], tokens: int, report: Update) -> int:
        """Adds the gradients and figures of one micro-batch; returns how many tokens had the sampler's numbers."""
        settings, device = self.settings, self.model.device
        ids_BT = pad_right([ids for g in groups for ids in g.completions], self.pad, torch.long, device)
        mask_BT = pad_right(
            [
                [float(use)] * len(ids)
                for g in groups
                for ids, use in zip(g.completions, _used(g), strict=True)
            ],
            0.0,
            torch.float32,
            device,
        )
        advantages_B = torch.tensor([a for g in groups for a in g.advantages], device=device)
        logprobs_BT, entropy_BT = self._logprobs(self.model, groups, ids_BT)

        known_B = torch.tensor([g.logprobs is not None for g in groups for _ in g.completions], device=device)
        claimed_B = torch.tensor([g.claimed for g in groups for _ in g.completions], device=device)
        given_BT = pad_right(
            [row for g in groups for row in (g.logprobs or [[0.0] * len(ids) for ids in g.completions])],
            0.0,
            torch.float32,
            device,
        )
        behaviour_BT = torch.where(known_B[:, None], given_BT, logprobs_BT.detach())
        loss_BT, clip_BT = grpo.clipped_loss(
            logprobs_BT, behaviour_BT, advantages_B, settings.clip_low, settings.clip_high
        )
        if claimed_B.any():
            capped_BT = grpo.capped_loss(logprobs_BT, behaviour_BT, advantages_B, 1 + settings.clip_high)
            loss_BT = torch.where(claimed_B[:, None], capped_BT, loss_BT)
            clip_BT = clip_BT & ~claimed_B[:, None]
        if self.reference is not None:
            with torch.no_grad():
                reference_BT, _ = self._logprobs(self.reference, groups, ids_BT)
            kl_BT = grpo.kl_k3(logprobs_BT, reference_BT)
            report.kl += float(grpo.token_mean(kl_BT.detach(), mask_BT, tokens))
            loss_BT = loss_BT + settings.kl_weight * kl_BT
        loss = grpo.token_mean(loss_BT, mask_BT, tokens)
        loss.backward()  # type: ignore[no-untyped-call]

        report.loss += float(loss.detach())
        report.entropy += float(grpo.token_mean(entropy_BT, mask_BT, tokens))
        report.clip_share += float(grpo.token_mean(clip_BT.float(), mask_BT, tokens))
        own_BT = mask_BT * (known_B & ~claimed_B)[:, None]
        report.mismatch += float(((logprobs_BT.detach() - behaviour_BT).abs() * own_BT).sum())
        return int(own_BT.sum())

    def _logprobs(
        self, model: Model, groups: Sequence[TrainingGroup], ids_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        device = self.model.device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            prefix = run_prompts(model, [g.prompt for g in groups], self.pad)
            rows = [number for number, g in enumerate(groups) for _ in g.completions]
            logits_BTV = completion_logits(model, prefix.select(torch.tensor(rows, device=device)), ids_BT)
        return token_logprobs(logits_BTV, ids_BT, self.settings.temperature)


def micro_batches(groups: Sequence[TrainingGroup], budget: int) -> Iterator[list[TrainingGroup]]:
    """Groups of similar size together, each batch within the budget (a single group may exceed it)."""
    batch: list[TrainingGroup] = []
    for group in sorted(groups, key=lambda g: (len(g.prompt), g.size)):
        if batch and sum(g.size for g in batch) + group.size > budget:
            yield batch
            batch = []
        batch.append(group)
    if batch:
        yield batch


def _used(group: TrainingGroup) -> Sequence[bool]:
    return group.trained or [True] * len(group.completions)
