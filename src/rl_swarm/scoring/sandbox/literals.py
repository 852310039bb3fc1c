"""Writes and reads plain Python values as text: the results of calls, and what tests expect.

The process that ran the program writes results, and the node reads them. Neither text is trusted, so the reader is
neither `eval` nor a parser of Python. It knows numbers, strings, bytes, None, True, False, lists, tuples, dictionaries
and sets, and stops at the first unknown character and beyond every limit.
"""

import math
import re
from collections.abc import Iterator, Set
from typing import TypeAlias

MAX_TEXT = 64 << 10  # characters of one value
MAX_DEPTH = 32
MAX_DIGITS = 4000  # of a number; Python itself writes no more than 4300

Value: TypeAlias = (
    "bool | float | str | bytes | list[Value] | tuple[Value, ...] | dict[Value, Value] | Set[Value] | None"
)

NAMES: dict[str, Value] = {"None": None, "True": True, "False": False, "inf": math.inf, "nan": math.nan}
INTEGER = re.compile(r"0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+|[0-9][0-9_]*")
TOKEN = re.compile(
    r"""
    (?P<number> 0[xX][0-9a-fA-F_]+ | 0[oO][0-7_]+ | 0[bB][01_]+
        | (?: [0-9][0-9_]* (?: \. [0-9_]* )? | \. [0-9][0-9_]* ) (?: [eE] [+-]? [0-9_]+ )? )
    | (?P<prefix> [bB]?[rR]? | [rR][bB] | [uU] )
        (?: \'\'\' (?P<long1> (?: [^\\] | \\. )*? ) \'\'\' | \"\"\" (?P<long2> (?: [^\\] | \\. )*? ) \"\"\"
          | \' (?P<short1> (?: [^\'\\\n] | \\. )* ) \' | \" (?P<short2> (?: [^\"\\\n] | \\. )* ) \" )
    | (?P<name> [A-Za-z]+ )
    | (?P<mark> [][(){},:+-] )
    """,
    re.VERBOSE | re.DOTALL,
)
SPACE = re.compile(r"\s*")
ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00(?:0.|10)[0-9a-fA-F]{4}|[0-7]{1,3}|.)", re.DOTALL)
LETTERS = {"\\": "\\", "'": "'", '"': '"', "\n": "", "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r"}
LETTERS |= {"t": "\t", "v": "\v"}


def write(value: object) -> str:
    """Write a value as a literal, or raise a ValueError that gives the reason. Subclasses count as their base."""
    parts, length = [], 0
    for part in _parts(value, MAX_DEPTH):
        parts.append(part)
        length += len(part)
        if length > MAX_TEXT:
            raise ValueError("it is too long")
    return "".join(parts)


def _parts(value: object, depth: int) -> Iterator[str]:
    if depth == 0:
        raise ValueError("it is nested too deeply")
    if value is None or isinstance(value, bool):
        yield repr(value)
    elif isinstance(value, int):
        yield int.__repr__(value)
    elif isinstance(value, float):
        yield float.__repr__(value)
    elif isinstance(value, str | bytes | bytearray):
        if len(value) > MAX_TEXT:
            raise ValueError("it is too long")
        yield str.__repr__(value) if isinstance(value, str) else bytes.__repr__(bytes(value))
    elif isinstance(value, list):
        yield from _items("[", list.__iter__(value), "]", depth)
    elif isinstance(value, tuple):
        yield from _items("(", tuple.__iter__(value), ",)" if len(value) == 1 else ")", depth)
    elif isinstance(value, dict):
        yield "{"
        for key, each in dict.items(value):
            yield from _parts(key, depth - 1)
            yield ": "
            yield from _parts(each, depth - 1)
            yield ", "
        yield "}"
    elif isinstance(value, set | frozenset):
        yield from _items("{", iter(value), "}", depth) if value else ["set()"]
    else:
        raise ValueError(f"a value of type {type(value).__name__} cannot be compared")


def _items(before: str, items: Iterator[object], after: str, depth: int) -> Iterator[str]:
    yield before
    for number, item in enumerate(items):
        if number:
            yield ", "
        yield from _parts(item, depth - 1)
    yield after


