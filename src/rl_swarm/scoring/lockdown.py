"""Takes from a process, for good, what scoring does not need: files, network, other processes, memory.

Three mechanisms of the kernel, each used where it exists: resource limits, Landlock (which paths can be
opened) and seccomp (which system calls can be made). The last two bind root as well. `lock_down` then tries
what should be impossible and returns what it found, so nothing is claimed that was not seen to hold. On
systems other than Linux only the limits remain.

What stays possible: reading the packages' own directories, asking whether a path exists, and computing.
"""

import ctypes
import errno
import mmap
import os
import platform
import resource
import socket
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterable
from contextlib import suppress

MEMORY = 1 << 30  # of address space; all tasks together need a quarter of it
LIMITS = {"RLIMIT_AS": MEMORY, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0, "RLIMIT_NPROC": 0, "RLIMIT_NOFILE": 64}

# What Python needs to compute, to import and to speak through open pipes: numbers on x86_64 and on aarch64.
ALLOWED = {
    "read": (0, 63),
    "write": (1, 64),
    "setitimer": (38, 103),
    "rt_sigreturn": (15, 139),
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "mprotect": (10, 226),
    "madvise": (28, 233),
    "brk": (12, 214),
    "futex": (202, 98),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "close": (3, 57),
    "fstat": (5, 80),
    "stat": (4, None),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "lseek": (8, 62),
    "pread64": (17, 67),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "getrandom": (318, 278),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getitimer": (36, 102),
    "getrusage": (98, 165),
    "times": (100, 153),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
OPENING = {"open": ((2, None), 1), "openat": ((257, 56), 2)}  # numbers, and which argument holds the flags
WRITING = 0o3 | 0o100 | 0o1000 | 0o20000000  # write or both, create, truncate, nameless file
NEWER = 424  # from here on system calls have one number everywhere; libraries expect some to be missing
MACHINES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}  # column, audit name, seccomp


def packages() -> list[str]:
    """The directories that importing and the tasks read: the standard library and each package in use, but ours."""
    found = {sysconfig.get_path("stdlib"), str(sysconfig.get_config_var("DESTSHARED"))}
    for name, module in list(sys.modules.items()):
        paths = getattr(module, "__dict__", {}).get("__path__")  # some modules have an answer to every name
        if "." not in name and name != "rl_swarm" and paths:
            found.update(str(path) for path in paths)
    library = sysconfig.get_path("stdlib") + os.sep
    return sorted(path for path in found if os.path.isdir(path) and not path.startswith(library))


def lock_down(readable: Iterable[str]) -> dict[str, bool]:
    """Locks this process and its threads down, and says which protections hold. There is no way back."""
    limit_resources()
    with suppress(OSError, AttributeError):  # another system, or a kernel or container that refuses
        restrict_paths(readable)
    with suppress(OSError, AttributeError):
        restrict_calls()
    return probe()


def limit_resources() -> None:
    for name, value in LIMITS.items():
        try:
            resource.setrlimit(getattr(resource, name), (value, value))
        except (AttributeError, ValueError, OSError):
            continue


def restrict_paths(readable: Iterable[str]) -> None:
    """Landlock: beneath `readable` files can be read, elsewhere nothing can be opened."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "only Linux has Landlock")
    version = _call(444, None, 0, 1)
    all_files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    network, signals = 3 if version >= 4 else 0, 3 if version >= 6 else 0
    attributes = struct.pack("=QQQ", all_files, network, signals)
    rules = _call(444, attributes, len(attributes), 0)
    try:
        for path in readable:
            folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _call(445, rules, 1, struct.pack("=Qi", 0b1100, folder), 0)  # read files, list directories
            finally:
                os.close(folder)
        _no_new_privileges()
        _call(446, rules, 0)
    finally:
        os.close(rules)


def restrict_calls() -> None:
    """seccomp: all system calls fail but the allowed ones, in all threads."""
    column, machine, seccomp = MACHINES.get(platform.machine(), (0, 0, 0))
    if sys.platform != "linux" or not seccomp:
        raise OSError(errno.ENOSYS, "the system calls of this machine are not known")
    program = call_filter(column, machine)
    code = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    _no_new_privileges()
    _call(seccomp, 1, 1, filter_)  # a filter, for all threads


def call_filter(column: int, machine: int) -> bytes:
    """The filter as a program for the kernel's packet filter: load, compare and jump, return."""
    load, equal, above, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, missing, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    program = [step(load, 4), step(equal, machine, 1, 0), step(answer, kill), step(load, 0)]
    for numbers in ALLOWED.values():
        number = numbers[column]
        if number is not None:
            program += [step(equal, number, 0, 1), step(answer, allow)]
    for numbers, argument in OPENING.values():
        number = numbers[column]
        if number is not None:
            flags = 16 + 8 * argument  # the lower half of that argument
            program += [step(equal, number, 0, 4), step(load, flags), step(any_bit, WRITING, 0, 1)]
            program += [step(answer, refuse), step(answer, allow)]
    program += [step(above, NEWER, 0, 1), step(answer, missing), step(answer, refuse)]
    return b"".join(program)


def probe() -> dict[str, bool]:
    """What this process is seen to be kept from."""
    attempts: dict[str, Callable[[], object]] = {
        "reading files": lambda: os.close(os.open("/", os.O_RDONLY)),
        "writing files": lambda: os.close(os.open(os.devnull, os.O_WRONLY)),
        "network": lambda: socket.socket().close(),
        "starting processes": _fork,
        "signalling processes": lambda: os.kill(os.getppid(), 0),
        "using much memory": lambda: mmap.mmap(-1, MEMORY).close(),
    }
    return {name: _fails(attempt) for name, attempt in attempts.items()}


def describe(kept_from: dict[str, bool]) -> str:
    kept = [name for name, holds in kept_from.items() if holds]
    free = [name for name, holds in kept_from.items() if not holds]
    text = f"kept from {', '.join(kept) or 'nothing'}"
    return f"{text}; NOT from {', '.join(free)} (this system lacks Landlock or seccomp)" if free else text


def _fails(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (OSError, MemoryError):
        return True
    return False


def _fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _no_new_privileges() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _call(number: int, *arguments: int | bytes | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    typed = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(libc.syscall(ctypes.c_long(number), *typed))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
