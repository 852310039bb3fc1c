"""Records between strangers: nothing false gets through, nothing large gets built, nothing else is raised."""

import base64
import gzip
import json
import math
import subprocess
import sys
import tracemalloc
import zlib
from hashlib import sha256
from typing import Literal

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.wire import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_EXPONENTS,
    MAX_ITEMS,
    MAX_MEMORY,
    MAX_NUMBER,
    MAX_TEXT,
    Incomplete,
    Rejected,
    SealError,
    canonical,
    check_shape,
    decode,
    digest,
    seal,
    sign,
    unseal,
    unseal_with_digest,
)

ALICE, MALLORY = Identity.generate(), Identity.generate()


class Note(msgspec.Struct, frozen=True, kw_only=True):
    peer_id: str = ""
    text: str
    numbers: list[float] = []
    count: int = 0


class Kinded(msgspec.Struct):
    kind: Literal["note"]


NOTE = Note(text='Grüße, "quoted" \\ and \n', numbers=[0.1, -2.5e-8, 1e300], count=3)
SIGNED = Note(peer_id=ALICE.peer_id, text=NOTE.text, numbers=NOTE.numbers, count=NOTE.count)


def fields_of(data):
    return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)


def signed(fields, identity):
    """A document as an attacker with a key of its own can make it, whatever the fields."""
    message = canonical({**fields, "peer_id": identity.peer_id})
    return canonical(
        {
            **fields,
            "peer_id": identity.peer_id,
            "digest": sha256(message).hexdigest(),
            "signature": base64.b64encode(identity.sign(message)).decode(),
        }
    )


@pytest.mark.parametrize("compress", [False, True])
def test_a_sealed_record_comes_back_with_its_author(compress):
    data = seal(NOTE, ALICE, compress)
    assert unseal(data, Note) == SIGNED
    assert data.startswith(b"\x1f\x8b") is compress


def test_the_seal_is_the_documented_one():
    """Checked with the standard library alone: anybody can write a reader of these files."""
    note = Note(text=NOTE.text, numbers=[0.1, -2.5, 3.0], count=3)
    fields = fields_of(seal(note, ALICE))
    claimed, signature = fields.pop("digest"), base64.b64decode(fields.pop("signature"))
    message = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert claimed == sha256(message).hexdigest()
    ALICE.key.public_key().verify(signature, message)
    assert unseal_with_digest(seal(note, ALICE), Note)[1] == claimed


def test_the_same_record_has_the_same_bytes_whoever_asks():
    assert seal(NOTE, ALICE, True) == seal(NOTE, ALICE, True)
    assert canonical({"b": 1, "a": [1.0, None]}) == b'{"a":[1.0,null],"b":1}'
    assert digest(b"") == sha256(b"").hexdigest()


@given(st.builds(Note, text=st.text(), numbers=st.lists(st.floats(allow_nan=False, allow_infinity=False))))
def test_every_record_survives_the_journey(note):
    assert unseal(seal(note, ALICE, compress=True), Note) == msgspec.structs.replace(note, peer_id=ALICE.peer_id)


@given(st.integers(0, 10_000), st.integers(1, 255), st.booleans())
def test_a_flipped_byte_is_noticed_or_changes_nothing(position, flip, compress):
    data = bytearray(seal(NOTE, ALICE, compress))
    data[position % len(data)] ^= flip
    try:
        found = unseal(bytes(data), Note)
    except Rejected:
        return
    assert found == SIGNED


def test_every_single_bit_of_a_document_is_guarded():
    data = seal(Note(text="ab", count=1), ALICE)
    through = 0
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            try:
                assert unseal(bytes(changed), Note) == Note(peer_id=ALICE.peer_id, text="ab", count=1)
                through += 1
            except Rejected:
                continue
    assert through < 8  # the last base64 digit of a signature holds four bits that mean nothing


@pytest.mark.parametrize("name", ["text", "numbers", "count", "peer_id"])
@pytest.mark.parametrize("digest_too", [False, True])
def test_no_field_can_be_changed_by_another(name, digest_too):
    fields = fields_of(seal(NOTE, ALICE))
    fields[name] = {"text": "other", "numbers": [0.1], "count": 4, "peer_id": MALLORY.peer_id}[name]
    if digest_too:
        body = {key: value for key, value in fields.items() if key not in ("digest", "signature")}
        fields["digest"] = digest(canonical(body))
    with pytest.raises(Rejected) as caught:
        unseal(canonical(fields), Note)
    assert caught.value.reason == ("signature" if digest_too else "digest")
    assert isinstance(caught.value, Incomplete) is not digest_too


