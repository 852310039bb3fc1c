"""Opens paths below a directory that other users can write to, and never follows a link on the way.

An attacker who can write to a shared folder can put a link, a pipe or a device in place of a file or a directory, at
any moment. So a path is resolved one component at a time below an open directory: by the kernel in one call where it
has `openat2`, and by `O_NOFOLLOW` on every component elsewhere. A check and the use that follows it always see the
same open file.
"""

import ctypes
import errno
import itertools
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

OPENAT2 = 437  # the same number on every architecture
NO_MAGICLINKS, NO_SYMLINKS, BENEATH = 0x02, 0x04, 0x08
AT_FDCWD = -100
# A directory to start from: searching it is enough, reading it is not needed.
DIRECTORY = os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
# Opening a pipe or a leased file must not wait.
SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
MAX_DEPTH = 16  # of a tree that is removed; those of a swarm have five levels
MAX_REMOVED = 20_000  # files of one


class Misplaced(OSError):
    """A link, a pipe, a device or a directory lies where a regular file belongs."""


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_without_openat2 = _libc is None


def open_below(directory: int, path: str, flags: int, mode: int = 0o666) -> int:
    """Open a path below an open directory; a link anywhere in it is an error."""
    parts = parts_of(path)
    if not parts:
        return os.open(".", flags | os.O_CLOEXEC, dir_fd=directory)
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    mode = mode if flags & os.O_CREAT else 0
    if not _without_openat2:
        opened = _openat2(directory, "/".join(parts), flags, mode, BENEATH | NO_SYMLINKS | NO_MAGICLINKS)
        if opened is not None:
            return opened
    *folders, name = parts
    here = os.dup(directory)
    try:
        for folder in folders:
            below = os.open(folder, DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = below
        return os.open(name, flags, mode, dir_fd=here)
    finally:
        os.close(here)


def open_root(path: str) -> int:
    """Open the directory that a swarm lies in, by an absolute path that was resolved before."""
    if not _without_openat2:
        opened = _openat2(AT_FDCWD, path, DIRECTORY, 0, NO_SYMLINKS)
        if opened is not None:
            return opened
    return os.open(path, DIRECTORY | os.O_NOFOLLOW)


def _openat2(directory: int, path: str, flags: int, mode: int, resolve: int) -> int | None:
    """Call `openat2`; None where the kernel does not have it, or a filter forbids it."""
    global _without_openat2
    assert _libc is not None
    how = _How(flags, mode, resolve)
    found: int = _libc.syscall(
        OPENAT2, directory, os.fsencode(path), ctypes.byref(how), ctypes.c_size_t(ctypes.sizeof(how))
    )
    if found >= 0:
        return found
    error = ctypes.get_errno()
    if error == errno.ENOSYS or (error == errno.EPERM and not _works()):
        _without_openat2 = True
        return None
    raise OSError(error, os.strerror(error), path)


def _works() -> bool:
    """Tell a kernel that forbids the call from a file that must not be opened."""
    assert _libc is not None
    how = _How(DIRECTORY, 0, NO_SYMLINKS)
    found: int = _libc.syscall(OPENAT2, AT_FDCWD, b"/", ctypes.byref(how), ctypes.c_size_t(ctypes.sizeof(how)))
    if found >= 0:
        os.close(found)
    return found >= 0


def parts_of(path: str) -> list[str]:
    """Split a relative path into names; one that could lead out of its directory is an error."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or "\0" in path:
        raise OSError(errno.EINVAL, "not a path below the swarm's directory", path)
    return parts


@contextmanager
def regular(directory: int, path: str, flags: int) -> Iterator[int]:
    """Open a regular file below a directory, and nothing else; never waits."""
    try:
        waiting = 0 if flags & getattr(os, "O_PATH", 0) else SAFE  # nothing is opened by O_PATH
        file = open_below(directory, path, flags | waiting)
    except OSError as error:
        # A link, a pipe without a reader, a socket, a directory.
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOTDIR):
            raise Misplaced(error.errno, f"not a regular file ({os.strerror(error.errno)})", path) from error
        raise
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise Misplaced(errno.EINVAL, "not a regular file", path)
        if flags & (os.O_WRONLY | os.O_RDWR) and found.st_nlink > 1:
            raise Misplaced(errno.EMLINK, "the file has another name elsewhere", path)
        yield file
    finally:
        os.close(file)


@contextmanager
def named(path: str) -> Iterator[None]:
    """Name errors after the path that was asked for: names below it may be an attacker's and stay out of messages."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def remove_tree(directory: int, name: str) -> None:
    """Remove a file, a link or a whole directory below an open directory; what a link leads to stays.

    Of a tree that is larger or deeper than those of a swarm, some files go, and the rest is an error.
    """
    with named(name):
        _remove(directory, name, MAX_DEPTH, MAX_REMOVED)


def _remove(directory: int, name: str, depth: int, most: int) -> int:
    """Return how many of `most` files may still be removed."""
    try:
        inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | SAFE, dir_fd=directory)
    except FileNotFoundError:
        return most
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            raise
        with suppress(FileNotFoundError):  # others remove too
            os.unlink(name, dir_fd=directory)
        return most - 1
    try:
        if depth == 0:
            raise OSError(errno.ENOTEMPTY, "too many directories inside each other", name)
        with os.scandir(inside) as entries:
            names = [entry.name for entry in itertools.islice(entries, most + 1)]
        for each in names:
            if most <= 0:
                raise OSError(errno.ENOTEMPTY, f"more than {MAX_REMOVED} files", name)
            most = _remove(inside, each, depth - 1, most)
    finally:
        os.close(inside)
    with suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=directory)
    return most - 1
