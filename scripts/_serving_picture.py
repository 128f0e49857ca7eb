"""The picture of servers under load: time to first token, answers a second and time per token against the load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from _results import Row, grouped
from blend.eval.output import write_whole
from blend.eval.picture import drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart, each with its own marker.
_STYLES = (("#0072B2", "o"), ("#1b1f24", "s"), ("#D55E00", "^"))
_GREY = "#8C96A0"
Value = Callable[[Row], float | None]


def write_picture(rows: Sequence[Row], slos: Sequence[float], title: str, about: str, path: Path) -> None:
    """Draw pooled rows, one of each server and rate, into a PNG or SVG file.

    Args:
        rows: As `summary` makes them, with `server` and `rate`.
        slos: Seconds of p95 TTFT, drawn as lines; the first says which answers are in time.
        title: Above the picture.
        about: Below it.
        path: The file.

    Raises:
        ConfigError: for a file that cannot be written, and without matplotlib.
    """
    write_whole(path, drawn(lambda: _draw(rows, slos, title, about), path.suffix.lower().removeprefix(".")))


def _draw(rows: Sequence[Row], slos: Sequence[float], title: str, about: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    first, answers, pace = figure.subplots(1, 3)
    _lines(first, rows, lambda row: row["ttft_s"]["p95"], lambda row: row["ttft_s"]["p50"])
    first.set(yscale="log", title="time to first token: p95, dashed p50", ylabel="seconds")
    first.yaxis.set_major_formatter("{x:g}")  # powers would be written in TeX
    for slo in slos:
        first.axhline(slo, color=_GREY, linewidth=0.8, linestyle=":")
    _lines(answers, rows, lambda row: row["in_time_per_s"], lambda row: row["completed_per_s"])
    answers.set(title=f"answers: first token within {slos[0]:g} s, dashed all", ylabel="a second")
    answers.set_ylim(bottom=0)
    ends = [0.0, max(row["rate"] for row in rows)]
    answers.plot(ends, ends, color=_GREY, linewidth=0.8, linestyle=":")
    _lines(pace, rows, lambda row: row["gap_p99_s"], lambda row: row["tpot_p50_s"])
    pace.set(title="gap p99, dashed median per token", ylabel="seconds", ylim=(0, None))
    for axes in (first, answers, pace):
        axes.set_xlabel("requests a second that come")
        axes.grid(alpha=0.25)
        axes.title.set_fontsize(9.5)
        axes.margins(y=0.1)
    first.legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11.5, fontweight="bold")
    figure.supxlabel(about, fontsize=7.5)
    return figure


def _lines(axes: Axes, rows: Sequence[Row], solid: Value, dashed: Value) -> None:
    """A server's values over its rates; where a value is missing, the line has a gap."""
    for (color, marker), ((name,), points) in zip(_STYLES, grouped(rows, "server").items(), strict=False):
        points.sort(key=lambda row: float(row["rate"]))
        rates = [row["rate"] for row in points]
        for value, style in ((solid, "-"), (dashed, "--")):
            heights = [float("nan") if (height := value(row)) is None else height for row in points]
            label = name if value is solid else None
            axes.plot(rates, heights, style, color=color, marker=marker, markersize=4, linewidth=1.4, label=label)
