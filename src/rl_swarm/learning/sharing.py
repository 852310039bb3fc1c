"""Several nodes of one process on one GPU: what each keeps, and what they share.

A node keeps its weights, Adam's moments, and the copy in low precision that it samples from. One engine samples for
all of them at the same time. A desk to train at is there a few times: a model with gradients, activations and
recorded passes, into which a node copies its weights for the time of an update. Nodes use desks one after the other.
"""

import copy
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_swarm.config import Settings
from rl_swarm.learning import sampler
from rl_swarm.learning.batches import TrainingGroup
from rl_swarm.learning.memory import Plan
from rl_swarm.learning.sequences import Model
from rl_swarm.learning.trainer import Trainer, Update

if TYPE_CHECKING:
    from rl_swarm.learning.cuda.engine import Engine


class Sharing:
    """What so many nodes share, all with a model of one shape."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.desks: queue.LifoQueue[Trainer | None] | None = None
        self.engine: Engine | None = None
        self.lock = threading.Lock()

    def admit(self, model: Model, pad: int, settings: Settings, plan: Plan) -> Trainer:
        """The trainer of one more node. The plan of the first decides what is shared."""
        with self.lock:
            if self.desks is None:
                self.desks = queue.LifoQueue()
                for _ in range(plan.desks):
                    self.desks.put(None)  # not made yet
        if sampler.engine_of(model) is not None:
            from rl_swarm.learning.cuda.engine import Engine

            with self.lock:
                self.engine = self.engine or Engine(self.nodes, sequences=plan.sequences)
            sampler.share(model, self.engine)
        return SharedTrainer(model, pad, settings, self.desks)


class SharedTrainer(Trainer):
    """Takes the gradients of its updates at a desk."""

    def __init__(
        self, model: Model, pad: int, settings: Settings, desks: "queue.LifoQueue[Trainer | None]"
    ) -> None:
        super().__init__(model, pad, settings)
        self.recorder = None
        self.desks = desks
        self.desk: Trainer | None = None

    def _update(self, groups: Sequence[TrainingGroup]) -> Update:
        with self._seated():
            return super()._update(groups)

    @contextmanager
    def _seated(self) -> Iterator[None]:
        """At a desk that has this node's weights."""
        self.desk = self.desks.get()
        try:
            self.desk = desk = self.desk or self._new_desk()
            with torch.no_grad():
                torch._foreach_copy_(desk.parameters(), self.parameters())
            desk.batch_tokens, desk.frugal = self.batch_tokens, self.frugal
            yield
            desk.optimizer.zero_grad(set_to_none=desk.recorder is None)
        except BaseException:
            if self.desk is not None:
                self.desk.release()
            raise
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            if self.model.device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # the next one works on a stream of its own
            self.desks.put(self.desk)
            self.desk = None

    def _new_desk(self) -> Trainer:
        desk = Trainer(copy.deepcopy(self.model), self.pad, self.settings)
        desk.reference = self.reference
        return desk

    def _gradients(self, groups: Sequence[TrainingGroup], tokens: int) -> Tensor:
        assert self.desk is not None
        figures = self.desk._gradients(groups, tokens)
        for mine, theirs in zip(self.parameters(), self.desk.parameters(), strict=True):
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
