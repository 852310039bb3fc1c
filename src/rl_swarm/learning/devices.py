"""Chooses device and model for this machine, and describes its hardware."""

import logging
import platform
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from rl_swarm import __version__
from rl_swarm.environments.settings import TaskSettings
from rl_swarm.errors import ConfigError
from rl_swarm.learning import memory
from rl_swarm.learning.cpu import precision
from rl_swarm.learning.settings import BUNDLED as BUNDLED_MODELS
from rl_swarm.learning.settings import ModelSettings, PolicySettings
from rl_swarm.learning.sizes import ModelShape
from rl_swarm.telemetry.machine import GIB, machine

log = logging.getLogger(__name__)

HUB_SECONDS = 10.0  # for the hub to answer
LARGE_POOL_FROM = 40 * GIB  # of GPU memory
OVERHEAD = 1.5  # of a round over its matrix products, as a factor
MIN_WIDTH = 256  # hidden size below which converting to bfloat16 costs a CPU more than it saves

BUNDLED = {name: Path(__file__).parent / "models" / name for name in BUNDLED_MODELS}
TINY = BUNDLED["tiny"]


@dataclass(frozen=True)
class ModelCard:
    """Describes a model that `auto` may choose."""

    name: str
    pool: str
    shape: ModelShape


CATALOGUE = (
    ModelCard("tiny", "bundled", ModelShape(3, 256, 768, 8, 8, 32, 305)),
    ModelCard("coder", "bundled", ModelShape(4, 256, 768, 8, 8, 32, 1590)),
    ModelCard("smollm2-135m", "offline", ModelShape(30, 576, 1536, 9, 3, 64, 49152)),
    ModelCard("Qwen/Qwen2.5-0.5B-Instruct", "small", ModelShape(24, 896, 4864, 14, 2, 64, 151936)),
    ModelCard("Qwen/Qwen3-0.6B", "small", ModelShape(28, 1024, 3072, 16, 8, 128, 151936)),
    ModelCard("Qwen/Qwen2.5-1.5B-Instruct", "large", ModelShape(28, 1536, 8960, 12, 2, 128, 151936)),
    ModelCard("Qwen/Qwen3-1.7B", "large", ModelShape(28, 2048, 6144, 16, 8, 128, 151936)),
    ModelCard("Qwen/Qwen2.5-Coder-0.5B-Instruct", "coding", ModelShape(24, 896, 4864, 14, 2, 64, 151936)),
    ModelCard("Qwen/Qwen2.5-Coder-1.5B-Instruct", "judging", ModelShape(28, 1536, 8960, 12, 2, 128, 151936)),
)


def pick_device(settings: ModelSettings) -> torch.device:
    if settings.cpu_only or settings.device == "cpu":
        return torch.device("cpu")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda', but torch sees no CUDA GPU here. Use device=auto or CPU_ONLY=True.")
    if settings.device == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device='mps', but this machine has no Apple GPU. Use device=auto or CPU_ONLY=True.")
    if settings.device != "auto":
        return torch.device(settings.device)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def use_threads(count: int, device: torch.device) -> None:
    """Use `count` processor threads; beside a GPU one is enough."""
    torch.set_num_threads(max(1, count) if device.type == "cpu" else 1)


def devices_of(device: torch.device, settings: ModelSettings) -> list[torch.device]:
    """Return all devices that a node uses."""
    if device.type != "cuda" or settings.devices_per_node == 1:
        return [device]
    return [torch.device("cuda", k) for k in range(min(settings.devices_per_node, torch.cuda.device_count()))]


def gpu_ids(devices: Sequence[torch.device]) -> list[str]:
    """Return the ids that NVIDIA's management library knows these GPUs by."""
    cuda = [device for device in devices if device.type == "cuda"]
    return [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in cuda]


def hardware(devices: Sequence[torch.device]) -> dict[str, str]:
    """Describe the machine, its GPUs and the versions in words."""
    versions = f"rl-swarm {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    found = {**machine(), "versions": versions}
    gpus = [torch.cuda.get_device_properties(device) for device in devices if device.type == "cuda"]
    if gpus:
        each = f"{gpus[0].name}, {gpus[0].total_memory / GIB:.0f} GiB"
        found["gpu"] = each if len(gpus) == 1 else f"{len(gpus)} × {each}"
    elif devices[0].type == "mps":
        found["gpu"] = "of the processor"
    return found


def total_memory(device: torch.device) -> int:
    """Return the memory of the GPU, or else of the machine, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def pick_model(settings: PolicySettings, device: torch.device) -> str:
    """Return the model that the settings name; for `auto`, the first that fits, else a bundled one."""
    if settings.model.model != "auto":
        return settings.model.model
    coding = settings.task.environment == "coding"
    free = memory.available(device, memory.processes_on_device(settings.model, device))
    fitting = (
        card.name
        for pool in _pools(settings.task, device)
        for card in CATALOGUE
        if card.pool == pool and memory.plan(card.shape, free, settings, device.type).fits
    )
    if coding:  # `auto` is the default there, and must not need the hub
        fitting = (name for name in fitting if is_available(name, settings.model.hf_token))
    picked = next(fitting, None)
    if picked is None and not coding:
        log.warning("no model of the pools fits here: tiny, which can do the tasks of `--tasks tiny` and no others")
    return picked or ("coder" if coding else "tiny")


def is_available(name: str, token: str | None) -> bool:
    """Return whether a model of the hub is cached here, or can be downloaded."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "model.safetensors"), str):
        return True
    try:
        HfApi(token=token).model_info(name, timeout=HUB_SECONDS)
    except Exception as error:  # noqa: BLE001 the library raises errors of many kinds
        log.info("%s cannot be downloaded from the hub: %s", name, " ".join(str(error).split())[:200])
        return False
    return True


