"""Exports what a node measures: to an OpenTelemetry collector, TensorBoard, Weights & Biases, Trackio.

No sink is opened or imported unless the user asks for it. A sink gets the records of `metrics.jsonl` in a thread of its
own, so training never waits. A slow sink loses records, which are counted; a sink that fails is switched off.
"""

import importlib.util
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from rl_swarm.errors import ConfigError
from rl_swarm.telemetry import otlp, trackers
from rl_swarm.telemetry.export import Sink, Source
from rl_swarm.telemetry.settings import TelemetrySettings

log = logging.getLogger(__name__)

MAX_WAITING = 1000  # records
LAST_SECONDS = 60.0  # for all sinks together, at the end of a run
STOPPED_SECONDS = 5.0  # the same, when it is stopped
PACKAGES = {  # module of each, and the extra that installs it
    "otlp": ("opentelemetry.exporter.otlp.proto.http", "otel"),
    "tensorboard": ("tensorboardX", "tensorboard"),
    "trackio": ("trackio", "trackio"),
    "wandb": ("wandb", "wandb"),
}


class SinkThread:
    """Runs one sink in a thread, with a bounded queue."""

    def __init__(self, name: str, make: Callable[[], Sink], most: int = MAX_WAITING) -> None:
        self.name, self.make = name, make
        self.waiting: queue.SimpleQueue[tuple[str, Mapping[str, object]] | None] = queue.SimpleQueue()
        self.most, self.dropped, self.off = most, 0, False
        self.thread = threading.Thread(target=self._work, name=threading.current_thread().name, daemon=True)
        self.thread.start()

    def put(self, kind: str, values: Mapping[str, object]) -> None:
        """Queue a record and return at once."""
        if self.off:
            return
        if self.waiting.qsize() < self.most:
            self.waiting.put((kind, values))
            return
        self.dropped += 1
        if self.dropped == 1:
            log.warning("%s is too slow: records beyond its queue are dropped", self.name)

    def finish(self) -> None:
        """Let the sink end after what is queued."""
        self.waiting.put(None)

    def _work(self) -> None:
        try:
            sink = self.make()
            while (record := self.waiting.get()) is not None:
                sink.write(*record)
            sink.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 whatever a library raises, training goes on
            log.warning("%s is switched off: %s: %s", self.name, type(error).__name__, str(error)[:500])
        finally:
            self.off = True


def requested(settings: TelemetrySettings, environ: Mapping[str, str]) -> list[str]:
    """Return the sinks that are asked for; raise if a package that one needs is missing."""
    asked = dict.fromkeys(settings.sinks(), f"METRICS_SINKS={settings.metrics_sinks}")
    for variable in otlp.endpoints(environ).values():
        asked["otlp"] = f"{variable}={environ[variable]}"
    for name, setting in asked.items():
        package, extra = PACKAGES[name]
        if not is_installed(package):
            raise ConfigError(
                f"{setting}: {package} is not installed. Install it with pip install 'rl-swarm[{extra}]', or unset "
                f"{setting.partition('=')[0]}."
            )
    return list(asked)


def is_installed(package: str) -> bool:
    """Return whether a package is installed, without importing it. A folder of that name, as wandb makes one, is
    none."""
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return False
    return found is not None and found.origin is not None


@contextmanager
def sink_threads(names: Sequence[str], source: Source, stop: threading.Event) -> Iterator[list[SinkThread]]:
    """Run a node's sinks, and give them some time at the end for what is still queued."""
    threads = [SinkThread(name, partial(open_sink, name, source)) for name in names]
    try:
        yield threads
    finally:
        ended = time.monotonic()
        for feed in threads:
            feed.finish()
        for feed in threads:
            while feed.thread.is_alive() and time.monotonic() - ended < patience(stop):
                feed.thread.join(0.05)
            if feed.thread.is_alive():
                log.warning("%s did not finish in %.0f s; its last records are lost", feed.name, patience(stop))
            if feed.dropped:
                log.warning("%s was too slow: %d records were dropped", feed.name, feed.dropped)


def patience(stop: threading.Event) -> float:
    return STOPPED_SECONDS if stop.is_set() else LAST_SECONDS


def open_sink(name: str, source: Source) -> Sink:
    kinds: dict[str, Callable[[Source], Sink]] = {
        "otlp": otlp.Otlp,
        "tensorboard": trackers.TensorBoard,
        "trackio": trackers.Trackio,
        "wandb": trackers.WandB,
    }
    return kinds[name](source)
