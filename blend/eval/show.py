"""Show a report: tables of 100 columns for a terminal, and a picture of quality and KL against TTFT."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from blend.errors import ConfigError
from blend.eval.output import write_whole
from blend.eval.report import QUALITY_METRICS, MethodSummary, Report, counted
from blend.intervals import LEVEL, Interval
from blend.limits import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Group, JustifyMethod


WIDTH = 100
UNDEFINED = "-"
SUFFIXES = (".png", ".svg", ".pdf")
_LABELS = {
    "f1": "F1",
    "em": "EM",
    "rouge_l": "ROUGE-L",
    "recall": "recall",
    "kl": "KL",
    "top1": "top-1",
}
_FEW_RECORDS = 10  # below this an interval of resampled records says little


def render_report(report: Report) -> Group:
    """All tables as one rich renderable, for a console of any width from about 90 columns."""
    from rich.console import Group
    from rich.text import Text

    tables = [_overview(report), _differences(report), _changes(report)]
    if any(summary.stages for summary in report.methods):
        tables.append(_stages(report))
    if report.tasks:
        tables.append(_tasks(report))
    footnotes = [Text(visible(line), style="dim") for line in _footnotes(report)]
    return Group(*tables, *footnotes)


def _overview(report: Report) -> Group:
    metrics = _measured(report)
    labels = [_LABELS[metric] for metric in metrics]
    columns = ["method", "TTFT", "speed-up", "TTFT\n/ floor", "floor\n/ full", "rows", *labels]
    rows = [_overview_row(summary, metrics) for summary in report.methods]
    return table(_title(report), columns, rows)


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
    labels = [_LABELS[metric] for metric in metrics]
    return table(title, ["method", "speed-up", *labels], rows)


def _changes(report: Report) -> Group:
    comparisons = {
        summary.method: summary.comparison for summary in report.methods if summary.method != report.reference
    }
    counts = {method: comparison.meanings.in_words for method, comparison in comparisons.items()}
    meanings = list(dict.fromkeys(name for words in counts.values() for name in words))
    rows = (
        [method, comparison.share_in_words, *(str(counts[method].get(name, 0)) for name in meanings)]
        for method, comparison in comparisons.items()
    )
    title = f"answers that differ from {report.reference}'s, with {LEVEL:.0%} interval"
    return table(title, ["method", "changed", *meanings], rows)


def _stages(report: Report) -> Group:
    methods = [summary.method for summary in report.methods]
    stages = [summary.stages for summary in report.methods]
    names = list(dict.fromkeys(name for seconds in stages for name in seconds))
    rows = ([name, *(_stage(seconds, name) for seconds in stages)] for name in names)
    return table("TTFT by stage, medians", ["stage", *methods], rows)


def _stage(seconds: Mapping[str, float], name: str) -> str:
    return _seconds(seconds[name]) if name in seconds else UNDEFINED


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
    return table(f"{_LABELS[metric]} by task", ["task", "records", *names], rows)


def _footnotes(report: Report) -> list[str]:
    few = f"{report.size}: too few for the intervals to mean much" if report.records < _FEW_RECORDS else ""
    missing = f"{counted(len(report.incomplete))} left out: not answered by every method" if report.incomplete else ""
    command = f"command: {report.info.command}" if report.info.command else ""
    lines = (*report.judged_lines.values(), few, missing, report.info.setting, command)
    return [line for line in lines if line]


def _measured(report: Report) -> list[str]:
    """Metrics that some method has, so that no column is empty."""
    return [name for name in QUALITY_METRICS if any(_varies(summary, name, report) for summary in report.methods)]


def _varies(summary: MethodSummary, metric: str, report: Report) -> bool:
    # The reference's own KL is 0 by definition, measured or not.
    of_itself = summary.method == report.reference and metric in ("kl", "top1")
    return summary.quality[metric] is not None and not of_itself


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
) -> Group:
    """A title and a table; the first column is text, the others are numbers."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, column in enumerate(columns):
        justify: JustifyMethod = "right" if index else "left"
        grid.add_column(Text(visible(column, keep="\n")), justify=justify, no_wrap=True)
    for row in rows:
        cells = [visible(cell, keep="\n") for cell in row]
        grid.add_row(*map(Text, cells))
    # A title of the table itself would be folded to the width of the table.
    return Group(Text(visible(title), style="bold"), grid)


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
    ("#000000", "s"),
    ("#D55E00", "X"),
    ("#0072B2", "o"),
    ("#009E73", "D"),
    ("#CC79A7", "^"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
    ("#999933", "*"),
)
_LOG_RATIO = 4.0  # beyond this ratio of times a linear axis would press the fast methods together
_QUALITY = {
    "f1": "F1",
    "rouge_l": "ROUGE-L",
    "recall": "recall of all values",
    "em": "exact match",
}
_Ends = tuple[float, float, float]  # of a point: its value, and the ends of its bar


