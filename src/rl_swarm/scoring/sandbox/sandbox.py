"""Runs code that nobody can trust and judges what it gave: programs in, verdicts out.

A program runs in a process that reaches nothing (see `fork_server`). That process is told the calls of the tests, but
never
what they should give: it writes down what each call gave, and the comparison happens here. So code that patches its
surroundings, exits early or speaks for itself gains nothing by it: it would have to know the right values.

Which isolation there is depends on the system. `Sandbox` takes the best one that is seen to hold, and raises where
there is none.
"""

import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rl_swarm.errors import UserError
from rl_swarm.scoring.sandbox.fork_server import NO_MEMORY, STATUS
from rl_swarm.scoring.sandbox.literals import Value, read, same

log = logging.getLogger(__name__)

CPU_SECONDS = 1.0  # for a program with all its tests
WALL_TIMES, WALL_SECONDS = (
    10,
    10.0,
)  # by the clock a program has so many times its processor time, and so much more
ANSWER_SECONDS = 60.0  # that a keeper may take beyond that to say so
START_SECONDS = 60.0
OVERTIME_SECONDS = 5.0  # that a call of `judge` may take beyond its `seconds`
MAX_TESTS = 100
MAX_REQUEST = 96 << 10  # bytes of code and calls; they have to fit into a socket's buffer
MAX_SHOWN = 200
NOT_JUDGED = "not judged: time was up before its turn"
MAX_TRIES = 3  # of a program whose keeper ends, and of a keeper that does not start

# Best first: what each is made of.
ISOLATIONS = {
    "namespaces": "namespaces, seccomp, Landlock where the kernel has it, and limits",
    "seccomp": "seccomp, Landlock and limits",
    "monty": "the interpreter pydantic-monty, which runs a part of Python that reaches nothing",
}
ADVICE = (
    "Code of models and strangers is not run here, because no isolation is available ({why}). "
    "Use Linux on x86-64 or arm64 (Landlock needs 5.13 or newer, and in a container a seccomp profile that allows it), "
    "or install the interpreter that is safe by itself: pip install 'rl-swarm[monty]'"
)


@dataclass(frozen=True)
class Test:
    call: str  # an expression over what the code defines: "add(2, 3)"
    expected: str  # a literal: "5"; it never gets near the code

    __test__ = False  # for pytest, which takes the name for one of its own


@dataclass(frozen=True)
class Program:
    code: str
    tests: tuple[Test, ...]


@dataclass(frozen=True)
class ProgramVerdict:
    passed: tuple[bool, ...]
    error: str = ""  # what a person reads: the first thing that went wrong
    judged: bool = True  # not when time was up before its turn, which says nothing about the program

    @property
    def right(self) -> bool:
        return bool(self.passed) and all(self.passed)


@dataclass(frozen=True)
class Offer:
    """An isolation, and why it is not available if it is not."""

    isolation: str
    problem: str = ""


class KeeperBroke(Exception):
    """A keeper does not start, does not keep what it should, or is gone."""


class TooLate(Exception):
    """A keeper has not answered in time."""


def available() -> list[Offer]:
    """What this machine offers, best first. Each one is started, and tries what it should be kept from."""
    return [_offer(isolation) for isolation in ISOLATIONS]


def wall_limit(cpu_seconds: float) -> float:
    """How long a program may take by the clock. Nothing waits in there, so only a very busy machine takes long."""
    return WALL_TIMES * cpu_seconds + WALL_SECONDS


def _offer(isolation: str) -> Offer:
    try:
        Keeper(isolation, CPU_SECONDS, wall_limit(CPU_SECONDS)).stop()
    except KeeperBroke as error:
        return Offer(isolation, str(error))
    return Offer(isolation)


