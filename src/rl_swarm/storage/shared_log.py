"""Writes a log in a private directory, with a copy in the swarm's store that every reader can see.

The private file is the log. Each line is appended to the copy. A copy that an attacker has changed (removed, cut,
replaced by a link or a pipe) is now and then written anew as a whole.
"""

import errno
import hashlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

MAX_LOG = 256 << 20  # bytes of a log that are copied as a whole
REPAIR_SECONDS = 30.0  # between two repairs of a copy that is damaged again and again


Name = TypeVar("Name")  # of the copy: a path, or a key
Target = TypeVar("Target", contravariant=True)


class LogStore(Protocol[Target]):
    """Keeps the copy."""

    def write(self, name: Target, data: bytes, /) -> None: ...

    def append(self, name: Target, data: bytes, at: int | None = None, /) -> None: ...


class SharedLog(Generic[Name]):
    def __init__(
        self,
        private: Path,
        store: LogStore[Name] | None = None,
        name: Name | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.private, self.clock = private, clock
        self._target = (store, name) if store is not None and name is not None else None
        private.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.size, self.sha256 = 0, hashlib.sha256()
        self._begin(_whole_lines(private))
        self._copied: int | None = None  # bytes of the copy that are known to be there
        self._repair_at = -REPAIR_SECONDS
        self.failures = 0  # lines that were not copied at once

    def append(self, line: bytes) -> None:
        """Add a line, here and to the copy. A copy that cannot be written stops nothing."""
        with self.private.open("ab", buffering=0) as file:  # nothing is written after a failure
            try:
                left = memoryview(line)
                while left:
                    left = left[file.write(left) :]
            except OSError:
                os.truncate(self.private, self.size)
                raise
        before, self.size = self.size, self.size + len(line)
        self.sha256.update(line)
        if self._target is None:
            return
        store, name = self._target
        try:
            if self._copied == before:
                store.append(name, line, before)
                self._copied = self.size
                return
        except OSError as error:
            self._copied = None
            self._failed(error)
        if self.clock() >= self._repair_at:
            self.copy()

    def copy(self) -> bool:
        """Write the whole copy anew; return whether that worked."""
        if self._target is None or self._copied == self.size:
            return True
        store, name = self._target
        self._repair_at = self.clock() + REPAIR_SECONDS
        try:
            store.write(name, self.read())
        except OSError as error:
            self._failed(error)
            return False
        self._copied = self.size
        return True

    def read(self) -> bytes:
        """Return the log as this process has written it."""
        if self.size > MAX_LOG:
            raise OSError(errno.EFBIG, f"a log of more than {MAX_LOG} bytes is not copied", str(self.private))
        try:
            return self.private.read_bytes()[: self.size]
        except FileNotFoundError:
            return b""

    def replace(self, data: bytes) -> None:
        """Make these lines the whole log, as when some of them are taken back."""
        aside = self.private.with_name(f".{self.private.name}.tmp")
        aside.write_bytes(data)
        os.replace(aside, self.private)
        self._begin(data)
        self._copied = None
        self.copy()

    def _begin(self, data: bytes) -> None:
        self.size, self.sha256 = len(data), hashlib.sha256(data)

    def _failed(self, error: OSError) -> None:
        self.failures += 1
        if self.failures == 1 and logging.getLogger("rl_swarm").handlers:
            log.warning("the copy of the log %s is not as this node left it: %s", self.private.name, error)


def _whole_lines(path: Path) -> bytes:
    """Return the log, without a last line that a crash has cut off."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return b""
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return whole
