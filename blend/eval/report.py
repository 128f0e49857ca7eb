"""Compare methods record by record: measurements -> `summarise` -> a report with paired intervals, and its JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from blend.compare import ComparedAnswer, Comparison, compare
from blend.eval.machine import Machine
from blend.intervals import LEVEL, Interval, Judged, defined_mean, median_interval, paired_interval
from blend.limits import counted, finite

if TYPE_CHECKING:
    from blend.quality import Quality

FULL = "full"  # the method that the others are compared with
BLEND = "blend"  # the method that a target is asked of
METRICS = ("f1", "kl", "top1")  # in the order of every table
FORMAT = 2  # of the document


@dataclass(frozen=True)
class Measurement:
    """One method on one record. None means undefined.

    Attributes:
        ttft_s: Seconds from the query to the first token, without retrieval.
        stages: Seconds by stage.
        rows_total: Rows of the prompt.
        rows_computed: Rows that were computed, mean over layers.
        f1: Word F1 against gold answers.
        kl: Mean KL to full recompute, nats per answer token.
        top1: Share of answer tokens with the same most likely token.
        right: Whether the answer names a gold answer.
        task: The record's label.

    """

    method: str
    record_id: str
    answer: str
    ttft_s: float
    stages: Mapping[str, float]
    rows_total: int
    rows_computed: float
    f1: float | None = None
    kl: float | None = None
    top1: float | None = None
    right: bool | None = None
    task: str = ""


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
    """One method over all records; None means undefined.

    Attributes:
        ttft_s: Median.
        speedup: Median of full recompute's time / this time, with its interval.
        rows_share: Mean share of the prompts' rows that was computed.
        quality: Mean and interval of each metric.
        f1_difference: Mean of method minus full recompute on the same record.
        comparison: Its answers compared with full recompute's.

    """

    method: str
    ttft_s: float
    speedup: Interval
    rows_share: float
    quality: Mapping[str, Interval | None]
    f1_difference: Interval | None
    comparison: Comparison

    @property
    def changes(self) -> str:
        """How many answers differ from full recompute's, and what that means."""
        return f"answers changed: {self.comparison.flips_in_words}"

    def mean(self, metric: str) -> float | None:
        """Mean of one of the metrics."""
        interval = self.quality[metric]
        return None if interval is None else interval.mean


@dataclass(frozen=True)
class Report:
    """All methods, full recompute first. target: the quality that was asked of `BLEND`."""

    methods: tuple[MethodSummary, ...]
    measurements: Sequence[Measurement]
    info: RunInfo
    target: Quality | None = None

    def method(self, name: str) -> MethodSummary:
        """The summary of one method; `KeyError` when it was not measured."""
        return {summary.method: summary for summary in self.methods}[name]

    @property
    def records(self) -> int:
        """How many records every method was measured on."""
        return self.methods[0].comparison.answers

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
    def title(self) -> str:
        """Model, questions and their number."""
        parts = (self.info.model, self.info.workload, counted(self.records, "record"))
        return " · ".join(filter(None, parts))


def _judged_line(words: str, form: str, figure: Judged) -> str:
    interval = f"{figure.mean:{form}} [{figure.low:{form}}, {figure.high:{form}}]"
    line = f"{words} {interval}, within {figure.target:g}: {figure.decision}"
    if figure.decision == "undecided":
        line += f", {counted(figure.enough, 'record')} would probably decide"
    return line


def summarise(
    measurements: Sequence[Measurement], *, info: RunInfo | None = None, target: Quality | None = None
) -> Report:
    """Compare every method with full recompute; intervals are bootstrap percentiles at `LEVEL`.

    Args:
        measurements: One for each method and record, records in the same order for each method; those of `FULL` included.
        info: What the numbers were made with.
        target: The quality that is asked of `BLEND`.

    """
    by_method: dict[str, list[Measurement]] = {FULL: []}
    for row in measurements:
        by_method.setdefault(row.method, []).append(row)
    methods = tuple(_summary(rows, by_method[FULL]) for rows in by_method.values())
    return Report(methods, measurements, info or RunInfo(), target)


def _summary(rows: Sequence[Measurement], full: Sequence[Measurement]) -> MethodSummary:
    pairs = list(zip(rows, full, strict=True))
    comparison = compare(ComparedAnswer.of(*pair) for pair in pairs)
    defined = [(row.f1, reference.f1) for row, reference in pairs if None not in (row.f1, reference.f1)]
    quality = {name: defined_mean([getattr(row, name) for row in rows]) for name in METRICS}
    return MethodSummary(
        method=rows[0].method,
        ttft_s=statistics.median(row.ttft_s for row in rows),
        speedup=median_interval([reference.ttft_s / row.ttft_s for row, reference in pairs]),
        rows_share=statistics.fmean(row.rows_computed / row.rows_total for row in rows),
        quality=quality,
        f1_difference=paired_interval(*zip(*defined, strict=True)) if defined else None,
        comparison=comparison,
    )


def report_document(report: Report) -> dict[str, Any]:
    """JSON value of a report, without NaN or infinity.

    `methods` maps each method to its numbers; each metric has `<metric>_interval` (low, high), and `f1_diff` is the mean of
    method minus full recompute (mean, low, high). `records` holds one object a measurement.
    """
    info = report.info
    machine = {} if info.machine is None else asdict(info.machine)
    versions = machine.pop("versions", {})
    document = {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": info.command,
        "model": info.model,
        "workload": info.workload,
        "config": info.config,
        "dtype": info.dtype,
        "weights": info.weights,
        "machine": machine,
        "versions": versions,
        "reference": FULL,
        "level": LEVEL,
        "record_count": report.records,
        "judged": {name: {**figure._asdict(), "decision": figure.decision} for name, figure in report.judged.items()},
        "methods": {summary.method: _method(summary) for summary in report.methods},
        "records": list(map(asdict, report.measurements)),
    }
    finite_document: dict[str, Any] = finite(document)
    return finite_document


def _method(summary: MethodSummary) -> dict[str, object]:
    comparison = summary.comparison
    numbers: dict[str, object] = {
        "ttft_s": summary.ttft_s,
        "speedup": summary.speedup.mean,
        "speedup_interval": _ends(summary.speedup),
        "rows_share": summary.rows_share,
        "changes": {"share": asdict(comparison.flips), **comparison.meanings._asdict()},
        "f1_diff": summary.f1_difference and asdict(summary.f1_difference),
    }
    for metric, interval in summary.quality.items():
        numbers[metric] = summary.mean(metric)
        numbers[f"{metric}_interval"] = _ends(interval)
    return numbers


def _ends(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else {"low": interval.low, "high": interval.high}
