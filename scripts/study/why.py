"""The picture of reports: KL to full prefill against the rows that selectors recompute."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from blend.errors import DatasetError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of a selector as a report names it: its name in the picture, its colour, its marker.
_LINES = {
    "random": ("random rows", "#8C96A0", "s"),
    "hkvd": ("rows that deviate most at the second layer", "#C64F00", "^"),
    "query_guided": ("rows that the question reads most", "#0072B2", "o"),
}
_DEFAULT = ("the same, with kvblend's second cache and correction", "#009E73", "D")
_METHOD = re.compile(r"(?:(?P<selector>\w+) )?(?P<percent>[\d.]+)%")


def draw_kl(bare: Mapping[str, Any], default: Mapping[str, Any]) -> Figure:
    """One line a selector over its ratios, and one for kvblend as it is by default.

    Args:
        bare: of `blend report --json`, without correction and surrogate context.
        default: the same questions with both, by the default selector.

    Raises:
        DatasetError: they are not of the same questions, or have no ratios.

    """
    from matplotlib.figure import Figure

    if bare["workload"] != default["workload"] or bare["record_count"] != default["record_count"]:
        raise DatasetError("the two reports are of different questions; make them of the same ones")
    figure = Figure(figsize=(9.0, 3.9), layout="constrained", facecolor="white")
    axes = figure.subplots()
    points = _by_selector(bare["methods"])
    for selector, (name, color, marker) in _LINES.items():
        axes.plot(*_columns(points.get(selector, [])), marker=marker, color=color, label=name, linewidth=1.6)
    name, color, marker = _DEFAULT
    of_default = [point for line in _by_selector(default["methods"]).values() for point in line]
    axes.plot(*_columns(of_default), marker=marker, color=color, label=name, linewidth=1.6)
    reuse = bare["methods"]["reuse"]["kl"]
    axes.axhline(reuse, color="#1b1f24", linestyle=(0, (4, 3)), linewidth=1)
    axes.text(42, reuse, "plain reuse: no row recomputed", va="bottom", ha="right", fontsize=8.5)
    axes.set_xlabel("rows of the chunks that are recomputed, %")
    axes.set_ylabel("KL to full prefill,\nnats a token of the answer")
    axes.set_ylim(0, 1.15 * reuse)
    axes.set_xlim(0, 42)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8.5, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return figure


Point = tuple[float, float]


def _by_selector(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Point]]:
    """The percent and the KL of each method with a ratio, by ascending ratio."""
    points: dict[str, list[Point]] = {}
    for name, measured in methods.items():
        match = _METHOD.fullmatch(name)
        if match:
            points.setdefault(match["selector"] or "", []).append((float(match["percent"]), measured["kl"]))
    if not points:
        raise DatasetError("the report has one ratio; give `blend report` several --ratio")
    return {selector: sorted(line) for selector, line in points.items()}


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
