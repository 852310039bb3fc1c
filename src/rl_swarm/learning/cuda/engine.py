"""Samples on a GPU: one decoding step is a few kernels per layer, captured as a CUDA graph and replayed.

An engine samples from several models of one shape in the same kernels: latency bounds the step of a small model, so
it takes hardly longer for eight nodes than for one. The engine keeps a bfloat16 copy of the weights of every model,
refreshed when the trainer has changed them. The static KV cache, and everything else that a step writes, is in
`ScratchBuffers`. A CUDA graph is captured for each of a few batch sizes. The device draws tokens and detects ends;
every few steps the host checks, and continues with the smallest graph that holds the unfinished sequences.
Shapes as in `decoding`; Z nodes, B sequences of each, P prompts.
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
from rl_swarm.learning.cuda.graphs import GraphCache, capture, capture_lock
from rl_swarm.learning.cuda.products import ALIGNED
from rl_swarm.learning.decoder import Decoder
from rl_swarm.learning.devices import out_of_memory, release_memory
from rl_swarm.learning.parallel.batcher import DynamicBatcher
from rl_swarm.learning.sampler import Request, Sample, SamplingParams, samples, truncated
from rl_swarm.learning.weights import LayerWeights, Linear, Norm, Stack, Weights

CHECK_EVERY = 8  # steps after which the host checks which sequences have ended
SIZES = (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # batches that graphs are made for
VOCABULARY_BLOCK = 2048  # logits per program
MANY_PROGRAMS = 1024  # of attention with one sequence each, from which a program takes several
MIN_PROMPT_TOKENS = 1024  # for which memory is reserved
Groups = list[list[Sample]]  # the completions of every prompt


class Capacity(NamedTuple):
    """Describes the largest batch of a node that fits into the reserved memory."""

    sequences: int = 0
    tokens: int = 0  # of a completion
    prompt_tokens: int = 0  # of all prompts together
    length: int = 0  # of the longest prompt and its completion


class ScratchBuffers:
    """Holds the memory that sampling writes, for all nodes. It is kept between calls, so that graphs stay valid."""

    def __init__(self, nodes: int, sequences: int) -> None:
        self.nodes, self.capacity = nodes, Capacity()
        self.rotations = dict[str, tuple[Tensor, Tensor]]()
        self.minimum = Capacity(batch_size_for(sequences))

    def reserve(self, wanted: Capacity, weights: Weights) -> None:
        """Reallocate, with room for a batch of this size, too."""
        capacity = Capacity(*map(max, wanted, self.capacity, self.minimum))
        self.release()
        Z, (B, T, N, L) = self.nodes, capacity
        decoder, low = weights.decoder, weights.dtype
        width, key_heads, (V, E) = decoder.head_size, decoder.key_heads, weights.head.weight.shape

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=weights.embeddings.device)

        completion_shape = (len(decoder.layers), Z, B + 1, key_heads, T, width)
        self.keys, self.values = (new(*completion_shape, dtype=low) for _ in range(2))
        prompt_shape = (len(decoder.layers), Z, N, key_heads, width)
        self.prompt_keys, self.prompt_values = (new(*prompt_shape, dtype=low) for _ in range(2))
        self.hidden_ME, self.side_ME = new(Z, B, E), new(Z, B, E)
        self.low_ME, self.low_side_ME = new(Z, B, E, dtype=low), new(Z, B, E, dtype=low)
        self.squares_MS = new(Z, B, -(-E // 16))
        self.qkv_MN = new(Z, B, (decoder.heads + 2 * key_heads) * width, dtype=low)
        self.attended_MN = new(Z, B, decoder.heads * width, dtype=low)
        self.inner_MN = new(Z, B, weights.inner, dtype=low)
        logit_stride = -(-V // ALIGNED) * ALIGNED  # unaligned rows are slower
        self.logits_MV, self.lowest_M = new(Z, B, logit_stride), new(Z, B)
        self.blocks = -(-V // VOCABULARY_BLOCK)
        self.top_MS, self.sum_MS, self.kept_MS = (new(Z, B, self.blocks) for _ in range(3))
        self.argmax_MS = new(Z, B, self.blocks, dtype=torch.int32)
        self.slots_M, self.prefill_NE = new(Z, B, dtype=torch.int32), new(N, E)
        self.lengths_B, self.done_B = (new(Z, B + 1, dtype=torch.int32) for _ in range(2))
        self.prompt_starts_B, self.prompt_lengths_B = (new(Z, B + 1, dtype=torch.int32) for _ in range(2))
        self.tokens_BT, self.logprobs_BT = new(Z, B + 1, T, dtype=torch.int32), new(Z, B + 1, T)
        self.seed_Z, self.limit_1 = new(Z, dtype=torch.int64), new(1, dtype=torch.int32)
        self.active_Z = new(Z, dtype=torch.int32)  # rows
        self.rotations = decoder.rotations(self.hidden_ME[0], torch.arange(L, device=weights.embeddings.device))
        self.capacity = capacity

    def release(self) -> None:
        """Free the memory."""
        for name in [name for name, value in vars(self).items() if isinstance(value, Tensor)]:
            delattr(self, name)
        self.rotations.clear()
        self.capacity = Capacity()
        release_memory()  # the next allocation may have another size, in another thread


class CudaEngine:
    """Samples from at most `nodes` models of one shape."""

    weights: Weights  # of the first model; kernels find the others by their offset
    decoder: Decoder
    device: torch.device
    prefill_graphs: GraphCache
    embeddings_Z: Tensor  # addresses
    positions_Z: Tensor | None

    def __init__(
        self, nodes: int = 1, dtype: torch.dtype = torch.bfloat16, sequences: int = 0, threads: bool = True
    ) -> None:
        self.nodes, self.dtype = nodes, dtype
        self.batcher = DynamicBatcher[Request, Groups](self._serve, waits=threads)
        self.stack, self.scratch = Stack(nodes), ScratchBuffers(nodes, sequences)
        self.copies: list[Weights | None] = [None] * nodes
        self.graphs = dict[object, Any]()
        self.eos_tensors = dict[frozenset[int], Tensor]()
        self.square_blocks = 1  # partial sums of squares per row of the residual stream

    @staticmethod
    def supports(model: Any) -> bool:
        return Weights.supports(Decoder(model)) and model.get_input_embeddings().weight.dtype == torch.float32

    def sample(
        self, model: Any, prompts: Sequence[Sequence[int]], count: int, params: SamplingParams, seed: int
    ) -> Groups:
        """Sample `count` completions of every prompt, in one batch with requests for other models."""
        ready = None
        if model.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        return self.batcher.submit(model, params, Request(model, prompts, count, seed, ready))

    @torch.no_grad()
    def sample_all(self, requests: Sequence[Request], params: SamplingParams) -> list[Groups]:
        """Serve requests for several models in one batch, from one thread."""
        return list(self._serve(params, list(requests)))

    def remove(self, model: Any) -> None:
        """Drop the copy of this model; free all memory with the last one."""
        with self.batcher.removing(model):
            for number, weights in enumerate(self.copies):
                if weights is not None and weights.decoder.model is model:
                    self.copies[number] = None
                    self.prefill_graphs.drop(number)
            if not any(self.copies):
                self._release()
                self.stack = Stack(self.nodes)
                for name in ("weights", "decoder", "prefill_graphs", "embeddings_Z", "positions_Z"):
                    vars(self).pop(name, None)
                release_memory()

    def _release(self) -> None:
        """Free the memory of cache and graphs."""
        self._drop_graphs()
        self.scratch.release()

    def _serve(self, kind: Hashable, requests: list[Request]) -> Iterator[Groups]:
        try:
            requests_by_node = {self._index_of(request.model): request for request in requests}
            yield from self._sample(requests_by_node, cast(SamplingParams, kind))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if requests[0].ready is not None:
                torch.cuda.current_stream().synchronize()  # another thread may use the memory next
            self.scratch.minimum = Capacity()  # reserve no more than requested
            self._release()
            raise

    def _index_of(self, model: Any) -> int:
        """Return the index of the copy of this model's weights; make the copy if there is none."""
        for number, weights in enumerate(self.copies):
            if weights is not None and weights.decoder.model is model:
                return number
        if None not in self.copies:
            raise ValueError(f"the engine serves {self.nodes} models, and already has as many")
        first, number = not any(self.copies), self.copies.index(None)
        weights = Weights(Decoder(model), self.dtype, self.stack, number)
        if first:
            self.weights, self.decoder, self.device = weights, weights.decoder, model.device
            self.prefill_graphs = GraphCache(self._prefill_pass, self.device)
            self.embeddings_Z = torch.zeros(self.nodes, dtype=torch.int64, device=self.device)
            self.positions_Z = None if weights.positions is None else torch.zeros_like(self.embeddings_Z)
        for table, vectors in ((self.embeddings_Z, weights.embeddings), (self.positions_Z, weights.positions)):
            if table is not None and vectors is not None:
                if vectors.data_ptr() % 16 and self.device.type == "cuda":
                    raise ValueError("embeddings must begin at a multiple of 16 bytes")
                table[number] = vectors.data_ptr()
        self.copies[number] = weights
        return number

    def _sample(self, requests: dict[int, Request], params: SamplingParams) -> Iterator[Groups]:
        at, limit = self.scratch, params.max_new_tokens
        for node, request in requests.items():
            if request.ready is not None:
                torch.cuda.current_stream().wait_event(request.ready)
            cast(Weights, self.copies[node]).refresh()
        self._reserve([self._capacity(request, limit) for request in requests.values()])
        active = [list(range(requests[node].total)) if node in requests else [] for node in range(self.nodes)]
        self._reset(requests, active, limit)
        for node, request in requests.items():
            self._prefill(node, request.prompts, request.each)
        self.square_blocks = 1
        self._draw(max(map(len, active)), params)

        for step in range(1, limit):
            if params.eos and step % CHECK_EVERY == 0:
                done = at.done_B.tolist()
                remaining = [[slot for slot in of if not done[node][slot]] for node, of in enumerate(active)]
                if not any(remaining):
                    break
                if any(batch_size_for(len(a)) < batch_size_for(len(b)) for a, b in zip(remaining, active, strict=True)):
                    active = remaining
                    self._select(active)
            self._replay(batch_size_for(max(map(len, active))), params)
        # All results first: after waiting for the GPU a thread also waits for the interpreter lock.
        drawn = [values.cpu() for values in (at.tokens_BT[..., :limit], at.logprobs_BT[..., :limit], at.lengths_B)]
        for node, request in requests.items():
            tokens_BT, logprobs_BT, lengths_B = (values[node, : request.total] for values in drawn)
            yield samples(tokens_BT, logprobs_BT, lengths_B, params.eos, request.each)

    @staticmethod
    def _capacity(request: Request, limit: int) -> Capacity:
        lengths = list(map(len, request.prompts))
        prompt_shape = next_power_of_2(max(MIN_PROMPT_TOKENS, sum(lengths)))
        return Capacity(batch_size_for(request.total), limit, prompt_shape, next_power_of_2(max(lengths)) + limit)

    def _reserve(self, wanted: Sequence[Capacity]) -> None:
        """Reserve memory for batches of these sizes. A reallocation invalidates the captured graphs."""
        needed = Capacity(*map(max, *wanted, Capacity()))
        if any(size > reserved for size, reserved in zip(needed, self.scratch.capacity, strict=True)):
            self._drop_graphs()
            self.scratch.reserve(needed, self.weights)

    def _drop_graphs(self) -> None:
        self.graphs.clear()
        if any(self.copies):
            self.prefill_graphs.release()

    def _reset(self, requests: dict[int, Request], active: list[list[int]], limit: int) -> None:
        at = self.scratch
        at.lengths_B.zero_()
        at.lengths_B[:, -1] = 1  # the last slot of a node pads its batch
        done_B, seed_Z = (torch.ones(at.done_B.shape, dtype=torch.int32), torch.zeros_like(at.seed_Z, device="cpu"))
        for node, request in requests.items():
            done_B[node, : request.total] = 0
            seed_Z[node] = request.seed * 0x9E3779B97F4A7C15 % (1 << 62)
        at.done_B.copy_(to_device(done_B, self.device))
        at.seed_Z.copy_(to_device(seed_Z, self.device))
        at.limit_1.fill_(limit)
        self._select(active)

    def _select(self, active: list[list[int]]) -> None:
        """Make these sequences the batch, in this order."""
        unused = self.scratch.capacity.sequences
        rows = [
            [node * (unused + 1) + slot for slot in of + [unused] * (unused - len(of))]
            for node, of in enumerate(active)
        ]
        self.scratch.slots_M.copy_(to_device(torch.tensor(rows, dtype=torch.int32), self.device))
        self.scratch.active_Z.copy_(to_device(torch.tensor(list(map(len, active)), dtype=torch.int32), self.device))

    def _prefill(self, node: int, prompts: Sequence[Sequence[int]], count: int) -> None:
        """Run every prompt once: fill the cache, and start completions from the last hidden state."""
        at = self.scratch
        ids_N = flat(prompts, np.int64)
        lengths = tuple(map(len, prompts))
        each = np.repeat([list(accumulate(lengths)), lengths], count, axis=1)
        ends_B, lengths_B = to_device(torch.from_numpy(each), self.device)
        self.prefill_graphs.run(Batch.prefill(ids_N), BatchShape(lengths, (), ()), node)
        hidden_ME = at.prefill_NE[ends_B - 1]
        total = len(hidden_ME)
        at.prompt_starts_B[node, :total] = node * at.capacity.prompt_tokens + ends_B - lengths_B
        at.prompt_lengths_B[node, :total] = lengths_B
        at.hidden_ME[node, :total], at.low_ME[node, :total] = hidden_ME, hidden_ME
        at.squares_MS[node, :total, 0] = hidden_ME.square().sum(1)

    @torch.no_grad()
    def _prefill_pass(self, batch: Batch, segments: Segments, node: int) -> None:
        at, weights = self.scratch, cast(Weights, self.copies[node])
        attention = segments.attention(self.decoder)

        def attend(layer: int, q_N: Tensor, k_N: Tensor, v_N: Tensor) -> Tensor:
            q_N, k_N, v_N = (part.to(self.dtype) for part in (q_N, k_N, v_N))
            at.prompt_keys[layer, node, : len(k_N)], at.prompt_values[layer, node, : len(v_N)] = k_N, v_N
            return attention(layer, q_N, k_N, v_N)

        hidden_NE = weights.run_layers(batch.ids_N, segments.positions_N, attend)
        at.prefill_NE[: len(hidden_NE)] = hidden_NE

    def _replay(self, rows: int, params: SamplingParams) -> None:
        at = self.scratch
        if self.device.type != "cuda":
            self._step(rows, params)
            return
        key = (rows, params.temperature, params.top_k, params.top_p, params.greedy, params.eos)
        if key not in self.graphs:
            slots_M, active_Z = at.slots_M.clone(), at.active_Z.clone()
            self._select([[] for _ in self.copies])
            with capture_lock:
                self._step(rows, params)  # with an empty batch, to compile new kernels
                graph = torch.cuda.CUDAGraph()
                with capture(graph):
                    self._step(rows, params)
            self.graphs[key] = graph
            at.slots_M.copy_(slots_M)
            at.active_Z.copy_(active_Z)
        self.graphs[key].replay()

    def _step(self, rows: int, params: SamplingParams) -> None:
        """Decode one token for the first `rows` of every node's batch."""
        at = self.scratch
        weights, hidden, side = self.weights, at.hidden_ME, at.side_ME
        self._embed(rows)
        for number, layer in enumerate(weights.layers):
            self._product(rows, self._normed(rows, layer.before_attention), layer.qkv, at.qkv_MN)
            self._attend(rows, number, layer)
            if layer.after_attention is None:
                self._product(rows, at.attended_MN, layer.o, hidden)
            else:
                self._product(rows, at.attended_MN, layer.o, side)
                self._norm(rows, side, layer.after_attention, add=True)
            x_ME = self._normed(rows, layer.before_mlp)
            self._product(rows, x_ME, layer.up, at.inner_MN, weights.activation, weights.gated)
            if layer.after_mlp is None:
                self._product(rows, at.inner_MN, layer.down, hidden)
            else:
                self._product(rows, at.inner_MN, layer.down, side)
                self._norm(rows, side, layer.after_mlp, add=True)
        self._draw(rows, params)

    def _embed(self, rows: int) -> None:
        at = self.scratch
        width = at.hidden_ME.shape[2]
        kernels.embed[(rows, 1, self.nodes)](
            at.active_Z, at.slots_M, at.tokens_BT, at.lengths_B, at.prompt_lengths_B, self.embeddings_Z,
            self.positions_Z, at.hidden_ME, at.low_ME, at.squares_MS, at.capacity.tokens, width, at.capacity.sequences,
            at.squares_MS.shape[2], self.weights.embedding_scale,
            POSITIONS=self.positions_Z is not None, MANY=self.nodes > 1, BE=next_power_of_2(width),
        )  # fmt: skip
        self.square_blocks = 1

    def _normed(self, rows: int, norm: Norm | None) -> Tensor:
        """Return the input of the next product: the residual stream itself, where that product contains the norm."""
        at = self.scratch
        if norm is None:
            return at.low_ME
        self._norm(rows, at.hidden_ME, norm)
        return at.low_side_ME

    def _norm(self, rows: int, x_ME: Tensor, norm: Norm, add: bool = False) -> None:
        at = self.scratch
        width = x_ME.shape[2]
        kernels.norm[(rows, 1, self.nodes)](
            at.active_Z, x_ME, norm.weight, norm.bias, at.hidden_ME, at.low_ME if add else at.low_side_ME,
            at.squares_MS, width, at.capacity.sequences, at.squares_MS.shape[2], self.weights.eps,
            CENTRED=norm.bias is not None, ADD=add, MANY=self.nodes > 1, BE=next_power_of_2(width),
        )  # fmt: skip
        if add:
            self.square_blocks = 1

    def _product(
        self, rows: int, x_ME: Tensor, linear: Linear, out_MN: Tensor, activation: str = "", gated: bool = False
    ) -> None:
        """Apply a linear map from one buffer to another; it adds to the residual stream."""
        at = self.scratch
        outputs, width = linear.weight.shape[0] // (2 if gated else 1), linear.weight.shape[1]
        add, normed = out_MN is at.hidden_ME, x_ME is at.low_ME
        block_m, block_n, block_k, options = tiles(rows, outputs, width, self.nodes)
        across = -(-outputs // block_n)
        kernels.linear[(across, -(-rows // block_m), self.nodes)](
            at.active_Z, x_ME, at.squares_MS, linear.weight, linear.bias, out_MN, at.low_ME, rows, outputs,
            width, out_MN.shape[2], self.square_blocks, at.capacity.sequences, at.squares_MS.shape[2], self.weights.eps,
            NORM=normed, GATED=gated, ACTIVATION=activation, BIAS=linear.bias is not None, ADD=add,
            EVEN=width % block_k == 0, MANY=self.nodes > 1, BM=block_m, BN=block_n, BK=block_k,
            BS=next_power_of_2(self.square_blocks), **options,
        )  # fmt: skip
        if add:
            self.square_blocks = across

    def _attend(self, rows: int, number: int, layer: LayerWeights) -> None:
        at = self.scratch
        decoder, window = self.decoder, self.decoder.windows[number]
        rotation = at.rotations.get(decoder.kinds[number])
        cos, sin = rotation if rotation is not None else (None, None)
        group = decoder.heads // decoder.key_heads
        together, block, options = attention_tiles(rows * decoder.key_heads * self.nodes, group, decoder.head_size)
        kernels.attend[(-(-rows // together), decoder.key_heads, self.nodes)](
            at.active_Z, at.qkv_MN, at.slots_M, at.lengths_B, at.prompt_starts_B, at.prompt_lengths_B,
            at.prompt_keys[number], at.prompt_values[number], at.keys[number], at.values[number],
            layer.q_norm, layer.k_norm, cos, sin, at.attended_MN, rows, at.capacity.tokens, decoder.heads,
            decoder.key_heads, at.capacity.sequences, decoder.scale, self.weights.eps, window or 0,
            NORM=layer.q_norm is not None, ROTATE=rotation is not None, WINDOW=window is not None,
            MANY=self.nodes > 1, ROWS=together, GROUP=group, D=decoder.head_size,
            BG=max(16, next_power_of_2(together * group)),
            BD=max(16, next_power_of_2(decoder.head_size)), BLOCK=block, **options,
        )  # fmt: skip

    def _draw(self, rows: int, params: SamplingParams) -> None:
        """Compute logits from the residual stream, and draw the next token."""
        at = self.scratch
        weights, words, logit_stride = self.weights, self.weights.head.weight.shape[0], at.logits_MV.shape[2]
        self._product(rows, self._normed(rows, weights.last_norm), weights.head, at.logits_MV)
        cut = not params.greedy and (bool(params.top_k) or params.top_p < 1)
        for node in range(self.nodes if cut else 0):  # node by node, to save memory
            logits_MV = at.logits_MV[node, :rows, :words]
            logprobs_MV = (logits_MV / params.temperature).log_softmax(-1)
            kept_MV = truncated(logprobs_MV, params.top_k, params.top_p) > -torch.inf
            at.lowest_M[node, :rows] = logits_MV.masked_fill(~kept_MV, torch.inf).amin(-1)
        kernels.reduce_logits[(rows, at.blocks, self.nodes)](
            at.active_Z, at.logits_MV, at.lowest_M, at.argmax_MS, at.top_MS, at.sum_MS, at.kept_MS, words, logit_stride,
            at.blocks, at.capacity.sequences, params.temperature, GREEDY=params.greedy, CUT=cut,
            MANY=self.nodes > 1, BV=VOCABULARY_BLOCK,
        )  # fmt: skip
        if params.eos not in self.eos_tensors:
            eos_tensors = torch.tensor(sorted(params.eos) or [-1], dtype=torch.int32, device=self.device)
            self.eos_tensors[params.eos] = eos_tensors
        eos = self.eos_tensors[params.eos]
        kernels.draw_token[(rows, 1, self.nodes)](
            at.active_Z, at.logits_MV, at.slots_M, at.lowest_M, at.seed_Z, at.argmax_MS, at.top_MS, at.sum_MS,
            at.kept_MS, eos, at.limit_1, at.tokens_BT, at.logprobs_BT, at.lengths_B, at.done_B, words, logit_stride,
            at.capacity.tokens, at.blocks, at.capacity.sequences, len(eos), params.temperature,
            GREEDY=params.greedy, CUT=cut, MANY=self.nodes > 1, BV=VOCABULARY_BLOCK, BS=next_power_of_2(at.blocks),
            BEOS=next_power_of_2(len(eos)),
        )  # fmt: skip


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for its work."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not below the number."""
    return 1 << (number - 1).bit_length()


def batch_size_for(sequences: int) -> int:
    """Return the smallest batch size of a graph that holds the sequences."""
    return next((size for size in SIZES if size >= sequences), -(-sequences // 128) * 128)


def tiles(rows: int, outputs: int, width: int, nodes: int) -> tuple[int, int, int, dict[str, int]]:
    """Choose the tiles of a product: narrow, so that many programs share the reading of the weights.

    Tuned on an H200 with the shapes of a 135 M model; `benchmarks/learner/sampler.py` measures the result.
    """
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if nodes >= 4:  # enough programs even when they are logit_stride
        block_n, block_k = (32, 128) if outputs < 1000 else (64, 64) if outputs < 10000 else (128, 64)
        return block_m, block_n, block_k, {"num_warps": 4, "num_stages": 4}
    across = -(-rows // block_m)
    block_n = next((n for n in (128, 64) if outputs // n * across >= 120), 32 if outputs >= 900 else 16)
    block_k = 128 if block_n == 16 and width >= 1024 else 64
    return block_m, block_n, block_k, {"num_warps": 4, "num_stages": 3 if block_n >= 64 else 5}


def attention_tiles(programs: int, group: int, head_size: int) -> tuple[int, int, dict[str, int]]:
    """Choose how many sequences a program of attention takes, and how many keys it loads at a time.

    Few programs must be quick; many small ones hide each other's latency.
    """
    if programs >= MANY_PROGRAMS:
        return max(1, 8 // group), 64, {"num_warps": 2, "num_stages": 2}
    if programs >= 512:
        return 1, 32, {"num_warps": 1, "num_stages": 3}
    return 1, 128 if head_size <= 64 else 64, {"num_warps": 4, "num_stages": 2}