def write_picture(report: Report, path: str | Path) -> None:
    """Draw the report to a file; see `save_figure`."""
    save_figure(Path(path), lambda: draw_report(report))


def save_figure(path: Path, draw: Callable[[], Figure]) -> None:
    """Write a figure to a .png, .svg or .pdf file, replacing it whole or not at all.

    Raises `ConfigError` for another suffix, a place that cannot be written, or when matplotlib is missing.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path}: a picture ends in one of {', '.join(SUFFIXES)}")
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError("the picture needs matplotlib: pip install 'kvblend[report]'") from error
    kind = path.suffix.lower()
    drawing = BytesIO()
    # Fixed ids and no date: the same report gives the same file.
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with mpl.rc_context({"svg.hashsalt": "kvblend", "font.size": 9.5}):
        draw().savefig(
            drawing,
            format=kind[1:],
            dpi=160,
            metadata=metadata.get(kind),
        )
    write_whole(path, drawing.getvalue())


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
    legends = (axes.get_legend_handles_labels() for axes in (quality, divergence))
    handles, labels = max(legends, key=lambda legend: len(legend[1]))
    # The title is the legend's: a figure's own title and a legend outside of its panels would lie on each other.
    font = {"size": 11.5, "weight": "bold"}
    legend = figure.legend(
        handles,
        labels,
        title=textwrap.fill(visible(_title(report)), 95),
        title_fontproperties=font,
        loc="outside upper center",
        ncols=4,
        frameon=False,
    )
    legend.get_title().set_parse_math(False)
    return figure


def _draw_quality(axes: Axes, report: Report) -> None:
    metric = next((metric for metric in _QUALITY if _any(report, metric)), "f1")
    name = _QUALITY[metric]
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
    low = min(mean, level + difference.low)
    high = max(mean, level + difference.high)
    return mean, low, high


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


def _points(
    axes: Axes,
    report: Report,
    ends: Callable[[MethodSummary], _Ends | None],
) -> None:
    for index, summary in enumerate(report.methods):
        point = ends(summary)
        if point is None:
            continue
        value, low, high = point
        color, marker = _STYLES[index % len(_STYLES)]
        axes.errorbar(
            [summary.ttft_s],
            [value],
            [[value - low], [high - value]],
            label=_label(summary, report),
            fmt=marker,
            color=color,
            markersize=8,
            capsize=4,
            linewidth=1.5,
            zorder=3,
        )


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
    axes.text(
        0.5,
        0.5,
        reason,
        transform=axes.transAxes,
        ha="center",
        va="center",
        color="#777777",
    )
    axes.set_yticks([])


def _title(report: Report) -> str:
    parts = (report.info.model, report.info.workload, report.size)
    return " · ".join(part for part in parts if part)


def _footnote(report: Report) -> str:
    band = f"dashed line and band: {report.reference} and the {LEVEL:.0%} interval of its mean"
    parts = (band, report.info.setting)
    return textwrap.fill(" | ".join(part for part in parts if part), 185)
