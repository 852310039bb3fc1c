"""Forks a child for every program and says how it ended. `sandbox` starts it, as
`python -m rl_swarm.scoring.sandbox.fork_server ISOLATION SECONDS WALL`.

It has Python's usual modules loaded and has moved where there is nothing to reach. For every program it forks a child,
which takes from itself what is left to take and only then reads the code from a socket that was made for this program.
The keeper itself never reads one: so its memory, which every child inherits, holds nothing of any task, not even how
the last one ended. A child has a scratch file system of its own. The keeper waits for it, ends it when its time is up,
and says how it ended.

What a child says is a line for every call: `=` and a literal, or `!` and what went wrong. The code may say the same by
itself; all it gains is to have given that value.
"""

import ctypes
import errno
import gc
import importlib
import json
import math
import os
import random
import resource
import signal
import socket
import struct
import sys
import sysconfig
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import NoReturn

from rl_swarm.scoring import lockdown
from rl_swarm.scoring.sandbox.literals import write
from rl_swarm.scoring.sandbox.namespaces import ScratchMount, drop_capabilities, move_in

MEMORY = 256 << 20  # of address space
SCRATCH, FILE_SIZE = "/scratch/tmp", 4 << 20
SCRATCH_OPTIONS = f"size={8 << 20},nr_inodes=64,mode=777"
LIMITS = {"RLIMIT_AS": MEMORY, "RLIMIT_FSIZE": FILE_SIZE, "RLIMIT_CORE": 0, "RLIMIT_NOFILE": 32}
MAX_OUTPUT = 128 << 10  # bytes of all replies; they have to fit into the socket's buffer
# Status as `wait` tells it, whether its time by the clock was up, and user and system time.
STATUS = struct.Struct("@ii4l")
GRACE_SECONDS = 1  # more by the clock, for one that stood still because the whole machine did
NO_MEMORY = 2  # the exit status of a child
WARM = (  # loaded before anybody forks
    "array", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "enum",
    "fractions", "functools", "hashlib", "heapq", "itertools", "json", "math", "operator", "random", "re",
    "statistics", "string", "textwrap", "time", "typing", "unicodedata",
)  # fmt: skip


def library() -> list[str]:
    """Where Python's own modules are."""
    stdlib = sysconfig.get_path("stdlib")
    shared = str(sysconfig.get_config_var("DESTSHARED"))
    return [stdlib] if shared.startswith(stdlib) or not os.path.isdir(shared) else [stdlib, shared]


def rights(scratch: bool) -> dict[str, int]:
    """Read Python's modules, but not the packages that some systems keep among them."""
    found = {}
    for folder in library():
        found[folder] = lockdown.LIST
        for entry in os.scandir(folder):
            if entry.name not in ("site-packages", "dist-packages") and not entry.is_symlink():
                found[entry.path] = lockdown.READ_FILE | (lockdown.LIST if entry.is_dir() else 0)
    if scratch:  # a right beneath the folder that it is mounted in: the rule has to hold for every new one
        found[os.path.dirname(SCRATCH)] = (
            lockdown.READ_FILE | lockdown.LIST | lockdown.MAKE_AND_REMOVE | lockdown.TRUNCATE
        )
    return found


def move(isolation: str) -> ScratchMount | None:
    """The part of the isolation that all programs share. Raises OSError where the kernel does not offer it."""
    scratch = None
    if isolation == "namespaces":
        scratch = move_in(library(), SCRATCH, SCRATCH_OPTIONS)
        try:
            lockdown.restrict_paths(rights(scratch=True))
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
                raise  # on a kernel without Landlock the mounts alone keep code in
    else:
        drop_capabilities()
        lockdown.restrict_paths(rights(scratch=False))
    lockdown.limit_resources(LIMITS)
    lockdown.no_new_privileges()
    lockdown.LIBC.prctl(4, 0, 0, 0, 0)  # no core dumps, which some systems hand to a program of root's
    return scratch


