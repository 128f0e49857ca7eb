"""The report as one JSON document; what is undefined is null."""

from __future__ import annotations

import math
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from blend.eval.bootstrap import Bounds, Interval
from blend.eval.report.measurement import QUALITY_METRICS, Measurement
from blend.eval.report.output import write_whole
from blend.eval.report.summary import MethodSummary, Report
from blend.visible import json_text

FORMAT = 1


def report_document(report: Report) -> dict[str, object]:
    """JSON value of a report, without NaN or infinity.

    `methods` maps each method to its numbers, each metric with `<metric>_interval` (of its mean: low, high) and
    `<metric>_diff` (of method minus reference on the same record: mean, low, high); `tasks` holds the same by task,
    `records` one object a measurement.
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
        "machine": machine,
        "versions": versions,
        "reference": report.reference,
        "level": report.level,
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


def _bounds(bounds: Bounds | Interval | None) -> dict[str, float] | None:
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
