"""Moves rollouts between nodes through a store of documents: a folder, a bucket, or peers."""

import bisect
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from rl_swarm.network import retries
from rl_swarm.network.base import OnReject
from rl_swarm.network.documents import SAFE_NAME, DocumentStore, rollouts_key
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.rollouts import Publication, fit_limits
from rl_swarm.protocol.rounds import RefusalReason
from rl_swarm.protocol.untrusted import quoted
from rl_swarm.protocol.wire import Incomplete, Rejected, SealError, seal, unseal

log = logging.getLogger(__name__)

MAX_CACHED = 64  # publications kept by an exchange
REMEMBERED_ROUNDS = 100  # for which it knows what it has rejected: as far back as `max_rollout_age` lets a node ask


class DocumentExchange:
    def __init__(
        self,
        store: DocumentStore,
        manifest: Manifest,
        identity: Identity,
        node: str,
        stop: threading.Event,
        on_reject: OnReject,
        poll: float = 2.0,
        max_peers: int = 10,
        refusal: Callable[[str], RefusalReason | None] = lambda peer_id: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.manifest, self.identity, self.node = store, manifest, identity, node
        self.stop, self.on_reject, self.poll, self.max_peers = stop, on_reject, poll, max_peers
        self.refusal = refusal  # why a peer is not admitted
        self.clock = clock
        self._published = False  # by this process
        self._cache: dict[tuple[int, int, str], Publication | None] = {}  # None: rejected for good
        # Documents that were there but not whole: tries so far, time of the first and of the next.
        self._tries: dict[tuple[int, int, str], tuple[int, float, float]] = {}

    def publish(self, publication: Publication) -> None:
        """Write the rollouts, unless this node published some for this stage before it was restarted: peers may have
        them."""
        round, stage = publication.round, publication.stage
        if not self._published and self._has_published(round, stage):
            log.info("round %d was published before this node was restarted", round)
            return
        self._published = True
        key = rollouts_key(round, stage, self.node)
        data = self._sealed(fit_limits(publication, self.manifest.limits))
        retries.retry(lambda: self.store.write(key, data), self.stop, self.manifest.peer_timeout)

    def _has_published(self, round: int, stage: int) -> bool:
        """Tell whether this node published before this process began."""
        try:
            data = self.store.read(rollouts_key(round, stage, self.node), self.manifest.limits.file_bytes)
            found = self._checked(data, (round, stage, self.node))
        except (OSError, Rejected):
            return False
        return found.peer_id == self.identity.peer_id

    def _sealed(self, publication: Publication) -> bytes:
        """Seal as many questions as fit into a document, the first ones: receivers reject gaps."""
        limit = self.manifest.limits.file_bytes
        numbers = sorted(publication.rollouts, key=int)

        def sealed(count: int) -> bytes:
            first = publication.restricted_to({number: publication.rollouts[number] for number in numbers[:count]})
            return seal(first, self.identity, compress=True, limit=limit)

        def is_too_large(count: int) -> bool:
            try:
                sealed(count)
            except SealError:
                return True
            return False

        try:
            return sealed(len(numbers))
        except SealError as error:
            why = error
        fitting = bisect.bisect_left(range(1, len(numbers)), True, key=is_too_large)
        data = sealed(fitting)
        log.warning("only the first %d of %d questions are published. %s", fitting, len(numbers), why)
        return data

    def collect(
        self, round: int, stage: int, nodes: Sequence[str], patience: float = 0.0, in_order: bool = False
    ) -> Iterator[Publication]:
        self._forget(round)
        waiting = list(dict.fromkeys(nodes))[: self.max_peers]
        deadline = self.clock() + patience
        pauses = retries.poll_pauses(self.poll)
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
            if self.stop.wait(min(next(pauses), max(0.0, deadline - self.clock()))):
                return

    def subnets(self) -> Mapping[str, str]:
        return self.store.subnets()

    def _fetch(self, key: tuple[int, int, str]) -> None:
        """Read one document into the cache, if it is there and whole and the pause after the last try has passed."""
        round, stage, node = key
        now = self.clock()
        tries, first_try, next_try = self._tries.get(key, (0, now, now))
        if now < next_try:
            return
        try:
            if not SAFE_NAME.fullmatch(node):
                raise Rejected(RejectReason.NAME, "no name for a node")
            data = self.store.read(rollouts_key(round, stage, node), self.manifest.limits.file_bytes)
            self._cache[key] = self._checked(data, key)
        except FileNotFoundError:
            return
        except (OSError, Incomplete) as error:
            pause = min(retries.FIRST_PAUSE * 2.0**tries, retries.LONGEST_PAUSE)
            self._tries[key] = (tries + 1, first_try, now + pause)
            if now - first_try >= retries.GIVE_UP_AFTER:
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
        """Drop old publications; rejections stay for `REMEMBERED_ROUNDS`, so that each is counted once."""
        publications = sorted(key for key, publication in self._cache.items() if publication is not None)
        for key in publications[:-MAX_CACHED]:
            del self._cache[key]
        for by_key in (self._cache, self._tries):
            for key in [key for key in by_key if key[0] < round - REMEMBERED_ROUNDS]:
                del by_key[key]
