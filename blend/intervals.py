"""Confidence intervals, and what they say of a limit: one kind for means, one for shares, wherever answers are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95  # of confidence intervals
_Values = NDArray[np.float64]
# Resampled values held at once, 32 MiB of float64.
RESAMPLED_AT_ONCE = 1 << 22


LEAST_SAMPLE = 16  # below it, nothing is said about a limit
Decision = Literal["kept", "broken", "undecided"]


class IntervalEnds(NamedTuple):
    """Ends of a confidence interval."""

    low: float
    high: float


@dataclass(frozen=True)
class Interval:
    """A mean and the ends of its confidence interval."""

    mean: float
    low: float
    high: float


def paired_interval(
    values: Sequence[float],
    reference: Sequence[float],
    *,
    level: float = LEVEL,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Mean of `values[i] - reference[i]` with its interval: items are resampled, so each keeps its own reference.

    Raises `ValueError` when the two are not of one length, and as `mean_interval` does.
    """
    if len(values) != len(reference):
        raise ValueError(f"paired values must be as many as their references, not {len(values)} and {len(reference)}")
    differences = np.subtract(values, reference, dtype=np.float64)
    return mean_interval(differences.tolist(), level=level, resamples=resamples, seed=seed)


def mean_interval(values: Sequence[float], *, level: float = LEVEL, resamples: int = 10_000, seed: int = 0) -> Interval:
    """Mean of `values` with its percentile bootstrap interval (Efron and Tibshirani 1993, chapter 13).

    One value, or values that are all equal, give an interval of width 0: the sample then says nothing about the spread.
    Raises `ValueError` for no values, a value that is not finite, or a level or number of resamples out of range.
    """
    low, high = _bounds(values, np.mean, level, resamples, seed)
    return Interval(float(np.mean(values)), low, high)


def share_interval(hits: int, count: int) -> Interval:
    """A share with Wilson's 95 % score interval (Wilson 1927), which says something of 0 hits too.

    Raises `ValueError` unless 0 <= hits <= count and count > 0.
    """
    if not 0 <= hits <= count or not count:
        raise ValueError(f"{hits} of {count} is no share")
    share, z2 = hits / count, NormalDist().inv_cdf((1 + LEVEL) / 2) ** 2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    reach = (z2 * (share * (1 - share) + z2 / (4 * count)) / count) ** 0.5 / (1 + z2 / count)
    return Interval(share, max(0.0, middle - reach), min(1.0, middle + reach))


def median_bounds(
    values: Sequence[float], *, level: float = LEVEL, resamples: int = 10_000, seed: int = 0
) -> IntervalEnds:
    """Percentile bootstrap interval of the median; arguments and errors as in `mean_interval`."""
    return _bounds(values, np.median, level, resamples, seed)


def _bounds(
    values: Sequence[float], statistic: Callable[..., _Values], level: float, resamples: int, seed: int
) -> IntervalEnds:
    sample = np.asarray(values, dtype=np.float64)
    _check_sample(sample, level, resamples)
    if np.ptp(sample) == 0:
        value = float(np.mean(values))
        return IntervalEnds(value, value)
    tail = (1 - level) / 2
    low, high = np.quantile(_resampled(sample, statistic, resamples, seed), [tail, 1 - tail])
    return IntervalEnds(float(low), float(high))


def _resampled(sample: _Values, statistic: Callable[..., _Values], resamples: int, seed: int) -> _Values:
    generator = np.random.default_rng(seed)
    statistics = np.empty(resamples)
    block = max(1, RESAMPLED_AT_ONCE // len(sample))
    for start in range(0, resamples, block):
        stop = min(start + block, resamples)
        rows = generator.integers(len(sample), size=(stop - start, len(sample)))
        statistics[start:stop] = statistic(sample[rows], axis=1)
    return statistics


def _check_sample(sample: _Values, level: float, resamples: int) -> None:
    if sample.ndim != 1 or not len(sample):
        raise ValueError("an interval needs at least one value")
    if not np.isfinite(sample).all():
        raise ValueError("an interval needs finite values; leave undefined ones out")
    if not 0 < level < 1 or resamples < 1:
        raise ValueError(f"level must be between 0 and 1 and resamples at least 1, not {level} and {resamples}")


def decide(interval: Interval, count: int, limit: float) -> Decision:
    """Whether a mean or share over `count` items stays within a limit, with 95 % confidence."""
    if count < LEAST_SAMPLE or interval.low <= limit < interval.high:
        return "undecided"
    return "kept" if interval.high <= limit else "broken"


def enough_for(interval: Interval, count: int, limit: float) -> int:
    """How many items would probably decide: intervals shrink with the root of their number. At most 100 times as many."""
    reach = max(interval.high - interval.mean, interval.mean - interval.low)
    distance = abs(limit - interval.mean)
    factor = 100.0 if distance * 10 <= reach else (reach / distance) ** 2
    return max(LEAST_SAMPLE, round(count * max(factor, 1.0) * 1.2))


def upper_share(hits: int, count: int, confidence: float = 0.95) -> float:
    """The upper end of Clopper and Pearson's one-sided interval of a share."""
    if hits >= count:
        return 1.0
    low, high = hits / count, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        below = sum(comb(count, k) * middle**k * (1 - middle) ** (count - k) for k in range(hits + 1))
        low, high = (middle, high) if below > 1 - confidence else (low, middle)
    return high
