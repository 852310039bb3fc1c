"""Every kind of record that travels, as a stranger may send it; and short runs of the fuzzer, which is blind to
nothing."""

import base64
import gc
import json
import math
import os
import random
import re
import signal
import subprocess
import sys

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import HAS_HIVEMIND, start_benchmark, until

from benchmarks.robustness import fuzz_folder as folder
from benchmarks.robustness import fuzz_http as http
from benchmarks.robustness import fuzz_messages as messages
from benchmarks.robustness import fuzz_streams as streams
from benchmarks.robustness import fuzz_target
from benchmarks.robustness.fuzz_records import ALICE, RECORDS, REPORT, SIGNERS
from benchmarks.robustness.fuzz_target import fuzz
from rl_swarm.network.p2p import engine, quota
from rl_swarm.network.p2p.streams import StreamSlots
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.rollouts import Answer, Publication, Sampling
from rl_swarm.protocol.rounds import Member, PeerInfo, Report, StageRecord, State
from rl_swarm.protocol.wire import Rejected, canonical, digest, seal, unseal
from rl_swarm.storage import beneath
from rl_swarm.storage.files import LocalFiles
from rl_swarm.storage.shared_log import SharedLog


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


@pytest.fixture(autouse=True, scope="module")
def files_of_earlier_tests_are_closed():
    """Open files are counted here."""
    gc.collect()


@pytest.fixture
def memory_is_looked_at_seldom(monkeypatch):
    """Collecting garbage takes long in a process with as many modules as the tests have."""
    monkeypatch.setattr(fuzz_target, "SAMPLES", 2)


@pytest.mark.parametrize(("name", "path", "record"), PLACES)
def test_an_unknown_field_is_ignored_wherever_it_stands_and_signed(name, path, record):
    kind, author = type(RECORDS[name]), SIGNERS[name]
    fields = msgspec.to_builtins(RECORDS[name])
    if record.__struct_config__.forbid_unknown_fields:  # a setting of a task that is not known: other questions
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
    kind, author = type(RECORDS[name]), SIGNERS[name]
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
    document = seal(RECORDS[name], SIGNERS[name])
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
        StageRecord, swarm=SHORT, round=COUNTS, stage=COUNTS, started=FLOATS, ended=FLOATS, why=SHORT,
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


@pytest.mark.usefixtures("memory_is_looked_at_seldom")
def test_messages_do_no_harm_and_reach_every_verdict(tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "SLOWEST", math.inf)
    target = messages.Messages(seed=1)
    result = fuzz(target, tmp_path, cases=1500)
    assert (result.failures, result.cases) == ([], 1500)
    reasons = {label.partition(" ")[2] for label in result.reached}
    assert {
        "accepted", "json", "gzip", "schema", "digest", "signature", "depth", "limits", "size",
    } <= reasons  # fmt: skip
    assert len(target.coverage.seen) > 200
    assert len(target.verdicts) > 150


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda data: 1 // 0, "ZeroDivisionError"),
        (lambda data: REPORT.missing, "AttributeError"),
        (lambda data: msgspec.structs.replace(REPORT, reward=0.75), "altered on its way was accepted"),
        (lambda data: msgspec.structs.replace(REPORT, peer_id="x"), "was accepted"),
    ],
)
@pytest.mark.usefixtures("memory_is_looked_at_seldom")
def test_a_reader_that_does_harm_is_noticed(harm, said, tmp_path, monkeypatch):
    monkeypatch.setitem(messages.READERS, "report", harm)
    result = fuzz(messages.Messages(seed=1), tmp_path, cases=300)
    assert any(said in failure for failure in result.failures)
    kept = json.loads(next(tmp_path.glob("fuzz-messages-*.json")).read_text())
    with pytest.raises((ZeroDivisionError, AttributeError, AssertionError)):
        messages.Messages(seed=9).play(kept["case"])


@pytest.mark.slow
def test_a_message_that_takes_long_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "SLOWEST", 0.0)
    result = fuzz(messages.Messages(seed=1), tmp_path, cases=3)
    assert len(result.failures) == 3
    assert all("s of processor time for one message" in failure for failure in result.failures)


