"""Records forward and backward passes over packed tokens as CUDA graphs, and replays them.

A small model's pass is thousands of short kernels, which take longer to launch than to run. A micro-batch is padded
to the size of a captured graph that is not much larger, copied into static memory, and the graph is replayed. If no
graph fits, a new one is captured. All graphs share one memory pool.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rl_swarm.learning.batches import Batch, BatchShape, stack_rows
from rl_swarm.learning.cuda.attention import BLOCK, Segments

Pass = Callable[..., None]  # (batch, segments, *owner)

ALIGNED = 16  # bytes: every input begins at a multiple
SIZE_STEP = 2 * BLOCK  # tokens: sizes of small graphs are multiples of it
MIN_TOKENS = 8 * BLOCK  # tokens: smaller passes take as long
LARGE = 2048  # tokens, from which less padding is allowed: it costs more than another graph
MIN_SEGMENTS = 128  # room in every graph, so that the number of segments seldom needs another graph

capture_lock = threading.RLock()  # one thread at a time compiles kernels and captures


@contextmanager
def capture(graph: Any, pool: Any = None, stream: Any = None) -> Iterator[None]:
    """Capture the kernels that are launched inside. Other threads may continue to use the GPU."""
    with capture_lock, torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="relaxed"):
        yield


class StaticInputs:
    """Holds the inputs of a graph in one block of memory, filled by one copy that does not wait for the GPU."""

    def __init__(self, batch: Batch, segments: Segments, device: torch.device) -> None:
        tensors = [*vars(batch).values(), *vars(segments).values()]
        self.kinds = [(value.dtype, value.shape, value.nbytes) for value in tensors]
        self.starts = [0, *accumulate(-(-size // ALIGNED) * ALIGNED for _, _, size in self.kinds)]
        self.memory = torch.zeros(self.starts[-1], dtype=torch.uint8, device=device)
        views, fields = self._views(self.memory), len(vars(batch))
        self.batch, self.segments = Batch(*views[:fields]), Segments(*views[fields:])
        self.fill(batch, segments)

    def fill(self, batch: Batch, segments: Segments) -> None:
        """Copy the inputs, padded with zeros to the sizes of the graph."""
        pinned = self.memory.device.type == "cuda"
        host = torch.zeros(len(self.memory), dtype=torch.uint8, pin_memory=pinned)
        tensors = [*vars(batch).values(), *vars(segments).values()]
        for view, values in zip(self._views(host), tensors, strict=True):
            view[: len(values)] = values
        self.memory.copy_(host, non_blocking=True)

    def _views(self, memory: Tensor) -> list[Tensor]:
        parts = zip(self.starts, self.kinds, strict=False)
        return [memory[start : start + size].view(dtype).view(shape) for start, (dtype, shape, size) in parts]


@dataclass
class CapturedGraph:
    graph: Any
    inputs: StaticInputs


class GraphCache:
    def __init__(self, run_pass: Pass, device: torch.device) -> None:
        self.run_pass, self.device = run_pass, device
        self.captured = dict[tuple[Any, ...], CapturedGraph]()  # by tokens, targets, segments and owner
        self.pool: Any = None
        self.side_stream: Any = None  # to warm up and capture on, with workspaces of its own

    def run(self, batch: Batch, shape: BatchShape, *owner: Hashable) -> None:
        if self.device.type != "cuda":
            self.run_pass(batch, Segments.of(shape), *owner)
            return
        tokens, targets = max(MIN_TOKENS, rounded(len(batch.ids_N))), rounded(len(batch.targets_M))
        key = self._key_for(tokens, targets, self._count_segments(shape, tokens), owner)
        if key not in self.captured:
            self.captured[key] = self._capture(*key)
        graph = self.captured[key]
        graph.inputs.fill(batch, Segments.of(shape, key[0], key[2]))
        graph.graph.replay()

    def _key_for(self, tokens: int, targets: int, segments: int, owner: tuple[Hashable, ...]) -> Any:
        """Return the key of the smallest graph that fits with little padding; else of the graph to capture."""
        room = 1 + (1 / 8 if tokens >= LARGE else 1 / 4)
        fitting = [
            key
            for key in self.captured
            if tokens <= key[0] <= max(MIN_TOKENS, tokens * room)
            and targets <= key[1] <= max(SIZE_STEP, targets * room, key[0] // 8)
            and segments + (key[0] - tokens) // BLOCK <= key[2]
            and key[3:] == owner
        ]
        count = max(MIN_SEGMENTS, 1 << (segments - 1).bit_length())
        return min(fitting, default=(tokens, targets, count, *owner))

    @staticmethod
    def _count_segments(shape: BatchShape, tokens: int) -> int:
        """Count the segments of a row, including those of its padding and an empty one."""
        lengths = (*shape.prompts, *shape.completions)
        return len(lengths) + -(-(tokens - sum(lengths)) // BLOCK) + 1

    def drop(self, *owner: Hashable) -> None:
        """Drop the graphs of an owner."""
        for key in [key for key in self.captured if key[3:] == owner]:
            del self.captured[key]

    def release(self) -> None:
        """Free the memory of all graphs."""
        self.captured.clear()
        self.pool = None

    def _capture(self, tokens: int, targets: int, count: int, *owner: Hashable) -> CapturedGraph:
        with capture_lock:
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
                self.side_stream = self.side_stream or torch.cuda.Stream(self.device)
                self._warm_up(self._empty_inputs(SIZE_STEP, SIZE_STEP, MIN_SEGMENTS), *owner)
            inputs = self._empty_inputs(tokens, targets, count)
            graph = torch.cuda.CUDAGraph()
            with capture(graph, self.pool, self.side_stream):
                self.run_pass(inputs.batch, inputs.segments, *owner)
        return CapturedGraph(graph, inputs)

    def _empty_inputs(self, tokens: int, targets: int, count: int) -> StaticInputs:
        return StaticInputs(*self._empty(tokens, targets, count), self.device)

    def _empty(self, tokens: int, targets: int, count: int) -> tuple[Batch, Segments]:
        """Return a batch of this size whose tokens have weight 0."""
        integers = torch.zeros(targets, dtype=torch.int64)
        floats, flags = torch.zeros(targets), torch.zeros(targets, dtype=torch.bool)
        batch = Batch(torch.zeros(tokens, dtype=torch.int64), integers, integers, floats, floats, floats, flags, flags)
        prompts = torch.ones(tokens).tensor_split(count - 1)  # short, since a model may have few positions
        shape = BatchShape(tuple(map(len, prompts)), (), ())
        return batch, Segments.of(shape, tokens, count)

    def _warm_up(self, inputs: StaticInputs, *owner: Hashable) -> None:
        """Compile kernels and initialise libraries before a capture, which must not; a small batch is enough."""
        self.side_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.side_stream):
            self.run_pass(inputs.batch, inputs.segments, *owner)
        torch.cuda.current_stream(self.device).wait_stream(self.side_stream)
        torch.cuda.empty_cache()


class StackedGraphCache(GraphCache):
    """Captures rows of several models side by side, each padded by itself. Sizes are those of one model."""

    def __init__(self, run_pass: Pass, device: torch.device, models: int) -> None:
        super().__init__(run_pass, device)
        self.models = models

    def run_all(self, batches: Sequence[tuple[Batch, BatchShape]]) -> None:
        tokens = max(MIN_TOKENS, rounded(max(len(batch.ids_N) for batch, _ in batches)))
        targets = rounded(max(len(batch.targets_M) for batch, _ in batches))
        key = self._key_for(tokens, targets, max(self._count_segments(shape, tokens) for _, shape in batches), ())
        if key not in self.captured:
            self.captured[key] = self._capture(*key)
        graph, (tokens, targets, count) = self.captured[key], key
        each = [Segments.of(shape, tokens, count) for _, shape in batches]
        batch = stack_rows([batch for batch, _ in batches], tokens, targets)
        graph.inputs.fill(batch, Segments.stack_rows(each, tokens))
        graph.graph.replay()

    def _empty(self, tokens: int, targets: int, count: int) -> tuple[Batch, Segments]:
        batch, segments = super()._empty(tokens, targets, count)
        return (
            stack_rows([batch] * self.models, tokens, targets),
            Segments.stack_rows([segments] * self.models, tokens),
        )


def rounded(tokens: int) -> int:
    """Round tokens up to the size of a graph, which batches of similar size share."""
    step = max(SIZE_STEP, 1 << max(0, tokens.bit_length() - 5))
    return -(-tokens // step) * step
