"""Exports OpenTelemetry by OTLP over HTTP: a round is a trace, its phases are spans, its measurements are metrics.

The standard variables turn it on and configure it (OTEL_EXPORTER_OTLP_ENDPOINT and its relatives). A round's trace has
the same id in all nodes of a swarm, so one collector shows which node was busy and which one waited.
"""

import hashlib
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl_swarm.errors import ConfigError
from rl_swarm.telemetry.export import Source, scalars

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger(__name__)

PROTOCOL = "http/protobuf"
SIGNALS = ("traces", "metrics")
PARTS = {"seconds": "phase", "external_rejected": "reason"}  # label of a metric's parts; the default is task
COUNTED = (  # counters: a sum over rounds loses none between two exports
    "local_groups", "local_with_signal", "trained_tokens", "external_accepted", "external_scored", "external_rejected",
)  # fmt: skip
ASKING_SECONDS = 3.0  # for `rl-swarm doctor`


def endpoints(environ: Mapping[str, str]) -> dict[str, str]:
    """Return which of traces and metrics are exported, each with the variable that says where to."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return {}
    found = {}
    for signal in SIGNALS:
        exporters = (environ.get(f"OTEL_{signal.upper()}_EXPORTER") or "otlp").split(",")
        special = f"OTEL_EXPORTER_OTLP_{signal.upper()}"
        variable = next((v for v in (f"{special}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT") if environ.get(v)), "")
        if not variable or "otlp" not in exporters:
            continue
        found[signal] = variable
        for setting in (f"{special}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
            if environ.get(setting, PROTOCOL) not in ("", PROTOCOL):
                raise ConfigError(
                    f"{setting}={environ[setting]}: only {PROTOCOL} is supported. Unset it, or set it to that."
                )
            if environ.get(setting):
                break
    return found


class Otlp:
    def __init__(self, source: Source) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        class Ids(RandomIdGenerator):  # type: ignore[misc]
            trace = 0

            def generate_trace_id(self) -> int:
                return self.trace

        self.complaints, self.source, self.ids = Complaints(), source, Ids()
        logging.getLogger("opentelemetry").propagate = False  # to the terminal
        logging.getLogger("opentelemetry").addHandler(self.complaints)
        names = {"service.name": "rl-swarm"} if not os.environ.get("OTEL_SERVICE_NAME") else {}
        resource = Resource.create(
            {
                **names,
                "service.instance.id": source.peer_id,
                "rl_swarm.swarm": source.swarm,
                "rl_swarm.node": source.node,
            }
        )
        sent = endpoints(os.environ)
        readers = [PeriodicExportingMetricReader(OTLPMetricExporter())] if "metrics" in sent else []
        self.meters = MeterProvider(readers, resource, shutdown_on_exit=False)
        self.tracers = TracerProvider(resource=resource, id_generator=self.ids, shutdown_on_exit=False)
        if "traces" in sent:
            self.tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self.meter, self.tracer = self.meters.get_meter("rl_swarm"), self.tracers.get_tracer("rl_swarm")
        self.instruments: dict[str, Any] = {}

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        if kind == "round":
            self._trace(values)
        self._measure(kind, values)

    def close(self) -> None:
        self.tracers.shutdown()
        self.meters.shutdown()
        logging.getLogger("opentelemetry").removeHandler(self.complaints)
        if self.complaints.count > 1:
            log.warning("OpenTelemetry warned %d times", self.complaints.count)

    def _trace(self, values: Mapping[str, Any]) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        began, phases = values["began"], values["phases"]
        self.ids.trace = trace_id(self.source.swarm_id, values["round"], values["stage"])
        attributes = {f"rl_swarm.{name}": number for name, number in scalars(values).items()}
        for name in ("round", "stage", "policy_version"):
            attributes[f"rl_swarm.{name}"] = values[name]
        played = self.tracer.start_span(
            f"round of {self.source.node}", Context(), start_time=nanoseconds(began), attributes=attributes
        )
        within = set_span_in_context(played, Context())
        for phase, start, end in phases:
            span = self.tracer.start_span(phase, within, start_time=nanoseconds(began + start))
            span.end(nanoseconds(began + end))
        played.end(nanoseconds(began + max(end for _, _, end in phases)))

    def _measure(self, kind: str, values: Mapping[str, Any]) -> None:
        self._instrument("rl_swarm.round", counted=False).set(values["round"])
        for full_name, number in scalars(values).items():
            name, _, part = full_name.partition("/")
            attributes = {PARTS.get(name, "task"): part} if part else {}
            counted = kind == "round" and name in COUNTED
            instrument = self._instrument(f"rl_swarm.{kind}.{name}", counted)
            (instrument.add if counted else instrument.set)(number, attributes)

    def _instrument(self, name: str, counted: bool) -> Any:
        if name not in self.instruments:
            make = self.meter.create_counter if counted else self.meter.create_gauge
            self.instruments[name] = make(name, unit="s" if name.endswith(".seconds") else "")
        return self.instruments[name]


class Complaints(logging.Handler):
    """Counts the library's warnings about a collector that does not answer, and logs the first."""

    def __init__(self, tell: bool = True) -> None:
        super().__init__(logging.WARNING)
        self.tell, self.count, self.first = tell, 0, ""

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1
        self.first = self.first or record.getMessage()
        if self.tell and self.count == 1:
            log.warning("OpenTelemetry, logged once: %s", self.first)


def trace_id(swarm_id: str, number: int, stage: int) -> int:
    """Derive the trace id of a round, the same for all nodes."""
    digest = hashlib.blake2b(f"{swarm_id} {number} {stage}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "big")


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def collector_problem(signal: str) -> str:
    """Send the collector an empty message; return what is wrong, or nothing if it answers well."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics.export import MetricsData

    complaints, logger = Complaints(tell=False), logging.getLogger("opentelemetry")
    logger.addHandler(complaints)
    logger.propagate = False
    try:
        if signal == "traces":
            exporter: SpanExporter = OTLPSpanExporter(timeout=ASKING_SECONDS)
            result = exporter.export([])
        else:
            result = OTLPMetricExporter(timeout=ASKING_SECONDS).export(MetricsData([]))
        return "" if result.name == "SUCCESS" else f"no good answer ({complaints.first[:200]})"
    finally:
        logger.removeHandler(complaints)
