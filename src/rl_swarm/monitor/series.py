"""Keeps curves small: neighbouring rounds are merged into their mean once there are too many points."""

import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TypeVar

MAX_POINTS = 512  # of one curve in memory
Number = TypeVar("Number", int, float)
LARGEST = 1e15  # a number beyond this is no measurement


def number(value: object) -> float | None:
    """Return the value as a number that can be summed and sent, or None: a peer may have written it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and abs(value) <= LARGEST else None


class Curves:
    """Holds several metrics of one node. A point is the mean of `stride` rounds, so a round played twice counts
    twice."""

    def __init__(self, most: int = MAX_POINTS) -> None:
        self.most, self.stride = most, 1
        self.sums: dict[str, array[float]] = {}
        self.counts: dict[str, array[int]] = {}

    def add(self, rounds: Sequence[int], columns: Mapping[str, Sequence[float | None]]) -> None:
        """Add what some rounds measured: for every metric a value per round, None where there is none."""
        newest = max(rounds, default=0)
        while newest // self.stride >= self.most:
            self._merge()
        places, end = [played // self.stride for played in rounds], newest // self.stride + 1
        for name, values in columns.items():
            if all(value is None for value in values):
                continue
            sums = self.sums.setdefault(name, array("d"))
            counts = self.counts.setdefault(name, array("I"))
            if (missing := end - len(sums)) > 0:
                sums.frombytes(bytes(missing * sums.itemsize))
                counts.frombytes(bytes(missing * counts.itemsize))
            for place, value in zip(places, values, strict=True):
                if value is not None:
                    sums[place] += value
                    counts[place] += 1

    def _merge(self) -> None:
        self.stride *= 2
        self.sums = {name: array("d", _sum_neighbours(2, values)) for name, values in self.sums.items()}
        self.counts = {name: array("I", _sum_neighbours(2, values)) for name, values in self.counts.items()}

    @property
    def end(self) -> int:
        """Return one past the last round that may have a point."""
        return self.stride * max(map(len, self.sums.values()), default=0)

    def points(self, name: str, stride: int) -> list[float | None]:
        """Return the curve in steps of `stride` rounds, a multiple of its own; None where there is no value."""
        return [value if value is None else float(f"{value:.6g}") for value in self.means(name, stride)]

    def means(self, name: str, stride: int) -> list[float | None]:
        """Return the same with all digits."""
        step = stride // self.stride
        sums = _sum_neighbours(step, self.sums.get(name, array("d")))
        counts = _sum_neighbours(step, self.counts.get(name, array("I")))
        return [s / n if n else None for s, n in zip(sums, counts, strict=True)]


def stride_for(curves: Sequence[Curves], points: int) -> int:
    """Return the smallest step in which all these curves have at most so many points."""
    stride = max((curve.stride for curve in curves), default=1)
    end = max((curve.end for curve in curves), default=0)
    while end > stride * points:
        stride *= 2
    return stride


def padded(values: list[float | None], length: int) -> list[float | None]:
    return values + [None] * (length - len(values))


def combined(curves: Sequence[Curves], name: str, stride: int) -> Curves:
    """Sum a metric of several nodes into one curve, in steps of `stride` rounds. Every measurement counts alike."""
    whole = Curves()
    whole.stride = stride
    sums, counts = [], []
    for own in {curve.stride for curve in curves}:
        same = [curve for curve in curves if curve.stride == own and name in curve.sums]
        sums.append(_sum_neighbours(stride // own, _sum_columns([curve.sums[name] for curve in same])))
        counts.append(_sum_neighbours(stride // own, _sum_columns([curve.counts[name] for curve in same])))
    whole.sums[name], whole.counts[name] = array("d", _sum_columns(sums)), array("I", _sum_columns(counts))
    return whole


def percentiles(
    curves: Sequence[Curves], name: str, stride: int, shares: Sequence[float]
) -> tuple[list[float | None], ...]:
    """Return percentiles over several nodes at every step of `stride` rounds, interpolated between neighbours."""
    rows = [curve.means(name, stride) for curve in curves]
    found: tuple[list[float | None], ...] = tuple([] for _ in shares)
    for column in zip_longest(*rows):
        known = sorted(value for value in column if value is not None)
        for line, share in zip(found, shares, strict=True):
            line.append(_percentile(known, share) if known else None)
    return found


def _percentile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return float(f"{low + (high - low) * (place % 1):.6g}")


def mean_of(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Average several curves, at every place over those that have a point there."""
    means: list[float | None] = []
    for column in zip(*rows, strict=True):
        found = [value for value in column if value is not None]
        means.append(sum(found) / len(found) if found else None)
    return means


def _sum_neighbours(step: int, values: Sequence[Number]) -> Sequence[Number]:
    """Sum every so many neighbours."""
    return values if step == 1 else [sum(values[k : k + step]) for k in range(0, len(values), step)]


def _sum_columns(rows: Sequence[Sequence[Number]]) -> list[Number]:
    """Sum the columns of rows of different lengths. With a thousand curves this is most of the work, hence
    built-ins."""
    return list(map(sum, zip_longest(*rows, fillvalue=0)))