def lock(seconds: float, restrict_calls: Callable[[], None]) -> None:
    """The part that every child does for itself."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds) + 1))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    restrict_calls()


def run(channel: int) -> None:
    """One program and its calls. From here on the code may do what it likes with this process."""
    request = b""
    while part := os.read(channel, 1 << 14):
        request += part
    code, *calls = request.decode(errors="surrogatepass").split("\0")
    random.seed(0)
    module = ModuleType("solution")
    sys.modules["solution"] = module
    left = MAX_OUTPUT

    def reply(work: Callable[[], str]) -> bool:
        nonlocal left
        try:
            line = "=" + work()
        except MemoryError:
            line = "!too much memory"
        except BaseException as error:  # noqa: BLE001 code may raise anything
            line = "!" + complaint(error)
        data = line.encode(errors="backslashreplace") + b"\n"
        left -= len(data)
        if left < 0:
            data = b"!too much output\n"
        os.write(channel, data)
        return line[0] == "="

    def define() -> str:
        exec(compile(code, "solution", "exec"), module.__dict__)  # noqa: S102  # in the sandbox
        return ""

    if reply(define):
        for call in calls:
            reply(partial(value_of, call, module.__dict__))


def value_of(call: str, names: dict[str, object]) -> str:
    return write(eval(compile(call, "test", "eval"), names))  # noqa: S307  # in the sandbox


def complaint(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    except BaseException:  # noqa: BLE001 an exception of theirs may not even be printable
        text = "an exception that cannot be shown"
    return text[:200].replace("\n", " ")


def child(channel: int, lock: Callable[[], None], work: Callable[[int], None], folder: str) -> NoReturn:
    status = 1
    try:
        os.chdir(folder)
        os.dup2(channel, 3)
        os.closerange(4, 64)
        lock()
        work(3)
        status = 0
    except MemoryError:
        status = NO_MEMORY
    finally:
        os._exit(status)


def probe(channel: int) -> None:
    """What a child finds that it cannot do, and that it can import what was not loaded."""
    importlib.import_module("colorsys")
    os.write(channel, json.dumps(lockdown.probe(os.path.dirname(sys.executable), MEMORY)).encode())


class ExitRecord(ctypes.Structure):
    """How a child ended, where the kernel writes it down. It is sent from here and wiped: Python's own numbers would
    stay in memory that is free again, and the next child would inherit them."""

    _fields_ = [
        ("status", ctypes.c_int),
        ("out_of_time", ctypes.c_int),
        ("usage", ctypes.c_long * 18),  # the first four are user and system time
    ]


class ForkServer:
    """Forks a child for every program, and waits for it."""

    def __init__(self, control: socket.socket, isolation: str, seconds: float, wall: float) -> None:
        self.control = control
        self.lock = partial(lock, seconds, lockdown.prepare(lockdown.call_filter(for_code=True)))
        self.ended = ExitRecord()
        self.scratch = move(isolation)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # waited for, not handled
        self._child_signal = ctypes.create_string_buffer(128)
        lockdown.LIBC.sigaddset(self._child_signal, signal.SIGCHLD)
        self._wall = struct.pack("@ll", int(wall), int(wall % 1 * 1e9))
        self._grace = struct.pack("@ll", GRACE_SECONDS, 0)

    def serve(self) -> None:
        said = memoryview(self.ended).cast("B")[: STATUS.size]
        while True:
            data, descriptors, _, _ = socket.recv_fds(self.control, 1, 1)
            if not data:
                return
            self.fork(descriptors[0], run)
            self.control.send(said)
            ctypes.memset(ctypes.byref(self.ended), 0, ctypes.sizeof(self.ended))

    def fork(self, channel: int, work: Callable[[int], None]) -> None:
        """Run one child to its end; `ended` tells how it was."""
        if self.scratch:
            self.scratch.mount()
        pid = os.fork()
        if pid == 0:
            child(channel, self.lock, work, SCRATCH if self.scratch else "/")
        os.close(channel)
        self._wait(pid)
        if self.scratch:
            self.scratch.unmount()

    def _wait(self, pid: int) -> None:
        """In few steps, which are the same for all: how often a loop was run is also something to inherit."""
        while not self._reap(pid, os.WNOHANG):
            if not self._heard(self._wall) and not self._heard(self._grace):
                self.ended.out_of_time = 1
                os.kill(pid, signal.SIGKILL)
                self._reap(pid, 0)
                return

    def _heard(self, timeout: bytes) -> bool:
        """Whether something happened to a child before the time was up, or to this process."""
        number = lockdown.LIBC.sigtimedwait(self._child_signal, None, timeout)
        return bool(number > 0 or ctypes.get_errno() != errno.EAGAIN)

    def _reap(self, pid: int, options: int) -> bool:
        ended = self.ended
        status, usage = ctypes.byref(ended), ctypes.byref(ended, ExitRecord.usage.offset)
        return int(lockdown.LIBC.wait4(pid, status, options, usage)) == pid

    def probe(self) -> dict[str, bool]:
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as file:
            self.fork(writing, probe)
            found: dict[str, bool] = json.loads(file.read() or "{}")
        if self.ended.status or not found:
            raise OSError(f"a child that tries what it can do ended with status {self.ended.status}")
        return found


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the node; this process ends with its socket
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, this goes before the node
    isolation, seconds, wall = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    try:
        for name in WARM:
            importlib.import_module(name)
        sys.path[:] = [path for path in sys.path if path.startswith(tuple(library()))]
        sys.argv[1:] = []
        os.environ.clear()
        gc.collect()
        gc.freeze()  # what is shared with the children stays shared
        server = ForkServer(control, isolation, seconds, wall)
        control.send(json.dumps({"kept_from": server.probe()}).encode() + b"\n")
    except BaseException as error:
        last = traceback.format_exception_only(type(error), error)[-1].strip()
        control.send(json.dumps({"error": last}).encode() + b"\n")
        raise
    server.serve()


if __name__ == "__main__":
    main()
