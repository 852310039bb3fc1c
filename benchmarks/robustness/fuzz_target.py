"""Holds what the targets of `fuzz.py` share: cases that can be replayed, and the loop that plays them."""

import contextlib
import ctypes
import gc
import hashlib
import json
import random
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

MEBIBYTE = 1 << 20
MAX_FAILURES = 10  # of a target, after which it ends
MAX_REACHED = 4096  # labels that are counted
SAMPLES = 20  # readings of memory in a run
TELL_SECONDS = 5.0

Case = dict[str, Any]  # JSON with everything needed for a replay


class Harm(AssertionError):
    """An invariant did not hold."""


class Blocked(BaseException):
    """A case did not end in time. It is no `OSError`, so that handlers of file errors do not catch it."""


class Target:
    """Makes cases and plays them. `open` starts what it needs for that, and `close` ends it."""

    name: ClassVar[str]
    longest: ClassVar[float] = 120.0  # seconds of a case; then it is stuck
    growth: ClassVar[int] = 64 * MEBIBYTE  # of resident memory, from the first fifth of a run to its end

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def open(self) -> None: ...

    def close(self) -> None: ...

    def next(self) -> Case:
        return {"seed": self.rng.getrandbits(48)}

    def play(self, case: Case) -> Iterable[str]:
        """Play a case and return what it reached; raise when something is wrong."""
        raise NotImplementedError

    def resident(self) -> int:
        return resident()


@dataclass
class Result:
    target: str
    cases: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    memory: list[int] = field(default_factory=list)  # bytes, at equal distances
    reached: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def growth(self) -> int:
        """Return by how much memory grew since the first fifth of the run."""
        settled = self.memory[len(self.memory) // 5 :]
        return settled[-1] - settled[0] if settled else 0


def fuzz(
    target: Target,
    failures_to: Path,
    seconds: float = float("inf"),
    cases: float = float("inf"),
    is_over: Callable[[], bool] = lambda: False,
    tell: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Play cases of a target until the time is over, so many have been played, or ten have failed."""
    result, started, told = Result(target.name), time.perf_counter(), 0.0
    target.open()
    try:
        while result.cases < cases and len(result.failures) < MAX_FAILURES and not is_over():
            result.seconds = time.perf_counter() - started
            if result.seconds >= seconds:
                break
            done = max(result.cases / cases, result.seconds / seconds)
            if done * SAMPLES >= len(result.memory) and result.cases:
                gc.collect()
                result.memory.append(target.resident())
            if result.seconds >= told + TELL_SECONDS:
                told = result.seconds
                tell(result)
            case = target.next()
            begun = time.perf_counter()
            try:
                with at_most(target.longest):
                    reached = list(target.play(case))
            except (Exception, Blocked) as error:  # noqa: BLE001 - finding these is what this is for
                result.failures.append(written(target.name, case, error, failures_to))
                target.close()
                target.open()
                reached = ["failed"]
            result.slowest = max(result.slowest, time.perf_counter() - begun)
            result.cases += 1
            for label in reached:
                if label in result.reached or len(result.reached) < MAX_REACHED:
                    result.reached[label] += 1
        gc.collect()
        result.memory.append(target.resident())
    finally:
        target.close()
    result.seconds = time.perf_counter() - started
    if result.growth() > target.growth:
        result.failures.append(f"{target.name}: memory grew by {result.growth() / MEBIBYTE:.0f} MiB")
    tell(result)
    return result


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `Blocked` in work that takes longer, even in a system call that waits."""

    def late(number: int, frame: FrameType | None) -> None:
        raise Blocked(f"a case took more than {seconds:.0f} s")

    handler = signal.signal(signal.SIGALRM, late)
    before = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)


def written(target: str, case: Case, error: BaseException, failures_to: Path) -> str:
    """Keep a failed case, to be played again; return the line that reports it."""
    why = "".join(traceback.format_exception(error))
    name = hashlib.sha256(json.dumps(case).encode()).hexdigest()[:12]
    path = failures_to / f"fuzz-{target}-{name}.json"
    failures_to.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"target": target, "case": case, "why": why}, indent=1) + "\n")
    return f"{path}: {type(error).__name__}: {str(error)[:300]}"


def resident(pid: int | str = "self") -> int:
    """Return a process's resident bytes now; without /proc, the peak of this process."""
    if pid == "self":
        with contextlib.suppress(AttributeError, OSError):  # free memory goes back to the system, if the C library can
            ctypes.CDLL(None).malloc_trim(0)
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most * (1 if sys.platform == "darwin" else 1024)
