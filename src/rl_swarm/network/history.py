"""Keeps the history of a swarm: one line per stage that ended, signed by the owner."""

import io
import threading
from pathlib import Path

from rl_swarm.network.documents import HISTORY, DocumentStore
from rl_swarm.network.retries import retry
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.rounds import StageRecord
from rl_swarm.protocol.wire import Rejected, seal, unseal
from rl_swarm.storage.beneath import Misplaced
from rl_swarm.storage.shared_log import SharedLog

HISTORY_BYTES = 64 << 20
MIN_LINE = 200  # bytes of a line, signature included


class StageHistory:
    """Writes the history into a private log, with a copy in the store that everybody can read."""

    def __init__(self, private: Path, store: DocumentStore, manifest: Manifest, stop: threading.Event) -> None:
        self.store, self.manifest, self.stop = store, manifest, stop
        self.log = SharedLog(private, store, HISTORY)

    def append(self, record: StageRecord, owner: Identity) -> None:
        self.log.append(seal(record, owner) + b"\n")

    def copy(self) -> None:
        self.log.copy()

    def read(self) -> list[StageRecord]:
        """Return the stages that ended. On a machine without a log, the owner's lines in the store become the log."""
        if not self.log.size:
            try:
                data = retry(lambda: self.store.read(HISTORY, HISTORY_BYTES), self.stop)
            except (FileNotFoundError, Misplaced):
                return []
            self.log.replace(b"".join(line for line in data.splitlines(keepends=True) if self._is_owners(line)))
        self.log.copy()
        return parse_history(self.log.read())[0]

    def _is_owners(self, line: bytes) -> bool:
        """Tell whether a line is whole and signed by this swarm's owner."""
        records, _ = parse_history(line)
        signed = [(each.peer_id, each.swarm) == (self.manifest.peer_id, self.manifest.swarm()) for each in records]
        return line.endswith(b"\n") and any(signed)


def read_history(store: DocumentStore) -> tuple[list[StageRecord], int]:
    """Return the stages that ended, and how many lines cannot be read (a crash may leave one half)."""
    try:
        return parse_history(store.read(HISTORY, HISTORY_BYTES))
    except FileNotFoundError:
        return [], 0


def parse_history(data: bytes) -> tuple[list[StageRecord], int]:
    records, unreadable = [], 0
    for line in filter(None, (line.rstrip() for line in io.BytesIO(data))):
        try:
            if len(line) < MIN_LINE:
                raise Rejected(RejectReason.SIZE)
            records.append(unseal(line, StageRecord))
        except Rejected:
            unreadable += 1
    return records, unreadable