@pytest.mark.slow
@pytest.mark.usefixtures("memory_is_looked_at_seldom")
def test_the_same_seed_gives_the_same_run(tmp_path):
    targets = [messages.Messages(seed=4) for _ in range(2)]
    one, two = (fuzz(target, tmp_path, cases=200) for target in targets)
    assert one.reached == two.reached
    assert targets[0].verdicts == targets[1].verdicts


def test_a_peer_cannot_be_made_up():
    stranger = Identity.generate()
    with pytest.raises(AssertionError, match="no identity here signed"):
        messages.read(messages.Message("report", seal(REPORT, stranger)))


def test_nothing_that_happens_to_a_folder_does_harm(tmp_path):
    result = fuzz(folder.Folder(seed=1), tmp_path, cases=8)
    assert result.failures == []
    reached = {label.partition(": ")[2] for label in result.reached}
    assert {"enemy: link_to_directory", "enemy: pipe", "save: done", "collect: done", "conduct: done"} <= reached


def first_failure(target, failures_to, cases):
    """What a target finds in so many cases; it ends with the first."""
    result = fuzz(target, failures_to, cases=cases, is_over=lambda: any(failures_to.iterdir()))
    return "\n".join(result.failures)


def follow_links(monkeypatch):
    def opened(directory, path, flags, mode=0o666):
        beneath.parts_of(path)  # a path that no file can have is refused as ever
        return os.open(path or ".", flags & ~os.O_NOFOLLOW, mode, dir_fd=directory)

    monkeypatch.setattr(beneath, "open_below", opened)


def wait_for_pipes(monkeypatch):
    monkeypatch.setattr(beneath, "SAFE", os.O_NOFOLLOW | os.O_CLOEXEC)
    monkeypatch.setattr(folder.Folder, "longest", 1.0)


def leave_files_open(monkeypatch):
    monkeypatch.setattr(beneath, "open_root", lambda path: os.dup(os.open(path, beneath.DIRECTORY)))


def load_what_was_not_verified(monkeypatch):
    def copied(self, place, target, wanted):
        for name in wanted:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(self.read(f"{place}/{name}", 1 << 20))

    monkeypatch.setattr(LocalFiles, "copy_out", copied)


def write_parts_of_lines(monkeypatch):
    def append(self, line):
        with self.private.open("ab") as file:
            file.write(line[:5])
        store, name = self._target
        store.write(name, b"x")
        with self.private.open("ab") as file:
            file.write(line[5:])

    monkeypatch.setattr(SharedLog, "append", append)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (follow_links, "beside the folder"),
        (wait_for_pipes, "Blocked"),
        (leave_files_open, "files stay open"),
        (load_what_was_not_verified, "not whole|none that was saved"),
        (write_parts_of_lines, "the private log is not what was written"),
    ],
)
def test_a_careless_layer_below_the_folder_is_noticed(plant, said, tmp_path, monkeypatch):
    plant(monkeypatch)
    assert re.search(said, first_failure(folder.Folder(seed=1), tmp_path, 300))


@pytest.mark.skipif(sys.platform != "linux", reason="all of 127.0.0.0/8 is this machine on Linux")
@pytest.mark.processes
def test_no_client_does_harm_to_the_server(tmp_path):
    result = fuzz(http.Http(seed=3), tmp_path, cases=2)
    assert result.failures == []
    assert {"response: 200", "response: 400", "response: 408"} <= set(result.reached)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="all of 127.0.0.0/8 is this machine on Linux")
