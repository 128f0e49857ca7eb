"""What each chart shows, in one sentence with its numbers."""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from blend.analyze.attention import MASSES, THRESHOLDS
from blend.analyze.numbers import (
    HIGH,
    START_BINS,
    TOP,
    CrossNumbers,
    DeviationNumbers,
    Numbers,
    Places,
    SparsityNumbers,
    bin_names,
    divide,
)
from blend.analyze.study import KINDS


def readings(numbers: Numbers) -> dict[str, str]:
    """A sentence for every picture of the averaged part, by the picture's name."""
    return {
        "sparsity": _sparsity(numbers.sparsity),
        "thresholds": _thresholds(numbers.sparsity),
        "deviation": _deviation(numbers.keys, numbers.values),
        "top": _top(numbers.values),
        "correlation": _correlation(numbers.values),
        "starts": _starts(numbers.places),
        "ends": _ends(numbers.places),
        "kinds": _kinds(numbers.places),
        "cross": _cross(numbers.cross),
        "variation": _variation(numbers.cross),
        "reads": _reads(numbers.cross),
    }


def _sparsity(sparsity: SparsityNumbers) -> str:
    mean = sparsity.keys.mean((0, 1))
    by_layer = sparsity.keys[:, :, 0].mean(1)
    few, many = int(by_layer.argmin()), int(by_layer.argmax())
    masses = ", ".join(f"{count:.0f} hold {mass:.0%}" for count, mass in zip(mean, MASSES, strict=True))
    return (
        f"Of {sparsity.visible.mean():.0f} keys that a row may look at on average, {masses} of its attention; "
        f"for {MASSES[0]:.0%}, layer {few} needs the fewest ({by_layer[few]:.0f}) and "
        f"layer {many} the most ({by_layer[many]:.0f})."
    )


def _thresholds(sparsity: SparsityNumbers) -> str:
    below = sparsity.below.mean((0, 1))
    shares = ", ".join(f"{share:.1%} are below {limit:g}" for share, limit in zip(below, THRESHOLDS, strict=True))
    return f"Of all weights a row may give, {shares}."


def _deviation(keys: DeviationNumbers, values: DeviationNumbers) -> str:
    worst = int(values.mean_before.argmax())
    return (
        f"As stored, a row is off by {values.mean_before.mean():.1%} of its norm in values and {keys.mean_before.mean():.1%} "
        f"in keys (mean over layers and rows); after blending by {values.mean_after.mean():.1%} and "
        f"{keys.mean_after.mean():.1%}. Values deviate most at layer {worst} ({values.mean_before[worst]:.1%})."
    )


def _top(values: DeviationNumbers) -> str:
    later = values.top[1:]
    if not _known(later):
        return "The stored values do not deviate, so no row holds a share of the deviation."
    means = zip(TOP, np.nanmean(later, 0), strict=True)
    shares = [f"the top {top:.0%} hold {share:.0%}" for top, share in means]
    return (
        f"Of the squared deviation of a layer's values, {', '.join(shares)} (mean over the layers after the first); "
        f"evenly spread it would be {', '.join(f'{top:.0%}' for top in TOP)}."
    )


def _correlation(values: DeviationNumbers) -> str:
    rho = values.correlation
    near = np.diagonal(rho, 1)[1:]
    far = rho[1, 2:] if len(rho) > 1 else rho[:0, 0]
    if not _known(near) or not _known(far):
        return "There are too few layers, or too few rows that deviate, to correlate."
    return (
        f"How neighbouring layers rank the rows correlates by {np.nanmean(near):.2f} (mean of Spearman's rho); layer 1's "
        f"ranking correlates with the later layers' by {np.nanmean(far):.2f} on average, with the last one's by {far[-1]:.2f}."
    )


def _starts(places: Places) -> str:
    rate = _rates(places.by_start)
    if not _known(rate):
        return "There is no chunk after the first, and the first does not deviate."
    best = int(np.nanargmax(rate))
    every, high = places.by_start.sum(0)
    among = places.by_start[:3, 1].sum() / max(high, 1e-9)
    of_all = places.by_start[:3, 0].sum() / every
    return (
        f"Of the {HIGH:.0%} of rows with the highest deviation, {among:.0%} are among the first 4 tokens of their chunk, which "
        f"are {of_all:.0%} of all rows; most likely to be high are rows at distance {bin_names(START_BINS)[best]} from the "
        f"start ({rate[best]:.0%} of them)."
    )


def _ends(places: Places) -> str:
    rate = _rates(places.by_end)
    if not _known(rate):
        return "There is no chunk after the first to look at."
    rows, high = places.by_end[1:].sum(0)
    inner = high / max(rows, 1e-9)
    return f"Of the chunks' last tokens {rate[0]:.0%} are among the highest {HIGH:.0%}, of all tokens before them {inner:.0%}."


def _kinds(places: Places) -> str:
    rate = _rates(places.by_kind)
    if not _known(rate):
        return "There is no chunk after the first to look at."
    parts = [f"{value:.0%} of {name}" for name, value in zip(KINDS, rate, strict=True) if not np.isnan(value)]
    return f"By kind of word, {', '.join(parts)} tokens are among the highest {HIGH:.0%}."


def _cross(cross: CrossNumbers) -> str:
    full, blended = cross.full.mean(), cross.blended.mean()
    if full <= 0:
        return "No row attends to another chunk here, so reuse loses nothing between chunks."
    read = cross.blended_read.sum() / max(cross.full_read.sum(), 1e-30)
    return (
        f"Under full recompute a context row gives {full:.1%} of its attention to other chunks; plain reuse has 0. Blending "
        f"restores {blended:.1%}, which is {blended / full:.0%} of it, and {read:.0%} of it when rows count by how much the "
        "question reads them."
    )


def _variation(cross: CrossNumbers) -> str:
    before, after = cross.variation_reuse.mean(), cross.variation_blended.mean()
    closer = (
        f"{1 - after / before:.0%} of the distance is gone" if 0 < after <= before else "blending brings it no closer"
    )
    return (
        f"The question's attention is {before:.3f} away from full recompute under plain reuse and {after:.3f} after blending "
        f"(total variation, 0 the same, 1 disjoint; mean over layers and heads): {closer}."
    )


def _reads(cross: CrossNumbers) -> str:
    full, reuse, blended = cross.chunks.mean(1)
    return (
        f"The question gives {full:.1%} of its attention to the chunks under full recompute, {reuse:.1%} under plain reuse and "
        f"{blended:.1%} after blending; the rest stays with the prefix and the question itself."
    )


def _rates(counts: ndarray) -> ndarray:
    rows, high = counts.T
    return divide(high, rows)


def _known(values: ndarray) -> bool:
    return bool(values.size and (~np.isnan(values)).any())
