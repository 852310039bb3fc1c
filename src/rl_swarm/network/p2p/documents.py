"""Holds a swarm's documents among peers: the layout of a folder swarm, without the folder.

A peer keeps what it writes, on its own disk, and hands it to whoever asks. In the DHT it leaves a signed notice of what
others have to find: where, how large, its digest; documents that are no larger than a notice travel inside. So those
who
know whom they want something from ask that peer, and traffic follows what is asked for; the DHT tells who there is.
"""

import hashlib
import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from rl_swarm.network.folder import ADMISSION, HISTORY, MANIFEST, RECORD_BYTES, SAFE_NAME, STATE
from rl_swarm.network.p2p.engine import PeerEngine
from rl_swarm.network.p2p.late_answers import Ask
from rl_swarm.network.p2p.records import (
    DEEPEST,
    KEPT_SECONDS,
    MAX_INSIDE,
    MAX_NOTICE,
    MAX_OF_AUTHOR_IN_KEY,
    REPORT_SECONDS,
    REPORTS,
    DhtRecord,
    acceptable,
    key_of,
    parts_of,
    subnet_of,
)
from rl_swarm.network.p2p.table import REPLICAS
from rl_swarm.protocol.identity import Identity, is_peer_id
from rl_swarm.protocol.rounds import State
from rl_swarm.protocol.wire import MAX_BYTES, Count, Id, Rejected, seal, unseal
from rl_swarm.storage.files import LocalFiles

if TYPE_CHECKING:
    from rl_swarm.network.p2p.members import Members

log = logging.getLogger(__name__)

OWNERS = {MANIFEST, ADMISSION, STATE, HISTORY}  # which only the owner writes, and everybody hands on
HANDED_KINDS = {ADMISSION: "roll", STATE: "state"}  # of the documents that peers keep to hand them on
OF_A_ROUND = ("rollouts/", "rewards/")
OF_NODES = ("peers", "rewards/")  # folders in which a document is called as its node
MAX_OF_ROUNDS = 400  # documents of single rounds that a peer hands out: as far back as anybody asks
KNOWN_SECONDS = 0.2  # for which an answer of the DHT is good enough to find somebody's name in
MAX_NAMES = 4096  # that a peer keeps in mind with their authors
MAX_LISTED = 8  # folders of which the last listing is kept
HANDS = 16  # peers that leave notices of the manifest, and that ask the owner for news, on average
AWAY_SECONDS = 300.0  # for which an owner that could not be reached is not asked again
DIRECT_SECONDS = 5.0  # after which members without a notice of their report are asked for it, and again
MAX_DIRECT = 64  # members that are asked then, in turn
AT_ONCE = 8
ROUNDS_AHEAD = 2  # of the round that this peer knows of, for which it keeps others' reports
STATE_SECONDS = 60.0  # for which it knows the round


class Signed(msgspec.Struct, frozen=True):
    """What is looked at in a document of the owner before it is handed on."""

    peer_id: Id
    kind: str = ""
    swarm: str = ""
    number: Count = 0


