"""Compare methods record by record: measurements -> `summarise` -> a report with paired intervals, and its JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from blend.compare import MEANINGS, ComparedAnswer, Comparison, compare
from blend.eval.machine import Machine
from blend.intervals import LEVEL, Interval, Judged, defined_mean, median_interval, paired_interval
from blend.text import counted, finite

if TYPE_CHECKING:
    from blend.quality import Quality

FULL = "full"  # the method that the others are compared with
BLEND = "blend"  # blended prefill, where it is measured in one way
REUSE = "reuse"  # stored chunks as they are
METRICS = ("f1", "em", "rouge_l", "right", "kl", "top1")  # in the order of every table
FORMAT = 3  # of the document


@dataclass(frozen=True)
class Measurement:
    """One method on one record. None means undefined.

    Attributes:
        ttft_s: Seconds from the query to the first token, without retrieval; the median of repeats.
        stages: Seconds by stage, medians of repeats.
        rows_total: Rows of the prompt.
        rows_computed: Rows that were computed, mean over layers.
        floor_s: The least time that this method could take, from its rows and the bytes that it read.
        f1: Word F1 against gold answers.
        em: 1 if the answer is a gold answer, 0 if not.
        rouge_l: ROUGE-L against gold answers, where these are long.
        kl: Mean KL to full recompute, nats per answer token.
        top1: Share of answer tokens with the same most likely token.
        right: Whether the answer names a gold answer.
        task: The record's label.
        question: The record's question.
        gold: Its gold answers.

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
    kl: float | None = None
    top1: float | None = None
    right: bool | None = None
    task: str = ""
    question: str = ""
    gold: tuple[str, ...] = ()


class ChangedAnswer(NamedTuple):
    """An answer that is not full recompute's to the same record.

    Attributes:
        full: Full recompute's measurement.
        other: The method's.

    """

    full: Measurement
    other: Measurement

    @property
    def distance(self) -> float:
        """KL, by which changed answers are ordered; 0 where it was not measured."""
        return self.other.kl or 0.0

    @property
    def meaning(self) -> str:
        """What the change means against gold answers, such as "worse"; empty without these."""
        if self.other.right is None or self.full.right is None:
            return ""
        meanings = {(True, True): 0, (True, False): 1, (False, True): 2, (False, False): 3}
        return MEANINGS[meanings[self.other.right, self.full.right]]


class TaskFigures(NamedTuple):
    """A method on the records of one task: means of the metrics, and the share of answers that changed."""

    task: str
    method: str
    records: int
    means: Mapping[str, float | None]
    changed: float


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
        ttft: Median, with its interval, in seconds.
        speedup: Median of full recompute's time / this time, with its interval.
        floor_ratio: Median of time / floor.
        stages: Median seconds of each stage.
        rows_share: Mean share of the prompts' rows that was computed.
        quality: Mean and interval of each metric.
        f1_difference: Mean of method minus full recompute on the same record.
        comparison: Its answers compared with full recompute's.

    """

    method: str
    ttft: Interval
    speedup: Interval
    floor_ratio: float | None
    stages: Mapping[str, float]
    rows_share: float
    quality: Mapping[str, Interval | None]
    f1_difference: Interval | None
    comparison: Comparison

    @property
    def ttft_s(self) -> float:
        """Median time to first token, in seconds."""
        return self.ttft.mean

    @property
    def changes(self) -> str:
        """How many answers differ from full recompute's, and what that means."""
        return f"answers changed: {self.comparison.flips_in_words}"

    def mean(self, metric: str) -> float | None:
        """Mean of one of the metrics."""
        interval = self.quality[metric]
        return None if interval is None else interval.mean


class Judgement(NamedTuple):
    """A figure of a method against what was asked. name: "kl" or "flips"."""

    method: str
    name: str
    figure: Judged

    @property
    def line(self) -> str:
        """The judgement in words."""
        words, form = {"kl": ("mean KL", ".3f"), "flips": ("share of different answers", ".0%")}[self.name]
        figure = self.figure
        interval = f"{figure.mean:{form}} [{figure.low:{form}}, {figure.high:{form}}]"
        line = f"{words} {interval}, within {figure.target:g}: {figure.decision}"
        if figure.decision == "undecided":
            line += f", {counted(figure.enough, 'record')} would probably decide"
        return line


