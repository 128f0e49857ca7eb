"""Compare methods record by record: measurements -> `summarise` -> a report with paired intervals, as JSON and files."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from blend.errors import ConfigError
from blend.eval.machine import Machine
from blend.files import check_creatable, write_atomically
from blend.intervals import LEVEL, Interval, IntervalEnds, mean_interval, median_bounds, paired_interval
from blend.limits import json_text

# Fields of `Measurement` that judge the answer, in the order of every table.
QUALITY_METRICS = ("f1", "em", "rouge_l", "recall", "kl", "top1")


@dataclass(frozen=True)
class Measurement:
    """One method on one record.

    ttft_s: seconds from the query to the first token, without retrieval. stages: seconds by stage. rows_total: of the prompt.
    rows_computed: mean over layers. floor_s: the least time this method could take. f1, em, rouge_l: against gold answers.
    recall: share of all wanted values. kl: mean KL to the reference, nats per answer token. top1: share of answer tokens with
    the same most likely token. task: label to report by. None means undefined.

    Raises `ValueError` for a time that is not positive and finite, a share outside [0, 1], or NaN.
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
    task: str = ""

    def __post_init__(self) -> None:
        for name in ("ttft_s", "floor_s"):
            self._require(name, lambda value: 0 < value < math.inf, "positive and finite")
        for name in ("f1", "em", "rouge_l", "recall", "top1"):
            self._require(name, lambda value: 0 <= value <= 1, "between 0 and 1")
        self._require("kl", lambda value: value >= 0, "0 or more")
        self._require("rows_computed", lambda value: 0 <= value <= self.rows_total + 1e-6, "between 0 and rows_total")

    def _require(self, name: str, holds: Callable[[float], bool], expected: str) -> None:
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
    """What the numbers were made with. config: JSON values. command: the line that makes the report again.

    dtype: what the model computed in. weights: "native" or "int8".
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

    speedup: median of reference time / this time. floor_ratio: median of time / floor. floor_share: median of floor /
    reference time. rows_share: mean share of rows computed. quality: metric -> mean and interval. differences: metric, and
    "ttft" in seconds -> mean of method minus reference on the same record, with the paired interval.
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

    def mean(self, metric: str) -> float | None:
        """Mean of one of the quality metrics."""
        interval = self.quality[metric]
        return None if interval is None else interval.mean


@dataclass(frozen=True)
class Report:
    """All methods, `reference` first, over the records that every method has.

    incomplete: ids of records left out because a method lacks them. tasks: task label -> summaries of its records, empty
    when there is one task. measurements: the ones counted.
    """

    reference: str
    methods: tuple[MethodSummary, ...]
    records: int
    incomplete: tuple[str, ...]
    measurements: tuple[Measurement, ...]
    tasks: Mapping[str, tuple[MethodSummary, ...]]
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


def summarise(measurements: Iterable[Measurement], *, reference: str = "full", info: RunInfo | None = None) -> Report:
    """Compare every method with `reference` on the records that all have; intervals are bootstrap percentiles at `LEVEL`.

    Raises `ConfigError` when nothing can be compared and `ValueError` for two measurements of one method and record.
    """
    table = _by_method(measurements)
    shared = _shared_records(table, reference)
    reference_first = sorted(table.items(), key=lambda item: item[0] != reference)
    complete = {method: [rows[record] for record in shared] for method, rows in reference_first}
    complete[reference] = [_with_own_fidelity(row) for row in complete[reference]]
    seen = dict.fromkeys(record for rows in table.values() for record in rows)
    return Report(
        reference=reference,
        methods=_summaries(complete, reference),
        records=len(shared),
        incomplete=tuple(record for record in seen if record not in set(shared)),
        measurements=tuple(row for rows in zip(*complete.values(), strict=True) for row in rows),
        tasks=_by_task(complete, reference),
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


def _with_own_fidelity(row: Measurement) -> Measurement:
    """The reference's KL and agreement with itself, by definition, where they were not measured."""
    return replace(row, kl=0.0 if row.kl is None else row.kl, top1=1.0 if row.top1 is None else row.top1)


def _by_task(complete: Mapping[str, Sequence[Measurement]], reference: str) -> dict[str, tuple[MethodSummary, ...]]:
    tasks = dict.fromkeys(row.task for row in complete[reference])
    if len(tasks) < 2:
        return {}
    parts = {task: [index for index, row in enumerate(complete[reference]) if row.task == task] for task in tasks}
    return {
        task: _summaries({name: [rows[i] for i in part] for name, rows in complete.items()}, reference)
        for task, part in parts.items()
    }


def _summaries(complete: Mapping[str, Sequence[Measurement]], reference: str) -> tuple[MethodSummary, ...]:
    return tuple(_summary(rows, complete[reference]) for rows in complete.values())