class PeerFiles:
    """The `Files` of one peer of a swarm."""

    def __init__(
        self,
        engine: PeerEngine,
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
        self.names_of = dict[
            str, str
        ]()  # and the other way round: who speaks under many names is heard under the first
        self._listed = dict[str, tuple[float, dict[str, DhtRecord]]]()  # by folder: when, and what, by path
        self._left = dict[str, float]()  # when notices were last left, by path
        self._of_rounds = deque[str]()  # its documents of single rounds, the oldest first
        self._report = ""  # the path of its newest report
        self._state: tuple[float, State] | None = None  # when it was read
        self._direct = dict[str, bytes]()  # reports that members were asked for, of one folder
        self._asked_for = "", -math.inf  # this folder, and when
        self._asking: threading.Thread | None = None
        self._owner_away = -math.inf  # until when the owner is not asked
        self.serves = False  # a peer that plays has others to ask; one that only looks waits for answers
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Lets the engine answer for this swarm, and share its room and its streams by who the members are."""
        self.engine.answer, self.engine.is_member = self.answer, self.is_member
        self.serves = True
        if self.engine.quota is not None:
            self.engine.quota.swarms[self.swarm] = self

    def is_member(self, peer_id: str) -> bool:
        """Tells whether a peer is a member, as far as this one knows."""
        if peer_id == self.owner:
            return True
        if self.members is not None:
            return peer_id in self.members.known
        return self._state is not None and peer_id in self._state[1].members

    def report_rounds(self) -> range | None:
        """Says of which rounds reports may lie in the DHT now; None if that is not known."""
        if self.members is not None:  # where nobody conducts, reports are asked for
            return range(0)
        known = self._state is not None and self.clock() - self._state[0] <= STATE_SECONDS
        if self._state is None or not (known or self.identity.peer_id == self.owner):
            return None
        return range(self._state[1].round + ROUNDS_AHEAD + 1)

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
            if path in self._direct:
                return self._direct[path][: limit + 1]
            notice = self._listed.get(folder, (0.0, {}))[1].get(path)
        if notice is not None and notice.inside and notice.peer_id == author:
            return notice.inside.encode()[: limit + 1]
        if folder.startswith(OF_NODES) and me == self.owner:
            # Whoever conducts waits for no peer: what small documents hold stands in their notices.
            raise FileNotFoundError(path)
        ask = self.engine.ask_soon if self.serves and folder.startswith("rollouts/") else self.engine.ask
        return self._asked([author] if author else [], path, limit, ask)

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
        is_reports = REPORTS.fullmatch(folder) is not None and self.identity.peer_id == self.owner
        direct = self._asked_directly(folder) if is_reports else set[str]()
        try:
            return sorted({notice.name for notice in self._list(folder)} | direct)
        except OSError:
            if not direct:
                raise
            return sorted(direct)

    def notices(self, folder: str) -> list[DhtRecord]:
        """What lies in a folder or a part of the introductions, signed by whom it is of; of each author the newest."""
        now, key = self.clock(), key_of(self.swarm, folder)
        looks_again = self.identity.peer_id == self.owner and self.members is None
        records = self.engine.find(key, quick=looks_again)
        found = (acceptable(key, subkey, value, now) for subkey, value in records.items())
        by_author = dict[str, list[DhtRecord]]()
        for notice in found:
            if notice is not None and notice.swarm == self.swarm:
                by_author.setdefault(notice.peer_id, []).append(notice)
        return [
            notice
            for theirs in by_author.values()
            for notice in sorted(theirs, key=lambda one: (-one.timestamp, one.path))[:MAX_OF_AUTHOR_IN_KEY]
        ]

    def _asked_directly(self, folder: str) -> set[str]:
        """Lists the reports that members gave when asked. Those without a notice are asked, in the background."""
        with self._lock:
            if self._asked_for[0] != folder:
                self._asked_for, self._direct = (folder, self.clock()), {}
            if self.clock() - self._asked_for[1] >= DIRECT_SECONDS and not self._is_asking():
                listed = {path for path, notice in self._listed.get(folder, (0.0, {}))[1].items() if notice.inside}
                members = self._state[1].members if self._state is not None else {}
                paths = {peer: f"{folder}/{member.node}.json" for peer, member in members.items()}
                missing = {
                    peer: path
                    for peer, path in paths.items()
                    if path not in self._direct and path not in listed and peer != self.identity.peer_id
                }
                self._asked_for = folder, self.clock()
                chosen = self.rng.sample(sorted(missing.items()), min(len(missing), MAX_DIRECT))
                # A member that does not answer must not hold up the rounds.
                self._asking = threading.Thread(target=self._ask_directly, args=(folder, chosen), daemon=True)
                self._asking.start()
            return {path.rpartition("/")[2] for path in self._direct}

    def _is_asking(self) -> bool:
        return self._asking is not None and self._asking.is_alive()

    def _ask_directly(self, folder: str, wanted: list[tuple[str, str]]) -> None:
        def ask(peer: str, path: str) -> None:
            with suppress(OSError):
                data = self._asked([peer], path, RECORD_BYTES)
                with self._lock:
                    if self._asked_for[0] == folder:
                        self._direct[path] = data

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda item: ask(*item), wanted))

    def subnets(self) -> dict[str, str]:
        """Where others are: those to whom there is a connection by what is seen of it, others by what they say."""
        known = self.members.known if self.members is not None else {}
        said = {peer_id: met.where for peer_id, met in known.items() if met.where}
        try:
            addresses = self.engine.peers()
        except OSError:
            return said
        return said | {address.rpartition("/")[2]: where for address in addresses if (where := subnet_of(address))}

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
        """Leaves notices that are due; of a round's documents only that of the newest report. Of a manifest that others
        hand on some notices are enough, whatever the size of the swarm."""
        due = self.clock() - self._left.get(self._report, -math.inf) >= REPORT_SECONDS / 3
        if due and self._report in self.own and self.members is None:
            with suppress(OSError):
                self._leave(self._report, self.local.read(self._report, MAX_BYTES))
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
            while len(self._of_rounds) > MAX_OF_ROUNDS:
                self.own.discard(old := self._of_rounds.popleft())
                self._left.pop(old, None)
            if path.startswith("rewards/"):
                self._report = path
        else:
            self.lasting.add(path)
        # Rollouts are asked for by their author's name; reports are looked for by whoever conducts.
        if not path.startswith("rollouts/") and not (path.startswith("rewards/") and self.members):
            self._leave(path, data)

    def _leave(self, path: str, data: bytes) -> None:
        notice = DhtRecord(
            swarm=self.swarm,
            path=path,
            sha256=hashlib.sha256(data).hexdigest(),
            size=len(data),
            timestamp=self.clock(),
            inside=_text(data) if len(data) <= MAX_INSIDE else "",
            depth=self.members.depth if self.members is not None and path.startswith("peers/") else 0,
            addresses=list(self.engine.addresses)[:8] if path == MANIFEST or path.startswith("peers/") else [],
        )
        sealed = seal(notice, self.identity, limit=MAX_NOTICE)
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
            yield folder, REPORT_SECONDS if REPORTS.fullmatch(folder) else KEPT_SECONDS, REPLICAS

    def _list(self, folder: str) -> Iterable[DhtRecord]:
        found = self.notices(folder)
        for notice in found:
            self.engine.introduce(notice.peer_id, notice.addresses)
        with self._lock:
            listed = dict[str, DhtRecord]()
            for notice in found:
                node = notice.name.removesuffix(".json")
                if folder.startswith(OF_NODES) and SAFE_NAME.fullmatch(node):
                    if self.names_of.setdefault(notice.peer_id, node) != node:
                        continue
                    self.authors.setdefault(node, notice.peer_id)
                if notice.path not in listed or notice.peer_id == self.authors.get(node):
                    listed[notice.path] = notice
            self._forget_names()
            self._listed.pop(folder, None)
            self._listed[folder] = self.clock(), listed
            while len(self._listed) > MAX_LISTED:
                del self._listed[next(iter(self._listed))]
        return listed.values()

    def _forget_names(self) -> None:
        """Forgets the names that were heard of first, and are of no member, where there are too many."""
        if max(len(self.authors), len(self.names_of)) > MAX_NAMES:
            members = {member.node for member in self._state[1].members.values()} if self._state else set()
            heard = [node for node in self.authors if node not in members]
            for node in heard[: max(0, len(self.authors) - MAX_NAMES // 2)]:
                del self.authors[node]
            self.names_of = {peer_id: node for node, peer_id in self.authors.items()}

    def _owners(self, path: str, limit: int) -> bytes:
        """Of the owner, or of anybody who has it. In a large swarm without a conductor few ask the owner, and the
        others
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
        # The owner signs other documents too, and those of other swarms.
        right = path == MANIFEST or (found.kind, found.swarm) == (HANDED_KINDS.get(path), self.swarm)
        if right and found.peer_id == self.owner and found.number >= before:
            self.handed[path] = data

    def _know(self, data: bytes) -> None:
        """Who the members are, by the state."""
        try:
            state = unseal(data, State)
        except Rejected:
            return
        if state.peer_id == self.owner and state.swarm == self.swarm:
            self._state = self.clock(), state
            self.authors |= {member.node: peer_id for peer_id, member in state.members.items()}
            self.names_of |= {peer_id: member.node for peer_id, member in state.members.items()}

    def _author(self, path: str) -> str | None:
        """Whose this document is: of the peer whose id is its name, else the member's whom the coordinator knows by
        that
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
        """Some whom it may ask for what everybody has; where nobody conducts, those who answered last, who are
        connected."""
        if self.members is not None:
            return self.members.latest(2)
        known = self._state[1].members if self._state is not None else self.authors.values()
        others = [peer for peer in dict.fromkeys(known) if peer != self.identity.peer_id]
        return self.rng.sample(others, min(len(others), 8))

    def _asked(self, peers: Iterable[str], path: str, limit: int, ask: Ask | None = None) -> bytes:
        error: OSError = FileNotFoundError(path)
        ask = ask or self.engine.ask
        for peer in peers:
            try:
                data = ask(peer, path.encode("ascii"), limit)
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


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:  # it is asked for
        return ""
