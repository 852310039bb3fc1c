"""Writes a node's logs: `metrics.jsonl` and `training_events.jsonl`, one JSON object per line."""

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from rl_swarm.protocol.untrusted import json_line
from rl_swarm.protocol.wire import Rejected, decode
from rl_swarm.storage.files import Files, LocalFiles
from rl_swarm.storage.shared_log import MAX_LOG, SharedLog
from rl_swarm.telemetry.schema import HeldOutRecord, RoundRecord, line_of
from rl_swarm.telemetry.sinks import SinkThread

MAX_READ = 64 << 20  # bytes of a log at a time
LONGEST_LINE = 4 << 20  # bytes
SHORTEST_MEAN = 48  # bytes of a line on average; a file with shorter ones is no log
MAX_UNREADABLE = 1000  # lines at a time; the rest is then left out
METRICS, EVENTS = LOGS = "metrics.jsonl", "training_events.jsonl"
Digests = dict[str, tuple[int, str]]  # logs by name: size and SHA-256


class Journal:
    """Writes the logs of a node to a private folder, with copies in `folder` of the swarm's files."""

    def __init__(
        self, private: Path, sinks: Sequence[SinkThread] = (), files: Files | None = None, folder: str = ""
    ) -> None:
        self.sinks = sinks  # exporters
        self.files, self.folder = files, folder
        self.logs = {name: SharedLog(private / name, files, f"{folder}/{name}") for name in LOGS}

    def metrics(self, record: RoundRecord | HeldOutRecord, **timing: object) -> None:
        """Write a record; `timing` goes to traces alone."""
        values = {**line_of(record), **timing}
        kind = str(values.pop("kind"))
        self._append(METRICS, {"kind": kind, "timestamp": time.time(), **values})
        for feed in self.sinks:
            feed.put(kind, values)

    def event(self, event: str, **values: object) -> None:
        self._append(EVENTS, {"event": event, "timestamp": time.time(), **values})

    def read(self, name: str) -> list[dict[str, Any]]:
        """Return the records of one of the logs."""
        return [decode(line) for line in self.logs[name].read().splitlines()]

    def digests(self) -> Digests:
        """Return size and SHA-256 of every log, to be signed with a checkpoint."""
        return {name: (log.size, log.sha256.hexdigest()) for name, log in self.logs.items()}

    def restore(self, signed: Mapping[str, tuple[int, str]]) -> None:
        """Restore the logs that this node has copied to the folder, as far as its signature reaches.

        This is for a machine that has only the folder left. Lines of this process follow the restored ones.
        """
        for name, log in self.logs.items():
            size, sha256 = signed.get(name, (0, ""))
            if not isinstance(self.files, LocalFiles) or not 0 < size <= MAX_READ or log.size >= size:
                continue
            with suppress(OSError):  # the folder has lost it: the log begins anew
                data = self.files.read(f"{self.folder}/{name}", size)[:size]
                if hashlib.sha256(data).hexdigest() == sha256:
                    log.replace(data + log.read())

    def close(self) -> bool:
        """Update the copies; return whether they are complete."""
        return all([log.copy() for log in self.logs.values()])

    def _append(self, name: str, record: dict[str, object]) -> None:
        self.logs[name].append(json_line(msgspec.json.encode(record)) + b"\n")


class Stopwatch:
    """Measures the seconds of every phase of a round, with begin and end since the round began.

    `begin` is told of every phase that begins.
    """

    def __init__(self, begin: Callable[[str], None] | None = None) -> None:
        self.begin = begin
        self.began, self.zero = time.time(), time.perf_counter()
        self.phases: list[tuple[str, float, float]] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if self.begin is not None:
            self.begin(phase)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, started, time.perf_counter())

    def add(self, phase: str, started: float, ended: float, share: float = 1.0) -> None:
        """Add time that has passed, of which the round took this share."""
        self.seconds[phase] += share * (ended - started)
        self.phases.append((phase, round(started - self.zero, 4), round(ended - self.zero, 4)))

    def rounded(self) -> dict[str, float]:
        return {phase: round(seconds, 4) for phase, seconds in self.seconds.items()}


def read_lines(files: LocalFiles, path: str, after: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Read the records past byte `after`; return them and where the next read begins.

    Lines that cannot be read are left out: in a shared folder any member may have written them.
    """
    lines, after = new_lines(files, path, after)
    records, unreadable = [], 0
    for line in lines:
        try:
            records.append(decode(line))
        except Rejected:
            unreadable += 1
            if unreadable > MAX_UNREADABLE:
                break
    return records, after


def new_lines(files: LocalFiles, path: str, after: int = 0) -> tuple[list[bytes], int]:
    """Read the lines past byte `after` as they were written; return them and where the next read begins.

    A half-written last line waits.
    """
    try:
        size = files.stat(path).st_size
        if size <= after or size > MAX_LOG:  # most logs have nothing new, and a larger file is no log
            return [], after
        data = files.read(path, MAX_READ, after)[:MAX_READ]
    except OSError:
        return [], after
    whole, newline, _ = data.rpartition(b"\n")
    if not newline and len(data) > LONGEST_LINE:  # too long for a line: left out
        return [b""], after + len(data)
    count = whole.count(b"\n")
    if count > MAX_UNREADABLE and len(whole) < SHORTEST_MEAN * count:  # too short for lines: left out
        return [b""], after + len(whole) + len(newline)
    return whole.splitlines(), after + len(whole) + len(newline)


def ends_mid_line(files: LocalFiles, path: str, after: int) -> bool:
    """Return whether something follows the last whole line, which ends at byte `after`."""
    try:
        return files.stat(path).st_size > after
    except OSError:
        return False
