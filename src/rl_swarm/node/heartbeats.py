"""Sends a node's heartbeats: its introduction, written again with the phase that the node is in."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from rl_swarm.errors import UserError
from rl_swarm.network.coordinator import DocumentCoordinator
from rl_swarm.network.presence import Watch
from rl_swarm.protocol.rounds import PeerInfo

log = logging.getLogger(__name__)

MAX_FAILURES = 4  # heartbeats in a row that could not be written
PHASE_SECONDS = 1.0  # at least, between heartbeats that tell a new phase, in a folder on this machine
LOCAL_POLL = 1.0  # seconds between looks at a folder; a drive or a store is looked at less often
WORDS = {  # of the parts of a round that a stopwatch measures, as peers and people read them
    "questions": "sampling", "generate": "sampling", "score": "scoring", "publish": "collecting",
    "collect": "collecting", "train": "training", "report": "training",
}  # fmt: skip


class CurrentPhase:
    """Holds what a node is doing now, for its heartbeats."""

    def __init__(self) -> None:
        self.word = ""
        self.changed = threading.Event()

    def begin(self, part: str) -> None:
        """Begin a part of a round, or `waiting` for the others, or `measuring` the held-out score."""
        word = WORDS.get(part, part)
        if word != self.word:
            self.word = word
            self.changed.set()


@contextmanager
def heartbeats(
    coordinator: DocumentCoordinator,
    peer: PeerInfo,
    every: float,
    stop: threading.Event,
    watch: Watch,
    phase: CurrentPhase | None = None,
    soonest: float | None = None,
) -> Iterator[None]:
    """Send heartbeats in the background, however long a round takes; end the node when they fail.

    A phase that begins is told at once, but `soonest` seconds after the last heartbeat. Without that it waits for the
    next one.
    """
    done, phase = threading.Event(), phase or CurrentPhase()
    pause = every if soonest is None else min(soonest, every)
    failures: list[OSError] = []  # in a row
    twins: list[UserError] = []

    def beat() -> None:
        sent = time.monotonic()
        while True:
            phase.changed.wait(max(0.0, sent + every - time.monotonic()))
            least = every if failures else pause
            if done.wait(max(0.0, sent + least - time.monotonic())):
                return
            if watch.must_yield(peer):
                twins.append(watch.error())
                stop.set()
                return
            phase.changed.clear()
            try:
                coordinator.register(
                    msgspec.structs.replace(peer, timestamp=time.time(), phase=phase.word or msgspec.UNSET)
                )
                failures.clear()
            except OSError as error:
                log.warning("no heartbeat could be written: %s", error)
                failures.append(error)
            sent = time.monotonic()
            if len(failures) == MAX_FAILURES:
                stop.set()
                return

    thread = threading.Thread(target=beat, name=threading.current_thread().name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        phase.changed.set()
    if twins:
        raise twins[0]
    if len(failures) == MAX_FAILURES:
        raise failures[-1]


def phase_pause(is_url: bool, poll: float) -> float | None:
    """Return how soon a new phase is told: in a folder that is not looked at so often, with the next heartbeat."""
    return None if is_url or poll > LOCAL_POLL else PHASE_SECONDS