@dataclass(frozen=True)
class Report:
    """All methods, full recompute first. target: the quality that was asked of blended prefill."""

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

    @property
    def blends(self) -> tuple[MethodSummary, ...]:
        """Blended prefill, in all ways that were measured."""
        return tuple(summary for summary in self.methods if summary.method not in (FULL, REUSE))

    @cached_property
    def judgements(self) -> tuple[Judgement, ...]:
        """The mean KL and the share of flips of every blended method against the target; only what is asked."""
        if self.target is None:
            return ()
        return tuple(
            Judgement(summary.method, name, figure)
            for summary in self.blends
            for name, figure in summary.comparison.judged(self.target).items()
        )

    @property
    def judged_lines(self) -> list[str]:
        """`judgements` in words, with the method's name if there are several."""
        are_several = len(self.blends) > 1
        return [f"{each.method}: {each.line}" if are_several else each.line for each in self.judgements]

    @cached_property
    def changed(self) -> tuple[ChangedAnswer, ...]:
        """All answers that differ from full recompute's, those with the largest KL first."""
        full = {row.record_id: row for row in self.measurements if row.method == FULL}
        pairs = (ChangedAnswer(full[row.record_id], row) for row in self.measurements)
        differing = (pair for pair in pairs if pair.other.answer != pair.full.answer)
        return tuple(sorted(differing, key=lambda pair: -pair.distance))

    @cached_property
    def tasks(self) -> tuple[TaskFigures, ...]:
        """Figures by task; none where all records are of one task."""
        by_task: dict[str, dict[str, list[Measurement]]] = {}
        for row in self.measurements:
            by_task.setdefault(row.task, {}).setdefault(row.method, []).append(row)
        if len(by_task) < 2:
            return ()
        return tuple(
            _task_figures(task, by_method[summary.method], by_method[FULL])
            for task, by_method in by_task.items()
            for summary in self.methods
        )

    @property
    def title(self) -> str:
        """Model, questions and their number."""
        parts = (self.info.model, self.info.workload, counted(self.records, "record"))
        return " · ".join(filter(None, parts))


def _task_figures(task: str, rows: Sequence[Measurement], full: Sequence[Measurement]) -> TaskFigures:
    means = {
        metric: _mean_of(row_value for row in rows if (row_value := getattr(row, metric)) is not None)
        for metric in METRICS
    }
    changed = statistics.fmean(row.answer != reference.answer for row, reference in zip(rows, full, strict=True))
    return TaskFigures(task, rows[0].method, len(rows), means, changed)


def _mean_of(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return statistics.fmean(numbers) if numbers else None


def summarise(
    measurements: Sequence[Measurement], *, info: RunInfo | None = None, target: Quality | None = None
) -> Report:
    """Compare every method with full recompute; intervals are bootstrap percentiles at `LEVEL`.

    Args:
        measurements: One for each method and record, records in the same order for each method; those of `FULL` included.
        info: What the numbers were made with.
        target: The quality that is asked of blended prefill.

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
    floors = [row.ttft_s / row.floor_s for row in rows if row.floor_s]
    stages = dict.fromkeys(name for row in rows for name in row.stages)
    quality = {name: defined_mean([getattr(row, name) for row in rows]) for name in METRICS}
    return MethodSummary(
        method=rows[0].method,
        ttft=median_interval([row.ttft_s for row in rows]),
        speedup=median_interval([reference.ttft_s / row.ttft_s for row, reference in pairs]),
        floor_ratio=statistics.median(floors) if floors else None,
        stages={name: statistics.median(row.stages.get(name, 0.0) for row in rows) for name in stages},
        rows_share=statistics.fmean(row.rows_computed / row.rows_total for row in rows),
        quality=quality,
        f1_difference=paired_interval(*zip(*defined, strict=True)) if defined else None,
        comparison=comparison,
    )


def report_document(report: Report) -> dict[str, Any]:
    """JSON value of a report, without NaN or infinity.

    `methods` maps each method to its numbers; each metric has `<metric>_interval` (low, high), and `f1_diff` is the mean of
    method minus full recompute (mean, low, high). `judged` is of the first blended method; each has its own in `methods`.
    `tasks` holds the figures of each method on each task, if there are several, `changed` all answers that differ from full
    recompute's, `records` one object a measurement.
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
        "judged": _judged(report, report.blends[0].method) if report.blends else {},
        "methods": {
            summary.method: {**_method(summary), "judged": _judged(report, summary.method)}
            for summary in report.methods
        },
        "tasks": [figures._asdict() for figures in report.tasks],
        "changed": list(map(_changed, report.changed)),
        "records": list(map(asdict, report.measurements)),
    }
    finite_document: dict[str, Any] = finite(document)
    return finite_document


def _judged(report: Report, method: str) -> dict[str, dict[str, object]]:
    judgements = [judgement for judgement in report.judgements if judgement.method == method]
    return {each.name: {**each.figure._asdict(), "decision": each.figure.decision} for each in judgements}


def _changed(change: ChangedAnswer) -> dict[str, object]:
    return {
        "record_id": change.other.record_id,
        "method": change.other.method,
        "question": change.other.question,
        "full": change.full.answer,
        "answer": change.other.answer,
        "gold": change.other.gold,
        "kl": change.other.kl,
        "meaning": change.meaning,
    }


def _method(summary: MethodSummary) -> dict[str, object]:
    comparison = summary.comparison
    numbers: dict[str, object] = {
        "ttft_s": summary.ttft_s,
        "ttft_interval": _ends(summary.ttft),
        "floor_ratio": summary.floor_ratio,
        "stages": summary.stages,
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
