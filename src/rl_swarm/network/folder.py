"""Moves rollouts and rounds through a shared folder: no server, no open port. A mounted Google Drive, NFS, a local
disk or a bucket will do.

Layout below the experiment directory (with a URL, checkpoints and logs stay on the nodes' machines):

    manifest.json                            what this swarm is, signed by its owner
    admission.json                           whom the owner allows and denies, if anybody
    state/current_state.json                 round and stage, written by the coordinator alone
    state/history.jsonl                      one signed line per stage that ended
    peers/<node>.json                        who is here
    rollouts/round_<r>/stage_<s>/<node>.json what a node published (gzip)
    rewards/round_<r>/stage_<s>/<node>.json  what it reported
    checkpoints/round_<r>/<node>/            its model
    logs/<node>/*.jsonl                      its metrics and events

A synced folder lies now and then: listings lag, files appear late, twice or half, reads fail and work a
second later. So nothing depends on a listing of rollouts (nodes are asked for by name), every document
carries its digest, and what cannot be read yet is read again with growing pauses.
"""

import bisect
import itertools
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from msgspec.structs import replace

from rl_swarm.network.base import NetworkError, OnReject
from rl_swarm.protocol import admission
from rl_swarm.protocol.admission import AccessList, AdmissionError
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.rollouts import Publication, fit_limits
from rl_swarm.protocol.rounds import PeerInfo, RefusalReason, Report, State
from rl_swarm.protocol.untrusted import quoted
from rl_swarm.protocol.wire import MAX_BYTES, Incomplete, Rejected, SealError, seal, unseal
from rl_swarm.storage.files import LASTING, Files, Refused

log = logging.getLogger(__name__)
T = TypeVar("T")

MANIFEST = "manifest.json"
ADMISSION = "admission.json"
STATE = "state/current_state.json"
HISTORY = "state/history.jsonl"
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RECORD_BYTES = 64 << 10  # of a report or an introduction; rollouts have the manifest's limit
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0  # between tries at a file that cannot be read or written
TRIES = 5  # at a file this process cannot go on without
GIVE_UP_AFTER = 30.0  # seconds, at a peer's file that is there but does not become whole
MANIFEST_SECONDS = 180.0  # the same, at a manifest
REMIND_SECONDS = 60.0  # between lines that say what is waited for
CACHED = 64  # publications kept by an exchange
REMEMBERED_ROUNDS = 100  # for which it knows what it has rejected: as far back as `max_rollout_age` lets anybody ask


def report_folder(round: int, stage: int) -> str:
    return f"rewards/round_{round}/stage_{stage}"


def rollouts_path(round: int, stage: int, node: str) -> str:
    return f"rollouts/round_{round}/stage_{stage}/{node}.json"


def report_path(round: int, stage: int, node: str) -> str:
    return f"{report_folder(round, stage)}/{node}.json"


def documents(files: Files, folder: str) -> Iterator[str]:
    """The nodes that have a document in a folder. Other names (temporary files, copies made by a sync) are no business
    of ours."""
    for name in files.names(folder):
        node, dot, ending = name.rpartition(".")
        if dot and ending == "json" and SAFE_NAME.fullmatch(node):
            yield node


class Listing:
    """Lists folders that anybody can fill: a crowded one is listed less often, so that little time goes into it."""

    CROWD, TIMES = 1000, 20.0  # names that are many, and as many times as long as it took nothing is listed

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._again: dict[str, float] = {}  # by kind of folder: when the next one may be

    def nodes(self, files: Files, folder: str) -> list[str] | None:
        """Lists the nodes that have a document in a folder; None if it is not time to."""
        kind, started = folder.partition("/")[0], self._clock()
        if started < self._again.get(kind, started):
            return None
        found = list(documents(files, folder))
        took = self._clock() - started
        self._again[kind] = started + took * (self.TIMES if len(found) > self.CROWD else 1)
        return found


def pauses(longest: float) -> Iterator[float]:
    """Between looks at something that is expected any moment: short at first, so that little time is lost."""
    pause = longest / 4
    while True:
        yield pause
        pause = min(2 * pause, longest)


