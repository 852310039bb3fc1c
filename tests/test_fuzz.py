"""Every kind of record that travels, as a stranger may send it; and a short run of the fuzzer."""

import base64
import importlib
import json
import random
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_swarm.identity import Identity
from rl_swarm.rollouts import Answer, Publication, Sampling
from rl_swarm.rounds import Ended, Member, PeerInfo, Report, State
from rl_swarm.wire import Rejected, canonical, digest, seal, unseal

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
fuzz = importlib.import_module("fuzz")
RECORDS, ALICE = fuzz.RECORDS, fuzz.ALICE


def signed(fields, author=ALICE):
    """A document as anybody with a key can make it."""
    fields = {**fields, "peer_id": author.peer_id}
    message = canonical(fields)
    signature = base64.b64encode(author.sign(message)).decode()
    return msgspec.json.encode({**fields, "digest": digest(message), "signature": signature})


def places(value, path=()):
    """The paths of all objects that are records in themselves, the outermost first."""
    if isinstance(value, msgspec.Struct):
        yield path, value
        for field in msgspec.structs.fields(value):
            yield from places(getattr(value, field.name), (*path, field.encode_name))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from places(item, (*path, number))


def at(fields, path):
    for step in path:
        fields = fields[step]
    return fields


PLACES = [
    pytest.param(name, path, record, id=f"{name}:{'.'.join(map(str, path))}")
    for name, whole in RECORDS.items()
    for path, record in places(whole)
]


@pytest.mark.parametrize(("name", "path", "record"), PLACES)
def test_an_unknown_field_is_ignored_wherever_it_stands_and_signed(name, path, record):
    kind, author = type(RECORDS[name]), fuzz.SIGNERS[name]
    fields = msgspec.to_builtins(RECORDS[name])
    if (
        record.__struct_config__.forbid_unknown_fields
    ):  # a setting of a task that is not known: other questions
        at(fields, path)["invented_later"] = 1
        with pytest.raises(Rejected, match="schema"):
            unseal(signed(fields, author), kind)
        return
    at(fields, path)["invented_later"] = [1, {"a": None}]
    document = signed(fields, author)
    assert unseal(document, kind) == RECORDS[name]
    with pytest.raises(Rejected, match="digest"):
        unseal(document.replace(b'"invented_later":[1,', b'"invented_later":[2,'), kind)
    altered = json.loads(document)
    at(altered, path)["invented_later"] = 2
    body = {key: value for key, value in altered.items() if key not in ("digest", "signature")}
    with pytest.raises(Rejected, match="signature"):
        unseal(msgspec.json.encode({**altered, "digest": digest(canonical(body))}), kind)


@pytest.mark.parametrize(("name", "path", "record"), PLACES)
def test_a_field_that_is_needed_and_missing_is_an_error(name, path, record):
    kind, author = type(RECORDS[name]), fuzz.SIGNERS[name]
    needed = [field.encode_name for field in msgspec.structs.fields(record) if field.required]
    for field in needed:
        fields = msgspec.to_builtins(RECORDS[name])
        del at(fields, path)[field]
        if field == "peer_id":  # put there by whoever signs
            assert unseal(signed(fields, author), kind) == RECORDS[name]
            continue
        with pytest.raises(Rejected, match=f"missing required field '{field}'") as caught:
            unseal(signed(fields, author), kind)
        assert caught.value.reason == "schema"


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("other", RECORDS)
def test_a_record_of_one_kind_is_none_of_another(name, other):
    document = seal(RECORDS[name], fuzz.SIGNERS[name])
    if name == other:
        assert unseal(document, type(RECORDS[other])) == RECORDS[name]
    else:
        with pytest.raises(Rejected, match="schema"):
            unseal(document, type(RECORDS[other]))


