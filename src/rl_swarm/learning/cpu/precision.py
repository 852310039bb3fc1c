"""Chooses bfloat16 or float32 for the matrix products of a CPU by a measurement, once per machine.

Instructions for bfloat16 do not make small products faster on every processor. Results depend on the choice, so the
nodes of a run, and a run and its continuation, must choose alike: the first measurement on a machine is stored in the
user's cache, and later processes read it. Float32 is only chosen when it is faster by a margin above noise.
"""

import hashlib
import os
import platform
import tempfile
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F

ROWS = 32  # of a product: the sequences that a node of `up` samples at once
MARGIN = 2.0  # times as fast as bfloat16 must float32 be
TRIES = 40  # of which the fastest counts, so that other load on the machine does not matter
CHOICES = ("bfloat16", "float32")


@lru_cache(maxsize=64)
def chosen(width: int) -> str:
    """Return the choice for products of this width, `bfloat16` or `float32`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    key = f"{_processor()}|{torch.backends.cpu.get_cpu_capability()}|{torch.__version__}|{width}"
    file = cache / "rl-swarm" / "precision" / hashlib.sha256(key.encode()).hexdigest()[:16]
    if found := _remembered(file):
        return found
    choice = CHOICES[speed_up(width) * MARGIN < 1]
    with suppress(OSError):  # a cache that cannot be written: the margin alone keeps processes alike
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent) as aside:
            aside.write(choice)
            aside.flush()
            with suppress(FileExistsError):  # of several processes the first decides
                os.link(aside.name, file)
    return _remembered(file) or choice


def speed_up(width: int) -> float:
    """Measure how many times as fast as in float32 a product is in bfloat16, the fastest of several of each."""
    dtypes = (torch.bfloat16, torch.float32)
    inputs = [(torch.ones(ROWS, width, dtype=d), torch.ones(width, width, dtype=d)) for d in dtypes]
    best = [float("inf")] * len(dtypes)
    for _ in range(TRIES):
        for number, (left, right) in enumerate(inputs):  # alternating: other load slows both
            started = time.perf_counter()
            F.linear(left, right)
            best[number] = min(best[number], time.perf_counter() - started)
    return best[1] / best[0]


def _remembered(file: Path) -> str | None:
    with suppress(OSError, UnicodeDecodeError):
        found = file.read_text()
        return found if found in CHOICES else None
    return None


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line
    return platform.processor() or platform.machine()
