"""Measurements of several methods on the same records -> one report, every difference with its paired interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from blend.errors import ConfigError
from blend.eval.bootstrap import Bounds, Interval, mean_interval, median_bounds, paired_interval
from blend.eval.report.measurement import QUALITY_METRICS, Measurement
from blend.eval.report.summary import MethodSummary, Report, RunInfo


@dataclass(frozen=True)
class _Bootstrap:
    """The settings of all intervals; undefined values are left out, an infinite one leaves the mean undefined."""

    level: float
    resamples: int
    seed: int

    def mean(self, values: Iterable[float | None]) -> Interval | None:
        defined = [value for value in values if value is not None]
        if not defined or not all(map(math.isfinite, defined)):
            return None
        return mean_interval(defined, level=self.level, resamples=self.resamples, seed=self.seed)

    def paired(self, values: Iterable[float | None], reference: Iterable[float | None]) -> Interval | None:
        both = zip(values, reference, strict=True)
        pairs = [(left, right) for left, right in both if left is not None and right is not None]
        if not pairs or not all(math.isfinite(value) for pair in pairs for value in pair):
            return None
        own, other = zip(*pairs, strict=True)
        return paired_interval(own, other, level=self.level, resamples=self.resamples, seed=self.seed)

    def median(self, values: Sequence[float]) -> Bounds:
        return median_bounds(values, level=self.level, resamples=self.resamples, seed=self.seed)


def summarise(
    measurements: Iterable[Measurement],
    *,
    reference: str = "full",
    info: RunInfo | None = None,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Report:
    """Compare every method with `reference` on the records that all have; an interrupted run loses only its last.

    Intervals are bootstrap percentiles at `level`. Raises `ConfigError` when nothing can be compared (no measurements,
    none of the reference, no record that all methods have) and `ValueError` when a method has two measurements of one
    record.
    """
    table = _by_method(measurements)
    shared = _shared_records(table, reference)
    complete = {method: [rows[record] for record in shared] for method, rows in _reference_first(table, reference)}
    complete[reference] = [_with_own_fidelity(row) for row in complete[reference]]
    bootstrap = _Bootstrap(level, resamples, seed)
    seen = dict.fromkeys(record for rows in table.values() for record in rows)
    return Report(
        reference=reference,
        methods=_summaries(complete, reference, bootstrap),
        records=len(shared),
        incomplete=tuple(record for record in seen if record not in set(shared)),
        measurements=tuple(row for rows in zip(*complete.values(), strict=True) for row in rows),
        tasks=_by_task(complete, reference, bootstrap),
        level=level,
        info=info or RunInfo(),
    )


def _by_method(measurements: Iterable[Measurement]) -> dict[str, dict[str, Measurement]]:
    table: dict[str, dict[str, Measurement]] = {}
    for row in measurements:
        rows = table.setdefault(row.method, {})
        if row.record_id in rows:
            raise ValueError(f"{row.method} was measured twice on record {row.record_id}; take the median first")
        rows[row.record_id] = row
    return table


def _shared_records(table: Mapping[str, Mapping[str, Measurement]], reference: str) -> list[str]:
    if reference not in table:
        raise ConfigError(f"nothing to compare with: no record was answered by {reference!r}")
    shared = [record for record in table[reference] if all(record in rows for rows in table.values())]
    if not shared:
        raise ConfigError("nothing to compare: no record was answered by every method")
    return shared


def _reference_first(
    table: Mapping[str, Mapping[str, Measurement]], reference: str
) -> list[tuple[str, Mapping[str, Measurement]]]:
    return sorted(table.items(), key=lambda item: item[0] != reference)


def _with_own_fidelity(row: Measurement) -> Measurement:
    """The reference's KL and agreement with itself, by definition, where they were not measured."""
    return replace(row, kl=0.0 if row.kl is None else row.kl, top1=1.0 if row.top1 is None else row.top1)


def _by_task(
    complete: Mapping[str, Sequence[Measurement]], reference: str, bootstrap: _Bootstrap
) -> dict[str, tuple[MethodSummary, ...]]:
    tasks = dict.fromkeys(row.task for row in complete[reference])
    if len(tasks) < 2:
        return {}
    parts = {task: [index for index, row in enumerate(complete[reference]) if row.task == task] for task in tasks}
    return {
        task: _summaries({name: [rows[i] for i in part] for name, rows in complete.items()}, reference, bootstrap)
        for task, part in parts.items()
    }


def _summaries(
    complete: Mapping[str, Sequence[Measurement]], reference: str, bootstrap: _Bootstrap
) -> tuple[MethodSummary, ...]:
    return tuple(_summary(rows, complete[reference], bootstrap) for rows in complete.values())


def _summary(rows: Sequence[Measurement], base: Sequence[Measurement], bootstrap: _Bootstrap) -> MethodSummary:
    speedups = [full.ttft_s / row.ttft_s for row, full in zip(rows, base, strict=True)]
    floors = [row.floor_s / full.ttft_s for row, full in zip(rows, base, strict=True) if row.floor_s is not None]
    return MethodSummary(
        method=rows[0].method,
        records=len(rows),
        ttft_s=statistics.median(row.ttft_s for row in rows),
        speedup=statistics.median(speedups),
        speedup_bounds=bootstrap.median(speedups),
        floor_ratio=_over(statistics.median, (row.floor_ratio for row in rows)),
        floor_share=_over(statistics.median, floors),
        rows_share=_over(statistics.fmean, (row.rows_share for row in rows)),
        stages=_stage_medians(rows),
        quality={name: bootstrap.mean(getattr(row, name) for row in rows) for name in QUALITY_METRICS},
        differences=_differences(rows, base, bootstrap),
    )


def _differences(
    rows: Sequence[Measurement], base: Sequence[Measurement], bootstrap: _Bootstrap
) -> dict[str, Interval | None]:
    fields = {"ttft": "ttft_s", **{name: name for name in QUALITY_METRICS}}
    return {
        label: bootstrap.paired([getattr(row, name) for row in rows], [getattr(row, name) for row in base])
        for label, name in fields.items()
    }


def _over(statistic: Callable[[Sequence[float]], float], values: Iterable[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return statistic(defined) if defined else None


def _stage_medians(rows: Sequence[Measurement]) -> dict[str, float]:
    """Median by stage over all rows; a stage that a record did not need took it no time."""
    names = dict.fromkeys(name for row in rows for name in row.stages)
    return {name: statistics.median(row.stages.get(name, 0.0) for row in rows) for name in names}
