"""Fuzzes everything that is read from peers, guided by coverage.

It starts from real sealed documents of every kind and changes bytes, JSON tokens or fields. Changed fields are signed
again, because every holder of a key can sign anything. A message that reaches a new line or a new verdict is kept and
changed further. A case fails when a reader raises any error but `Rejected`, takes a second, or believes an unsigned
record.
"""

import base64
import contextlib
import gzip
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import msgspec
from cryptography.hazmat.primitives import serialization

from benchmarks.robustness.fuzz_records import ALICE, AUTHORS, OLD, RECORDS, SIGNERS, SWARM
from benchmarks.robustness.fuzz_target import MEBIBYTE, Case, Harm, Target
from rl_swarm.network import coordinator, exchange, history, owner_documents
from rl_swarm.network.documents import RECORD_BYTES, DocumentKey
from rl_swarm.protocol import admission, identity, manifest, rollouts, rounds, wire
from rl_swarm.protocol.admission import AccessList
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Limits
from rl_swarm.protocol.rollouts import unpack
from rl_swarm.protocol.rounds import PeerInfo, Report, Rules, StageRecord
from rl_swarm.protocol.wire import Rejected, canonical, digest, seal

SLOWEST = 1.0  # seconds of CPU time that one message may take
TRACED = 1 << 16  # bytes: longer messages are read without tracing, which would take most of the time
KEPT, KEPT_BYTES = 4096, 1 << 15  # messages that were new, and their size
LARGE = 2000  # one message in so many is made as large as it may be
WATCHED = {
    module.__file__
    for module in (wire, rollouts, identity, admission, rounds, manifest, exchange, history, owner_documents)
}


