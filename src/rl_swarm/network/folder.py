"""A swarm in a shared folder: no server, no open port. A mounted Google Drive, NFS and a local disk will do.

Layout below the experiment directory:

    manifest.json                            what this swarm is, signed by its owner
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

import itertools
import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence

from rl_swarm.identity import Identity
from rl_swarm.manifest import Manifest
from rl_swarm.network.base import NetworkError, OnReject
from rl_swarm.network.files import Files
from rl_swarm.rollouts import Publication
from rl_swarm.rounds import PeerInfo, Report, State
from rl_swarm.wire import MAX_BYTES, Incomplete, Rejected, seal, unseal

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state/current_state.json"
HISTORY = "state/history.jsonl"
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0  # between tries at a file that cannot be read
GIVE_UP_AFTER = 8  # tries at a file that is there but never becomes whole


def report_folder(round: int, stage: int) -> str:
    return f"rewards/round_{round}/stage_{stage}"


def rollouts_path(round: int, stage: int, node: str) -> str:
    return f"rollouts/round_{round}/stage_{stage}/{node}.json"


def report_path(round: int, stage: int, node: str) -> str:
    return f"{report_folder(round, stage)}/{node}.json"


def documents(files: Files, folder: str) -> Iterator[str]:
    """The nodes that have a document in a folder. Other names (temporary files, copies made by a sync) are no business of ours."""
    for name in files.names(folder):
        node, dot, ending = name.rpartition(".")
        if dot and ending == "json" and SAFE_NAME.fullmatch(node):
            yield node


def read_manifest(files: Files) -> Manifest:
    return unseal(files.read(MANIFEST, MAX_BYTES), Manifest)


def read_state(files: Files, manifest: Manifest) -> State:
    state = unseal(files.read(STATE, MAX_BYTES), State)
    if state.peer_id != manifest.peer_id:
        raise Rejected("owner", "the state is not signed by the swarm's owner")
    if state.swarm != manifest.swarm():
        raise Rejected("swarm", "the state of another swarm")
    return state


def await_manifest(files: Files, stop: threading.Event, poll: float) -> Manifest | None:
    """The manifest, once the coordinator has written it; None when told to stop."""
    for tries in itertools.count():
        try:
            return read_manifest(files)
        except (OSError, Incomplete):
            if tries == 1:
                log.info("waiting for the coordinator: there is no manifest.json yet")
        except Rejected as error:
            raise NetworkError(f"manifest.json of this swarm cannot be used ({error}).") from error
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
    ) -> None:
        self.files, self.manifest, self.identity, self.node = files, manifest, identity, node
        self.stop, self.on_reject, self.poll, self.max_peers = stop, on_reject, poll, max_peers
        self._cache: dict[tuple[int, int, str], Publication | None] = {}  # None: rejected for good
        self._tries: dict[tuple[int, int, str], tuple[int, float]] = {}  # failed tries, time of the next

    def publish(self, publication: Publication) -> None:
        path = rollouts_path(publication.round, publication.stage, self.node)
        self.files.write(path, seal(publication, self.identity, compress=True))

    def collect(
        self, round: int, stage: int, nodes: Sequence[str], patience: float = 0.0, in_order: bool = False
    ) -> Iterator[Publication]:
        self._forget(round)
        waiting = list(nodes)[: self.max_peers]
        deadline = time.monotonic() + patience
        while waiting:
            for node in list(waiting):
                key = (round, stage, node)
                if key not in self._cache:
                    self._fetch(key)
                if key not in self._cache:  # not there yet
                    if in_order:
                        break
                    continue
                waiting.remove(node)
                publication = self._cache[key]
                if publication is not None:
                    yield publication
            if not waiting or time.monotonic() >= deadline or self.stop.wait(self.poll):
                return

    def _fetch(self, key: tuple[int, int, str]) -> None:
        """Reads one file into the cache, if it is there and whole and its time has come."""
        round, stage, node = key
        tries, next_try = self._tries.get(key, (0, 0.0))
        if time.monotonic() < next_try:
            return
        try:
            data = self.files.read(rollouts_path(round, stage, node), self.manifest.limits.file_bytes)
            self._cache[key] = self._checked(data, key)
        except FileNotFoundError:
            return
        except (OSError, Incomplete) as error:
            tries += 1
            self._tries[key] = (tries, time.monotonic() + min(FIRST_PAUSE * 2**tries, LONGEST_PAUSE))
            if tries >= GIVE_UP_AFTER:
                self._cache[key] = None
                self.on_reject(node, getattr(error, "reason", "unreadable"), str(error))
        except Rejected as error:
            self._cache[key] = None
            self.on_reject(node, error.reason, str(error))

    def _checked(self, data: bytes, key: tuple[int, int, str]) -> Publication:
        publication = unseal(data, Publication, self.manifest.limits.file_bytes)
        if publication.swarm != self.manifest.swarm():
            raise Rejected("swarm", "published for another swarm")
        if (publication.round, publication.stage, publication.node) != key:
            raise Rejected(
                "place",
                f"published for round {publication.round}, stage {publication.stage} by {publication.node}",
            )
        return publication

    def _forget(self, round: int) -> None:
        oldest = round - 100
        for kept in (self._cache, self._tries):
            for key in [key for key in kept if key[0] < oldest]:
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
    ) -> None:
        self.files, self.manifest, self.identity, self.node = files, manifest, identity, node
        self.stop, self.poll = stop, poll
        self._last: State | None = None
        self._since = 0.0  # when this node first saw the present stage

    def register(self, peer: PeerInfo) -> None:
        self.files.write(f"peers/{self.node}.json", seal(peer, self.identity))

    def submit(self, report: Report) -> None:
        """Writes the report, unless this node has reported already: one that was restarted may do a round twice."""
        path = report_path(report.round, report.stage, self.node)
        try:
            if unseal(self.files.read(path, MAX_BYTES), Report).peer_id == self.identity.peer_id:
                return
        except (OSError, Rejected):
            pass  # none there that is ours
        self.files.write(path, seal(report, self.identity))

    def current(self) -> State:
        """The state as last written; the one before that where the file is just being replaced."""
        try:
            state = read_state(self.files, self.manifest)
        except (OSError, Incomplete):
            if self._last is None:
                return State(swarm=self.manifest.swarm())
            return self._last
        except Rejected as error:
            raise NetworkError(f"{STATE} cannot be used ({error}).") from error
        if self._last is None or place(state) > place(self._last):
            self._last, self._since = state, time.monotonic()
        return self._last  # a synced folder may show an older file again; rounds only go forward

    def wait_for(self, after: tuple[int, int]) -> State | None:
        while not self.stop.is_set():
            state = self.current()
            if state.phase == "finished" or (state.phase == "running" and (state.round, state.stage) > after):
                return state
            self.stop.wait(self._pause(state))
        return None

    def _pause(self, state: State) -> float:
        """With rounds on an interval there is nothing to see before most of it has passed."""
        if self.manifest.round_end != "interval" or state.phase != "running":
            return self.poll
        left = 0.9 * self.manifest.round_interval - (time.monotonic() - self._since)
        return max(self.poll, left)


def place(state: State) -> tuple[int, int, int]:
    return ({"waiting": 0, "running": 1, "finished": 2}[state.phase], state.round, state.stage)
