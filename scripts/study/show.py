"""Show a file of results: tables for a terminal or a document, and a picture of fidelity against cost."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from _results import markdown
from blend.errors import DatasetError
from blend.eval.show import save_figure
from blend.intervals import Interval
from study.methods import BASELINE, FULL, ratio_of
from study.rows import Row, read_rows
from study.stats import Summary, kl_interval, paired, sets_of, summaries

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_COLUMNS = (
    "median KL | top-1 | F1 to full's answer | agreement with gold | difference to full | rows | TTFT | selecting"
)


def tables(rows: Sequence[Row], methods: Sequence[str] = (), baseline: str = BASELINE) -> Iterator[str]:
    """Markdown: KL a set, gold a set, changed answers, and everything over the sets, after full recompute.

    methods: these, whose rows must be paired (`stats.paired`); none means all, from the lowest KL.
    """
    by_method = {summary.method: summary for summary in summaries(rows, baseline)}
    full = by_method.pop(FULL)
    chosen = [by_method[name] for name in methods]
    if not methods:
        chosen = sorted(by_method.values(), key=lambda summary: summary.kl or 0.0)
    heads = " | ".join(f"{records.name} ({records.records})" for records in full.sets)
    yield from markdown(f"KL | {heads}", ([s.method, *(number(records.kl) for records in s.sets)] for s in chosen))
    cells = ([s.method, *(_difference(records.difference) for records in s.sets)] for s in chosen)
    yield from markdown(f"gold, difference to full | {heads}", cells)
    if any(summary.comparison for summary in chosen):
        yield from markdown("answers | changed | what the changes mean", map(_changes, chosen))
    yield from markdown(f"method | KL, mean over sets | to {baseline} | {_COLUMNS}", map(_cells, [full, *chosen]))


def _changes(summary: Summary) -> list[str]:
    comparison = summary.comparison
    if comparison is None:
        return [summary.method, "-", "-"]
    meanings = ", ".join(f"{count} {meaning}" for meaning, count in comparison.meanings.in_words.items())
    return [summary.method, comparison.share_in_words, meanings or "-"]


def number(value: float | None, digits: int = 3) -> str:
    """A number or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def _cells(summary: Summary) -> list[str]:
    return [
        *(summary.method, number(summary.kl), _ratio(summary.to_baseline), number(summary.median_kl)),
        *(number(summary.top1, 2), number(summary.f1_full, 2), number(summary.gold, 2)),
        *(_difference(summary.difference), f"{summary.share:.0%}", f"{summary.speedup:.1f}x"),
        f"{summary.selecting:.1%}",
    ]


def _ratio(interval: Interval | None) -> str:
    return f"{interval.mean:.2f} [{interval.low:.2f},{interval.high:.2f}]" if interval else "-"


def _difference(interval: Interval | None) -> str:
    return f"{interval.mean:+.3f} [{interval.low:+.2f}, {interval.high:+.2f}]" if interval else "-"


# Okabe and Ito's palette, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_MARKERS = "os^vDP*X<>h"
_APART = 1.13  # least ratio of the costs of two points that both have a label


class Point(NamedTuple):
    """A method at a ratio: percent of full prefill's rows and TTFT, mean KL and the ends of its interval."""

    rows: float
    ttft: float
    kl: float
    low: float
    high: float
    percent: int


def families(rows: Sequence[Row]) -> dict[str, list[Point]]:
    """Name without its ratio -> points by rising cost; the names with the most points first."""
    points: defaultdict[str, list[Point]] = defaultdict(list)
    for method in sorted({row.method for row in rows} - {FULL, "all"}):
        family, percent = ratio_of(method)
        measured = [row for row in rows if row.method == method]
        interval = kl_interval(measured, sets_of(rows))
        if interval is not None:
            share = mean(row.share for row in measured) * 100
            ttft = median(row.ttft_s / row.full_ttft_s for row in measured) * 100
            points[family].append(Point(share, ttft, interval.mean, interval.low, interval.high, percent))
    return {name: sorted(points[name]) for name in sorted(points, key=lambda name: (-len(points[name]), name))}


