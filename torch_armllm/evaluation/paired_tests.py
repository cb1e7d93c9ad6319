"""Statistics of two runs over the same rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Estimate(NamedTuple):
    """A value and its standard error."""

    value: float
    stderr: float


def mean(values: Sequence[float]) -> Estimate:
    """Returns the mean; its standard error is NaN for a single value."""
    count = len(values)
    middle = sum(values) / count
    if count < 2:
        return Estimate(middle, math.nan)
    variance = sum((value - middle) ** 2 for value in values) / (count - 1)
    return Estimate(middle, math.sqrt(variance / count))


def weighted(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """Returns Σ values / Σ weights, with the standard error of a ratio of sums."""
    total = sum(weight for _, weight in pairs)
    ratio = sum(value for value, _ in pairs) / total
    count = len(pairs)
    if count < 2:
        return Estimate(ratio, math.nan)
    squares = sum((value - ratio * weight) ** 2 for value, weight in pairs)
    return Estimate(ratio, math.sqrt(squares * count / (count - 1)) / total)


def difference(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Returns the mean of b − a by row, which cancels effects that are common to both runs."""
    return mean([y - x for x, y in zip(a, b, strict=True)])


def mcnemar(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns the two-sided p-value of McNemar's exact test: changes for better and worse are equally likely.

    Args:
        a: right (1) or wrong (0), by row.
        b: the same for the other run.
    """
    worse = sum(x > y for x, y in zip(a, b, strict=True))
    better = sum(x < y for x, y in zip(a, b, strict=True))
    count, fewer = worse + better, min(worse, better)
    tail = sum(math.comb(count, k) for k in range(fewer + 1))
    return min(1.0, float(2 * tail / 2**count))
