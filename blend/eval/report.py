"""Compare methods record by record: measurements -> `summarise` -> a report with paired intervals, as JSON and files."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blend.compare import ComparedAnswer, Comparison, compare
from blend.errors import ConfigError
from blend.eval.machine import Machine
from blend.eval.output import write_whole
from blend.intervals import LEVEL, Interval, IntervalEnds, Judged, defined_mean, median_bounds, paired_interval
from blend.limits import finite, json_text

if TYPE_CHECKING:
    from blend.quality import Quality

BLEND = "blend"  # the method that a target is asked of
# Fields of `Measurement` that judge the answer, in the order of every table.
QUALITY_METRICS = ("f1", "em", "rouge_l", "recall", "kl", "top1")
_Rows = Mapping[str, Sequence["Measurement"]]  # of each method, record by record


@dataclass(frozen=True)
class Measurement:
    """One method on one record.

    Raises `ValueError` for a time that is not positive and finite, a share outside [0, 1], or NaN. None means undefined.

    Attributes:
        ttft_s: Seconds from the query to the first token, without retrieval.
        stages: Seconds by stage.
        rows_total: Rows of the prompt.
        rows_computed: Rows that were computed, mean over layers.
        floor_s: The least time this method could take.
        f1: Word F1 against gold answers.
        em: Exact match with a gold answer.
        rouge_l: ROUGE-L against gold answers.
        recall: Share of all wanted values.
        kl: Mean KL to the reference, nats per answer token.
        top1: Share of answer tokens with the same most likely token.
        right: Whether the answer names a gold answer.
        task: Label to report by.

    """

    method: str
    record_id: str
    answer: str
    ttft_s: float
    stages: Mapping[str, float]
    rows_total: int
    rows_computed: float
    floor_s: float | None = None
    f1: float | None = None
    em: float | None = None
    rouge_l: float | None = None
    recall: float | None = None
    kl: float | None = None
    top1: float | None = None
    right: bool | None = None
    task: str = ""

    def __post_init__(self) -> None:
        for name in ("ttft_s", "floor_s"):
            self._require(name, lambda value: 0 < value < math.inf, "positive and finite")
        for name in ("f1", "em", "rouge_l", "recall", "top1"):
            self._require(name, lambda value: 0 <= value <= 1, "between 0 and 1")
        self._require("kl", lambda value: value >= 0, "0 or more")
        self._require("rows_computed", lambda value: 0 <= value <= self.rows_total + 1e-6, "between 0 and rows_total")

    def _require(
        self,
        name: str,
        holds: Callable[[float], bool],
        expected: str,
    ) -> None:
        value = getattr(self, name)
        if value is not None and not holds(value):
            raise ValueError(f"{self.method} on record {self.record_id}: {name} must be {expected}, not {value}")

    @property
    def rows_share(self) -> float | None:
        """Share of the prompt's rows that was computed; None for an empty prompt."""
        return self.rows_computed / self.rows_total if self.rows_total else None

    @property
    def floor_ratio(self) -> float | None:
        """Measured time over the floor."""
        return None if self.floor_s is None else self.ttft_s / self.floor_s


@dataclass(frozen=True)
class RunInfo:
    """The setting that the numbers were made with.

    Attributes:
        command: The line that makes the report again.
        config: JSON values.
        dtype: What the model computed in.
        weights: "native" or "int8".

    """

    model: str = ""
    workload: str = ""
    command: str = ""
    config: Mapping[str, object] = field(default_factory=dict)
    machine: Machine | None = None
    dtype: str = ""
    weights: str = ""

    @property
    def setting(self) -> str:
        """Number format and machine, one line for the foot of a table or picture."""
        weights = f"{self.weights} weights" if self.weights not in ("", "native") else ""
        machine = self.machine.summary() if self.machine else ""
        return ", ".join(filter(None, (self.dtype, weights, machine)))


@dataclass(frozen=True)
class MethodSummary:
    """One method over all records. Times are medians in seconds; None means undefined.

    Attributes:
        speedup: Median of reference time / this time.
        floor_ratio: Median of time / floor.
        floor_share: Median of floor / reference time.
        rows_share: Mean share of rows computed.
        quality: Mean and interval of each metric.
        differences: Of each metric, and of "ttft" in seconds, the mean of method minus reference on the same record, with the
            paired interval.
        comparison: Its answers compared with the reference's.

    """

    method: str
    records: int
    ttft_s: float
    speedup: float
    speedup_bounds: IntervalEnds
    floor_ratio: float | None
    floor_share: float | None
    rows_share: float | None
    stages: Mapping[str, float]
    quality: Mapping[str, Interval | None]
    differences: Mapping[str, Interval | None]
    comparison: Comparison

    def mean(self, metric: str) -> float | None:
        """Mean of one of the quality metrics."""
        interval = self.quality[metric]
        return None if interval is None else interval.mean


