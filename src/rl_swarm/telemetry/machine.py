"""Measures the load of the machine that a node runs on, once a round.

The load of an NVIDIA GPU comes from its driver's library (NVML), which keeps the samples of the last seconds. Elsewhere
only the processor is measured. Importing this loads no torch.
"""

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

GIB = 1 << 30


def machine() -> dict[str, str]:
    """Describe the machine in words, without its GPUs."""
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count() or 1),
        "memory": f"{psutil.virtual_memory().total / GIB:.1f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class LoadMeter:
    """Measures how busy a node's process kept the processor since the last reading, and how busy its GPUs are."""

    def __init__(self, gpu_ids: Sequence[str] = ()) -> None:
        self._at, self._busy = time.monotonic(), time.process_time()
        self._gpus = gpus_of(gpu_ids)

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
        self._newest = 0  # the time of the newest sample that was read

    def share(self) -> float | None:
        """Return the share of the time since the last reading, or of its last seconds, in which a kernel ran."""
        try:
            kind, samples = self.nvml.nvmlDeviceGetSamples(
                self.handle, self.nvml.NVML_GPU_UTILIZATION_SAMPLES, self._newest
            )
        except self.nvml.NVMLError:
            return None
        found = [sample for sample in samples if sample.timeStamp > self._newest]
        if not found or kind != self.nvml.NVML_VALUE_TYPE_UNSIGNED_INT:
            return None
        self._newest = max(sample.timeStamp for sample in found)
        return float(sum(sample.sampleValue.uiVal for sample in found)) / len(found) / 100

    def memory(self) -> int | None:
        try:
            return int(self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used)
        except self.nvml.NVMLError:
            return None


def gpus_of(ids: Sequence[str]) -> list[Gpu]:
    """Find GPUs in NVML by their ids; none without an NVIDIA driver."""
    if not ids:
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
        return [Gpu(pynvml, pynvml.nvmlDeviceGetHandleByUUID(name)) for name in ids]
    except pynvml.NVMLError:  # no such library, or one that is too old
        return []
