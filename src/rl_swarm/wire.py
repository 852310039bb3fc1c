"""How records travel: one canonical encoding, a digest and a signature inside, limits before decoding.

A sealed document is a JSON object whose `digest` is the SHA-256 of the canonical encoding of its other
fields (`signature` aside) and whose `signature` is its author's, `peer_id`, over the same bytes. The
digest tells a file that is still being written from one that was forged. Compression is outside of all
that: a reader takes gzip and plain JSON alike.
"""

import base64
import binascii
import gzip
import hashlib
import zlib
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from rl_swarm.identity import Identity, verify

T = TypeVar("T")

MAX_BYTES = 4 << 20  # of one document, after decompression
MAX_DEPTH = 12
MAX_ITEMS = 200_000  # values in one document, keys not counted
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class Rejected(Exception):
    """Something a peer sent that is not used. `reason` is one of a few words that are counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Incomplete(Rejected):
    """A document that may be whole when it is read again: a half-written or half-synced file."""


def canonical(value: object) -> bytes:
    """The one encoding that is hashed and signed: JSON, keys sorted, no spaces."""
    return msgspec.json.encode(value, order="deterministic")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def seal(record: msgspec.Struct, identity: Identity, compress: bool = False) -> bytes:
    """The record as a signed document, ready to be written or sent."""
    fields: dict[str, object] = {**msgspec.to_builtins(record), "peer_id": identity.peer_id}
    message = canonical(fields)
    fields["digest"] = digest(message)
    fields["signature"] = base64.b64encode(identity.sign(message)).decode()
    data = msgspec.json.encode(fields)
    return gzip.compress(data, compresslevel=9, mtime=0) if compress else data


def unseal(data: bytes, kind: type[T], limit: int = MAX_BYTES) -> T:
    """The record in a sealed document, its author's signature checked; raises `Rejected`."""
    return unseal_named(data, kind, limit)[0]


def unseal_named(data: bytes, kind: type[T], limit: int = MAX_BYTES) -> tuple[T, str]:
    """The record and its digest, by which others can refer to it."""
    fields = decode(data, limit)
    claimed = fields.pop("digest", None)
    signature = fields.pop("signature", None)
    message = canonical(fields)
    if not isinstance(claimed, str) or claimed != digest(message):
        raise Incomplete("digest", "the digest does not fit the content")
    peer_id = fields.get("peer_id")
    if not isinstance(peer_id, str) or not isinstance(signature, str):
        raise Rejected("signature", "no author or no signature")
    try:
        raw = base64.b64decode(signature, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Rejected("signature", "not base64") from error
    if not verify(peer_id, message, raw):
        raise Rejected("signature", f"not signed by {peer_id[:64]}")
    return typed(fields, kind), claimed


def typed(fields: Mapping[str, object], kind: type[T]) -> T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise Rejected("schema", str(error)) from error


def decode(data: bytes, limit: int = MAX_BYTES) -> dict[str, object]:
    """The JSON object in `data`, compressed or not, within the limits; raises `Rejected`."""
    text = decompress(data, limit)
    check_shape(text)
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Incomplete("json", str(error)) from error
    if not isinstance(value, dict):
        raise Rejected("schema", f"an object is needed, this is a {type(value).__name__}")
    return value


def decompress(data: bytes, limit: int) -> bytes:
    if len(data) > limit:
        raise Rejected("size", f"{len(data)} bytes, at most {limit} are read")
    if not data.startswith(b"\x1f\x8b"):
        return data
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        text = stream.decompress(data, limit + 1)
    except zlib.error as error:
        raise Incomplete("gzip", str(error)) from error
    if len(text) > limit:
        raise Rejected("size", f"more than {limit} bytes after decompression")
    if not stream.eof:
        raise Incomplete("gzip", "the stream ends early")
    return text


def check_shape(text: bytes) -> None:
    """Bounds depth and number of values before anything is built. Counts brackets and commas outside of strings."""
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 4 * MAX_ITEMS:  # two for every key and every value
        raise Rejected("items", f"more than {MAX_ITEMS} values")
    outside = b"".join(plain.split(b'"')[::2])
    if outside.count(b",") + outside.count(b"[") + outside.count(b"{") > MAX_ITEMS:
        raise Rejected("items", f"more than {MAX_ITEMS} values")
    if outside.count(b"[") + outside.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for byte in outside.translate(None, _NO_BRACKETS):
        if byte in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise Rejected("depth", f"nested deeper than {MAX_DEPTH}")
        else:
            depth -= 1
