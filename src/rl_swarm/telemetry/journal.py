"""What a node writes about itself: `metrics.jsonl` and `training_events.jsonl`, one JSON object per line."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rl_swarm.network.files import open_plain
from rl_swarm.wire import Rejected, decode

if TYPE_CHECKING:
    from rl_swarm.telemetry.sinks import Feed

MAX_READ = 64 << 20  # bytes of a log at a time


class Journal:
    def __init__(self, folder: Path, feeds: "Sequence[Feed]" = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.feeds = feeds  # who else gets the metrics
        self.metrics_path = folder / "metrics.jsonl"
        self.events_path = folder / "training_events.jsonl"

    def metrics(self, kind: str, **values: object) -> None:
        self._append(self.metrics_path, {"kind": kind, "timestamp": time.time(), **values})
        for feed in self.feeds:
            feed.put(kind, values)

    def event(self, event: str, **values: object) -> None:
        self._append(self.events_path, {"event": event, "timestamp": time.time(), **values})

    def _append(self, path: Path, record: dict[str, object]) -> None:
        with path.open("ab") as file:
            if file.tell() and _last_byte(path) != b"\n":  # the line before was cut off by a crash
                file.write(b"\n")
            file.write(msgspec.json.encode(record) + b"\n")


class Stopwatch:
    """Seconds per phase of a round, and when each began and ended, in seconds since the round began."""

    def __init__(self) -> None:
        self.began, self.zero = time.time(), time.perf_counter()
        self.phases: list[tuple[str, float, float]] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, started, time.perf_counter())

    def add(self, phase: str, started: float, ended: float, share: float = 1.0) -> None:
        """Time that has passed, of which this much was spent on the round."""
        self.seconds[phase] += share * (ended - started)
        self.phases.append((phase, round(started - self.zero, 4), round(ended - self.zero, 4)))

    def rounded(self) -> dict[str, float]:
        return {phase: round(seconds, 4) for phase, seconds in self.seconds.items()}


def read_lines(path: Path, after: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The records past byte `after`, and where the next read goes on. Lines that cannot be read are left out: in a
    shared folder anybody may have written them."""
    lines, after = new_lines(path, after)
    records = []
    for line in lines:
        with suppress(Rejected):
            records.append(decode(line))
    return records, after


def new_lines(path: Path, after: int = 0) -> tuple[list[bytes], int]:
    """The lines past byte `after` as they were written, and where the next read goes on. A half-written last one waits."""
    try:
        if (
            path.stat().st_size <= after
        ):  # most logs have nothing new, and opening them takes ten times as long
            return [], after
        with open_plain(path, "rb") as file:
            file.seek(after)
            data = file.read(MAX_READ)
    except OSError:
        return [], after
    whole, newline, _ = data.rpartition(b"\n")
    return whole.splitlines(), after + len(whole) + len(newline)


def ends_amid(path: Path, after: int) -> bool:
    """Tells whether something follows the last whole line, which ends at byte `after`."""
    try:
        return path.stat().st_size > after
    except OSError:
        return False


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1)
