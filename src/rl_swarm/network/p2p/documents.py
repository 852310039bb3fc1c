"""A swarm's documents among peers: the layout of a folder swarm, without the folder.

A peer keeps what it writes, on its own disk, and hands it to whoever asks. In the DHT it leaves a signed notice of it:
where, how large, its digest; documents that are no larger than a notice travel inside. So those who know whom they
want something from ask that peer, and traffic follows what is asked for; the DHT tells who there is.
"""

import hashlib
import ipaddress
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rl_swarm.identity import Identity
from rl_swarm.network.files import LocalFiles
from rl_swarm.network.folder import HISTORY, MANIFEST, ROLL, SAFE_NAME, STATE
from rl_swarm.network.p2p.engine import Engine
from rl_swarm.rounds import State
from rl_swarm.wire import MAX_BYTES, Count, Id, Rejected, seal, unseal

log = logging.getLogger(__name__)

OWNERS = {MANIFEST, ROLL, STATE, HISTORY}  # which only the owner writes, and everybody hands on
OF_A_ROUND = ("rollouts/", "rewards/")
MOST_OF_ROUNDS = 400  # documents of single rounds that a peer hands out: as far back as anybody asks
MOST_INSIDE = 2 << 10  # bytes of a document that travels in its notice
MOST_NOTICE = 6 << 10
KEPT_SECONDS = 600.0  # in the DHT, and renewed before that
EARLIEST, LATEST = 3600.0, 60.0  # seconds by which the clock of a notice's author may differ
MOST_OF_ONE, MOST_BYTES = (
    1500,
    64 << 20,
)  # notices of one author, and bytes of all of them, that a peer keeps for others
KNOWN_SECONDS = 0.2  # for which an answer of the DHT is good enough to find somebody's name in


class Notice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A document that its author keeps."""

    peer_id: Id = ""
    kind: Literal["notice"] = "notice"
    swarm: Id
    path: Annotated[str, Meta(max_length=200)]
    sha256: Annotated[str, Meta(max_length=64)]
    size: Count
    timestamp: float
    inside: Annotated[str, Meta(max_length=MOST_INSIDE)] = ""
    # Where its author can be reached, on introductions and manifests.
    addresses: Annotated[list[Annotated[str, Meta(max_length=200)]], Meta(max_length=8)] = []

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def key(self) -> str:
        return key_of(self.swarm, self.folder)

    def subkey(self) -> str:
        return f"{self.peer_id}/{self.name}"


def key_of(swarm: str, folder: str) -> str:
    """Where notices of a folder are. Those of manifests are where somebody finds them who knows no swarm yet."""
    return f"rl-swarm/{swarm}/{folder}" if folder else "rl-swarm/manifests"


def acceptable(key: str | None, subkey: str, value: bytes, now: float) -> Notice | None:
    """The notice in a record, if it is one: signed by whom it is of, where it belongs, of now."""
    try:
        notice = unseal(value, Notice, MOST_NOTICE)
    except Rejected as error:
        log.debug("a record is refused: %s", error)
        return None
    if notice.subkey() != subkey or key not in (None, notice.key()):
        return None
    return notice if now - EARLIEST <= notice.timestamp <= now + LATEST else None


def neighbourhood(address: str) -> str:
    """The part of the internet that a multiaddress is in; nothing for one of a private network or through a relay."""
    kind, _, rest = address.lstrip("/").partition("/")
    host = rest.partition("/")[0]
    if kind not in ("ip4", "ip6") or "/p2p-circuit" in address:
        return ""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return ""
    if not found.is_global:
        return ""
    return str(ipaddress.ip_network(f"{found}/{24 if found.version == 4 else 48}", strict=False))


class Shelf:
    """What strangers may keep in our part of the DHT: notices that are theirs, and no more than their share."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.kept = dict[str, dict[tuple[bytes, bytes], tuple[float, int]]]()  # by author: expiry and size
        self.bytes = 0

    def accepts(self, key: bytes, subkey: bytes, value: bytes, expires: float) -> bool:
        """Whether a record may lie here. hivemind hashes keys and packs the rest."""
        from hivemind.dht.routing import DHTID
        from hivemind.utils import MSGPackSerializer

        now = self.clock()
        if len(value) > MOST_NOTICE + 8 or len(subkey) > 200 or expires > now + KEPT_SECONDS + LATEST:
            return False
        try:
            name, data = MSGPackSerializer.loads(subkey), MSGPackSerializer.loads(value)
        except Exception:  # noqa: BLE001 whatever a stranger's bytes do to it
            return False
        if not isinstance(name, str) or not isinstance(data, bytes):
            return False
        notice = acceptable(None, name, data, now)
        if notice is None or DHTID.generate(source=notice.key()).to_bytes() != key:
            return False
        return self._has_room(notice.peer_id, (key, subkey), len(value), expires, now)

    def _has_room(
        self, author: str, place: tuple[bytes, bytes], size: int, expires: float, now: float
    ) -> bool:
        theirs = self.kept.setdefault(author, {})
        if place not in theirs and (len(theirs) >= MOST_OF_ONE or self.bytes + size > MOST_BYTES):
            self._tidy(now)
            theirs = self.kept.setdefault(author, {})
            if len(theirs) >= MOST_OF_ONE or self.bytes + size > MOST_BYTES:
                return False
        self.bytes += size - theirs.get(place, (0.0, 0))[1]
        theirs[place] = (expires, size)
        return True

    def _tidy(self, now: float) -> None:
        self.kept = {
            author: left
            for author, theirs in self.kept.items()
            if (left := {place: entry for place, entry in theirs.items() if entry[0] > now})
        }
        self.bytes = sum(size for theirs in self.kept.values() for _, size in theirs.values())


