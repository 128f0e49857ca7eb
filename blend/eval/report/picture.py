"""The report as a picture: quality and KL against TTFT, one point a method."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from blend.errors import ConfigError
from blend.eval.report.labels import place_labels
from blend.eval.report.output import write_whole
from blend.eval.report.summary import MethodSummary, Report
from blend.visible import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")

# Okabe and Ito's palette, which colour-blind readers can tell apart, each with its own marker; the reference's first.
_STYLES = (
    *(("#000000", "s"), ("#D55E00", "X"), ("#0072B2", "o"), ("#009E73", "D"), ("#CC79A7", "^"), ("#E69F00", "v")),
    *(("#56B4E9", "P"), ("#999933", "*")),
)
# Beyond this ratio of times a linear axis would press the fast methods together.
_LOG_RATIO = 4.0
# From a label that had to move away back to its point; `place_labels` hides the others.
_LEADER = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 5}
_QUALITY = (("f1", "F1"), ("rouge_l", "ROUGE-L"), ("recall", "recall of all values"), ("em", "exact match"))


class _Point(NamedTuple):
    """One method in one panel: time, value, ends of its bar."""

    label: str
    style: tuple[str, str]
    x: float
    y: float
    low: float
    high: float


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
        _draw(report).savefig(drawn, format=kind[1:], dpi=160, metadata=metadata)
    write_whole(path, drawn.getvalue())


def _draw(report: Report) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    quality, divergence = figure.subplots(1, 2)
    _draw_quality(quality, report)
    _draw_divergence(divergence, report)
    for axes in (quality, divergence):
        _time_axis(axes, [summary.ttft_s for summary in report.methods])
    figure.suptitle(_title(report), fontsize=11.5, fontweight="bold", parse_math=False)
    figure.supxlabel(_footnote(report), fontsize=7.5, color="#555555", parse_math=False)
    figure.draw_without_rendering()
    for axes in (quality, divergence):
        place_labels(axes)
    return figure


def _draw_quality(axes: Axes, report: Report) -> None:
    metric, name = next(((key, name) for key, name in _QUALITY if _any(report, key)), _QUALITY[0])
    axes.set_title(
        f"{name}, with {report.level:.0%} paired interval of the difference to {report.reference}", fontsize=9
    )
    axes.set_ylabel(f"{name}  (higher is better)")
    level = report.methods[0].quality[metric]
    if level is None:
        _say_undefined(axes, "no gold answers")
        return
    axes.axhspan(level.low, level.high, color="#000000", alpha=0.08, linewidth=0)
    axes.axhline(level.mean, color="#000000", linewidth=1, linestyle="--", alpha=0.6)
    _points(axes, report, lambda summary: _quality_ends(summary, metric, level.mean))
    axes.margins(y=0.12)


def _quality_ends(summary: MethodSummary, metric: str, level: float) -> tuple[float, float, float] | None:
    """The mean, with the paired interval of the difference drawn around the reference's level."""
    mean, difference = summary.mean(metric), summary.differences[metric]
    if mean is None or difference is None:
        return None
    return mean, min(mean, level + difference.low), max(mean, level + difference.high)


def _draw_divergence(axes: Axes, report: Report) -> None:
    axes.set_title(f"KL to {report.reference} along its answer, with {report.level:.0%} interval", fontsize=9)
    axes.set_ylabel("KL, nats per token  (lower is closer)")
    if not any(summary.quality["kl"] for summary in report.methods[1:]):
        _say_undefined(axes, "KL was not measured")
        return
    _points(axes, report, _divergence_ends)
    axes.axhline(0, color="#000000", linewidth=1, linestyle="--", alpha=0.6)
    axes.margins(y=0.12)
    low, high = axes.get_ylim()
    axes.set_ylim(bottom=min(low, -0.08 * high))


def _divergence_ends(summary: MethodSummary) -> tuple[float, float, float] | None:
    interval = summary.quality["kl"]
    return None if interval is None else (interval.mean, interval.low, interval.high)


def _points(axes: Axes, report: Report, ends: Callable[[MethodSummary], tuple[float, float, float] | None]) -> None:
    for index, summary in enumerate(report.methods):
        found = ends(summary)
        if found is not None:
            _point(axes, _Point(_label(summary, report), _STYLES[index % len(_STYLES)], summary.ttft_s, *found))


def _point(axes: Axes, point: _Point) -> None:
    color, marker = point.style
    bars = [[point.y - point.low], [point.high - point.y]]
    axes.errorbar([point.x], [point.y], bars, fmt=marker, color=color, markersize=8, capsize=4, linewidth=1.5, zorder=3)
    # Dark text whatever the colour of the mark: the light ones are hard to read. `place_labels` finds its place.
    label = axes.annotate(point.label, (point.x, point.y), (0, 0), textcoords="offset points", arrowprops=_LEADER)
    label.set(color="#222222", fontsize=9, parse_math=False, zorder=4)


def _label(summary: MethodSummary, report: Report) -> str:
    return summary.method if summary.method == report.reference else f"{summary.method} ({summary.speedup:.1f}x)"


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
    band = f"dashed line and band: {report.reference} and the {report.level:.0%} interval of its own mean"
    machine = report.info.machine.summary() if report.info.machine else ""
    return textwrap.fill(" | ".join(part for part in (band, machine) if part), 185)
