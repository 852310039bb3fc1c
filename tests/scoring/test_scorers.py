"""Every task of reasoning-gym, scored by the real process as reasoning-gym scores it, for any answer."""

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hostile_answers import ALL, CODE, answers

from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.tasks import Task
from rl_swarm.scoring.process import ScoringProcess
from rl_swarm.scoring.safe_scorers import DIFFERENT, SCORERS

EVALUATING = sorted(set(DIFFERENT) - {*SCORERS, "codeio"})
SLOWEST = {"futoshiki", "knight_swap", "sokoban", "acre"}  # seconds a question or to start; left to the slow tests


def all_tasks():
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - {"composite"})


def plain(names, count, texts=(), dangerous=()):
    """Questions, answers and the scores that reasoning-gym gives by itself; 0 for tasks that would run the answer."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(sys.path), "TZ": "UTC"}
    script = Path(__file__).parents[1] / "helpers" / "plain_scores.py"
    request = json.dumps({"tasks": names, "count": count, "texts": texts, "dangerous": dangerous})
    with tempfile.TemporaryDirectory() as folder:  # programs of codeio leave files
        done = subprocess.run(
            [sys.executable, script], input=request, env=environment, cwd=folder, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr[-2000:]
    scored = json.loads(done.stdout)
    asked = [(Question(names[number], number, seed, "", None), answer) for number, seed, answer, _ in scored]
    return asked, [score for *_, score in scored]


@pytest.fixture(scope="module")
def quick():
    scorer = ScoringProcess([Task(name) for name in all_tasks() if name not in SLOWEST])
    yield scorer
    scorer.close()


@pytest.fixture
def alone(name):
    scorer = ScoringProcess([Task(name)])
    yield scorer
    scorer.close()


def compare(scorer, count):
    """Honest answers that are scored otherwise than by reasoning-gym, and the tasks that were looked at."""
    asked, theirs = plain([task.name for task in scorer.tasks], count)
    before = scorer.restarts
    ours = scorer.score(asked)
    assert scorer.restarts == before
    different = [
        (question.task, question.seed, answer, our, their)
        for (question, answer), our, their in zip(asked, ours, theirs, strict=True)
        if our != their and question.task not in SCORERS
    ]
    files = [found for found in different if found[0] == "codeio"]
    assert len(files) <= len(asked) / 100
    return [found for found in different if found not in files], {q.task for q, _ in asked}


def test_an_honest_answer_to_any_task_is_scored_as_reasoning_gym_does_it(quick):
    different, seen = compare(quick, 3)
    assert different == []
    assert len(seen) == len(quick.tasks) > 90


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", all_tasks())
def test_five_hundred_questions_of_a_task_are_scored_as_reasoning_gym_does_it(alone, name):
    different, seen = compare(alone, 500)
    assert different == []
    assert seen == {name}


WRONG = {
    "complex_arithmetic": ["nan", "NaN", "nanj", "nan+nanj", "(nan)"],
    "game_of_life_halting": ["nonsense", "[]", "0", "not True"],
    "coin_flip": ["0", "0.0"],
}


def test_what_reasoning_gym_pays_for_nothing_is_not_paid():
    scorer = ScoringProcess([Task(name) for name in SCORERS])
    try:
        questions = [q for q in scorer.held_out(30) if q.task != "coin_flip" or float(q.answer) > 0.01]
        assert {q.task for q in questions} == set(SCORERS)
        assert set(scorer.score([(q, answer) for q in questions for answer in WRONG[q.task]])) == {0.0}
        assert set(scorer.score([(q, f" {q.answer} ") for q in questions])) == {1.0}
        flips = [q for q in questions if q.task == "coin_flip"]
        assert set(scorer.score([(q, str(float(q.answer) + 5e-5)) for q in flips])) == {1.0}
        halting = [q for q in questions if q.task == "game_of_life_halting"]
        assert set(scorer.score([(q, str(q.answer != "True")) for q in halting])) == {0.0}
    finally:
        scorer.close()
    asked, theirs = plain(list(SCORERS), 4, [answer for wrong in WRONG.values() for answer in wrong])
    paid = {
        q.task for (q, answer), their in zip(asked, theirs, strict=True) if their == 1.0 and answer in WRONG[q.task]
    }
    assert paid == set(SCORERS)  # or the correction is no longer needed


@pytest.fixture
def ground(tmp_path):
    """A folder and a port that no answer must touch."""
    (tmp_path / "precious").write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield tmp_path, server.getsockname()[1]
        with pytest.raises(BlockingIOError):  # nobody called
            server.accept()
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    assert (tmp_path / "precious").read_text() == "mine"


def attack(scorer, texts, count):
    """Answers that earn more than with reasoning-gym, or anything where that would run them."""
    asked, theirs = plain([task.name for task in scorer.tasks], count, texts, EVALUATING)
    ours = scorer.score(asked)
    assert scorer.score(asked[:1]) == ours[:1]  # it still answers
    return [
        (question.task, text[:60], our, their)
        for (question, text), our, their in zip(asked, ours, theirs, strict=True)
        if our > (their if question.task not in EVALUATING else 0.05)  # which some pay for any text
    ]


def test_hostile_answers_do_nothing_and_earn_nothing_that_reasoning_gym_would_not_pay(ground, quick):
    fast = [text for text in answers(*ground) if len(text) < 500 and "**" not in text and "999" not in text]
    assert attack(quick, fast, 1) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", all_tasks())
def test_every_hostile_answer_to_every_task(ground, alone, name):
    assert len(answers(*ground)) == len(ALL) > 100 and len(CODE) > 30
    assert attack(alone, answers(*ground), 3) == []


BOMBS = ["10**10**10", "9**9**9**9", "1e999999999", "9" * 8000, "(" * 4000 + ")" * 4000, "¬" * 8000 + "P"]


def test_the_worst_answers_of_a_peer_cost_seconds_and_nobody_else_anything(caplog):
    """Some of them would keep the original busy for minutes."""
    names = ["countdown", "coin_flip", "propositional_logic", "chain_sum"]
    scorer = ScoringProcess([Task(name) for name in names])
    try:
        found = {question.task: question for question in scorer.held_out(4)}
        right = [(found["chain_sum"], found["chain_sum"].answer)] * 3
        bombs = [(found[name], text) for text in BOMBS for name in names] * 20
        random.Random(0).shuffle(bombs)
        scores = scorer.score([*right, *bombs], seconds=5.0)
        assert scores[:3] == [1.0] * 3  # what was scored before the time was over counts
        assert 3 <= len(scores) < len(bombs), "the others would take hours"
        assert max(scores[3:], default=0.0) <= 0.05
        assert scorer.late == len(right) + len(bombs) - len(scores)
        assert f"{scorer.late} answers of a peer are left out" in caplog.text
        assert scorer.score(right) == [1.0] * 3
        assert scorer.score(right, seconds=30.0) == [1.0] * 3
    finally:
        scorer.close()
