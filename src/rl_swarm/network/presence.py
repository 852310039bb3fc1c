"""Allows one node per identity, and one `up` per folder: two with one key would write over each other's files.

On one machine a lock does it. The kernel frees it when the process dies, so a node that is started again at once is not
refused. Between machines there is only the folder, clocks differ and drives sync late. So a node elsewhere is running
if its heartbeat changes while this one looks, and only a fresh heartbeat is waited for.
"""

import contextlib
import errno
import json
import logging
import os
import platform
import shlex
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_swarm.errors import UserError
from rl_swarm.network.documents import PEERS, RECORD_BYTES, DocumentStore
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.rounds import PeerInfo
from rl_swarm.protocol.wire import Rejected, canonical, digest, unseal

log = logging.getLogger(__name__)

LOCK_SECONDS = 2.0  # that a process which was just killed may take to vanish
LOOK_SECONDS = 1.0  # between looks at another process's heartbeat


class TwinError(UserError):
    """Reports another running node with this identity; the message says where, and what to do."""


def twin_error(identity: Identity, who: str) -> TwinError:
    return TwinError(
        f"The identity {identity.peer_id} ({identity.name}) is already at work in this swarm: {who}. Stop that node, "
        "or give this one an identity of its own: IDENTITY_PATH=another-file.pem (made when it is not there)."
    )


@contextmanager
def only_one_here(identity: Identity, swarm: str) -> Iterator[None]:
    """Hold this machine's lock on an identity in a swarm; raise `TwinError` if another process has it."""
    with _held([swarm, identity.peer_id], "this node's identity") as holder:
        if holder:
            raise twin_error(identity, holder)
        yield


@contextmanager
def only_run_here(root: Path) -> Iterator[None]:
    """Hold this machine's lock on the folder of a run; raise `UserError` if another `up` runs there."""
    with _held(["run", str(root.resolve())], f"the run in {root}") as holder:
        if holder:
            raise UserError(
                f"{root} is running already: {holder}. Stop it first (Ctrl-C there), or start another run with "
                f"another --run. `rl-swarm watch {shlex.quote(str(root))}` shows it."
            )
        yield


@contextmanager
def _held(key: list[str], what: str) -> Iterator[str]:
    """Hold a lock of this machine and yield an empty text; if another process has it, yield where that runs."""
    from filelock import FileLock, Timeout

    folder = Path(tempfile.gettempdir()) / f"rl-swarm-{os.getuid()}"
    path = folder / f"{digest(canonical(key))[:32]}.lock"
    lock = FileLock(path, LOCK_SECONDS, 0o600, thread_local=False, on_acquired=_sign)
    with contextlib.ExitStack() as held:
        holder = ""
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.lstat().st_uid != os.getuid():
                raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))
            held.enter_context(lock)
            held.callback(path.unlink, missing_ok=True)
        except Timeout:
            holder = _holder(path)
        except OSError as error:  # a node without it is better than none
            log.warning("no lock keeps other processes of this machine from %s: %s", what, error)
        yield holder


def _sign(lock: int) -> None:
    """Write this process into its lock."""
    holder = {"host": platform.node(), "pid": os.getpid(), "since": time.time()}
    os.truncate(lock, 0)
    os.write(lock, json.dumps(holder).encode())


def _holder(path: Path) -> str:
    try:
        held = json.loads(path.read_bytes()[:1024])
        return _where(str(held["host"]), int(held["pid"]), float(held["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return "in another process on this machine"


def _where(host: str, pid: int, since: float) -> str:
    shown = "".join(letter for letter in host if letter.isprintable())
    return f"on {shown}, process {pid}, since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(since))}"


class Watch:
    """Looks for heartbeats of another process under this identity."""

    def __init__(self, store: DocumentStore, node: str, identity: Identity, swarm: str) -> None:
        self.store, self.node, self.identity, self.swarm = store, node, identity, swarm
        self.other: PeerInfo | None = None  # the newest introduction of another process
        self.signs = 0  # heartbeats of it since the first look
        self.look()
        self.signs = 0

    def look(self) -> PeerInfo | None:
        """Return the introduction of another process, if there is a new one since the last look."""
        found = self._read()
        if found is None or (found.host, found.pid) == (platform.node(), os.getpid()):
            return None
        if self.other is not None and found.timestamp <= self.other.timestamp:
            return None
        self.other = found
        self.signs += 1
        return found

    def wait(self, peer_timeout: float, stop: threading.Event) -> None:
        """Raise `TwinError` if a node elsewhere is running; wait only where a fresh heartbeat was seen."""
        deadline = time.monotonic() + peer_timeout / 2  # two heartbeats
        while True:
            known, twin = self.other, self.look()
            if known is not None and twin is not None:
                raise self.error(twin)
            other = self.other
            if other is None or other.host == platform.node() or time.monotonic() >= deadline:
                return
            if abs(time.time() - other.timestamp) > peer_timeout:
                return
            if stop.wait(min(LOOK_SECONDS, peer_timeout / 16)):
                return

    def must_yield(self, ours: PeerInfo) -> bool:
        """Tell whether another process is running and was first. A single late heartbeat may be a dead node's."""
        twin = self.look()
        if twin is None or self.signs < 2:
            return False
        first = (twin.joined, twin.host, twin.pid) < (ours.joined, ours.host, ours.pid)
        if not first:
            log.warning("another node has joined with this node's identity: %s", self.error(twin))
        return first

    def error(self, twin: PeerInfo | None = None) -> TwinError:
        twin = twin or self.other
        assert twin is not None
        return twin_error(self.identity, _where(twin.host, twin.pid, twin.joined))

    def _read(self) -> PeerInfo | None:
        try:
            data = self.store.read(PEERS.of(self.node), RECORD_BYTES)
            peer = unseal(data, PeerInfo, RECORD_BYTES)
        except (OSError, Rejected):
            return None
        return peer if (peer.peer_id, peer.swarm) == (self.identity.peer_id, self.swarm) else None
