"""Fuzzes the folder: its file layer, logs, checkpoints and documents, while files are replaced and system calls fail.

A case is a node, a coordinator and an enemy in one folder, as root or as an ordinary user. The enemy strikes between
operations and between the single calls to the system of one operation, so that every race can be played again; in some
cases a second thread renames as well. Calls fail with a full disk, an input error and others, and read or write short.
It fails when anything beside the folder is changed or read, when a call waits, when a private file is not whole, when
something is believed that the node did not write, or when an error is none that callers expect.
"""

import contextlib
import errno
import hashlib
import logging
import os
import random
import resource
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from benchmarks.robustness.fuzz_messages import ALICE, OWNER, RECORDS, REPORT, SWARM
from benchmarks.robustness.fuzz_target import MEBIBYTE, Case, Harm, Target
from rl_swarm.errors import UserError
from rl_swarm.learning import checkpoints
from rl_swarm.learning.checkpoints import CheckpointError, Checkpoints, Place
from rl_swarm.network import folder
from rl_swarm.network import round_server as conductor
from rl_swarm.network.folder import MANIFEST, FolderCoordinator, FolderExchange
from rl_swarm.network.round_server import RoundServer
from rl_swarm.protocol.rounds import PeerInfo
from rl_swarm.protocol.wire import Rejected, seal
from rl_swarm.settings import Settings
from rl_swarm.storage import beneath, files, shared_log
from rl_swarm.storage.files import LocalFiles
from rl_swarm.storage.shared_log import SharedLog

log = logging.getLogger("rl_swarm")
log.propagate = False
NOBODY = 65534
SECRET = b"CANARY: nobody may read this through the folder"
LINKED = b"LINKED: this file has another name in the folder"
FAULTS = (
    errno.ENOSPC,
    errno.EIO,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.ESTALE,
    errno.EMFILE,
    errno.EINTR,
)
EXPECTED = (OSError, Rejected, UserError)
CALLS = (
    "open",
    "read",
    "write",
    "replace",
    "rename",
    "mkdir",
    "unlink",
    "rmdir",
    "scandir",
    "fstat",
    "lseek",
    "chmod",
)
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
ODD_PATHS = (
    "",
    ".",
    "..",
    "../outside/secret",
    "x/../../outside",
    "/etc/passwd",
    "a\0b",
    "x//y",
    "n" * 300,
    "é/ü",
)
OPEN_SWARM = msgspec.structs.replace(SWARM, admission="open", peer_timeout=0.05, round_interval=0.05, rounds=50)
PUBLICATION = msgspec.structs.replace(RECORDS["publication"], swarm=OPEN_SWARM.swarm())


class Faulty:
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


class Enemy:
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
        """Return whether no part of the path is a link: the enemy has no power beyond the folder."""
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


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return modes and contents of all files in a directory."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = os.lstat(path)
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[str(path)] = (status.st_mode, content)
    return found


