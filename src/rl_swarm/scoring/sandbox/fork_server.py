"""Forks a child for every program and reports how it ended. `sandbox` starts it, as
`python -m rl_swarm.scoring.sandbox.fork_server ISOLATION SECONDS WALL`.

The server has Python's usual modules loaded and is isolated. For every program it forks a child, which locks itself
down further and only then reads the code, from a socket that was made for this program. The server never reads a
program: so its memory, which every child inherits, holds nothing of any task, not even how the last one ended. A child
has a scratch file system of its own. The server waits for it, kills it when its time is up, and reports its status.

A child writes a line for every call: `=` and a literal, or `!` and an error. A program may write such a line itself;
it gains no more than if the call had returned that value.
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
from rl_swarm.scoring.sandbox.namespaces import ScratchMount, drop_capabilities, enter_namespaces

MEMORY = 256 << 20  # of address space
SCRATCH, FILE_SIZE = "/scratch/tmp", 4 << 20
SCRATCH_OPTIONS = f"size={8 << 20},nr_inodes=64,mode=777"
LIMITS = {"RLIMIT_AS": MEMORY, "RLIMIT_FSIZE": FILE_SIZE, "RLIMIT_CORE": 0, "RLIMIT_NOFILE": 32}
MAX_OUTPUT = 128 << 10  # bytes of all replies; they have to fit into the socket's buffer
# The status of `wait`, whether the wall-clock limit was reached, and user and system time.
STATUS = struct.Struct("@ii4l")
GRACE_SECONDS = 1  # of extra wall-clock time, in case the whole machine was suspended
NO_MEMORY = 2  # the exit status of a child
PRELOADED = (  # modules loaded before the first fork
    "array", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "enum",
    "fractions", "functools", "hashlib", "heapq", "itertools", "json", "math", "operator", "random", "re",
    "statistics", "string", "textwrap", "time", "typing", "unicodedata",
)  # fmt: skip


def library() -> list[str]:
    """List the directories of Python's standard library."""
    stdlib = sysconfig.get_path("stdlib")
    shared = str(sysconfig.get_config_var("DESTSHARED"))
    return [stdlib] if shared.startswith(stdlib) or not os.path.isdir(shared) else [stdlib, shared]


def landlock_rights(scratch: bool) -> dict[str, int]:
    """Allow reading the standard library, without the site packages that some systems keep in it."""
    found = {}
    for folder in library():
        found[folder] = lockdown.LIST
        for entry in os.scandir(folder):
            if entry.name not in ("site-packages", "dist-packages") and not entry.is_symlink():
                found[entry.path] = lockdown.READ_FILE | (lockdown.LIST if entry.is_dir() else 0)
    if scratch:  # on the parent folder, so that the rule holds for every new mount
        found[os.path.dirname(SCRATCH)] = (
            lockdown.READ_FILE | lockdown.LIST | lockdown.MAKE_AND_REMOVE | lockdown.TRUNCATE
        )
    return found


def isolate(isolation: str) -> ScratchMount | None:
    """Apply the isolation that all programs share. Raise OSError where the kernel does not offer it."""
    scratch = None
    if isolation == "namespaces":
        scratch = enter_namespaces(library(), SCRATCH, SCRATCH_OPTIONS)
        try:
            lockdown.restrict_paths(landlock_rights(scratch=True))
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
                raise  # without Landlock the mounts alone confine programs
    else:
        drop_capabilities()
        lockdown.restrict_paths(landlock_rights(scratch=False))
    lockdown.limit_resources(LIMITS)
    lockdown.no_new_privileges()
    lockdown.LIBC.prctl(4, 0, 0, 0, 0)  # no core dumps, which some systems pass to a program of root
    return scratch


def lock(seconds: float, restrict_calls: Callable[[], None]) -> None:
    """Apply the isolation of one child."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds) + 1))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    restrict_calls()


def run(channel: int) -> None:
    """Run one program and its calls. From here on the program controls this process."""
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
        except BaseException as error:  # noqa: BLE001 a program may raise anything
            line = "!" + describe_error(error)
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


def describe_error(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    except BaseException:  # noqa: BLE001 an exception may not be printable
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
    """Report what a child cannot do, after importing a module that was not loaded."""
    importlib.import_module("colorsys")
    os.write(channel, json.dumps(lockdown.probe(os.path.dirname(sys.executable), MEMORY)).encode())


class ExitRecord(ctypes.Structure):
    """Records how a child ended, as the kernel writes it.

    It is sent from here and wiped: Python integers would stay in freed memory, which the next child inherits.
    """

    _fields_ = [
        ("status", ctypes.c_int),
        ("out_of_time", ctypes.c_int),
        ("usage", ctypes.c_long * 18),  # the first four are user and system time
    ]


class ForkServer:
    """Forks a child for every program, and waits for it."""

    def __init__(self, control: socket.socket, isolation: str, seconds: float, wall: float) -> None:
        self.control = control
        self.lock = partial(lock, seconds, lockdown.filter_installer(lockdown.call_filter(for_code=True)))
        self.ended = ExitRecord()
        self.scratch = isolate(isolation)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # waited for, not handled
        self._child_signal = ctypes.create_string_buffer(128)
        lockdown.LIBC.sigaddset(self._child_signal, signal.SIGCHLD)
        self._wall = struct.pack("@ll", int(wall), int(wall % 1 * 1e9))
        self._grace = struct.pack("@ll", GRACE_SECONDS, 0)

    def serve(self) -> None:
        status = memoryview(self.ended).cast("B")[: STATUS.size]
        while True:
            data, descriptors, _, _ = socket.recv_fds(self.control, 1, 1)
            if not data:
                return
            self.fork(descriptors[0], run)
            self.control.send(status)
            ctypes.memset(ctypes.byref(self.ended), 0, ctypes.sizeof(self.ended))

    def fork(self, channel: int, work: Callable[[int], None]) -> None:
        """Run one child to its end; `ended` holds its status."""
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
        """Wait in few steps, equal for all children: even a loop count is memory that the next child inherits."""
        while not self._reap(pid, os.WNOHANG):
            if not self._wait_for_signal(self._wall) and not self._wait_for_signal(self._grace):
                self.ended.out_of_time = 1
                os.kill(pid, signal.SIGKILL)
                self._reap(pid, 0)
                return

    def _wait_for_signal(self, timeout: bytes) -> bool:
        """Return whether a signal arrived before the timeout."""
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
            raise OSError(f"a child that tests the isolation ended with status {self.ended.status}")
        return found


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the node; this process ends with its socket
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, the kernel kills this before the node
    isolation, seconds, wall = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    try:
        for name in PRELOADED:
            importlib.import_module(name)
        sys.path[:] = [path for path in sys.path if path.startswith(tuple(library()))]
        sys.argv[1:] = []
        os.environ.clear()
        gc.collect()
        gc.freeze()  # pages stay shared with the children
        server = ForkServer(control, isolation, seconds, wall)
        control.send(json.dumps({"denied": server.probe()}).encode() + b"\n")
    except BaseException as error:
        last = traceback.format_exception_only(type(error), error)[-1].strip()
        control.send(json.dumps({"error": last}).encode() + b"\n")
        raise
    server.serve()


if __name__ == "__main__":
    main()
