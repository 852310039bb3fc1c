"""Measures seconds and peak memory of a piece of work on the chosen device."""

import argparse
import os
import platform
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def prepare(args: argparse.Namespace) -> torch.device:
    """Return the device to measure on, and set torch's threads.

    With `--device cpu` no library sees a GPU: some take one without asking.
    """
    args.threads = args.threads or torch.get_num_threads()
    torch.set_num_threads(args.threads)
    name = args.device
    if name == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif name == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda, but torch sees no CUDA GPU here. Use --device cpu.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def draw_prompts(tokenizer: Any, questions: int, length: int, seed: int) -> list[list[int]]:
    """Draw prompts of random tokens without control tokens: the text of a prompt does not change its cost."""
    special = set(tokenizer.all_special_ids)
    usable = [token for token in range(len(tokenizer)) if token not in special]
    return [random.Random(f"{seed} {number}").choices(usable, k=length) for number in range(questions)]


def check_length(config: Any, length: int) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise SystemExit(f"--prompt and --tokens add up to {length}, but this model has {limit} positions. Use less.")


@dataclass(frozen=True)
class Cost:
    seconds: float
    cpu_seconds: float  # of all threads; other work on the machine does not change it
    peak: int  # bytes


class Gauge:
    """Measures seconds and peak memory of a piece of work.

    On CUDA the peak is that of torch's allocator, with the memory that recorded graphs keep. On the CPU it is that of
    the process's resident memory, less what the libraries take: make the gauge when the weights are loaded and nothing
    has run yet.
    """

    def __init__(self, device: torch.device, model: torch.nn.Module) -> None:
        self.device = device
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        self.libraries = 0 if device.type == "cuda" else resident("VmRSS") - weights

    def measure(self, work: Callable[[], T]) -> tuple[T, "Cost"]:
        self._start()
        started, cpu = time.perf_counter(), time.process_time()
        result = work()
        self._wait()
        return result, Cost(time.perf_counter() - started, time.process_time() - cpu, self._peak())

    def _start(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        elif Path("/proc/self/clear_refs").exists():
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        self._wait()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved()
        return max(0, resident("VmHWM") - self.libraries)


def resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes; 0 where there is none."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def machine(device: str, threads: int) -> dict[str, Any]:
    import transformers

    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {
        "device": device,
        "name": name,
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
