"""What a comparison of methods says: one summary a method, and the report that holds them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from blend.eval.bootstrap import Bounds, Interval
from blend.eval.machine import Machine
from blend.eval.report.measurement import Measurement


@dataclass(frozen=True)
class RunInfo:
    """What the numbers were made with: shown by every form of the report.

    config holds JSON values; command is the line that makes the report again.
    """

    model: str = ""
    workload: str = ""
    command: str = ""
    config: Mapping[str, object] = field(default_factory=dict)
    machine: Machine | None = None


@dataclass(frozen=True)
class MethodSummary:
    """One method over all records. Times are medians in seconds; None is a value that is undefined.

    speedup: median over records of reference time / this time, speedup_bounds its interval. floor_ratio: median of time
    over floor. floor_share: median of this method's floor over the reference's time. rows_share: mean share of rows
    computed. quality: metric -> mean with its own interval. differences: metric, and "ttft" in seconds -> mean of this
    method minus reference on the same record, with the paired interval.
    """

    method: str
    records: int
    ttft_s: float
    speedup: float
    speedup_bounds: Bounds
    floor_ratio: float | None
    floor_share: float | None
    rows_share: float | None
    stages: Mapping[str, float]
    quality: Mapping[str, Interval | None]
    differences: Mapping[str, Interval | None]

    def mean(self, metric: str) -> float | None:
        """Mean of one of the quality metrics."""
        interval = self.quality[metric]
        return None if interval is None else interval.mean


@dataclass(frozen=True)
class Report:
    """All methods side by side, `reference` first, over the records that every method has.

    incomplete: ids of the records left out because a method lacks them. tasks: task label -> summaries of its records
    alone, empty when there is but one task. measurements: the ones counted.
    """

    reference: str
    methods: tuple[MethodSummary, ...]
    records: int
    incomplete: tuple[str, ...]
    measurements: tuple[Measurement, ...]
    tasks: Mapping[str, tuple[MethodSummary, ...]]
    level: float
    info: RunInfo

    def method(self, name: str) -> MethodSummary:
        """The summary of one method; `KeyError` when it was not measured."""
        return {summary.method: summary for summary in self.methods}[name]

    @property
    def size(self) -> str:
        """Number of records, in words."""
        return counted(self.records)


def counted(records: int) -> str:
    """A number of records in words: 1 record, 2 records."""
    return "1 record" if records == 1 else f"{records} records"
