"""Pictures of a study's results: KL against rows and time to first token, and vLLM's load generator by rate."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from statistics import mean, median
from typing import TYPE_CHECKING, NamedTuple

from _results import Results, Row, grouped
from blend.errors import DatasetError
from blend.intervals import Interval
from blend.text import counted
from study.tables import BASELINE, BASELINE_RATIO, FULL, GRADUAL, kl_interval, paired

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")  # of Okabe and Ito
MARKERS = "os^vDP*X"
LABEL_OFFSETS = ((6, 4), (-26, 4), (6, -10), (-26, -10))  # of the ratios from their points, in points of type
_WITH_RATIO = re.compile(r"(?P<name>.*) (?P<percent>\d+) %")
_NAMES = {BASELINE: "hkvd, published form", GRADUAL: "gradual, published form", "reuse": "plain reuse"}


class Point(NamedTuple):
    """One method.

    percent: of the rows that it recomputes; None if it has no ratio. rows, ttft: in percent of full prefill; None if unknown.
    """

    percent: int | None
    kl: Interval
    rows: float
    ttft: float | None


def draw_selection(results: Results, methods: Sequence[str] = ()) -> Figure:
    """KL against rows and against TTFT, a line for each selector over its ratios; of these methods or of all.

    Methods are compared on the records that have all of them. Raises `DatasetError` where there is none.
    """
    from matplotlib.figure import Figure

    rows = results.rows("rows")
    models = {row["model"] for row in rows}
    if len(models) != 1:
        raise DatasetError(f"{results.file} holds results of {len(models)} models; a picture shows one")
    names = methods or [name for name in dict.fromkeys(row["method"] for row in rows) if name != FULL]
    common = paired(rows, names, names[0])
    lines = _lines(common, names)
    figure = Figure(figsize=(13, 5.2), layout="constrained")
    by_rows, by_time = figure.subplots(1, 2, sharey=True)
    for axes, cost, label in ((by_rows, "rows", "rows computed"), (by_time, "ttft", "TTFT, median")):
        _draw_lines(axes, lines, cost)
        axes.set_xlabel(f"{label}, % of full prefill")
    by_rows.set_ylabel("mean KL to full recompute, nats per token")
    records = grouped(common, "set", "id")
    sets = {name for name, _ in records}
    figure.suptitle(
        f"{models.pop()}: {counted(len(records), 'record')}, mean over {counted(len(sets), 'set')}, 95 % intervals"
    )
    figure.legend(*by_rows.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _lines(rows: Iterable[Row], names: Sequence[str]) -> dict[str, list[Point]]:
    """The points of each selector, by ascending ratio."""
    by_method = {name: of_method for (name,), of_method in grouped(rows, "method").items()}
    lines: dict[str, list[Point]] = {}
    for name in names:
        selector, percent = _parts(name)
        of_method = by_method[name]
        share = mean(row["share"] for row in of_method)
        times = [100 * row["ttft_s"] / row["full_ttft_s"] for row in of_method if row["ttft_s"] is not None]
        time = median(times) if times else None
        lines.setdefault(selector, []).append(Point(percent, kl_interval(of_method), 100 * share, time))
    return {selector: sorted(points, key=lambda point: point.percent or 0) for selector, points in lines.items()}


def _parts(method: str) -> tuple[str, int | None]:
    """A method's selector, and its ratio in percent."""
    match = _WITH_RATIO.fullmatch(method)
    if match is not None:
        return match["name"], int(match["percent"])
    return method, round(100 * BASELINE_RATIO) if method in (BASELINE, GRADUAL) else None


def _draw_lines(axes: Axes, lines: dict[str, list[Point]], cost: str) -> None:
    """A line for each selector, with intervals of KL and the ratio at every point."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for number, (selector, all_points) in enumerate(lines.items()):
        points = [point for point in all_points if getattr(point, cost) is not None]
        color = COLORS[number % len(COLORS)]
        costs = [getattr(point, cost) for point in points]
        means = [point.kl.mean for point in points]
        below = [point.kl.mean - point.kl.low for point in points]
        above = [point.kl.high - point.kl.mean for point in points]
        axes.errorbar(
            costs,
            means,
            yerr=[below, above],
            color=color,
            marker=MARKERS[number % len(MARKERS)],
            capsize=3,
            elinewidth=1,
            label=_NAMES.get(selector, selector),
        )
        for point, at in zip(points, costs, strict=True):
            if point.percent is not None:
                text = f"{point.percent} %"
                offset = LABEL_OFFSETS[number % len(LABEL_OFFSETS)]
                axes.annotate(text, (at, point.kl.mean), offset, textcoords="offset points", color=color, fontsize=8)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(left=0)
    axes.margins(x=0.08)  # room for the ratio at the last point
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw_generator(results: Results) -> Figure:
    """Time to first token and time per token of vLLM with kvblend and without, by requests a second."""
    from matplotlib.figure import Figure

    by_server = grouped(sorted(results.rows("generator"), key=lambda row: float(row["rate"])), "server")
    if not by_server:
        raise DatasetError(f"{results.file}: holds no rows of the load generator; measure them with bench_vllm")
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    first, next_ones = figure.subplots(1, 2)
    for number, ((server,), rows) in enumerate(by_server.items()):
        rates = [row["rate"] for row in rows]
        look = {"color": COLORS[number], "marker": MARKERS[number]}
        for percentile, style in (("p95", "-"), ("median", "--")):
            seconds = [row[f"{percentile}_ttft_ms"] / 1000 for row in rows]
            first.plot(rates, seconds, style, label=f"{server}, {percentile}", **look)
        next_ones.plot(rates, [row["median_tpot_ms"] / 1000 for row in rows], "--", **look)
    for axes, title in ((first, "time to first token"), (next_ones, "time per token after the first, median")):
        axes.set_title(title)
        axes.set_xlabel("requests offered per second")
        axes.set_ylabel("seconds")
        axes.set_ylim(bottom=0)
        axes.set_xticks(sorted({row["rate"] for row in results.rows("generator")}))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    options = results.content.get("options", {})
    named = [str(options[name]) for name in ("model", "dtype") if name in options]
    figure.suptitle(", ".join(["vllm bench serve", *named]))
    return figure
