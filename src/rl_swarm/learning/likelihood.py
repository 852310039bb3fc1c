"""Finds the span of a text that a model is least likely to write."""

from collections.abc import Iterable


def max_span_nll(excess: Iterable[float]) -> float:
    """Return the largest sum over any contiguous span of tokens, which does not depend on the length of the rest.

    `excess` is by how much the negative log-likelihood of each token exceeds its expectation at that position.
    """
    worst = here = 0.0
    for value in excess:
        here = max(0.0, here + value)
        worst = max(worst, here)
    return worst
