"""The frontier as a picture: KL against rows computed and against TTFT; the ratios of one method make a line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, NamedTuple

from blend.errors import ConfigError
from blend.eval.report.labels import place_labels
from blend.eval.report.output import write_whole
from blend.eval.report.picture import SUFFIXES
from blend.eval.selection.naming import FULL, ratio_of
from blend.eval.selection.row import Row
from blend.eval.selection.stats import kl_interval, sets_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_MARKERS = "os^vDP*X<>h"
_AS_IN_TABLES = {"query": "kvblend", "reuse": "plain reuse"}


class Point(NamedTuple):
    """A method at a ratio: percent of full prefill's rows and TTFT, mean KL and the ends of its interval."""

    rows: float
    ttft: float
    kl: float
    low: float
    high: float
    percent: int


def write_frontier(model: str, rows: Sequence[Row], path: Path) -> None:
    """Draw every method but those that recompute everything, to a .png, .svg or .pdf file, whole or not at all.

    Raises `ConfigError` for another suffix, a place that cannot be written, or when matplotlib is missing.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path}: a picture ends in one of {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401, ICN001
    except ImportError as error:
        raise ConfigError("the picture needs matplotlib: pip install 'kvblend[report]'") from error
    drawn = BytesIO()
    _draw(model, rows).savefig(drawn, format=path.suffix[1:] or "png", dpi=130)
    write_whole(path, drawn.getvalue())


def families(rows: Sequence[Row]) -> dict[str, list[Point]]:
    """Name without its ratio -> points by rising cost; the names with the most points first."""
    found: defaultdict[str, list[Point]] = defaultdict(list)
    for method in sorted({row.method for row in rows} - {FULL, "all"}):
        family, percent = ratio_of(method)
        mine = [row for row in rows if row.method == method]
        interval = kl_interval(mine, sets_of(rows))
        if interval is not None:
            share = mean(row.share for row in mine) * 100
            ttft = median(row.ttft_s / row.full_ttft_s for row in mine) * 100
            found[family].append(Point(share, ttft, interval.mean, interval.low, interval.high, percent))
    return {name: sorted(found[name]) for name in sorted(found, key=lambda name: (-len(found[name]), name))}


def _draw(model: str, rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    by_rows, by_ttft = figure.subplots(1, 2, sharey=True)
    for number, (family, points) in enumerate(families(rows).items()):
        style = (_COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)])
        _line(by_rows, family, points, [point.rows for point in points], style)
        _line(by_ttft, family, points, [point.ttft for point in points], style)
    _label(by_rows, by_ttft)
    records, sets = len({(row.set, row.id) for row in rows}), len(sets_of(rows))
    figure.suptitle(
        f"{model}: fidelity against cost; {records} records, mean over {sets} set{'' if sets == 1 else 's'}, 95 % intervals"
    )
    figure.draw_without_rendering()
    for axes in (by_rows, by_ttft):
        place_labels(axes)
    return figure


def _line(axes: Axes, family: str, points: Sequence[Point], x: Sequence[float], style: tuple[str, str]) -> None:
    colour, marker = style
    spread = [[point.kl - point.low for point in points], [point.high - point.kl for point in points]]
    kl = [point.kl for point in points]
    axes.errorbar(
        x,
        kl,
        spread,
        marker=marker,
        color=colour,
        capsize=2,
        elinewidth=0.8,
        lw=1.4,
        label=_AS_IN_TABLES.get(family, family),
    )
    if len(points) > 1:
        for place, point in zip(x, points, strict=True):
            text, at = f"{point.percent} %", (place, point.kl)
            axes.annotate(
                text,
                at,
                (0, 0),
                textcoords="offset points",
                fontsize=8,
                color=colour,
                arrowprops={"arrowstyle": "-", "lw": 0.4},
            )


def _label(by_rows: Axes, by_ttft: Axes) -> None:
    from matplotlib.ticker import LogLocator

    by_rows.set(
        xlabel="rows computed, % of full prefill", ylabel="mean KL to full recompute, nats per token", yscale="log"
    )
    by_ttft.set(xlabel="TTFT, % of full prefill (median)")
    by_rows.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    by_rows.yaxis.set_major_formatter("{x:g}")
    by_rows.yaxis.set_minor_formatter("")
    by_ttft.legend(fontsize=9, frameon=False)
    for axes in (by_rows, by_ttft):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
