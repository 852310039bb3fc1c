"""A swarm's documents among peers: the layout of a folder swarm, without the folder.

A peer keeps what it writes, on its own disk, and hands it to whoever asks. In the DHT it leaves a signed notice of what
others have to find: where, how large, its digest; documents that are no larger than a notice travel inside. So those who
know whom they want something from ask that peer, and traffic follows what is asked for; the DHT tells who there is.
"""

import hashlib
import ipaddress
import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from rl_swarm.identity import Identity, is_peer_id
from rl_swarm.network.files import LocalFiles
from rl_swarm.network.folder import HISTORY, MANIFEST, ROLL, SAFE_NAME, STATE
from rl_swarm.network.p2p.engine import Engine
from rl_swarm.network.p2p.table import REPLICAS
from rl_swarm.rounds import State
from rl_swarm.wire import MAX_BYTES, Count, Id, Rejected, seal, unseal

if TYPE_CHECKING:
    from rl_swarm.network.p2p.members import Members

log = logging.getLogger(__name__)

OWNERS = {MANIFEST, ROLL, STATE, HISTORY}  # which only the owner writes, and everybody hands on
OF_A_ROUND = ("rollouts/", "rewards/")
MOST_OF_ROUNDS = 400  # documents of single rounds that a peer hands out: as far back as anybody asks
MOST_INSIDE = (
    3 << 10
)  # bytes of a document that travels in its notice: an introduction with RSA keys and a ticket
MOST_NOTICE = 6 << 10
KEPT_SECONDS = 600.0  # in the DHT, and renewed before that
EARLIEST, LATEST = 3600.0, 60.0  # seconds by which the clock of a notice's author may differ
MOST_OF_ONE = 1500  # notices of one author that a peer keeps for others
MOST_BYTES = 64 << 20  # of all of them
MOST_OF_KEY = 1 << 20  # bytes under one key: it is read whole, and hivemind's messages end at 2 MiB
KNOWN_SECONDS = 0.2  # for which an answer of the DHT is good enough to find somebody's name in
DEEPEST = 12  # bits of the smallest part of the introductions
MOST_NAMES = 4096  # that a peer keeps in mind with their authors
MOST_LISTED = 8  # folders of which the last listing is kept
HANDS = 16  # peers that leave notices of the manifest, and that ask the owner for news, on average
AWAY_SECONDS = 300.0  # for which an owner that could not be reached is not asked again


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
    # On introductions, how large a part of them its author reads (`members.py`).
    depth: Annotated[int, Meta(ge=0, le=DEEPEST)] = 0
    # Where its author can be reached, on introductions and manifests.
    addresses: Annotated[list[Annotated[str, Meta(max_length=200)]], Meta(max_length=8)] = []

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def where(self) -> list[str]:
        """The keys under which it may lie."""
        if self.folder == "peers":
            return [key_of(self.swarm, part) for part in parts_of(self.swarm, self.peer_id)]
        return [key_of(self.swarm, self.folder)]

    def subkey(self) -> str:
        return f"{self.peer_id}/{self.name}"


def key_of(swarm: str, folder: str) -> str:
    """Where notices of a folder are. Those of manifests are where somebody finds them who knows no swarm yet."""
    return f"rl-swarm/{swarm}/{folder}" if folder else "rl-swarm/manifests"


def parts_of(swarm: str, peer_id: str) -> list[str]:
    """The parts of the introductions to which a peer belongs, from the whole to the smallest. Nobody chooses them."""
    place = int.from_bytes(hashlib.sha256(f"{swarm}/{peer_id}".encode()).digest()[:4], "big")
    bits = f"{place:032b}"
    return ["peers", *(f"peers/{bits[:depth]}" for depth in range(1, DEEPEST + 1))]


def acceptable(key: str | None, subkey: str, value: bytes, now: float) -> Notice | None:
    """The notice in a record, if it is one: signed by whom it is of, where it belongs, of now."""
    try:
        notice = unseal(value, Notice, MOST_NOTICE)
    except Rejected as error:
        log.debug("a record is refused: %s", error)
        return None
    if notice.subkey() != subkey or (key is not None and key not in notice.where()):
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
        self.under = dict[bytes, int]()  # bytes by key

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
        if notice is None or all(DHTID.generate(source=own).to_bytes() != key for own in notice.where()):
            return False
        return self._has_room(notice.peer_id, (key, subkey), len(value), expires, now)

    def _has_room(
        self, author: str, place: tuple[bytes, bytes], size: int, expires: float, now: float
    ) -> bool:
        if not self._fits(author, place, size):
            self._tidy(now)
            if not self._fits(author, place, size):
                return False
        theirs = self.kept.setdefault(author, {})
        more = size - theirs.get(place, (0.0, 0))[1]
        self.bytes += more
        self.under[place[0]] = self.under.get(place[0], 0) + more
        theirs[place] = (expires, size)
        return True

    def _fits(self, author: str, place: tuple[bytes, bytes], size: int) -> bool:
        theirs = self.kept.get(author, {})
        return place in theirs or (
            len(theirs) < MOST_OF_ONE
            and self.bytes + size <= MOST_BYTES
            and self.under.get(place[0], 0) + size <= MOST_OF_KEY
        )

    def _tidy(self, now: float) -> None:
        self.kept = {
            author: left
            for author, theirs in self.kept.items()
            if (left := {place: entry for place, entry in theirs.items() if entry[0] > now})
        }
        self.under = {}
        for theirs in self.kept.values():
            for (key, _), (_, size) in theirs.items():
                self.under[key] = self.under.get(key, 0) + size
        self.bytes = sum(self.under.values())


