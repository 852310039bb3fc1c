"""Defines the signed notices in the DHT, by which a peer announces a document: its place, size and digest."""

import hashlib
import ipaddress
import logging
from functools import lru_cache
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rl_swarm.network.documents import DocumentKey, Kind
from rl_swarm.network.layout import folder_of, key_at, path_of
from rl_swarm.protocol.wire import Count, Id, Rejected, unseal

log = logging.getLogger(__name__)

MAX_CONTENT = 3 << 10  # bytes of a document that travels in its notice: an introduction with RSA keys and a ticket
MAX_NOTICE = 6 << 10
KEPT_SECONDS = 600.0  # in the DHT, and renewed before that
REPORT_SECONDS = 120.0  # the same of a round's reports, of which only the newest is renewed
EARLIEST, LATEST = KEPT_SECONDS, 60.0  # seconds by which the clock of a notice's author may differ
MAX_OF_AUTHOR_IN_KEY = 2  # notices of one author under one key; no node needs more
REMEMBERED = 4096  # records that have been read, so that their signatures are not checked again
DEEPEST = 12  # bits of the smallest part of the introductions
MANIFESTS = "rl-swarm/manifests"
NOT_ANNOUNCED = (Kind.ROLLOUTS, Kind.ARCHIVE)  # which are asked for by their author's name


class DhtRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Announces a document that its author keeps."""

    peer_id: Id = ""
    kind: Literal["notice"] = "notice"
    swarm: Id
    path: Annotated[str, Meta(max_length=200)]
    sha256: Annotated[str, Meta(max_length=64)]
    size: Count
    timestamp: float
    content: Annotated[str, Meta(max_length=MAX_CONTENT)] = ""
    # On introductions, how large a part of them its author reads (`members.py`).
    depth: Annotated[int, Meta(ge=0, le=DEEPEST)] = 0
    # Where its author can be reached, on introductions and manifests.
    addresses: Annotated[list[Annotated[str, Meta(max_length=200)]], Meta(max_length=8)] = []

    @property
    def key(self) -> DocumentKey | None:
        """Return the key of the announced document; None where there is no such document."""
        return key_at(self.path)

    def dht_keys(self) -> list[str]:
        """Return the DHT keys under which it may lie."""
        if self.key is None:
            return []
        if self.key.kind is Kind.INTRODUCTION:
            return [dht_key(self.swarm, part) for part in parts_of(self.swarm, self.peer_id)]
        return [group_key(self.swarm, self.key)]

    def subkey(self) -> str:
        return f"{self.peer_id}/{self.path.rpartition('/')[2]}"

    def report_round(self) -> int | None:
        """Return the round of a report; None for any other document."""
        return self.key.round if self.key is not None and self.key.kind is Kind.REPORT else None

    def latest_expiry(self) -> float:
        """Return when it has to expire, by the time that its author signed: a sender may choose any expiry."""
        return self.timestamp + (KEPT_SECONDS if self.report_round() is None else REPORT_SECONDS) + LATEST


def request_for(key: DocumentKey) -> bytes:
    """Return what a peer is sent when it is asked for a document."""
    return path_of(key).encode("ascii")


def requested(request: bytes) -> DocumentKey | None:
    """Return the document that a peer asks for; None where there is no such document."""
    try:
        return key_at(request.decode("ascii"))
    except UnicodeDecodeError:
        return None


def group_key(swarm: str, key: DocumentKey) -> str:
    """Return the DHT key of the records of a document's group."""
    return dht_key(swarm, folder_of(key))


def dht_key(swarm: str, part: str) -> str:
    """Return the DHT key of a part of a swarm. Manifests have one key for all swarms: newcomers know no swarm yet."""
    return f"rl-swarm/{swarm}/{part}" if part else MANIFESTS


def parts_of(swarm: str, peer_id: str) -> list[str]:
    """Return the parts of the introductions to which a peer belongs, from the whole to the smallest. Its id decides."""
    place = int.from_bytes(hashlib.sha256(f"{swarm}/{peer_id}".encode()).digest()[:4], "big")
    bits = f"{place:032b}"
    return ["peers", *(f"peers/{bits[:depth]}" for depth in range(1, DEEPEST + 1))]


def acceptable(key: str | None, subkey: str, value: bytes, now: float) -> DhtRecord | None:
    """Return the notice in a record if it is signed by its author, in its place, and of now; otherwise None."""
    notice = _unsealed(value)
    if notice is None or notice.subkey() != subkey or (key is not None and key not in notice.dht_keys()):
        return None
    if notice.key is None or notice.key.kind in NOT_ANNOUNCED:
        return None
    return notice if now - EARLIEST <= notice.timestamp <= now + LATEST else None


@lru_cache(REMEMBERED)
def _unsealed(value: bytes) -> DhtRecord | None:
    """Read a notice whose signature is valid. The same ones are read again at every look."""
    try:
        return unseal(value, DhtRecord, MAX_NOTICE)
    except Rejected as error:
        log.debug("a record is refused: %s", error)
        return None


def subnet_of(address: str) -> str:
    """Return the subnet of a multiaddress; nothing for one of a private network or through a relay."""
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
