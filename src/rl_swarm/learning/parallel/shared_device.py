"""Shares one GPU among several nodes of a process.

A node keeps its weights, Adam's moments, and the low-precision copy that it samples from. One engine samples for
all nodes at the same time. One or two training slots hold a model with gradients, activations and CUDA graphs; a
node copies its weights into a slot for an update. Nodes use a slot one after the other.
"""

import copy
import queue
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_swarm.learning import sampler
from rl_swarm.learning.batches import TrainingGroup
from rl_swarm.learning.memory import Plan
from rl_swarm.learning.sequences import Model
from rl_swarm.learning.settings import LearningSettings
from rl_swarm.learning.sizes import alike
from rl_swarm.learning.trainer import Trainer

if TYPE_CHECKING:
    from rl_swarm.learning.cuda.engine import CudaEngine


class SharedDevice:
    """Holds the engines and training slots of the nodes of a process.

    Nodes with models of one shape share an engine, and training slots if their losses are equal, too.
    """

    def __init__(self, nodes: int, threads: bool = True) -> None:
        self.nodes, self.threads = nodes, threads  # whether every node has a thread of its own
        self.slots = dict[Hashable, queue.LifoQueue[TrainingSlot]]()
        self.engines = dict[Hashable, "CudaEngine"]()
        self.lock = threading.Lock()

    def make_trainer(
        self, model: Model, pad: int, settings: LearningSettings, plan: Plan, temperature: float = 1.0
    ) -> Trainer:
        """Return the trainer of one more node. The plan of the first node of a kind decides the number of slots."""
        design = (alike(model), settings.lora_rank)
        kind = (design, temperature, settings.clip_low, settings.clip_high, settings.kl_weight)
        with self.lock:
            if kind not in self.slots:
                self.slots[kind] = queue.LifoQueue()
                for _ in range(plan.training_slots):
                    self.slots[kind].put(TrainingSlot())
        if sampler.engine_of(model) is not None:
            from rl_swarm.learning.cuda.engine import CudaEngine

            with self.lock:
                if design not in self.engines:
                    self.engines[design] = CudaEngine(self.nodes, sequences=plan.sequences, threads=self.threads)
            sampler.use_engine(model, self.engines[design])
        return SharedTrainer(model, pad, settings, temperature, self.slots[kind])


@dataclass
class TrainingSlot:
    trainer: Trainer | None = None  # made by the first node that uses the slot
    free: "torch.cuda.Event | None" = None  # set when the GPU has finished the work of the last node


class SharedTrainer(Trainer):
    """Computes the gradients of its updates in a training slot."""

    def __init__(
        self,
        model: Model,
        pad: int,
        settings: LearningSettings,
        temperature: float,
        slots: "queue.LifoQueue[TrainingSlot]",
    ) -> None:
        super().__init__(model, pad, settings, temperature)
        self.graphs = None
        self.slots = slots
        self.slot_trainer: Trainer | None = None

    def _launch_update(self, groups: Sequence[TrainingGroup], tokens: int) -> Tensor:
        with self._training_slot():
            return super()._launch_update(groups, tokens)

    @contextmanager
    def _training_slot(self) -> Iterator[None]:
        """Take a slot with this node's weights. The next node may take it while the GPU still works for this one."""
        slot = self.slots.get()
        on_gpu = self.model.device.type == "cuda"
        try:
            if slot.free is not None:
                torch.cuda.current_stream().wait_event(slot.free)
            self.slot_trainer = slot.trainer = trainer = slot.trainer or self._new_trainer()
            with torch.no_grad():
                torch._foreach_copy_(trainer.parameters(), self.parameters())
            trainer.batch_tokens, trainer.checkpointed = self.batch_tokens, self.checkpointed
            yield
            trainer.optimizer.zero_grad(set_to_none=trainer.graphs is None)
        except BaseException:
            if slot.trainer is not None:
                if on_gpu:
                    torch.cuda.current_stream().synchronize()  # memory that is freed may be in use
                slot.trainer.release()
            raise
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            self.slot_trainer = None
            if on_gpu:
                slot.free = torch.cuda.Event()  # type: ignore[no-untyped-call]
                slot.free.record()
            self.slots.put(slot)

    def _new_trainer(self) -> Trainer:
        trainer = Trainer(copy.deepcopy(self.model), self.pad, self.settings, self.temperature)
        trainer.reference = self.reference
        return trainer

    def _gradients(self, groups: Sequence[TrainingGroup], tokens: int) -> Tensor:
        assert self.slot_trainer is not None
        metrics = self.slot_trainer._gradients(groups, tokens)
        for mine, theirs in zip(self.parameters(), self.slot_trainer.parameters(), strict=True):
            mine.grad = theirs.grad
        return metrics


@contextmanager
def own_stream() -> Iterator[None]:
    """Launch the work of this thread on a CUDA stream of its own, which does not wait for other threads."""
    if not torch.cuda.is_available():
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        yield
