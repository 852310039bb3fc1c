"""Sampling on a GPU: one decoding step is a handful of kernels per layer, recorded once and replayed.

The engine keeps one copy of the weights in bfloat16, refreshed when the trainer has changed them, and a
static cache of keys and values. A CUDA graph is recorded for each of a few batch sizes. The device decides
which token comes next and which sequence has ended; now and then the host looks, and goes on with the
smallest graph that holds the sequences still growing. Shapes as in `decoding`; B sequences, P prompts.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rl_swarm.learning.batches import Batch, Shape
from rl_swarm.learning.cuda import decoding as kernels
from rl_swarm.learning.cuda.attention import Segments
from rl_swarm.learning.cuda.recorder import Recorder
from rl_swarm.learning.decoder import Decoder
from rl_swarm.learning.weights import Layer, Linear, Norm, Weights

if TYPE_CHECKING:
    from rl_swarm.learning.sampler import Decoding

LOOK_EVERY = 8  # steps between looks at which sequences have ended
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # batches that graphs are made for
STRETCH = 4096  # words that one program looks at


class Room(NamedTuple):
    """The largest batch that fits into the memory reserved so far."""

    sequences: int = 0
    tokens: int = 0  # of a completion
    prompt_tokens: int = 0  # of all prompts together
    length: int = 0  # of the longest prompt and its completion


class Drawn(NamedTuple):
    tokens_BT: Tensor
    logprobs_BT: Tensor
    lengths_B: Tensor


class Engine:
    """Samples from one model. Its memory is kept between calls, so that recorded graphs stay valid."""

    def __init__(self, model: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        self.decoder, self.dtype, self.device = Decoder(model), dtype, model.device
        self.weights = Weights(self.decoder, dtype)
        self.reader = Recorder(self._read, self.device)
        self.room, self.graphs = Room(), dict[object, Any]()
        self.ends = dict[frozenset[int], Tensor]()
        self.parts = 1  # sums of squares per row of the residual stream

    @staticmethod
    def supports(model: Any) -> bool:
        return Weights.supports(Decoder(model))

    def sample(self, prompts: Sequence[Sequence[int]], count: int, decoding: "Decoding", seed: int) -> Drawn:
        total, limit = len(prompts) * count, decoding.max_new_tokens
        self.weights.refresh()
        lengths = list(map(len, prompts))
        self._reserve(Room(size_for(total), limit, Recorder.size_for(sum(lengths)), max(lengths) + limit))
        self._start(total, limit, seed)
        self._read_prompts(prompts, count)
        self._draw(total, decoding)

        going = list(range(total))
        for step in range(1, limit):
            if decoding.eos and step % LOOK_EVERY == 0:
                done = self.done_B.tolist()
                left = [slot for slot in going if not done[slot]]
                if not left:
                    break
                if size_for(len(left)) < size_for(len(going)):
                    going = left
                    self._choose(going)
            self._replay(size_for(len(going)), decoding)
        return Drawn(self.tokens_BT[:total, :limit], self.logprobs_BT[:total, :limit], self.lengths_B[:total])

    def _reserve(self, wanted: Room) -> None:
        """Memory for a batch of this size. New memory makes the recorded graphs worthless."""
        room = Room(*map(max, wanted, self.room))
        if room == self.room:
            return
        self.release()
        B, T, N, L = room
        decoder, width = self.decoder, self.decoder.head_size
        E, V = self.weights.words.shape[1], len(self.weights.head.weight)

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        written = (len(decoder.layers), B + 1, decoder.key_heads, T, width)
        self.keys, self.values = (new(*written, dtype=self.dtype) for _ in range(2))
        read = (len(decoder.layers), N, decoder.key_heads, width)
        self.prompt_keys, self.prompt_values = (new(*read, dtype=self.dtype) for _ in range(2))
        self.hidden_ME, self.side_ME = new(B, E), new(B, E)
        self.low_ME, self.low_side_ME = new(B, E, dtype=self.dtype), new(B, E, dtype=self.dtype)
        self.squares_MS = new(B, -(-E // 16))
        self.qkv_MN = new(B, (decoder.heads + 2 * decoder.key_heads) * width, dtype=self.dtype)
        self.attended_MN = new(B, decoder.heads * width, dtype=self.dtype)
        self.inner_MN = new(B, self.weights.inner, dtype=self.dtype)
        self.logits_MV, self.lowest_M = new(B, V), new(B)
        self.stretches = -(-V // STRETCH)
        self.best_MS, self.top_MS, self.sum_MS = (new(B, self.stretches) for _ in range(3))
        self.where_MS = new(B, self.stretches, dtype=torch.int32)
        self.slots_M, self.read_NE = new(B, dtype=torch.int32), new(N, E)
        self.lengths_B, self.done_B = new(B + 1, dtype=torch.int32), new(B + 1, dtype=torch.int32)
        self.prompt_starts_B, self.prompt_lengths_B = (new(B + 1, dtype=torch.int32) for _ in range(2))
        self.tokens_BT, self.logprobs_BT = new(B + 1, T, dtype=torch.int32), new(B + 1, T)
        self.seed_1, self.limit_1 = new(1, dtype=torch.int64), new(1, dtype=torch.int32)
        self.turns = decoder.rotations(self.hidden_ME, torch.arange(L, device=self.device))
        self.room = room

    def release(self) -> None:
        """Gives the memory of cache and graphs back."""
        self.graphs.clear()
        self.reader.release()
        for name in [name for name, value in vars(self).items() if isinstance(value, Tensor)]:
            delattr(self, name)
        self.room = Room()

    def _start(self, total: int, limit: int, seed: int) -> None:
        self.lengths_B.zero_()
        self.lengths_B[-1] = 1  # the last slot is nobody's: it fills up batches
        self.done_B.zero_()
        self.done_B[total:] = 1
        self.seed_1.fill_(seed * 0x9E3779B97F4A7C15 % (1 << 62))
        self.limit_1.fill_(limit)
        self._choose(list(range(total)))

    def _choose(self, going: list[int]) -> None:
        """These sequences are the batch, in this order."""
        nobody = self.room.sequences
        rows = going + [nobody] * (self.room.sequences - len(going))
        self.slots_M.copy_(torch.tensor(rows, dtype=torch.int32))

    def _read_prompts(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        """Runs every prompt once: keys and values into the cache, the last state as the start of completions."""
        ids_N = torch.tensor([token for prompt in prompts for token in prompt])
        lengths_P = torch.tensor([len(prompt) for prompt in prompts])
        ends_B = lengths_P.cumsum(0).repeat_interleave(count).to(self.device)
        lengths_B = lengths_P.repeat_interleave(count).to(self.device)
        self.reader.run(Batch.reading(ids_N), Shape(tuple(lengths_P.tolist()), (), ()))
        hidden_ME = self.read_NE[ends_B - 1]
        total = len(hidden_ME)
        self.prompt_starts_B[:total], self.prompt_lengths_B[:total] = ends_B - lengths_B, lengths_B
        self.hidden_ME[:total], self.low_ME[:total] = hidden_ME, hidden_ME
        self.squares_MS[:total, 0], self.parts = hidden_ME.square().sum(1), 1

    @torch.no_grad()
    def _read(self, batch: Batch, segments: Segments) -> None:
        attention = segments.attention(self.decoder)

        def attend(layer: int, q_N: Tensor, k_N: Tensor, v_N: Tensor) -> Tensor:
            q_N, k_N, v_N = (part.to(self.dtype) for part in (q_N, k_N, v_N))
            self.prompt_keys[layer, : len(k_N)], self.prompt_values[layer, : len(v_N)] = k_N, v_N
            return attention(layer, q_N, k_N, v_N)

        hidden_NE = self.weights.run_layers(batch.ids_N, segments.positions_N, attend)
        self.read_NE[: len(hidden_NE)] = hidden_NE

    def _replay(self, rows: int, decoding: "Decoding") -> None:
        if self.device.type != "cuda":
            self._step(rows, decoding)
            return
        key = (rows, decoding.temperature, decoding.top_k, decoding.top_p, decoding.greedy, decoding.eos)
        if key not in self.graphs:
            slots_M = self.slots_M.clone()
            self.slots_M.fill_(self.room.sequences)
            self._step(rows, decoding)  # a rehearsal without anybody, which compiles what is new
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step(rows, decoding)
            self.graphs[key] = graph
            self.slots_M.copy_(slots_M)
        self.graphs[key].replay()

    def _step(self, rows: int, decoding: "Decoding") -> None:
        """One more token for the first `rows` of the batch."""
        weights, hidden, side = self.weights, self.hidden_ME, self.side_ME
        self._embed(rows)
        for number, layer in enumerate(weights.layers):
            self._product(rows, self._before(rows, layer.before_attention), layer.qkv, self.qkv_MN)
            self._attend(rows, number, layer)
            if layer.after_attention is None:
                self._product(rows, self.attended_MN, layer.o, hidden)
            else:
                self._product(rows, self.attended_MN, layer.o, side)
                self._norm(rows, side, layer.after_attention, add=True)
            x_ME = self._before(rows, layer.before_mlp)
            self._product(rows, x_ME, layer.up, self.inner_MN, weights.activation, weights.gated)
            if layer.after_mlp is None:
                self._product(rows, self.inner_MN, layer.down, hidden)
            else:
                self._product(rows, self.inner_MN, layer.down, side)
                self._norm(rows, side, layer.after_mlp, add=True)
        self._draw(rows, decoding)

    def _embed(self, rows: int) -> None:
        weights, width = self.weights, self.hidden_ME.shape[1]
        kernels.embed[(rows,)](
            self.slots_M, self.tokens_BT, self.lengths_B, self.prompt_lengths_B, weights.words,
            weights.places, self.hidden_ME, self.low_ME, self.squares_MS, self.room.tokens, width,
            self.squares_MS.shape[1], weights.word_scale,
            PLACES=weights.places is not None, BE=power(width),
        )  # fmt: skip
        self.parts = 1

    def _before(self, rows: int, norm: Norm | None) -> Tensor:
        """The residual stream as the next product takes it: itself, where that product does the norm."""
        if norm is None:
            return self.low_ME
        self._norm(rows, self.hidden_ME, norm)
        return self.low_side_ME

    def _norm(self, rows: int, x_ME: Tensor, norm: Norm, add: bool = False) -> None:
        width = x_ME.shape[1]
        kernels.norm[(rows,)](
            x_ME, norm.weight, norm.bias, self.hidden_ME, self.low_ME if add else self.low_side_ME, self.squares_MS,
            width, self.squares_MS.shape[1], self.weights.eps,
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
        outputs, width = out_MN.shape[1], linear.weight.shape[1]
        add, normed = out_MN is self.hidden_ME, x_ME is self.low_ME
        block_m, block_n, block_k, options = tiles(rows, outputs, width)
        across = -(-outputs // block_n)
        kernels.linear[(across, -(-rows // block_m))](
            x_ME, self.squares_MS, linear.weight, linear.bias, out_MN, self.low_ME, self.squares_MS, rows, outputs,
            width, self.parts, self.squares_MS.shape[1], self.weights.eps,
            NORM=normed, GATED=gated, ACTIVATION=activation, BIAS=linear.bias is not None, ADD=add,
            EVEN=width % block_k == 0, BM=block_m, BN=block_n, BK=block_k, BS=power(self.parts),
            **options,
        )  # fmt: skip
        if add:
            self.parts = across

    def _attend(self, rows: int, number: int, layer: Layer) -> None:
        decoder, window = self.decoder, self.decoder.windows[number]
        turn = self.turns.get(decoder.kinds[number])
        cos, sin = turn if turn is not None else (None, None)
        group = decoder.heads // decoder.key_heads
        kernels.attend[(rows, decoder.key_heads)](
            self.qkv_MN, self.slots_M, self.lengths_B, self.prompt_starts_B, self.prompt_lengths_B,
            self.prompt_keys[number], self.prompt_values[number], self.keys[number], self.values[number],
            layer.q_norm, layer.k_norm, cos, sin, self.attended_MN, self.room.tokens, decoder.heads, decoder.key_heads, decoder.scale, self.weights.eps, window or 0,
            NORM=layer.q_norm is not None, TURN=turn is not None, WINDOW=window is not None, GROUP=group,
            D=decoder.head_size, BG=max(16, power(group)), BD=max(16, power(decoder.head_size)),
            BLOCK=128 if decoder.head_size <= 64 else 64,
        )  # fmt: skip

    def _draw(self, rows: int, decoding: "Decoding") -> None:
        """From the residual stream to the next token."""
        from rl_swarm.learning.sampler import truncated

        weights, words = self.weights, self.logits_MV.shape[1]
        self._product(rows, self._before(rows, weights.last_norm), weights.head, self.logits_MV)
        cut = bool(decoding.top_k) or decoding.top_p < 1
        if cut and not decoding.greedy:
            logits_MV = self.logits_MV[:rows]
            logprobs_MV = (logits_MV / decoding.temperature).log_softmax(-1)
            kept_MV = truncated(logprobs_MV, decoding.top_k, decoding.top_p) > -torch.inf
            self.lowest_M[:rows] = logits_MV.masked_fill(~kept_MV, torch.inf).amin(-1)
        kernels.survey[(rows, self.stretches)](
            self.logits_MV, self.slots_M, self.lengths_B, self.lowest_M, self.seed_1, self.best_MS, self.where_MS,
            self.top_MS, self.sum_MS, words, self.stretches, decoding.temperature,
            GREEDY=decoding.greedy, CUT=cut and not decoding.greedy, BV=STRETCH,
        )  # fmt: skip
        if decoding.eos not in self.ends:
            ends = torch.tensor(sorted(decoding.eos) or [-1], dtype=torch.int32, device=self.device)
            self.ends[decoding.eos] = ends
        eos = self.ends[decoding.eos]
        kernels.pick[(rows,)](
            self.logits_MV, self.slots_M, self.best_MS, self.where_MS, self.top_MS, self.sum_MS, eos, self.limit_1,
            self.tokens_BT, self.logprobs_BT, self.lengths_B, self.done_B, words, self.room.tokens,
            self.stretches, len(eos), decoding.temperature, BS=power(self.stretches), BEOS=power(len(eos)),
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