FLOATS = st.floats(allow_nan=False, allow_infinity=False)
BOUNDED = st.floats(-1e6, 1e6)
COUNTS = st.integers(0, 2**53 - 1)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
SHORT = st.text(max_size=64)
REPORTS = st.builds(
    Report, swarm=SHORT, node=NAMES, round=COUNTS, stage=COUNTS, timestamp=FLOATS, reward=BOUNDED,
    training_reward=BOUNDED, rollouts=COUNTS, vote=SHORT,
)  # fmt: skip
ANSWERS = st.builds(
    Answer, prompt=st.text(), response=st.text(), reward=BOUNDED, ended=st.booleans(),
    tokens=st.none() | st.lists(st.integers(0, 2**31 - 1), max_size=4),
    logprobs=st.none() | st.lists(BOUNDED, max_size=4),
)  # fmt: skip
ANY_RECORD = st.one_of(
    REPORTS,
    st.builds(
        PeerInfo, swarm=SHORT, node=NAMES, model=SHORT, tokenizer=SHORT, device=SHORT, host=SHORT,
        pid=st.integers(0, 2**31 - 1), joined=FLOATS, timestamp=FLOATS,
    ),
    st.builds(
        State, swarm=SHORT, phase=st.sampled_from(["waiting", "running", "finished"]), round=COUNTS,
        stage=COUNTS, started=FLOATS, timestamp=FLOATS, reports=st.dictionaries(SHORT, REPORTS, max_size=2),
        members=st.dictionaries(
            SHORT, st.builds(Member, NAMES, COUNTS, FLOATS, COUNTS, BOUNDED, COUNTS), max_size=3
        ),
    ),
    st.builds(
        Ended, swarm=SHORT, round=COUNTS, stage=COUNTS, started=FLOATS, ended=FLOATS, why=SHORT,
        members=st.lists(SHORT, max_size=3), reports=st.dictionaries(SHORT, SHORT, max_size=3),
    ),
    st.builds(
        Publication, peer_id=SHORT, kind=st.just("rollouts"), swarm=SHORT, node=NAMES, round=COUNTS, stage=COUNTS,
        timestamp=FLOATS, model=SHORT, policy_version=COUNTS, tokenizer=SHORT,
        sampling=st.builds(Sampling, FLOATS, FLOATS, COUNTS, COUNTS),
        rollouts=st.dictionaries(st.integers(0, 9).map(str), st.lists(ANSWERS, max_size=3), max_size=3),
        parents=st.dictionaries(SHORT, st.lists(SHORT, max_size=2), max_size=2),
    ),
)  # fmt: skip


@settings(max_examples=150)
@given(ANY_RECORD, st.booleans(), st.integers(0, 2**32))
def test_any_record_survives_the_journey_and_no_byte_of_it_can_be_changed(record, compress, seed):
    rng = random.Random(seed)
    sent = msgspec.structs.replace(record, peer_id=ALICE.peer_id)
    document = seal(record, ALICE, compress)
    assert unseal(document, type(record)) == sent
    for _ in range(20):
        position = rng.randrange(len(document))
        changed = document[:position] + rng.randbytes(1) + document[position + 1 :]
        try:
            assert unseal(changed, type(record)) == sent
        except Rejected:
            continue


def test_the_fuzzer_finds_nothing_and_reaches_every_verdict(tmp_path):
    result = fuzz.fuzz(5000, seed=1, failures_to=tmp_path)
    assert result.failures == []
    assert result.messages == 5000
    assert {"accepted", "json", "gzip", "schema", "digest", "signature", "depth", "limits", "size"} <= set(
        result.reasons
    )
    assert result.steps > 200
    assert len(result.verdicts) > 200


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda data: 1 // 0, "ZeroDivisionError"),
        (lambda data: fuzz.REPORT.missing, "AttributeError"),
        (lambda data: msgspec.structs.replace(fuzz.REPORT, reward=0.75), "altered on its way was believed"),
        (lambda data: msgspec.structs.replace(fuzz.REPORT, peer_id="x"), "was believed"),
    ],
)
def test_the_fuzzer_notices_a_reader_that_does_harm(harm, said, tmp_path, monkeypatch):
    monkeypatch.setitem(fuzz.READERS, "report", harm)
    result = fuzz.fuzz(300, seed=1, failures_to=tmp_path)
    assert any(said in failure for failure in result.failures)
    assert len(list(tmp_path.glob("fuzz-report-*.bin"))) >= 1


def test_the_fuzzer_notices_a_message_that_takes_long(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "SLOWEST", 0.0)
    result = fuzz.fuzz(3, seed=1, failures_to=tmp_path)
    assert all("s for one message" in failure for failure in result.failures)
    assert len(result.failures) == 3


def test_the_fuzzer_gives_the_same_run_for_the_same_seed(tmp_path):
    one, two = (fuzz.fuzz(500, seed=4, failures_to=tmp_path) for _ in range(2))
    assert one.reasons == two.reasons
    assert one.verdicts == two.verdicts


def test_a_peer_cannot_be_made_up():
    stranger = Identity.new()
    with pytest.raises(AssertionError, match="nobody here signed"):
        fuzz.read(fuzz.Message("report", seal(fuzz.REPORT, stranger)))
