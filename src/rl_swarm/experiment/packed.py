"""Keeps an experiment as one file: what a report reads of its finished runs, as lines of JSON, compressed with xz.

The first line holds the machine and the learning rates that were chosen. Every further line is a node of a run, with its
rounds column by column, which compresses best. Anybody may have written such a file: its size is bounded before and after
decompression, and each line is read as a message of a peer is.
"""

import io
import lzma
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import msgspec
from msgspec.structs import astuple

from rl_swarm.errors import UserError
from rl_swarm.experiment.arms import Job
from rl_swarm.experiment.measures import HeldOutLine, NodeLog, RoundLine, Run, Tuned
from rl_swarm.protocol.wire import Rejected, decode, typed
from rl_swarm.storage.files import LocalFiles

MAX_PACKED, MAX_UNPACKED, MAX_MEMORY = 64 << 20, 256 << 20, 256 << 20  # bytes


class Head(msgspec.Struct, frozen=True):
    """Holds what is said of an experiment beside its runs."""

    machine: dict[str, str]
    rates: dict[str, Tuned]  # by label


class NodeLine(msgspec.Struct, frozen=True):
    """Holds the log of a node. From `round` on, these are the fields of `RoundLine`, with a value per round."""

    job: Job
    held_out: list[HeldOutLine]
    round: list[int]
    reward_local: list[float]
    reward_training: list[float]
    local_groups: list[int]
    local_with_signal: list[int]
    external_taken: list[int]
    generated_tokens: list[int]
    trained_tokens: list[int]
    seconds: list[float]  # of all phases together

    @classmethod
    def of(cls, job: Job, log: NodeLog) -> "NodeLine":
        """Takes the columns from a log, with fewer digits."""
        *numbers, seconds = zip(*map(astuple, log.rounds), strict=True)
        short = [[round(number, 5) for number in column] for column in numbers]
        return cls(job, log.held_out, *short, [round(sum(phases.values()), 3) for phases in seconds])

    def log(self) -> NodeLog:
        _, _, *columns = astuple(self)
        rounds = [RoundLine(*numbers, {"all": seconds}) for *numbers, seconds in zip(*columns, strict=True)]
        return NodeLog(rounds, self.held_out)


def write(path: Path, head: Head, runs: Sequence[Run]) -> None:
    """Writes such a file, unless nobody could read it."""
    lines = [head, *(NodeLine.of(run.job, log) for run in runs for log in run.nodes)]
    data = lzma.compress(msgspec.json.Encoder().encode_lines(lines))
    list(_unpacked(path, data)[1])
    LocalFiles(path.parent).write(path.name, data)


def read(path: Path) -> tuple[Head, Iterator[Run]]:
    """Reads such a file. Its runs are decoded one by one, as they are asked for."""
    with _named(path):
        data = LocalFiles(path.parent).read(path.name, MAX_PACKED)
    return _unpacked(path, data)


def _unpacked(path: Path, data: bytes) -> tuple[Head, Iterator[Run]]:
    with _named(path):
        decompressor = lzma.LZMADecompressor(memlimit=MAX_MEMORY)
        lines = io.BytesIO(decompressor.decompress(data, MAX_UNPACKED))
        if len(data) > MAX_PACKED or not decompressor.eof or decompressor.unused_data:
            raise ValueError("it is cut off, or too large")
        return typed(decode(lines.readline()), Head), _runs(path, lines)


def _runs(path: Path, lines: Iterable[bytes]) -> Iterator[Run]:
    with _named(path):
        nodes = (typed(decode(line), NodeLine) for line in lines)
        for job, of_run in groupby(nodes, lambda node: node.job):
            logs = [node.log() for node in of_run]
            run = Run.of(job, logs)
            if run is None or not run.is_whole or len(logs) != job.count:
                raise ValueError(f"{job.name} is not whole")
            yield run


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Names the file in whatever is wrong with it."""
    try:
        yield
    except (OSError, ValueError, lzma.LZMAError, Rejected) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
