"""Makes strangers' text harmless before it is shown or written.

Text of a peer, a model or a file may hold commands for a terminal, a shell, a spreadsheet or a log reader. It passes
through here, and is escaped and shortened, before it reaches a log line or a message.
"""

import re

MAX_QUOTED = 80  # characters of a stranger's text in a log line
_PLAIN = re.compile(r"[A-Za-z0-9 ._,:+/@%=-]")
# What a terminal, a shell or a browser could take for a command, in the package's own text.
_ACTIVE = re.compile(r"[^ -~]|[$`]")


def quoted(text: str, limit: int = MAX_QUOTED) -> str:
    """Quote a stranger's text: letters, digits and a few signs stay, everything else is escaped."""
    shown = "".join(letter if _PLAIN.match(letter) else _escaped(letter) for letter in text[:limit])
    return f"'{shown}{'...' if len(text) > limit else ''}'"


def plain(text: str, limit: int) -> str:
    """Bound a message that may contain a stranger's text, and take out what could be a command."""
    return _ACTIVE.sub("?", text[:limit])


def printable(text: str) -> str:
    """Escape what moves a cursor or reorders text, and leaves the rest: for log lines and terminals."""
    return "".join(letter if letter == "\n" or letter.isprintable() else _escaped(letter) for letter in text)


def json_line(line: bytes) -> bytes:
    """Escape what a shell would run, were it to read a line of JSON; the value of the line stays the same."""
    return line.replace(b"$", b"\\u0024").replace(b"`", b"\\u0060")


def _escaped(letter: str) -> str:
    code = ord(letter)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