class Listener(logging.Handler):
    """Notices when a stranger's text enters a log unaltered."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = ""

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        if any(sign in said for sign in ("$(", "`", "\x1b", "\n")):
            self.heard = self.heard or said


class Scene:
    """Holds a folder with all its users, and what they believe."""

    system: Faulty

    def __init__(self, base: Path, rng: random.Random) -> None:
        self.rng, self.base = rng, base
        self.root, self.outside, self.private = base / "swarm", base / "outside", base / "private"
        (self.outside / "tree" / "branch").mkdir(parents=True)
        (self.outside / "secret").write_bytes(SECRET)
        (self.outside / "tree" / "branch" / "leaf").write_bytes(SECRET)
        (self.outside / "linked").write_bytes(LINKED)
        self.root.mkdir()
        self.private.mkdir(mode=0o700)
        self.before = snapshot(self.outside)
        self.stop = threading.Event()
        self.stop.set()  # whoever waits for something tries twice
        self.files = LocalFiles(self.root)
        self.files.write(MANIFEST, seal(OPEN_SWARM, OWNER))
        self.log = SharedLog(
            self.private / "log" / "metrics.jsonl", self.files, "logs/alice/metrics.jsonl", lambda: 1e9
        )
        self.lines: list[bytes] = []
        self.saved = Checkpoints(self.private / "checkpoints", ALICE, "alice", self.files)
        self.places: dict[int, list[dict[str, tuple[int, str]]]] = {}  # by round, what was to be saved
        self.exchange = FolderExchange(self.files, OPEN_SWARM, ALICE, "alice", self.stop, lambda *said: None, 0.01)
        self.coordinator = FolderCoordinator(self.files, OPEN_SWARM, ALICE, "alice", self.stop)
        self.settings = Settings(private_path=str(self.private), poll_interval=0.01, min_peers=1)
        self.conductor: RoundServer | None = None
        self.round = 0

    def do_write(self) -> None:
        self.files.write(self._path(), self.rng.randbytes(self.rng.choice((0, 10, 3000))))

    def do_read(self) -> None:
        self._not_secret(self.files.read(self._path(), 1 << 16))

    def do_append(self) -> None:
        self.files.append(self._path(), b"line\n", self.rng.choice((None, None, 0, 5)))

    def do_list(self) -> None:
        for name in self.files.names(self._path()):
            if name in ("secret", "branch"):
                raise Harm("a directory beside the folder was listed")

    def do_look(self) -> None:
        self.files.stat(self._path())
        self.files.has_folder(self._path())

    def do_remove(self) -> None:
        self.rng.choice((self.files.remove, self.files.remove_if_empty))(self._path() or "x")

    def do_move(self) -> None:
        self.files.move(self._path(), self._path())

    def do_below(self) -> None:
        self._not_secret(self.files.below(self.rng.choice(NAMES)).read("secret", 1 << 16))

    def do_log(self) -> None:
        line = b'{"n":%d}\n' % self.rng.getrandbits(30)
        self.log.append(line)
        self.lines.append(line)

    def do_copy_log(self) -> None:
        self.log.copy()

    def do_log_again(self) -> None:
        self.log = SharedLog(self.log.private, self.files, self.log.path, lambda: 1e9)

    def do_save(self) -> None:
        number = self.rng.randrange(1, 4)
        contents = {
            name: self.rng.randbytes(self.rng.choice((0, 10, 5000))) for name in ("model.bin", "more/config.json")
        }

        def save(into: Path) -> None:
            for name, data in contents.items():
                (into / name).parent.mkdir(exist_ok=True)
                (into / name).write_bytes(data)

        optimizer = SimpleNamespace(param_groups=[{"params": []}], state={})
        policy: Any = SimpleNamespace(save=save, trainer=SimpleNamespace(optimizer=optimizer))
        files = {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items()}
        self.places.setdefault(number, []).append(files)
        place = Place(OPEN_SWARM.swarm(), ALICE.peer_id, "tiny", number, 0, number)
        written = self.saved.save(policy, place)
        with self.system.striking(False):
            (found,) = (each for each in self.saved.written(place.swarm) if each.private == written)
            if self._is_whole(self.saved.fetch(found), found.place) != files:
                raise Harm("the private checkpoint is not the one that was saved last")

    def do_resume(self) -> None:
        for found in self.saved.written(OPEN_SWARM.swarm()):
            self._is_whole(self.saved.fetch(found), found.place)

    def do_resume_elsewhere(self) -> None:
        """Resume on a machine that has no private copy."""
        elsewhere = Checkpoints(self.private / f"other-{secrets.token_hex(4)}", ALICE, "alice", self.files)
        for found in elsewhere.written(OPEN_SWARM.swarm()):
            with contextlib.suppress(CheckpointError):
                self._is_whole(elsewhere.fetch(found), found.place)

    def do_publish(self) -> None:
        self.exchange._published = True
        self.exchange.publish(PUBLICATION)

    def do_collect(self) -> None:
        self.exchange._cache.clear()
        for found in self.exchange.collect(1, 0, ["alice", "bob", "../outside/secret"]):
            if found.peer_id != ALICE.peer_id or found.rollouts != PUBLICATION.rollouts:
                raise Harm("a publication was believed that nobody signed")

    def do_register(self) -> None:
        made = PeerInfo(
            peer_id=ALICE.peer_id, swarm=OPEN_SWARM.swarm(), node="alice", model="tiny", device="cpu", host="here",
            pid=1,
            joined=1.0, timestamp=time.time(),
        )  # fmt: skip
        self.coordinator.register(made)

    def do_report(self) -> None:
        report = msgspec.structs.replace(REPORT, swarm=OPEN_SWARM.swarm(), round=max(0, self.round))
        self.coordinator._reported.clear()
        self.coordinator.submit(report)

    def do_look_at_state(self) -> None:
        state = self.coordinator.current()
        if state.phase != "waiting" and state.peer_id != OWNER.peer_id:
            raise Harm("a state was believed that the owner did not sign")

    def do_conduct(self) -> None:
        if self.conductor is None or self.rng.random() < 0.2:
            self.conductor = RoundServer(self.files, OPEN_SWARM, OWNER, self.settings, self.stop)
            if self.conductor.state.phase != "finished" and self.conductor.state.round < self.round:
                raise Harm(f"the coordinator went back from round {self.round} to {self.conductor.state.round}")
        self.conductor.step(time.time())
        self.round = max(self.round, self.conductor.state.round)

    def _path(self) -> str:
        return self.rng.choice(ODD_PATHS if self.rng.random() < 0.05 else PATHS)

    def _not_secret(self, data: bytes) -> None:
        if SECRET[:8] in data:
            raise Harm("a file beside the folder was read")

    def _is_whole(self, found: Path, place: Place) -> dict[str, tuple[int, str]]:
        try:
            checkpoints.verify(found, place)
        except CheckpointError as error:
            raise Harm("a checkpoint is loaded that is not whole") from error
        here = {name: each for name, each in place.files.items() if name != "optimizer.safetensors"}
        if not found.is_relative_to(self.private) or here not in self.places[place.round]:
            raise Harm("a checkpoint is loaded from the folder, or is none that was saved")
        return here

    def check(self) -> None:
        """Raise unless everything outside of the folder is unchanged, and the private files are whole."""
        if snapshot(self.outside) != self.before:
            raise Harm("something beside the folder was changed")
        if set(os.listdir(self.base)) != {"swarm", "outside", "private"}:
            raise Harm(f"something was made beside the folder: {sorted(os.listdir(self.base))}")
        if self.log.private.exists() and self.log.private.read_bytes() != b"".join(self.lines):
            raise Harm("the private log is not what was written")


class Folder(Target):
    name = "folder"
    longest = 30.0
    growth = 32 * MEBIBYTE

    def open(self) -> None:
        folder.FIRST_PAUSE = conductor.FIRST_PAUSE = 0.001
        self.place = Path(tempfile.mkdtemp(prefix="rl-swarm-fuzz-"))
        self.place.chmod(0o755)

    def close(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)

    def next(self) -> Case:
        rng = self.rng
        races = rng.random() < 0.1  # then nobody else strikes: the others look before they act
        return {
            "seed": rng.getrandbits(48),
            "steps": rng.choice((3, 10, 30)),
            "user": rng.choice(("root", "nobody")) if os.geteuid() == 0 else "this",
            "faults": rng.choice((0.0, 0.0, 0.01, 0.1)),
            "strikes": 0.0 if races else rng.choice((0.0, 0.02, 0.1, 0.3)),
            "between": 0 if races else rng.choice((0, 1, 3)),
            "openat2": rng.random() < 0.7,
            "room": rng.random() < 0.9,
            "racing": races,
        }

    def play(self, case: Case) -> set[str]:
        base = self.place / f"{case['seed']:x}"
        base.mkdir()
        os.umask(0o022)
        ordinary = case["user"] == "nobody"
        if ordinary:
            os.chown(base, NOBODY, NOBODY)
        listener = Listener()
        log.addHandler(listener)
        descriptors = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
        with as_user(NOBODY if ordinary else None):
            reached = self._played(base, random.Random(case["seed"]), case)
        log.removeHandler(listener)
        shutil.rmtree(base)
        if listener.heard:
            raise Harm(f"text of a stranger is in the log: {listener.heard!a}")
        if sys.platform == "linux" and len(os.listdir("/proc/self/fd")) != descriptors:
            raise Harm("files stay open")
        return {f"{case['user']}: {label}" for label in reached}

    def _played(self, base: Path, rng: random.Random, case: Case) -> set[str]:
        scene = Scene(base, rng)
        enemy = Enemy(scene.root, scene.outside, rng)
        scene.system = system = Faulty(rng, enemy.strike, case["faults"], case["strikes"])
        operations = [name for name in dir(scene) if name.startswith("do_")]
        operations += ["do_save", "do_resume_elsewhere"]  # more often than the rest: it takes several steps
        reached: set[str] = set()
        try:
            with system.below(case["openat2"]), racing(scene, case):
                for _ in range(case["steps"]):
                    for _ in range(rng.randrange(case["between"] + 1)):
                        enemy.strike()
                    name = rng.choice(operations)
                    with little_room(not case["room"] and rng.random() < 0.3), system.striking():
                        reached.add(f"{name[3:]}: {outcome(getattr(scene, name))}")
                    scene.check()
        finally:
            enemy.close()
        return reached | system.reached | {f"enemy: {kind}" for kind in enemy.done}


def outcome(operation: Callable[[], None]) -> str:
    """Run an action; return the kind of error that ends it, if callers expect that kind."""
    try:
        operation()
    except EXPECTED as error:
        code = getattr(error, "errno", None)
        return f"{type(error).__name__} {errno.errorcode.get(code, '') if code else ''}".strip()
    return "done"


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
def racing(scene: Scene, case: Case) -> Iterator[None]:
    """Let a second thread swap directories and links, by single calls that follow no link themselves."""
    if not case["racing"]:
        yield
        return
    over, rng = threading.Event(), random.Random(case["seed"] + 1)
    here = os.open(scene.root, os.O_RDONLY | os.O_DIRECTORY)

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
