"""Plans memory: how much a node may use, what a round needs, and the batch sizes at which it fits.

Estimates follow from the shape of the model; their factors were measured on small models. Where they are too low,
`Trainer` and `Policy.sample` halve their batches when memory runs out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from rl_swarm.learning.settings import LearningSettings, ModelSettings, PolicySettings
from rl_swarm.learning.sizes import ModelShape

GIB = 1 << 30
BASE = GIB // 2  # interpreter, libraries and their workspaces
NODE_OVERHEAD = GIB // 16  # of every node in a process: stream, workspaces and fragmentation
CONSUMER_GPU = 24 * 10**9  # bytes
USABLE = 0.9  # of the available memory: the rest is lost to fragmentation
USABLE_TOGETHER = 0.95  # by nodes of one process, which allocate page by page
MAX_SEQUENCES = 512  # sampled in one batch
MAX_TOKENS = 4096  # of a micro-batch: larger ones are hardly faster
# Logits in bfloat16 that exist at the same time on a GPU; a quarter of them where float32 copies exist too.
LOGITS = 1 << 27
LARGE_BATCH = 3 * GIB  # of GPU memory: up to twice `MAX_TOKENS`, if they fit into it
MAX_TRAINING_SLOTS = 2  # nodes of one process that train at the same time, where memory allows it


def resident_bytes(shape: ModelShape, settings: LearningSettings) -> int:
    """Return the bytes that a node always holds: weights and moments in float32, and the bfloat16 copy for sampling."""
    reference = 4 * shape.parameters if settings.kl_weight > 0 else 0
    return 6 * shape.parameters + 8 * shape.trained(settings.lora_rank) + reference


def training_slot_bytes(shape: ModelShape, settings: LearningSettings) -> int:
    """Return the bytes that training needs beside a micro-batch: gradients, and weights in bfloat16."""
    return 4 * shape.trained(settings.lora_rank) + 2 * shape.parameters


def micro_batch_bytes(shape: ModelShape, settings: LearningSettings, device_type: str, tokens: int) -> int:
    """Return the bytes of a micro-batch: activations kept for the backward pass, and a chunk of logits."""
    query_size = shape.heads * shape.head_size
    all_heads = query_size + 2 * shape.key_heads * shape.head_size
    if device_type == "cuda":  # the residual stream in float32, everything else in bfloat16
        layer = 12 * shape.hidden + 2 * all_heads + 2 * query_size + (6 if shape.gated else 2) * shape.inner
        bytes_each, copies = 2, 1
    else:
        layer = 4 * (7 * shape.hidden + 2 * (all_heads + query_size) + (5 if shape.gated else 2) * shape.inner)
        bytes_each, copies = 4, 5
    logits = tokens * shape.vocabulary
    if shape.packed:
        logits = min(logits, LOGITS if device_type == "cuda" else LOGITS // 4)
    else:
        bytes_each, copies = 4, 5
    head = 0 if settings.lora_rank else (8 if device_type == "cuda" else 4) * shape.words  # before it is accumulated
    return tokens * shape.layers * layer + bytes_each * copies * logits + head


def max_batch_tokens(shape: ModelShape, settings: LearningSettings, device_type: str) -> int:
    """Return the most tokens of a micro-batch that a GPU with enough memory uses."""
    if device_type != "cuda":
        return MAX_TOKENS
    steps = (2 * MAX_TOKENS, 3 * MAX_TOKENS // 2, 9 * MAX_TOKENS // 8)
    return next((n for n in steps if micro_batch_bytes(shape, settings, device_type, n) <= LARGE_BATCH), MAX_TOKENS)


def sampling_bytes(shape: ModelShape, settings: PolicySettings, device_type: str, sequences: int) -> int:
    """Return the bytes that sequences take: the KV cache, and the logits of the next token."""
    per_token = 2 * shape.layers * shape.key_heads * shape.head_size
    room = settings.completion_tokens()
    if device_type == "cuda":  # completions share the cache of their prompt
        tokens = room + prompt_tokens(settings.model) / settings.sampling.generations
        return int(sequences * (2 * per_token * tokens + 4 * shape.vocabulary))
    half_again = 1.5  # compacting copies the unfinished sequences
    return int(
        sequences * (4 * per_token * half_again * (prompt_tokens(settings.model) + room) + 4 * 4 * shape.vocabulary)
    )


def prompt_tokens(settings: ModelSettings) -> int:
    """Return the tokens of a long question with its instruction."""
    return {"tiny": 24, "coder": 48}.get(settings.model, 256)


@dataclass(frozen=True)
class Plan:
    batch_tokens: int
    sequences: int
    needed: int
    available: int
    fits: bool
    nodes: int = 1  # that share the memory
    training_slots: int = 1  # nodes that train at the same time

    def __str__(self) -> str:
        sizes = f"micro-batches of {self.batch_tokens} tokens, {self.sequences} sequences at once"
        whose = f"{self.nodes} nodes need together" if self.nodes > 1 else "a round needs"
        if self.nodes > 1:
            sizes += f" of each, {self.training_slots} in training"
        need = f"{self.available / GIB:.1f} GiB available, {whose} about {self.needed / GIB:.1f} GiB"
        if self.fits:
            return f"{need}: {sizes}"
        return (
            f"{need} even with {sizes}. Memory may run out: use a smaller model, lora_rank=16, fewer nodes or a "
            "lower max_new_tokens."
        )


def plan(shape: ModelShape, available: int, settings: PolicySettings, device_type: str, nodes: int = 1) -> Plan:
    """Choose the largest sizes that fit.

    A second training slot is dropped first, then micro-batches shrink to `MAX_TOKENS`. After that the larger of
    training and sampling is halved until both fit. Nodes of one process stay within a consumer GPU, if they can.
    Sizes come in steps, so that small differences in free memory do not change what a run computes.
    """
    if nodes == 1:
        return _plan(shape, available, USABLE * available, settings, device_type, nodes)
    usable = USABLE_TOGETHER * available
    small = _plan(shape, available, min(usable, CONSUMER_GPU), settings, device_type, nodes)
    return small if small.fits else _plan(shape, available, usable, settings, device_type, nodes)


def _plan(
    shape: ModelShape, available: int, usable: float, settings: PolicySettings, device_type: str, nodes: int
) -> Plan:
    longest = prompt_tokens(settings.model) + settings.completion_tokens()
    groups, count = (
        max(1, settings.learning.local_groups + settings.learning.external_groups),
        settings.sampling.generations,
    )
    whole = groups * (prompt_tokens(settings.model) + count * settings.completion_tokens())
    in_a_round = max(1, settings.learning.local_groups) * count  # a held-out score samples more
    tokens = settings.learning.batch_tokens or max_batch_tokens(shape, settings.learning, device_type)
    sequences = in_a_round if nodes > 1 else max(1, MAX_SEQUENCES // count) * count
    training_slots = min(MAX_TRAINING_SLOTS, nodes)
    kept = BASE + nodes * resident_bytes(shape, settings.learning)
    per_slot = training_slot_bytes(shape, settings.learning)
    if nodes > 1:
        kept += nodes * NODE_OVERHEAD
        per_slot += 4 * shape.trained(settings.learning.lora_rank)  # the weights of the node that trains in it
    combined = sum if device_type == "cuda" else max  # on CUDA the sampler keeps its memory during training
    while True:
        fixed = kept + training_slots * per_slot
        train = training_slots * micro_batch_bytes(
            shape, settings.learning, device_type, max(longest, min(tokens, whole))
        )
        sample = nodes * sampling_bytes(shape, settings, device_type, sequences)
        fits = fixed + combined([train, sample]) <= usable
        less_tokens = tokens > longest and not settings.learning.batch_tokens
        less_sequences = sequences > count
        if fits or not (training_slots > 1 or less_tokens or less_sequences):
            sample = nodes * sampling_bytes(shape, settings, device_type, min(sequences, in_a_round))
            needed = fixed + combined([train, sample])
            return Plan(tokens, sequences, needed, available, fits, nodes, training_slots)
        if training_slots > 1:
            training_slots //= 2
        elif less_tokens and tokens > MAX_TOKENS:
            tokens = max(MAX_TOKENS, 3 * tokens // 4)
        elif not less_tokens or (less_sequences and sample > train):
            sequences = sequences // 2 // count * count or count
        else:
            tokens = min(tokens, whole) // 2


def available(device: torch.device, nodes: int = 1) -> int:
    """Return the bytes that a node may use where `nodes` share the device: its share, but no more than is free."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        free, total = torch.cuda.mem_get_info(index)
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda index: 1.0)(index)
        return int(min(free + torch.cuda.memory_reserved(index), fraction * total, total / nodes))
    memory, own = psutil.virtual_memory(), psutil.Process().memory_info()
    total, free = memory.total, memory.available
    used_here = own.rss - getattr(own, "shared", 0)
    for limit, used in cgroups(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")):
        total, free = min(total, limit), min(free, max(0, limit - used))
    return int(min(free + used_here, total / nodes))


def processes_on_device(settings: ModelSettings, device: torch.device) -> int:
    """Return how many processes share the device's memory; on a CPU, the ranks of a node do too."""
    ranks = settings.devices_per_node if device.type != "cuda" else 1
    return max(1, settings.nodes_per_device) * ranks


def cgroups(root: Path, listing: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of every control group (version 1 or 2) that limits this process."""
    lines = listing.read_text().splitlines() if listing.exists() else []
    for _, kinds, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if kinds and "memory" not in kinds.split(","):
            continue
        base = root / "memory" if kinds else root
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if kinds else ("memory.max", "memory.current")
        here = base / path.lstrip("/")
        for folder in (here, *here.parents):
            if not folder.is_relative_to(base):
                break
            limit, used = (_number(folder / name) for name in names)
            if limit is not None and limit < 1 << 60:  # version 1 writes a huge number for no limit
                cached = _reclaimable(folder / "memory.stat")
                yield limit, max(0, (used or 0) - cached)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(stat: Path) -> int:
    """Return the bytes of cached files, which the kernel drops when memory is needed."""
    try:
        pairs = dict(line.split() for line in stat.read_text().splitlines())
        return int(pairs.get("total_inactive_file", pairs.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0