def _pools(settings: TaskSettings, device: torch.device) -> tuple[str, ...]:
    """Return the pools that `auto` searches, in order. Coding needs a GPU, and a better model for evaluators."""
    if settings.environment == "coding":
        if device.type != "cuda":
            return ()
        return ("judging", "coding") if settings.role == "evaluator" else ("coding",)
    large = device.type == "cuda" and total_memory(device) >= LARGE_POOL_FROM
    return ("large", "small") if large else ("small",)


def speed(device: torch.device, rows: int, seconds: float = 0.1) -> float:
    """Measure operations per second in products of `rows` rows with a matrix too large for a cache."""
    low = device.type == "cuda" or (device.type == "cpu" and cpu_has_bfloat16())
    dtype, width = torch.bfloat16 if low else torch.float32, 8192 if device.type == "cuda" else 2048
    left = torch.ones(rows, width, device=device, dtype=dtype)
    right = torch.ones(width, width, device=device, dtype=dtype)
    done, started = -1, 0.0  # the first product is a warm-up
    while done < 0 or time.perf_counter() - started < seconds:
        (left @ right)[0, 0].item()
        done, started = (done + 1, started) if started else (0, time.perf_counter())
    return 2.0 * rows * width * width * done / (time.perf_counter() - started)


def round_seconds(shape: ModelShape, settings: PolicySettings, sampling: float, training: float) -> float:
    """Estimate how long a round takes at these speeds with completions of full length."""
    group = memory.prompt_tokens(settings.model) + settings.sampling.generations * settings.completion_tokens()
    sampled, trained = (
        settings.learning.local_groups * group,
        (settings.learning.local_groups + settings.learning.external_groups) * group,
    )
    return OVERHEAD * shape.parameters * (2 * sampled / sampling + 6 * trained / training)


def prefers_bfloat16(model: Any) -> bool:
    """Return whether matrix products of this model run faster in bfloat16 on its device."""
    if model.device.type == "cuda":
        return True
    if model.device.type != "cpu" or getattr(model.config, "hidden_size", 0) < MIN_WIDTH:
        return False
    return cpu_has_bfloat16() and precision.chosen(model.config.hidden_size) == "bfloat16"


def cpu_has_bfloat16() -> bool:
    cpu: Any = torch.cpu
    return any(getattr(cpu, name, bool)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))


def low_precision(model: Any) -> torch.autocast:
    """Return a context in which matrix products run in bfloat16, where that is faster than float32."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=prefers_bfloat16(model))


# From messages of torch, CUDA, MPS and the CPU's allocator without memory, and of oneDNN, which gives no reason.
NO_MEMORY = (
    "out of memory",
    "alloc_failed",
    "invalid buffer size",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "insufficient memory",
    "bad_alloc",
    "could not create a primitive",
)


def out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: torch has a class for CUDA's error, and only messages for all others.

    An error of this package may quote such a message, as of a failed worker, and does not count.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    of_torch = type(error) is RuntimeError or type(error).__module__.split(".")[0] == "torch"
    return of_torch and any(words in str(error).lower() for words in NO_MEMORY)


def release_memory() -> None:
    """Return the allocator's cached memory to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


def free_disk(path: Path) -> int:
    return shutil.disk_usage(path).free


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process in bytes."""
    if device.type == "cuda":
        found = torch.cuda.memory.memory_stats_as_nested_dict(device)  # several times as fast as `memory_stats`
        return int(found["allocated_bytes"]["all"]["peak"]) if found else 0
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_table() -> str:
    """Return the memory that a round with the default settings needs, as the Markdown table of docs/hardware.md."""
    kinds = (("CPU", "cpu", 0), ("CPU, LoRA", "cpu", 16), ("GPU", "cuda", 0), ("GPU, LoRA", "cuda", 16))
    rows = [("model", "parameters", *(title for title, *_ in kinds)), ("---", *["---:"] * (1 + len(kinds)))]
    for card in CATALOGUE:
        cells = []
        for _, kind, rank in kinds:
            settings = PolicySettings.of(model=card.name, lora_rank=rank)
            plans = [memory.plan(card.shape, free, settings, kind) for free in (0, 1 << 50)]
            cells.append(" to ".join(f"{plan.needed / GIB:.1f}" for plan in plans))
        rows.append((f"`{card.name}`", f"{card.shape.parameters / 1e6:,.0f} M", *cells))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    print(memory_table(), end="")
