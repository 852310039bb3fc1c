"""Runs an OpenTelemetry collector on loopback, which decodes and keeps what it receives."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.traces: list[ExportTraceServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self) -> list[tuple[str, Any]]:
        """Return every span, with the node that sent it."""
        return [
            (attributes(sent.resource)["rl_swarm.node"], span)
            for request in self.traces
            for sent in request.resource_spans
            for scope in sent.scope_spans
            for span in scope.spans
        ]

    def points(self, node: str) -> dict[tuple[str, str], float]:
        """Return a node's last value of every metric, by its name and its attributes."""
        found = {}
        for request in self.metrics:
            for sent in request.resource_metrics:
                if attributes(sent.resource)["rl_swarm.node"] != node:
                    continue
                for metric in (metric for scope in sent.scope_metrics for metric in scope.metrics):
                    for point in (getattr(metric, metric.WhichOneof("data"))).data_points:
                        value = getattr(point, point.WhichOneof("value"))
                        found[metric.name, "".join(attributes(point).values())] = value
        return found


class Handler(BaseHTTPRequestHandler):
    server: Collector
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.paths.append(self.path)
        if self.path == "/v1/traces":
            self.server.traces.append(ExportTraceServiceRequest.FromString(body))
        elif self.path == "/v1/metrics":
            self.server.metrics.append(ExportMetricsServiceRequest.FromString(body))
        self.send_response(200 if self.path.startswith("/v1/") else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()


def attributes(sent: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in sent.attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
