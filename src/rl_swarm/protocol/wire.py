"""Encodes records for travel: one canonical form, a digest and a signature inside, limits before decoding.

A sealed document is a JSON object whose `digest` is the SHA-256 of the canonical encoding of its other
fields (`signature` aside) and whose `signature` is its author's, `peer_id`, over the same bytes. The
digest tells a file that is still being written from a forged one. Compression is outside of all that: a reader takes
gzip and plain JSON alike.
"""

import base64
import binascii
import gzip
import hashlib
import re
import threading
import zlib
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from rl_swarm.errors import UserError
from rl_swarm.protocol.identity import Identity, is_peer_id, verify
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.untrusted import plain, quoted

T = TypeVar("T")
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]  # what every reader of JSON can hold
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]  # of a node, a swarm, a package
Id = Annotated[str, Meta(max_length=64)]

MAX_BYTES = 4 << 20  # of one document, after decompression
MAX_DEPTH = 12
MAX_ITEMS = 200_000  # values in one document, keys not counted
MAX_TEXT = 1 << 19  # bytes of one string: 131,072 characters of four
MAX_NUMBER = 24  # characters: -1.7976931348623157e+308
MAX_EXPONENTS = 10_000  # numbers with one: near the ends of a float's range they take a thousand times as long
MAX_DETAIL = 300  # characters of the reason why a document is refused
# Raised by msgspec for bytes that are no JSON: not closed, no UTF-8, or nested too deep.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
MAX_MEMORY = 6 * MAX_BYTES  # what all values may take once they are built, by the estimate below
# Bytes for one of each, measured from above, and per byte of text: one emoji makes a string four times as wide.
_OBJECT, _LIST, _KEY, _STRING, _VALUE, _WIDEST = 240, 96, 96, 120, 40, 4
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_converting = threading.Lock()  # msgspec crashes when several threads meet a type for the first time
_DIGITS = bytes(ord("0") if byte in b"0123456789+-.eE" else ord(" ") for byte in range(256))


class Rejected(Exception):
    """Reports that something a peer sent is not used.

    `detail` is for logs and may quote the peer, so it is short and escaped.
    """

    def __init__(self, reason: RejectReason, detail: str = "") -> None:
        shown = plain(detail, MAX_DETAIL)
        super().__init__(f"{reason}: {shown}" if shown else reason)
        self.reason = reason


class Incomplete(Rejected):
    """Reports a document that may be whole when it is read again: a half-written or half-synced file."""


class SealError(UserError):
    """Reports a document of this node that every receiver would refuse."""


def canonical(value: object) -> bytes:
    """Encode for hashing and signing: JSON, keys sorted, no spaces."""
    return msgspec.json.encode(value, order="deterministic")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def seal(record: msgspec.Struct, identity: Identity, compress: bool = False, limit: int = MAX_BYTES) -> bytes:
    """Sign a record, as a document that receivers with this limit accept; raise `SealError` if they would not."""
    data = sign(record, identity, compress)
    try:
        convert(decode(data, limit), type(record))
    except Rejected as error:
        what = type(record).__name__
        raise SealError(f"Every receiver would refuse this node's {what} ({error}).") from error
    return data


def sign(record: msgspec.Struct, identity: Identity, compress: bool = False) -> bytes:
    """Sign a record, whatever it holds."""
    fields: dict[str, object] = {**msgspec.to_builtins(record), "peer_id": identity.peer_id}
    message = canonical(fields)
    fields["digest"] = digest(message)
    fields["signature"] = base64.b64encode(identity.sign(message)).decode()
    data = msgspec.json.encode(fields)
    return gzip.compress(data, compresslevel=9, mtime=0) if compress else data


def unseal(data: bytes, kind: type[T], limit: int = MAX_BYTES) -> T:
    """Return the record in a sealed document after checking the author's signature; raise `Rejected`."""
    return unseal_with_digest(data, kind, limit)[0]


