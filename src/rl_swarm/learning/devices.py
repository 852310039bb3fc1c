"""What this machine can run: device, memory, and the model that fits."""

import gc
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from rl_swarm.config import ConfigError, Settings

GIB = 1 << 30
LARGE_POOL_FROM = 40 * GIB  # of GPU memory

TINY = Path(__file__).parent / "models" / "tiny"


@dataclass(frozen=True)
class ModelCard:
    """A model of the pools. A round needs weights, gradients and two Adam moments in float32, and activations."""

    name: str
    pool: str
    parameters: float  # in billions

    @property
    def memory(self) -> int:
        return int(self.parameters * 1e9 * 16) + (2 * GIB if self.parameters > 0.1 else GIB // 4)


CATALOGUE = (
    ModelCard("tiny", "bundled", 0.003),
    ModelCard("smollm2-135m", "offline", 0.135),
    ModelCard("Qwen/Qwen2.5-0.5B-Instruct", "small", 0.49),
    ModelCard("Qwen/Qwen3-0.6B", "small", 0.6),
    ModelCard("Qwen/Qwen2.5-1.5B-Instruct", "large", 1.54),
    ModelCard("Qwen/Qwen3-1.7B", "large", 1.72),
)


def pick_device(settings: Settings) -> torch.device:
    if settings.cpu_only or settings.device == "cpu":
        return torch.device("cpu")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda', but torch sees no CUDA GPU here. Use device=auto or CPU_ONLY=True.")
    if settings.device == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(
            "device='mps', but this machine has no Apple GPU. Use device=auto or CPU_ONLY=True."
        )
    if settings.device != "auto":
        return torch.device(settings.device)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def total_memory(device: torch.device) -> int:
    """Bytes that a model on this device can use: the GPU's, or the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def pick_model(settings: Settings, device: torch.device) -> str:
    """The model that the settings name; for `auto` the first of the right pool that fits."""
    if settings.model != "auto":
        return settings.model
    memory = total_memory(device)
    pool = "large" if device.type == "cuda" and memory >= LARGE_POOL_FROM else "small"
    fitting = [card.name for card in CATALOGUE if card.pool == pool and card.memory <= memory]
    return fitting[0] if fitting else "tiny"


def low_precision(device: torch.device) -> torch.autocast:
    """The context in which matrix products run in bfloat16, where that is faster than float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def release_memory() -> None:
    """Gives back to the device what is cached for reuse."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_disk(path: Path) -> int:
    return shutil.disk_usage(path).free


def peak_memory(device: torch.device) -> int:
    """The most memory this process has used so far, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