@pytest.mark.parametrize("value", [None, 7, "", "====", "é", "AAAA", "A" * 10_000])
def test_a_signature_that_is_none_is_refused(value):
    fields = {**fields_of(seal(NOTE, ALICE)), "signature": value}
    with pytest.raises(Rejected, match="signature"):
        unseal(canonical(fields), Note)


def test_a_record_belongs_to_its_signer_whatever_it_says_inside():
    pretended = Note(peer_id=ALICE.peer_id, text="I am Alice")
    assert unseal(seal(pretended, MALLORY), Note).peer_id == MALLORY.peer_id
    with pytest.raises(Rejected, match="signature"):
        message = canonical({"text": "I am Alice", "peer_id": ALICE.peer_id})
        forged = {"text": "I am Alice", "peer_id": ALICE.peer_id, "digest": digest(message)}
        unseal(canonical({**forged, "signature": base64.b64encode(MALLORY.sign(message)).decode()}), Note)


@pytest.mark.parametrize("compress", [False, True])
def test_a_file_that_is_still_being_written_is_incomplete_at_every_length(compress):
    data = seal(NOTE, ALICE, compress)
    for length in range(len(data)):
        with pytest.raises(Incomplete):
            unseal(data[:length], Note)


def test_unknown_fields_are_ignored_but_signed():
    data = signed({"text": "hello", "invented_later": [1, 2]}, ALICE)
    assert unseal(data, Note).text == "hello"
    with pytest.raises(Rejected):
        unseal(data.replace(b"[1,2]", b"[1,3]"), Note)
    fields = json.loads(data)
    del fields["invented_later"]
    with pytest.raises(Rejected):
        unseal(canonical(fields), Note)


@pytest.mark.parametrize(
    "fields", [{}, {"text": 1}, {"text": None}, {"text": "a", "numbers": ["x"]}, {"text": "a", "count": 0.5}]
)
def test_a_signed_record_with_missing_or_wrong_fields_is_refused(fields):
    with pytest.raises(Rejected, match="schema") as caught:
        unseal(signed(fields, ALICE), Note)
    assert not isinstance(caught.value, Incomplete)


@pytest.mark.parametrize("text", [b"[]", b"7", b'"text"', b"null", b"true"])
def test_a_document_that_is_no_object_is_refused(text):
    with pytest.raises(Rejected, match="schema"):
        decode(text)


