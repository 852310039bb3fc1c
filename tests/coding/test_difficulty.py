"""The level moves with the solvers' success, and only with it."""

import random

from rl_swarm.environments.coding.difficulty import Difficulty, trend
from rl_swarm.environments.coding.task import LEVELS


def after(successes, difficulty=None):
    difficulty = difficulty or Difficulty()
    for success in successes:
        difficulty = difficulty.after(success)
    return difficulty


def test_it_begins_easy_and_looks_every_fifth_iteration():
    assert Difficulty().name == "easy"
    rising = [0.3] * 10 + [0.4] * 10
    assert after(rising[:19]).name == "easy"
    assert after(rising).name == "medium"
    late = [0.3] * 20 + [0.36] * 9  # at the 20th and the 25th too few of the last ten were better
    assert [after(late[:n]).name for n in (20, 25, 29)] == ["easy", "easy", "easy"]
    assert after([*late, 0.36]).name == "medium"


def test_falling_success_lowers_it_and_a_small_change_does_not():
    assert after([0.4] * 10 + [0.3] * 10).name == "beginner"
    assert after([0.4] * 10 + [0.45] * 10).name == "easy"  # 0.05 is not more than 0.05
    assert after([0.4] * 10 + [0.451] * 10).name == "medium"
    assert trend([0.4] * 10 + [0.349] * 10) == -1


def test_levels_end_and_a_new_level_begins_a_new_comparison():
    difficulty = Difficulty()
    names = []
    for _ in range(4):
        difficulty = after([0.1] * 10 + [0.9] * 10, difficulty)
        names.append(difficulty.name)
    assert names == ["medium", "hard", "expert", "expert"]
    # At the new level success is lower: that alone does not bring the old one back.
    assert after([0.2] * 10, after([0.4] * 10 + [0.6] * 10)).name == "medium"
    low = after([0.9] * 10 + [0.1] * 10, Difficulty(level=0))
    assert low.name == LEVELS[0]


def test_with_solvers_that_do_not_learn_it_stays():
    rng = random.Random(0)
    moved = 0
    for _ in range(50):
        successes = [sum(rng.random() < 0.4 for _ in range(64)) / 64 for _ in range(60)]
        moved += after(successes) != Difficulty(1, tuple(successes[-20:]), 60)
    assert moved <= 5
