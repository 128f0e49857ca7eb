"""Confidence intervals, and what they say of a target: one kind for means, one for shares, wherever answers are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95  # of confidence intervals
RESAMPLES = 10_000
RESAMPLED_AT_ONCE = 1 << 22  # values, 32 MiB of float64
LEAST_SAMPLE = 16  # below it, nothing is said about a target
_Values = NDArray[np.float64]
Decision = Literal["kept", "broken", "undecided"]


@dataclass(frozen=True)
class Interval:
    """A mean, median or share, and the ends of its confidence interval."""

    mean: float
    low: float
    high: float


class Judged(NamedTuple):
    """A mean or share over answers, with the ends of its 95 % interval, and the target that it is to stay within."""

    mean: float
    low: float
    high: float
    target: float
    answers: int

    @property
    def decision(self) -> Decision:
        """Whether it stays within the target, with 95 % confidence."""
        if self.answers < LEAST_SAMPLE or self.low <= self.target < self.high:
            return "undecided"
        return "kept" if self.high <= self.target else "broken"

    @property
    def enough(self) -> int:
        """How many answers would probably decide: intervals shrink with the root of their number. At most 100 times as many."""
        reach = max(self.high - self.mean, self.mean - self.low)
        distance = abs(self.target - self.mean)
        factor = 100.0 if distance * 10 <= reach else (reach / distance) ** 2
        return max(LEAST_SAMPLE, round(self.answers * max(factor, 1.0) * 1.2))


def paired_interval(values: Sequence[float], reference: Sequence[float], *, resamples: int = RESAMPLES) -> Interval:
    """Mean of `values[i] - reference[i]` with its interval: items are resampled, so each keeps its own reference."""
    differences = np.subtract(values, reference, dtype=np.float64)
    return mean_interval(differences.tolist(), resamples=resamples)


def mean_interval(values: Sequence[float], *, resamples: int = RESAMPLES) -> Interval:
    """Mean of finite `values` with its 95 % percentile bootstrap interval (Efron and Tibshirani 1993, chapter 13).

    The same values give the same interval. One value, or values that are all equal, give an interval of width 0: the sample
    then says nothing about the spread.
    """
    return _bootstrapped(values, np.mean, resamples)


def median_interval(values: Sequence[float], *, resamples: int = RESAMPLES) -> Interval:
    """The same of the median."""
    return _bootstrapped(values, np.median, resamples)


def defined_mean(values: Sequence[float | None]) -> Interval | None:
    """`mean_interval` of the values that are not None; None if there are none, or one is infinite."""
    defined = [value for value in values if value is not None]
    return mean_interval(defined) if defined and all(map(math.isfinite, defined)) else None


def share_interval(hits: int, count: int) -> Interval:
    """A share with Wilson's 95 % score interval (Wilson 1927), which says something of 0 hits too."""
    share = hits / count
    z2 = NormalDist().inv_cdf((1 + LEVEL) / 2) ** 2
    scale = 1 + z2 / count
    middle = (share + z2 / (2 * count)) / scale
    variance = share * (1 - share) + z2 / (4 * count)
    reach = (z2 * variance / count) ** 0.5 / scale
    return Interval(share, max(0.0, middle - reach), min(1.0, middle + reach))


def upper_share(hits: int, count: int) -> float:
    """The upper end of Clopper and Pearson's one-sided 95 % interval of a share.

    It never promises too much, so limits are chosen by it; figures are shown with `share_interval`.
    """
    if hits >= count:
        return 1.0
    low = hits / count
    high = 1.0
    for _ in range(40):
        share = (low + high) / 2
        terms = (comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(hits + 1))
        if sum(terms) > 1 - LEVEL:
            low = share
        else:
            high = share
    return high


def _bootstrapped(values: Sequence[float], statistic: Callable[..., _Values], resamples: int) -> Interval:
    sample = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(0)
    statistics = np.empty(resamples)
    block = max(1, RESAMPLED_AT_ONCE // len(sample))
    for start in range(0, resamples, block):
        stop = min(start + block, resamples)
        rows = generator.integers(len(sample), size=(stop - start, len(sample)))
        statistics[start:stop] = statistic(sample[rows], axis=1)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(statistics, [tail, 1 - tail])
    return Interval(float(statistic(sample)), float(low), float(high))