def test_a_number_that_is_none_cannot_be_smuggled_in():
    with pytest.raises(Rejected, match="schema"):
        unseal(sign(Note(text="a", numbers=[math.nan]), ALICE), Note)
    for text in (b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1e999}', b'{"a": ' + b"9" * 5000 + b"}"):
        with pytest.raises(Rejected):
            decode(text)


@pytest.mark.parametrize(
    ("note", "reason"),
    [
        (Note(text="a" * 1000), "size"),
        (Note(text="a", numbers=[math.nan]), "schema"),
        (Note(text="a", count="many"), "schema"),
    ],
)
def test_what_no_reader_would_take_is_not_sealed(note, reason):
    for compress in (False, True):
        with pytest.raises(SealError, match=f"Every receiver would refuse this node's Note \\({reason}"):
            seal(note, ALICE, compress, limit=1000)
        with pytest.raises(Rejected, match=reason):
            unseal(sign(note, ALICE, compress), Note, limit=1000)


def nested(depth):
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def bomb(size):
    """Compresses a thousandfold."""
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    return b"".join([packer.compress(bytes(1 << 20)) for _ in range(size >> 20)] + [packer.flush()])


HOSTILE = {
    "gzip bomb": (lambda: bomb(256 << 20), "size"),
    "too long": (lambda: b'{"a":"' + b"x" * MAX_BYTES + b'"}', "size"),
    "deep lists": (lambda: b"[" * (MAX_BYTES // 2), "items"),
    "somewhat deep lists": (lambda: b"[" * 100_000 + b"]" * 100_000, "depth"),
    "deep objects": (lambda: b'{"a":' * 30_000, "depth"),
    "very deep objects": (lambda: b'{"a":' * 100_000, "items"),
    "many values": (lambda: b"[" + b"0," * (MAX_BYTES // 2 - 2) + b"0]", "items"),
    "many empty lists": (lambda: b"[" + b"[]," * (MAX_BYTES // 3 - 1) + b"[]]", "items"),
    "many keys": (lambda: b"{" + b'"":0,' * (MAX_BYTES // 5 - 1) + b'"":0}', "items"),
    "many strings": (lambda: b"[" + b'"a",' * (MAX_BYTES // 4 - 2) + b'"a"]', "items"),
    "many quotes": (lambda: b'"' * MAX_BYTES, "items"),
    "as many quotes as pass": (lambda: b'"ab' * (MAX_MEMORY // 80), "json"),
    "many backslashes": (lambda: b'["' + b"\\" * (MAX_BYTES - 2), "text"),
    "many escaped quotes": (lambda: b'["' + b'\\"' * (MAX_BYTES // 2 - 1), "text"),
    "a long text": (lambda: b'{"a":"' + b"x" * (MAX_TEXT + 1) + b'"}', "text"),
    "a long key": (lambda: b'{"' + b"x" * (MAX_TEXT + 1) + b'":0}', "text"),
    "an endless integer": (lambda: b'{"a":' + b"9" * (3 << 20) + b"}", "number"),
    "an endless fraction": (lambda: b'{"a":0.' + b"1" * (3 << 20) + b"}", "number"),
    "an endless exponent": (lambda: b'{"a":1e' + b"1" * (3 << 20) + b"}", "number"),
    "numbers at the end of the range": (lambda: b"[" + b"1e308," * 150_000 + b"0]", "number"),
    "objects with one key": (lambda: b"[" + b'{"a":0},' * 99_000 + b"{}]", "items"),
    "a byte order mark": (lambda: b"\xef\xbb\xbf{}", "json"),
    "something behind": (lambda: b"{} x", "json"),
    "half a surrogate pair": (lambda: b'{"a":"\\udc00"}', "json"),
    "text that is not UTF-8": (lambda: b'{"a":"\xed\xa0\x80"}', "json"),
    "two compressed parts": (lambda: gzip.compress(b"{}") + gzip.compress(b"{}"), "gzip"),
    "something behind the compressed": (lambda: gzip.compress(b"{}") + b"x", "gzip"),
    "a bomb in a bomb": (lambda: gzip.compress(bomb(64 << 20)), "json"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_document_is_refused_before_it_is_built(name, monkeypatch):
    """By its shape, without a look by the parser; only text within all limits is given to that."""
    make, reason = HOSTILE[name]
    data, parse, parsed = make(), msgspec.json.decode, []

    def counted(text, **options):
        parsed.append(len(text))
        return parse(text, **options)

    monkeypatch.setattr(msgspec.json, "decode", counted)
    if name != "gzip bomb":
        assert len(data) <= MAX_BYTES or reason == "size"
    tracemalloc.start()
    try:
        with pytest.raises(Rejected) as caught:
            decode(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.reason == reason
    assert len(parsed) == (reason == "json") and sum(parsed) <= MAX_BYTES
    assert peak < 6 * MAX_BYTES


def rows(item, count):
    return b"[" + b",".join([item.encode()] * count) + b"]"


# Signed, and as large as passes: what is built of these is many times as large as the text.
EXTREME = {
    "short strings": rows('"abcde"', 130_000),
    "strings with one wide letter": rows(f'"{"x" * 50}😀"', 64_000),
    "long strings with one wide letter": rows(f'"{"x" * (MAX_TEXT - 10)}😀"', 7),
    "escapes": rows(f'"{chr(92)}n{chr(92) + "n"}😀"', 100_000),
    "integers": rows("123456789", MAX_ITEMS - 50),
    "long integers": rows("9" * MAX_NUMBER, 165_000),
    "lists": rows("[0]", 99_900),
    "objects": rows('{"😀":"é"}', 34_000),
    "one object": b"{" + b",".join(b'"%x":0' % k for k in range(85_000)) + b"}",
    "one key again and again": b"{" + b",".join('"😀":"é"'.encode() for _ in range(57_000)) + b"}",
    "slow numbers": rows("1.7976931348623157e308", MAX_EXPONENTS),
}


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("name", EXTREME)
def test_the_most_that_is_accepted_takes_a_few_times_the_memory_of_its_text(name, compress):
    """Whether it is then a record or not. The figure is part of what the limits promise."""
    value = msgspec.json.decode(EXTREME[name])
    message = canonical({"peer_id": ALICE.peer_id, "text": "a", "more": value})
    del value
    ends = {"digest": digest(message), "signature": base64.b64encode(ALICE.sign(message)).decode()}
    start = msgspec.json.encode({"peer_id": ALICE.peer_id, "text": "a", **ends})
    data = start[:-1] + b',"more":' + EXTREME[name] + b"}"
    if compress:
        data = gzip.compress(data, compresslevel=1)
    del message, start
    tracemalloc.start()
    try:
        assert unseal(data, Note).text == "a"
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 7 * MAX_BYTES


def test_a_text_of_the_full_length_is_read_however_it_is_written():
    text = "😀" * (MAX_TEXT // 4)
    assert decode(canonical({"a": text})) == {"a": text}
    assert decode(canonical({"a": '"\\' * (MAX_TEXT // 4)})) == {"a": '"\\' * (MAX_TEXT // 4)}
    for longer in (text + "x", '"' * (MAX_TEXT // 2) + "x"):
        with pytest.raises(Rejected, match="text"):
            decode(canonical({"a": longer}))


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**64), 2**64))
def test_every_number_that_anybody_writes_fits(number):
    for text in (json.dumps({"a": number}).encode(), canonical({"a": number})):
        assert decode(text) == {"a": number}


def test_what_a_stranger_says_cannot_command_a_terminal_or_fill_a_log():
    loud = "\x1b[2J\x07" + "x" * 10_000
    for fields in ({"text": "a", "peer_id": loud, "digest": "", "signature": ""}, {"text": "a", "kind": loud}):
        message = canonical({key: value for key, value in fields.items() if key in ("text", "peer_id", "kind")})
        document = {**fields, "digest": digest(message), "signature": "AAAA"}
        data = signed(fields, ALICE) if "kind" in fields else canonical(document)
        with pytest.raises(Rejected) as caught:
            unseal(data, Kinded)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 400
        assert "[2J" not in str(caught.value)


def test_no_manifest_can_raise_the_limit():
    with pytest.raises(Rejected, match="size"):
        decode(b'{"a":"' + b"x" * MAX_BYTES + b'"}', limit=1 << 40)


def test_the_limit_given_is_the_limit_kept():
    data = canonical({"a": "x" * 100})
    assert decode(data, len(data)) == {"a": "x" * 100}
    for document in (data, gzip.compress(data + b" " * 100)):
        with pytest.raises(Rejected, match="size"):
            decode(document, len(data) - 1)


def test_brackets_and_commas_in_strings_do_not_count():
    text = '[{"' * (MAX_TEXT // 5) + '\\"]'
    assert decode(canonical({"a": text, "b\\": "{" * 50})) == {"a": text, "b\\": "{" * 50}


def test_what_is_just_within_the_limits_is_read():
    assert decode(nested(MAX_DEPTH))
    with pytest.raises(Rejected, match="depth"):
        decode(nested(MAX_DEPTH + 1))
    full = {"a": [0] * (MAX_ITEMS - 1)}  # one bracket, one brace, commas in between
    assert decode(canonical(full)) == full
    with pytest.raises(Rejected, match="items"):
        decode(canonical({"a": [0] * (MAX_ITEMS + 1)}))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=30,
    )
)
@example({"\\": '"[[[['})
@example(['\\"', "\\\\", '\\\\"{'])
def test_depth_and_values_are_counted_rightly_in_any_json(value):
    def depth(value):
        if isinstance(value, (list, dict)):
            return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)
        return 0

    text = json.dumps(value).encode()
    if depth(value) <= MAX_DEPTH:
        check_shape(text)
    else:
        with pytest.raises(Rejected, match="depth"):
            check_shape(text)


@given(st.binary(max_size=300) | st.text(max_size=200).map(str.encode))
@example(b"\x1f\x8b")
@example(b'{"peer_id": "\\ud800", "digest": "", "signature": ""}')
@example(b'{"a": 123456789012345678901234567890}')
def test_arbitrary_bytes_are_rejected_and_nothing_else(data):
    for document in (data, gzip.compress(data)):
        with pytest.raises(Rejected):
            unseal(document, Note)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["text", "numbers", "count", "digest", "signature", "peer_id", "kind"]), JSON))
def test_arbitrary_json_is_rejected_and_nothing_else(fields):
    with pytest.raises(Rejected):
        unseal(json.dumps(fields).encode(), Note)


@given(st.dictionaries(st.sampled_from(["text", "numbers", "count", "peer_id", "other"]), JSON))
def test_whatever_a_stranger_signs_is_a_record_or_rejected(fields):
    try:
        found = unseal(signed(fields, MALLORY), Note)
    except Rejected:
        return
    assert found.peer_id == MALLORY.peer_id
    assert isinstance(found.text, str)
    assert all(isinstance(number, float) for number in found.numbers)


MEET_NEW_TYPES = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import msgspec
from rl_swarm.protocol.wire import convert

sys.setswitchinterval(1e-6)
start = threading.Barrier(8)

def read(kind):
    start.wait()
    return convert({"inner": {"number": 1}}, kind).inner.number

with ThreadPoolExecutor(8) as threads:
    for number in range(400):
        inner = msgspec.defstruct("Inner", [(f"field{k}", int, 0) for k in range(8)] + [("number", int)], kw_only=True)
        kind = msgspec.defstruct("Outer", [("inner", inner), ("also", dict[str, list[inner]], {})])
        assert list(threads.map(read, [kind] * 8)) == [1] * 8
"""


def test_threads_may_meet_a_type_at_the_same_time():
    """In a process of its own: without care it would end in a segmentation fault."""
    subprocess.run([sys.executable, "-c", MEET_NEW_TYPES], check=True, timeout=240)
