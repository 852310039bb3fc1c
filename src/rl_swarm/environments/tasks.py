"""Which reasoning-gym tasks a swarm trains on: a task is a name, a weight and a configuration.

Two presets. `tiny` holds short questions that the bundled model can read and answer; `sapo` is the
nine tasks of the SAPO paper, for real language models. Any other reasoning-gym task can be named in
the settings. Tasks also come with a stranger's manifest, so what they hold is bounded; whether a task then
takes too long or too much memory is found out in the scoring process.
"""

import math
import re

import msgspec

Value = str | int | float | bool | list[str | int | float]

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
MAX_WEIGHT = 1e6
MAX_SETTINGS = 32
MAX_NUMBER = 10**12
MAX_LIST = 128
MAX_TEXT = 256
MAX_CONFIG = 4096  # characters, all settings of a task together


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
            raise ValueError(
                f"the task {self.name} has {len(self.config)} settings; {MAX_SETTINGS} are the most"
            )
        for key, value in self.config.items():
            if not NAME.fullmatch(key):
                raise ValueError(f"the task {self.name} has a setting {key[:80]!r}, which is no name of one")
            if (problem := _problem(value)) is not None:
                raise ValueError(f"the setting {key} of the task {self.name} {problem}")
        if (size := len(repr(self.config))) > MAX_CONFIG:
            raise ValueError(
                f"the settings of the task {self.name} have {size} characters; {MAX_CONFIG} are the most"
            )


def _problem(value: Value) -> str | None:
    """What is wrong with a setting's value, whatever the task."""
    if isinstance(value, list):
        if len(value) > MAX_LIST:
            return f"is a list of {len(value)}; {MAX_LIST} are the most"
        return next((f"holds a value that {found}" for item in value if (found := _problem(item))), None)
    if isinstance(value, str):
        return (
            f"is a text of {len(value)} characters; {MAX_TEXT} are the most"
            if len(value) > MAX_TEXT
            else None
        )
    if not math.isfinite(value):
        return "is no finite number"
    return f"is beyond {MAX_NUMBER:g}" if abs(value) > MAX_NUMBER else None


TINY = (
    Task("basic_arithmetic", config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    Task("chain_sum", config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    Task("count_primes", config={"min_n": 1, "max_n": 100}),
    Task(
        "decimal_arithmetic",
        config={"min_num_decimal_places": 1, "max_num_decimal_places": 1, "min_terms": 2, "max_terms": 2},
    ),
    Task(
        "fraction_simplification",
        config={"min_value": 1, "max_value": 30, "min_factor": 2, "max_factor": 9, "styles": ["plain"]},
    ),
    Task("gcd", config={"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 99}),
    Task("leg_counting", config={"min_animals": 1, "max_animals": 2, "max_instances": 9}),
    Task("letter_counting", config={"min_words": 2, "max_words": 3}),
    Task("simple_equations", config={"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 20}),
    Task("spell_backward", config={"min_word_len": 3, "max_word_len": 5}),
)

SAPO = tuple(
    Task(name)
    for name in (
        "arc_1d",
        "basic_arithmetic",
        "base_conversion",
        "bf",
        "binary_matrix",
        "calendar_arithmetic",
        "decimal_arithmetic",
        "fraction_simplification",
        "propositional_logic",
    )
)

PRESETS: dict[str, tuple[Task, ...]] = {"tiny": TINY, "sapo": SAPO}
