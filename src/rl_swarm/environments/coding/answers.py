"""Finds the fenced program in a solver's answer, and decides what it earns."""

NOT_TEXT, NO_CODE, WRONG, RIGHT = -1.2, -1.0, 0.0, 1.0
ENDED = 0.2  # added if the answer ended by itself, subtracted if it was cut
MAX_PROGRAM = 8192  # characters
_OPENING = ("```python", "```py", "```")


def is_text(answer: str) -> bool:
    """Tell whether an answer holds text: it is not empty, and holds no bytes that are no letters."""
    return bool(answer.strip()) and "\ufffd" not in answer and "\0" not in answer


def program(answer: str) -> str | None:
    """Return the last fenced block of an answer, or None where there is none."""
    block: list[str] | None = None
    last = ""
    for line in answer.split("\n"):
        mark = line.rstrip()
        if block is None:
            block = [] if mark in _OPENING else None
        elif mark == "```":
            last, block = "\n".join(block), None
        else:
            block.append(line)
    return last if last.strip() and len(last) <= MAX_PROGRAM else None


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def earned(answer: str, right: bool) -> float:
    """Return what an answer earns, without the bonus for its end; `right` tells whether its program is right."""
    if not is_text(answer):
        return NOT_TEXT
    if program(answer) is None:
        return NO_CODE
    return RIGHT if right else WRONG
