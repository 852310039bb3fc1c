"""Passes on what a node measures: to an OpenTelemetry collector, TensorBoard, Weights & Biases, Trackio.

Off unless asked for, and nothing is imported before. A sink gets what the journal writes to `metrics.jsonl`, in a
thread of its own that also opens and closes it: training never waits. What a slow sink has no room for is dropped and
counted; a sink that fails is switched off.
"""

import importlib.util
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from rl_swarm.errors import ConfigError
from rl_swarm.telemetry.settings import TelemetrySettings

log = logging.getLogger(__name__)

MAX_WAITING = 1000  # records
LAST_SECONDS = 60.0  # for all sinks together, when the node has finished
STOPPED_SECONDS = 5.0  # when it is told to stop
PACKAGES = {  # what each needs, and the extra that installs it
    "otlp": ("opentelemetry.exporter.otlp.proto.http", "otel"),
    "tensorboard": ("tensorboardX", "tensorboard"),
    "trackio": ("trackio", "trackio"),
    "wandb": ("wandb", "wandb"),
}
NOT_MEASURED = ("timestamp", "began", "round", "stage", "policy_version")  # numbers that say when
BY_PEER = ("external_by_peer",)  # would be a curve for every peer of the swarm


class Sink(Protocol):
    def write(self, kind: str, values: Mapping[str, object]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Source:
    """Whose records a sink gets."""

    swarm: str  # its name
    swarm_id: str
    node: str
    peer_id: str
    folder: Path  # of the node's logs
    settings: dict[str, object] = field(default_factory=dict)


class Feed:
    """One sink, its queue and its thread."""

    def __init__(self, name: str, make: Callable[[], Sink], most: int = MAX_WAITING) -> None:
        self.name, self.make = name, make
        self.waiting: queue.SimpleQueue[tuple[str, Mapping[str, object]] | None] = queue.SimpleQueue()
        self.most, self.dropped, self.off = most, 0, False
        self.thread = threading.Thread(target=self._work, name=threading.current_thread().name, daemon=True)
        self.thread.start()

    def put(self, kind: str, values: Mapping[str, object]) -> None:
        """Takes a record and returns at once."""
        if self.off:
            return
        if self.waiting.qsize() < self.most:
            self.waiting.put((kind, values))
            return
        self.dropped += 1
        if self.dropped == 1:
            log.warning("%s is too slow: metrics that it has no room for are dropped", self.name)

    def finish(self) -> None:
        """Tells the sink that there is no more."""
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


def wanted(settings: TelemetrySettings, environ: Mapping[str, str]) -> list[str]:
    """The sinks that are asked for. What they need is there, or the error says how to get it."""
    from rl_swarm.telemetry.otlp import endpoints

    asked = dict.fromkeys(settings.sinks(), f"METRICS_SINKS={settings.metrics_sinks}")
    for variable in endpoints(environ).values():
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
    """Found without importing it. A folder of that name, as wandb makes one, is no package."""
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return False
    return found is not None and found.origin is not None


@contextmanager
def feeding(names: Sequence[str], source: Source, stop: threading.Event) -> Iterator[list[Feed]]:
    """The sinks of a node while it runs. At the end they get some time for what still waits."""
    feeds = [Feed(name, partial(open_sink, name, source)) for name in names]
    try:
        yield feeds
    finally:
        ended = time.monotonic()
        for feed in feeds:
            feed.finish()
        for feed in feeds:
            while feed.thread.is_alive() and time.monotonic() - ended < patience(stop):
                feed.thread.join(0.05)
            if feed.thread.is_alive():
                log.warning("%s was not done in %.0f s; its last metrics are lost", feed.name, patience(stop))
            if feed.dropped:
                log.warning("%s was too slow for %d records, which it did not get", feed.name, feed.dropped)


def patience(stop: threading.Event) -> float:
    return STOPPED_SECONDS if stop.is_set() else LAST_SECONDS


def open_sink(name: str, source: Source) -> Sink:
    from rl_swarm.telemetry import otlp, trackers

    kinds: dict[str, Callable[[Source], Sink]] = {
        "otlp": otlp.Otlp,
        "tensorboard": trackers.TensorBoard,
        "trackio": trackers.Trackio,
        "wandb": trackers.WandB,
    }
    return kinds[name](source)


def numbers(values: Mapping[str, object]) -> dict[str, float]:
    """What of a record makes a curve, by name; those of a part, as the seconds of a phase, as `seconds/generate`."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if name in NOT_MEASURED or name in BY_PEER:
            continue
        parts = {f"{name}/{part}": v for part, v in value.items()} if isinstance(value, dict) else {name: value}
        for full_name, number in parts.items():
            if isinstance(number, int | float) and math.isfinite(number):
                found[full_name] = number
    return found