def draw_frontier(model: str, rows: Sequence[Row]) -> Figure:
    """Two panels: KL against rows computed, and against TTFT."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    by_rows, by_ttft = figure.subplots(1, 2, sharey=True)
    for number, (family, points) in enumerate(families(rows).items()):
        _line(by_rows, number, family, points, [point.rows for point in points])
        _line(by_ttft, number, family, points, [point.ttft for point in points])
    _label(by_rows, by_ttft)
    records = len({(row.set, row.id) for row in rows})
    figure.suptitle(f"{model}: fidelity against cost; {records} records, sets: {len(sets_of(rows))}, 95 % intervals")
    return figure


def shown_name(family: str) -> str:
    """A family as the documentation calls it."""
    name = {"reuse": "plain reuse", BASELINE: f"{BASELINE} (CacheBlend's)"}.get(family, family)
    return re.sub("^query\\b", "query_guided", name)


def _line(axes: Axes, number: int, family: str, points: Sequence[Point], x: Sequence[float]) -> None:
    """A family's points, joined. Ratios stand below the first line and above the others, where a falling line leaves room."""
    colour = _COLOURS[number % len(_COLOURS)]
    marker = _MARKERS[number % len(_MARKERS)]
    spread = [[point.kl - point.low for point in points], [point.high - point.kl for point in points]]
    kl = [point.kl for point in points]
    form: dict[str, Any] = {"marker": marker, "color": colour, "capsize": 2, "elinewidth": 0.8, "lw": 1.4}
    axes.errorbar(x, kl, spread, label=shown_name(family), **form)
    side: dict[str, Any] = {"xytext": (5, 5), "va": "bottom"}
    if number == 0:
        side = {"xytext": (-5, -6), "ha": "right", "va": "top"}
    side["bbox"] = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.4}
    if len(points) == 1:
        return
    right = math.inf
    for place, point in reversed(list(zip(x, points, strict=True))):
        if place * _APART < right:
            right = place
            at = (place, point.kl)
            axes.annotate(f"{point.percent} %", at, textcoords="offset points", fontsize=8.5, color=colour, **side)


def _label(by_rows: Axes, by_ttft: Axes) -> None:
    from matplotlib.ticker import LogLocator

    by_rows.set(xlabel="rows computed, % of full prefill", ylabel="mean KL to full recompute, nats per token")
    by_ttft.set(xlabel="TTFT, % of full prefill (median)")
    by_ttft.legend(fontsize=9, frameon=False)
    for axes in (by_rows, by_ttft):
        axes.set(xscale="log", yscale="log")
        axes.margins(x=0.08)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)


def show(
    path: Path, *, methods: Sequence[str] = (), baseline: str = BASELINE, picture: Path | None = None
) -> Iterator[str]:
    """The lines to print, a model at a time; the picture is written on the way.

    methods: these, on the records that have all of them; none means all. Several models get a picture each, named after them.
    Raises `DatasetError` for a file without results, `ConfigError` where no record has all methods, and as `read_rows` and
    `save_figure` do.
    """
    by_model: defaultdict[str, list[Row]] = defaultdict(list)
    for row in read_rows(path):
        by_model[row.model].append(row)
    if not by_model:
        raise DatasetError(f"{path}: holds no results; name a file that bench_selection wrote")
    for model, rows in by_model.items():
        compared = paired(rows, methods, baseline) if methods else rows
        yield from ("", model, *tables(compared, methods, baseline))
        if picture is not None:
            drawn = [row for row in compared if not methods or row.method in (FULL, *methods)]
            target = picture if len(by_model) == 1 else _of_model(picture, model)
            save_figure(target, partial(draw_frontier, model, drawn))
            yield f"wrote {target}"


def _of_model(picture: Path, model: str) -> Path:
    """The picture's path with the model's name in it, which may itself be a path or have a slash."""
    name = re.sub(r"[^\w.-]+", "_", model)
    return picture.with_stem(f"{picture.stem}-{name}")
