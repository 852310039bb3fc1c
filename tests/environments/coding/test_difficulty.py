"""The level moves with the solvers' success, and only with it."""

import random

import pytest

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
    assert [after(rising + [0.4] * n, Difficulty(iterations=3)).name for n in (0, 1, 2)] == ["easy", "easy", "medium"]


def test_the_halves_that_are_compared_grow():
    late = [0.3] * 20 + [0.36] * 14  # at the 30th ten of the later fifteen are better, which is not enough
    assert [after(late[:n]).name for n in (20, 25, 30, 34)] == ["easy"] * 4
    assert after([*late, 0.36]).name == "medium"  # fifteen of seventeen


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


def first_levels(rng, curve, noise, runs):
    """Return the first level that each run moves to, or the one where it stays."""
    found = set()
    for _ in range(runs):
        difficulty = Difficulty()
        for mean in curve:
            difficulty = difficulty.after(min(max(rng.gauss(mean, noise), 0.0), 1.0))
            if difficulty.level != 1:
                break
        found.add(difficulty.name)
    return found


@pytest.mark.parametrize("noise", [0.05, 0.12, 0.2])
def test_with_solvers_that_do_not_learn_it_stays(noise):
    assert first_levels(random.Random(0), [0.5] * 600, noise, 6) == {"easy"}


@pytest.mark.parametrize("rounds", [60, 200, 500])
def test_with_solvers_that_learn_it_moves_however_slowly(rounds):
    curve = [0.3 + 0.6 * number / rounds for number in range(rounds)]
    assert first_levels(random.Random(0), curve, 0.12, 6) == {"medium"}
    assert first_levels(random.Random(1), curve[::-1], 0.12, 6) == {"beginner"}
