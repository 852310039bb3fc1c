"""Describes a task of a swarm: a name, a weight and a configuration, all bounded, since strangers send them too."""

import math
import re

import msgspec

from rl_swarm.errors import UsageError

Value = str | int | float | bool | list[str | int | float]

PRESET_NAMES = ("tiny", "sapo")  # of lists of tasks, which `environments.presets` has
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
MAX_WEIGHT = 1e6
MAX_SETTINGS = 32
MAX_NUMBER = 10**12
MAX_LIST = 128
MAX_TEXT = 256
MAX_CONFIG = 4096  # characters, all settings of a task together


class TaskError(UsageError):
    """Reports a task that cannot be used as configured."""


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    weight: float = 1.0
    config: dict[str, Value] = {}

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"{self.name[:80]!r} is no name of a task: up to 64 letters, digits and _")
        if not 0 < self.weight <= MAX_WEIGHT:
            raise ValueError(
                f"the task {self.name} has the weight {self.weight}; use more than 0, up to {MAX_WEIGHT:g}"
            )
        if len(self.config) > MAX_SETTINGS:
            raise ValueError(f"the task {self.name} has {len(self.config)} settings; {MAX_SETTINGS} are the most")
        for key, value in self.config.items():
            if not NAME.fullmatch(key):
                raise ValueError(f"the task {self.name} has a setting {key[:80]!r}, which is no name of one")
            if (problem := _problem(value)) is not None:
                raise ValueError(f"the setting {key} of the task {self.name} {problem}")
        if (size := len(repr(self.config))) > MAX_CONFIG:
            raise ValueError(f"the settings of the task {self.name} have {size} characters; {MAX_CONFIG} are the most")


def _problem(value: Value) -> str | None:
    """Return what is wrong with a setting's value, whatever the task."""
    if isinstance(value, list):
        if len(value) > MAX_LIST:
            return f"is a list of {len(value)}; {MAX_LIST} are the most"
        return next((f"holds a value that {found}" for item in value if (found := _problem(item))), None)
    if isinstance(value, str):
        return f"is a text of {len(value)} characters; {MAX_TEXT} are the most" if len(value) > MAX_TEXT else None
    if not math.isfinite(value):
        return "is no finite number"
    return f"is beyond {MAX_NUMBER:g}" if abs(value) > MAX_NUMBER else None
