"""Joins steps into a task: each is a clause of English with the Python that does it.

A step takes a value of one type and returns one of another. Its text has placeholders for parameters: `$k` (2 to 9),
`$j` (10 to 20), `$i` (1 to 3), `$c` and `$e` (letters), and in code `$v` for the value it takes. A chain of steps is a
task: the joined clauses describe it, the joined lines are a solution.

Python's methods that choose from sequences may change between versions, so `Draw` uses only `random()`, which is
guaranteed to stay.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TypeVar

T = TypeVar("T")

VARIABLES = {"int": "n", "nat": "n", "list": "xs", "full": "xs", "str": "s", "words": "words", "dict": "d"}
# A natural number is an integer, and a list that is not empty is a list.
IS_ALSO = {"nat": "int", "full": "list"}
RANGES = {"k": (2, 9), "j": (10, 20), "i": (1, 3)}
LETTERS = "aeiobcdlmnprst"
PLACE = re.compile(r"\$[kjice]")
NOUNS = ("the ", "whether ", "how many ")


class Draw:
    """Draws choices that follow from a name, the same on every machine."""

    def __init__(self, *name: object) -> None:
        digest = sha256("/".join(map(str, name)).encode()).digest()
        self._random = random.Random(int.from_bytes(digest[:8], "big")).random

    def below(self, count: int) -> int:
        return int(self._random() * count)

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def one(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def happens(self, chance: float) -> bool:
        return self._random() < chance


@dataclass(frozen=True)
class Step:
    """Holds a step: `setup` are lines before the expression `code`, and `helper` is a function `$f` that it calls."""

    clause: str
    code: str
    takes: str
    gives: str
    setup: str = ""
    helper: str = ""

    @property
    def places(self) -> list[str]:
        return sorted(set(PLACE.findall(self.clause + self.code + self.setup + self.helper)))


def table(takes: str, gives: str, rows: Mapping[str, str]) -> tuple[Step, ...]:
    """Make steps that are one expression each, by their clause."""
    return tuple(Step(clause, code, takes, gives) for clause, code in rows.items())


def fits(gives: str, takes: str) -> bool:
    return gives == takes or IS_ALSO.get(gives) == takes


@dataclass(frozen=True)
class Piece:
    """Holds a step with its parameters chosen. A branch is a piece too: the step of its texts joined."""

    step: Step
    values: tuple[tuple[str, str], ...] = ()
    parts: tuple["Piece", ...] = ()  # of a branch: condition, then, otherwise

    def _fill(self, text: str) -> str:
        for place, value in self.values:
            text = text.replace(place, value)
        return text

    @property
    def clause(self) -> str:
        if not self.parts:
            return self._fill(self.step.clause)
        condition, then, otherwise = (part.clause for part in self.parts)
        return f"{then} if {condition.removeprefix('whether ')}, otherwise {otherwise}"

    @property
    def code(self) -> str:
        if not self.parts:
            return self._fill(self.step.code)
        condition, then, otherwise = (part.code for part in self.parts)
        return f"{then} if {condition} else {otherwise}"

    @property
    def setup(self) -> str:
        return self._fill(self.step.setup)

    @property
    def helper(self) -> str:
        return self._fill(self.step.helper)

    @property
    def is_noun(self) -> bool:
        return self.clause.startswith(NOUNS)

    @property
    def numbers(self) -> list[int]:
        own = [int(value) for _, value in self.values if value.isdigit()]
        return own + [number for part in self.parts for number in part.numbers]

    @property
    def letters(self) -> list[str]:
        own = [value for place, value in self.values if place in ("$c", "$e")]
        return own + [letter for part in self.parts for letter in part.letters]

    def neighbours(self) -> Iterator["Piece"]:
        """Yield the piece with one parameter off by one, as a mutant would make it."""
        for at, (place, value) in enumerate(self.values):
            if value.isdigit():
                mutant = str(int(value) + 1)
            elif place in ("$c", "$e"):
                mutant = LETTERS[(LETTERS.index(value) + 1) % len(LETTERS)]
            else:
                continue
            yield replace(self, values=(*self.values[:at], (place, mutant), *self.values[at + 1 :]))
        for at, part in enumerate(self.parts):
            for other in part.neighbours():
                yield replace(self, parts=(*self.parts[:at], other, *self.parts[at + 1 :]))


def choose(step: Step, draw: Draw, argument: str | None = None) -> Piece:
    """Draw the parameters of a step; `argument` is the name of an argument that stands in for `$k`."""
    values = []
    for place in step.places:
        if place == "$k" and argument and not step.helper:
            values.append((place, argument))
        elif place[1] in RANGES:
            values.append((place, str(draw.between(*RANGES[place[1]]))))
        else:
            taken = [value for _, value in values]
            values.append((place, draw.one([letter for letter in LETTERS if letter not in taken])))
    return Piece(step, tuple(values))


def branch(condition: Piece, then: Piece, otherwise: Piece) -> Piece:
    return Piece(Step("", "", then.step.takes, then.step.gives), parts=(condition, then, otherwise))


def solution(pieces: Sequence[Piece], arguments: Sequence[str]) -> str:
    """Write the program that does one piece after the other."""
    if len(pieces) == len(arguments) == 1 and pieces[0].helper:  # the helper is the whole solution
        return pieces[0].helper.replace("$f", "solve")
    lines, variable = [f"def solve({', '.join(arguments)}):"], arguments[0]
    helpers: list[str] = []
    for number, piece in enumerate(pieces):
        name = f"f{number}" if helpers and piece.helper else "f"
        if piece.helper:
            helpers.append(piece.helper.replace("$f", name))
        for line in filter(None, piece.setup.split("\n")):
            lines.append("    " + line.replace("$v", variable))
        code = piece.code.replace("$v", variable).replace("$f", name)
        last = number == len(pieces) - 1
        variable = VARIABLES.get(piece.step.gives, "r")
        lines.append(f"    return {code}" if last else f"    {variable} = {code}")
    return "\n".join([*helpers, *lines])


def clauses(pieces: Sequence[Piece]) -> str:
    """Describe the pieces in one sentence, without its beginning."""
    *before, last = pieces
    words = [f"take {piece.clause}" if piece.is_noun else piece.clause for piece in before]
    if last.is_noun:
        return ", ".join([*words, f"return {last.clause}"])
    return ", ".join([*words, last.clause, "return the result"])
