"""Holds what the speed benchmarks share: options, a clock that waits for the device, peak memory, the table."""

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
MEBIBYTE = 1 << 20


def options(description: str) -> argparse.ArgumentParser:
    """The options that all of them take. The defaults are one round of eight questions."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny, smollm2-135m or a directory (default: tiny)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="of torch on the CPU")
    parser.add_argument("--questions", type=positive, default=8)
    parser.add_argument("--completions", type=positive, default=8, help="of every question")
    parser.add_argument("--tokens", type=positive, default=256, help="most tokens of a completion")
    parser.add_argument("--prompt", type=positive, default=128, help="tokens of a prompt")
    parser.add_argument("--repeats", type=positive, default=3, help="measured runs after the one that warms up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the figures there; - prints them and no table")
    return parser


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def choose_device(name: str) -> torch.device:
    """The device to measure on. With `cpu` no library gets to see a GPU: some take one without asking."""
    if name == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif name == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda, but torch sees no CUDA GPU here. Use --device cpu.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def draw_prompts(tokenizer: Any, questions: int, length: int, seed: int) -> list[list[int]]:
    """Prompts of random tokens, no control tokens among them: what they say does not change what they cost."""
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
    cpu_seconds: float  # of all threads; unlike the others it stays true on a machine that has other work
    peak: int  # bytes


class Gauge:
    """Seconds and peak memory of a piece of work.

    On CUDA the most that torch held, memory that recorded graphs keep included. On the CPU the peak of this process's
    resident memory, less what it
    was without the model: make the gauge when the weights are loaded and nothing has run yet.
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
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
        self._wait()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved()
        return max(0, resident("VmHWM") - self.libraries)


def resident(field: str) -> int:
    """A memory figure of this process in bytes; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def machine(device: torch.device, threads: int) -> dict[str, Any]:
    import transformers

    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": device.type,
        "name": name,
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for cells in [header, ["---"] * len(header), *rows]:
        print(f"| {' | '.join(cells)} |")


def write_json(where: str | None, figures: dict[str, Any]) -> None:
    if where is None:
        return
    text = json.dumps(figures, indent=2)
    if where == "-":
        print(text)
    else:
        Path(where).write_text(text + "\n")
