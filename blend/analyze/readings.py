"""What each chart shows, in one sentence with its numbers."""

from __future__ import annotations

import numpy as np

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
    mean_defined,
)
from blend.analyze.words import KINDS

_UNDEFINED = "There is nothing to measure: too few chunks, layers, or rows that deviate."


def readings(numbers: Numbers) -> dict[str, str]:
    """A sentence for every picture of the averaged part, by the picture's name."""
    sentences = {
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
    return {name: _UNDEFINED if "nan" in sentence else sentence for name, sentence in sentences.items()}


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
    means = zip(TOP, mean_defined(values.top[1:]), strict=True)
    shares = [f"the top {top:.0%} hold {share:.0%}" for top, share in means]
    return (
        f"Of the squared deviation of a layer's values, {', '.join(shares)} (mean over the layers after the first); "
        f"evenly spread it would be {', '.join(f'{top:.0%}' for top in TOP)}."
    )


def _correlation(values: DeviationNumbers) -> str:
    near = np.diagonal(values.correlation, 1)[1:]
    far = values.correlation[1, 2:]
    return (
        f"How neighbouring layers rank the rows correlates by {mean_defined(near):.2f} (mean of Spearman's rho); layer 1's "
        f"ranking correlates with the later layers' by {mean_defined(far):.2f} on average."
    )


def _starts(places: Places) -> str:
    rate = divide(places.by_start[:, 1], places.by_start[:, 0])
    best = int(np.nan_to_num(rate).argmax())
    of_all, among = divide(places.by_start[:3].sum(0), places.by_start.sum(0))
    return (
        f"Of the {HIGH:.0%} of rows with the highest deviation, {among:.0%} are among the first 4 tokens of their chunk, which "
        f"are {of_all:.0%} of all rows; most likely to be high are rows at distance {bin_names(START_BINS)[best]} from the "
        f"start ({rate[best]:.0%} of them)."
    )


def _ends(places: Places) -> str:
    rows, high = places.by_end[1:].sum(0)
    last, inner = divide(np.array([places.by_end[0, 1], high]), np.array([places.by_end[0, 0], rows]))
    return f"Of the chunks' last tokens {last:.0%} are among the highest {HIGH:.0%}, of all tokens before them {inner:.0%}."


def _kinds(places: Places) -> str:
    rates = divide(places.by_kind[:, 1], places.by_kind[:, 0])
    parts = [f"{rate:.0%} of {name}" for name, rate in zip(KINDS, rates, strict=True) if not np.isnan(rate)]
    return f"By kind of word, {', '.join(parts)} tokens are among the highest {HIGH:.0%}." if parts else _UNDEFINED


def _cross(cross: CrossNumbers) -> str:
    full = cross.full.mean()
    blended = cross.blended.mean()
    restored = divide(blended, full)
    read = divide(cross.blended_read.sum(), cross.full_read.sum())
    return (
        f"Under full recompute a context row gives {full:.1%} of its attention to other chunks; plain reuse has 0. Blending "
        f"restores {blended:.1%}, which is {restored:.0%} of it, and {read:.0%} of it when rows count by how much the question "
        "reads them."
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