def read(text: str) -> Value:
    """Read the value of a literal, or raise a ValueError that gives the reason."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"it is longer than {MAX_TEXT} characters")
    reader = _Reader(text)
    value = reader.value(MAX_DEPTH)
    if reader.token is not None:
        raise ValueError(f"{reader.token[0]!r:.20} is left over")
    return value


class _Reader:
    """Reads a value by recursive descent, one token ahead."""

    def __init__(self, text: str) -> None:
        self.text, self.place = text, 0
        self.token: re.Match[str] | None = None
        self.next()

    def next(self) -> None:
        space = SPACE.match(self.text, self.place)
        self.place = space.end() if space else self.place
        self.token = TOKEN.match(self.text, self.place)
        if self.token is not None:
            self.place = self.token.end()
        elif self.place < len(self.text):
            raise ValueError(f"{self.text[self.place : self.place + 20]!r} is no literal")

    def take(self, mark: str) -> bool:
        if self.token is None or self.token[0] != mark:
            return False
        self.next()
        return True

    def need(self, mark: str) -> None:
        if not self.take(mark):
            raise ValueError(f"{mark!r} is missing")

    def value(self, depth: int) -> Value:
        token = self.token
        if token is None:
            raise ValueError("something is missing")
        if depth == 0:
            raise ValueError(f"it is nested more than {MAX_DEPTH} times")
        if token["prefix"] is not None:
            return self.string()
        self.next()
        if token["number"]:
            return _number(token["number"])
        if token[0] in "+-":
            following = self.value(depth - 1)
            if isinstance(following, bool) or not isinstance(following, int | float):
                raise ValueError(f"{token[0]} stands before no number")
            return -following if token[0] == "-" else following
        if token[0] == "set":
            self.need("(")
            self.need(")")
            return set()
        if token[0] in NAMES:
            return NAMES[token[0]]
        if token[0] == "[":
            return self.items("]", depth)[0]
        if token[0] == "(":
            items, comma = self.items(")", depth)
            return items[0] if len(items) == 1 and not comma else tuple(items)
        if token[0] == "{":
            return self.braces(depth)
        raise ValueError(f"{token[0]!r:.20} is no value")

    def items(self, end: str, depth: int) -> tuple[list[Value], bool]:
        """Read items up to `end`; return them, and whether a comma precedes `end`."""
        items: list[Value] = []
        comma = True
        while not self.take(end):
            if not comma:
                self.need(end)
            items.append(self.value(depth - 1))
            comma = self.take(",")
        return items, comma

    def braces(self, depth: int) -> Value:
        keys: list[Value] = []
        values: list[Value] = []
        comma = True
        while not self.take("}"):
            if not comma:
                self.need("}")
            keys.append(self.value(depth - 1))
            if self.take(":"):
                values.append(self.value(depth - 1))
            comma = self.take(",")
        if values and len(values) != len(keys):
            raise ValueError("a dictionary has a key without a value")
        try:
            return dict(zip(keys, values, strict=True)) if values or not keys else set(keys)
        except TypeError as error:
            raise ValueError(str(error)) from None

    def string(self) -> str | bytes:
        """Read adjacent strings as one."""
        parts: list[str | bytes] = []
        while self.token is not None and self.token["prefix"] is not None:
            parts.append(_string(self.token))
            self.next()
        if all(isinstance(part, str) for part in parts):
            return "".join(part for part in parts if isinstance(part, str))
        if all(isinstance(part, bytes) for part in parts):
            return b"".join(part for part in parts if isinstance(part, bytes))
        raise ValueError("a string stands beside bytes")


def _number(text: str) -> int | float:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return int(text, 0) if INTEGER.fullmatch(text) else float(text)


def _string(token: re.Match[str]) -> str | bytes:
    prefix = token["prefix"].lower()
    text = next(token[kind] for kind in ("long1", "long2", "short1", "short2") if token[kind] is not None)
    if "b" in prefix and not text.isascii():
        raise ValueError("bytes are written in ASCII")
    if "r" not in prefix:
        text = ESCAPE.sub(_unescaped, text)
    return text.encode("latin-1") if "b" in prefix else text


def _unescaped(escape: re.Match[str]) -> str:
    kind = escape[1]
    if kind in LETTERS:
        return LETTERS[kind]
    if len(kind) > 1 or kind.isdigit():
        return chr(int(kind, 8) if kind[0].isdigit() else int(kind[1:], 16))
    raise ValueError(f"the escape \\{kind} is not known here")


def same(left: Value, right: Value) -> bool:
    """Return whether values are equal; floats may differ after the ninth digit, and nan equals nan."""
    if isinstance(left, float | int) and isinstance(right, float | int):
        if left == right or not (isinstance(left, float) or isinstance(right, float)):
            return left == right
        try:
            return math.isclose(left, right) or (math.isnan(left) and math.isnan(right))
        except OverflowError:  # an integer beyond all floats
            return False
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        alike = isinstance(left, list) == isinstance(right, list) and len(left) == len(right)
        return alike and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return len(left) == len(right) and all(key in right and same(left[key], right[key]) for key in left)
    return left == right
