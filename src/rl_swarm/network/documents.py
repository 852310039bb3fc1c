"""Names a swarm's documents by typed keys, and defines a store of them: a folder, a bucket, or peers."""

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol

SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # of a node
RECORD_BYTES = 64 << 10  # of a report or an introduction; rollouts have the manifest's limit


class Kind(str, Enum):
    """Lists what a swarm writes down."""

    MANIFEST = "manifest"  # what this swarm is
    ACCESS_LIST = "access list"  # whom the owner allows and denies
    STATE = "state"  # round, stage and members, written by the coordinator alone
    HISTORY = "history"  # one signed line per stage that ended
    INTRODUCTION = "introduction"  # who takes part
    ROLLOUTS = "rollouts"  # what a node published
    ARCHIVE = "archived rollouts"
    REPORT = "report"  # a node's reward and its vote


class DocumentKey(NamedTuple):
    """Names a document. Without a node, it names the group of all nodes' documents of one kind, round and stage."""

    kind: Kind
    round: int = 0
    stage: int = 0
    node: str = ""

    def of(self, node: str) -> "DocumentKey":
        """Return the key of one node's document in this group."""
        return self._replace(node=node)

    @property
    def group(self) -> "DocumentKey":
        return self._replace(node="")


MANIFEST = DocumentKey(Kind.MANIFEST)
ACCESS_LIST = DocumentKey(Kind.ACCESS_LIST)
STATE = DocumentKey(Kind.STATE)
HISTORY = DocumentKey(Kind.HISTORY)
PEERS = DocumentKey(Kind.INTRODUCTION)


def rollouts_key(round: int, stage: int, node: str = "") -> DocumentKey:
    return DocumentKey(Kind.ROLLOUTS, round, stage, node)


def report_key(round: int, stage: int, node: str = "") -> DocumentKey:
    return DocumentKey(Kind.REPORT, round, stage, node)


class DocumentStore(Protocol):
    """Keeps documents by key. `OSError` means: not now, perhaps later. What it returns may have been put there by
    anybody."""

    @property
    def root(self) -> Path | str:
        """Return the address of the store, as a person would write it."""
        ...

    def name(self, key: DocumentKey) -> str:
        """Return what a person would look for: with a folder, the path of a file."""
        ...

    def read(self, key: DocumentKey, limit: int) -> bytes:
        """Read at most `limit + 1` bytes, so that the caller can tell when there were more."""
        ...

    def write(self, key: DocumentKey, data: bytes) -> None:
        """Replace a document, atomically where the store can."""
        ...

    def append(self, key: DocumentKey, data: bytes, at: int | None = None) -> None:
        """Add to a document; raise `Changed` unless it has `at` bytes before."""
        ...

    def nodes(self, group: DocumentKey) -> list[str]:
        """List the nodes that have a document in a group."""
        ...

    def rounds(self, kind: Kind) -> list[int]:
        """List the rounds of which there are documents of a kind."""
        ...

    def remove_rollouts(self, round: int, archive: bool) -> None:
        """Remove a round's rollouts, or move them into the archive."""
        ...

    def stamp(self, key: DocumentKey) -> tuple[int, ...] | None:
        """Return what differs once a document has changed; None where only reading tells."""
        ...

    def subnets(self) -> Mapping[str, str]:
        """Return the subnets of peers whose addresses this node sees."""
        ...
