"""Defines what an exporter gets: whose records they are, and the numbers in them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

NOT_MEASURED = ("timestamp", "began", "round", "stage", "policy_version")  # numbers that say when
BY_PEER = ("external_by_peer",)  # would be a curve for every peer of the swarm


class Sink(Protocol):
    def write(self, kind: str, values: Mapping[str, object]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Source:
    """Identifies the node whose records a sink gets."""

    swarm: str  # its name
    swarm_id: str
    node: str
    peer_id: str
    folder: Path  # of the node's logs
    settings: dict[str, object] = field(default_factory=dict)


def scalars(values: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers of a record that make curves; those of a part by its name, such as `seconds/generate`."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if name in NOT_MEASURED or name in BY_PEER:
            continue
        parts = {f"{name}/{part}": v for part, v in value.items()} if isinstance(value, dict) else {name: value}
        for full_name, number in parts.items():
            if isinstance(number, int | float) and math.isfinite(number):
                found[full_name] = number
    return found
