"""Servers over rates, drawn: time to first token, answers within it, time per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from _results import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Value = Callable[[Row], float | None]
# Okabe and Ito's palette, which colour-blind readers can tell apart, each with its own marker.
STYLES = (("#0072B2", "o"), ("#000000", "s"), ("#D55E00", "^"), ("#009E73", "D"))


def draw(rows: Sequence[Row], slos: Sequence[float], title: str, foot: str, file: Path) -> None:
    """Write the picture of pooled rows to a .png, .svg or .pdf file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    first, answers, pace = figure.subplots(1, 3)
    _lines(first, rows, lambda row: row["ttft_s"]["p95"], lambda row: row["ttft_s"]["p50"])
    first.set(yscale="log", title="time to first token: p95, dashed p50", ylabel="seconds")
    for slo in slos:
        first.axhline(slo, color="#999999", linewidth=0.8, linestyle=":")
    first_slo = f"{slos[0]:g}"
    _lines(answers, rows, lambda row: row["within"][first_slo], lambda row: row["completed_per_s"])
    answers.set(title=f"answers: first token within {first_slo} s, dashed all", ylabel="a second")
    ends = [0.0, max(row["rate"] for row in rows)]
    answers.plot(ends, ends, color="#999999", linewidth=0.8, linestyle=":")
    _lines(pace, rows, lambda row: row["tpot_s"]["p95"], lambda row: row["tpot_s"]["p50"])
    pace.set(title="time per token after the first: p95, dashed p50", ylabel="seconds")
    for axes in (first, answers, pace):
        axes.set_xlabel("requests offered per second")
        axes.grid(alpha=0.25)
        axes.title.set_fontsize(9.5)
        axes.margins(y=0.1)
    first.legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11.5, fontweight="bold", parse_math=False)
    figure.supxlabel(foot, fontsize=7.5, color="#555555", parse_math=False)
    figure.savefig(file, dpi=160)


def _lines(axes: Axes, rows: Sequence[Row], solid: Value, dashed: Value) -> None:
    """A server's values over its rates; where a value is missing, the line has a gap."""
    for number, name in enumerate(dict.fromkeys(row["server"] for row in rows)):
        held = sorted((row for row in rows if row["server"] == name), key=lambda row: float(row["rate"]))
        rates = [row["rate"] for row in held]
        color, marker = STYLES[number % len(STYLES)]
        axes.plot(rates, _values(held, solid), color=color, marker=marker, markersize=5, label=name)
        axes.plot(rates, _values(held, dashed), color=color, linestyle="--", linewidth=1, alpha=0.7)


def _values(rows: Sequence[Row], value: Value) -> list[float]:
    found = [value(row) for row in rows]
    return [float("nan") if one is None else one for one in found]
