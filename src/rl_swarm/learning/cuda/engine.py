"""Sampling on a GPU: one decoding step is a handful of kernels per layer, recorded once and replayed.

The engine keeps one copy of the weights in bfloat16, refreshed when the trainer has changed them. The static
cache of keys and values, and all else that a step writes, lie in a `Scratch`; several models of one shape can use
the same, one after the other. A CUDA graph is recorded for each of a few batch sizes. The device decides which
token comes next and which sequence has ended; now and then the host looks, and goes on with the smallest graph
that holds the sequences still growing. Shapes as in `decoding`; B sequences, P prompts.
"""

import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_swarm.learning.batches import Batch, Shape, flat
from rl_swarm.learning.cuda import decoding as kernels
from rl_swarm.learning.cuda.attention import Segments
from rl_swarm.learning.cuda.recorder import Recorder, one_at_a_time, recording
from rl_swarm.learning.decoder import Decoder
from rl_swarm.learning.devices import release_memory
from rl_swarm.learning.weights import Layer, Linear, Norm, Weights

if TYPE_CHECKING:
    from rl_swarm.learning.sampler import Decoding

LOOK_EVERY = 8  # steps between looks at which sequences have ended
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # batches that graphs are made for
STRETCH = 4096  # words that one program looks at
LEAST_PROMPTS = 1024  # tokens that there is room for


class Room(NamedTuple):
    """The largest batch that fits into the memory reserved so far."""

    sequences: int = 0
    tokens: int = 0  # of a completion
    prompt_tokens: int = 0  # of all prompts together
    length: int = 0  # of the longest prompt and its completion


class Drawn(NamedTuple):
    """On the host."""

    tokens_BT: Tensor
    logprobs_BT: Tensor
    lengths_B: Tensor


