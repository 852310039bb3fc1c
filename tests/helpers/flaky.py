"""A folder that is synced as badly as a shared drive can be.

`Drive` keeps every version of every file and when it was written; each node looks at it through its own
`view`, which decides what that node sees of it, and when. All decisions follow from a seed, the node, the
path and how often it was asked, so the same calls meet the same faults.
"""

import errno
import hashlib
import threading
import time
from collections import Counter
from dataclasses import dataclass

from rl_swarm.storage.files import LocalFiles

MOMENT = 0.05  # seconds that a fault lasts


@dataclass(frozen=True)
class Faults:
    late: float = 0.0  # seconds, at most, until others can read what was written
    listing_lag: float = 0.0  # seconds, at most, until it is in their listings too
    torn: float = 0.0  # share of versions of which others see half for a moment
    stale: float = 0.0  # share of reads that show the version before the newest
    broken_reads: float = 0.0  # share of reads and listings that fail, and go on failing for a moment
    broken_writes: float = 0.0  # share of writes that fail; an append may get half of its bytes written
    copies: float = 0.0  # share of files that appear a second time as `name (1).json`


FAULTS = {
    "files appear late": Faults(late=0.1),
    "listings lag": Faults(listing_lag=0.15),
    "others see half of a file": Faults(torn=0.6),
    "old versions are shown again": Faults(late=0.05, stale=0.5),
    "reads fail for a moment": Faults(broken_reads=0.3),
    "writes fail for a moment": Faults(broken_writes=0.3),
    "files appear twice": Faults(copies=0.7),
}
FAULTS["everything at once"] = Faults(
    late=0.06, listing_lag=0.06, torn=0.2, stale=0.2, broken_reads=0.1, broken_writes=0.1, copies=0.3
)


@dataclass(frozen=True)
class Version:
    number: int
    author: str
    written: float
    data: bytes | None  # None: removed


class Drive:
    def __init__(self, local: LocalFiles, faults: Faults, seed: int) -> None:
        self.local, self.faults, self.seed = local, faults, seed
        self.versions: dict[str, list[Version]] = {}
        self.lock = threading.RLock()
        self.met: Counter[str] = Counter()  # faults that nodes met, by name

    def view(self, node: str) -> "View":
        return View(self, node)

    def chance(self, *of: object) -> float:
        """Return a number in [0, 1), always the same for the same question."""
        digest = hashlib.sha256(repr((self.seed, *of)).encode()).digest()
        return int.from_bytes(digest[:6], "big") / 2**48

    def put(self, path: str, author: str, data: bytes | None) -> None:
        versions = self.versions.setdefault(path, [])
        versions.append(Version(len(versions), author, time.monotonic(), data))

    def below(self, folder: str) -> list[str]:
        return [path for path in self.versions if path.startswith(f"{folder}/")]


class View:
    """Shows one node's view of the drive. It sees its own writes at once."""

    def __init__(self, drive: Drive, node: str) -> None:
        self.drive, self.node, self.root = drive, node, drive.local.root
        self.asked: Counter[tuple[str, str]] = Counter()
        self.broken_until: dict[tuple[str, str], float] = {}

    def read(self, path: str, limit: int) -> bytes:
        self._may_fail("read", path, self.drive.faults.broken_reads, MOMENT)
        with self.drive.lock:
            if path not in self.drive.versions:  # put there by hand
                return self.drive.local.read(path, limit)
            seen = self._seen(path)
            if len(seen) > 1 and self._happens("stale", path, self.drive.faults.stale):
                seen.pop()
            if not seen or seen[-1].data is None:
                self.drive.met["late"] += 1
                raise FileNotFoundError(errno.ENOENT, "not here yet", path)
            data = self._whole_or_half(path, seen[-1])
        return data[: limit + 1]

    def write(self, path: str, data: bytes) -> None:
        self._may_fail("write", path, self.drive.faults.broken_writes)
        with self.drive.lock:
            self.drive.local.write(path, data)
            self.drive.put(path, self.node, data)
            if self.drive.chance("copy", path) < self.drive.faults.copies:
                self.drive.met["copy"] += 1
                stem, _, ending = path.rpartition(".")
                self.drive.local.write(f"{stem} (1).{ending}", data)
                self.drive.put(f"{stem} (1).{ending}", self.node, data)

    def append(self, path: str, data: bytes, at: int | None = None) -> None:
        with self.drive.lock:
            try:
                self._may_fail("append", path, self.drive.faults.broken_writes)
            except OSError:
                data = data[: len(data) // 2]
                raise
            finally:
                self.drive.local.append(path, data, at)
                self.drive.put(path, self.node, self.drive.local.read(path, 1 << 30))

    def names(self, folder: str) -> list[str]:
        self._may_fail("list", folder, self.drive.faults.broken_reads, MOMENT)
        with self.drive.lock:
            known, listed = set(), set()
            for path in self.drive.below(folder):
                name = path[len(folder) + 1 :].partition("/")[0]
                known.add(name)
                seen = self._seen(path, self.drive.faults.listing_lag)
                if seen and seen[-1].data is not None:
                    listed.add(name)
                else:
                    self.drive.met["unlisted"] += 1
            return sorted(listed | (set(self.drive.local.names(folder)) - known))

    def remove(self, folder: str) -> None:
        with self.drive.lock:
            self.drive.local.remove(folder)
            for path in self.drive.below(folder):
                self.drive.put(path, self.node, None)

    def move(self, folder: str, target: str) -> None:
        with self.drive.lock:
            for path in self.drive.below(folder):
                self.drive.put(target + path[len(folder) :], self.node, self.drive.versions[path][-1].data)
                self.drive.put(path, self.node, None)
            self.drive.local.move(folder, target)

    def _seen(self, path: str, more: float = 0.0) -> list[Version]:
        """Return the versions that have reached this node; some reach it later than other nodes."""
        return [
            version
            for version in self.drive.versions[path]
            if version.author == self.node or version.written + self._delay(path, version, more) <= time.monotonic()
        ]

    def _delay(self, path: str, version: Version, more: float = 0.0) -> float:
        chance = self.drive.chance("late", self.node, path, version.number)
        return (self.drive.faults.late + more) * chance

    def _whole_or_half(self, path: str, version: Version) -> bytes:
        arrived = version.written + self._delay(path, version)
        if (
            version.author != self.node
            and time.monotonic() < arrived + MOMENT
            and self.drive.chance("torn", self.node, path, version.number) < self.drive.faults.torn
        ):
            self.drive.met["torn"] += 1
            return version.data[: len(version.data) // 2]
        return version.data

    def _happens(self, what: str, path: str, share: float) -> bool:
        self.asked[what, path] += 1
        happens = self.drive.chance(what, self.node, path, self.asked[what, path]) < share
        if happens:
            self.drive.met[what] += 1
        return happens

    def _may_fail(self, what: str, path: str, share: float, seconds: float = 0.0) -> None:
        """Fail for a moment, after which the next call is sure to work."""
        until = self.broken_until.get((what, path))
        if until is None and self._happens(what, path, share):
            until = self.broken_until[what, path] = time.monotonic() + seconds
        elif until is not None and time.monotonic() >= until:
            del self.broken_until[what, path]
            return
        if until is not None:
            raise OSError(errno.EIO, "the drive does not answer", path)