def _summary(rows: Sequence[Measurement], base: Sequence[Measurement]) -> MethodSummary:
    speedups = [full.ttft_s / row.ttft_s for row, full in zip(rows, base, strict=True)]
    floors = [row.floor_s / full.ttft_s for row, full in zip(rows, base, strict=True) if row.floor_s is not None]
    fields = {"ttft": "ttft_s", **{name: name for name in QUALITY_METRICS}}
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
        quality={name: _mean([getattr(row, name) for row in rows]) for name in QUALITY_METRICS},
        differences={label: _difference(rows, base, name) for label, name in fields.items()},
    )


def _mean(values: Sequence[float | None]) -> Interval | None:
    """Undefined values are left out, an infinite one leaves the mean undefined."""
    defined = [value for value in values if value is not None]
    return mean_interval(defined) if defined and all(map(math.isfinite, defined)) else None


def _difference(rows: Sequence[Measurement], base: Sequence[Measurement], name: str) -> Interval | None:
    """Paired, on the records where both values are defined."""
    both = ((getattr(row, name), getattr(full, name)) for row, full in zip(rows, base, strict=True))
    pairs = [pair for pair in both if None not in pair]
    if not pairs or not all(math.isfinite(value) for pair in pairs for value in pair):
        return None
    return paired_interval(*zip(*pairs, strict=True))


def _over(statistic: Callable[[Sequence[float]], float], values: Iterable[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return statistic(defined) if defined else None


def _stage_medians(rows: Sequence[Measurement]) -> dict[str, float]:
    """Median by stage over all rows; a stage that a record did not need took it no time."""
    names = dict.fromkeys(name for row in rows for name in row.stages)
    return {name: statistics.median(row.stages.get(name, 0.0) for row in rows) for name in names}


FORMAT = 1


def report_document(report: Report) -> dict[str, object]:
    """JSON value of a report, without NaN or infinity.

    `methods` maps each method to its numbers; each metric has `<metric>_interval` (low, high) and `<metric>_diff` (method
    minus reference: mean, low, high). `tasks` holds the same by task, `records` one object a measurement.
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
        "config": dict(info.config),
        "dtype": info.dtype,
        "weights": info.weights,
        "machine": machine,
        "versions": versions,
        "reference": report.reference,
        "level": LEVEL,
        "record_count": report.records,
        "incomplete": list(report.incomplete),
        "methods": _methods(report.methods),
        "tasks": {task: _methods(methods) for task, methods in report.tasks.items()},
        "records": [_record(measurement) for measurement in report.measurements],
    }
    return {key: _finite(value) for key, value in document.items()}


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
    }
    for metric in QUALITY_METRICS:
        numbers[metric] = summary.mean(metric)
        numbers[f"{metric}_interval"] = _bounds(summary.quality[metric])
        numbers[f"{metric}_diff"] = _interval(summary.differences[metric])
    return {**numbers, "stages": dict(summary.stages)}


def _record(measurement: Measurement) -> dict[str, object]:
    return {**asdict(measurement), "rows_share": measurement.rows_share, "floor_ratio": measurement.floor_ratio}


def _interval(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else {"mean": interval.mean, "low": interval.low, "high": interval.high}


def _bounds(bounds: IntervalEnds | Interval | None) -> dict[str, float] | None:
    return None if bounds is None else {"low": bounds.low, "high": bounds.high}


def _finite(value: object) -> object:
    """The value with every NaN and infinity in it replaced by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def write_whole(path: Path, content: bytes) -> None:
    """Replace what `path` holds, whole or not at all.

    Missing folders are made; where `path` is a link, the file behind it is replaced. The file has mode 0600, whatever was there
    before. Raises `ConfigError` when the place cannot be written.
    """
    with _target(path) as target:
        write_atomically(target, [content], durable=False)


def check_writable(path: Path) -> None:
    """Raise `ConfigError` where `write_whole` could not write; missing folders are made."""
    with _target(path) as target:
        check_creatable(target.parent)


@contextmanager
def _target(path: Path) -> Iterator[Path]:
    """The file that `path` leads to, in a folder that is there; what the operating system refuses is a `ConfigError`."""
    try:
        target = Path(os.path.realpath(path))
        if (target.exists() and not target.is_file()) or _names_devices(path):
            raise ConfigError(f"{path}: cannot be written (not a regular file); name another file")
        target.parent.mkdir(parents=True, exist_ok=True)
        yield target
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error}); name another file") from error


def _names_devices(path: Path) -> bool:
    """Whether a path is /dev/stdout, /dev/fd/1 or the like: it may lead to a file, but no file must take its place."""
    parent = Path(os.path.realpath(path.parent))
    return parent == Path("/dev") or parent.is_relative_to("/proc")
