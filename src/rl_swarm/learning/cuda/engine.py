"""Samples on a GPU: one decoding step is a handful of kernels per layer, recorded once and replayed.

An engine samples from several models of one shape in the same kernels: a step of a small model is bound by latency,
and takes hardly longer for eight nodes than for one. Of every model it keeps a copy of the weights in bfloat16,
refreshed when the trainer has changed them. The static cache of keys and values, and all else that a step writes,
lie in a `Scratch`. A CUDA graph is recorded for each of a few batch sizes. The device decides which token comes next
and which sequence has ended; now and then the host looks, and goes on with the smallest graph that holds the
sequences still growing. Shapes as in `decoding`; Z nodes, B sequences of each, P prompts.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from rl_swarm.learning.batches import Batch, BatchShape, flat
from rl_swarm.learning.cuda import decoding as kernels
from rl_swarm.learning.cuda.attention import Segments
from rl_swarm.learning.cuda.fused import ALIGNED
from rl_swarm.learning.cuda.graphs import Recorder, one_at_a_time, recording
from rl_swarm.learning.decoder import Decoder
from rl_swarm.learning.devices import out_of_memory, release_memory
from rl_swarm.learning.parallel.batcher import DynamicBatcher
from rl_swarm.learning.sampler import Decoding, Request, Sample, samples, truncated
from rl_swarm.learning.weights import LayerWeights, Linear, Norm, Stack, Weights

LOOK_EVERY = 8  # steps between looks at which sequences have ended
SIZES = (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # batches that graphs are made for
STRETCH = 2048  # words that one program looks at
MANY_PROGRAMS = 1024  # of attention, if each does one sequence: enough if each does several
LEAST_PROMPTS = 1024  # tokens that there is room for
Groups = list[list[Sample]]  # the completions of every prompt


class Room(NamedTuple):
    """The largest batch of a node that fits into the memory reserved so far."""

    sequences: int = 0
    tokens: int = 0  # of a completion
    prompt_tokens: int = 0  # of all prompts together
    length: int = 0  # of the longest prompt and its completion


class ScratchBuffers:
    """Memory to sample in, of all nodes. It is kept between calls, so that recorded graphs stay valid."""

    def __init__(self, nodes: int, sequences: int) -> None:
        self.nodes, self.room = nodes, Room()
        self.turns = dict[str, tuple[Tensor, Tensor]]()
        self.least = Room(size_for(sequences))

    def reserve(self, wanted: Room, weights: Weights) -> None:
        """More memory, enough for a batch of this size too."""
        room = Room(*map(max, wanted, self.room, self.least))
        self.release()
        Z, (B, T, N, L) = self.nodes, room
        decoder, low = weights.decoder, weights.dtype
        width, key_heads, (V, E) = decoder.head_size, decoder.key_heads, weights.head.weight.shape

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=weights.words.device)

        written = (len(decoder.layers), Z, B + 1, key_heads, T, width)
        self.keys, self.values = (new(*written, dtype=low) for _ in range(2))
        read = (len(decoder.layers), Z, N, key_heads, width)
        self.prompt_keys, self.prompt_values = (new(*read, dtype=low) for _ in range(2))
        self.hidden_ME, self.side_ME = new(Z, B, E), new(Z, B, E)
        self.low_ME, self.low_side_ME = new(Z, B, E, dtype=low), new(Z, B, E, dtype=low)
        self.squares_MS = new(Z, B, -(-E // 16))
        self.qkv_MN = new(Z, B, (decoder.heads + 2 * key_heads) * width, dtype=low)
        self.attended_MN = new(Z, B, decoder.heads * width, dtype=low)
        self.inner_MN = new(Z, B, weights.inner, dtype=low)
        wide = -(-V // ALIGNED) * ALIGNED  # rows that begin anywhere are read and written more slowly
        self.logits_MV, self.lowest_M = new(Z, B, wide), new(Z, B)
        self.stretches = -(-V // STRETCH)
        self.top_MS, self.sum_MS, self.kept_MS = (new(Z, B, self.stretches) for _ in range(3))
        self.where_MS = new(Z, B, self.stretches, dtype=torch.int32)
        self.slots_M, self.read_NE = new(Z, B, dtype=torch.int32), new(N, E)
        self.lengths_B, self.done_B = (new(Z, B + 1, dtype=torch.int32) for _ in range(2))
        self.prompt_starts_B, self.prompt_lengths_B = (new(Z, B + 1, dtype=torch.int32) for _ in range(2))
        self.tokens_BT, self.logprobs_BT = new(Z, B + 1, T, dtype=torch.int32), new(Z, B + 1, T)
        self.seed_Z, self.limit_1 = new(Z, dtype=torch.int64), new(1, dtype=torch.int32)
        self.going_Z = new(Z, dtype=torch.int32)  # rows
        self.turns = decoder.rotations(self.hidden_ME[0], torch.arange(L, device=weights.words.device))
        self.room = room

    def release(self) -> None:
        """Gives the memory back."""
        for name in [name for name, value in vars(self).items() if isinstance(value, Tensor)]:
            delattr(self, name)
        self.turns.clear()
        self.room = Room()
        release_memory()  # what follows may be of another size, and for another thread


class CudaEngine:
    """Samples from models of one shape, at most so many."""

    weights: Weights  # of the first seat, with which kernels find those of all others
    decoder: Decoder
    device: torch.device
    reader: Recorder
    words_Z: Tensor  # addresses
    places_Z: Tensor | None

    def __init__(
        self, nodes: int = 1, dtype: torch.dtype = torch.bfloat16, sequences: int = 0, threads: bool = True
    ) -> None:
        self.nodes, self.dtype = nodes, dtype
        self.meeting = DynamicBatcher[Request, Groups](self._serve, waits=threads)
        self.stack, self.scratch = Stack(nodes), ScratchBuffers(nodes, sequences)
        self.seats: list[Weights | None] = [None] * nodes
        self.graphs = dict[object, Any]()
        self.ends = dict[frozenset[int], Tensor]()
        self.parts = 1  # sums of squares per row of the residual stream

    @staticmethod
    def supports(model: Any) -> bool:
        return Weights.supports(Decoder(model)) and model.get_input_embeddings().weight.dtype == torch.float32

    def sample(self, model: Any, prompts: Sequence[Sequence[int]], count: int, decoding: Decoding, seed: int) -> Groups:
        """`count` completions of every prompt; in one pass with the other models that are asked now."""
        ready = None
        if model.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        return self.meeting.ask(model, decoding, Request(model, prompts, count, seed, ready))

    @torch.no_grad()
    def sample_all(self, requests: Sequence[Request], decoding: Decoding) -> list[Groups]:
        """What several models are asked, in one pass, for a thread that speaks for all of them."""
        return list(self._serve(decoding, list(requests)))

    def leave(self, model: Any) -> None:
        """Gives back this model's seat, and when it was the last, the memory."""
        with self.meeting.left(model):
            for number, weights in enumerate(self.seats):
                if weights is not None and weights.decoder.model is model:
                    self.seats[number] = None
                    self.reader.forget(number)
            if not any(self.seats):
                self._release()
                self.stack = Stack(self.nodes)
                for name in ("weights", "decoder", "reader", "words_Z", "places_Z"):
                    vars(self).pop(name, None)
                release_memory()

    def _release(self) -> None:
        """Gives back the memory of cache and graphs."""
        self._forget()
        self.scratch.release()

    def _serve(self, kind: Hashable, requests: list[Request]) -> Iterator[Groups]:
        try:
            parties = {self._seat(request.model): request for request in requests}
            yield from self._sample(parties, cast(Decoding, kind))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if requests[0].ready is not None:
                torch.cuda.current_stream().synchronize()  # another thread may use the memory next
            self.scratch.least = Room()  # no more than is asked for
            self._release()
            raise

    def _seat(self, model: Any) -> int:
        """Where this model's weights are; a free seat, if it has none."""
        for number, weights in enumerate(self.seats):
            if weights is not None and weights.decoder.model is model:
                return number
        if None not in self.seats:
            raise ValueError(f"there are {self.nodes} seats, and a model has each of them")
        first, number = not any(self.seats), self.seats.index(None)
        weights = Weights(Decoder(model), self.dtype, self.stack, number)
        if first:
            self.weights, self.decoder, self.device = weights, weights.decoder, model.device
            self.reader = Recorder(self._read, self.device)
            self.words_Z = torch.zeros(self.nodes, dtype=torch.int64, device=self.device)
            self.places_Z = None if weights.places is None else torch.zeros_like(self.words_Z)
        for table, vectors in ((self.words_Z, weights.words), (self.places_Z, weights.places)):
            if table is not None and vectors is not None:
                if vectors.data_ptr() % 16 and self.device.type == "cuda":
                    raise ValueError("embeddings must begin at a multiple of 16 bytes")
                table[number] = vectors.data_ptr()
        self.seats[number] = weights
        return number

    def _sample(self, requests: dict[int, Request], decoding: Decoding) -> Iterator[Groups]:
        at, limit = self.scratch, decoding.max_new_tokens
        for node, request in requests.items():
            if request.ready is not None:
                torch.cuda.current_stream().wait_event(request.ready)
            cast(Weights, self.seats[node]).refresh()
        self._reserve([self._room(request, limit) for request in requests.values()])
        going = [list(range(requests[node].total)) if node in requests else [] for node in range(self.nodes)]
        self._start(requests, going, limit)
        for node, request in requests.items():
            self._read_prompts(node, request.prompts, request.each)
        self.parts = 1
        self._draw(max(map(len, going)), decoding)

        for step in range(1, limit):
            if decoding.eos and step % LOOK_EVERY == 0:
                done = at.done_B.tolist()
                left = [[slot for slot in of if not done[node][slot]] for node, of in enumerate(going)]
                if not any(left):
                    break
                if any(size_for(len(a)) < size_for(len(b)) for a, b in zip(left, going, strict=True)):
                    going = left
                    self._choose(going)
            self._replay(size_for(max(map(len, going))), decoding)
        # All at once: a thread that waits for the GPU has to wait for other threads, too, before it goes on.
        drawn = [values.cpu() for values in (at.tokens_BT[..., :limit], at.logprobs_BT[..., :limit], at.lengths_B)]
        for node, request in requests.items():
            tokens_BT, logprobs_BT, lengths_B = (values[node, : request.total] for values in drawn)
            yield samples(tokens_BT, logprobs_BT, lengths_B, decoding.eos, request.each)

    @staticmethod
    def _room(request: Request, limit: int) -> Room:
        lengths = list(map(len, request.prompts))
        read = power(max(LEAST_PROMPTS, sum(lengths)))
        return Room(size_for(request.total), limit, read, power(max(lengths)) + limit)

    def _reserve(self, wanted: Sequence[Room]) -> None:
        """Memory for batches of these sizes. New memory makes the recorded graphs worthless."""
        most = Room(*map(max, *wanted, Room()))
        if any(more > there for more, there in zip(most, self.scratch.room, strict=True)):
            self._forget()
            self.scratch.reserve(most, self.weights)

    def _forget(self) -> None:
        self.graphs.clear()
        if any(self.seats):
            self.reader.release()

    def _start(self, requests: dict[int, Request], going: list[list[int]], limit: int) -> None:
        at = self.scratch
        at.lengths_B.zero_()
        at.lengths_B[:, -1] = 1  # the last slot of a node is nobody's: it fills up batches
        done_B, seed_Z = (
            torch.ones(at.done_B.shape, dtype=torch.int32),
            torch.zeros_like(at.seed_Z, device="cpu"),
        )
        for node, request in requests.items():
            done_B[node, : request.total] = 0
            seed_Z[node] = request.seed * 0x9E3779B97F4A7C15 % (1 << 62)
        at.done_B.copy_(brought(done_B, self.device))
        at.seed_Z.copy_(brought(seed_Z, self.device))
        at.limit_1.fill_(limit)
        self._choose(going)

    def _choose(self, going: list[list[int]]) -> None:
        """These sequences are the batch, in this order."""
        nobody = self.scratch.room.sequences
        rows = [
            [node * (nobody + 1) + slot for slot in of + [nobody] * (nobody - len(of))] for node, of in enumerate(going)
        ]
        self.scratch.slots_M.copy_(brought(torch.tensor(rows, dtype=torch.int32), self.device))
        self.scratch.going_Z.copy_(brought(torch.tensor(list(map(len, going)), dtype=torch.int32), self.device))

    def _read_prompts(self, node: int, prompts: Sequence[Sequence[int]], count: int) -> None:
        """Runs every prompt once: keys and values into the cache, the last state as the start of completions."""
        at = self.scratch
        ids_N = flat(prompts, np.int64)
        lengths = tuple(map(len, prompts))
        each = np.repeat([list(accumulate(lengths)), lengths], count, axis=1)
        ends_B, lengths_B = brought(torch.from_numpy(each), self.device)
        self.reader.run(Batch.reading(ids_N), BatchShape(lengths, (), ()), node)
        hidden_ME = at.read_NE[ends_B - 1]
        total = len(hidden_ME)
        at.prompt_starts_B[node, :total] = node * at.room.prompt_tokens + ends_B - lengths_B
        at.prompt_lengths_B[node, :total] = lengths_B
        at.hidden_ME[node, :total], at.low_ME[node, :total] = hidden_ME, hidden_ME
        at.squares_MS[node, :total, 0] = hidden_ME.square().sum(1)

    @torch.no_grad()
    def _read(self, batch: Batch, segments: Segments, node: int) -> None:
        at, weights = self.scratch, cast(Weights, self.seats[node])
        attention = segments.attention(self.decoder)

        def attend(layer: int, q_N: Tensor, k_N: Tensor, v_N: Tensor) -> Tensor:
            q_N, k_N, v_N = (part.to(self.dtype) for part in (q_N, k_N, v_N))
            at.prompt_keys[layer, node, : len(k_N)], at.prompt_values[layer, node, : len(v_N)] = k_N, v_N
            return attention(layer, q_N, k_N, v_N)

        hidden_NE = weights.run_layers(batch.ids_N, segments.positions_N, attend)
        at.read_NE[: len(hidden_NE)] = hidden_NE

    def _replay(self, rows: int, decoding: Decoding) -> None:
        at = self.scratch
        if self.device.type != "cuda":
            self._step(rows, decoding)
            return
        key = (rows, decoding.temperature, decoding.top_k, decoding.top_p, decoding.greedy, decoding.eos)
        if key not in self.graphs:
            slots_M, going_Z = at.slots_M.clone(), at.going_Z.clone()
            self._choose([[] for _ in self.seats])
            with one_at_a_time:
                self._step(rows, decoding)  # a rehearsal without anybody, which compiles what is new
                graph = torch.cuda.CUDAGraph()
                with recording(graph):
                    self._step(rows, decoding)
            self.graphs[key] = graph
            at.slots_M.copy_(slots_M)
            at.going_Z.copy_(going_Z)
        self.graphs[key].replay()

    def _step(self, rows: int, decoding: Decoding) -> None:
        """One more token for the first `rows` of every node's batch."""
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
        width = at.hidden_ME.shape[2]
        kernels.embed[(rows, 1, self.nodes)](
            at.going_Z, at.slots_M, at.tokens_BT, at.lengths_B, at.prompt_lengths_B, self.words_Z, self.places_Z,
            at.hidden_ME, at.low_ME, at.squares_MS, at.room.tokens, width, at.room.sequences,
            at.squares_MS.shape[2], self.weights.word_scale,
            PLACES=self.places_Z is not None, MANY=self.nodes > 1, BE=power(width),
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
        width = x_ME.shape[2]
        kernels.norm[(rows, 1, self.nodes)](
            at.going_Z, x_ME, norm.weight, norm.bias, at.hidden_ME, at.low_ME if add else at.low_side_ME,
            at.squares_MS, width, at.room.sequences, at.squares_MS.shape[2], self.weights.eps,
            CENTRED=norm.bias is not None, ADD=add, MANY=self.nodes > 1, BE=power(width),
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
        outputs, width = linear.weight.shape[0] // (2 if gated else 1), linear.weight.shape[1]
        add, normed = out_MN is at.hidden_ME, x_ME is at.low_ME
        block_m, block_n, block_k, options = tiles(rows, outputs, width, self.nodes)
        across = -(-outputs // block_n)
        kernels.linear[(across, -(-rows // block_m), self.nodes)](
            at.going_Z, x_ME, at.squares_MS, linear.weight, linear.bias, out_MN, at.low_ME, rows, outputs,
            width, out_MN.shape[2], self.parts, at.room.sequences, at.squares_MS.shape[2], self.weights.eps,
            NORM=normed, GATED=gated, ACTIVATION=activation, BIAS=linear.bias is not None, ADD=add,
            EVEN=width % block_k == 0, MANY=self.nodes > 1, BM=block_m, BN=block_n, BK=block_k,
            BS=power(self.parts), **options,
        )  # fmt: skip
        if add:
            self.parts = across

    def _attend(self, rows: int, number: int, layer: LayerWeights) -> None:
        at = self.scratch
        decoder, window = self.decoder, self.decoder.windows[number]
        turn = at.turns.get(decoder.kinds[number])
        cos, sin = turn if turn is not None else (None, None)
        group = decoder.heads // decoder.key_heads
        together, block, options = keys_at_once(rows * decoder.key_heads * self.nodes, group, decoder.head_size)
        kernels.attend[(-(-rows // together), decoder.key_heads, self.nodes)](
            at.going_Z, at.qkv_MN, at.slots_M, at.lengths_B, at.prompt_starts_B, at.prompt_lengths_B,
            at.prompt_keys[number], at.prompt_values[number], at.keys[number], at.values[number],
            layer.q_norm, layer.k_norm, cos, sin, at.attended_MN, rows, at.room.tokens, decoder.heads,
            decoder.key_heads, at.room.sequences, decoder.scale, self.weights.eps, window or 0,
            NORM=layer.q_norm is not None, TURN=turn is not None, WINDOW=window is not None,
            MANY=self.nodes > 1, ROWS=together, GROUP=group, D=decoder.head_size,
            BG=max(16, power(together * group)),
            BD=max(16, power(decoder.head_size)), BLOCK=block, **options,
        )  # fmt: skip

    def _draw(self, rows: int, decoding: Decoding) -> None:
        """From the residual stream to the next token."""
        at = self.scratch
        weights, words, wide = self.weights, self.weights.head.weight.shape[0], at.logits_MV.shape[2]
        self._product(rows, self._before(rows, weights.last_norm), weights.head, at.logits_MV)
        cut = not decoding.greedy and (bool(decoding.top_k) or decoding.top_p < 1)
        for node in range(self.nodes if cut else 0):  # one after the other, to save memory
            logits_MV = at.logits_MV[node, :rows, :words]
            logprobs_MV = (logits_MV / decoding.temperature).log_softmax(-1)
            kept_MV = truncated(logprobs_MV, decoding.top_k, decoding.top_p) > -torch.inf
            at.lowest_M[node, :rows] = logits_MV.masked_fill(~kept_MV, torch.inf).amin(-1)
        kernels.survey[(rows, at.stretches, self.nodes)](
            at.going_Z, at.logits_MV, at.lowest_M, at.where_MS, at.top_MS, at.sum_MS, at.kept_MS, words, wide,
            at.stretches, at.room.sequences, decoding.temperature, GREEDY=decoding.greedy, CUT=cut,
            MANY=self.nodes > 1, BV=STRETCH,
        )  # fmt: skip
        if decoding.eos not in self.ends:
            ends = torch.tensor(sorted(decoding.eos) or [-1], dtype=torch.int32, device=self.device)
            self.ends[decoding.eos] = ends
        eos = self.ends[decoding.eos]
        kernels.pick[(rows, 1, self.nodes)](
            at.going_Z, at.logits_MV, at.slots_M, at.lowest_M, at.seed_Z, at.where_MS, at.top_MS, at.sum_MS,
            at.kept_MS, eos, at.limit_1, at.tokens_BT, at.logprobs_BT, at.lengths_B, at.done_B, words, wide,
            at.room.tokens, at.stretches, at.room.sequences, len(eos), decoding.temperature,
            GREEDY=decoding.greedy, CUT=cut, MANY=self.nodes > 1, BV=STRETCH, BS=power(at.stretches),
            BEOS=power(len(eos)),
        )  # fmt: skip


def brought(values: Tensor, device: torch.device) -> Tensor:
    """To the device, without waiting for what it is doing."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def size_for(sequences: int) -> int:
    """The smallest batch that a graph is made for and that holds so many."""
    return next((size for size in SIZES if size >= sequences), -(-sequences // 128) * 128)


def tiles(rows: int, outputs: int, width: int, nodes: int) -> tuple[int, int, int, dict[str, int]]:
    """How a product is cut up: narrow, so that many programs share the reading of the weights.

    Found by trying on an H200 with the shapes of a 135 M model; see `benchmarks/learner/sampler.py` for what they give.
    """
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if nodes >= 4:  # enough programs even when they are wide
        block_n, block_k = (32, 128) if outputs < 1000 else (64, 64) if outputs < 10000 else (128, 64)
        return block_m, block_n, block_k, {"num_warps": 4, "num_stages": 4}
    across = -(-rows // block_m)
    block_n = next((n for n in (128, 64) if outputs // n * across >= 120), 32 if outputs >= 900 else 16)
    block_k = 128 if block_n == 16 and width >= 1024 else 64
    return block_m, block_n, block_k, {"num_warps": 4, "num_stages": 3 if block_n >= 64 else 5}


def keys_at_once(programs: int, group: int, head_size: int) -> tuple[int, int, dict[str, int]]:
    """How many sequences a program of attention does, and how many keys it reads at once. Few programs must be quick;
    many small ones hide each other's waiting."""
    if programs >= MANY_PROGRAMS:
        return max(1, 8 // group), 64, {"num_warps": 2, "num_stages": 2}
    if programs >= 512:
        return 1, 32, {"num_warps": 1, "num_stages": 3}
    return 1, 128 if head_size <= 64 else 64, {"num_warps": 4, "num_stages": 2}
