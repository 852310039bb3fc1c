"""Records forward and backward passes over packed tokens as CUDA graphs, and replays them.

A small model's pass is thousands of short kernels, which take longer to launch than to run. A micro-batch is filled
up to the size of a recording that is not much larger, copied into fixed memory, and the recorded pass is replayed;
where there is none, one is made that fits. All recordings share one pool of memory.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rl_swarm.learning.batches import Batch, BatchShape, side_by_side
from rl_swarm.learning.cuda.attention import BLOCK, Segments

Step = Callable[..., None]  # of a batch, its segments, and what else a recording is made for

ALIGNED = 16  # bytes, at a multiple of which everything begins
STEP = 2 * BLOCK  # tokens, of which a recording has a multiple; larger ones of more
LEAST = 8 * BLOCK  # tokens: a small pass takes as long as a smaller one
MANY = 2048  # tokens, from which recordings must fit better: what fills up costs more than another recording
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
        self.recordings = dict[tuple[Any, ...], Recording]()  # by tokens, targets, segments, and whose
        self.pool: Any = None
        self.aside: Any = None  # a stream of its own to rehearse and record on: it brings its own workspaces

    def run(self, batch: Batch, shape: BatchShape, *whose: Hashable) -> None:
        if self.device.type != "cuda":
            self.step(batch, Segments.of(shape), *whose)
            return
        tokens, targets = max(LEAST, rounded(len(batch.ids_N))), rounded(len(batch.targets_M))
        key = self._fitting(tokens, targets, self._segments(shape, tokens), whose)
        if key not in self.recordings:
            self.recordings[key] = self._record(*key)
        recorded = self.recordings[key]
        recorded.inputs.fill(batch, Segments.of(shape, key[0], key[2]))
        recorded.graph.replay()

    def _fitting(self, tokens: int, targets: int, segments: int, whose: tuple[Hashable, ...]) -> Any:
        """The smallest recording into which a batch of this size fits with little left; else the one to make."""
        room = 1 + (1 / 8 if tokens >= MANY else 1 / 4)
        fitting = [
            key
            for key in self.recordings
            if tokens <= key[0] <= max(LEAST, tokens * room)
            and targets <= key[1] <= max(STEP, targets * room, key[0] // 8)
            and segments + (key[0] - tokens) // BLOCK <= key[2]
            and key[3:] == whose
        ]
        count = max(LEAST_SEGMENTS, 1 << (segments - 1).bit_length())
        return min(fitting, default=(tokens, targets, count, *whose))

    @staticmethod
    def _segments(shape: BatchShape, tokens: int) -> int:
        """How many there are, with those that fill up the row, and an empty one."""
        lengths = (*shape.prompts, *shape.completions)
        return len(lengths) + -(-(tokens - sum(lengths)) // BLOCK) + 1

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
                self._rehearse(self._nothing(STEP, STEP, LEAST_SEGMENTS), *whose)
            inputs = self._nothing(tokens, targets, count)
            graph = torch.cuda.CUDAGraph()
            with recording(graph, self.pool, self.aside):
                self.step(inputs.batch, inputs.segments, *whose)
        return Recording(graph, inputs)

    def _nothing(self, tokens: int, targets: int, count: int) -> Inputs:
        return Inputs(*self._empty(tokens, targets, count), self.device)

    def _empty(self, tokens: int, targets: int, count: int) -> tuple[Batch, Segments]:
        """A batch of this size that changes nothing: its tokens have weight 0."""
        whole = torch.zeros(targets, dtype=torch.int64)
        real, truth = torch.zeros(targets), torch.zeros(targets, dtype=torch.bool)
        batch = Batch(torch.zeros(tokens, dtype=torch.int64), whole, whole, real, real, real, truth, truth)
        stretches = torch.ones(tokens).tensor_split(count - 1)  # short, since a model may know few positions
        shape = BatchShape(tuple(len(stretch) for stretch in stretches), (), ())
        return batch, Segments.of(shape, tokens, count)

    def _rehearse(self, inputs: Inputs, *whose: Hashable) -> None:
        """Compiles kernels and sets up libraries, which a recording must not. A small batch is enough."""
        self.aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.aside):
            self.step(inputs.batch, inputs.segments, *whose)
        torch.cuda.current_stream(self.device).wait_stream(self.aside)
        torch.cuda.empty_cache()


class StackedRecorder(Recorder):
    """For rows of several models side by side, each of which is filled up by itself. Sizes are those of one model."""

    def __init__(self, step: Step, device: torch.device, models: int) -> None:
        super().__init__(step, device)
        self.models = models

    def run_all(self, batches: Sequence[tuple[Batch, BatchShape]]) -> None:
        tokens = max(LEAST, rounded(max(len(batch.ids_N) for batch, _ in batches)))
        targets = rounded(max(len(batch.targets_M) for batch, _ in batches))
        key = self._fitting(tokens, targets, max(self._segments(shape, tokens) for _, shape in batches), ())
        if key not in self.recordings:
            self.recordings[key] = self._record(*key)
        recorded, (tokens, targets, count) = self.recordings[key], key
        each = [Segments.of(shape, tokens, count) for _, shape in batches]
        batch = side_by_side([batch for batch, _ in batches], tokens, targets)
        recorded.inputs.fill(batch, Segments.side_by_side(each, tokens))
        recorded.graph.replay()

    def _empty(self, tokens: int, targets: int, count: int) -> tuple[Batch, Segments]:
        batch, segments = super()._empty(tokens, targets, count)
        return (
            side_by_side([batch] * self.models, tokens, targets),
            Segments.side_by_side([segments] * self.models, tokens),
        )


def rounded(tokens: int) -> int:
    """For how many tokens a recording is made that has room for so many: batches of about one size share it."""
    step = max(STEP, 1 << max(0, tokens.bit_length() - 5))
    return -(-tokens // step) * step
