"""One GRPO update: micro-batches by token budget, clipped gradients, one optimiser step.

Own rollouts come with the log-probabilities of the sampler, so the clip acts on the real mismatch
between sampler and trainer. External ones have none unless their sender's are used; without them the
ratio is 1 and the update is plain policy gradient on their advantages.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl_swarm.config import Settings
from rl_swarm.learning import grpo
from rl_swarm.learning.decoder import Decoder, Layout, SharedPrompts
from rl_swarm.learning.sequences import Model, completion_logits, pad_right, run_prompts, token_logprobs

log = logging.getLogger(__name__)

LOGITS_AT_ONCE = 1 << 26  # numbers: 256 MB in float32


@dataclass(frozen=True)
class TrainingGroup:
    """The tokens of a group and what is to be learned from it."""

    prompt: Sequence[int]
    completions: Sequence[Sequence[int]]
    advantages: Sequence[float]
    logprobs: Sequence[Sequence[float]] | None  # under the policy that sampled, if known
    claimed: bool = False  # by a stranger: their influence is capped
    trained: Sequence[bool] = field(default=())  # False leaves a completion out; empty means all


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
                if all(_sequences(batch) == 1 for batch in micro_batches(groups, self.batch_tokens)):
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

        claimed_B = torch.tensor([g.claimed for g in groups for _ in g.completions], device=device)
        own_B = torch.tensor(
            [g.logprobs is not None and not g.claimed for g in groups for _ in g.completions], device=device
        )
        given_BT = pad_right(
            [row for g in groups for row in (g.logprobs or [[0.0] * len(ids) for ids in g.completions])],
            0.0,
            torch.float32,
            device,
        )
        # A stranger's numbers stay out of the ratio: where it overflows, the gradient of all others is lost too.
        behaviour_BT = torch.where(own_B[:, None], given_BT, logprobs_BT.detach())
        loss_BT, clip_BT = grpo.clipped_loss(
            logprobs_BT, behaviour_BT, advantages_B, settings.clip_low, settings.clip_high
        )
        if claimed_B.any():
            capped_BT = grpo.capped_loss(logprobs_BT, given_BT, advantages_B, 1 + settings.clip_high)
            loss_BT = torch.where(claimed_B[:, None], capped_BT, loss_BT)
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
        own_BT = mask_BT * own_B[:, None]
        report.mismatch += float(((logprobs_BT.detach() - behaviour_BT).abs() * own_BT).sum())
        return int(own_BT.sum())

    def _logprobs(
        self, model: Model, groups: Sequence[TrainingGroup], ids_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        device = self.model.device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            if Decoder.supports(model):
                return packed_logprobs(Decoder(model), groups, self.settings.temperature)
            prefix = run_prompts(model, [g.prompt for g in groups], self.pad)
            rows = [number for number, g in enumerate(groups) for _ in g.completions]
            logits_BTV = completion_logits(model, prefix.select(torch.tensor(rows, device=device)), ids_BT)
        return token_logprobs(logits_BTV, ids_BT, self.settings.temperature)


def packed_logprobs(
    decoder: Decoder, groups: Sequence[TrainingGroup], temperature: float
) -> tuple[Tensor, Tensor]:
    """The log-probability of every completion token and the entropy there, [B, T], in one pass over packed tokens.

    A token is predicted by the hidden state before it, so the last token of a completion is not run at all.
    """
    device = decoder.model.device
    prompts, completions = [g.prompt for g in groups], [ids for g in groups for ids in g.completions]
    rows = [number for number, group in enumerate(groups) for _ in group.completions]
    prompt_layout = Layout.of([len(p) for p in prompts], device)
    fed_layout = Layout.of([len(ids) - 1 for ids in completions], device)
    attend = SharedPrompts(decoder, prompt_layout, fed_layout, torch.tensor(rows, device=device))
    fed = [*prompts, *(ids[:-1] for ids in completions)]
    ids_N = torch.tensor([token for ids in fed for token in ids], device=device)
    hidden = decoder.run(ids_N, attend.positions(), attend)

    ends = list(
        accumulate(map(len, fed))
    )  # one past the last token of every prompt, then of every completion
    before, here = [], ends[len(prompts) - 1]
    for row, ids in zip(rows, completions, strict=True):
        before += [ends[row] - 1, *range(here, here + len(ids) - 1)]
        here += len(ids) - 1
    targets_N = torch.tensor([token for ids in completions for token in ids], device=device)
    hidden = hidden[torch.tensor(before, device=device)]
    logprobs_N, entropy_N = chunked_logprobs(decoder.head, hidden, targets_N, temperature)
    whole = Layout.of([len(ids) for ids in completions], device)
    return whole.spread_flat(logprobs_N), whole.spread_flat(entropy_N)


def chunked_logprobs(
    head: Callable[[Tensor], Tensor], hidden_NE: Tensor, targets_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies without ever holding the logits of all tokens: chunks are computed again
    on the way back when there is more than one."""

    def part(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(head(hidden), targets, temperature)

    width: int = getattr(head, "out_features", 1)
    chunk = max(1, LOGITS_AT_ONCE // width)
    if len(targets_N) <= chunk:
        return part(hidden_NE, targets_N)
    parts = [
        checkpoint(part, hidden, targets, use_reentrant=False)
        for hidden, targets in zip(torch.split(hidden_NE, chunk), torch.split(targets_N, chunk), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def micro_batches(groups: Sequence[TrainingGroup], budget: int) -> Iterator[list[TrainingGroup]]:
    """Groups of similar size together, each batch within the budget (a single sequence may exceed it)."""
    batch: list[TrainingGroup] = []
    pieces = [piece for group in groups for piece in _pieces(group, budget)]
    for piece in sorted(pieces, key=lambda g: (len(g.prompt), _longest([g]))):
        if batch and _padded_size([*batch, piece]) > budget:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


def _pieces(group: TrainingGroup, budget: int) -> Iterator[TrainingGroup]:
    """The group, in parts if it is larger than the budget. A stranger decides how large a group is."""
    count = max(1, (budget - len(group.prompt)) // _longest([group]))
    for start in range(0, len(group.completions), count):
        part = slice(start, start + count)
        yield replace(
            group,
            completions=group.completions[part],
            advantages=group.advantages[part],
            logprobs=None if group.logprobs is None else group.logprobs[part],
            trained=group.trained[part],
        )


def _padded_size(groups: Sequence[TrainingGroup]) -> int:
    return len(groups) * max(len(g.prompt) for g in groups) + _sequences(groups) * _longest(groups)


def _sequences(groups: Sequence[TrainingGroup]) -> int:
    return sum(len(g.completions) for g in groups)


def _longest(groups: Sequence[TrainingGroup]) -> int:
    return max(len(ids) for g in groups for ids in g.completions)


def _used(group: TrainingGroup) -> Sequence[bool]:
    return group.trained or [True] * len(group.completions)
