"""Reads and checks a proposer's text: one JSON object with a question, a solution and at most four tests.

A proposal is untrusted text until it is checked. It counts only if it can be read, its own solution passes its
tests in the sandbox, and wrong programs fail them: constant ones, ones that return their argument, and the solution
with a small mistake. Every node checks proposals itself.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rl_swarm.environments.coding.mutations import mutants
from rl_swarm.environments.coding.task import CodingTask, is_plain
from rl_swarm.scoring.sandbox.sandbox import Test

MAX_TESTS, MIN_TESTS = 4, 2
MAX_LENGTH = 6000  # characters of a proposal
MAX_TEST = 400
MAX_MUTANTS = 6
MIN_CAUGHT = 0.5  # the share of mutants that tests must detect: some are equivalent to the solution
NAMES = "inf, nan = float('inf'), float('nan')"
CALL = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,63})\(")

# Returns whether each program passes all of its tests; None for those without time.
Judge: TypeAlias = Callable[[Sequence[tuple[str, Sequence[Test]]]], list[bool | None]]


@dataclass(frozen=True)
class CheckedProposal:
    """Holds the task of a proposal, or the reason why it is none."""

    task: CodingTask | None
    problem: str = ""


def as_json(task: CodingTask, tests: int = MAX_TESTS) -> str:
    """Write a task as a proposal."""
    pairs = [[test.call, test.expected] for test in task.tests[:tests]]
    proposal = {"question": task.description, "solution": task.reference, "tests": pairs}
    return json.dumps(proposal, ensure_ascii=False)


def read(text: str, level: str, subject: str) -> CheckedProposal:
    """Read the task that a text proposes, without running anything of it."""
    body = text[text.find("{") : text.rfind("}") + 1]
    if not body or len(text) > MAX_LENGTH:
        return CheckedProposal(None, "no JSON object" if not body else f"more than {MAX_LENGTH} characters")
    try:
        found = json.loads(body)
        question, solution, tests = found["question"], found["solution"], found["tests"]
        pairs = [Test(call, expected) for call, expected in tests[: MAX_TESTS + 1]]
        texts = [question, solution, *(text for test in pairs for text in (test.call, test.expected))]
        json.dumps(texts, ensure_ascii=False).encode()  # an escape may be half a character
    except (ValueError, KeyError, TypeError, RecursionError):
        return CheckedProposal(None, "not a question, a solution and tests")
    if not all(isinstance(part, str) and part.strip() for part in texts):
        return CheckedProposal(None, "not all of it is text")
    if not MIN_TESTS <= len(pairs) <= MAX_TESTS or max(map(len, texts[2:])) > MAX_TEST:
        return CheckedProposal(None, f"not {MIN_TESTS} to {MAX_TESTS} short tests")
    names = {match.group(1) if (match := CALL.match(test.call)) else "" for test in pairs}
    name = names.pop()
    if names or not name or f"def {name}(" not in solution:
        return CheckedProposal(None, "its tests do not call the function that it defines")
    if name not in question or not all(map(is_plain, (question, *texts[2:]))):
        return CheckedProposal(None, "its question does not name the function, or is not plain text")
    task = CodingTask(
        name="proposed/" + hashlib.sha256(body.encode()).hexdigest()[:16],
        level=level,
        subject=subject,
        description=question.strip(),
        shown=tuple(pairs[:1]),
        hidden=tuple(pairs[1:]),
        reference=solution,
    )
    return HELD_OUT if task.held_out else CheckedProposal(task)


def wrong_programs(task: CodingTask) -> tuple[list[str], list[str]]:
    """Make programs that must fail the tests, and mutants, most of which must. `literals` reads their values."""
    name = str(CALL.match(task.tests[0].call).group(1))  # type: ignore[union-attr] # `read` has seen to that
    values = dict.fromkeys(test.expected for test in task.tests)
    returned = (*values, "None", "values[0]", "values[-1]")
    trivial = [f"{NAMES}\ndef {name}(*values):\n    return ({value})" for value in returned]
    found = list(mutants(task.reference))
    every = max(1, -(-len(found) // MAX_MUTANTS))
    return trivial, found[::every]


def check(proposals: Sequence[tuple[str, str, str]], judge: Judge) -> list[CheckedProposal]:
    """Check texts with their levels and subjects. Most fail by their own solution, so that runs first."""
    results = [read(*proposal) for proposal in proposals]
    tasks = {number: result.task for number, result in enumerate(results) if result.task is not None}
    own = judge([(task.reference, task.tests) for task in tasks.values()])
    for number, passed in zip(list(tasks), own, strict=True):
        if not passed:
            del tasks[number]
            results[number] = LATE if passed is None else CheckedProposal(None, "its solution fails its tests")
    wrong = [(number, *wrong_programs(task)) for number, task in tasks.items()]
    programs = [(code, tasks[number].tests) for number, *kinds in wrong for kind in kinds for code in kind]
    verdicts = iter(judge(programs))
    for number, *kinds in wrong:
        caught = [[next(verdicts) for _ in kind] for kind in kinds]
        results[number] = _verdict(results[number], *caught)
    return results


def _verdict(read: CheckedProposal, trivial: Sequence[bool | None], mutants: Sequence[bool | None]) -> CheckedProposal:
    if None in (*trivial, *mutants):
        return LATE
    if any(trivial):
        return CheckedProposal(None, "a trivial program passes its tests")
    if mutants and sum(not passed for passed in mutants) < MIN_CAUGHT * len(mutants):
        return CheckedProposal(None, "its tests do not notice small mistakes")
    return read


HELD_OUT = CheckedProposal(None, "it is held out for measuring")
LATE = CheckedProposal(None, "there was no time to check it")
