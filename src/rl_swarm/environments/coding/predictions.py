"""Asks a frozen model whether a program is right, and measures how good such guesses are.

The guess is not read from text that the model writes. The program stands in the prompt as a JSON string, in which no
control token survives. The verdict is the probability of `yes` against `no` as the very next token. So a program can
lie to the model as any text can, but it cannot answer in its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rl_swarm.environments.base import LanguageModel
from rl_swarm.environments.coding import prompts

BINS = 10


def probabilities(model: LanguageModel, asked: Sequence[tuple[str, str]], seconds: float | None = None) -> list[float]:
    """Return how probable the model finds it that each program is right; 0.5 where the text is too long.

    With `seconds`, return those of the first programs only, where all would take longer.
    """
    found = [prompts.evaluator_prompt(task, program) for task, program in asked]
    return model.word_probability(found, prompts.YES, prompts.NO, seconds)


@dataclass(frozen=True)
class Quality:
    """Compares guesses with execution."""

    guesses: int
    right_share: float  # of the programs, by execution
    accuracy: float
    balanced: float  # mean of the accuracies on right and on wrong programs; 0.5 where there is one kind alone
    disagreement: float
    calibration: float  # expected calibration error, ten bins
    brier: float

    def metrics(self) -> dict[str, float]:
        return {name: round(float(value), 4) for name, value in vars(self).items()}


def quality(guesses: Sequence[tuple[float, bool]]) -> Quality:
    """Measure probabilities against what execution said; there must be at least one."""
    hits = [(p > 0.5) == right for p, right in guesses]
    kinds = [[hit for hit, (_, right) in zip(hits, guesses, strict=True) if right == kind] for kind in (True, False)]
    bins: dict[int, list[tuple[float, bool]]] = {}
    for p, right in guesses:
        bins.setdefault(min(int(p * BINS), BINS - 1), []).append((p, right))
    gaps = [abs(sum(p for p, _ in group) - sum(right for _, right in group)) for group in bins.values()]
    return Quality(
        guesses=len(guesses),
        right_share=_mean([right for _, right in guesses]),
        accuracy=_mean(hits),
        balanced=_mean([_mean(kind) for kind in kinds]) if all(kinds) else 0.5,
        disagreement=1 - _mean(hits),
        calibration=sum(gaps) / len(guesses),
        brier=_mean([(p - right) ** 2 for p, right in guesses]),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
