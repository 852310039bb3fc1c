"""Reads what a node runs on, and how busy that is, once a round.

How busy a GPU was is asked of NVIDIA's management library (NVML), which the driver brings along and which keeps the samples
of the last seconds; without it, and on a CPU, it is the processor alone.
"""

import ctypes
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from rl_swarm import __version__

GIB = 1 << 30


def hardware(devices: Sequence[torch.device]) -> dict[str, str]:
    """The machine in words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {
        "processor": _processor(),
        "cores": str(os.cpu_count() or 1),
        "memory": f"{memory / GIB:.1f} GiB",
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

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        self._at, self._busy = time.monotonic(), time.process_time()
        self._gpus = gpus_of(devices)

    def read(self) -> dict[str, float]:
        at, busy = time.monotonic(), time.process_time()
        found = {"processor": round((busy - self._busy) / max(at - self._at, 1e-9), 3)}  # cores
        self._at, self._busy = at, busy
        if (memory := _resident()) is not None:
            found["memory"] = memory
        shares = [share for gpu in self._gpus if (share := gpu.share()) is not None]
        used = [used for gpu in self._gpus if (used := gpu.memory()) is not None]
        if shares:
            found["gpu"] = round(sum(shares) / len(shares), 3)
        if used:
            found["gpu_memory"] = sum(used)
        return found


def _resident() -> int | None:
    """Bytes of memory that this process uses now."""
    if sys.platform != "linux":
        return None
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Sample(ctypes.Structure):
    _fields_ = (("time", ctypes.c_ulonglong), ("value", ctypes.c_ulonglong))


class Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Gpu:
    UTILIZATION, WHOLE_NUMBER = 1, 1  # a kind of sample, and a kind of value, as NVML counts them

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self.library, self.handle = library, handle
        self._seen = 0  # the time of the newest sample that was read

    def share(self) -> float | None:
        """Of the time since it was read last, or of the last seconds of it, in which a kernel ran."""
        kind, count = ctypes.c_uint(), ctypes.c_uint()
        since = ctypes.c_ulonglong(self._seen)
        ask = self.library.nvmlDeviceGetSamples
        if ask(self.handle, self.UTILIZATION, since, ctypes.byref(kind), ctypes.byref(count), None):
            return None
        samples = (Sample * count.value)()
        if ask(self.handle, self.UTILIZATION, since, ctypes.byref(kind), ctypes.byref(count), samples):
            return None
        found = [sample for sample in samples[: count.value] if sample.time > self._seen]
        if not found or kind.value != self.WHOLE_NUMBER:
            return None
        self._seen = max(sample.time for sample in found)
        return float(sum(sample.value & 0xFFFFFFFF for sample in found)) / len(found) / 100

    def memory(self) -> int | None:
        told = Memory()
        failed = self.library.nvmlDeviceGetMemoryInfo(self.handle, ctypes.byref(told))
        return None if failed else int(told.used)


def gpus_of(devices: Sequence[torch.device]) -> list[Gpu]:
    """The GPUs that NVML knows: none where there is no NVIDIA driver."""
    cuda = [device for device in devices if device.type == "cuda"]
    if not cuda:
        return []
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2():
            return []
        found = []
        for device in cuda:
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            handle = ctypes.c_void_p()
            if not library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
                found.append(Gpu(library, handle))
        return found
    except (OSError, AttributeError):  # no such library, or one that is too old
        return []