def unseal_with_digest(data: bytes, kind: type[T], limit: int = MAX_BYTES) -> tuple[T, str]:
    """Return the record and its digest, by which other documents can refer to it."""
    fields = decode(data, limit)
    claimed = fields.pop("digest", None)
    signature = fields.pop("signature", None)
    message = canonical(fields)
    if not isinstance(claimed, str) or claimed != digest(message):
        raise Incomplete(RejectReason.DIGEST, "the digest does not fit the content")
    peer_id = fields.get("peer_id")
    if not isinstance(peer_id, str) or not isinstance(signature, str):
        raise Rejected(RejectReason.SIGNATURE, "no author or no signature")
    try:
        raw = base64.b64decode(signature, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Rejected(RejectReason.SIGNATURE, "not base64") from error
    if not verify(peer_id, message, raw):
        raise Rejected(RejectReason.SIGNATURE, f"not signed by {peer_id if is_peer_id(peer_id) else quoted(peer_id)}")
    del message  # as large as the document, and the record is about to be built
    return convert(fields, kind), claimed


def convert(fields: Mapping[str, object], kind: type[T]) -> T:
    try:
        with _converting:
            return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise Rejected(RejectReason.SCHEMA, describe_mismatch(error)) from error


def describe_mismatch(error: msgspec.ValidationError) -> str:
    """Describe what does not fit a type, without the value that was given."""
    text = re.sub(r"(Invalid enum value|unknown field) .*?( - at|$)", r"\1\2", str(error), flags=re.DOTALL)
    return text.replace("`$.", "`").replace("`", "'")


def decode(data: bytes, limit: int = MAX_BYTES) -> dict[str, object]:
    """Return the JSON object in `data`, compressed or not, within the limits; raise `Rejected`."""
    text = decompress(data, min(limit, MAX_BYTES))
    check_shape(text)
    try:
        value = msgspec.json.decode(text)
    except UNREADABLE as error:
        raise Incomplete(RejectReason.JSON, str(error)) from error
    if not isinstance(value, dict):
        raise Rejected(RejectReason.SCHEMA, f"an object is needed, this is a {type(value).__name__}")
    return value


def decompress(data: bytes, limit: int) -> bytes:
    if len(data) > limit:
        raise Rejected(RejectReason.SIZE, f"{len(data)} bytes, at most {limit} are read")
    if not data.startswith(b"\x1f\x8b"):
        return data
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        text = stream.decompress(data, limit + 1)
    except zlib.error as error:
        raise Incomplete(RejectReason.GZIP, str(error)) from error
    if len(text) > limit:
        raise Rejected(RejectReason.SIZE, f"more than {limit} bytes after decompression")
    if not stream.eof:
        raise Incomplete(RejectReason.GZIP, "the stream ends early")
    if stream.unused_data:
        raise Incomplete(RejectReason.GZIP, "something follows the stream")
    return text


def check_shape(text: bytes) -> None:
    """Bound the cost of decoding before anything is built, by what stands outside of strings."""
    plain = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    strings = plain.count(b'"') // 2
    memory = strings * _STRING + len(text) * _WIDEST
    if strings > 2 * MAX_ITEMS or memory > MAX_MEMORY:  # a key and a value
        raise Rejected(RejectReason.ITEMS, "too many strings")
    pieces = plain.split(b'"')
    if max(map(len, islice(pieces, 1, None, 2)), default=0) > MAX_TEXT:
        raise Rejected(RejectReason.TEXT, f"a string of more than {MAX_TEXT} bytes")
    # A join takes 80 bytes for each of its pieces while it lasts, hence some at a time.
    outside = b" ".join([b" ".join(pieces[k : k + 4096 : 2]) for k in range(0, len(pieces), 4096)])
    del plain, pieces
    objects, lists = outside.count(b"{"), outside.count(b"[")
    values = outside.count(b",") + objects + lists
    if values > MAX_ITEMS:
        raise Rejected(RejectReason.ITEMS, f"more than {MAX_ITEMS} values")
    memory += objects * _OBJECT + lists * _LIST + outside.count(b":") * _KEY + values * _VALUE
    if memory > MAX_MEMORY:
        raise Rejected(RejectReason.ITEMS, f"its values would take more than {MAX_MEMORY >> 20} MiB")
    _check_numbers(outside)
    if objects + lists > MAX_DEPTH:
        _check_depth(outside)


def _check_numbers(outside: bytes) -> None:
    if b"0" * (MAX_NUMBER + 1) in outside.translate(_DIGITS):
        raise Rejected(RejectReason.NUMBER, f"a number of more than {MAX_NUMBER} characters")
    letters = outside.count(b"e") + outside.count(b"E")
    if letters - outside.count(b"true") - outside.count(b"false") > MAX_EXPONENTS:
        raise Rejected(RejectReason.NUMBER, f"more than {MAX_EXPONENTS} numbers with an exponent")


def _check_depth(outside: bytes) -> None:
    depth = 0
    for byte in outside.translate(None, _NO_BRACKETS):
        if byte in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise Rejected(RejectReason.DEPTH, f"nested deeper than {MAX_DEPTH}")
        else:
            depth -= 1
