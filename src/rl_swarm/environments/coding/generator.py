"""Generates small tasks at five levels from a seed and an index, the same on every machine.

A task is a chain of steps (see `grammar`). One step is for beginners, two are easy, three or a choice between two are
medium; hard tasks need a loop or a recursion, and expert tasks need one among other steps. Tests are calls on random
values, many of them close to the numbers in the task, which exposes mutants; expected values are the results of the
reference solution. A task is only used if every step and every number in it matters: the solution without a step, or
with a number that is off by one, fails at least one test.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from rl_swarm.environments.coding.grammar import (
    IS_ALSO,
    LETTERS,
    VARIABLES,
    Draw,
    Piece,
    branch,
    choose,
    clauses,
    fits,
    solution,
)
from rl_swarm.environments.coding.steps import DEMANDING, SIMPLE
from rl_swarm.environments.coding.task import LEVELS, CodingTask
from rl_swarm.scoring.sandbox.sandbox import Test

STARTS = ("list", "full", "full", "full", "str", "str", "words", "dict", "int", "nat")
GIVEN = {
    "int": "the integer n",
    "nat": "the integer n, 0 or more",
    "list": "the list of integers xs",
    "full": "the list of integers xs, not empty",
    "str": "the text s",
    "words": "the list of texts words",
    "dict": "the dictionary d from texts to integers",
}
SUBJECTS = {
    "int": "numbers",
    "nat": "numbers",
    "list": "lists",
    "full": "lists",
    "str": "strings",
    "words": "strings",
    "dict": "dictionaries",
}
WORDS = [
    "ant",
    "bee",
    "cat",
    "dog",
    "eel",
    "fox",
    "owl",
    "apple",
    "pear",
    "plum",
    "lemon",
    "melon",
    "red",
    "blue",
    "green",
    "black",
    "moon",
    "star",
    "sun",
    "sea",
    "lake",
    "tree",
    "leaf",
    "stone",
    "bread",
    "milk",
    "rice",
    "salt",
    "door",
    "room",
    "table",
    "lamp",
    "noon",
    "level",
    "radar",
    "abba",
    "deed",
    "book",
    "letter",
    "coffee",
    "banana",
    "otter",
    "small",
    "tall",
    "cold",
    "one",
    "two",
    "three",
    "add",
    "pop",
    "cool",
    "till",
    "miss",
    "area",
    "idea",
    "open",
]
SHOWN, HIDDEN = 1, 5
MAX_LENGTH = 60  # characters of a value in a test
ATTEMPTS = 6  # to draw tests for a chain, before another chain is drawn


def make(level: str, seed: int, index: int) -> CodingTask:
    """Make the task of this name, always the same one. Two names may give the same task."""
    draw = Draw("coding", level, seed, index)
    while True:
        pieces, kind, arguments = _compose(level, draw)
        reference = solution(pieces, arguments)
        tests = _tests(pieces, kind, arguments, reference, draw)
        if tests is None:
            continue
        given = GIVEN[kind] + (" and the integer k" if "k" in arguments else "")
        signature = f"solve({', '.join(arguments)})"
        return CodingTask(
            name=f"{level}/{seed}/{index}",
            level=level,
            subject=_subject(pieces, kind),
            description=f"Write the Python function {signature}. Given {given}, {clauses(pieces)}.",
            shown=tests[:SHOWN],
            hidden=tests[SHOWN:],
            reference=reference,
        )


def _subject(pieces: Sequence[Piece], kind: str) -> str:
    if any(piece.helper for piece in pieces):
        return "recursion"
    return "small algorithms" if any(piece.setup for piece in pieces) else SUBJECTS[kind]


def _compose(level: str, draw: Draw) -> tuple[list[Piece], str, list[str]]:
    """Draw the pieces of a task, the type it begins with, and the names of its arguments."""
    while True:
        kind = draw.one(STARTS)
        plan = _plan(level, draw)
        argument = "k" if draw.happens(0.15) else None
        pieces = _walk(kind, plan, argument, draw)
        if pieces is None:
            continue
        takes_k = any(value == "k" for piece in pieces for _, value in (*piece.values, *_inner(piece)))
        return pieces, kind, [VARIABLES[kind], "k"] if takes_k else [VARIABLES[kind]]


def _plan(level: str, draw: Draw) -> list[str]:
    """Draw the kinds of step of a task at this level, in order."""
    simple, choice, demanding = "simple", "choice", "demanding"
    plans = {
        "beginner": [[simple]],
        "easy": [[simple] * 2],
        "medium": [[simple] * 3, [simple] * 3, [choice], [simple, choice]],
        "hard": [[demanding], [demanding], [demanding, simple], [simple, demanding], [simple] * 4],
        "expert": [
            [demanding, simple, simple],
            [simple, demanding, simple],
            [simple, simple, demanding],
            [demanding, choice],
            [choice, simple, simple],
        ],
    }
    return draw.one(plans[level])


def _walk(kind: str, plan: Sequence[str], argument: str | None, draw: Draw) -> list[Piece] | None:
    """Draw steps that fit behind each other; return None where the walk ends too early."""
    pieces: list[Piece] = []
    for number, wanted in enumerate(plan):
        last = number == len(plan) - 1
        pool = DEMANDING if wanted == "demanding" else SIMPLE
        steps = [step for step in pool if fits(kind, step.takes) and (last or step.gives in VARIABLES)]
        if last and len(plan) > 1 and draw.happens(0.5):  # prefer a chain that ends with one value
            steps = [step for step in steps if step.gives in ("int", "str", "bool")] or steps
        if not steps:
            return None
        step = draw.one(steps)
        piece = choose(step, draw, argument)
        if wanted == "choice":
            conditions = [s for s in SIMPLE if fits(kind, s.takes) and s.gives == "bool"]
            others = [s for s in SIMPLE if s.code != step.code and (s.takes, s.gives) == (step.takes, step.gives)]
            if step.gives == "bool" or not conditions or not others:
                return None
            piece = branch(choose(draw.one(conditions), draw), piece, choose(draw.one(others), draw))
        pieces.append(piece)
        # The result of a step on a non-empty list may be empty, unless the step says otherwise.
        kind = step.gives
    return pieces


def _inner(piece: Piece) -> list[tuple[str, str]]:
    return [value for part in piece.parts for value in part.values]


def _tests(pieces: list[Piece], kind: str, arguments: list[str], reference: str, draw: Draw) -> tuple[Test, ...] | None:
    """Draw calls and values that tell the solution from its mutants; return None where no such calls were drawn."""
    run = _compiled(reference)
    mutants: list[Any] = []  # compiled only if the first calls are usable
    near = [number for piece in pieces for number in piece.numbers]
    letters = [letter for piece in pieces for letter in piece.letters]
    for _ in range(ATTEMPTS):
        calls = []
        for number in range(SHOWN + HIDDEN):
            short = number < SHOWN
            values: list[Any] = [_value(kind, near, letters, short, draw)]
            calls.append([*values, draw.between(2, 9)] if "k" in arguments else values)
        texts = [", ".join(map(repr, call)) for call in calls]
        results = [_text(run, call) for call in calls]
        if any(result is None for result in results) or len(set(texts)) < len(texts):
            continue
        if len(set(results)) < (2 if results[0] in ("True", "False") else 3):
            continue
        mutants = mutants or [_compiled(program) for program in _mutants(pieces, arguments)]
        if any(_same(mutant, calls, results) for mutant in mutants):
            continue
        return tuple(Test(f"solve({c})", str(r)) for c, r in zip(texts, results, strict=True))
    return None


def _mutants(pieces: list[Piece], arguments: list[str]) -> Iterator[str]:
    """Make programs that are nearly the solution: a step or a condition left out, or a parameter off by one."""
    for at, piece in enumerate(pieces):
        step = piece.step
        if len(pieces) > 1 and fits(IS_ALSO.get(step.gives, step.gives), IS_ALSO.get(step.takes, step.takes)):
            rest = pieces[:at] + pieces[at + 1 :]
            if all(fits(a.step.gives, b.step.takes) for a, b in pairwise(rest)):
                yield solution(rest, arguments)
        for other in (*piece.parts[1:], *piece.neighbours()):
            yield solution([*pieces[:at], other, *pieces[at + 1 :]], arguments)


def _compiled(program: str) -> Any:
    """Compile the function that one of our own programs defines."""
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102  # made from the steps of this package alone
    return names["solve"]


def _same(mutant: Any, calls: list[list[Any]], results: list[str | None]) -> bool:
    return all(_text(mutant, call) == result for call, result in zip(calls, results, strict=True))


def _text(function: Any, call: list[Any]) -> str | None:
    """Return the value of a call as text, or None where there is none worth a test. No step changes its arguments."""
    try:
        value = repr(function(*call))
    except (ArithmeticError, LookupError, ValueError, RecursionError):
        return None
    return value if len(value) <= MAX_LENGTH else None


def _value(kind: str, near: list[int], letters: list[str], short: bool, draw: Draw) -> Any:
    """Draw an argument: short where it stands in the prompt, and close to the numbers of the task."""
    if kind == "int":
        return _number(near, -30, 99, draw)
    if kind == "nat":
        return draw.between(3, 9) if short else draw.between(0, 14)
    if kind in ("list", "full"):
        length = draw.between(2, 4) if short else draw.between(kind == "full", 7)
        numbers = [_number(near, -9, 20, draw) for _ in range(length)]
        if length > 1 and draw.happens(0.4):  # a repetition
            numbers[draw.below(length)] = numbers[draw.below(length)]
        return sorted(numbers) if draw.happens(0.1) else numbers
    if kind == "str":
        count = 1 if short or draw.happens(0.5) else draw.between(2, 3)
        text = " ".join(_word(letters, draw) for _ in range(count))
        # A capital vowel would be ambiguous: is it a vowel?
        return text.capitalize() if text[0] not in "aeiou" and draw.happens(0.2) else text
    if kind == "words":
        words = [_word(letters, draw) for _ in range(2 if short else draw.between(1, 5))]
        return [*words, words[0]] if draw.happens(0.2) else words
    keys = [_word(letters, draw) for _ in range(2 if short else draw.between(1, 4))]
    if letters and draw.happens(0.3):
        keys[0] = letters[0]
    return {key: _number(near, 0, 12, draw) for key in keys}


def _number(near: list[int], low: int, high: int, draw: Draw) -> int:
    if near and draw.happens(0.4):
        return draw.one(near) + draw.between(-1, 1)
    return draw.between(low, high)


def _word(letters: list[str], draw: Draw) -> str:
    word = draw.one(WORDS)
    if letters and draw.happens(0.5):
        at, letter = draw.below(len(word)), draw.one([*letters, *letters, *LETTERS[:4]])
        word = word[:at] + letter + word[at + 1 :]
    return word


def generate(seed: int, index: int) -> CodingTask:
    """Make a task of any level, the levels in turn."""
    return make(LEVELS[index % len(LEVELS)], seed, index)