def patiently(act: Callable[[], T], stop: threading.Event, seconds: float = 0.0) -> T:
    """Does what a synced folder may refuse now and allow a second later, or after so many: a server that starts again,
    a line that is down. `FileNotFoundError` is an answer."""
    pause, deadline = FIRST_PAUSE, time.monotonic() + seconds
    for tries in itertools.count(1):
        try:
            return act()
        except FileNotFoundError:
            raise
        except (OSError, Incomplete) as error:
            if tries >= TRIES and (is_lasting(error) or time.monotonic() >= deadline):
                raise
            if tries == TRIES:
                log.warning("trying again for %.0f s: %s", deadline - time.monotonic(), error)
        if stop.wait(pause):
            break
        pause = min(2 * pause, FIRST_PAUSE * 2**TRIES)
    return act()


def is_lasting(error: Exception) -> bool:
    """Whether somebody has to do something about it; else it may pass."""
    return isinstance(error, (FileNotFoundError, Refused)) or getattr(error, "errno", None) in LASTING


def read_manifest(files: Files) -> Manifest:
    return unseal(files.read(MANIFEST, MAX_BYTES), Manifest)


def read_state(files: Files, manifest: Manifest) -> State:
    state = unseal(files.read(STATE, MAX_BYTES), State)
    if state.peer_id != manifest.peer_id:
        raise Rejected(RejectReason.OWNER, "the state is not signed by the swarm's owner")
    if state.swarm != manifest.swarm():
        raise Rejected(RejectReason.SWARM, "the state of another swarm")
    return state


def read_access_list(files: Files, manifest: Manifest) -> AccessList:
    """The owner's list; an empty one where there is none."""
    try:
        access_list = unseal(files.read(ADMISSION, MAX_BYTES), AccessList)
    except FileNotFoundError:
        return AccessList(swarm=manifest.swarm())
    if access_list.peer_id != manifest.peer_id:
        raise Rejected(RejectReason.OWNER, "the list is not signed by the swarm's owner")
    if access_list.swarm != manifest.swarm():
        raise Rejected(RejectReason.SWARM, "the list of another swarm")
    return access_list


def change_access_list(
    files: Files, manifest: Manifest, owner: Identity, names: Iterable[str], allow: bool
) -> tuple[AccessList, AccessList]:
    """Allows or denies peers or invitations; the owner's list before and after. It is written only if it changes."""
    before = after = read_access_list(files, manifest)
    for name in names:
        after = after.with_entry(name, allow)
    if after == before:
        return before, before
    try:
        newest = max(before.number, read_state(files, manifest).roll)
    except (OSError, Rejected):  # no state yet
        newest = before.number
    after = replace(after, number=newest + 1, timestamp=time.time())
    files.write(ADMISSION, seal(after, owner))
    return before, after


def await_manifest(
    files: Files, stop: threading.Event, poll: float, patience: float = MANIFEST_SECONDS
) -> Manifest | None:
    """The manifest, once the coordinator has written it; None when told to stop. Waits as long as there is none, but
    not
    for ever for one that does not become whole."""
    broken = said = math.inf  # since when it is there and not whole, and when that was last told
    for tries in itertools.count():
        now = time.monotonic()
        try:
            return read_manifest(files)
        except Refused:
            raise
        except FileNotFoundError:
            broken = math.inf
            problem = "waiting for the coordinator: there is no manifest.json yet"
        except (OSError, Incomplete) as error:
            broken = min(broken, now) if isinstance(error, Incomplete) else math.inf
            problem = f"waiting for manifest.json, which cannot be used yet ({error})"
            if now - broken >= patience:
                raise NetworkError(
                    f"{files.root}/{MANIFEST} has not become whole in {patience:.0f} s ({error}). If the drive still "
                    "syncs "
                    "it, try again later; if not, its owner has to found the swarm in another folder."
                ) from error
        except Rejected as error:
            raise NetworkError(f"manifest.json of this swarm cannot be used ({error}).") from error
        if tries == 1 or now - said >= REMIND_SECONDS:
            log.log(logging.INFO if broken == math.inf else logging.WARNING, "%s", problem)
            said = now
        if stop.wait(poll):
            break
    return None


