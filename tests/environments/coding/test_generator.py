"""Generated coding tasks: the same wherever they are made, sound, and of great variety."""

import os
import re
import subprocess
import sys

import pytest

from rl_swarm.environments.coding.generator import HIDDEN, SHOWN, make
from rl_swarm.environments.coding.grammar import Draw
from rl_swarm.environments.coding.mutations import mutants
from rl_swarm.environments.coding.task import LEVELS
from rl_swarm.scoring.sandbox.sandbox import Program, Sandbox

# Of the tasks below, whatever the machine, the version of Python and its hash seed.
DIGEST = "336d3f837696b83de89c9630a610ff3429af6d4d853f0abee78846596c653d87"
PRINT_DIGEST = """
import hashlib
from rl_swarm.environments.coding.generator import make
from rl_swarm.environments.coding.task import LEVELS
tasks = [make(level, 5, index) for level in LEVELS for index in range(40)]
print(hashlib.sha256("\\n".join(map(repr, tasks)).encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def sandbox():
    sandbox = Sandbox()
    yield sandbox
    sandbox.close()


@pytest.mark.parametrize("hash_seed", ["1", "random"])
def test_a_task_is_the_same_in_every_process(hash_seed):
    made = subprocess.run(
        [sys.executable, "-c", PRINT_DIGEST],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout.strip() == DIGEST


def test_draws_follow_from_their_name():
    first, again, other = ([Draw("a", n).below(1000) for _ in range(1)] for n in (1, 1, 2))
    assert first == again != other
    values = [Draw("spread", n).between(2, 9) for n in range(200)]
    assert set(values) == set(range(2, 10))


@pytest.mark.parametrize("level", LEVELS)
def test_solutions_pass_and_mutants_fail(level, sandbox):
    tasks = [make(level, 11, index) for index in range(30)]
    verdicts = sandbox.judge([Program(task.reference, task.tests) for task in tasks])
    assert [verdict.error for verdict in verdicts if not verdict.right] == []
    wrong = [(task, code) for task in tasks for code in list(mutants(task.reference))[:4]]
    passed = sandbox.judge([Program(code, task.tests) for task, code in wrong])
    assert len(wrong) >= 60
    assert sum(verdict.right for verdict in passed) < 0.2 * len(wrong)  # some mutants change nothing


@pytest.mark.parametrize("level", LEVELS)
def test_there_is_more_to_learn_than_to_memorise(level):
    tasks = [make(level, 1, index) for index in range(600)]
    shapes = {re.sub(r"\d+|'[a-z]'", "#", task.reference) for task in tasks}
    assert len(shapes) >= 200
    assert {task.level for task in tasks} == {level}
    for task in tasks:
        assert (len(task.shown), len(task.hidden)) == (SHOWN, HIDDEN)
        assert len({test.call for test in task.tests}) == SHOWN + HIDDEN
        assert len({test.expected for test in task.tests}) > 1
        assert task.shown[0].call in task.prompt and task.hidden[0].call not in task.prompt


def test_every_subject_is_asked_about():
    tasks = [make(level, 2, index) for level in LEVELS for index in range(60)]
    assert {task.subject for task in tasks} == {
        "numbers",
        "lists",
        "strings",
        "dictionaries",
        "recursion",
        "small algorithms",
    }


def test_other_words_and_tests_make_no_other_held_out_task():
    tasks = [make("beginner", 3, index) for index in range(400)]
    by_solution = {}
    for task in tasks:
        by_solution.setdefault(task.reference, set()).add(task.held_out)
    assert all(len(found) == 1 for found in by_solution.values())
    assert 20 <= sum(task.held_out for task in tasks) <= 100  # an eighth


def test_mutants_are_small_and_differ():
    program = "def solve(xs):\n    xs = [x for x in xs if x > 3]\n    return sum(xs)"
    found = list(mutants(program))
    assert "def solve(xs):\n    xs = [x for x in xs if x >= 3]\n    return sum(xs)" in found
    assert "def solve(xs):\n    xs = [x for x in xs if x > 4]\n    return sum(xs)" in found
    assert "def solve(xs):\n    return sum(xs)" in found
    assert program not in found and len(set(found)) == len(found)