class Sandbox:
    """A keeper for each of a few programs at a time."""

    def __init__(
        self,
        isolation: str | None = None,
        cpu_seconds: float = CPU_SECONDS,
        workers: int | None = None,
        wall_seconds: float | None = None,
    ) -> None:
        if isolation is not None and isolation not in ISOLATIONS:
            raise UserError(f"There is no isolation {isolation!r}: choose from {', '.join(ISOLATIONS)}")
        self.cpu_seconds = cpu_seconds
        self.wall_seconds = wall_limit(cpu_seconds) if wall_seconds is None else wall_seconds
        self.workers = workers or _cores()
        self.restarts = 0  # times that a keeper was lost
        self._idle: deque[Keeper] = deque()
        self._threads = ThreadPoolExecutor(self.workers, "sandbox")
        problems = []
        for name in [isolation] if isolation else ISOLATIONS:
            try:
                self._idle.append(Keeper(name, cpu_seconds, self.wall_seconds))
            except KeeperBroke as error:
                problems.append(f"{name}: {error}")
            else:
                self.isolation = name
                log.info("code runs behind %s", ISOLATIONS[name])
                return
        raise UserError(ADVICE.format(why="; ".join(problems)))

    def judge(self, programs: Sequence[Program], seconds: float | None = None) -> list[ProgramVerdict]:
        """A verdict for every program. With `seconds`, those whose turn does not come in time are not `judged`."""
        latest = math.inf if seconds is None else time.monotonic() + seconds
        waiting = deque(enumerate(programs))
        verdicts: dict[int, ProgramVerdict] = {}

        def work() -> None:
            while True:
                try:
                    number, program = waiting.popleft()
                except IndexError:
                    return
                verdicts[number] = self._judge(program, latest)

        workers = [self._threads.submit(work) for _ in range(min(self.workers, len(programs)))]
        try:
            for worker in workers:
                worker.result()
        finally:
            waiting.clear()  # after an error or an interrupt
        return [verdicts[number] for number in range(len(programs))]

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        while self._idle:
            self._idle.pop().stop()

    def _judge(self, program: Program, latest: float) -> ProgramVerdict:
        try:
            expected = check(program)
        except ValueError as error:
            return failed(program, str(error))
        for _ in range(MAX_TRIES):
            if time.monotonic() > latest:
                return failed(program, NOT_JUDGED, judged=False)
            keeper = self._keeper()
            until = min(time.monotonic() + self.wall_seconds + ANSWER_SECONDS, latest + OVERTIME_SECONDS)
            try:
                lines, ending = keeper.run(program, until)
            except TooLate:
                self._lose(keeper, "it took too long")
                if time.monotonic() < latest:
                    return failed(program, too_slow(self.wall_seconds))
            except KeeperBroke as error:  # which need not be this program's fault
                self._lose(keeper, str(error))
            else:
                self._idle.append(keeper)
                return compare(program, expected, lines, ending)
        return failed(program, "it breaks the process that runs it")

    def _lose(self, keeper: "Keeper", why: str) -> None:
        keeper.stop()
        self.restarts += 1
        log.info("a process that runs code was lost: %s", why)

    def _keeper(self) -> "Keeper":
        """One that lives: what ended before costs no program one of its tries."""
        with suppress(IndexError):
            while (keeper := self._idle.pop()).process.poll() is not None:
                self._lose(keeper, "it had ended")
            return keeper
        problem = ""
        for _ in range(MAX_TRIES):
            try:
                return Keeper(self.isolation, self.cpu_seconds, self.wall_seconds)
            except KeeperBroke as error:
                problem = str(error)
        raise UserError(f"The sandbox ({self.isolation}) does not start any more: {problem}")


