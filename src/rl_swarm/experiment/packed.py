"""Keeps an experiment as one file: what a report reads of its finished runs, as lines of JSON, compressed with xz.

The first line holds the machine and the learning rates that were chosen. Every further line is a node of a run, with
its rounds column by column, which compresses best. The author may be anyone: the file's size is bounded before and
after decompression, and each line is read as a message of a peer is.
"""

import io
import lzma
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import msgspec

from rl_swarm.errors import UserError
from rl_swarm.experiment.arms import Job
from rl_swarm.experiment.measures import NodeLog, Run, Score, Tuned
from rl_swarm.protocol.wire import Rejected, convert, decode
from rl_swarm.storage.files import LocalFiles
from rl_swarm.telemetry.schema import RoundRecord, Seconds

MAX_PACKED, MAX_UNPACKED, MAX_MEMORY = 64 << 20, 256 << 20, 256 << 20  # bytes


class Head(msgspec.Struct, frozen=True):
    """Holds what is known of an experiment beside its runs."""

    machine: dict[str, str]
    rates: dict[str, Tuned]  # by label


class NodeLine(msgspec.Struct, frozen=True):
    """Holds the log of a node. From `round` on, these are fields of `RoundRecord`, with a value per round."""

    job: Job
    held_out: list[Score]
    round: list[int]
    reward_local: list[float]
    reward_training: list[float]
    local_groups: list[int]
    local_with_signal: list[int]
    external_accepted: list[int]
    generated_tokens: list[int]
    trained_tokens: list[int]
    seconds: list[float]  # of all phases together

    @classmethod
    def of(cls, job: Job, log: NodeLog) -> "NodeLine":
        """Take the columns from a log, with fewer digits."""
        columns = {name: [round(getattr(line, name), 5) for line in log.rounds] for name in COLUMNS}
        seconds = [round(line.seconds.total, 3) for line in log.rounds]
        return cls(job, log.held_out, **columns, seconds=seconds)

    def log(self) -> NodeLog:
        columns = zip(*(getattr(self, name) for name in COLUMNS), self.seconds, strict=True)
        rounds = [
            RoundRecord(
                **dict(zip(COLUMNS, numbers, strict=True)), tokens_per_second=0.0, seconds=Seconds(other=seconds)
            )
            for *numbers, seconds in columns
        ]
        return NodeLog(rounds, self.held_out)


COLUMNS = NodeLine.__struct_fields__[2:-1]


def write(path: Path, head: Head, runs: Sequence[Run]) -> None:
    """Write such a file, unless it would be too large to read."""
    lines = [head, *(NodeLine.of(run.job, log) for run in runs for log in run.nodes)]
    data = lzma.compress(msgspec.json.Encoder().encode_lines(lines))
    list(_unpacked(path, data)[1])
    LocalFiles(path.parent).write(path.name, data)


def read(path: Path) -> tuple[Head, Iterator[Run]]:
    """Read such a file. Its runs are decoded one by one, on demand."""
    with _named(path):
        data = LocalFiles(path.parent).read(path.name, MAX_PACKED)
    return _unpacked(path, data)


def _unpacked(path: Path, data: bytes) -> tuple[Head, Iterator[Run]]:
    with _named(path):
        decompressor = lzma.LZMADecompressor(memlimit=MAX_MEMORY)
        lines = io.BytesIO(decompressor.decompress(data, MAX_UNPACKED))
        if len(data) > MAX_PACKED or not decompressor.eof or decompressor.unused_data:
            raise ValueError("it is truncated, or too large")
        return convert(decode(lines.readline()), Head), _runs(path, lines)


def _runs(path: Path, lines: Iterable[bytes]) -> Iterator[Run]:
    with _named(path):
        nodes = (convert(decode(line), NodeLine) for line in lines)
        for job, of_run in groupby(nodes, lambda node: node.job):
            logs = [node.log() for node in of_run]
            run = Run.of(job, logs)
            if run is None or not run.is_whole or len(logs) != job.count:
                raise ValueError(f"{job.name} is incomplete")
            yield run


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file in every error."""
    try:
        yield
    except (OSError, ValueError, lzma.LZMAError, Rejected) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
