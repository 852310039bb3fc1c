"""Reads and writes files below one root: the file system as a folder swarm sees it.

The folder network uses these calls alone, so that a bucket (`network/remote.py`), or a test that behaves like a badly
synced drive, can stand in. `LocalFiles` is also the only way to a directory that other users can write to: logs,
checkpoints and settings that a node copies there or reads from there pass through it (`beneath.py`).
"""

import copy
import errno
import hashlib
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from rl_swarm.storage import beneath

log = logging.getLogger(__name__)

CHUNK = 1 << 20  # bytes that are copied at a time
SWARMS = "experiments"  # the folder of all swarms below GDRIVE_PATH
ROUND_FOLDER = re.compile(r"round_(0|[1-9][0-9]{0,14})")
STAGE_FOLDER = re.compile(r"stage_(0|[1-9][0-9]{0,3})")
LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
NO_LINKS = "links in a shared folder are not followed: name the directory that it leads to"
MAX_NAMES = 100_000  # entries of a folder that are read at a time
TRIES = 10  # at a place where an attacker keeps putting something else
MAX_MERGED = 2000  # files that are moved into another folder at a time
MAX_LOGGED_NAMES = 100  # of replaced folders, whose last log line is remembered
REMIND_SECONDS = 60.0  # between log lines about one name
IN_PLACE = (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST)  # why a rename replaces nothing


class Refused(OSError):
    """Reports that a store will refuse until a person changes a setting or a permission; the message says which."""


class Changed(OSError):
    """Reports a file that does not have the size that its writer left it with."""


class Files(Protocol):
    """Paths are relative to the root and use `/`. `OSError` means: not now, perhaps later.

    Other users may have put anything there: only regular files are read and written.
    """

    @property
    def root(self) -> Path | str:
        """Return the root as a person would write it."""
        ...

    def read(self, path: str, limit: int) -> bytes:
        """Read at most `limit + 1` bytes, so that the caller can tell when there were more."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Replace the file, atomically where the store can."""
        ...

    def append(self, path: str, data: bytes, at: int | None = None) -> None:
        """Add to a file; raise `Changed` if it is to have `at` bytes before and has not."""
        ...

    def names(self, folder: str) -> list[str]:
        """List what is in a folder; nothing if there is no such folder."""
        ...

    def remove(self, folder: str) -> None: ...

    def move(self, folder: str, target: str) -> None:
        """Move a folder; if there is one at the target, it gets the files of both."""
        ...