class Keeper:
    """The judge's side of a process that runs programs, one after the other."""

    def __init__(self, isolation: str, cpu_seconds: float, wall_seconds: float) -> None:
        self.cpu_seconds, self.wall_seconds = cpu_seconds, wall_seconds
        self.control, theirs = socket.socketpair()
        command, environment = start(isolation)
        with theirs:
            self.process = subprocess.Popen(
                [*command, isolation, str(cpu_seconds), str(wall_seconds)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                env=environment,
            )
        try:
            self._check_in()
        except BaseException:
            self.stop()
            raise

    def run(self, program: Program, until: float) -> tuple[list[str], str]:
        """What the program said, line by line, and how it ended. It has a socket of its own, read when it has ended."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                theirs.setblocking(False)  # nothing that code does with it can wait
                ours.setblocking(False)
                request = "\0".join([program.code, *(test.call for test in program.tests)])
                try:
                    ours.sendall(request.encode(errors="surrogatepass"))
                    ours.shutdown(socket.SHUT_WR)
                    socket.send_fds(self.control, [b"!"], [theirs.fileno()])
                except OSError as error:
                    raise KeeperBroke(f"it takes no program: {error}") from error
            ending = Ending.told(self._hear(STATUS.size, until))
            output = b""
            with suppress(BlockingIOError, ConnectionResetError):  # a child that was killed before it had read all
                while part := ours.recv(1 << 18):
                    output += part
        return output.decode(errors="replace").split("\n")[:-1], ending.reason(self.cpu_seconds, self.wall_seconds)

    def stop(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.control.close()

    def _check_in(self) -> None:
        try:
            said = json.loads(self._hear(None, time.monotonic() + START_SECONDS))
        except TooLate as error:
            raise KeeperBroke(str(error)) from None
        if "error" in said:
            raise KeeperBroke(said["error"])
        if free := [name for name, holds in said["kept_from"].items() if not holds]:
            raise KeeperBroke(f"it is not kept from {', '.join(free)}")

    def _hear(self, size: int | None, until: float) -> bytes:
        """So many bytes, or a line."""
        heard = b""
        while len(heard) < size if size else not heard.endswith(b"\n"):
            self.control.settimeout(max(until - time.monotonic(), 0.001))
            try:
                part = self.control.recv(size or 4096)
            except TimeoutError:
                raise TooLate("it does not answer") from None
            except ConnectionError:
                part = b""
            if not part:
                raise KeeperBroke("it has ended")
            heard += part
        return heard


@dataclass(frozen=True)
class Ending:
    """How the process of a program ended."""

    status: int
    out_of_time: bool
    cpu_seconds: float

    @classmethod
    def told(cls, message: bytes) -> "Ending":
        status, out_of_time, user, user_micro, system, system_micro = STATUS.unpack(message)
        return cls(status, bool(out_of_time), user + system + (user_micro + system_micro) / 1e6)

    def reason(self, limit: float, wall_limit: float) -> str:
        if self.out_of_time:
            return too_slow(wall_limit)
        if os.WIFSIGNALED(self.status):
            number = os.WTERMSIG(self.status)
            if number in (signal.SIGPROF, signal.SIGXCPU) or (number == signal.SIGKILL and self.cpu_seconds > limit):
                return f"too slow: it takes more than {limit:g} s of processor time"
            return f"signal {number} ended it"
        return "too much memory" if os.WEXITSTATUS(self.status) == NO_MEMORY else "it ended early"


def check(program: Program) -> list[Value]:
    """What its tests expect. A ValueError says why a program cannot be judged, whatever it does."""
    texts = [program.code, *(test.call for test in program.tests)]
    if not 1 <= len(program.tests) <= MAX_TESTS:
        raise ValueError(f"it has {len(program.tests)} tests, and 1 to {MAX_TESTS} are possible")
    if sum(len(text.encode(errors="surrogatepass")) + 1 for text in texts) > MAX_REQUEST:
        raise ValueError(f"it has more than {MAX_REQUEST} bytes")
    if any("\0" in text for text in texts):
        raise ValueError("it contains a null character")
    expected = []
    for test in program.tests:
        try:
            expected.append(read(test.expected))
        except ValueError as error:
            why = f"a test expects {shown(test.expected)}, which is no literal: {shown(str(error))}"
            raise ValueError(why) from None
    return expected


def compare(program: Program, expected: Sequence[Value], lines: Sequence[str], ending: str) -> ProgramVerdict:
    """The verdict, from what a program said and how it ended."""
    if not lines or lines[0] != "=":
        return failed(program, shown(lines[0][1:]) if lines else ending)
    passed, error = [], ""
    for number, (test, value) in enumerate(zip(program.tests, expected, strict=True), 1):
        problem = _wrong(test.call, value, lines[number]) if number < len(lines) else ending
        passed.append(not problem)
        error = error or problem
    return ProgramVerdict(tuple(passed), error)


def _wrong(call: str, expected: Value, line: str) -> str:
    """What is wrong with what a call gave; nothing if it gave what was expected."""
    if not line.startswith("="):
        return f"{shown(call)}: {shown(line[1:])}"
    try:
        return "" if same(read(line[1:]), expected) else f"{shown(call)} gave {shown(line[1:])}"
    except ValueError as error:
        return f"{shown(call)} gave no value: {shown(str(error))}"


def too_slow(wall_limit: float) -> str:
    return f"too slow: it takes more than {wall_limit:g} s by the clock"


def failed(program: Program, error: str, judged: bool = True) -> ProgramVerdict:
    return ProgramVerdict((False,) * len(program.tests), error, judged)


def shown(text: str) -> str:
    """A stranger's text, fit for a terminal and a log."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:MAX_SHOWN])


def start(isolation: str) -> tuple[list[str], dict[str, str]]:
    """The command of a keeper and its environment, which has nothing of the node's. Sets have the same order
    everywhere."""
    module, options, path = "fork_server", ["-s", "-S"], [str(Path(__file__).parents[3])]
    if isolation == "monty":
        module, options, path = "monty", [], list(filter(None, sys.path))
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "MONTY_BIN") if name in os.environ}
    environment = {**kept, "PYTHONPATH": os.pathsep.join(path), "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
    return [sys.executable, *options, "-m", f"rl_swarm.scoring.sandbox.{module}"], environment


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
