"""Lists groups of documents that anybody can fill: the fuller one is, the less often."""

import time
from collections.abc import Callable

from rl_swarm.network.documents import DocumentKey, DocumentStore, Kind

MAX_QUICK = 1000  # documents of a group that may be listed at every look
REST = 20.0  # times as long as listing a fuller one took, nothing is listed


class ThrottledListing:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._again: dict[Kind, float] = {}  # when the next group of a kind may be listed

    def nodes(self, store: DocumentStore, group: DocumentKey) -> list[str] | None:
        """List the nodes that have a document in a group; None while listing pauses."""
        started = self._clock()
        if started < self._again.get(group.kind, started):
            return None
        found = store.nodes(group)
        took = self._clock() - started
        self._again[group.kind] = started + took * (REST if len(found) > MAX_QUICK else 1)
        return found
