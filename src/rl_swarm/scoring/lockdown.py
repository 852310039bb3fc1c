"""Locks a process down for good: no files, no network, no other processes, little memory.

It uses three mechanisms of the kernel where they exist: resource limits, Landlock (which paths can be opened) and
seccomp (which system calls can be made). The last two bind root as well. `lock_down` then attempts what should be
impossible and returns the results, so every claimed protection was tested. On systems other than Linux only the
limits remain.

A locked process can still read the packages' own directories, ask whether a path exists, and compute.
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
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long

MEMORY = 1 << 30  # of address space; all tasks together need a quarter of it
LIMITS = {"RLIMIT_AS": MEMORY, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0, "RLIMIT_NPROC": 0, "RLIMIT_NOFILE": 64}

# What Python needs to compute, to import and to use open pipes: numbers on x86_64 and on aarch64.
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
# What programs in the sandbox need besides, in their own folder.
FOLDER_CALLS = {
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "ftruncate": (77, 46),
    "pwrite64": (18, 68),
}
# Calls that wait. For programs they return at once, as if the event had happened: so a process either computes or
# ends, and only its processor time needs a tight limit.
BLOCKING = {
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "select": (23, None),
    "pselect6": (270, 72),
    "poll": (7, None),
    "ppoll": (271, 73),
    "futex": (202, 98),
    "sched_yield": (24, 124),
}
SIGNALS = {"setitimer", "getitimer", "rt_sigaction", "rt_sigprocmask", "sigaltstack"}
REVEALING = {"sysinfo"}  # tells the number of other processes, and free memory
WRITING = 0o3 | 0o100 | 0o1000 | 0o20000000  # O_WRONLY or O_RDWR, O_CREAT, O_TRUNC, O_TMPFILE
LOAD, EQUAL, ABOVE, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of a filter
NEWER = 424  # from here on system calls have one number everywhere; libraries expect some to be missing
READ_FILE, LIST, MAKE_AND_REMOVE = 0b100, 0b1000, 0b1_1011_0010  # rights of Landlock
TRUNCATE = 1 << 14
MACHINES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}  # column, audit name, seccomp


def packages() -> list[str]:
    """List the directories that imports and tasks read: the standard library, and each loaded package but this one."""
    found = {sysconfig.get_path("stdlib"), str(sysconfig.get_config_var("DESTSHARED"))}
    for name, module in list(sys.modules.items()):
        paths = getattr(module, "__dict__", {}).get("__path__")  # some modules define every name
        if "." not in name and name != "rl_swarm" and paths:
            found.update(str(path) for path in paths)
    library = sysconfig.get_path("stdlib") + os.sep
    return sorted(path for path in found if os.path.isdir(path) and not path.startswith(library))


def lock_down(readable: Iterable[str]) -> dict[str, bool]:
    """Lock this process and its threads down irreversibly; return which protections hold."""
    limit_resources()
    with suppress(OSError, AttributeError):  # another system, or a kernel or container that refuses
        restrict_paths(dict.fromkeys(readable, READ_FILE | LIST))
    with suppress(OSError, AttributeError):
        restrict_calls()
    return probe()


def limit_resources(limits: Mapping[str, int] = LIMITS) -> None:
    for name, value in limits.items():
        try:
            resource.setrlimit(getattr(resource, name), (value, value))
        except (AttributeError, ValueError, OSError):
            continue


def restrict_paths(rights: Mapping[str, int]) -> None:
    """Restrict opening files to these paths and rights, with Landlock."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "only Linux has Landlock")
    version = call(444, None, 0, 1)
    all_files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    network, signals = 3 if version >= 4 else 0, 3 if version >= 6 else 0
    attributes = struct.pack("=QQQ", all_files, network, signals)
    rules = call(444, attributes, len(attributes), 0)
    try:
        for path, allowed in rights.items():
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                call(445, rules, 1, struct.pack("=Qi", allowed & all_files, place), 0)
            finally:
                os.close(place)
        no_new_privileges()
        call(446, rules, 0)
    finally:
        os.close(rules)


