"""The picture of a census: tokens by turn, and what each way of reuse computes. Needs matplotlib, of the extra `[report]`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from blend.census.matching import CLASSES
from blend.census.show import Findings
from blend.eval.output import write_whole
from blend.eval.picture import drawn
from blend.text import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {"prefix": "#0072B2", "shifted": "#56B4E9", "near": "#E69F00", "new": "#BBBBBB"}
_WORDS = {"near": "near (edited)"}
_BLENDING = "#009E73"


def write_picture(findings: Findings, path: Path) -> None:
    """Draw a census to a file that `check_picture` accepts; the same census gives the same file. Raises `ConfigError`."""
    write_whole(path, drawn(lambda: draw(findings), path.suffix.lower()[1:]))


def draw(findings: Findings) -> Figure:
    """Tokens by turn on the left, what each way of reuse computes on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    turns, ways = figure.subplots(1, 2)
    _draw_turns(turns, findings)
    _draw_ways(ways, findings)
    for axes in (turns, ways):
        axes.spines[["top", "right"]].set_visible(False)
    # No title is TeX, whatever a file is called.
    figure.suptitle(visible(findings.title), fontweight="bold", parse_math=False)
    return figure


def _draw_turns(axes: Axes, findings: Findings) -> None:
    """A bar for each group of turns, the classes of its tokens on each other."""
    turns = {words: counts for words, counts in findings.census.by_turn.items() if counts.any()}
    thousands = np.array([*turns.values()]) / 1000
    below = np.zeros(len(turns))
    for number, name in enumerate(CLASSES):
        label = _WORDS.get(name, name)
        axes.bar([*turns], thousands[:, number], bottom=below, width=0.7, label=label, color=_COLORS[name])
        below += thousands[:, number]
    axes.set_xlim(-0.6, max(len(turns), 4) - 0.4)  # few bars stay as narrow as many
    axes.set_xlabel("turn of the conversation")
    axes.set_ylabel("thousands of tokens")
    axes.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _draw_ways(axes: Axes, findings: Findings) -> None:
    """A bar for what each way of reuse computes, in seconds where a rate is known, with its share of all."""
    rates = findings.rates
    ways = findings.census.ways
    costs = [rates.seconds(computed) if rates else computed.rows / 1000 for computed in ways.values()]
    bars = axes.barh(range(len(ways)), costs, color=[_color(way) for way in ways])
    axes.bar_label(bars, [f"{cost / costs[0]:.0%}" for cost in costs], padding=3)
    axes.set_yticks(range(len(ways)), [way.replace(", and", ",\nand") for way in ways])
    axes.invert_yaxis()
    axes.set_xlim(0, max(costs) * 1.12)
    axes.set_xlabel("seconds of prefill" if rates else "thousands of tokens that prefill computes")


def _color(way: str) -> str:
    if "blending" in way:
        return _BLENDING
    return _COLORS["prefix"] if "exact" in way else _COLORS["new"]
