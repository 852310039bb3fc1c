"""Metrics to other systems: what they get is what `metrics.jsonl` says, and no node waits for them."""

import json
import logging
import math
import sqlite3
import struct
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
from collector import attributes, collecting
from processes import QUICK, run, until

from rl_swarm.cli import doctor
from rl_swarm.config.resolve import load
from rl_swarm.config.settings import Settings
from rl_swarm.errors import ConfigError
from rl_swarm.node.settings import public_settings
from rl_swarm.telemetry.export import Source, scalars
from rl_swarm.telemetry.journal import METRICS, Journal, Stopwatch, read_lines
from rl_swarm.telemetry.otlp import endpoints
from rl_swarm.telemetry.schema import RoundRecord
from rl_swarm.telemetry.settings import TelemetrySettings
from rl_swarm.telemetry.sinks import SinkThread, is_installed, requested, sink_threads

TRACKIO = sys.version_info >= (3, 11)  # its hub library needs a transformers that needs it
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def source(folder: Path) -> Source:
    return Source("swarm", "id", "node", "peer", folder)


def tensorboard_events(folder: Path) -> dict[str, dict[int, float]]:
    """The curves in event files, read record by record: length, its checksum, a message, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, dict[int, float]] = defaultdict(dict)
    for path in folder.glob("events.*"):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4
            for value in event.summary.value:
                found[value.tag][event.step] = value.simple_value
    return found


@pytest.mark.slow
def test_a_swarm_tells_all_of_them_what_its_metrics_say_and_nothing_leaves_unasked(tmp_path: Path) -> None:
    sinks = ["tensorboard", "wandb", *(["trackio"] if TRACKIO else [])]
    with collecting() as collector:
        code, output = run(
            tmp_path, "up", "--run", "one", "--nodes", "2", "--rounds", "3", *QUICK,
            METRICS_SINKS=",".join(sinks),
            TRACKIO_DIR=str(tmp_path / "trackio"),
            **{ENDPOINT: collector.url},
            HF_ENDPOINT=collector.url, HF_TOKEN="hf_secret", HF_HUB_OFFLINE="0", WANDB_BASE_URL=collector.url,
            WANDB_API_KEY="0" * 40,
        )  # fmt: skip
    assert code == 0, output
    assert "trackio" not in output.lower() and "wandb" not in output.lower()  # the terminal is the live view's
    assert set(collector.paths) == {"/v1/traces", "/v1/metrics"}
    log = (tmp_path / "one" / "logs" / "swarm.log").read_text()
    assert "switched off" not in log and "dropped" not in log and "lost" not in log, log

    lines = {path.parent.name: read_lines(path)[0] for path in (tmp_path / "one").glob("logs/*/metrics.jsonl")}
    assert len(lines) == 2
    for node, written in lines.items():
        folder = tmp_path / "one" / "logs" / node
        curves = tensorboard_events(folder / "tensorboard")
        played = [line for line in written if line["kind"] == "round"]
        assert [line["round"] for line in played] == [0, 1, 2]
        for line in played:
            for name, number in scalars(line).items():
                assert math.isclose(curves[f"round/{name}"][line["round"]], number, rel_tol=1e-6), name
        assert math.isclose(curves["held_out/sampled"][2], written[-1]["sampled"], rel_tol=1e-6)

        points = collector.points(node)
        assert points["rl_swarm.round", ""] == 2
        assert points["rl_swarm.round.reward_local", ""] == played[-1]["reward_local"]
        assert points["rl_swarm.round.seconds", "generate"] == played[-1]["seconds"]["generate"]
        assert points["rl_swarm.round.trained_tokens", ""] == sum(line["trained_tokens"] for line in played)
        assert points["rl_swarm.held_out.sampled", ""] == written[-1]["sampled"]

        (offline,) = folder.glob("wandb/offline-run-*/run-*.wandb")
        recorded = offline.read_bytes()
        for line in played:
            assert b"round/reward_local" in recorded and str(line["reward_local"]).encode() in recorded
        assert b"hf_secret" not in recorded and str(tmp_path).encode() + b"/swarm" not in recorded
        if TRACKIO:
            with sqlite3.connect(tmp_path / "trackio" / "rl-swarm.db") as database:
                rows = database.execute(
                    "select step, metrics from metrics where run_name = ?", [f"one-{node}"]
                ).fetchall()
            rewards = {step: json.loads(m).get("round/reward_local") for step, m in rows if b"round/" in m}
            assert rewards == {line["round"]: line["reward_local"] for line in played}

    traces = defaultdict(list)
    for node, span in collector.spans():
        traces[span.trace_id].append((node, span))
    assert len(traces) == 3  # a round is one trace, of all its nodes
    for spans in traces.values():
        for node, written in lines.items():
            mine = [span for who, span in spans if who == node]
            (whole,) = (span for span in mine if not span.parent_span_id)
            number = attributes(whole)["rl_swarm.round"]
            (line,) = (x for x in written if x["kind"] == "round" and x["round"] == number)
            phases = [span for span in mine if span.parent_span_id == whole.span_id]
            assert [span.name for span in phases] == [phase for phase, _, _ in line["phases"]]
            assert {"generate", "collect", "train"} <= {span.name for span in phases}
            for span, (_, begun, ended) in zip(phases, line["phases"], strict=True):
                assert whole.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
                assert span.end_time_unix_nano <= whole.end_time_unix_nano
                assert math.isclose(span.start_time_unix_nano / 1e9, line["began"] + begun, abs_tol=1e-5)
                assert math.isclose(span.end_time_unix_nano / 1e9, line["began"] + ended, abs_tol=1e-5)


def test_a_stopwatch_knows_when_each_phase_was() -> None:
    before, watch = time.time(), Stopwatch()
    for phase in ("one", "two", "one"):
        with watch(phase):
            time.sleep(0.01)
    assert before <= watch.began <= time.time()
    assert [phase for phase, _, _ in watch.phases] == ["one", "two", "one"]
    times = [moment for _, start, end in watch.phases for moment in (start, end)]
    assert times == sorted(times) and times[-1] >= 0.03
    assert math.isclose(watch.seconds["one"], sum(e - s for p, s, e in watch.phases if p == "one"), abs_tol=4e-4)


class Stuck:
    """A sink that takes nothing until it is told to."""

    def __init__(self) -> None:
        self.go, self.got = threading.Event(), []

    def write(self, kind: str, values: object) -> None:
        self.go.wait(60)
        self.got.append(values)

    def close(self) -> None:
        self.got.append("closed")


def test_a_slow_sink_keeps_nobody_waiting_and_what_it_cannot_take_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = Stuck()
    feed = SinkThread("slow", lambda: sink, most=10)
    journal = Journal(tmp_path, [feed])
    journal.metrics(RoundRecord(0, 0.0, 0.0, 0, 0, 0.0))
    until(lambda: feed.waiting.qsize() == 0)  # it has the first
    for number in range(1, 31):
        journal.metrics(RoundRecord(number, 0.0, 0.0, 0, 0, 0.0))
    assert feed.dropped == 20 and sink.got == []
    assert len(journal.read(METRICS)) == 31
    assert [r.getMessage() for r in caplog.records] == ["slow is too slow: records beyond its queue are dropped"]
    feed.finish()
    sink.go.set()
    feed.thread.join(60)
    assert [got if got == "closed" else got["round"] for got in sink.got] == [*range(11), "closed"]


def test_a_sink_that_fails_is_switched_off_with_a_word_and_the_journal_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    with sink_threads(["tensorboard"], source(tmp_path), threading.Event()) as threads:
        until(lambda: threads[0].off)
        journal = Journal(tmp_path, threads)
        for number in range(3):
            journal.metrics(RoundRecord(number, 0.0, 0.0, 0, 0, 0.0))
        assert threads[0].waiting.qsize() == 0
    assert len(journal.read(METRICS)) == 3
    (message,) = (r.getMessage() for r in caplog.records)
    assert message.startswith("tensorboard is switched off: NotADirectoryError")


def test_a_collector_that_is_away_is_mentioned_once_and_the_node_ends_in_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)  # nobody is there any more
    stop = threading.Event()
    stop.set()
    with sink_threads(["otlp"], source(tmp_path), stop) as threads:
        for number in range(3):
            phases = [("train", 0.0, 0.1)]
            threads[0].put(
                "round",
                {"round": number, "stage": 0, "policy_version": 0, "began": 1e9, "phases": phases, "reward": 0.5},
            )
    told = [r for r in caplog.records if "logged once" in r.getMessage()]
    assert len(told) == 1 and "Connection refused" in told[0].getMessage()
    assert all(r.levelno == logging.WARNING and r.name.startswith("rl_swarm.") for r in caplog.records)


@pytest.mark.parametrize(
    ("settings", "environ", "package", "message"),
    [
        ("tensorboard", {}, "tensorboardX", "METRICS_SINKS=tensorboard.*pip install 'rl-swarm\\[tensorboard\\]'"),
        ("wandb", {}, "wandb", "METRICS_SINKS=wandb.*pip install 'rl-swarm\\[wandb\\]'"),
        (" trackio,", {}, "trackio", "pip install 'rl-swarm\\[trackio\\]', or unset METRICS_SINKS"),
        (
            "",
            {ENDPOINT: "http://x"},
            "opentelemetry.exporter.otlp.proto.http",
            f"{ENDPOINT}=http://x.*pip install 'rl-swarm\\[otel\\]', or unset {ENDPOINT}",
        ),
    ],
)  # fmt: skip
def test_what_is_asked_for_but_not_installed_is_named_with_the_command_that_installs_it(
    settings: str, environ: dict[str, str], package: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # how Python notes that there is none
    with pytest.raises(ConfigError, match=message):
        requested(TelemetrySettings(metrics_sinks=settings), environ)
    assert requested(TelemetrySettings(), {}) == []


def test_a_swarm_without_what_was_asked_for_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['tensorboardX'] = None")
    path = {"PYTHONPATH": f"{tmp_path}:{Path(doctor.__file__).parents[2]}"}
    code, output = run(tmp_path, "up", "--nodes", "1", "--rounds", "2", METRICS_SINKS="tensorboard", **path)
    assert code == 2 and "Traceback" not in output and not (tmp_path / "runs").exists()
    assert "pip install 'rl-swarm[tensorboard]'" in output


def test_an_unknown_sink_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'tensorbord'.*tensorboard, trackio, wandb"):
        load(environ={"METRICS_SINKS": "wandb,tensorbord"})
    assert load(environ={"METRICS_SINKS": "wandb, tensorboard,wandb"}).settings.telemetry.sinks() == (
        "wandb", "tensorboard",
    )  # fmt: skip


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("only_a_folder") and not is_installed("nothing.at.all")
    assert is_installed("json") and is_installed("opentelemetry.sdk.trace")


@pytest.mark.parametrize(
    ("environ", "signals"),
    [
        ({}, {}),
        ({ENDPOINT: ""}, {}),
        ({ENDPOINT: "http://x"}, {"traces": ENDPOINT, "metrics": ENDPOINT}),
        ({ENDPOINT: "http://x", "OTEL_SDK_DISABLED": "true"}, {}),
        ({ENDPOINT: "http://x", "OTEL_METRICS_EXPORTER": "none"}, {"traces": ENDPOINT}),
        ({ENDPOINT: "http://x", "OTEL_TRACES_EXPORTER": "console,otlp"}, {"traces": ENDPOINT, "metrics": ENDPOINT}),
        (
            {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://x/y", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"},
            {"metrics": "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"},
        ),
        (
            {
                ENDPOINT: "http://x",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
                "OTEL_METRICS_EXPORTER": "none",
            },
            {"traces": ENDPOINT},
        ),
    ],
)  # fmt: skip
def test_the_standard_variables_say_what_is_sent(environ: dict[str, str], signals: dict[str, str]) -> None:
    assert endpoints(environ) == signals


def test_a_protocol_that_is_not_spoken_is_named() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL=grpc: only http/protobuf"):
        endpoints({ENDPOINT: "http://x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


def test_curves_are_finite_numbers_and_none_is_of_a_single_peer() -> None:
    record = {
        "kind": "round", "round": 3, "timestamp": 1.0, "reward": 0.5, "loss": math.nan, "greedy": None, "examples": [1],
        "seconds": {"train": 1.0}, "external_by_peer": {"12D3": 2}, "external_rejected": {},
    }  # fmt: skip
    assert scalars(record) == {"reward": 0.5, "seconds/train": 1.0}


def test_other_systems_learn_no_text_of_the_settings() -> None:
    text = {name: "secret" for name in ("hf_token", "invitation", "gdrive_path", "p2p_initial_peers", "identity_path")}
    told = public_settings(Settings.of(**text).flat())
    assert told["generations"] == 8 and "secret" not in str(told)


def test_the_doctor_tries_what_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("WANDB_MODE", "TRACKIO_DIR", "METRICS_SINKS"):  # as they were, afterwards
        monkeypatch.setenv(variable, "")
    assert [good for good, _ in doctor.metrics()] == [True]
    monkeypatch.setenv("METRICS_SINKS", "tensorboard")
    with collecting() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        found = list(doctor.metrics())
    assert [good for good, _ in found] == [True] * 3, found
    assert collector.paths == ["/v1/traces", "/v1/metrics"] and not collector.spans()
    assert "answers" in found[0][1] and collector.url in found[0][1] and "tensorboard works" in found[2][1]
    assert [good for good, _ in doctor.metrics()] == [False, False, True]  # the collector has gone
    assert list(tmp_path.iterdir()) == []
