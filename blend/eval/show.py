"""Show a report: tables of 100 columns for a terminal, and a picture of quality and KL against TTFT."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blend.errors import ConfigError
from blend.eval.report import QUALITY_METRICS, MethodSummary, Report, counted, write_whole
from blend.intervals import LEVEL, Interval
from blend.limits import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Group


WIDTH = 100
UNDEFINED = "-"
SUFFIXES = (".png", ".svg", ".pdf")
_LABELS = {"f1": "F1", "em": "EM", "rouge_l": "ROUGE-L", "recall": "recall", "kl": "KL", "top1": "top-1"}
_FEW_RECORDS = 10  # below this an interval of resampled records says little


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
    title = f"difference to {report.reference}, mean and {LEVEL:.0%} paired bootstrap interval (speed-up: median)"
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
    command = f"command: {report.info.command}" if report.info.command else ""
    return [line for line in (few, missing, report.info.setting, command) if line]


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


# Okabe and Ito's palette, which colour-blind readers can tell apart, each with its own marker; the reference's first.
_STYLES = (
    *(("#000000", "s"), ("#D55E00", "X"), ("#0072B2", "o"), ("#009E73", "D"), ("#CC79A7", "^"), ("#E69F00", "v")),
    *(("#56B4E9", "P"), ("#999933", "*")),
)
_LOG_RATIO = 4.0  # beyond this ratio of times a linear axis would press the fast methods together
_QUALITY = (("f1", "F1"), ("rouge_l", "ROUGE-L"), ("recall", "recall of all values"), ("em", "exact match"))
_Ends = tuple[float, float, float]  # of a point: its value, and the ends of its bar


def write_picture(report: Report, path: str | Path) -> None:
    """Draw the report to a .png, .svg or .pdf file, replacing it whole or not at all.

    Raises `ConfigError` for another suffix, a place that cannot be written, or when matplotlib is missing.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path}: a picture ends in one of {', '.join(SUFFIXES)}")
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError("the picture needs matplotlib: pip install 'kvblend[report]'") from error
    kind, drawn = path.suffix.lower(), BytesIO()
    # Fixed ids and no date: the same report gives the same file.
    with mpl.rc_context({"svg.hashsalt": "kvblend", "font.size": 9.5}):
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(kind)
        draw_report(report).savefig(drawn, format=kind[1:], dpi=160, metadata=metadata)
    write_whole(path, drawn.getvalue())


def draw_report(report: Report) -> Figure:
    """The picture: answer quality on the left, KL on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    quality, divergence = figure.subplots(1, 2)
    _draw_quality(quality, report)
    _draw_divergence(divergence, report)
    for axes in (quality, divergence):
        _time_axis(axes, [summary.ttft_s for summary in report.methods])
    figure.supxlabel(_footnote(report), fontsize=7.5, color="#555555", parse_math=False)
    handles, labels = max(
        (axes.get_legend_handles_labels() for axes in (quality, divergence)), key=lambda found: len(found[1])
    )
    # The title is the legend's: a figure's own title and a legend outside of its panels would lie on each other.
    font = {"size": 11.5, "weight": "bold"}
    legend = figure.legend(
        handles,
        labels,
        title=_title(report),
        title_fontproperties=font,
        loc="outside upper center",
        ncols=4,
        frameon=False,
    )
    legend.get_title().set_parse_math(False)
    return figure


def _draw_quality(axes: Axes, report: Report) -> None:
    metric, name = next(((key, name) for key, name in _QUALITY if _any(report, key)), _QUALITY[0])
    axes.set_title(f"{name}, with {LEVEL:.0%} paired interval of the difference to {report.reference}", fontsize=9)
    axes.set_ylabel(f"{name}  (higher is better)")
    level = report.methods[0].quality[metric]
    if level is None:
        _say_undefined(axes, "no gold answers")
        return
    axes.axhspan(level.low, level.high, color="#000000", alpha=0.08, linewidth=0)
    axes.axhline(level.mean, color="#000000", linewidth=1, linestyle="--", alpha=0.6)
    _points(axes, report, lambda summary: _quality_ends(summary, metric, level.mean))
    axes.margins(y=0.12)


def _quality_ends(summary: MethodSummary, metric: str, level: float) -> _Ends | None:
    """The mean, with the paired interval of the difference drawn around the reference's level."""
    mean, difference = summary.mean(metric), summary.differences[metric]
    if mean is None or difference is None:
        return None
    return mean, min(mean, level + difference.low), max(mean, level + difference.high)


def _draw_divergence(axes: Axes, report: Report) -> None:
    axes.set_title(f"KL to {report.reference} along its answer, with {LEVEL:.0%} interval", fontsize=9)
    axes.set_ylabel("KL, nats per token  (lower is closer)")
    if not any(summary.quality["kl"] for summary in report.methods[1:]):
        _say_undefined(axes, "KL was not measured")
        return
    _points(axes, report, _divergence_ends)
    axes.axhline(0, color="#000000", linewidth=1, linestyle="--", alpha=0.6)
    axes.margins(y=0.12)
    low, high = axes.get_ylim()
    axes.set_ylim(bottom=min(low, -0.08 * high))


def _divergence_ends(summary: MethodSummary) -> _Ends | None:
    interval = summary.quality["kl"]
    return None if interval is None else (interval.mean, interval.low, interval.high)


def _points(axes: Axes, report: Report, ends: Callable[[MethodSummary], _Ends | None]) -> None:
    for index, summary in enumerate(report.methods):
        found = ends(summary)
        if found is None:
            continue
        (value, low, high), (color, marker) = found, _STYLES[index % len(_STYLES)]
        style: dict[str, Any] = {
            "fmt": marker,
            "color": color,
            "markersize": 8,
            "capsize": 4,
            "linewidth": 1.5,
            "zorder": 3,
        }
        bars = [[value - low], [high - value]]
        axes.errorbar([summary.ttft_s], [value], bars, label=_label(summary, report), **style)


def _label(summary: MethodSummary, report: Report) -> str:
    speedup = "" if summary.method == report.reference else f" ({summary.speedup:.1f}x)"
    return f"{summary.method}{speedup}".replace("$", r"\$")  # no formula


def _time_axis(axes: Axes, times: Sequence[float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if max(times) / min(times) > _LOG_RATIO:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(min(times) / 1.5, max(times) * 1.5)
    else:
        axes.set_xlim(0, max(times) * 1.2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("time to first token, seconds, median  (lower is faster)")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _any(report: Report, metric: str) -> bool:
    return any(summary.quality[metric] is not None for summary in report.methods)


def _say_undefined(axes: Axes, reason: str) -> None:
    axes.text(0.5, 0.5, reason, transform=axes.transAxes, ha="center", va="center", color="#777777")
    axes.set_yticks([])


def _title(report: Report) -> str:
    parts = [report.info.model, report.info.workload, report.size]
    return textwrap.fill(visible(" · ".join(part for part in parts if part)), 95)


def _footnote(report: Report) -> str:
    band = f"dashed line and band: {report.reference} and the {LEVEL:.0%} interval of its mean"
    return textwrap.fill(" | ".join(part for part in (band, report.info.setting) if part), 185)
