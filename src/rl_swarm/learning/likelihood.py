"""Finds the stretch of a text that a model would hardly write."""

from collections.abc import Iterable


def max_span_nll(excess: Iterable[float]) -> float:
    """The largest sum over any stretch of tokens: a stretch that this model would not write stands out however long
    the rest is. `excess` is by how much each token was less likely than tokens are on average at its place."""
    worst = here = 0.0
    for value in excess:
        here = max(0.0, here + value)
        worst = max(worst, here)
    return worst