class Signed(msgspec.Struct, frozen=True):
    """What is looked at in a document of the owner before it is handed on."""

    peer_id: Id
    number: Count = 0


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
        rng: random.Random | None = None,
    ) -> None:
        self.engine, self.swarm, self.owner, self.identity = engine, swarm, owner, identity
        self.local, self.clock, self.rng = local, clock, rng or random.Random()
        self.root = local.root
        self.members: Members | None = None  # where nobody conducts, who is here as far as this peer knows
        self.own = set[str]()  # paths of what this peer has written
        self.lasting = set[str]()  # paths of which there must always be a notice
        self.handed = dict[str, bytes]()  # copies of what the owner wrote
        self.authors = dict[str, str]()  # of a node's documents, by the node's name
        self._listed = dict[str, tuple[float, dict[str, Notice]]]()  # by folder: when, and what, by path
        self._left = dict[str, float]()  # when notices were last left, by path
        self._of_rounds = deque[str]()  # its documents of single rounds, the oldest first
        self._owner_away = -math.inf  # until when the owner is not asked
        self._lock = threading.Lock()

    def read(self, path: str, limit: int) -> bytes:
        me = self.identity.peer_id
        if path in self.own or (path in OWNERS and me == self.owner):
            data = self.local.read(path, limit)
            if path == STATE:
                self._know(data)
            return data
        if path == MANIFEST and path in self.handed:  # it never changes
            return self.handed[path][: limit + 1]
        if path in OWNERS:
            return self._owners(path, limit)
        author = self._author(path)
        if author == me:  # from before this process began
            return self.local.read(path, limit)
        folder, _, name = path.rpartition("/")
        if folder == "peers" and self.members is not None:
            return self.members.introduction(name.removesuffix(".json"))[: limit + 1]
        with self._lock:
            notice = self._listed.get(folder, (0.0, {}))[1].get(path)
        if notice is not None and notice.inside and notice.peer_id == author:
            return notice.inside.encode()[: limit + 1]
        return self._asked([author] if author else [], path, limit)

    def write(self, path: str, data: bytes) -> None:
        self.local.write(path, data)
        if path == STATE:
            self._know(data)
        self._announce(path, data)

    def append(self, path: str, data: bytes, at: int | None = None) -> None:
        self.local.append(path, data, at)
        self._announce(path, self.local.read(path, MAX_BYTES))

    def names(self, folder: str) -> list[str]:
        """Those of which there are notices; of rollouts, which nobody lists, this peer's own."""
        if folder.startswith("rollouts"):
            return self.local.names(folder)
        if folder == "peers" and self.members is not None:
            return [f"{peer_id}.json" for peer_id in sorted(self.members.known)]
        return sorted({notice.name for notice in self._list(folder)})

    def notices(self, folder: str) -> list[Notice]:
        """What lies in a folder or a part of the introductions, signed by whom it is of."""
        now, key = self.clock(), key_of(self.swarm, folder)
        found = (acceptable(key, subkey, value, now) for subkey, value in self.engine.find(key).items())
        return [notice for notice in found if notice is not None and notice.swarm == self.swarm]

    def neighbourhoods(self) -> dict[str, str]:
        """Where others are: those to whom there is a connection by what is seen of it, others by what they say."""
        known = self.members.known if self.members is not None else {}
        said = {peer_id: met.where for peer_id, met in known.items() if met.where}
        try:
            addresses = self.engine.peers()
        except OSError:
            return said
        return said | {
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
        self.lasting.add(path)

    def renew(self) -> None:
        """Leaves notices that are due; those of a round's documents need not outlast it. Of a manifest that others hand
        on some notices are enough, whatever the size of the swarm."""
        for path in list(self.lasting):
            if self.clock() - self._left.get(path, -math.inf) < KEPT_SECONDS / 3:
                continue
            if path in self.handed and not self._is_among(HANDS):
                continue
            with suppress(OSError):
                data = self.local.read(path, MAX_BYTES) if path in self.own else self.handed[path]
                self._leave(path, data)

    def _announce(self, path: str, data: bytes) -> None:
        self.own.add(path)
        if path.startswith(OF_A_ROUND):
            self._of_rounds.append(path)
            while len(self._of_rounds) > MOST_OF_ROUNDS:
                self.own.discard(self._of_rounds.popleft())
        else:
            self.lasting.add(path)
        # Rollouts are asked for by their author's name; reports are looked for by whoever conducts.
        if not path.startswith("rollouts/") and not (path.startswith("rewards/") and self.members):
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
            depth=self.members.depth if self.members is not None and path.startswith("peers/") else 0,
            addresses=list(self.engine.addresses)[:8]
            if path == MANIFEST or path.startswith("peers/")
            else [],
        )
        sealed = seal(notice, self.identity, limit=MOST_NOTICE)
        folder, _, name = path.rpartition("/")
        try:
            subkey = f"{self.identity.peer_id}/{name}"
            for part, seconds, copies in self._places(folder):
                self.engine.store(key_of(self.swarm, part), subkey, sealed, seconds, copies)
                self._left[path] = self.clock()
        except OSError as error:  # whoever asks this peer gets the document all the same
            log.debug("no notice of %s could be left: %s", path, error)

    def _places(self, folder: str) -> Iterator[tuple[str, float, int]]:
        if folder == "peers" and self.members is not None:
            yield from self.members.places()
        else:
            yield folder, KEPT_SECONDS, REPLICAS

    def _list(self, folder: str) -> Iterable[Notice]:
        found = self.notices(folder)
        for notice in found:
            self.engine.introduce(notice.peer_id, notice.addresses)
        with self._lock:
            listed = dict[str, Notice]()
            for notice in found:
                node = notice.name.removesuffix(".json")
                if SAFE_NAME.fullmatch(node) and len(self.authors) < MOST_NAMES:
                    self.authors.setdefault(node, notice.peer_id)
                if notice.path not in listed or notice.peer_id == self.authors.get(node):
                    listed[notice.path] = notice
            self._listed.pop(folder, None)
            self._listed[folder] = self.clock(), listed
            while len(self._listed) > MOST_LISTED:
                del self._listed[next(iter(self._listed))]
        return listed.values()

    def _owners(self, path: str, limit: int) -> bytes:
        """Of the owner, or of anybody who has it. In a large swarm without a conductor few ask the owner, and the others
        those who have asked."""
        ask_owner = self.clock() >= self._owner_away
        if self.members is not None and path != STATE:
            ask_owner &= self.rng.random() * self._size() < HANDS
        try:
            if not ask_owner:
                raise OSError("the owner is not asked")
            data = self._asked([self.owner], path, limit)
        except FileNotFoundError:
            raise
        except OSError:
            if ask_owner:
                self._owner_away = self.clock() + (AWAY_SECONDS if self.members is not None else 0.0)
            data = self._asked(self._others(), path, limit)
        self._keep(path, data)
        if path == STATE:
            self._know(data)
        return data

    def _keep(self, path: str, data: bytes) -> None:
        """To be handed on, if it is of the owner and nothing newer is there."""
        try:
            found = unseal(data, Signed)
            before = unseal(self.handed[path], Signed).number if path in self.handed else 0
        except Rejected:  # or a history, which only the owner hands out
            return
        if found.peer_id == self.owner and found.number >= before:
            self.handed[path] = data

    def _know(self, data: bytes) -> None:
        """Who the members are, by the state."""
        try:
            state = unseal(data, State)
        except Rejected:
            return
        if state.peer_id == self.owner:
            self.authors |= {member.node: peer_id for peer_id, member in state.members.items()}

    def _author(self, path: str) -> str | None:
        """Whose this document is: of the peer whose id is its name, else the member's whom the coordinator knows by that
        name, else of whoever came first."""
        folder, _, name = path.rpartition("/")
        node = name.removesuffix(".json")
        if is_peer_id(node):
            return node
        for place in ("peers", folder):
            if node not in self.authors and self.members is None and self._is_stale(place):
                self._list(place)
        return self.authors.get(node)

    def _is_stale(self, folder: str) -> bool:
        return self.clock() - self._listed.get(folder, (-math.inf, {}))[0] > KNOWN_SECONDS

    def _size(self) -> int:
        """How many peers there are, about."""
        return self.members.size if self.members is not None else len(self.authors)

    def _is_among(self, some: int) -> bool:
        """Whether this peer is one of so many of the swarm, about: always the same ones, and nobody chooses to be."""
        bits = parts_of(self.swarm, self.identity.peer_id)[-1].rpartition("/")[2]
        return int(bits, 2) * self._size() < some << DEEPEST

    def _others(self) -> list[str]:
        """Some whom it may ask for what everybody has; where nobody conducts, those who answered last, who are connected."""
        if self.members is not None:
            return self.members.latest(2)
        others = [peer for peer in dict.fromkeys(self.authors.values()) if peer != self.identity.peer_id]
        return self.rng.sample(others, min(len(others), 8))

    def _asked(self, peers: Iterable[str], path: str, limit: int) -> bytes:
        error: OSError = FileNotFoundError(path)
        for peer in peers:
            try:
                data = self.engine.ask(peer, path.encode("ascii"), limit)
            except OSError as failure:
                error = failure
                continue
            if self.members is not None:
                self.members.heard(peer)
            if data is not None:
                return data
            error = FileNotFoundError(path)
        raise error

    def _forget(self, folder: str) -> None:
        for path in [path for path in self.own if path.startswith(f"{folder}/")]:
            self.own.discard(path)
            self.lasting.discard(path)
