"""Attacks a folder as a writer of it, and lets the system calls of the layers under test fail."""

import contextlib
import errno
import os
import random
import resource
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rl_swarm.storage import beneath, files, shared_log

FAULTS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ESTALE, errno.EMFILE, errno.EINTR)
CALLS = ("open", "read", "write", "replace", "rename", "mkdir", "unlink", "rmdir", "scandir", "fstat", "lseek", "chmod")
NAMES = (
    "manifest.json",
    "admission.json",
    "state",
    "peers",
    "rollouts",
    "rewards",
    "logs",
    "checkpoints",
    "archives",
    "x",
)
PATHS = (
    *("x", "x/y", "x/y/z.json", "state/current_state.json", "state/history.jsonl", "peers/alice.json",
    "peers/bob.json"),
    *("rollouts/round_1/stage_0/alice.json", "rewards/round_1/stage_0/alice.json", "logs/alice/metrics.jsonl", "logs"),
    *("checkpoints/round_1/alice/place.json", "checkpoints/round_1/alice/model.bin", "checkpoints/round_2", "archives"),
    *("rollouts/round_1", "rollouts", "peers", "rewards/round_1/stage_0", "checkpoints/round_1/alice", "state",
    "checkpoints"),
)  # fmt: skip


class FaultyOs:
    """Wraps the module `os` for the layers under test: calls may fail, be short, or find a file replaced."""

    def __init__(self, rng: random.Random, strike: Callable[[], None], faults: float, strikes: float) -> None:
        self.rng, self.strike, self.faults, self.strikes, self.on = rng, strike, faults, strikes, False
        self.reached: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        return self.wrapped(name, found) if name in CALLS else found

    def wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            if not self.on:
                return call(*args, **options)
            if self.rng.random() < self.strikes:
                self.strike()
            if self.rng.random() < self.faults:
                if name == "write" and len(args[1]) > 1 and self.rng.random() < 0.5:
                    return call(args[0], args[1][: self.rng.randrange(1, len(args[1]))])
                if name == "read" and args[1] > 1 and self.rng.random() < 0.5:
                    return call(args[0], self.rng.randrange(1, args[1]))
                error = self.rng.choice(FAULTS)
                self.reached.add(f"{name} fails: {errno.errorcode[error]}")
                raise OSError(error, os.strerror(error))
            return call(*args, **options)

        return called

    @contextlib.contextmanager
    def below(self, openat2: bool) -> Iterator[None]:
        """Put this wrapper below every module of the layer."""
        before, found = beneath._openat2, beneath._without_openat2
        modules: list[Any] = [beneath, files, shared_log]
        beneath._openat2 = self.wrapped("open", before)
        beneath._without_openat2 = found or not openat2
        for module in modules:
            module.os = self
        try:
            yield
        finally:
            for module in modules:
                module.os = os
            beneath._openat2, beneath._without_openat2 = before, found

    @contextlib.contextmanager
    def striking(self, on: bool = True) -> Iterator[None]:
        before, self.on = self.on, on
        try:
            yield
        finally:
            self.on = before


