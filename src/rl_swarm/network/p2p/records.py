"""Signs notices in the DHT: a peer has a document, where it lies, how large it is, its digest."""

import hashlib
import ipaddress
import logging
import re
from functools import lru_cache
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rl_swarm.protocol.wire import Count, Id, Rejected, unseal

log = logging.getLogger(__name__)

MAX_INSIDE = 3 << 10  # bytes of a document that travels in its notice: an introduction with RSA keys and a ticket
MAX_NOTICE = 6 << 10
KEPT_SECONDS = 600.0  # in the DHT, and renewed before that
REPORT_SECONDS = 120.0  # the same of a round's reports, of which only the newest is renewed
EARLIEST, LATEST = KEPT_SECONDS, 60.0  # seconds by which the clock of a notice's author may differ
MAX_OF_AUTHOR_IN_KEY = 2  # notices of one author under one key; nobody needs more
REMEMBERED = 4096  # records that have been read, so that their signatures are not checked again
DEEPEST = 12  # bits of the smallest part of the introductions
REPORTS = re.compile(r"rewards/round_(0|[1-9][0-9]{0,8})/stage_(0|[1-9][0-9]{0,3})")
OTHER_FOLDERS = ("", "peers", "state")  # in which there are documents that others have to find


class DhtRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A document that its author keeps."""

    peer_id: Id = ""
    kind: Literal["notice"] = "notice"
    swarm: Id
    path: Annotated[str, Meta(max_length=200)]
    sha256: Annotated[str, Meta(max_length=64)]
    size: Count
    timestamp: float
    inside: Annotated[str, Meta(max_length=MAX_INSIDE)] = ""
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

    def report_round(self) -> int | None:
        """Says of which round it is a report, if it is one."""
        found = REPORTS.fullmatch(self.folder)
        return int(found[1]) if found else None

    def latest_expiry(self) -> float:
        """Says when it has to be gone, by the time that its author signed: anybody may choose a record's expiry."""
        return self.timestamp + (KEPT_SECONDS if self.report_round() is None else REPORT_SECONDS) + LATEST


def key_of(swarm: str, folder: str) -> str:
    """Where notices of a folder are. Those of manifests are where somebody finds them who knows no swarm yet."""
    return f"rl-swarm/{swarm}/{folder}" if folder else "rl-swarm/manifests"


def parts_of(swarm: str, peer_id: str) -> list[str]:
    """The parts of the introductions to which a peer belongs, from the whole to the smallest. Nobody chooses them."""
    place = int.from_bytes(hashlib.sha256(f"{swarm}/{peer_id}".encode()).digest()[:4], "big")
    bits = f"{place:032b}"
    return ["peers", *(f"peers/{bits[:depth]}" for depth in range(1, DEEPEST + 1))]


def acceptable(key: str | None, subkey: str, value: bytes, now: float) -> DhtRecord | None:
    """The notice in a record, if it is one: signed by whom it is of, where it belongs, of now."""
    notice = _unsealed(value)
    if notice is None or notice.subkey() != subkey or (key is not None and key not in notice.where()):
        return None
    if notice.folder not in OTHER_FOLDERS and notice.report_round() is None:
        return None
    return notice if now - EARLIEST <= notice.timestamp <= now + LATEST else None


@lru_cache(REMEMBERED)
def _unsealed(value: bytes) -> DhtRecord | None:
    """Reads a notice whose signature is right. The same ones are read again at every look."""
    try:
        return unseal(value, DhtRecord, MAX_NOTICE)
    except Rejected as error:
        log.debug("a record is refused: %s", error)
        return None


def subnet_of(address: str) -> str:
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
