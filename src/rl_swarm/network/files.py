"""The file system as a folder swarm sees it: a few calls below one root.

Everything the folder network does goes through these calls, so that another store (or a test that
behaves like a badly synced drive) can stand in.
"""

import os
import shutil
from pathlib import Path
from typing import Protocol


class Files(Protocol):
    """Paths are relative to the root and use `/`. `OSError` means: not now, perhaps later."""

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

    def move(self, folder: str, target: str) -> None: ...


class LocalFiles:
    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, path: str, limit: int) -> bytes:
        with (self.root / path).open("rb") as file:
            return file.read(limit + 1)

    def write(self, path: str, data: bytes) -> None:
        target = self.root / path
        aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            try:
                aside.write_bytes(data)
            except FileNotFoundError:
                target.parent.mkdir(parents=True, exist_ok=True)
                aside.write_bytes(data)
            os.replace(aside, target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def append(self, path: str, data: bytes) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab") as file:
            file.write(data)

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self.root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, folder: str) -> None:
        shutil.rmtree(self.root / folder, ignore_errors=True)

    def move(self, folder: str, target: str) -> None:
        (self.root / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(self.root / folder, self.root / target)
