"""Seats at a GPU that several nodes share: only a few train at the same time, the others wait.

A seat is a locked file, so a node that dies gives it up. Between turns a node keeps no gradients and no
activations on the GPU.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SEATS = 3


@contextmanager
def seat(gpu: str, seats: int = SEATS) -> Iterator[int]:
    """Waits for one of the seats at this GPU."""
    folder = Path(tempfile.gettempdir()) / f"rl-swarm-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    files = [
        os.open(folder / f"{gpu}-{number}.lock", os.O_CREAT | os.O_RDWR, 0o600) for number in range(seats)
    ]
    try:
        yield _take(files)
    finally:
        for file in files:
            os.close(file)


def _take(files: list[int]) -> int:
    while True:
        for number, file in enumerate(files):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return number
            except BlockingIOError:
                continue
        time.sleep(0.002)