class LocalFiles:
    """Reads and writes below a directory. One that has disappeared (a drive unmounted) is not made anew.

    The user named the root, so links in its path are followed once, now. Below it none is followed: a link in place of
    a directory is replaced by a directory when something is written there. Of `<folder>/experiments/<name>` the user
    named the folder; the rest is in it.
    """

    def __init__(self, root: Path, repair: bool = True) -> None:
        named, self._inside, self._repair = root, "", repair
        if root.parent.name == SWARMS:
            named, self._inside = root.parent.parent, f"{SWARMS}/{root.name}"
        self.root = root
        self._base = os.path.realpath(named)
        self._existed = self.has_folder("")

    def below(self, folder: str) -> "LocalFiles":
        """Return the same for a folder in this one, which is no link either."""
        found = copy.copy(self)
        found.root, found._inside = self.root / folder, f"{self._inside}/{folder}".strip("/")
        found._existed = found.has_folder("")
        return found

    def read(self, path: str, limit: int, start: int = 0) -> bytes:
        with self._opened() as root, beneath.regular(root, path, os.O_RDONLY) as file:
            return _read(file, limit + 1, start)

    def write(self, path: str, data: bytes) -> None:
        with self._parent(path) as (folder, name):
            _replace(folder, name, data)

    def append(self, path: str, data: bytes, at: int | None = None) -> None:
        with self._parent(path) as (folder, name):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with beneath.regular(folder, name, flags) as file:
                size = os.fstat(file).st_size
                if at is not None and size != at:
                    raise Changed(errno.ESTALE, f"{size} bytes instead of {at}", path)
                _write(file, data)

    def names(self, folder: str) -> list[str]:
        try:
            with self._opened() as root:
                inside = beneath.open_below(root, folder, os.O_RDONLY | os.O_DIRECTORY | beneath.SAFE)
        except FileNotFoundError:
            return []
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                return []
            raise
        try:
            with os.scandir(inside) as entries:
                return sorted(entry.name for entry, _ in zip(entries, range(MAX_NAMES), strict=False))
        finally:
            os.close(inside)

    def folders_with(self, file: str, folder: str = "") -> list[str]:
        """List the folders in a folder that hold a file of this name."""
        found = []
        for name in self.names(folder):
            with suppress(OSError):
                self.stat(f"{folder}/{name}/{file}".lstrip("/"))
                found.append(name)
        return found

    def stat(self, path: str) -> os.stat_result:
        """Tell size and time of a regular file without opening it for reading."""
        with self._opened() as root, beneath.regular(root, path, getattr(os, "O_PATH", os.O_RDONLY)) as file:
            return os.fstat(file)

    def has_folder(self, folder: str) -> bool:
        """Tell whether there is a directory, and not a link to one."""
        try:
            with self._opened() as root:
                os.close(beneath.open_below(root, folder, beneath.DIRECTORY))
        except OSError:
            return False
        return True

    def make(self) -> None:
        """Make the root, where there is none."""
        os.makedirs(self._base, exist_ok=True)
        first, _, rest = self._inside.partition("/")
        if first:
            root = beneath.open_root(self._base)
            try:
                # A link in place of `experiments` may be the user's own; one below it is an attacker's.
                with (
                    _within(root, f"{first}/-", first != SWARMS) as (inside, _),
                    _within(inside, f"{rest}/-" if rest else "-"),
                ):
                    pass
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise NotADirectoryError(errno.ENOTDIR, NO_LINKS, str(self.root)) from error
                raise
            finally:
                os.close(root)
        self._existed = True

    def remove(self, folder: str) -> None:
        """Remove a folder; without a name, all that is in the root."""
        parent, name = _split(folder)
        with suppress(FileNotFoundError, NotADirectoryError), beneath.named(folder), self._folder(parent) as inside:
            for each in [name] if name else self.names(parent):
                beneath.remove_tree(inside, each)

    def remove_if_empty(self, folder: str) -> None:
        parent, name = _split(folder)
        with suppress(OSError), self._folder(parent) as inside:
            os.rmdir(name, dir_fd=inside)

    def move(self, folder: str, target: str) -> None:
        parent, name = _split(folder)
        with beneath.named(folder), self._folder(parent) as source, self._parent(target) as (goal, wanted):
            try:
                os.rename(name, wanted, src_dir_fd=source, dst_dir_fd=goal)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                self._merge(folder, target)
                beneath.remove_tree(source, name)

    def copy_in(self, source: Path, folder: str) -> None:
        """Copy the files of a private directory into a folder, which appears whole or not at all."""
        with self._parent(folder) as (parent, name):
            aside = f".{name}.{secrets.token_hex(4)}.tmp"
            os.mkdir(aside, dir_fd=parent)
            try:
                inside = beneath.open_below(parent, aside, beneath.DIRECTORY)
                try:
                    for path in sorted(path for path in source.rglob("*") if path.is_file()):
                        name_inside = path.relative_to(source).as_posix()
                        with (
                            _within(inside, name_inside) as (into, last),
                            path.open("rb") as file,
                            _made(into, last) as made,
                        ):
                            while chunk := file.read(CHUNK):
                                _write(made, chunk)
                finally:
                    os.close(inside)
                _into_place(parent, aside, name)
            except BaseException:
                with suppress(OSError):
                    beneath.remove_tree(parent, aside)
                raise

    def copy_out(self, folder: str, target: Path, wanted: Mapping[str, tuple[int, str]]) -> None:
        """Copy files into a private directory; raise `Changed` unless they have these sizes and SHA-256 digests.

        Each file is hashed while it is copied, so the copy is what was verified, even if the folder changes meanwhile.
        """
        with self._folder(folder) as inside:
            for name, (size, expected) in wanted.items():
                goal = target.joinpath(*beneath.parts_of(name))
                goal.parent.mkdir(parents=True, exist_ok=True)
                sha, left = hashlib.sha256(), size + 1
                with beneath.regular(inside, name, os.O_RDONLY) as file, goal.open("xb") as made:
                    while left and (chunk := os.read(file, min(CHUNK, left))):
                        left -= len(chunk)
                        sha.update(chunk)
                        made.write(chunk)
                if left != 1 or sha.hexdigest() != expected:
                    raise Changed(errno.ESTALE, "not as this node wrote it", name)

    def _merge(self, folder: str, target: str) -> None:
        """Move the files of a folder into another, so many at a time."""
        for number, path in enumerate(self._found(folder, beneath.MAX_DEPTH)):
            if number == MAX_MERGED:
                raise OSError(errno.ENOTEMPTY, f"more than {MAX_MERGED} files", folder)
            parent, last = _split(path)
            goal = f"{target}{path[len(folder) :]}"
            with self._folder(parent) as inside, self._parent(goal) as (into, wanted):
                if not self.has_folder(goal):
                    os.replace(last, wanted, src_dir_fd=inside, dst_dir_fd=into)

    def _found(self, folder: str, depth: int) -> Iterator[str]:
        """List the files of a folder and of folders in it, down to a depth."""
        for name in self.names(folder):
            path = f"{folder}/{name}"
            if not self.has_folder(path):
                yield path
            elif depth:
                yield from self._found(path, depth - 1)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        root = beneath.open_root(self._base)
        if self._inside:
            try:
                found = beneath.open_below(root, self._inside, beneath.DIRECTORY)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise NotADirectoryError(errno.ENOTDIR, NO_LINKS, str(self.root)) from error
                raise
            finally:
                os.close(root)
            root = found
        try:
            yield root
        finally:
            os.close(root)

    @contextmanager
    def _folder(self, folder: str) -> Iterator[int]:
        with self._opened() as root:
            inside = beneath.open_below(root, folder, beneath.DIRECTORY)
        try:
            yield inside
        finally:
            os.close(inside)

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """Open the folder that a path is to be written in, which is made if need be; and the path's last name."""
        if not self._existed:
            self.make()
        with self._opened() as root, _within(root, path, self._repair) as found:
            yield found