class FolderAttacker:
    """Attacks the folder with the permission to write to it."""

    def __init__(self, root: Path, outside: Path, rng: random.Random) -> None:
        self.root, self.outside, self.rng = root, outside, rng
        self.held: list[socket.socket] = []
        self.done: set[str] = set()

    def strike(self) -> None:
        kinds = [name for name in dir(self) if name.startswith("do_")]
        kind = "do_tamper" if self.rng.random() < 0.3 else self.rng.choice(kinds)
        path = self.root / self.rng.choice(self.rng.choice((PATHS, NAMES)))
        with contextlib.suppress(OSError):
            if kind == "do_tamper":
                # A file that is there, and has a name that is the same in every run.
                here = sorted(each for each in self.root.rglob("*") if not each.name.startswith("."))
                path = self.rng.choice([each for each in here if self._is_own_file(each)] or [path])
            if not self._is_inside(path):
                return
            getattr(self, kind)(path)
            self.done.add(kind[3:])

    def close(self) -> None:
        for each in self.held:
            each.close()

    def _is_inside(self, path: Path) -> bool:
        """Return whether no part of the path is a link: the attacker has no power beyond the folder."""
        way = [path.parent, *path.parent.parents]
        return not any(each.is_symlink() for each in way[: len(way) - len(self.root.parents)])

    def _clear(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)

    def do_link_to_file(self, path: Path) -> None:
        self._clear(path)
        path.symlink_to(self.rng.choice((self.outside / "secret", self.outside / "new", Path("../../outside/secret"))))

    def do_link_to_directory(self, path: Path) -> None:
        self._clear(path)
        path.symlink_to(
            self.rng.choice((self.outside, self.outside / "tree", Path(".."), Path("."), Path("/proc/self/fd")))
        )

    def do_link_to_itself(self, path: Path) -> None:
        self._clear(path)
        path.symlink_to(path.name)

    def do_hard_link(self, path: Path) -> None:
        self._clear(path)
        os.link(self.outside / "linked", path)

    def do_pipe(self, path: Path) -> None:
        self._clear(path)
        os.mkfifo(path)

    def do_socket(self, path: Path) -> None:
        self._clear(path)
        if len(self.held) < 8:
            self.held.append(socket.socket(socket.AF_UNIX))
            self.held[-1].bind(str(path))

    def do_device(self, path: Path) -> None:
        self._clear(path)
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(5, 0))  # /dev/tty: opening it without care takes a terminal

    def do_directory(self, path: Path) -> None:
        self._clear(path)
        path.mkdir()
        if self.rng.random() < 0.5:
            (path / "inside").mkdir()
            (path / "inside" / "out").symlink_to(self.outside / "tree")

    def do_file(self, path: Path) -> None:
        self._clear(path)
        path.write_bytes(self.rng.randbytes(self.rng.choice((0, 1, 100, 5000))))

    def do_copy(self, path: Path) -> None:
        """Show another document in this place."""
        other = self.root / self.rng.choice(PATHS)
        if other.is_file() and not other.is_symlink() and self._is_inside(other):
            data = other.read_bytes()
            self._clear(path)
            path.write_bytes(data)

    def do_tamper(self, path: Path) -> None:
        """Flip a bit of a file; its size and its place stay."""
        if self._is_own_file(path) and (data := bytearray(path.read_bytes())):
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            path.write_bytes(data)

    def do_truncate(self, path: Path) -> None:
        if self._is_own_file(path):
            os.truncate(path, self.rng.randrange(1 + path.stat().st_size))

    def do_append(self, path: Path) -> None:
        if self._is_own_file(path):
            with path.open("ab") as file:
                file.write(self.rng.choice((b"\n", b"{}\n", b"x", b"\0" * 100)))

    def do_remove(self, path: Path) -> None:
        self._clear(path)

    def do_rename(self, path: Path) -> None:
        other = self.root / self.rng.choice(PATHS)
        if self._is_inside(other):
            os.rename(path, other)

    def do_take_permissions(self, path: Path) -> None:
        if not path.is_symlink() and (path.is_dir() or self._is_own_file(path)):
            path.chmod(self.rng.choice((0, 0o400, 0o500, 0o200, 0o777, 0o1777)))

    def do_time(self, path: Path) -> None:
        if not path.is_symlink() and (path.is_dir() or self._is_own_file(path)):
            moment = self.rng.choice((0, 1, 2**31 - 1, 2**33, -1))
            os.utime(path, (moment, moment))

    def do_name(self, path: Path) -> None:
        self._clear(path)
        path.mkdir()
        (path / os.fsdecode(b"\xff\xfe\n\x1b[31m$(id).json")).write_bytes(b"{}")

    @staticmethod
    def _is_own_file(path: Path) -> bool:
        found = os.lstat(path)
        return stat.S_ISREG(found.st_mode) and found.st_nlink == 1


@contextlib.contextmanager
def little_room(little: bool) -> Iterator[None]:
    """Limit files, the private ones included, to a few bytes, as on a full disk."""
    if not little:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def racing(root: Path, on: bool, seed: int) -> Iterator[None]:
    """Let a second thread swap directories and links, by single calls that follow no link themselves."""
    if not on:
        yield
        return
    over, rng = threading.Event(), random.Random(seed + 1)
    here = os.open(root, os.O_RDONLY | os.O_DIRECTORY)

    def race() -> None:
        while not over.wait(0.0002):
            one, other = rng.choice(NAMES), rng.choice((*NAMES, "aside", "beside"))
            with contextlib.suppress(OSError):
                if rng.random() < 0.5:
                    os.rename(*rng.sample((one, other), 2), src_dir_fd=here, dst_dir_fd=here)
                else:
                    os.symlink(rng.choice(("../outside", "../outside/tree", "../outside/secret")), one, dir_fd=here)
            with contextlib.suppress(OSError):
                if rng.random() < 0.2:
                    os.unlink(other, dir_fd=here)

    thread = threading.Thread(target=race)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        os.close(here)


@contextlib.contextmanager
def as_user(user: int | None) -> Iterator[None]:
    """Run with the permissions of another user, which needs root."""
    if user is None:
        yield
        return
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(user)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
