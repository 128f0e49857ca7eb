"""The picture of a report: KL against time to first token and rows, and changed answers. Needs matplotlib."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blend.compare import MEANINGS
from blend.errors import ConfigError
from blend.eval.output import check_writable, write_whole
from blend.eval.report import FULL, MethodSummary, Report
from blend.intervals import LEVEL, Interval
from blend.text import visible
from blend_retrieval.installation import install_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
INK = "#1b1f24"  # of text and axes; a page replaces it by the colour of its own text
# Okabe and Ito's palette without black, which colour-blind readers can tell apart, each with its own marker.
_STYLES = (
    ("#D55E00", "X"),
    ("#0072B2", "o"),
    ("#009E73", "D"),
    ("#CC79A7", "^"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
    ("#999933", "*"),
)
_CHANGED = "#8C96A0"
_MEANING_COLORS = ("#56B4E9", "#009E73", "#D55E00", "#8C96A0")  # in the order of `MEANINGS`
_LOG_RATIO = 8.0  # beyond this ratio of times a linear axis would press the fast methods together
_PANEL_INCHES = 4.6, 3.7
_LONGEST_NAME = 34  # columns of a method's name in a line
_FOLDED_NAME = 18
_LEGEND_COLUMNS = 58  # of text in a line of a legend
_CAPTION_COLUMNS = 150
_BELOW: dict[str, Any] = {
    "loc": "upper center",
    "bbox_to_anchor": (0.5, 0.0),
    "borderaxespad": 4.6,  # past the axis's numbers and label
    "frameon": False,
    "fontsize": 9,
    "handletextpad": 0.4,
    "columnspacing": 1.2,
    "labelspacing": 0.3,
}
_SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "kvblend",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.parse_math": False,  # no name is TeX
}
Panel = Callable[["Axes", Report], None]


def require_matplotlib(option: str) -> None:
    """Raise `ConfigError` if matplotlib is not installed. option: what needs it."""
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{option} draws pictures, which needs matplotlib: {install_command('report')}")


def check_picture(path: Path) -> None:
    """Raise `ConfigError` for a picture that could not be written: another kind, no place, no matplotlib."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path}: a picture ends in {' or '.join(SUFFIXES)}; name it so")
    require_matplotlib("--picture")
    check_writable(path)


def write_picture(report: Report, path: Path) -> None:
    """Draw a report to a file that `check_picture` accepts; the same report gives the same file. Raises `ConfigError`."""
    kind = path.suffix.lower()[1:]
    write_whole(path, drawn(lambda: _draw(report), kind))


def panels_as_svg(report: Report) -> dict[str, str]:
    """Each panel by its title, as an SVG element without a background, whose text and axes have the colour `INK`."""
    return {title: _svg(panel, report) for title, panel in _panels(report).items()}


def _svg(panel: Panel, report: Report) -> str:
    def draw() -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=_panel_inches(report), layout="constrained", facecolor="none")
        axes = figure.subplots()
        axes.set_facecolor("none")
        panel(axes, report)
        return figure

    document = drawn(draw, "svg").decode()
    return document[document.index("<svg") :]


def drawn(draw: Callable[[], Figure], kind: str) -> bytes:
    """The content of a picture's file. kind: "png" or "svg". The same figure gives the same content."""
    import matplotlib as mpl

    content = BytesIO()
    metadata = {"Date": None} if kind == "svg" else None
    with mpl.rc_context(_SETTINGS), warnings.catch_warnings(action="ignore"):  # of signs in names that the font lacks
        draw().savefig(content, format=kind, dpi=160, metadata=metadata)
    return content.getvalue()


