"""What a node runs on, and how busy that is: read once a round, for its log.

How busy a GPU was is asked of NVIDIA's management library (NVML), which the driver brings along and which keeps the samples
of the last seconds; without it, and on a CPU, it is the processor alone. Importing this loads no torch.
"""

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from rl_swarm import __version__

if TYPE_CHECKING:
    import torch

GIB = 1 << 30


def hardware(devices: "Sequence[torch.device]") -> dict[str, str]:
    """The machine in words."""
    import torch

    found = {
        "processor": _processor(),
        "cores": str(os.cpu_count() or 1),
        "memory": f"{psutil.virtual_memory().total / GIB:.1f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        "versions": f"rl-swarm {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    }
    gpus = [torch.cuda.get_device_properties(device) for device in devices if device.type == "cuda"]
    if gpus:
        each = f"{gpus[0].name}, {gpus[0].total_memory / GIB:.0f} GiB"
        found["gpu"] = each if len(gpus) == 1 else f"{len(gpus)} × {each}"
    elif devices[0].type == "mps":
        found["gpu"] = "of the processor"
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class Load:
    """How busy a node's process kept the processor since it was read last, and its GPUs, whoever uses them."""

    def __init__(self, devices: "Sequence[torch.device]" = ()) -> None:
        self._at, self._busy = time.monotonic(), time.process_time()
        self._gpus = gpus_of(devices)

    def read(self) -> dict[str, float]:
        at, busy = time.monotonic(), time.process_time()
        found = {
            "processor": round((busy - self._busy) / max(at - self._at, 1e-9), 3),  # cores
            "memory": psutil.Process().memory_info().rss,
        }
        self._at, self._busy = at, busy
        shares = [share for gpu in self._gpus if (share := gpu.share()) is not None]
        used = [used for gpu in self._gpus if (used := gpu.memory()) is not None]
        if shares:
            found["gpu"] = round(sum(shares) / len(shares), 3)
        if used:
            found["gpu_memory"] = sum(used)
        return found


class Gpu:
    """Reads from NVML how busy one GPU is."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle
        self._seen = 0  # the time of the newest sample that was read

    def share(self) -> float | None:
        """Of the time since it was read last, or of the last seconds of it, in which a kernel ran."""
        try:
            kind, samples = self.nvml.nvmlDeviceGetSamples(
                self.handle, self.nvml.NVML_GPU_UTILIZATION_SAMPLES, self._seen
            )
        except self.nvml.NVMLError:
            return None
        found = [sample for sample in samples if sample.timeStamp > self._seen]
        if not found or kind != self.nvml.NVML_VALUE_TYPE_UNSIGNED_INT:
            return None
        self._seen = max(sample.timeStamp for sample in found)
        return float(sum(sample.sampleValue.uiVal for sample in found)) / len(found) / 100

    def memory(self) -> int | None:
        try:
            return int(self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used)
        except self.nvml.NVMLError:
            return None


def gpus_of(devices: "Sequence[torch.device]") -> list[Gpu]:
    """Finds the GPUs in NVML: none where there is no NVIDIA driver."""
    cuda = [device for device in devices if device.type == "cuda"]
    if not cuda:
        return []
    import pynvml
    import torch

    try:
        pynvml.nvmlInit()
        names = [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in cuda]
        return [Gpu(pynvml, pynvml.nvmlDeviceGetHandleByUUID(name)) for name in names]
    except pynvml.NVMLError:  # no such library, or one that is too old
        return []
