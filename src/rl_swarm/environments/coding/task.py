"""Defines a coding task: a description, tests, and a reference solution."""

import hashlib
import re
from dataclasses import dataclass

from rl_swarm.protocol.questions import is_held_out
from rl_swarm.scoring.sandbox.sandbox import Test

# Text that could be a control token of some tokenizer, end a turn of a chat, or open a fence.
_CONTROL = re.compile(r"<\||\|>|<<|</?[A-Za-z_]|\[/?[A-Z]{3}|```")
LEVELS = ("beginner", "easy", "medium", "hard", "expert")
DIGITS = 10  # of stored digests


@dataclass(frozen=True)
class CodingTask:
    """Holds a task; `reference` is a program that passes all tests, or empty where none is known."""

    name: str
    level: str
    subject: str
    description: str
    shown: tuple[Test, ...]
    hidden: tuple[Test, ...]
    reference: str = ""

    @property
    def prompt(self) -> str:
        examples = [f"{test.call} == {test.expected}" for test in self.shown]
        return "\n".join([self.description, *(f"For example, {example}" for example in examples)])

    @property
    def tests(self) -> tuple[Test, ...]:
        return (*self.shown, *self.hidden)

    @property
    def held_out(self) -> bool:
        """Decide by the solution where there is one, so that other words or tests do not make it another task."""
        return is_held_out("\n".join((self.reference or self.description).split()))


def digest_of_words(text: str) -> str:
    """Return a digest that ignores white space; short, since checkpoints hold many."""
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:DIGITS]


def is_plain(text: str) -> bool:
    """Tell whether untrusted text is safe in a prompt: printable lines without control tokens."""
    return _CONTROL.search(text) is None and all(c.isprintable() or c == "\n" for c in text)