def _draw(report: Report) -> Figure:
    """All panels side by side, under the title, above the machine and what was measured."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = _panels(report)
    width, height = _panel_inches(report)
    figure = Figure(
        figsize=(width * len(panels), height + 0.9), layout=ConstrainedLayoutEngine(w_pad=0.12, wspace=0.03)
    )
    for axes, (title, panel) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        axes.set_title(title, fontsize=10)
        panel(axes, report)
    figure.suptitle(textwrap.fill(f"{visible(report.title)}, with {LEVEL:.0%} intervals", 120), fontweight="bold")
    caption = textwrap.fill(visible(report.info.setting), _CAPTION_COLUMNS)
    figure.supxlabel(caption, fontsize=7.5, color="#555555")
    return figure


def _panels(report: Report) -> dict[str, Panel]:
    panels: dict[str, Panel] = {}
    if any(summary.quality["kl"] for summary in report.methods[1:]):
        panels["KL against time to first token"] = _draw_times
        panels["KL against rows computed"] = _draw_rows
    panels[f"Answers that differ from {FULL}'s"] = _draw_changes
    return panels


def _draw_times(axes: Axes, report: Report) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    _draw_points(axes, report, [summary.ttft for summary in report.methods])
    lowest = min(summary.ttft.low for summary in report.methods)
    highest = max(summary.ttft.high for summary in report.methods)
    if highest / lowest > _LOG_RATIO:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(lowest / 1.4, highest * 1.4)
    else:
        axes.set_xlim(0, highest * 1.1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("median time to first token, seconds" + (", log" if highest / lowest > _LOG_RATIO else ""))


def _draw_rows(axes: Axes, report: Report) -> None:
    shares = [summary.rows_share * 100 for summary in report.methods]
    _draw_points(axes, report, [Interval(share, share, share) for share in shares])
    axes.set_xlim(-4, 104)
    axes.set_xlabel("rows computed, % of the prompt")


def _draw_points(axes: Axes, report: Report, places: Sequence[Interval]) -> None:
    """A point for each method whose mean KL is defined, with the intervals of both figures, and a legend above."""
    for index, (summary, place) in enumerate(zip(report.methods, places, strict=True)):
        kl = summary.quality["kl"]
        if kl is None:
            continue
        color, marker = _style(index)
        axes.errorbar(
            [place.mean],
            [kl.mean],
            yerr=_reach(kl),
            xerr=_reach(place),
            fmt=marker,
            color=color,
            markersize=7,
            capsize=3,
            linewidth=1.3,
            zorder=3,
        )
    axes.set_ylabel("mean KL to full, nats per token")
    top = max(interval.high for summary in report.methods if (interval := summary.quality["kl"]))
    axes.set_ylim(-0.04 * (top or 1), 1.08 * (top or 1))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    _legend_of_methods(axes, [summary for summary in report.methods if summary.quality["kl"]], report)


def _legend_of_methods(axes: Axes, summaries: Sequence[MethodSummary], report: Report) -> None:
    """The methods' markers below the panel, in as many columns as their names allow."""
    from matplotlib.lines import Line2D

    handles = []
    for summary in summaries:
        color, marker = _style(report.methods.index(summary))
        name = _short(summary.method)
        handles.append(Line2D([], [], color=color, marker=marker, linestyle="", markersize=7, label=name))
    axes.legend(handles=handles, ncols=_legend_columns(report), **_BELOW)


def _legend_columns(report: Report) -> int:
    widths = [len(_short(summary.method)) + 5 for summary in report.methods]  # with the marker
    if sum(widths) <= _LEGEND_COLUMNS:
        return len(widths)
    return max(1, _LEGEND_COLUMNS // max(widths))


def _panel_inches(report: Report) -> tuple[float, float]:
    """Width and height of a panel, higher with a long legend or many methods."""
    lines = math.ceil(len(report.methods) / _legend_columns(report))
    width, height = _PANEL_INCHES
    return width, height + 0.18 * max(0, lines - 2)


def _reach(interval: Interval) -> list[list[float]]:
    """How far the ends lie below and above the value."""
    return [[max(0.0, interval.mean - interval.low)], [max(0.0, interval.high - interval.mean)]]


def _style(index: int) -> tuple[str, str]:
    """Colour and marker of a method; full recompute's is the colour of the text."""
    return (INK, "s") if index == 0 else _STYLES[(index - 1) % len(_STYLES)]


def _short(name: str) -> str:
    return visible(textwrap.shorten(name, _LONGEST_NAME, placeholder="...") if " " in name else name[:_LONGEST_NAME])


def _folded(name: str) -> str:
    """A long selector's parameters in a line below its name."""
    return name.replace(":", ":\n", 1) if len(name) > _FOLDED_NAME else name


def _draw_changes(axes: Axes, report: Report) -> None:
    """A bar for each method: the share of changed answers, divided by what the changes mean where this is known."""
    summaries = report.methods[1:]
    places = range(len(summaries))
    has_meanings = any(any(summary.comparison.meanings) for summary in summaries)
    starts = [0.0] * len(summaries)
    thickness = min(0.55, 0.15 * len(summaries))  # two bars are no wider than four
    for meaning, color in enumerate(_MEANING_COLORS if has_meanings else ()):
        shares = [100 * summary.comparison.meanings[meaning] / summary.comparison.answers for summary in summaries]
        axes.barh(places, shares, left=starts, height=thickness, color=color, label=MEANINGS[meaning])
        starts = [start + share for start, share in zip(starts, shares, strict=True)]
    unknown = [100 * summary.comparison.flips.mean - start for summary, start in zip(summaries, starts, strict=True)]
    if max(unknown, default=0) > 1e-6:
        axes.barh(
            places, unknown, left=starts, height=thickness, color=_CHANGED, label="changed" if has_meanings else None
        )
    for place, summary in zip(places, summaries, strict=True):
        _draw_interval(axes, place, summary)
    axes.set_yticks(places, [_folded(_short(summary.method)) for summary in summaries])
    axes.set_ylim(len(summaries) - 0.4, -0.6)
    axes.set_xlim(0, 104)
    axes.set_xlabel("% of answers")
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if has_meanings:
        axes.legend(ncols=2, **_BELOW)


def _draw_interval(axes: Axes, place: int, summary: MethodSummary) -> None:
    flips = summary.comparison.flips
    share = Interval(100 * flips.mean, 100 * flips.low, 100 * flips.high)
    axes.errorbar([share.mean], [place], xerr=_reach(share), color=INK, capsize=3, linewidth=1.2, zorder=4)