@pytest.mark.parametrize(
    ("plant", "said"),
    [
        ("connections.HEAD_SECONDS = connections.BODY_SECONDS = 1e6", "are not let go"),
        ("connections.max_connections = lambda: 4", "an honest client"),
        ("connections.BoundedProtocol._notice_end = lambda self: None", "the server wrote"),
    ],
)
@pytest.mark.processes
def test_a_careless_server_is_noticed(plant, said, tmp_path, monkeypatch):
    monkeypatch.setattr(http, "SETUP", f"{http.SETUP}\n{plant}\n")
    monkeypatch.setattr(http, "PATIENCE", 10.0)
    monkeypatch.setattr(http.Http, "next", lambda self: {"seed": self.rng.getrandbits(48), "clients": 60})
    assert said in first_failure(http.Http(seed=3), tmp_path, 10)


@pytest.fixture(scope="module")
def peers():
    """The peers of the streams, started once."""
    if not HAS_HIVEMIND:
        pytest.skip("hivemind is not installed")
    target = streams.Streams(seed=1)
    target.open()
    target.close, target.open, close = lambda: None, lambda: None, target.close
    yield target
    close()


@pytest.mark.processes
def test_no_stream_and_no_record_does_harm_to_a_peer(peers, tmp_path):
    result = fuzz(peers, tmp_path, cases=3)
    assert result.failures == []
    assert {"honest: answered", "record: taken", "record: refused", "stream: a request"} <= set(result.reached)


def keep_slots(monkeypatch, target):
    monkeypatch.setattr(StreamSlots, "leave", lambda self, stream: None)


def wait_for_ever(monkeypatch, target):
    monkeypatch.setattr(engine, "REQUEST_SECONDS", 1e6)


def answer_wrongly(monkeypatch, target):
    monkeypatch.setattr(target.victim, "answer", lambda request, peer: request)


def raise_errors(monkeypatch, target):
    monkeypatch.setattr(target.victim, "is_member", lambda peer: {}[peer])


def count_nothing(monkeypatch, target):
    monkeypatch.setattr(quota, "MAX_OF_AUTHOR", 1000)
    monkeypatch.setattr(quota.DhtQuota, "_displaced", lambda self, claim, now: [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (answer_wrongly, "an honest peer gets"),
        (count_nothing, "account|too many notices|without being counted"),
        (wait_for_ever, "is not closed"),
        (raise_errors, "it says|not answered"),
        (keep_slots, "slots are not freed|too many|not answered"),
    ],
)
@pytest.mark.processes
def test_a_careless_peer_is_noticed(plant, said, peers, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "PATIENCE", 8.0)
    busy = {"streams": 20, "records": 0, "honest": "stranger"}
    monkeypatch.setattr(peers, "next", lambda: {"seed": peers.rng.getrandbits(48), **busy})
    plant(monkeypatch, peers)
    try:
        assert re.search(said, first_failure(peers, tmp_path, 10))
    finally:
        peers.forget()


def run_fuzzer(*arguments, **options):
    return start_benchmark("robustness.fuzz", *arguments, stderr=subprocess.STDOUT, **options)


@pytest.mark.slow
def test_the_command_shares_the_time_and_ends_with_a_table(tmp_path):
    process = run_fuzzer("--targets", "messages,folder", "--cases", "20", "--processes", "2", cwd=tmp_path)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    rows = [line.split() for line in output.splitlines()]
    assert {row[0]: row[1] for row in rows if row[1:] and row[1] == "20"} == {"messages": "20", "folder": "20"}


def test_ctrl_c_ends_the_command_with_its_table(tmp_path):
    process = run_fuzzer("--targets", "messages", "--hours", "24", cwd=tmp_path, start_new_session=True)
    try:
        children = psutil.Process(process.pid).children
        until(lambda: len(children()) >= 2)
        os.killpg(process.pid, signal.SIGINT)
        output = process.communicate(timeout=240)[0]
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert "target" in output and "Traceback" not in output


def test_a_case_that_failed_can_be_played_again(tmp_path):
    case = {"kind": "report", "data": "e30=", "unaltered": False, "author": ""}
    kept = tmp_path / "case.json"
    kept.write_text(json.dumps({"target": "messages", "case": case, "why": ""}))
    process = run_fuzzer("--replay", str(kept), cwd=tmp_path)
    assert process.communicate(timeout=240)[0].startswith("report ")
    assert process.returncode == 0
