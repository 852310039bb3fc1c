"""Shares one GPU among several nodes of a process: what each keeps, and what they share.

A node keeps its weights, Adam's moments, and the copy in low precision that it samples from. One engine samples for
all of them at the same time. A desk to train at is there a few times: a model with gradients, activations and
recorded passes, into which a node copies its weights for the time of an update. Nodes use desks one after the other.
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


class Sharing:
    """What at most so many nodes share: those whose models are alike an engine, and a desk if their losses are too."""

    def __init__(self, nodes: int, threads: bool = True) -> None:
        self.nodes, self.threads = nodes, threads  # whether every node has a thread of its own
        self.desks = dict[Hashable, queue.LifoQueue[TrainingSlot]]()
        self.engines = dict[Hashable, "CudaEngine"]()
        self.lock = threading.Lock()

    def admit(
        self, model: Model, pad: int, settings: LearningSettings, plan: Plan, temperature: float = 1.0
    ) -> Trainer:
        """The trainer of one more node. The plan of the first of its kind decides what is shared."""
        design = (alike(model), settings.lora_rank)
        kind = (design, temperature, settings.clip_low, settings.clip_high, settings.kl_weight)
        with self.lock:
            if kind not in self.desks:
                self.desks[kind] = queue.LifoQueue()
                for _ in range(plan.desks):
                    self.desks[kind].put(TrainingSlot())
        if sampler.engine_of(model) is not None:
            from rl_swarm.learning.cuda.engine import CudaEngine

            with self.lock:
                if design not in self.engines:
                    self.engines[design] = CudaEngine(self.nodes, sequences=plan.sequences, threads=self.threads)
            sampler.share(model, self.engines[design])
        return SharedTrainer(model, pad, settings, temperature, self.desks[kind])


@dataclass
class TrainingSlot:
    trainer: Trainer | None = None  # made by the first who sits there
    free: "torch.cuda.Event | None" = None  # when the GPU has done all that its last user gave it to do


class SharedTrainer(Trainer):
    """Takes the gradients of its updates at a desk."""

    def __init__(
        self,
        model: Model,
        pad: int,
        settings: LearningSettings,
        temperature: float,
        desks: "queue.LifoQueue[TrainingSlot]",
    ) -> None:
        super().__init__(model, pad, settings, temperature)
        self.recorder = None
        self.desks = desks
        self.seat: Trainer | None = None

    def _launched(self, groups: Sequence[TrainingGroup], tokens: int) -> Tensor:
        with self._seated():
            return super()._launched(groups, tokens)

    @contextmanager
    def _seated(self) -> Iterator[None]:
        """At a desk that has this node's weights. The next may sit down while the GPU is still at work for this one."""
        desk = self.desks.get()
        on_gpu = self.model.device.type == "cuda"
        try:
            if desk.free is not None:
                torch.cuda.current_stream().wait_event(desk.free)
            self.seat = desk.trainer = trainer = desk.trainer or self._new_trainer()
            with torch.no_grad():
                torch._foreach_copy_(trainer.parameters(), self.parameters())
            trainer.batch_tokens, trainer.frugal = self.batch_tokens, self.frugal
            yield
            trainer.optimizer.zero_grad(set_to_none=trainer.recorder is None)
        except BaseException:
            if desk.trainer is not None:
                if on_gpu:
                    torch.cuda.current_stream().synchronize()  # what is given back may be in use
                desk.trainer.release()
            raise
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            self.seat = None
            if on_gpu:
                desk.free = torch.cuda.Event()  # type: ignore[no-untyped-call]
                desk.free.record()
            self.desks.put(desk)

    def _new_trainer(self) -> Trainer:
        trainer = Trainer(copy.deepcopy(self.model), self.pad, self.settings, self.temperature)
        trainer.reference = self.reference
        return trainer

    def _gradients(self, groups: Sequence[TrainingGroup], tokens: int) -> Tensor:
        assert self.seat is not None
        figures = self.seat._gradients(groups, tokens)
        for mine, theirs in zip(self.parameters(), self.seat.parameters(), strict=True):
            mine.grad = theirs.grad
        return figures


@contextmanager
def own_stream() -> Iterator[None]:
    """What this thread gives the GPU to do does not wait for the work of other threads."""
    if not torch.cuda.is_available():
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        yield
