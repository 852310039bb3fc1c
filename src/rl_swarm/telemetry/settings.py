"""Defines the settings of logs and metrics."""

from typing import Annotated, ClassVar, Literal

from rl_swarm.sections import Section, setting

SINKS = ("tensorboard", "trackio", "wandb")


class TelemetrySettings(Section, frozen=True, kw_only=True):
    heading: ClassVar[str] = "Logs and metrics"

    log_level: Annotated[Literal["debug", "info", "warning", "error"], setting("what is logged", "LOG_LEVEL")] = "info"
    debug: Annotated[bool, setting("the same as LOG_LEVEL=debug", "DEBUG")] = False
    metrics_sinks: Annotated[
        str,
        setting(
            "where metrics go beside `metrics.jsonl`: `tensorboard`, `trackio`, `wandb`, comma-"
            "separated; to an OpenTelemetry collector when OTEL_EXPORTER_OTLP_ENDPOINT is set",
            "METRICS_SINKS",
        ),
    ] = ""

    def sinks(self) -> tuple[str, ...]:
        """Return the names in `metrics_sinks`."""
        return tuple(dict.fromkeys(name.strip() for name in self.metrics_sinks.split(",") if name.strip()))
