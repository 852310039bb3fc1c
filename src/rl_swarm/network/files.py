"""The file system as a folder swarm sees it: a few calls below one root.

Everything the folder network does goes through these calls, so that another store (`remote.py`, or a test that
behaves like a badly synced drive) can stand in.
"""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, Protocol


class Refused(OSError):
    """A store that goes on refusing until somebody changes a setting or a permission; the message says which."""


class Files(Protocol):
    """Paths are relative to the root and use `/`. `OSError` means: not now, perhaps later.

    What lies in the folder may have been put there by anybody: only plain files are read and written.
    """

    @property
    def root(self) -> Path | str:
        """As a person would write it."""
        ...

    def read(self, path: str, limit: int) -> bytes:
        """At most `limit + 1` bytes, so that the caller can tell when there were more."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Replaces the file, atomically where the store can."""
        ...

    def append(self, path: str, data: bytes) -> None: ...

    def names(self, folder: str) -> list[str]:
        """What is in a folder; nothing if there is no such folder."""
        ...

    def remove(self, folder: str) -> None: ...

    def move(self, folder: str, target: str) -> None:
        """Moves a folder; if there is one at the target, it gets the files of both."""
        ...


class LocalFiles:
    """A directory. One that was there and has disappeared (a drive unmounted) is not made anew."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._existed = root.is_dir()

    def read(self, path: str, limit: int) -> bytes:
        with open_plain(self.root / path, "rb") as file:
            return file.read(limit + 1)

    def write(self, path: str, data: bytes) -> None:
        target = self.root / path
        aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            try:
                file = aside.open("xb")
            except FileNotFoundError:
                self._make_parent(target)
                file = aside.open("xb")
            with file:
                file.write(data)
            try:
                os.replace(aside, target)
            except IsADirectoryError:
                shutil.rmtree(target)
                os.replace(aside, target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def append(self, path: str, data: bytes) -> None:
        target = self.root / path
        self._make_parent(target)
        with open_plain(target, "ab") as file:
            file.write(data)

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self.root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, folder: str) -> None:
        shutil.rmtree(self.root / folder, ignore_errors=True)

    def move(self, folder: str, target: str) -> None:
        source, goal = self.root / folder, self.root / target
        self._make_parent(goal)
        try:
            os.replace(source, goal)
        except OSError:  # there is one already
            shutil.copytree(source, goal, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(source)

    def _make_parent(self, path: Path) -> None:
        if self._existed and not self.root.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.root))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._existed = True


@contextmanager
def open_plain(path: Path, mode: Literal["rb", "ab"]) -> Iterator[BinaryIO]:
    """Opens a regular file and nothing else: a pipe would block, a link could lead anywhere."""

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)

    with open(path, mode, opener=opener) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield file
