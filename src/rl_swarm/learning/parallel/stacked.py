"""Trains several small models of one shape as one: their weights are stacked, and products are batched.

Kernel launches bound the pass of a small model, so eight models in the same kernels take hardly longer than one. The
parameters of each model, and the moments of its optimiser, are slices of the stack. So each model is sampled from and
saved as if it were alone. Everything is computed in float32, so that gradients equal those of each model alone up to
rounding.

Shapes: Z models, P parameters of each, N input tokens, M target tokens; the row has equally many of every model.
"""

import logging
import traceback
import warnings
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import increment_version

from rl_swarm.learning.batches import Batch, BatchShape, TrainingGroup, count_tokens, micro_batches, stack_rows
from rl_swarm.learning.decoder import Attend, Decoder, has_kernels, is_transposed
from rl_swarm.learning.devices import out_of_memory, release_memory
from rl_swarm.learning.sizes import alike
from rl_swarm.learning.support import LLAMA_LIKE
from rl_swarm.learning.trainer import UPDATE_METRICS, Trainer, Update, add_gradients, attention_of, token_losses

if TYPE_CHECKING:
    from rl_swarm.learning.cuda.attention import Segments
    from rl_swarm.learning.cuda.graphs import StackedGraphCache

log = logging.getLogger(__name__)

MAX_PARAMETERS = 32 << 20  # larger models keep a GPU busy one by one
MAX_TOKENS = 2048  # of each model in a micro-batch
ALIGNED = 64  # elements: every parameter begins at a multiple, as kernels require
FAMILIES = LLAMA_LIKE | {"gpt2"}


def stacking_key(trainer: Trainer) -> Hashable | None:
    """Return a key that is equal for trainers that can be stacked; None where this one cannot."""
    model, settings = trainer.model, trainer.settings
    parameters = trainer.parameters()
    if (
        not Decoder.supports(model)
        or model.config.model_type not in FAMILIES
        or settings.lora_rank
        or trainer.reference is not None
        or sum(p.numel() for p in parameters) > MAX_PARAMETERS
        or any(p.dtype != torch.float32 for p in parameters)
    ):
        return None
    losses = (trainer.temperature, settings.clip_low, settings.clip_high, settings.max_grad_norm)
    return alike(model), losses, str(model.device)


class StackedDecoder(Decoder):
    """Runs several models at once: the row holds the tokens of the first model, then of the second, and so on."""

    exact = True

    def __init__(self, models: Sequence[Any], weights: dict[Tensor, Tensor]) -> None:
        super().__init__(models[0], fused=False)
        self.count, self.weights = len(models), weights  # [Z, ...], by the first model's parameter
        head = self.head
        self.head = lambda states: self._linear(head, states)

    def _embedded(self, module: Any, ids_N: Tensor) -> Tensor:
        words = module.num_embeddings
        first_Z1 = words * torch.arange(self.count, device=ids_N.device)[:, None]
        there_N = (ids_N.view(self.count, -1) + first_Z1).flatten()
        found = F.embedding(there_N, self.weights[module.weight].flatten(0, 1))
        if module.padding_idx is None:
            return found
        return torch.where((ids_N == module.padding_idx)[:, None], found.detach(), found)

    def _linear(self, module: Any, x: Tensor) -> Tensor:
        weight = self.weights[module.weight]
        y = torch.bmm(self._by_model(x), weight if is_transposed(module) else weight.transpose(1, 2))
        if getattr(module, "bias", None) is not None:
            y = y + self.weights[module.bias][:, None]
        return y.flatten(0, 1)

    def _norm(self, norm: Any, x: Tensor) -> Tensor:
        weight, size = self.weights[norm.weight][:, None], x.shape[-1:]
        if self.family == "gpt2":
            y = F.layer_norm(self._by_model(x), size, eps=norm.eps) * weight + self.weights[norm.bias][:, None]
        else:
            y = F.rms_norm(self._by_model(x), size, eps=norm.variance_epsilon) * weight
        return y.view(x.shape)

    def _by_model(self, x: Tensor) -> Tensor:
        return x.reshape(self.count, -1, x.shape[-1])


