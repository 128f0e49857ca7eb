"""Bootstrap intervals of means, of paired differences and of medians: seeded percentiles of resampled statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_Values = NDArray[np.float64]
# Resampled values held at once, 32 MiB of float64.
_BLOCK = 1 << 22


class Bounds(NamedTuple):
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
    level: float = 0.95,
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


def mean_interval(values: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0) -> Interval:
    """Mean of `values` with its percentile bootstrap interval (Efron and Tibshirani 1993, chapter 13).

    One value, or values that are all equal, give an interval of width 0: the sample then says nothing about the spread.
    Raises `ValueError` for no values, a value that is not finite, or a level or number of resamples out of range.
    """
    low, high = _bounds(values, np.mean, level, resamples, seed)
    return Interval(float(np.mean(values)), low, high)


def median_bounds(values: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0) -> Bounds:
    """Percentile bootstrap interval of the median; arguments and errors as in `mean_interval`."""
    return _bounds(values, np.median, level, resamples, seed)


def _bounds(
    values: Sequence[float], statistic: Callable[..., _Values], level: float, resamples: int, seed: int
) -> Bounds:
    sample = np.asarray(values, dtype=np.float64)
    _check(sample, level, resamples)
    if np.ptp(sample) == 0:
        value = float(np.mean(values))
        return Bounds(value, value)
    tail = (1 - level) / 2
    low, high = np.quantile(_resampled(sample, statistic, resamples, seed), [tail, 1 - tail])
    return Bounds(float(low), float(high))


def _resampled(sample: _Values, statistic: Callable[..., _Values], resamples: int, seed: int) -> _Values:
    generator = np.random.default_rng(seed)
    statistics = np.empty(resamples)
    block = max(1, _BLOCK // len(sample))
    for start in range(0, resamples, block):
        stop = min(start + block, resamples)
        rows = generator.integers(len(sample), size=(stop - start, len(sample)))
        statistics[start:stop] = statistic(sample[rows], axis=1)
    return statistics


def _check(sample: _Values, level: float, resamples: int) -> None:
    if sample.ndim != 1 or not len(sample):
        raise ValueError("an interval needs at least one value")
    if not np.isfinite(sample).all():
        raise ValueError("an interval needs finite values; leave undefined ones out")
    if not 0 < level < 1 or resamples < 1:
        raise ValueError(f"level must be between 0 and 1 and resamples at least 1, not {level} and {resamples}")
