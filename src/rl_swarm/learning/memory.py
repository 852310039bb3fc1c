"""Plans memory: how much there is for a node, what a round needs, and the sizes at which it fits.

The estimates are sums over what a model's shape says; their factors were measured on small models. Where
they err, `Trainer` and `Policy.sample` still take smaller pieces when memory runs out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from rl_swarm.learning.settings import LearningSettings, ModelSettings, PolicySettings
from rl_swarm.learning.sizes import ModelShape

GIB = 1 << 30
BASE = GIB // 2  # the interpreter, libraries and their workspaces
SEAT = GIB // 16  # of every node of a process: its stream, its workspaces, and what is lost between its blocks
COMMON_CARD = 24 * 10**9
USABLE = 0.9  # of what is available: the rest is lost between blocks
USABLE_TOGETHER = 0.95  # by nodes of one process, which allocate page by page
MAX_SEQUENCES = 512  # sampled at once
MAX_TOKENS = 4096  # of a micro-batch: larger ones are hardly faster
# Numbers, of two bytes each, that exist at the same time on a GPU; a quarter of them where there are several copies in
# float32.
LOGITS = 1 << 27
LARGE_BATCH = 3 * GIB  # of a GPU's memory: a model of which more tokens fit takes up to twice as many
DESKS = 2  # of nodes that share a process, so many train at the same time, where memory allows it


def keeping(shape: ModelShape, settings: LearningSettings) -> int:
    """Bytes that a node keeps all the time: weights and two moments in float32, and a copy in bfloat16 to sample
    from."""
    reference = 4 * shape.parameters if settings.kl_weight > 0 else 0
    return 6 * shape.parameters + 8 * shape.trained(settings.lora_rank) + reference


def desk(shape: ModelShape, settings: LearningSettings) -> int:
    """Bytes that training needs beside a micro-batch: gradients, and the weights in bfloat16."""
    return 4 * shape.trained(settings.lora_rank) + 2 * shape.parameters


def training(shape: ModelShape, settings: LearningSettings, device_type: str, tokens: int) -> int:
    """Bytes that a micro-batch of so many tokens takes: what layers keep for the way back, and some logits."""
    asked = shape.heads * shape.head_size
    all_heads = asked + 2 * shape.key_heads * shape.head_size
    if device_type == "cuda":  # the residual stream in float32, everything else in bfloat16
        layer = 12 * shape.hidden + 2 * all_heads + 2 * asked + (6 if shape.gated else 2) * shape.inner
        number, copies = 2, 1
    else:
        layer = 4 * (7 * shape.hidden + 2 * (all_heads + asked) + (5 if shape.gated else 2) * shape.inner)
        number, copies = 4, 5
    logits = tokens * shape.vocabulary
    if shape.packed:
        logits = min(logits, LOGITS if device_type == "cuda" else LOGITS // 4)
    else:
        number, copies = 4, 5
    head = 0 if settings.lora_rank else (8 if device_type == "cuda" else 4) * shape.words  # before it is added
    return tokens * shape.layers * layer + number * copies * logits + head


def most_tokens(shape: ModelShape, settings: LearningSettings, device_type: str) -> int:
    """Of a micro-batch, where memory is plentiful."""
    if device_type != "cuda":
        return MAX_TOKENS
    steps = (2 * MAX_TOKENS, 3 * MAX_TOKENS // 2, 9 * MAX_TOKENS // 8)
    return next((n for n in steps if training(shape, settings, device_type, n) <= LARGE_BATCH), MAX_TOKENS)


def sampling(shape: ModelShape, settings: PolicySettings, device_type: str, sequences: int) -> int:
    """Bytes that so many sequences take: keys and values of every token, and the logits of the next."""
    per_token = 2 * shape.layers * shape.key_heads * shape.head_size
    room = settings.completion_tokens()
    if device_type == "cuda":  # prompts are kept once for all their completions
        tokens = room + prompt_tokens(settings.model) / settings.sampling.generations
        return int(sequences * (2 * per_token * tokens + 4 * shape.vocabulary))
    half_again = 1.5  # when the sequences that go on are copied
    return int(
        sequences * (4 * per_token * half_again * (prompt_tokens(settings.model) + room) + 4 * 4 * shape.vocabulary)
    )


def prompt_tokens(settings: ModelSettings) -> int:
    """Of a long question with its instruction."""
    return {"tiny": 24, "coder": 48}.get(settings.model, 256)


@dataclass(frozen=True)
class Plan:
    batch_tokens: int
    sequences: int
    needed: int
    available: int
    fits: bool
    nodes: int = 1  # that share all this
    desks: int = 1  # so many of them train at the same time

    def __str__(self) -> str:
        sizes = f"micro-batches of {self.batch_tokens} tokens, {self.sequences} sequences at once"
        whose = f"{self.nodes} nodes need together" if self.nodes > 1 else "a round needs"
        if self.nodes > 1:
            sizes += f" of each, {self.desks} in training"
        need = f"{self.available / GIB:.1f} GiB available, {whose} about {self.needed / GIB:.1f} GiB"
        if self.fits:
            return f"{need}: {sizes}"
        return (
            f"{need} even with {sizes}. Memory may run out: use a smaller model, lora_rank=16, fewer nodes or a "
            "lower max_new_tokens."
        )


def plan(shape: ModelShape, available: int, settings: PolicySettings, device_type: str, nodes: int = 1) -> Plan:
    """The largest sizes that fit: first a second desk goes, then what makes micro-batches large, then what takes more
    is
    halved, until all fits or nothing can be halved.

    Nodes that share a process stay within a consumer's card, if they can. Sizes come in steps, so that small
    differences in free memory do not change what a run computes.
    """
    if nodes == 1:
        return _plan(shape, available, USABLE * available, settings, device_type, nodes)
    usable = USABLE_TOGETHER * available
    small = _plan(shape, available, min(usable, COMMON_CARD), settings, device_type, nodes)
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
    tokens = settings.learning.batch_tokens or most_tokens(shape, settings.learning, device_type)
    sequences = in_a_round if nodes > 1 else max(1, MAX_SEQUENCES // count) * count
    desks = min(DESKS, nodes)
    kept = BASE + nodes * keeping(shape, settings.learning)
    at_desk = desk(shape, settings.learning)
    if nodes > 1:
        kept += nodes * SEAT
        at_desk += 4 * shape.trained(settings.learning.lora_rank)  # the weights of the node that sits there
    together = sum if device_type == "cuda" else max  # there the sampler keeps its memory during training
    while True:
        fixed = kept + desks * at_desk
        train = desks * training(shape, settings.learning, device_type, max(longest, min(tokens, whole)))
        sample = nodes * sampling(shape, settings, device_type, sequences)
        fits = fixed + together([train, sample]) <= usable
        less_tokens = tokens > longest and not settings.learning.batch_tokens
        less_sequences = sequences > count
        if fits or not (desks > 1 or less_tokens or less_sequences):
            at_once = min(sequences, in_a_round)
            sample = nodes * sampling(shape, settings, device_type, at_once)
            needed = fixed + together([train, sample])
            return Plan(tokens, sequences, needed, available, fits, nodes, desks)
        if desks > 1:
            desks //= 2
        elif less_tokens and tokens > MAX_TOKENS:
            tokens = max(MAX_TOKENS, 3 * tokens // 4)
        elif not less_tokens or (less_sequences and sample > train):
            sequences = sequences // 2 // count * count or count
        else:
            tokens = min(tokens, whole) // 2


def available(device: torch.device, nodes: int = 1) -> int:
    """Bytes that a node may use where so many share the device: its share, and not more than is free."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        free, total = torch.cuda.mem_get_info(index)
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda index: 1.0)(index)
        return int(min(free + torch.cuda.memory_reserved(index), fraction * total, total / nodes))
    memory, own = psutil.virtual_memory(), psutil.Process().memory_info()
    total, free = memory.total, memory.available
    mine = own.rss - getattr(own, "shared", 0)
    for limit, used in cgroups(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")):
        total, free = min(total, limit), min(free, max(0, limit - used))
    return int(min(free + mine, total / nodes))


def sharing(settings: ModelSettings, device: torch.device) -> int:
    """How many processes share the device's memory. On a CPU the helpers of a node do too."""
    helpers = settings.devices_per_node if device.type != "cuda" else 1
    return max(1, settings.nodes_per_device) * helpers


def cgroups(root: Path, listing: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of every control group that this process is in and that has a limit, of either version."""
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
            if limit is not None and limit < 1 << 60:  # version 1 writes a huge number for none
                idle = _idle(folder / "memory.stat")
                yield limit, max(0, (used or 0) - idle)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _idle(stat: Path) -> int:
    """Bytes of files kept in memory, which make way."""
    try:
        pairs = dict(line.split() for line in stat.read_text().splitlines())
        return int(pairs.get("total_inactive_file", pairs.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0