class ModelStack:
    """Makes the updates of several models together."""

    def __init__(self, trainers: Sequence[Trainer]) -> None:
        self.trainers, self.settings = list(trainers), trainers[0].settings
        self.temperature = trainers[0].temperature
        self.models = [trainer.model for trainer in trainers]
        self.device = self.models[0].device
        self.batch_tokens = min(MAX_TOKENS, *(trainer.batch_tokens for trainer in trainers))
        first = trainers[0].parameters()
        starts = [0]
        for parameter in first:
            starts.append(starts[-1] + -(-parameter.numel() // ALIGNED) * ALIGNED)
        self.weights_ZP, self.grads_ZP, self.means_ZP, self.squares_ZP = (
            torch.zeros(len(trainers), starts[-1], device=self.device) for _ in range(4)
        )
        self.steps_Z = torch.zeros(len(trainers), device=self.device)
        self.metrics_ZF = torch.zeros(len(trainers), len(UPDATE_METRICS), device=self.device)
        self.rates_Z = torch.tensor([t.optimizer.param_groups[0]["lr"] for t in trainers], device=self.device)
        weights = dict[Tensor, Tensor]()
        for number, (parameter, start) in enumerate(zip(first, starts, strict=False)):
            here = slice(start, start + parameter.numel())
            shape = (len(trainers), *parameter.shape)
            leaf = self.weights_ZP[:, here].view(shape).detach().requires_grad_()
            leaf.grad = self.grads_ZP[:, here].view(shape)
            weights[parameter] = leaf
            for place, trainer in enumerate(trainers):
                self._add_parameter(trainer, number, place, here)
        self.decoder = StackedDecoder(self.models, weights)
        self.graphs = self._make_graphs()

    @torch.no_grad()
    def _add_parameter(self, trainer: Trainer, number: int, place: int, here: slice) -> None:
        """Replace a parameter of one model, and its moments, by slices of the stack."""
        parameter = trainer.parameters()[number]
        state = trainer.optimizer.state[parameter]
        kept = {"exp_avg": self.means_ZP, "exp_avg_sq": self.squares_ZP}
        slices = {name: whole[place, here].view(parameter.shape) for name, whole in kept.items()}
        for name, values in slices.items():
            if name in state:
                values.copy_(state[name])
        if "step" in state:
            self.steps_Z[place] = state["step"]
        state.update(slices, step=self.steps_Z[place])
        weights = self.weights_ZP[place, here].view(parameter.shape)
        weights.copy_(parameter)
        parameter.data = weights

    def _make_graphs(self) -> "StackedGraphCache | None":
        if not has_kernels(self.models[0]):
            return None
        from rl_swarm.learning.cuda.graphs import StackedGraphCache

        return StackedGraphCache(self._captured_pass, self.device, len(self.models))

    def update(self, groups_of_models: Sequence[Sequence[TrainingGroup]]) -> list[Update]:
        """Take one step of every model on its own groups; models without groups stay as they are."""
        while True:
            try:
                return self._update(groups_of_models)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)  # they hold tensors
                every = [group for groups in groups_of_models for group in groups]
                longest = max(len(group.prompt) + max(map(len, group.completions)) for group in every)
                if self.batch_tokens <= longest:
                    raise
                if self.graphs is not None:
                    self.graphs.release()
                release_memory()
                self.batch_tokens //= 2
                log.warning("out of memory: micro-batches now hold at most %d tokens of a model", self.batch_tokens)

    def _update(self, groups_of_models: Sequence[Sequence[TrainingGroup]]) -> list[Update]:
        tokens = list(map(count_tokens, groups_of_models))
        parts = [list(micro_batches(groups, self.batch_tokens)) for groups in groups_of_models]
        self.grads_ZP.zero_()
        self.metrics_ZF.zero_()
        for number in range(max(map(len, parts))):
            self._accumulate([part[number] if number < len(part) else [] for part in parts], tokens)
        norms_Z = self._step(torch.tensor(tokens, device=self.device) > 0)
        for trainer, count in zip(self.trainers, tokens, strict=True):
            for parameter in trainer.parameters() if count else ():
                increment_version(parameter)  # the sampler's copy depends on it
        found = torch.cat([self.metrics_ZF, norms_Z[:, None]], 1).tolist()
        return [
            Update(tokens=count).filled(metrics) if count else Update()
            for count, metrics in zip(tokens, found, strict=True)
        ]

    def _accumulate(self, parts: Sequence[Sequence[TrainingGroup]], tokens: Sequence[int]) -> None:
        """Add the gradients and metrics of one micro-batch of every model."""
        batches = [Batch.of(groups, count) for groups, count in zip(parts, tokens, strict=True)]
        if self.graphs is not None:
            self.graphs.run_all(batches)
            return
        sizes = [max(len(getattr(batch, name)) for batch, _ in batches) for name in ("ids_N", "targets_M")]
        attend, positions_N = self._attention_by_model([shape for _, shape in batches], sizes[0])
        batch = stack_rows([batch for batch, _ in batches], *sizes)
        self._backward(batch.to(self.device), attend, positions_N)

    def _captured_pass(self, batch: Batch, segments: "Segments") -> None:
        self._backward(batch, segments.attention(self.decoder), segments.positions_N)

    def _backward(self, batch: Batch, attend: Attend, positions_N: Tensor) -> None:
        def loss_of(here: slice, logprobs_M: Tensor, entropy_M: Tensor) -> Tensor:
            loss_M, metrics_FM = token_losses(batch, logprobs_M, entropy_M, None, self.settings)
            self.metrics_ZF.add_(metrics_FM.view(len(UPDATE_METRICS), len(self.models), -1).sum(2).T)
            return loss_M.sum()

        with warnings.catch_warnings():  # the slices of a parameter lie apart, which costs nothing here
            warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout contract")
            add_gradients(self.decoder, batch, attend, positions_N, self.temperature, loss_of)

    def _attention_by_model(self, shapes: Sequence[BatchShape], tokens: int) -> tuple[Attend, Tensor]:
        """Return attention that runs model by model, where there are no kernels."""
        decoder = Decoder(self.models[0], fused=False)
        found = [attention_of(decoder, shape) if shape.prompts else None for shape in shapes]
        nowhere_N = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        places = [nowhere_N[:0] if one is None else one[1] for one in found]

        def attend(layer: int, *qkv: Tensor) -> Tensor:
            parts = zip(*(part.view(len(shapes), tokens, *part.shape[1:]) for part in qkv), strict=True)
            rows = []
            for one, places_N, part in zip(found, places, parts, strict=True):
                used = len(places_N)
                row = part[0][:0].flatten(1) if one is None else one[0](layer, *(x[:used] for x in part))
                rows.append(F.pad(row, (0, 0, 0, tokens - used)))
            return torch.cat(rows)

        return attend, torch.cat([F.pad(places_N, (0, tokens - len(places_N))) for places_N in places])

    @torch.no_grad()
    def _step(self, active_Z: Tensor) -> Tensor:
        """Take torch's Adam step for all models with a finite gradient; return the gradients' norms."""
        group = self.trainers[0].optimizer.param_groups[0]
        (beta1, beta2), eps = group["betas"], group["eps"]
        norms_Z: Tensor = self.grads_ZP.norm(dim=1)
        stepped_Z = (active_Z & norms_Z.isfinite()).float()
        scale_Z = (self.settings.max_grad_norm / (norms_Z + 1e-6)).clamp(max=1)
        grads_ZP = torch.where(stepped_Z[:, None] > 0, self.grads_ZP * scale_Z[:, None], 0)
        steps_Z = self.steps_Z + stepped_Z
        means_ZP = self.means_ZP.lerp(grads_ZP, (1 - beta1) * stepped_Z[:, None])
        squares_ZP = self.squares_ZP.lerp(grads_ZP.square_(), (1 - beta2) * stepped_Z[:, None])
        done_Z = steps_Z.clamp(min=1)
        sizes_Z = stepped_Z * self.rates_Z / (1 - beta1**done_Z)
        roots_ZP = squares_ZP.sqrt().div_((1 - beta2**done_Z).sqrt()[:, None]).add_(eps)
        change_ZP = (sizes_Z[:, None] * means_ZP).div_(roots_ZP)
        # All memory is allocated before anything changes, so a failed update can be repeated.
        self.steps_Z.copy_(steps_Z)
        self.means_ZP.copy_(means_ZP)
        self.squares_ZP.copy_(squares_ZP)
        self.weights_ZP -= change_ZP
        return norms_Z