def restrict_calls() -> None:
    """Let all system calls but the allowed ones fail, in all threads, with seccomp."""
    no_new_privileges()
    filter_installer(call_filter())()


def filter_installer(program: bytes) -> Callable[[], None]:
    """Return a function that installs a filter. A fork server prepares it once."""
    code = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    install = ctypes.CDLL(None, use_errno=True).syscall
    install.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_char_p]
    install.restype = ctypes.c_long
    number = MACHINES[platform.machine()][2]

    def installed() -> None:
        if install(number, 1, 1, filter_):  # a filter, for all threads
            raise OSError(ctypes.get_errno(), f"seccomp: a filter of {len(code)} bytes is refused")

    return installed


def call_filter(for_code: bool = False) -> bytes:
    """Return the seccomp filter as a program for the kernel's packet filter: load, compare and jump, return.

    `for_code` is for programs in the sandbox: they may write where Landlock or the mounts allow it, but not change
    signal handlers. The kernel runs a new filter for every call number that it knows, so the search is binary.
    """
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise OSError(errno.ENOSYS, "the system calls of this machine are not known")
    column, machine, _ = MACHINES[platform.machine()]
    allow, refuse, missing, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
    done = 0x00050000  # the call is not made, and returns 0
    answers = dict.fromkeys(ALLOWED, allow)
    if for_code:
        answers |= {**dict.fromkeys(FOLDER_CALLS, allow), **dict.fromkeys(OPENING, allow)}
        answers |= {**dict.fromkeys(BLOCKING, done), **dict.fromkeys(SIGNALS | REVEALING, refuse)}
    known = {**ALLOWED, **FOLDER_CALLS, **BLOCKING, **{name: each for name, (each, _) in OPENING.items()}}
    numbered = sorted((known[name][column] or 0, name) for name in answers if known[name][column] is not None)

    def half(calls: list[tuple[int, str]]) -> list[bytes]:
        if len(calls) == 1:
            ((number, name),) = calls
            return [_op(EQUAL, number, 0, 1), _op(RETURN, answers[name]), _op(RETURN, refuse)]
        middle = len(calls) // 2
        below, others = half(calls[:middle]), half(calls[middle:])
        return [_op(ABOVE, calls[middle][0], len(below), 0), *below, *others]

    program = [_op(LOAD, 4), _op(EQUAL, machine, 1, 0), _op(RETURN, kill), _op(LOAD, 0)]
    for number, name in numbered:
        if number >= NEWER:
            program += [_op(EQUAL, number, 0, 1), _op(RETURN, answers[name])]
    program += [_op(ABOVE, NEWER, 0, 1), _op(RETURN, missing)]
    for name, (each, argument) in OPENING.items():
        opening = each[column]
        if opening is not None and name not in answers:
            flags = 16 + 8 * argument  # the lower half of the argument
            program += [_op(EQUAL, opening, 0, 4), _op(LOAD, flags), _op(ANY_BIT, WRITING, 0, 1)]
            program += [_op(RETURN, refuse), _op(RETURN, allow)]
    return b"".join(program + half([(number, name) for number, name in numbered if number < NEWER]))


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def probe(folder: str = "/", memory: int = MEMORY) -> dict[str, bool]:
    """Attempt what should be impossible; return what failed. `folder` is one that must not be readable."""
    attempts: dict[str, Callable[[], object]] = {
        "reading files": lambda: os.close(os.open(folder, os.O_RDONLY)),
        "writing files": lambda: os.close(os.open(os.devnull, os.O_WRONLY)),
        "network": lambda: socket.socket().close(),
        "starting processes": _fork,
        "signalling processes": lambda: os.kill(os.getppid(), 0),
        "using much memory": lambda: mmap.mmap(-1, memory).close(),
    }
    return {name: _fails(attempt) for name, attempt in attempts.items()}


def describe(denied: dict[str, bool]) -> str:
    kept = [name for name, holds in denied.items() if holds]
    free = [name for name, holds in denied.items() if not holds]
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


def no_new_privileges() -> None:
    if LIBC.prctl(38, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def call(number: int, *arguments: int | bytes | None) -> int:
    typed = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(LIBC.syscall(ctypes.c_long(number), *typed))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