class FolderExchange:
    def __init__(
        self,
        files: Files,
        manifest: Manifest,
        identity: Identity,
        node: str,
        stop: threading.Event,
        on_reject: OnReject,
        poll: float = 2.0,
        max_peers: int = 10,
        refusal: Callable[[str], RefusalReason | None] = lambda peer_id: None,
        subnets: Callable[[], Mapping[str, str]] = dict,  # a folder shows no addresses
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.files, self.manifest, self.identity, self.node = files, manifest, identity, node
        self.stop, self.on_reject, self.poll, self.max_peers = stop, on_reject, poll, max_peers
        self.refusal = refusal  # why a peer is not admitted
        self.subnets, self.clock = subnets, clock
        self._published = False  # by this process
        self._cache: dict[tuple[int, int, str], Publication | None] = {}  # None: rejected for good
        # Files that were there but not whole: tries so far, time of the first and of the next.
        self._tries: dict[tuple[int, int, str], tuple[int, float, float]] = {}

    def publish(self, publication: Publication) -> None:
        """Writes the rollouts. Of a node that was restarted and plays a round again, those that others may have
        count."""
        where = (publication.round, publication.stage)
        if not self._published and self._has_published(where):
            log.info("round %d was published before this node was restarted", publication.round)
            return
        self._published = True
        path = rollouts_path(*where, self.node)
        data = self._sealed(fit_limits(publication, self.manifest.limits))
        patiently(lambda: self.files.write(path, data), self.stop, self.manifest.peer_timeout)

    def _has_published(self, where: tuple[int, int]) -> bool:
        """Whether there are rollouts of ours, written before this process began."""
        try:
            limit = self.manifest.limits.file_bytes
            found = self._checked(self.files.read(rollouts_path(*where, self.node), limit), (*where, self.node))
        except (OSError, Rejected):
            return False
        return found.peer_id == self.identity.peer_id

    def _sealed(self, publication: Publication) -> bytes:
        """The publication with as many questions as fit into a document. The last ones go: nobody takes it with
        gaps."""
        limit = self.manifest.limits.file_bytes
        numbers = sorted(publication.rollouts, key=int)

        def sealed(count: int) -> bytes:
            fitting = publication.restricted_to({number: publication.rollouts[number] for number in numbers[:count]})
            return seal(fitting, self.identity, compress=True, limit=limit)

        def refused(count: int) -> bool:
            try:
                sealed(count)
            except SealError:
                return True
            return False

        try:
            return sealed(len(numbers))
        except SealError as error:
            why = error
        kept = bisect.bisect_left(range(1, len(numbers)), True, key=refused)
        data = sealed(kept)
        log.warning("only the first %d of %d questions are published. %s", kept, len(numbers), why)
        return data

    def collect(
        self, round: int, stage: int, nodes: Sequence[str], patience: float = 0.0, in_order: bool = False
    ) -> Iterator[Publication]:
        self._forget(round)
        waiting = list(dict.fromkeys(nodes))[: self.max_peers]
        deadline = self.clock() + patience
        pause = pauses(self.poll)
        while waiting:
            last_look = self.clock() >= deadline
            for node in list(waiting):
                key = (round, stage, node)
                if key not in self._cache:
                    self._fetch(key)
                if key in self._cache:
                    waiting.remove(node)
                    publication = self._cache[key]
                    if publication is not None and (why := self.refusal(publication.peer_id)):
                        publication = self._cache[key] = None
                        self.on_reject(node, RejectReason.ADMISSION, f"its author is not admitted ({why})")
                    if publication is not None:
                        yield publication
                elif in_order and not last_look:
                    break
            if not waiting or last_look:
                return
            if self.stop.wait(min(next(pause), max(0.0, deadline - self.clock()))):
                return

    def _fetch(self, key: tuple[int, int, str]) -> None:
        """Reads one file into the cache, if it is there and whole and its time has come."""
        round, stage, node = key
        now = self.clock()
        tries, first_try, next_try = self._tries.get(key, (0, now, now))
        if now < next_try:
            return
        try:
            if not SAFE_NAME.fullmatch(node):
                raise Rejected(RejectReason.NAME, "no name for a node")
            data = self.files.read(rollouts_path(round, stage, node), self.manifest.limits.file_bytes)
            self._cache[key] = self._checked(data, key)
        except FileNotFoundError:
            return
        except (OSError, Incomplete) as error:
            pause = min(FIRST_PAUSE * 2.0**tries, LONGEST_PAUSE)
            self._tries[key] = (tries + 1, first_try, now + pause)
            if now - first_try >= GIVE_UP_AFTER:
                self._cache[key] = None
                reason = error.reason if isinstance(error, Rejected) else RejectReason.UNREADABLE
                self.on_reject(node, reason, str(error))
        except Rejected as error:
            self._cache[key] = None
            self.on_reject(node, error.reason, str(error))

    def _checked(self, data: bytes, key: tuple[int, int, str]) -> Publication:
        publication = unseal(data, Publication, self.manifest.limits.file_bytes)
        if publication.swarm != self.manifest.swarm():
            raise Rejected(RejectReason.SWARM, "published for another swarm")
        if (publication.round, publication.stage, publication.node) != key:
            raise Rejected(
                RejectReason.PLACE,
                f"published for round {publication.round}, stage {publication.stage} by {quoted(publication.node)}",
            )
        return publication

    def _forget(self, round: int) -> None:
        """Keeps the newest publications and, for much longer, what was rejected: it is counted once."""
        publications = sorted(key for key, publication in self._cache.items() if publication is not None)
        for key in publications[:-CACHED]:
            del self._cache[key]
        for kept in (self._cache, self._tries):
            for key in [key for key in kept if key[0] < round - REMEMBERED_ROUNDS]:
                del kept[key]


class FolderCoordinator:
    """A worker's view of the coordinator: the files it writes and reads."""

    def __init__(
        self,
        files: Files,
        manifest: Manifest,
        identity: Identity,
        node: str,
        stop: threading.Event,
        poll: float = 2.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.files, self.manifest, self.identity, self.node = files, manifest, identity, node
        self.stop, self.poll, self.clock = stop, poll, clock
        self._last = State(swarm=manifest.swarm())
        self._looked = -math.inf  # when this node last looked at the state
        self._since = -math.inf  # the present stage began after this moment, with rounds on an interval
        self._refusal = ""  # why a state was not used, said once
        self._reported: set[tuple[int, int]] = set()
        self._joined = math.nan  # the introduction by which this node is known
        self.access_list = AccessList(swarm=manifest.swarm())
        self.turned_away: RefusalReason | None = None
        self._told_to_wait = False

    def request_admission(self, token: str | None) -> str:
        """The ticket to introduce oneself with; raises `AdmissionError` when this node is sure to be turned away."""
        shown, me = "", self.identity.peer_id
        if token:
            try:
                shown = admission.make_ticket(token, self.manifest, me)
            except Rejected as error:
                raise AdmissionError(
                    f"INVITATION cannot be used ({error}). Copy it whole, from the owner of this swarm, "
                    f"{self.manifest.peer_id}; if "
                    "somebody else invited you, this is not the manifest of their swarm."
                ) from error
        self._read_access_list()
        members = self.current().members
        _, why = admission.admit(self.manifest, self.access_list, members, me, shown, self.clock())
        if why is not None:
            raise self.not_admitted(why)
        return shown

    def not_admitted(self, why: RefusalReason) -> AdmissionError:
        return AdmissionError(
            admission.refusal_message(why, self.manifest, self.identity.peer_id, str(self.files.root))
        )

    def refusal(self, peer_id: str) -> RefusalReason | None:
        """Why what a peer publishes is not used."""
        return admission.refusal_reason(self.manifest, self.access_list, peer_id, self._last.members.get(peer_id))

    def _read_access_list(self) -> None:
        try:
            access_list = read_access_list(self.files, self.manifest)
        except OSError as error:  # the one that was read before stands, and the next look is soon
            log.debug("%s cannot be read now: %s", ADMISSION, error)
            return
        except Rejected as error:
            log.warning("%s is not used: %s", ADMISSION, error)
            return
        if access_list.number > self.access_list.number:
            self.access_list = access_list

    def register(self, peer: PeerInfo) -> None:
        self._joined = peer.joined
        data = seal(peer, self.identity, limit=RECORD_BYTES)
        patiently(lambda: self.files.write(f"peers/{self.node}.json", data), self.stop)

    def submit(self, report: Report) -> None:
        """Writes the report, unless this node has reported already: one that was restarted may do a round twice."""
        where = (report.round, report.stage)
        if where in self._reported or (not self._reported and self._has_reported(where)):
            return
        data = seal(report, self.identity, limit=RECORD_BYTES)
        path = report_path(*where, self.node)
        patiently(lambda: self.files.write(path, data), self.stop, self.manifest.peer_timeout)
        self._reported.add(where)

    def _has_reported(self, where: tuple[int, int]) -> bool:
        """Whether there is a report of ours, written before this process began."""
        try:
            report = unseal(self.files.read(report_path(*where, self.node), RECORD_BYTES), Report)
        except (OSError, Rejected):
            return False
        here = (report.swarm, report.peer_id, report.round, report.stage)
        return here == (self.manifest.swarm(), self.identity.peer_id, *where)

    def current(self) -> State:
        """The newest state seen: a synced folder may show an older one again, half of one, or a stranger's."""
        looked, self._looked = self._looked, time.monotonic()
        try:
            state = read_state(self.files, self.manifest)
        except (OSError, Incomplete):
            return self._last
        except Rejected as error:
            if str(error) != self._refusal:
                self._refusal = str(error)
                log.warning("%s is not used: %s", STATE, error)
            return self._last
        if state.roll > self.access_list.number:
            self._read_access_list()
        refusal = state.refused.get(self.identity.peer_id)
        if refusal is not None and refusal.joined == self._joined:
            self.turned_away = refusal.why
        if place(state) == place(self._last) and len(state.members) > len(self._last.members):
            self._last = state
        if place(state) > place(self._last):
            self._last, self._since = state, max(looked, self._since + self.manifest.round_interval)
        return self._last

    def wait_for(self, after: tuple[int, int]) -> State | None:
        pause = pauses(self.poll)
        while not self.stop.is_set():
            left = self._nothing_new_for(after)
            if left == 0.0:
                state = self.current()
                if self.turned_away:
                    return None
                if is_past(state, after) and self._may_play(state):
                    return state
                left = self._nothing_new_for(after) or next(pause)
            self.stop.wait(left)
        return None

    def _may_play(self, state: State) -> bool:
        """Whether this node is a member. In an open swarm it becomes one by what it does."""
        member = self.manifest.admission == "open" or self.identity.peer_id in state.members
        if not member and not self._told_to_wait:
            self._told_to_wait = True
            log.info("waiting for the coordinator to admit this node")
        return member or state.phase == "finished"

    def _nothing_new_for(self, after: tuple[int, int]) -> float:
        """Seconds in which there is nothing to see: with rounds on an interval, until it has passed."""
        if self.manifest.round_end != "interval" or self._last.phase != "running" or is_past(self._last, after):
            return 0.0
        expected = self._since + self.manifest.round_interval + next(pauses(self.poll))
        return max(0.0, expected - time.monotonic())


def is_past(state: State, after: tuple[int, int]) -> bool:
    return state.phase == "finished" or (state.phase == "running" and (state.round, state.stage) > after)


def place(state: State) -> tuple[int, int, int]:
    return ({"waiting": 0, "running": 1, "finished": 2}[state.phase], state.round, state.stage)