@dataclass(frozen=True)
class Report:
    """All methods, `reference` first, over the records that every method has.

    Attributes:
        incomplete: Ids of records left out because a method lacks them.
        measurements: The ones counted.
        tasks: Summaries of each task's records; empty when there is one task.
        target: The quality that was asked of `BLEND`.

    """

    reference: str
    methods: tuple[MethodSummary, ...]
    records: int
    incomplete: tuple[str, ...]
    measurements: tuple[Measurement, ...]
    tasks: Mapping[str, tuple[MethodSummary, ...]]
    info: RunInfo
    target: Quality | None = None

    def method(self, name: str) -> MethodSummary:
        """The summary of one method; `KeyError` when it was not measured."""
        return {summary.method: summary for summary in self.methods}[name]

    @cached_property
    def judged(self) -> dict[str, Judged]:
        """The mean KL and the share of flips of `BLEND` against the target; only what is asked."""
        if self.target is None:
            return {}
        return self.method(BLEND).comparison.judged(self.target)

    @property
    def judged_lines(self) -> dict[str, str]:
        """`judged` in words."""
        forms = {"kl": ("mean KL", ".3f"), "flips": ("share of different answers", ".0%")}
        return {name: _judged_line(*forms[name], figure) for name, figure in self.judged.items()}

    @property
    def size(self) -> str:
        """Number of records, in words."""
        return counted(self.records)


def _judged_line(words: str, form: str, figure: Judged) -> str:
    interval = f"{figure.mean:{form}} [{figure.low:{form}}, {figure.high:{form}}]"
    line = f"{words} {interval}, within {figure.target:g}: {figure.decision}"
    if figure.decision == "undecided":
        line += f", {counted(figure.enough)} would probably decide"
    return line


def counted(records: int) -> str:
    """A number of records in words: 1 record, 2 records."""
    return "1 record" if records == 1 else f"{records} records"


