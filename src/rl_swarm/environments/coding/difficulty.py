"""Moves the level of a proposer: up while solvers get better at it, down while they get worse.

Every fifth iteration the mean success of the later half of the iterations is compared with that of the earlier half:
ten with ten at first, and more of them later on. Only iterations at the same level are compared, since a harder level
alone lowers success. A difference within chance does not count, so the level stays where solvers do not learn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from rl_swarm.environments.coding.task import LEVELS

START = LEVELS.index("easy")
WINDOW, EVERY, STEP = 10, 5, 0.05
ERRORS = 4.0  # standard errors that a difference must exceed too
MAX_COMPARED = 800  # iterations


@dataclass(frozen=True)
class Difficulty:
    level: int = START
    successes: tuple[float, ...] = ()  # of the iterations at this level, the oldest dropped first
    iterations: int = 0

    @property
    def name(self) -> str:
        return LEVELS[self.level]

    def after(self, success: float) -> "Difficulty":
        """Return the difficulty after one more iteration, in which this share of the answers was right."""
        now = replace(self, successes=(*self.successes, success)[-MAX_COMPARED:], iterations=self.iterations + 1)
        if now.iterations % EVERY or len(now.successes) < 2 * WINDOW:
            return now
        level = min(max(now.level + trend(now.successes), 0), len(LEVELS) - 1)
        return now if level == now.level else Difficulty(level, (), now.iterations)


def trend(successes: Sequence[float]) -> int:
    """Return 1 if the later half is better than the earlier one, -1 if it is worse, 0 if chance explains it."""
    half = len(successes) // 2
    before, last = successes[:half], successes[-half:]
    change = fmean(last) - fmean(before)
    # The jumps from one iteration to the next are chance, also while success rises.
    noise = fmean((later - earlier) ** 2 for earlier, later in pairwise(successes)) / 2
    error = math.sqrt(2 * noise / half)
    if abs(change) <= max(STEP, ERRORS * error):
        return 0
    return 1 if change > 0 else -1
