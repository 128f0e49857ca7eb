"""Two pictures of an analyzed prompt, token by token, out of its JSON. They need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _ORANGE, _GREY, _PALE = "#0072B2", "#C64F00", "#6B7480", "#AEB8C4"
_BANDS = ("#EEF2F7", "#FFFFFF")
_INCHES = (9.0, 3.6)
_LONGEST_TITLE = 25
_SMOOTH = 9  # tokens of a moving mean


def draw_deviation(prompt: Mapping[str, Any]) -> Figure:
    """How far each chunk row's stored values are from full prefill's, and from the blend's.

    Args:
        prompt: one of the `prompts` of `analysis_document`, or of the file that `blend analyze --json` writes.

    """
    figure, axes = _figure()
    before, after = _score(prompt, "before"), _score(prompt, "after")
    _draw_chunks(axes, prompt)
    rows = np.arange(len(before))
    axes.plot(rows, 100 * before, ".", color=_ORANGE, markersize=2.5, alpha=0.55)
    for values, color, name in ((before, _ORANGE, "stored alone"), (after, _BLUE, "after blending")):
        axes.plot(
            rows, 100 * _smoothed(prompt, values), color=color, linewidth=1.6, label=f"{name}, mean of {_SMOOTH} tokens"
        )
    axes.set_ylabel("distance of values\nto full prefill's, % of norm")
    axes.set_ylim(0, 100 * float(np.nanquantile(before, 0.995)))
    axes.legend(loc="upper left", frameon=True, framealpha=0.9, edgecolor="none", fontsize=8.5, ncols=2)
    return figure


def draw_attention(prompt: Mapping[str, Any]) -> Figure:
    """How much of the question's attention each chunk row gets under full prefill; recomputed rows stand out."""
    figure, axes = _figure()
    attention = _score(prompt, "asked")
    _draw_chunks(axes, prompt)
    rows = np.arange(len(attention))
    is_exact = rows < _chunks(prompt)[0]["stop"]
    is_recomputed = np.isin(rows, prompt["recomputed"]) & ~is_exact
    groups = (
        (is_exact, _PALE, "first chunk, exact as stored"),
        (~is_exact & ~is_recomputed, _GREY, "kept as stored"),
        (is_recomputed, _BLUE, "recomputed"),
    )
    total = np.nansum(attention)
    for is_member, color, name in groups:
        chosen = is_member & ~np.isnan(attention)
        label = f"{name}: {chosen.sum():,} rows, {attention[chosen].sum() / total:.0%}"
        axes.vlines(rows[chosen], 0, 100 * attention[chosen], color=color, linewidth=1.1, label=label)
    axes.set_ylabel("attention of the question,\n% of all its attention")
    _limit(axes, 100 * attention)
    title = "rows, and their share of what all these rows get"
    axes.legend(loc="upper left", framealpha=0.9, edgecolor="none", fontsize=8.5, title=title, title_fontsize=8.5)
    return figure


def _limit(axes: Axes, values: ndarray) -> None:
    """Fit the axis to the second largest value where the largest would press all others down; it is then written out."""
    highest = int(np.nanargmax(values))
    second = float(np.nanmax(np.delete(values, highest)))
    is_outlier = values[highest] > 2 * second
    top = 1.35 * second if is_outlier else 1.1 * float(values[highest])
    axes.set_ylim(0, top)
    if is_outlier:
        axes.text(highest - 4, top, f"{values[highest]:.2g} \u2191", ha="right", va="top", fontsize=8.5, color=_BLUE)


def _figure() -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("token of the prompt")
    return figure, axes


def _score(prompt: Mapping[str, Any], name: str) -> ndarray:
    """A score by token, NaN outside of the chunks."""
    (values,) = (score["values"] for score in prompt["scores"] if score["name"] == name)
    return np.array([np.nan if value is None else value for value in values])


def _smoothed(prompt: Mapping[str, Any], values: ndarray) -> ndarray:
    """The moving mean within each chunk."""
    means = np.full(len(values), np.nan)
    for chunk in _chunks(prompt):
        part = values[chunk["start"] : chunk["stop"]]
        window = np.ones(min(_SMOOTH, len(part)))
        weights = np.convolve(np.ones(len(part)), window, "same")
        means[chunk["start"] : chunk["stop"]] = np.convolve(part, window, "same") / weights
    return means


def _chunks(prompt: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    chunks: Sequence[Mapping[str, Any]] = prompt["segments"][1:-1]
    return chunks


def _draw_chunks(axes: Axes, prompt: Mapping[str, Any]) -> None:
    """A band for each chunk with its title above."""
    chunks = _chunks(prompt)
    axes.set_xlim(chunks[0]["start"], chunks[-1]["stop"])
    for number, chunk in enumerate(chunks):
        axes.axvspan(chunk["start"], chunk["stop"], color=_BANDS[number % 2], zorder=0, linewidth=0)
        name = chunk.get("title") or chunk["name"]
        title = name if len(name) <= _LONGEST_TITLE else "\u2026" + name[-_LONGEST_TITLE:].lstrip(" >")
        middle = (chunk["start"] + chunk["stop"]) / 2
        place = axes.get_xaxis_transform()
        axes.text(middle, 1.02, title, transform=place, ha="center", va="bottom", fontsize=8, parse_math=False)
