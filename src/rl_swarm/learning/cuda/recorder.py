"""Passes over packed tokens recorded as CUDA graphs: a whole micro-batch without a word of Python.

A small model's pass is thousands of short kernels, which take longer to launch than to run. Micro-batches are
filled up to one of a few sizes, copied into fixed memory, and the recorded pass of that size is replayed. All
recordings share one pool of memory.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rl_swarm.learning.batches import Batch, Shape
from rl_swarm.learning.cuda.attention import BLOCK, Segments

Step = Callable[..., None]  # of a batch, its segments, and what else a recording is made for

PARTS = 8  # of a row: the tokens learned from are filled up to some of them
ALIGNED = 16  # bytes, at a multiple of which everything begins
MANY = 2048  # tokens, from which there are more sizes: what fills up costs more than a recording
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


class Inputs:
    """What a recording reads, in one piece of memory: it is filled with one copy, which does not wait for the GPU."""

    def __init__(self, batch: Batch, segments: Segments, device: torch.device) -> None:
        given = [*vars(batch).values(), *vars(segments).values()]
        self.kinds = [(value.dtype, value.shape, value.nbytes) for value in given]
        self.starts = [0, *accumulate(-(-size // ALIGNED) * ALIGNED for _, _, size in self.kinds)]
        self.memory = torch.zeros(self.starts[-1], dtype=torch.uint8, device=device)
        views, fields = self._views(self.memory), len(vars(batch))
        self.batch, self.segments = Batch(*views[:fields]), Segments(*views[fields:])
        self.fill(batch, segments)

    def fill(self, batch: Batch, segments: Segments) -> None:
        """Takes these; what is shorter than its place is followed by zeros."""
        pinned = self.memory.device.type == "cuda"
        host = torch.zeros(len(self.memory), dtype=torch.uint8, pin_memory=pinned)
        given = [*vars(batch).values(), *vars(segments).values()]
        for place, values in zip(self._views(host), given, strict=True):
            place[: len(values)] = values
        self.memory.copy_(host, non_blocking=True)

    def _views(self, memory: Tensor) -> list[Tensor]:
        parts = zip(self.starts, self.kinds, strict=False)
        return [memory[start : start + size].view(dtype).view(shape) for start, (dtype, shape, size) in parts]


@dataclass
class Recording:
    graph: Any
    inputs: Inputs


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
        tokens = self.size_for(len(batch.ids_N))
        targets = -(-len(batch.targets_M) // (tokens // PARTS)) * (tokens // PARTS)
        filler = -(-(tokens - len(batch.ids_N)) // BLOCK)
        segments = len(shape.prompts) + len(shape.completions) + filler + 1
        count = max(LEAST_SEGMENTS, 1 << (segments - 1).bit_length())
        key = (tokens, targets, count, *whose)
        if key not in self.recordings:
            self.recordings[key] = self._record(tokens, targets, count, *whose)
        recorded = self.recordings[key]
        recorded.inputs.fill(batch, Segments.of(shape, tokens, count))
        recorded.graph.replay()

    def forget(self, *whose: Hashable) -> None:
        """Those recordings are of no use any more."""
        for key in [key for key in self.recordings if key[3:] == whose]:
            del self.recordings[key]

    def release(self) -> None:
        """Gives the memory of all recordings back."""
        self.recordings.clear()
        self.pool = None

    def _record(self, tokens: int, targets: int, count: int, *whose: Hashable) -> Recording:
        with one_at_a_time:
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
                self.aside = self.aside or torch.cuda.Stream(self.device)
                self._rehearse(self._nothing(2 * BLOCK, 2 * BLOCK, LEAST_SEGMENTS), *whose)
            inputs = self._nothing(tokens, targets, count)
            graph = torch.cuda.CUDAGraph()
            with recording(graph, self.pool, self.aside):
                self.step(inputs.batch, inputs.segments, *whose)
        return Recording(graph, inputs)

    def _nothing(self, tokens: int, targets: int, count: int) -> Inputs:
        """A batch of this size that changes nothing: its tokens have weight 0."""
        whole = torch.zeros(targets, dtype=torch.int64)
        real, truth = torch.zeros(targets), torch.zeros(targets, dtype=torch.bool)
        batch = Batch(torch.zeros(tokens, dtype=torch.int64), whole, whole, real, real, real, truth, truth)
        stretches = torch.ones(tokens).tensor_split(count - 1)  # short, since a model may know few positions
        shape = Shape(tuple(len(stretch) for stretch in stretches), (), ())
        return Inputs(batch, Segments.of(shape, tokens, count), self.device)

    def _rehearse(self, inputs: Inputs, *whose: Hashable) -> None:
        """Compiles kernels and sets up libraries, which a recording must not. A small batch is enough."""
        self.aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.aside):
            self.step(inputs.batch, inputs.segments, *whose)
        torch.cuda.current_stream(self.device).wait_stream(self.aside)
        torch.cuda.empty_cache()

    @staticmethod
    def size_for(tokens: int) -> int:
        """Sizes that recordings are made for: a few between one power of two and the next, and none very small.

        A small pass takes as long as a smaller one, and every size has to be recorded.
        """
        fine = 4 if tokens >= MANY else 3
        step = max(2 * BLOCK, 1 << max(0, tokens.bit_length() - fine))
        return max(8 * BLOCK, -(-tokens // step) * step)
