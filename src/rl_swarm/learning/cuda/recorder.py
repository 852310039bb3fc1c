"""Passes over packed tokens recorded as CUDA graphs: a whole micro-batch without a word of Python.

A small model's pass is thousands of short kernels, which take longer to launch than to run. Micro-batches are
filled up to one of a few sizes, copied into fixed memory, and the recorded pass of that size is replayed. All
recordings share one pool of memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rl_swarm.learning.batches import Batch, Shape
from rl_swarm.learning.cuda.attention import BLOCK, Segments

Step = Callable[[Batch, Segments], None]


@dataclass
class Recording:
    graph: Any
    batch: Batch
    segments: Segments


class Recorder:
    def __init__(self, step: Step, device: torch.device) -> None:
        self.step, self.device = step, device
        self.recordings = dict[tuple[int, int], Recording]()
        self.pool: Any = None
        self.aside: Any = None  # one stream for all rehearsals, since each has workspaces of its own

    def run(self, batch: Batch, shape: Shape) -> None:
        if self.device.type != "cuda":
            self.step(batch, Segments.of(shape))
            return
        tokens = self.size_for(max(len(batch.ids_N), len(batch.targets_M)))
        filler = -(-(tokens - len(batch.ids_N)) // BLOCK)
        segments = len(shape.prompts) + len(shape.completions) + filler + 1
        key = (tokens, 1 << (segments - 1).bit_length())
        if key not in self.recordings:
            self.recordings[key] = self._record(*key)
        recording = self.recordings[key]
        for place, given in zip(vars(recording.batch).values(), vars(batch).values(), strict=True):
            place.zero_()
            place[: len(given)].copy_(given, non_blocking=True)
        filled = Segments.of(shape, *key)
        for place, given in zip(vars(recording.segments).values(), vars(filled).values(), strict=True):
            place.copy_(given, non_blocking=True)
        recording.graph.replay()

    def release(self) -> None:
        """Gives the memory of all recordings back."""
        self.recordings.clear()
        self.pool = None

    def _record(self, tokens: int, count: int) -> Recording:
        whole = torch.zeros(tokens, dtype=torch.int64)
        real, truth = torch.zeros(tokens), torch.zeros(tokens, dtype=torch.bool)
        batch = Batch(whole, whole, whole, real, real, real, truth, truth)  # of weight 0: it changes nothing
        batch = Batch(*(value.to(self.device, copy=True) for value in vars(batch).values()))
        stretches = torch.ones(tokens).tensor_split(count - 1)  # short, since a model may know few positions
        shape = Shape(tuple(len(stretch) for stretch in stretches), (), ())
        segments = Segments.of(shape, tokens, count).to(self.device)
        if self.aside is None:
            self.aside = torch.cuda.Stream(self.device)
        aside = self.aside
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):
            self.step(batch, segments)  # compiles what is new
        torch.cuda.current_stream(self.device).wait_stream(aside)
        torch.cuda.empty_cache()
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self.step(batch, segments)
        return Recording(graph, batch, segments)

    @staticmethod
    def size_for(tokens: int) -> int:
        """Sizes that recordings are made for: eight between one power of two and the next."""
        step = max(BLOCK, 1 << max(0, tokens.bit_length() - 4))
        return -(-tokens // step) * step
