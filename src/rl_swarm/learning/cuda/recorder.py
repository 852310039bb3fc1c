"""Passes over packed tokens recorded as CUDA graphs: a whole micro-batch without a word of Python.

A small model's pass is thousands of short kernels, which take longer to launch than to run. Micro-batches are
filled up to one of a few sizes, copied into fixed memory, and the recorded pass of that size is replayed. All
recordings share one pool of memory.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rl_swarm.learning.batches import Batch, Shape
from rl_swarm.learning.cuda.attention import BLOCK, Segments

Step = Callable[..., None]  # of a batch, its segments, and what else a recording is made for

LEAST_SEGMENTS = 128  # that a recording has room for, so that their number seldom asks for another

one_at_a_time = threading.RLock()  # of the threads that compile and record


@contextmanager
def recording(graph: Any, pool: Any = None, stream: Any = None) -> Iterator[None]:
    """Records what is launched inside. Other threads may go on with their work on the GPU."""
    with (
        one_at_a_time,
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="relaxed"),
    ):
        yield


@dataclass
class Recording:
    graph: Any
    batch: Batch
    segments: Segments


class Recorder:
    def __init__(self, step: Step, device: torch.device) -> None:
        self.step, self.device = step, device
        self.recordings = dict[tuple[Hashable, ...], Recording]()
        self.pool: Any = None
        self.aside: Any = None  # a stream of its own to rehearse and record on: it brings its own workspaces

    def run(self, batch: Batch, shape: Shape, *whose: Hashable) -> None:
        if self.device.type != "cuda":
            self.step(batch, Segments.of(shape), *whose)
            return
        tokens = self.size_for(max(len(batch.ids_N), len(batch.targets_M)))
        filler = -(-(tokens - len(batch.ids_N)) // BLOCK)
        segments = len(shape.prompts) + len(shape.completions) + filler + 1
        size = (tokens, max(LEAST_SEGMENTS, 1 << (segments - 1).bit_length()))
        key = (*size, *whose)
        if key not in self.recordings:
            self.recordings[key] = self._record(*size, *whose)
        recorded = self.recordings[key]  # what is copied from pinned memory does not wait for the GPU
        for place, given in zip(vars(recorded.batch).values(), vars(batch).values(), strict=True):
            place.zero_()
            place[: len(given)].copy_(given.pin_memory(), non_blocking=True)
        filled = Segments.of(shape, *size)
        for place, given in zip(vars(recorded.segments).values(), vars(filled).values(), strict=True):
            place.copy_(given.pin_memory(), non_blocking=True)
        recorded.graph.replay()

    def forget(self, *whose: Hashable) -> None:
        """Those recordings are of no use any more."""
        for key in [key for key in self.recordings if key[2:] == whose]:
            del self.recordings[key]

    def release(self) -> None:
        """Gives the memory of all recordings back."""
        self.recordings.clear()
        self.pool = None

    def _record(self, tokens: int, count: int, *whose: Hashable) -> Recording:
        with one_at_a_time:
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
                self.aside = self.aside or torch.cuda.Stream(self.device)
                self._rehearse(*self._nothing(2 * BLOCK, LEAST_SEGMENTS), *whose)
            batch, segments = self._nothing(tokens, count)
            graph = torch.cuda.CUDAGraph()
            with recording(graph, self.pool, self.aside):
                self.step(batch, segments, *whose)
        return Recording(graph, batch, segments)

    def _nothing(self, tokens: int, count: int) -> tuple[Batch, Segments]:
        """A batch of this size that changes nothing: its tokens have weight 0."""
        whole = torch.zeros(tokens, dtype=torch.int64)
        real, truth = torch.zeros(tokens), torch.zeros(tokens, dtype=torch.bool)
        batch = Batch(whole, whole, whole, real, real, real, truth, truth)
        batch = Batch(*(value.to(self.device, copy=True) for value in vars(batch).values()))
        stretches = torch.ones(tokens).tensor_split(count - 1)  # short, since a model may know few positions
        shape = Shape(tuple(len(stretch) for stretch in stretches), (), ())
        return batch, Segments.of(shape, tokens, count).to(self.device)

    def _rehearse(self, batch: Batch, segments: Segments, *whose: Hashable) -> None:
        """Compiles kernels and sets up libraries, which a recording must not. A small batch is enough."""
        self.aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.aside):
            self.step(batch, segments, *whose)
        torch.cuda.current_stream(self.device).wait_stream(self.aside)
        torch.cuda.empty_cache()

    @staticmethod
    def size_for(tokens: int) -> int:
        """Sizes that recordings are made for: four between one power of two and the next, and none very small.

        A small pass takes as long as a smaller one, and every size has to be recorded.
        """
        step = max(2 * BLOCK, 1 << max(0, tokens.bit_length() - 3))
        return max(8 * BLOCK, -(-tokens // step) * step)