class PeerFiles:
    """The `Files` of one peer of a swarm."""

    def __init__(
        self,
        engine: Engine,
        swarm: str,
        owner: str,
        identity: Identity,
        local: LocalFiles,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.engine, self.swarm, self.owner, self.identity = engine, swarm, owner, identity
        self.local, self.clock = local, clock
        self.root = local.root
        self.own = set[str]()  # paths of what this peer has written
        self.lasting = set[str]()  # paths of which there must always be a notice
        self.handed = dict[str, bytes]()  # copies of what the owner wrote
        self.authors = dict[str, str]()  # of a node's documents, by the node's name
        self.inside = dict[str, tuple[str, bytes]]()  # author and document, by path
        self._of_rounds = deque[str]()  # its documents of single rounds, the oldest first
        self._listed = dict[str, float]()  # folders -> when they were last looked at
        self._lock = threading.Lock()

    def read(self, path: str, limit: int) -> bytes:
        me = self.identity.peer_id
        if path in self.own or (path in OWNERS and me == self.owner):
            return self.local.read(path, limit)
        if path in OWNERS:
            return self._owners(path, limit)
        author = self._author(path)
        if author == me:  # from before this process began
            return self.local.read(path, limit)
        with self._lock:
            inside = self.inside.get(path)
        if inside is not None and inside[0] == author:
            return inside[1][: limit + 1]
        return self._asked([author] if author else [], path, limit)

    def write(self, path: str, data: bytes) -> None:
        self.local.write(path, data)
        self._announce(path, data)

    def append(self, path: str, data: bytes) -> None:
        self.local.append(path, data)
        self._announce(path, self.local.read(path, MAX_BYTES))

    def names(self, folder: str) -> list[str]:
        """Those of which there are notices; of rollouts, which nobody lists, this peer's own."""
        if folder.startswith("rollouts"):
            return self.local.names(folder)
        return sorted({notice.name for notice in self._notices(folder)})

    def introductions(self) -> list[tuple[str, bytes]]:
        """Author and document of everybody who says to be here."""
        try:
            found = self._notices("peers")
        except OSError as error:  # alone for now
            log.debug("nobody can be found: %s", error)
            return []
        return [(notice.peer_id, notice.inside.encode()) for notice in found]

    def neighbourhoods(self) -> dict[str, str]:
        """Of those to whom there is a connection: where they are."""
        try:
            addresses = self.engine.peers()
        except OSError:
            return {}
        return {
            address.rpartition("/")[2]: where for address in addresses if (where := neighbourhood(address))
        }

    def remove(self, folder: str) -> None:
        self._forget(folder)
        self.local.remove(folder)

    def move(self, folder: str, target: str) -> None:
        self._forget(folder)
        self.local.move(folder, target)

    def answer(self, request: bytes, peer_id: str) -> bytes | None:
        """What a peer asks for by its path, if it is ours or the owner's."""
        try:
            path = request.decode("ascii")
        except UnicodeDecodeError:
            return None
        if path in self.own or (path in OWNERS and self.identity.peer_id == self.owner):
            try:
                return self.local.read(path, MAX_BYTES)
            except OSError:
                return None
        return self.handed.get(path)

    def hand_on(self, path: str, data: bytes) -> None:
        """Others may have this of us too, so that its author is not needed."""
        self.handed[path] = data
        self._leave(path, data)

    def renew(self) -> None:
        """Leaves notices again before they expire; those of a round's documents need not outlast it."""
        for path in list(self.lasting):
            with suppress(OSError):
                data = self.local.read(path, MAX_BYTES) if path in self.own else self.handed[path]
                self._leave(path, data)

    def _announce(self, path: str, data: bytes) -> None:
        self.own.add(path)
        if path.startswith(OF_A_ROUND):
            self._of_rounds.append(path)
            while len(self._of_rounds) > MOST_OF_ROUNDS:
                self.own.discard(self._of_rounds.popleft())
        self._leave(path, data)

    def _leave(self, path: str, data: bytes) -> None:
        small = len(data) <= MOST_INSIDE and data.isascii()
        notice = Notice(
            swarm=self.swarm,
            path=path,
            sha256=hashlib.sha256(data).hexdigest(),
            size=len(data),
            timestamp=self.clock(),
            inside=data.decode("ascii") if small else "",
            addresses=list(self.engine.addresses)[:8]
            if path == MANIFEST or path.startswith("peers/")
            else [],
        )
        folder, _, name = path.rpartition("/")
        if not path.startswith(OF_A_ROUND):
            self.lasting.add(path)
        sealed = seal(notice, self.identity, limit=MOST_NOTICE)
        try:
            self.engine.store(
                key_of(self.swarm, folder), f"{self.identity.peer_id}/{name}", sealed, KEPT_SECONDS
            )
        except OSError as error:  # whoever asks this peer gets the document all the same
            log.debug("no notice of %s could be left: %s", path, error)

    def _notices(self, folder: str) -> list[Notice]:
        found = []
        now = self.clock()
        for subkey, value in self.engine.find(key_of(self.swarm, folder)).items():
            notice = acceptable(key_of(self.swarm, folder), subkey, value, now)
            if notice is not None and notice.swarm == self.swarm:
                found.append(notice)
        for notice in found:
            self.engine.introduce(notice.peer_id, notice.addresses)
        with self._lock:
            for notice in found:
                node = notice.name.removesuffix(".json")
                if SAFE_NAME.fullmatch(node):
                    self.authors.setdefault(node, notice.peer_id)
                if notice.inside:
                    self.inside[notice.path] = (notice.peer_id, notice.inside.encode())
            self._listed[folder] = time.monotonic()
        return found

    def _owners(self, path: str, limit: int) -> bytes:
        """Of the owner, or of anybody who has it if the owner is not there."""
        try:
            data = self._asked([self.owner], path, limit)
        except FileNotFoundError:
            raise
        except OSError:
            data = self._asked(self._others(), path, limit)
        self.handed[path] = data
        if path == STATE:
            self._know(data)
        return data

    def _know(self, data: bytes) -> None:
        """Who the members are, by the state."""
        try:
            state = unseal(data, State)
        except Rejected:
            return
        if state.peer_id == self.owner:
            self.authors |= {member.node: peer_id for peer_id, member in state.members.items()}

    def _author(self, path: str) -> str | None:
        """Whose this document is: the member's whom the coordinator knows by its name, else of whoever came first."""
        folder, _, name = path.rpartition("/")
        node = name.removesuffix(".json")
        for place in ("peers", folder):
            if node not in self.authors and self._is_stale(place):
                self._notices(place)
        return self.authors.get(node)

    def _is_stale(self, folder: str) -> bool:
        return time.monotonic() - self._listed.get(folder, -math.inf) > KNOWN_SECONDS

    def _others(self) -> list[str]:
        return [peer for peer in dict.fromkeys(self.authors.values()) if peer != self.identity.peer_id][:8]

    def _asked(self, peers: Iterable[str], path: str, limit: int) -> bytes:
        error: OSError = FileNotFoundError(path)
        for peer in peers:
            try:
                data = self.engine.ask(peer, path.encode("ascii"), limit)
            except OSError as failure:
                error = failure
                continue
            if data is not None:
                return data
            error = FileNotFoundError(path)
        raise error

    def _forget(self, folder: str) -> None:
        for path in [path for path in self.own if path.startswith(f"{folder}/")]:
            self.own.discard(path)
            self.lasting.discard(path)