class Scratch:
    """Memory to sample in. It is kept between calls, so that recorded graphs stay valid."""

    def __init__(self, sequences: int = 0) -> None:
        self.lock, self.room = threading.Lock(), Room()
        self.least = Room(size_for(sequences))
        self.version = 0  # of the memory

    def reserve(self, wanted: Room, weights: Weights) -> None:
        """More memory, enough for a batch of this size too."""
        room = Room(*map(max, wanted, self.room, self.least))
        self.release()
        B, T, N, L = room
        decoder, low = weights.decoder, weights.dtype
        width, key_heads, (V, E) = decoder.head_size, decoder.key_heads, weights.head.weight.shape

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=weights.words.device)

        written = (len(decoder.layers), B + 1, key_heads, T, width)
        self.keys, self.values = (new(*written, dtype=low) for _ in range(2))
        read = (len(decoder.layers), N, key_heads, width)
        self.prompt_keys, self.prompt_values = (new(*read, dtype=low) for _ in range(2))
        self.hidden_ME, self.side_ME = new(B, E), new(B, E)
        self.low_ME, self.low_side_ME = new(B, E, dtype=low), new(B, E, dtype=low)
        self.squares_MS = new(B, -(-E // 16))
        self.qkv_MN = new(B, (decoder.heads + 2 * key_heads) * width, dtype=low)
        self.attended_MN = new(B, decoder.heads * width, dtype=low)
        self.inner_MN = new(B, weights.inner, dtype=low)
        self.logits_MV, self.lowest_M = new(B, V), new(B)
        self.stretches = -(-V // STRETCH)
        self.best_MS, self.top_MS, self.sum_MS = (new(B, self.stretches) for _ in range(3))
        self.where_MS = new(B, self.stretches, dtype=torch.int32)
        self.slots_M, self.read_NE = new(B, dtype=torch.int32), new(N, E)
        self.lengths_B, self.done_B = new(B + 1, dtype=torch.int32), new(B + 1, dtype=torch.int32)
        self.prompt_starts_B, self.prompt_lengths_B = (new(B + 1, dtype=torch.int32) for _ in range(2))
        self.tokens_BT, self.logprobs_BT = new(B + 1, T, dtype=torch.int32), new(B + 1, T)
        self.seed_1, self.limit_1 = new(1, dtype=torch.int64), new(1, dtype=torch.int32)
        self.turns = decoder.rotations(self.hidden_ME, torch.arange(L, device=weights.words.device))
        self.room, self.version = room, self.version + 1

    def release(self) -> None:
        """Gives the memory back."""
        for name in [name for name, value in vars(self).items() if isinstance(value, Tensor)]:
            delattr(self, name)
        self.room = Room()
        release_memory()  # what follows may be of another size, and for another thread


class Engine:
    """Samples from one model."""

    def __init__(
        self, model: Any, dtype: torch.dtype = torch.bfloat16, scratch: Scratch | None = None
    ) -> None:
        self.decoder, self.device = Decoder(model), model.device
        self.weights = Weights(self.decoder, dtype)
        self.scratch, self.version = scratch or Scratch(), 0
        self.reader = Recorder(self._read, self.device)
        self.graphs = dict[object, Any]()
        self.ends = dict[frozenset[int], Tensor]()
        self.parts = 1  # sums of squares per row of the residual stream

    @staticmethod
    def supports(model: Any) -> bool:
        return Weights.supports(Decoder(model))

    def sample(self, prompts: Sequence[Sequence[int]], count: int, decoding: "Decoding", seed: int) -> Drawn:
        with self.scratch.lock:
            return self._sample(prompts, count, decoding, seed)

    def _sample(self, prompts: Sequence[Sequence[int]], count: int, decoding: "Decoding", seed: int) -> Drawn:
        at = self.scratch
        total, limit = len(prompts) * count, decoding.max_new_tokens
        self.weights.refresh()
        lengths = list(map(len, prompts))
        read = power(max(LEAST_PROMPTS, Recorder.size_for(sum(lengths))))
        self._reserve(Room(size_for(total), limit, read, power(max(lengths)) + limit))
        self._start(total, limit, seed)
        self._read_prompts(prompts, count)
        self._draw(total, decoding)

        going = list(range(total))
        for step in range(1, limit):
            if decoding.eos and step % LOOK_EVERY == 0:
                done = at.done_B.tolist()
                left = [slot for slot in going if not done[slot]]
                if not left:
                    break
                if size_for(len(left)) < size_for(len(going)):
                    going = left
                    self._choose(going)
            self._replay(size_for(len(going)), decoding)
        drawn = (at.tokens_BT[:total, :limit], at.logprobs_BT[:total, :limit], at.lengths_B[:total])
        return Drawn(*(values.cpu() for values in drawn))

    def _reserve(self, wanted: Room) -> None:
        """Memory for a batch of this size. New memory makes the recorded graphs worthless."""
        if any(more > there for more, there in zip(wanted, self.scratch.room, strict=True)):
            self._forget()
            self.scratch.reserve(wanted, self.weights)
        if self.version != self.scratch.version:
            self._forget()
            self.version = self.scratch.version

    def _forget(self) -> None:
        self.graphs.clear()
        self.reader.release()

    def release(self) -> None:
        """Gives the memory of cache and graphs back."""
        with self.scratch.lock:
            self._forget()
            self.scratch.release()

    def _start(self, total: int, limit: int, seed: int) -> None:
        at = self.scratch
        at.lengths_B.zero_()
        at.lengths_B[-1] = 1  # the last slot is nobody's: it fills up batches
        at.done_B.zero_()
        at.done_B[total:] = 1
        at.seed_1.fill_(seed * 0x9E3779B97F4A7C15 % (1 << 62))
        at.limit_1.fill_(limit)
        self._choose(list(range(total)))

    def _choose(self, going: list[int]) -> None:
        """These sequences are the batch, in this order."""
        most = nobody = self.scratch.room.sequences
        rows = going + [nobody] * (most - len(going))
        self.scratch.slots_M.copy_(torch.tensor(rows, dtype=torch.int32))

    def _read_prompts(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        """Runs every prompt once: keys and values into the cache, the last state as the start of completions."""
        at = self.scratch
        ids_N = flat(prompts, np.int64)
        lengths = tuple(map(len, prompts))
        ends_B = torch.tensor([end for end in accumulate(lengths) for _ in range(count)]).to(self.device)
        lengths_B = torch.tensor([length for length in lengths for _ in range(count)]).to(self.device)
        self.reader.run(Batch.reading(ids_N), Shape(lengths, (), ()))
        hidden_ME = at.read_NE[ends_B - 1]
        total = len(hidden_ME)
        at.prompt_starts_B[:total], at.prompt_lengths_B[:total] = ends_B - lengths_B, lengths_B
        at.hidden_ME[:total], at.low_ME[:total] = hidden_ME, hidden_ME
        at.squares_MS[:total, 0], self.parts = hidden_ME.square().sum(1), 1

    @torch.no_grad()
    def _read(self, batch: Batch, segments: Segments) -> None:
        at = self.scratch
        attention = segments.attention(self.decoder)

        def attend(layer: int, q_N: Tensor, k_N: Tensor, v_N: Tensor) -> Tensor:
            q_N, k_N, v_N = (part.to(self.weights.dtype) for part in (q_N, k_N, v_N))
            at.prompt_keys[layer, : len(k_N)], at.prompt_values[layer, : len(v_N)] = k_N, v_N
            return attention(layer, q_N, k_N, v_N)

        hidden_NE = self.weights.run_layers(batch.ids_N, segments.positions_N, attend)
        at.read_NE[: len(hidden_NE)] = hidden_NE

    def _replay(self, rows: int, decoding: "Decoding") -> None:
        at = self.scratch
        if self.device.type != "cuda":
            self._step(rows, decoding)
            return
        key = (rows, decoding.temperature, decoding.top_k, decoding.top_p, decoding.greedy, decoding.eos)
        if key not in self.graphs:
            slots_M = at.slots_M.clone()
            at.slots_M.fill_(at.room.sequences)
            with one_at_a_time:
                self._step(rows, decoding)  # a rehearsal without anybody, which compiles what is new
                graph = torch.cuda.CUDAGraph()
                with recording(graph):
                    self._step(rows, decoding)
            self.graphs[key] = graph
            at.slots_M.copy_(slots_M)
        self.graphs[key].replay()

    def _step(self, rows: int, decoding: "Decoding") -> None:
        """One more token for the first `rows` of the batch."""
        at = self.scratch
        weights, hidden, side = self.weights, at.hidden_ME, at.side_ME
        self._embed(rows)
        for number, layer in enumerate(weights.layers):
            self._product(rows, self._before(rows, layer.before_attention), layer.qkv, at.qkv_MN)
            self._attend(rows, number, layer)
            if layer.after_attention is None:
                self._product(rows, at.attended_MN, layer.o, hidden)
            else:
                self._product(rows, at.attended_MN, layer.o, side)
                self._norm(rows, side, layer.after_attention, add=True)
            x_ME = self._before(rows, layer.before_mlp)
            self._product(rows, x_ME, layer.up, at.inner_MN, weights.activation, weights.gated)
            if layer.after_mlp is None:
                self._product(rows, at.inner_MN, layer.down, hidden)
            else:
                self._product(rows, at.inner_MN, layer.down, side)
                self._norm(rows, side, layer.after_mlp, add=True)
        self._draw(rows, decoding)

    def _embed(self, rows: int) -> None:
        at = self.scratch
        weights, width = self.weights, at.hidden_ME.shape[1]
        kernels.embed[(rows,)](
            at.slots_M, at.tokens_BT, at.lengths_B, at.prompt_lengths_B, weights.words,
            weights.places, at.hidden_ME, at.low_ME, at.squares_MS, at.room.tokens, width,
            at.squares_MS.shape[1], weights.word_scale,
            PLACES=weights.places is not None, BE=power(width),
        )  # fmt: skip
        self.parts = 1

    def _before(self, rows: int, norm: Norm | None) -> Tensor:
        """The residual stream as the next product takes it: itself, where that product does the norm."""
        at = self.scratch
        if norm is None:
            return at.low_ME
        self._norm(rows, at.hidden_ME, norm)
        return at.low_side_ME

    def _norm(self, rows: int, x_ME: Tensor, norm: Norm, add: bool = False) -> None:
        at = self.scratch
        width = x_ME.shape[1]
        kernels.norm[(rows,)](
            x_ME, norm.weight, norm.bias, at.hidden_ME, at.low_ME if add else at.low_side_ME, at.squares_MS,
            width, at.squares_MS.shape[1], self.weights.eps,
            CENTRED=norm.bias is not None, ADD=add, BE=power(width),
        )  # fmt: skip
        if add:
            self.parts = 1

    def _product(
        self,
        rows: int,
        x_ME: Tensor,
        linear: Linear,
        out_MN: Tensor,
        activation: str = "",
        gated: bool = False,
    ) -> None:
        """A linear map from one buffer to another; onto the residual stream it adds."""
        at = self.scratch
        outputs, width = out_MN.shape[1], linear.weight.shape[1]
        add, normed = out_MN is at.hidden_ME, x_ME is at.low_ME
        block_m, block_n, block_k, options = tiles(rows, outputs, width)
        across = -(-outputs // block_n)
        kernels.linear[(across, -(-rows // block_m))](
            x_ME, at.squares_MS, linear.weight, linear.bias, out_MN, at.low_ME, at.squares_MS, rows, outputs,
            width, self.parts, at.squares_MS.shape[1], self.weights.eps,
            NORM=normed, GATED=gated, ACTIVATION=activation, BIAS=linear.bias is not None, ADD=add,
            EVEN=width % block_k == 0, BM=block_m, BN=block_n, BK=block_k, BS=power(self.parts),
            **options,
        )  # fmt: skip
        if add:
            self.parts = across

    def _attend(self, rows: int, number: int, layer: Layer) -> None:
        at = self.scratch
        decoder, window = self.decoder, self.decoder.windows[number]
        turn = at.turns.get(decoder.kinds[number])
        cos, sin = turn if turn is not None else (None, None)
        group = decoder.heads // decoder.key_heads
        kernels.attend[(rows, decoder.key_heads)](
            at.qkv_MN, at.slots_M, at.lengths_B, at.prompt_starts_B, at.prompt_lengths_B,
            at.prompt_keys[number], at.prompt_values[number], at.keys[number], at.values[number],
            layer.q_norm, layer.k_norm, cos, sin, at.attended_MN, at.room.tokens, decoder.heads, decoder.key_heads, decoder.scale, self.weights.eps, window or 0,
            NORM=layer.q_norm is not None, TURN=turn is not None, WINDOW=window is not None, GROUP=group,
            D=decoder.head_size, BG=max(16, power(group)), BD=max(16, power(decoder.head_size)),
            BLOCK=128 if decoder.head_size <= 64 else 64,
        )  # fmt: skip

    def _draw(self, rows: int, decoding: "Decoding") -> None:
        """From the residual stream to the next token."""
        at = self.scratch
        from rl_swarm.learning.sampler import truncated

        weights, words = self.weights, at.logits_MV.shape[1]
        self._product(rows, self._before(rows, weights.last_norm), weights.head, at.logits_MV)
        cut = bool(decoding.top_k) or decoding.top_p < 1
        if cut and not decoding.greedy:
            logits_MV = at.logits_MV[:rows]
            logprobs_MV = (logits_MV / decoding.temperature).log_softmax(-1)
            kept_MV = truncated(logprobs_MV, decoding.top_k, decoding.top_p) > -torch.inf
            at.lowest_M[:rows] = logits_MV.masked_fill(~kept_MV, torch.inf).amin(-1)
        kernels.survey[(rows, at.stretches)](
            at.logits_MV, at.slots_M, at.lengths_B, at.lowest_M, at.seed_1, at.best_MS, at.where_MS,
            at.top_MS, at.sum_MS, words, at.stretches, decoding.temperature,
            GREEDY=decoding.greedy, CUT=cut and not decoding.greedy, BV=STRETCH,
        )  # fmt: skip
        if decoding.eos not in self.ends:
            ends = torch.tensor(sorted(decoding.eos) or [-1], dtype=torch.int32, device=self.device)
            self.ends[decoding.eos] = ends
        eos = self.ends[decoding.eos]
        kernels.pick[(rows,)](
            at.logits_MV, at.slots_M, at.best_MS, at.where_MS, at.top_MS, at.sum_MS, eos, at.limit_1,
            at.tokens_BT, at.logprobs_BT, at.lengths_B, at.done_B, words, at.room.tokens,
            at.stretches, len(eos), decoding.temperature, BS=power(at.stretches), BEOS=power(len(eos)),
        )  # fmt: skip


def power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def size_for(sequences: int) -> int:
    """The smallest batch that a graph is made for and that holds so many."""
    return next((size for size in SIZES if size >= sequences), -(-sequences // 128) * 128)


def tiles(rows: int, outputs: int, width: int) -> tuple[int, int, int, dict[str, int]]:
    """How a product is cut up: narrow, so that many programs share the reading of the weights.

    Found by trying on an H200 with the shapes of a 135 M model; see `benchmarks/sampler.py` for what they give.
    """
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    across = -(-rows // block_m)
    block_n = next((n for n in (128, 64) if outputs // n * across >= 120), 32 if outputs >= 900 else 16)
    block_k = 128 if block_n == 16 and width >= 1024 else 64
    return block_m, block_n, block_k, {"num_warps": 4, "num_stages": 3 if block_n >= 64 else 5}
