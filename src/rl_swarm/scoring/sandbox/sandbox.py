"""Runs untrusted programs and judges their results: programs in, verdicts out.

A program runs in an isolated process (see `fork_server`). That process gets the calls of the tests, but not the
expected values: it writes the result of each call, and the comparison happens here. So a program that patches its
surroundings, exits early or writes replies itself gains nothing: it would have to know the right values.

The available isolation depends on the system. `Sandbox` takes the best one that passes its own test, and raises if
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
WALL_FACTOR, WALL_SECONDS = 10, 10.0  # the wall-clock limit is factor times processor time, plus seconds
REPLY_SECONDS = 60.0  # that a process may take beyond that to reply
START_SECONDS = 60.0
OVERTIME_SECONDS = 5.0  # that a call of `judge` may take beyond its `seconds`
MAX_TESTS = 100
MAX_REQUEST = 96 << 10  # bytes of code and calls; they have to fit into a socket's buffer
MAX_SHOWN = 200
NOT_JUDGED = "not judged: time was up before its turn"
MAX_TRIES = 3  # to run a program whose process ends, and to start a process

# Best first, with a description.
ISOLATIONS = {
    "namespaces": "namespaces, seccomp, Landlock where the kernel has it, and limits",
    "seccomp": "seccomp, Landlock and limits",
    "monty": "the interpreter pydantic-monty, which runs a part of Python that reaches nothing",
}
ADVICE = (
    "Code of models and strangers is not run here, because no isolation is available ({reasons}). "
    "Use Linux on x86-64 or arm64 (Landlock needs 5.13 or newer, and in a container a seccomp profile that allows it), "
    "or install the interpreter that is safe by itself: pip install 'rl-swarm[monty]'"
)


@dataclass(frozen=True)
class Test:
    call: str  # an expression over what the code defines: "add(2, 3)"
    expected: str  # a literal: "5"; it never gets near the code

    __test__ = False  # for pytest, which collects classes of this name


@dataclass(frozen=True)
class Program:
    code: str
    tests: tuple[Test, ...]


@dataclass(frozen=True)
class ProgramVerdict:
    passed: tuple[bool, ...]
    error: str = ""  # the first error, for people to read
    judged: bool = True  # False if time was up before its turn, which says nothing about the program

    @property
    def right(self) -> bool:
        return bool(self.passed) and all(self.passed)


@dataclass(frozen=True)
class Availability:
    """Names an isolation, and the problem if it is not available."""

    isolation: str
    problem: str = ""


class SandboxProcessError(Exception):
    """Raised when a process does not start, is not isolated as it should be, or has ended."""


class SandboxTimeout(Exception):
    """Raised when a process has not replied in time."""


def available() -> list[Availability]:
    """Return what this machine offers, best first. Each isolation is started and tested."""
    return [_try_isolation(isolation) for isolation in ISOLATIONS]


def wall_limit(cpu_seconds: float) -> float:
    """Return the wall-clock limit of a program. Calls that wait return at once, so only a busy machine reaches it."""
    return WALL_FACTOR * cpu_seconds + WALL_SECONDS


def _try_isolation(isolation: str) -> Availability:
    try:
        SandboxProcess(isolation, CPU_SECONDS, wall_limit(CPU_SECONDS)).stop()
    except SandboxProcessError as error:
        return Availability(isolation, str(error))
    return Availability(isolation)


class Sandbox:
    """Judges programs in a few processes at a time."""

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
        self.restarts = 0  # of lost processes
        self._idle: deque[SandboxProcess] = deque()
        self._threads = ThreadPoolExecutor(self.workers, "sandbox")
        problems = []
        for name in [isolation] if isolation else ISOLATIONS:
            try:
                self._idle.append(SandboxProcess(name, cpu_seconds, self.wall_seconds))
            except SandboxProcessError as error:
                problems.append(f"{name}: {error}")
            else:
                self.isolation = name
                log.info("code runs behind %s", ISOLATIONS[name])
                return
        raise UserError(ADVICE.format(reasons="; ".join(problems)))

    def judge(self, programs: Sequence[Program], seconds: float | None = None) -> list[ProgramVerdict]:
        """Return a verdict for every program. With `seconds`, programs that do not start in time are not `judged`."""
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        waiting = deque(enumerate(programs))
        verdicts: dict[int, ProgramVerdict] = {}

        def work() -> None:
            while True:
                try:
                    number, program = waiting.popleft()
                except IndexError:
                    return
                verdicts[number] = self._judge(program, deadline)

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

    def _judge(self, program: Program, deadline: float) -> ProgramVerdict:
        try:
            expected = check(program)
        except ValueError as error:
            return failed(program, str(error))
        for _ in range(MAX_TRIES):
            if time.monotonic() > deadline:
                return failed(program, NOT_JUDGED, judged=False)
            process = self._process()
            reply_by = min(time.monotonic() + self.wall_seconds + REPLY_SECONDS, deadline + OVERTIME_SECONDS)
            try:
                lines, ending = process.run(program, reply_by)
            except SandboxTimeout:
                self._discard(process, "it took too long")
                if time.monotonic() < deadline:
                    return failed(program, too_slow(self.wall_seconds))
            except SandboxProcessError as error:  # not necessarily caused by this program
                self._discard(process, str(error))
            else:
                self._idle.append(process)
                return compare(program, expected, lines, ending)
        return failed(program, "it breaks the process that runs it")

    def _discard(self, process: "SandboxProcess", reason: str) -> None:
        process.stop()
        self.restarts += 1
        log.info("a process that runs code was lost: %s", reason)

    def _process(self) -> "SandboxProcess":
        """Return a running process; one that had ended before does not count as a try."""
        with suppress(IndexError):
            while (process := self._idle.pop()).process.poll() is not None:
                self._discard(process, "it had ended")
            return process
        problem = ""
        for _ in range(MAX_TRIES):
            try:
                return SandboxProcess(self.isolation, self.cpu_seconds, self.wall_seconds)
            except SandboxProcessError as error:
                problem = str(error)
        raise UserError(f"The sandbox ({self.isolation}) does not start any more: {problem}")


class SandboxProcess:
    """Controls a process that runs programs one after the other."""

    def __init__(self, isolation: str, cpu_seconds: float, wall_seconds: float) -> None:
        self.cpu_seconds, self.wall_seconds = cpu_seconds, wall_seconds
        self.control, child_end = socket.socketpair()
        command, environment = start(isolation)
        with child_end:
            self.process = subprocess.Popen(
                [*command, isolation, str(cpu_seconds), str(wall_seconds)],
                stdin=child_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                env=environment,
            )
        try:
            self._check_isolation()
        except BaseException:
            self.stop()
            raise

    def run(self, program: Program, deadline: float) -> tuple[list[str], str]:
        """Run a program; return the lines that it wrote and how it ended. Its socket is read after its end."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                theirs.setblocking(False)  # no use of it by the program can block
                ours.setblocking(False)
                request = "\0".join([program.code, *(test.call for test in program.tests)])
                try:
                    ours.sendall(request.encode(errors="surrogatepass"))
                    ours.shutdown(socket.SHUT_WR)
                    socket.send_fds(self.control, [b"!"], [theirs.fileno()])
                except OSError as error:
                    raise SandboxProcessError(f"it accepts no program: {error}") from error
            ending = ExitStatus.unpack(self._receive(STATUS.size, deadline))
            output = b""
            with suppress(BlockingIOError, ConnectionResetError):  # the child was killed before it had read the request
                while part := ours.recv(1 << 18):
                    output += part
        return output.decode(errors="replace").split("\n")[:-1], ending.reason(self.cpu_seconds, self.wall_seconds)

    def stop(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.control.close()

    def _check_isolation(self) -> None:
        try:
            report = json.loads(self._receive(None, time.monotonic() + START_SECONDS))
        except SandboxTimeout as error:
            raise SandboxProcessError(str(error)) from None
        if "error" in report:
            raise SandboxProcessError(report["error"])
        if free := [name for name, holds in report["denied"].items() if not holds]:
            raise SandboxProcessError(f"it is not kept from {', '.join(free)}")

    def _receive(self, size: int | None, deadline: float) -> bytes:
        """Receive `size` bytes, or a line."""
        received = b""
        while len(received) < size if size else not received.endswith(b"\n"):
            self.control.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                part = self.control.recv(size or 4096)
            except TimeoutError:
                raise SandboxTimeout("it does not answer") from None
            except ConnectionError:
                part = b""
            if not part:
                raise SandboxProcessError("it has ended")
            received += part
        return received


@dataclass(frozen=True)
class ExitStatus:
    """Records how the process of a program ended."""

    status: int
    out_of_time: bool
    cpu_seconds: float

    @classmethod
    def unpack(cls, message: bytes) -> "ExitStatus":
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
    """Return the expected values. A ValueError says why a program cannot be judged at all."""
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
            reason = f"a test expects {shown(test.expected)}, which is no literal: {shown(str(error))}"
            raise ValueError(reason) from None
    return expected


def compare(program: Program, expected: Sequence[Value], lines: Sequence[str], ending: str) -> ProgramVerdict:
    """Return the verdict on a program from its lines and its end."""
    if not lines or lines[0] != "=":
        return failed(program, shown(lines[0][1:]) if lines else ending)
    passed, error = [], ""
    for number, (test, value) in enumerate(zip(program.tests, expected, strict=True), 1):
        problem = _wrong(test.call, value, lines[number]) if number < len(lines) else ending
        passed.append(not problem)
        error = error or problem
    return ProgramVerdict(tuple(passed), error)


def _wrong(call: str, expected: Value, line: str) -> str:
    """Describe what is wrong with the result of a call; empty if it is as expected."""
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
    """Return untrusted text without control characters, for terminals and logs."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:MAX_SHOWN])


def start(isolation: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment of a process, without the node's variables. Hash seeds are fixed."""
    module, options, path = "fork_server", ["-s", "-S"], [str(Path(__file__).parents[3])]
    if isolation == "monty":
        module, options, path = "monty", [], list(filter(None, sys.path))
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "MONTY_BIN") if name in os.environ}
    environment = {**kept, "PYTHONPATH": os.pathsep.join(path), "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
    return [sys.executable, *options, "-m", f"rl_swarm.scoring.sandbox.{module}"], environment


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