class OneDocument:
    """Returns the same content for every document."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, key: DocumentKey, limit: int) -> bytes:
        return self.data[: limit + 1]


def read_publication(data: bytes) -> msgspec.Struct:
    found = EXCHANGE._checked(data, (1, 0, "alice"))
    for limits in (Limits(), Limits(questions=1, completions=2, characters=16)):
        list(unpack(found, limits))
    return found


def read_manifest(data: bytes) -> msgspec.Struct:
    found = owner_documents.read_manifest(OneDocument(data))  # type: ignore[arg-type]
    found.swarm()
    found.questions_key()
    Rules.of(found)
    return found


def read_state(data: bytes) -> msgspec.Struct:
    found = owner_documents.read_state(OneDocument(data), SWARM)  # type: ignore[arg-type]
    found.leaderboard()
    coordinator.is_past(found, (0, 0))
    return found


def read_history(data: bytes) -> msgspec.Struct:
    line = data.replace(b"\n", b" ")
    history.parse_history(line + b"\n" + line[: len(line) // 2])
    return wire.unseal(data, StageRecord)


def read_peer(data: bytes) -> msgspec.Struct:
    found = wire.unseal_with_digest(data, PeerInfo, RECORD_BYTES)[0]
    admission.admit(SWARM, AccessList(swarm=SWARM.swarm()), {}, found.peer_id, found.ticket, now=1.0)
    return found


def read_access_list(data: bytes) -> msgspec.Struct:
    found = owner_documents.read_access_list(OneDocument(data), SWARM)  # type: ignore[arg-type]
    admission.refusal_reason(SWARM, found, ALICE.peer_id, None)
    return found


EXCHANGE = exchange.DocumentExchange(None, SWARM, ALICE, "bob", None, None)  # type: ignore[arg-type]
READERS: dict[str, Callable[[bytes], msgspec.Struct]] = {
    "manifest": read_manifest,
    "publication": read_publication,
    "report": lambda data: wire.unseal_with_digest(data, Report, RECORD_BYTES)[0],
    "peer": read_peer,
    "access_list": read_access_list,
    "state": read_state,
    "stage": read_history,
}


@dataclass(frozen=True)
class Message:
    kind: str
    data: bytes
    unaltered: msgspec.Struct | None = None  # the one record it may be read as, when only bytes were changed
    author: str = ""  # a peer id made up for this message


class Coverage:
    """Records the steps from line to line in the watched files."""

    def __init__(self) -> None:
        self.seen: set[tuple[CodeType, int, int]] = set()
        self._before: dict[FrameType, int] = {}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)
            self._before.clear()

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename in WATCHED else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        line = -1 if event == "return" else frame.f_lineno
        self.seen.add((frame.f_code, self._before.get(frame, 0), line))
        self._before[frame] = line
        return self._line


TOKENS = [
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u0000", b"\\ud800", b"\\udc00", b"\\x", b"null"),
    *(b"true", b"false", b"NaN", b"Infinity", b"-0", b"-", b"1e999", b"5e-324", b"1.7976931348623157e308"),
    *(b"9" * 25, b"18446744073709551616", b"0.1", b"\xef\xbb\xbf", b"\xff", b"\xed\xa0\x80", b"\0", b"\n"),
    *(b'"peer_id":', b'"digest":', b'"signature":', b'"kind":', b'"round":', b"\x1f\x8b", b"12D3KooW"),
]
VALUES: list[object] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, 2**64, 10**23, -(2**63), 0.0, -0.0, 0.5, 1e300, 5e-324),
    *("", "a", "0", "01", "é", "😀", "\0", "\x1b[31m", "../x", "a" * 65, "a" * 300, "١", "12D3KooW", ALICE.peer_id),
    *([], {}, [[]], {"": {}}, [0, 1], ["a"], {"0": []}, {"0": [{}]}, [None], {"a": 1}, "x" * (1 << 17)),
]  # fmt: skip


def signed(fields: dict[str, Any], author: Identity, rng: random.Random) -> bytes:
    """Sign any fields, as every holder of a key can, with one of several JSON encoders."""
    fields = {**fields, "peer_id": author.peer_id}
    message = canonical(fields)
    fields["digest"] = digest(message)
    fields["signature"] = base64.b64encode(author.sign(message)).decode()
    writer = rng.randrange(6)
    if writer == 0:
        return json.dumps(fields, indent=1).encode()
    if writer == 1:
        order = rng.sample(sorted(fields), len(fields))
        return json.dumps({name: fields[name] for name in order}, ensure_ascii=False).encode()
    data = msgspec.json.encode(fields)
    return gzip.compress(data, compresslevel=1, mtime=0) if writer == 2 else data


def with_strange_key(fields: dict[str, Any], rng: random.Random) -> tuple[str, bytes]:
    """Make a document whose signature contains an invalid public key, under the peer id that fits it."""
    public = OLD.key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    for _ in range(rng.choice((1, 1, 2, 8))):
        public = change_bytes(public, [public], rng)
    peer_id = identity.rsa_peer_id(public)
    message = canonical({**fields, "peer_id": peer_id})
    shown = len(public).to_bytes(4, "big")[2:] + public + OLD.sign(message)[-256:]
    signature = base64.b64encode(shown).decode()
    return peer_id, msgspec.json.encode(
        {**fields, "peer_id": peer_id, "digest": digest(message), "signature": signature}
    )


def change_bytes(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 1, 2, 4, 16, 256)))
    how = rng.randrange(9)
    if how <= 1 and at < len(data):
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if how == 2:
        return data[:at] + data[end:]
    if how == 3:
        return data[:end] + data[at:end] * rng.choice((1, 2, 50)) + data[end:]
    if how == 4:
        return data[:at] + rng.choice(TOKENS) * rng.choice((1, 1, 1, 13, 300)) + data[at:]
    if how == 5:
        return data[:at] + rng.choice(TOKENS) + data[end:]
    if how == 6:
        other = rng.choice(others)
        return data[:at] + other[rng.randrange(len(other) + 1) :]
    if how == 7:
        return gzip.compress(data, compresslevel=1, mtime=0) + rng.choice((b"", b"", b"x", gzip.compress(b"{}")))
    return data[:at]


def change_fields(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """Return the value with a part replaced, left out, added or moved."""
    if isinstance(value, dict) and value and (depth == 0 or rng.random() < 0.7):
        name = rng.choice(list(value))
        how = rng.randrange(6)
        changed = dict(value)
        if how == 0:
            del changed[name]
        elif how == 1:
            changed[str(rng.choice(VALUES))] = rng.choice(VALUES)
        elif how == 2:
            changed[name] = value[rng.choice(list(value))]
        else:
            changed[name] = change_fields(value[name], rng, depth + 1)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        how = rng.randrange(4)
        if how == 0:
            return value[:at] + value[at + 1 :]
        if how == 1:
            return value + value[at : at + 1] * rng.choice((1, 3, 300))
        return [*value[:at], change_fields(value[at], rng, depth + 1), *value[at + 1 :]]
    if isinstance(value, str) and value and rng.random() < 0.3:
        return value + rng.choice(("\0", "é", "😀", " ", "\n", "a" * 70))
    if isinstance(value, int | float) and rng.random() < 0.3:
        return rng.choice((value + 1, -value, value * 10**6, value / 3))
    if rng.random() < 0.1:
        for _ in range(rng.randrange(14)):
            value = rng.choice(([value], {"a": value}))
        return value
    return rng.choice(VALUES)


def large(fields: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return as many small values as a document may hold, in an unexpected field or among the rollouts."""
    item = rng.choice(("😀" + "x" * 50, "é", 0, 0.5, 1e308, [], {}, {"😀": "a"}, [[0]], {"a": {"b": {}}}))
    count = rng.choice((9_000, 30_000, 60_000, 130_000, 250_000))
    many: Any = [item] * count if rng.random() < 0.7 else {f"{k}": item for k in range(count)}
    return {**fields, rng.choice(("more", "rollouts", "members", "tasks")): many}


