"""The report as tables of 100 columns: speed and quality, differences with intervals, stages, tasks."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from blend.eval.bootstrap import Interval
from blend.eval.report.measurement import QUALITY_METRICS
from blend.eval.report.summary import MethodSummary, Report, counted
from blend.visible import visible

if TYPE_CHECKING:
    from rich.console import Group

WIDTH = 100
UNDEFINED = "-"
_LABELS = {"f1": "F1", "em": "EM", "rouge_l": "ROUGE-L", "recall": "recall", "kl": "KL", "top1": "top-1"}
# Below this an interval of resampled records says little.
_FEW_RECORDS = 10


def report_text(report: Report, width: int = WIDTH) -> str:
    """All tables as plain text without escape codes, no line longer than `width`, for pipes and log files."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, highlight=False)
    console.print(render_report(report))
    text = console.file.getvalue() if isinstance(console.file, io.StringIO) else ""
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def render_report(report: Report) -> Group:
    """All tables as one rich renderable, for a console of any width from about 90 columns."""
    from rich.console import Group
    from rich.text import Text

    tables = [_overview(report), _differences(report)]
    tables += [_stages(report)] if any(summary.stages for summary in report.methods) else []
    tables += [_tasks(report)] if report.tasks else []
    return Group(*tables, *(Text(visible(line), style="dim") for line in _footnotes(report)))


def _overview(report: Report) -> Group:
    metrics = _measured(report)
    title = " · ".join(part for part in (report.info.model, report.info.workload, report.size) if part)
    columns = ["TTFT", "speed-up", "TTFT\n/ floor", "floor\n/ full", "rows", *(_LABELS[metric] for metric in metrics)]
    return _table(title, ["method", *columns], (_overview_row(summary, metrics) for summary in report.methods))


def _overview_row(summary: MethodSummary, metrics: Sequence[str]) -> list[str]:
    return [
        summary.method,
        _seconds(summary.ttft_s),
        f"{summary.speedup:.2f}x",
        _number(summary.floor_ratio, ".2f"),
        _number(summary.floor_share, ".3f"),
        _number(summary.rows_share, ".1%"),
        *(_number(summary.mean(metric), ".3f") for metric in metrics),
    ]


def _differences(report: Report) -> Group:
    metrics = [metric for metric in _measured(report) if metric not in ("kl", "top1")]
    title = (
        f"difference to {report.reference}, mean and {report.level:.0%} paired bootstrap interval (speed-up: median)"
    )
    rows = (
        [
            summary.method,
            f"{summary.speedup:.2f}x\n[{summary.speedup_bounds.low:.2f}, {summary.speedup_bounds.high:.2f}]",
            *(_signed(summary.differences[metric]) for metric in metrics),
        ]
        for summary in report.methods
        if summary.method != report.reference
    )
    return _table(title, ["method", "speed-up", *(_LABELS[metric] for metric in metrics)], rows)


def _stages(report: Report) -> Group:
    names = list(dict.fromkeys(name for summary in report.methods for name in summary.stages))
    rows = ([name, *(_stage(summary, name) for summary in report.methods)] for name in names)
    return _table("TTFT by stage, medians", ["stage", *(summary.method for summary in report.methods)], rows)


def _stage(summary: MethodSummary, name: str) -> str:
    return _seconds(summary.stages[name]) if name in summary.stages else UNDEFINED


def _tasks(report: Report) -> Group:
    """F1 by task, or the first metric that was measured."""
    metric = next(iter(_measured(report)), "f1")
    names = [summary.method for summary in report.methods]
    rows = (
        [
            visible(task) or UNDEFINED,
            str(summaries[0].records),
            *(_number(summary.mean(metric), ".3f") for summary in summaries),
        ]
        for task, summaries in report.tasks.items()
    )
    return _table(f"{_LABELS[metric]} by task", ["task", "records", *names], rows)


def _footnotes(report: Report) -> list[str]:
    few = f"{report.size}: too few for the intervals to mean much" if report.records < _FEW_RECORDS else ""
    missing = f"{counted(len(report.incomplete))} left out: not answered by every method" if report.incomplete else ""
    machine = report.info.machine.summary() if report.info.machine else ""
    command = f"command: {report.info.command}" if report.info.command else ""
    return [line for line in (few, missing, machine, command) if line]


def _measured(report: Report) -> list[str]:
    """Metrics that some method has, so that no column is empty."""
    return [name for name in QUALITY_METRICS if any(_varies(summary, name, report) for summary in report.methods)]


def _varies(summary: MethodSummary, metric: str, report: Report) -> bool:
    # The reference's own KL is 0 by definition, measured or not.
    own = summary.method == report.reference and metric in ("kl", "top1")
    return summary.quality[metric] is not None and not own


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Group:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, column in enumerate(columns):
        table.add_column(Text(visible(column, keep="\n")), justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(visible(cell, keep="\n")) for cell in row))
    # A title of the table itself would be folded to the width of the table.
    return Group(Text(visible(title), style="bold"), table)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.{0 if value >= 0.1 else 1}f} ms"


def _number(value: float | None, form: str) -> str:
    return UNDEFINED if value is None else format(value, form)


def _signed(interval: Interval | None) -> str:
    if interval is None:
        return UNDEFINED
    return f"{interval.mean:+.3f}\n[{interval.low:+.3f}, {interval.high:+.3f}]"