def summarise(
    measurements: Iterable[Measurement],
    *,
    reference: str = "full",
    info: RunInfo | None = None,
    target: Quality | None = None,
) -> Report:
    """Compare every method with `reference` on the records that all have; intervals are bootstrap percentiles at `LEVEL`.

    Args:
        measurements: One for each method and record.
        reference: The method that the others are compared with.
        info: What the numbers were made with.
        target: The quality that is asked of `BLEND`.

    Raises:
        ConfigError: Nothing can be compared.
        ValueError: A method was measured twice on a record.

    """
    table = _by_method(measurements)
    shared = _shared_records(table, reference)
    reference_first = sorted(table.items(), key=lambda item: item[0] != reference)
    complete = {method: [rows[record] for record in shared] for method, rows in reference_first}
    complete[reference] = [_with_own_fidelity(row) for row in complete[reference]]
    records = dict.fromkeys(record for rows in table.values() for record in rows)
    return Report(
        reference=reference,
        methods=_summaries(complete, reference),
        records=len(shared),
        incomplete=tuple(record for record in records if record not in set(shared)),
        measurements=tuple(chain.from_iterable(zip(*complete.values(), strict=True))),
        tasks=_by_task(complete, reference),
        info=info or RunInfo(),
        target=target,
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


def _with_own_fidelity(row: Measurement) -> Measurement:
    """The reference's KL and agreement with itself, by definition, where they were not measured."""
    kl = 0.0 if row.kl is None else row.kl
    top1 = 1.0 if row.top1 is None else row.top1
    return replace(row, kl=kl, top1=top1)


def _by_task(complete: _Rows, reference: str) -> dict[str, tuple[MethodSummary, ...]]:
    tasks = dict.fromkeys(row.task for row in complete[reference])
    if len(tasks) < 2:
        return {}
    summaries = {}
    for task in tasks:
        task_rows = dict[str, list[Measurement]]()
        for name, rows in complete.items():
            task_rows[name] = [row for row in rows if row.task == task]
        summaries[task] = _summaries(task_rows, reference)
    return summaries


def _summaries(complete: _Rows, reference: str) -> tuple[MethodSummary, ...]:
    return tuple(_summary(rows, complete[reference]) for rows in complete.values())


def _summary(rows: Sequence[Measurement], base: Sequence[Measurement]) -> MethodSummary:
    pairs = list(zip(rows, base, strict=True))
    speedups = [full.ttft_s / row.ttft_s for row, full in pairs]
    floors = [row.floor_s / full.ttft_s for row, full in pairs if row.floor_s is not None]
    comparison = compare(ComparedAnswer.of(row, full) for row, full in pairs)
    metrics = [name for name in QUALITY_METRICS if name != "kl"]
    quality = {name: defined_mean([getattr(row, name) for row in rows]) for name in metrics}
    differences = {name: _difference(pairs, name) for name in QUALITY_METRICS}
    return MethodSummary(
        method=rows[0].method,
        records=len(rows),
        ttft_s=statistics.median(row.ttft_s for row in rows),
        speedup=statistics.median(speedups),
        speedup_bounds=median_bounds(speedups),
        floor_ratio=_over(statistics.median, (row.floor_ratio for row in rows)),
        floor_share=_over(statistics.median, floors),
        rows_share=_over(statistics.fmean, (row.rows_share for row in rows)),
        stages=_stage_medians(rows),
        quality={**quality, "kl": comparison.kl},
        differences={"ttft": _difference(pairs, "ttft_s"), **differences},
        comparison=comparison,
    )


def _difference(pairs: Iterable[tuple[Measurement, Measurement]], name: str) -> Interval | None:
    """Paired, on the records where both values are defined."""
    values = [(getattr(row, name), getattr(full, name)) for row, full in pairs]
    defined = [pair for pair in values if None not in pair]
    if not defined:
        return None
    method, reference = zip(*defined, strict=True)
    if not all(map(math.isfinite, (*method, *reference))):
        return None
    return paired_interval(method, reference)


def _over(statistic: Callable[[Sequence[float]], float], values: Iterable[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return statistic(defined) if defined else None


def _stage_medians(rows: Sequence[Measurement]) -> dict[str, float]:
    """Median by stage over all rows; a stage that a record did not need took it no time."""
    medians = {}
    for name in dict.fromkeys(name for row in rows for name in row.stages):
        medians[name] = statistics.median(row.stages.get(name, 0.0) for row in rows)
    return medians


FORMAT = 1  # of the document


def report_document(report: Report) -> dict[str, Any]:
    """JSON value of a report, without NaN or infinity.

    `methods` maps each method to its numbers; each metric has `<metric>_interval` (low, high) and `<metric>_diff` (method
    minus reference: mean, low, high). `tasks` holds the same by task, `records` one object a measurement.
    """
    info = report.info
    machine = {} if info.machine is None else asdict(info.machine)
    versions = machine.pop("versions", {})
    document: dict[str, Any] = {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": info.command,
        "model": info.model,
        "workload": info.workload,
        "config": dict(info.config),
        "dtype": info.dtype,
        "weights": info.weights,
        "machine": machine,
        "versions": versions,
        "reference": report.reference,
        "level": LEVEL,
        "record_count": report.records,
        "incomplete": list(report.incomplete),
        "judged": {name: _judged(figure) for name, figure in report.judged.items()},
        "methods": _methods(report.methods),
        "tasks": {task: _methods(methods) for task, methods in report.tasks.items()},
        "records": [_record(measurement) for measurement in report.measurements],
    }
    return {name: finite(value) for name, value in document.items()}


def write_json(report: Report, path: str | Path) -> None:
    """Write `report_document` to `path`, replacing it whole or not at all; `ConfigError` when it cannot be written."""
    text = json_text(report_document(report), indent=2, allow_nan=False, default=str)
    write_whole(Path(path), f"{text}\n".encode())


def _methods(summaries: tuple[MethodSummary, ...]) -> dict[str, object]:
    return {summary.method: _method(summary) for summary in summaries}


def _method(summary: MethodSummary) -> dict[str, object]:
    numbers: dict[str, object] = {
        "records": summary.records,
        "ttft_s": summary.ttft_s,
        "ttft_diff": _interval(summary.differences["ttft"]),
        "speedup": summary.speedup,
        "speedup_interval": _bounds(summary.speedup_bounds),
        "floor_ratio": summary.floor_ratio,
        "floor_share": summary.floor_share,
        "rows_share": summary.rows_share,
        "changes": {
            "share": asdict(summary.comparison.flips),
            **summary.comparison.meanings._asdict(),
        },
    }
    for metric in QUALITY_METRICS:
        numbers[metric] = summary.mean(metric)
        numbers[f"{metric}_interval"] = _bounds(summary.quality[metric])
        numbers[f"{metric}_diff"] = _interval(summary.differences[metric])
    return {**numbers, "stages": dict(summary.stages)}


def _judged(figure: Judged) -> dict[str, object]:
    return {**figure._asdict(), "decision": figure.decision}


def _record(measurement: Measurement) -> dict[str, object]:
    return {
        **asdict(measurement),
        "rows_share": measurement.rows_share,
        "floor_ratio": measurement.floor_ratio,
    }


def _interval(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else asdict(interval)


def _bounds(bounds: IntervalEnds | Interval | None) -> dict[str, float] | None:
    return None if bounds is None else {"low": bounds.low, "high": bounds.high}