class Mutator:
    """Makes the next message from one that was kept."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.kept: dict[str, list[bytes]] = {
            name: [seal(record, SIGNERS[name]), seal(record, SIGNERS[name], compress=True)]
            for name, record in RECORDS.items()
        }

    def keep(self, message: Message) -> None:
        kept = self.kept[message.kind]
        if not message.author and len(message.data) <= KEPT_BYTES and sum(map(len, self.kept.values())) < KEPT:
            kept.append(message.data)

    def next(self) -> Message:
        rng = self.rng
        kind = rng.choice(list(RECORDS))
        others = self.kept[rng.choice(list(RECORDS))]
        if rng.random() < 0.2:  # a sealed document, altered on its way
            data = self.kept[kind][rng.random() < 0.2]
            for _ in range(rng.choice((1, 1, 2, 4))):
                data = change_bytes(data, others[:2], rng)  # with parts of other signed records: no other record
            return Message(kind, data, RECORDS[kind])
        data = rng.choice(self.kept[kind]) if rng.random() < 0.6 else self.kept[kind][0]
        fields = self._fields(data)
        if fields is None or rng.random() < 0.1:
            for _ in range(rng.choice((1, 2, 8))):
                data = change_bytes(data, others, rng)
            return Message(kind, data)
        for _ in range(rng.choice((1, 1, 1, 1, 2, 4))):
            changed = change_fields(fields, rng)
            fields = changed if isinstance(changed, dict) else fields
        if rng.randrange(LARGE) == 0:
            fields = large(fields, rng)
        if rng.random() < 0.03:
            author, data = with_strange_key(fields, rng)
            return Message(kind, data, author=author)
        signer = SIGNERS[kind] if rng.random() < 0.9 else rng.choice(list(AUTHORS.values()))
        data = signed(fields, signer, rng)
        return Message(kind, change_bytes(data, others, rng) if rng.random() < 0.1 else data)

    @staticmethod
    def _fields(data: bytes) -> dict[str, Any] | None:
        """Return the fields of a document, if it is one."""
        try:
            fields = wire.decode(data)
        except Rejected:
            return None
        return {name: value for name, value in fields.items() if name not in ("digest", "signature")}


def read(message: Message) -> tuple[str, str]:
    """Return the verdict on a message, as a reason and in words; raise any error but `Rejected`."""
    try:
        found = READERS[message.kind](message.data)
    except Rejected as error:
        return error.reason, str(error)
    if message.unaltered is not None and found != message.unaltered:
        raise Harm("a document that was altered on its way was accepted")
    if getattr(found, "peer_id", None) not in (*AUTHORS, message.author):
        raise Harm("a record was accepted that no identity here signed")
    return "", ""


_UNQUOTED = re.compile(r"'[^']*'|signed by .*|for round .*")  # the message's own claim


class Messages(Target):
    name = "messages"
    longest = 30.0
    growth = 32 * MEBIBYTE

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.mutator, self.coverage = Mutator(self.rng), Coverage()
        self.verdicts: set[str] = set()

    def next(self) -> Case:
        made = self.mutator.next()
        data = base64.b64encode(made.data).decode()
        return {"kind": made.kind, "data": data, "unaltered": made.unaltered is not None, "author": made.author}

    def play(self, case: Case) -> list[str]:
        unaltered = RECORDS[case["kind"]] if case["unaltered"] else None
        message = Message(case["kind"], base64.b64decode(case["data"]), unaltered, case["author"])
        before, clock = len(self.coverage.seen), time.process_time()
        traced = self.coverage.watch() if len(message.data) <= TRACED else contextlib.nullcontext()
        with traced:
            reason, words = read(message)
        if (seconds := time.process_time() - clock) > SLOWEST:
            raise Harm(f"{seconds:.2f} s of processor time for one message")
        verdict = f"{message.kind} {re.sub(r'[0-9]+', '0', _UNQUOTED.sub('', words))[:120]}"
        if len(self.coverage.seen) > before or verdict not in self.verdicts:
            if len(self.verdicts) < KEPT:
                self.verdicts.add(verdict)
            self.mutator.keep(message)
        return [f"{message.kind} {reason or 'accepted'}"]
