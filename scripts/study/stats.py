"""Statistics over rows: means over sets, bootstrap intervals and the summary of each method.

Intervals are 95 % percentiles over resampled records. A mean over sets is the mean of the sets' means, so that a large set
does not drown a small one. The draws depend on the order of sets and records alone: the same file gives the same intervals.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

import numpy as np
from numpy.typing import NDArray

from blend.compare import ComparedAnswer, Comparison, compare
from blend.errors import ConfigError
from blend.intervals import Interval, paired_interval
from study.methods import BASELINE, FULL
from study.rows import Row

RESAMPLES = 2000

BySet = Mapping[str, Mapping[str, Row]]  # set -> id of a record -> row
_Sample = NDArray[np.float64]  # [records] or [records, columns]


def by_method(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, Row]]]:
    """Method -> set -> id of a record -> row, each in the order in which it first appears."""
    cells: defaultdict[str, defaultdict[str, dict[str, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        cells[row.method][row.set][row.id] = row
    return {method: dict(sets) for method, sets in cells.items()}


def sets_of(rows: Iterable[Row]) -> list[str]:
    """Names of the sets, sorted."""
    return sorted({row.set for row in rows})


def rows_of(by_set: BySet, sets: Iterable[str]) -> list[Row]:
    """Rows of these sets, set after set."""
    return [row for name in sets for row in by_set.get(name, {}).values()]


def paired(rows: Iterable[Row], methods: Sequence[str], baseline: str = BASELINE) -> list[Row]:
    """Rows of these methods, of full recompute and of the baseline on the records that all of them have, sets in order.

    Raises `ConfigError` where no record has all of them.
    """
    names = {FULL, baseline, *methods}
    by_record: defaultdict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        by_record[row.set, row.id][row.method] = row
    complete = [(name, by_name) for (name, _), by_name in by_record.items() if names <= by_name.keys()]
    if not complete:
        raise ConfigError(f"no record has {FULL}, {baseline} and all of {', '.join(methods)}; measure what is missing")
    complete.sort(key=lambda record: record[0])
    return [row for _, by_name in complete for method, row in by_name.items() if method in names]


def mean_where_defined(values: Iterable[float | None]) -> float | None:
    """Mean of what is not None; None where nothing is."""
    defined = [value for value in values if value is not None]
    return mean(defined) if defined else None


def mean_kl_over_sets(by_set: BySet) -> float | None:
    """Mean of the sets' mean KL."""
    return mean_where_defined(mean_where_defined(row.kl for row in records.values()) for records in by_set.values())


def median_kl(rows: Iterable[Row]) -> float | None:
    """Median KL over records; None where none is defined."""
    defined = [row.kl for row in rows if row.kl is not None]
    return median(defined) if defined else None


def ratio_interval(by_set: BySet, base: BySet) -> Interval | None:
    """Mean KL over sets relative to the baseline's on the same records; None where they share no record."""
    every = [_kl_pairs(records, base.get(name, {})) for name, records in by_set.items()]
    samples = [pairs for pairs in every if len(pairs)]
    if not samples:
        return None
    generator = np.random.default_rng(0)

    def drawn() -> float:
        return _ratio_of_means([pairs[generator.integers(0, len(pairs), len(pairs))] for pairs in samples])

    low, high = np.percentile([drawn() for _ in range(RESAMPLES)], [2.5, 97.5])
    return Interval(_ratio_of_means(samples), float(low), float(high))


def gold_interval(rows: Iterable[Row], full: BySet) -> Interval | None:
    """Agreement with gold of these rows less that of full recompute on the same records; None where they share none."""
    pairs = [(row.gold, full[row.set][row.id].gold) for row in rows if row.id in full.get(row.set, {})]
    defined = [(gold, of_full) for gold, of_full in pairs if gold is not None and of_full is not None]
    if not defined:
        return None
    return paired_interval(*map(list, zip(*defined, strict=True)), resamples=RESAMPLES)


def comparison(rows: Iterable[Row], full: BySet) -> Comparison | None:
    """Answers of these rows with full recompute's on the same records; None where no answer is in the file."""
    pairs = [(row, full[row.set][row.id]) for row in rows if row.id in full.get(row.set, {})]
    answered = [pair for pair in pairs if None not in (pair[0].answer, pair[1].answer)]
    return compare(ComparedAnswer.of(*pair) for pair in answered) if answered else None


def _kl_pairs(records: Mapping[str, Row], base: Mapping[str, Row]) -> _Sample:
    pairs = [(row.kl, base[i].kl) for i, row in records.items() if i in base]
    return np.array([pair for pair in pairs if None not in pair], dtype=np.float64)


def _ratio_of_means(samples: Sequence[_Sample]) -> float:
    kl, base = np.mean([sample.mean(0) for sample in samples], axis=0)
    return float(kl / base)


@dataclass(frozen=True)
class SetSummary:
    """A method on one set: records, mean KL, agreement with gold less that of full recompute."""

    name: str
    records: int
    kl: float | None
    difference: Interval | None


@dataclass(frozen=True)
class Summary:
    """A method over all sets; None means undefined.

    kl: mean over sets. to_baseline: that, relative to the baseline's. gold: agreement with gold; difference: less that of full
    recompute. comparison: answers with full recompute's. share: of rows computed. speedup: full prefill's TTFT over
    the method's. selecting: its time over that TTFT.
    """

    method: str
    sets: tuple[SetSummary, ...]
    kl: float | None
    median_kl: float | None
    to_baseline: Interval | None
    top1: float | None
    f1_full: float | None
    gold: float | None
    difference: Interval | None
    comparison: Comparison | None
    share: float
    speedup: float
    selecting: float


def summaries(rows: Sequence[Row], baseline: str = BASELINE) -> list[Summary]:
    """A summary of every method, in the order in which the methods first appear."""
    cells, sets = by_method(rows), sets_of(rows)
    return [_summary(method, cells, sets, baseline) for method in cells]


def _summary(method: str, cells: Mapping[str, BySet], sets: Sequence[str], baseline: str) -> Summary:
    by_set, full = cells[method], cells.get(FULL, {})
    rows = rows_of(by_set, sets)
    return Summary(
        method=method,
        sets=tuple(_set_summary(name, by_set, full) for name in sets),
        kl=mean_kl_over_sets(by_set),
        median_kl=median_kl(rows),
        to_baseline=ratio_interval(by_set, cells.get(baseline, {})),
        top1=mean_where_defined(row.top1 for row in rows),
        f1_full=mean_where_defined(row.f1_full for row in rows),
        gold=mean_where_defined(row.gold for row in rows),
        difference=gold_interval(rows, full),
        comparison=comparison(rows, full),
        share=mean(row.share for row in rows),
        speedup=median(row.full_ttft_s / row.ttft_s for row in rows),
        selecting=median(row.select_s / row.full_ttft_s for row in rows),
    )


def _set_summary(name: str, by_set: BySet, full: BySet) -> SetSummary:
    rows = rows_of(by_set, [name])
    return SetSummary(name, len(rows), mean_where_defined(row.kl for row in rows), gold_interval(rows, full))
