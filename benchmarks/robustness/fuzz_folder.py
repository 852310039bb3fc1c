"""Fuzzes the folder: its file layer, logs, checkpoints and documents, while files are replaced and system calls fail.

A case is a node, a coordinator and an attacker in one folder, as root or as an ordinary user. The attacker strikes
between operations, and between the single system calls of one operation, so that every race can be replayed. In some
cases a second thread renames as well. Calls fail with a full disk, an input error and others, and read or write short.
A case fails when

- anything outside of the folder is changed or read;
- a call waits, or raises an error that callers do not expect;
- a private file is not whole;
- a reader believes text that the node did not write.
"""

import contextlib
import errno
import hashlib
import logging
import os
import random
import secrets
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from benchmarks.lib.paths import MANIFEST
from benchmarks.robustness.fuzz_folder_attacker import (
    NAMES,
    PATHS,
    FaultyOs,
    FolderAttacker,
    as_user,
    little_room,
    racing,
)
from benchmarks.robustness.fuzz_records import ALICE, OWNER, RECORDS, REPORT, SWARM
from benchmarks.robustness.fuzz_target import MEBIBYTE, Case, Harm, Target
from rl_swarm.config.settings import Settings
from rl_swarm.errors import UserError
from rl_swarm.learning import checkpoints
from rl_swarm.learning.checkpoints import CheckpointError, Checkpoints, Place
from rl_swarm.network import retries
from rl_swarm.network.coordinator import DocumentCoordinator
from rl_swarm.network.exchange import DocumentExchange
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.round_server import RoundServer
from rl_swarm.protocol.rounds import PeerInfo
from rl_swarm.protocol.wire import Rejected, seal
from rl_swarm.storage.files import LocalFiles
from rl_swarm.storage.shared_log import SharedLog

log = logging.getLogger("rl_swarm")
log.propagate = False
NOBODY = 65534
SECRET = b"CANARY: nobody may read this through the folder"
LINKED = b"LINKED: this file has another name in the folder"
EXPECTED = (OSError, Rejected, UserError)
ODD_PATHS = ("", ".", "..", "../outside/secret", "x/../../outside", "/etc/passwd", "a\0b", "x//y", "n" * 300, "é/ü")
OPEN_SWARM = msgspec.structs.replace(SWARM, admission="open", peer_timeout=0.05, round_interval=0.05, rounds=50)
PUBLICATION = msgspec.structs.replace(RECORDS["publication"], swarm=OPEN_SWARM.swarm())


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

    system: FaultyOs

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
        self.stop.set()  # a waiting call tries twice
        self.files = LocalFiles(self.root)
        self.store = FolderStore(self.files)
        self.files.write(MANIFEST, seal(OPEN_SWARM, OWNER))
        self.log = SharedLog(
            self.private / "log" / "metrics.jsonl", self.files, "logs/alice/metrics.jsonl", lambda: 1e9
        )
        self.lines: list[bytes] = []
        self.saved = Checkpoints(self.private / "checkpoints", ALICE, "alice", self.files)
        self.places: dict[int, list[dict[str, tuple[int, str]]]] = {}  # by round, what was to be saved
        self.exchange = DocumentExchange(self.store, OPEN_SWARM, ALICE, "alice", self.stop, lambda *said: None, 0.01)
        self.coordinator = DocumentCoordinator(self.store, OPEN_SWARM, ALICE, "alice", self.stop)
        self.settings = Settings.of(private_path=str(self.private), poll_interval=0.01, min_peers=1)
        self.round_server: RoundServer | None = None
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
        self.log = SharedLog(self.log.private, self.files, "logs/alice/metrics.jsonl", lambda: 1e9)

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
                raise Harm("an unsigned publication was accepted")

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
            raise Harm("a state without the signature of the owner was accepted")

    def do_conduct(self) -> None:
        if self.round_server is None or self.rng.random() < 0.2:
            self.round_server = RoundServer(
                self.store, OPEN_SWARM, OWNER, self.settings.network, self.settings.storage, self.stop
            )
            if self.round_server.state.phase != "finished" and self.round_server.state.round < self.round:
                raise Harm(f"the coordinator went back from round {self.round} to {self.round_server.state.round}")
        self.round_server.step(time.time())
        self.round = max(self.round, self.round_server.state.round)

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
        retries.FIRST_PAUSE = 0.001
        self.place = Path(tempfile.mkdtemp(prefix="rl-swarm-fuzz-"))
        self.place.chmod(0o755)

    def close(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)

    def next(self) -> Case:
        rng = self.rng
        races = rng.random() < 0.1  # then no other attack runs: those look before they act
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
        if sys.platform == "linux" and len(os.listdir("/proc/self/fd")) > descriptors:
            raise Harm("files stay open")
        return {f"{case['user']}: {label}" for label in reached}

    def _played(self, base: Path, rng: random.Random, case: Case) -> set[str]:
        scene = Scene(base, rng)
        enemy = FolderAttacker(scene.root, scene.outside, rng)
        scene.system = system = FaultyOs(rng, enemy.strike, case["faults"], case["strikes"])
        operations = [name for name in dir(scene) if name.startswith("do_")]
        operations += ["do_save", "do_resume_elsewhere"]  # more often than the rest: it takes several steps
        reached: set[str] = set()
        try:
            with system.below(case["openat2"]), racing(scene.root, case["racing"], case["seed"]):
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