@contextmanager
def _within(directory: int, path: str, repair: bool = True) -> Iterator[tuple[int, str]]:
    """Open the folder of a path below an open directory, which is made if need be; and the path's last name."""
    parts = beneath.parts_of(path)
    if not parts:
        raise IsADirectoryError(errno.EISDIR, "the swarm's directory itself", path)
    *folders, name = parts
    here = os.dup(directory)
    try:
        for part in folders:
            below = _directory(here, part, repair)
            os.close(here)
            here = below
        yield here, name
    finally:
        os.close(here)


def _directory(parent: int, name: str, repair: bool) -> int:
    """Open a directory to write in, which is made if need be.

    With `repair`, a link or a file in its place is replaced, and a directory of this user that has lost its permissions
    gets them back.
    """
    for _ in range(TRIES):  # others may remove an empty folder in between
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=parent)
        try:
            found = os.open(name, beneath.DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        except FileNotFoundError:
            continue
        except OSError as error:
            if not repair or error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            with suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(name, dir_fd=parent)
                _log_replaced(name)
            continue
        with suppress(OSError):  # the write that follows reports what is wrong
            mode = os.fstat(found)
            if repair and mode.st_uid == os.geteuid() and mode.st_mode & 0o700 != 0o700:
                os.chmod(f"/proc/self/fd/{found}", stat.S_IMODE(mode.st_mode) | 0o700)
        return found
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


_logged: dict[str, float] = {}  # by name of a replaced folder: when that was last logged


def _log_replaced(name: str) -> None:
    now = time.monotonic()
    if now - _logged.get(name, -REMIND_SECONDS) >= REMIND_SECONDS:
        _logged[name] = now
        if len(_logged) > MAX_LOGGED_NAMES:
            _logged.pop(next(iter(_logged)))
        log.warning("%s was no directory, but something else in its place: it is replaced", name)


def _split(path: str) -> tuple[str, str]:
    """Split a path into its folder and its last name; one that leads out of the root is an error."""
    *folders, name = beneath.parts_of(path) or [""]
    return "/".join(folders), name


def _replace(folder: int, name: str, data: bytes) -> None:
    """Write a file aside and renames it: readers see the old one or the new one, and no link is followed."""
    aside = f".{name}.{secrets.token_hex(4)}.tmp"
    try:
        with _made(folder, aside) as file:
            _write(file, data)
        _into_place(folder, aside, name)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside, dir_fd=folder)
        raise


def _into_place(folder: int, aside: str, name: str) -> None:
    """Rename what was written aside. A directory, or what else cannot be replaced, is first moved away, then removed.

    Moving costs the same however much there is in it.
    """
    for left in reversed(range(TRIES)):
        try:
            os.replace(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
            return
        except OSError as error:
            if not left or error.errno not in IN_PLACE:
                raise
        away = f".{secrets.token_hex(4)}.old.tmp"
        with suppress(FileNotFoundError):
            os.rename(name, away, src_dir_fd=folder, dst_dir_fd=folder)
        with suppress(OSError):  # too much to remove: it stays there, under that name
            beneath.remove_tree(folder, away)


@contextmanager
def _made(folder: int, name: str) -> Iterator[int]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | beneath.SAFE
    file = os.open(name, flags, 0o666, dir_fd=folder)
    try:
        yield file
    finally:
        os.close(file)


def _read(file: int, count: int, start: int) -> bytes:
    pieces, left = [], count
    if start:
        os.lseek(file, start, os.SEEK_SET)
    while left and (piece := os.read(file, min(left, CHUNK))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _write(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
