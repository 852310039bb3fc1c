"""Breaks a right program a little: a wrong operator, a number off by one, a line left out.

A proposal's tests must fail such programs, and a model that judges or improves programs must have seen some. Only text
is changed here; nothing is parsed or run. A changed program never depends on the order of a set, which differs between
processes.
"""

import re
from collections.abc import Iterator

SWAPS = {
    "==": ("!=",),
    "!=": ("==",),
    "<=": ("<", ">="),
    ">=": (">", "<="),
    "<": ("<=", ">"),
    ">": (">=", "<"),
    "+=": ("-=",),
    "+": ("-", "*"),
    "-": ("+",),
    "**": ("*",),
    "*": ("+",),
    "//": ("%", "*"),
    "%": ("//",),
    "and": ("or",),
    "or": ("and",),
    "not in": ("in",),
    "min": ("max",),
    "max": ("min",),
    "sum": ("len", "max"),
    "len": ("sum",),
    "any": ("all",),
    "all": ("any",),
    "upper": ("lower",),
    "lower": ("upper",),
    "sorted": ("list",),
    "[::-1]": ("", "[::2]"),
    "[::2]": ("[1::2]",),
    "find": ("rfind",),
    "startswith": ("endswith",),
    "endswith": ("startswith",),
    "keys": ("values",),
    "values": ("keys",),
    "True": ("False",),
    "False": ("True",),
}
_PLACES = re.compile(r"\[::-1\]|\[::2\]|not in|[=!<>+]=|\*\*|//|(?<![\w*/])'[a-z]'|\b\d{1,4}\b|[-+*%<>]|\b[A-Za-z]+\b")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MAX_LENGTH = 4000  # characters of a program that are mutated


def mutants(program: str) -> Iterator[str]:
    """Yield every program that one small mistake makes of this one, first to last."""
    for match in _PLACES.finditer(program[:MAX_LENGTH]):
        found = match.group()
        if found.isdigit():
            others: tuple[str, ...] = (str(int(found) + 1), str(max(int(found) - 1, 0)))
        elif len(found) == 3 and found[0] == "'":
            others = (f"'{LETTERS[(LETTERS.index(found[1]) + 1) % 26]}'",)
        elif found == "sorted" and program.startswith("(set(", match.end()):
            others = ()
        else:
            others = SWAPS.get(found, ())
        for other in others:
            if other != found:
                yield program[: match.start()] + other + program[match.end() :]
    lines = program.split("\n")
    for at, line in enumerate(lines):
        if at and not line.rstrip().endswith(":") and not line.lstrip().startswith(("return", "def ")):
            yield "\n".join(lines[:at] + lines[at + 1 :])
