"""Numbers of a prompt that do not depend on its length or chunks, so that those of many prompts can be averaged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy import ndarray

from blend.analyze.study import Deviation, PromptAnalysis
from blend.analyze.words import KINDS
from blend.layout import PromptLayout

QUANTILES = (0.05, 0.25, 0.50, 0.75, 0.95)
TOP = (0.05, 0.10, 0.15)
# Share of the rows that count as high.
HIGH = 0.10
START_BINS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
END_BINS = (0, 1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class SparsityNumbers:
    """`[layers, heads, 3]`: share of weights below the thresholds, keys that hold the masses; `[layers]`: visible keys."""

    below: ndarray
    keys: ndarray
    visible: ndarray


@dataclass(frozen=True)
class DeviationNumbers:
    """Deviation of keys or values in the reused cache (before) and the blended one (after).

    before, after: quantiles of the rows' relative deviation, `[layers, quantiles]`. mean_before, mean_after: their means,
    `[layers]`. top: share of the squared deviation that the top rows of the reused cache hold, `[layers, 3]`. correlation:
    Spearman's rho between the layers of the reused cache, `[layers, layers]`.
    """

    before: ndarray
    after: ndarray
    mean_before: ndarray
    mean_after: ndarray
    top: ndarray
    correlation: ndarray


@dataclass(frozen=True)
class Places:
    """Counts of rows of the chunks after the first, all of them and the high ones; float64, so that means of them make sense.

    by_start: `[bins of START_BINS, 2]`, distance from the chunk's first token. by_end: the same from its last token. by_kind:
    `[KINDS, 2]`, kind of the word.
    Column 0 counts all rows, column 1 the high ones.
    """

    by_start: ndarray
    by_end: ndarray
    by_kind: ndarray


@dataclass(frozen=True)
class CrossNumbers:
    """Attention to other chunks, `[layers]` each; plain reuse has none by construction.

    full: share of a context row's attention that goes to chunks other than its own, mean over context rows. blended: the same
    where rows that were not recomputed have none. full_read, blended_read: the same means with every row weighted by how much
    the question reads it under full recompute. variation_reuse, variation_blended: total variation distance between the
    question's attention and that under full recompute, mean over heads and rows. chunks: share of the question's attention
    that goes to chunks under full recompute, plain reuse and the blend, `[3, layers]`.
    """

    full: ndarray
    blended: ndarray
    full_read: ndarray
    blended_read: ndarray
    variation_reuse: ndarray
    variation_blended: ndarray
    chunks: ndarray


@dataclass(frozen=True)
class Numbers:
    """Everything that is averaged. size: tokens, chunks, rows recomputed, share of all rows x layers that was computed."""

    sparsity: SparsityNumbers
    keys: DeviationNumbers
    values: DeviationNumbers
    places: Places
    cross: CrossNumbers
    size: ndarray


def summarize(analysis: PromptAnalysis) -> Numbers:
    """The numbers of one prompt."""
    layers = analysis.attention
    before, after = analysis.before, analysis.after
    layout = analysis.layout
    sizes = (layout.rows, len(layout.chunks), len(analysis.recomputed), analysis.rows_share)
    return Numbers(
        sparsity=SparsityNumbers(
            below=np.stack([layer.below for layer in layers]),
            keys=np.stack([layer.keys for layer in layers]),
            visible=np.array([layer.visible for layer in layers]),
        ),
        keys=_deviation(before.keys, after.keys),
        values=_deviation(before.values, after.values),
        places=find_places(before.values.squared, layout, analysis.kinds),
        cross=_cross(analysis),
        size=np.array(sizes, dtype=np.float64),
    )


def mean_numbers(many: Sequence[Any]) -> Any:
    """Means over prompts, of `Numbers` or a part of them; what is undefined (NaN) on a prompt is left out of its mean."""
    if not is_dataclass(many[0]):
        return mean_defined(np.stack(many))
    parts = [part.name for part in fields(many[0])]
    means = {name: mean_numbers([getattr(numbers, name) for numbers in many]) for name in parts}
    return replace(many[0], **means)  # type: ignore[type-var]  # an instance, not a class


def mean_defined(stacked: ndarray) -> ndarray:
    """Means over the first axis of what is not NaN; NaN where all are."""
    return divide(np.nansum(stacked, 0), (~np.isnan(stacked)).sum(0))


def divide(total: ndarray, count: ndarray, *, otherwise: float = math.nan) -> ndarray:
    """The quotient; `otherwise` where `count` is not above 0."""
    out = np.full(np.broadcast_shapes(total.shape, count.shape), otherwise)
    quotient: ndarray = np.divide(total, count, out=out, where=count > 0)
    return quotient


def _cross(analysis: PromptAnalysis) -> CrossNumbers:
    context = slice(analysis.layout.context.start, analysis.layout.context.stop)
    full = np.stack([layer.cross[context] for layer in analysis.attention])
    blended = analysis.exchange.cross[:, context]
    read = np.sum([layer.question[context] for layer in analysis.attention], axis=0)
    read = read / max(read.sum(), 1e-30)
    variation = analysis.exchange.variation
    question = analysis.exchange.question
    return CrossNumbers(
        full=full.mean(1),
        blended=blended.mean(1),
        full_read=full @ read,
        blended_read=blended @ read,
        variation_reuse=variation[0].mean(1),
        variation_blended=variation[1].mean(1),
        chunks=question[:, :, 1:-1].sum(2),
    )


def _deviation(before: Deviation, after: Deviation) -> DeviationNumbers:
    return DeviationNumbers(
        before=quantiles(before.relative),
        after=quantiles(after.relative),
        mean_before=before.relative.mean(1),
        mean_after=after.relative.mean(1),
        top=top_shares(before.squared),
        correlation=rank_correlation(before.squared),
    )


def quantiles(relative: ndarray) -> ndarray:
    """`QUANTILES` over the rows of each layer, `[layers, quantiles]`."""
    by_layer: ndarray = np.quantile(relative, QUANTILES, axis=1).T
    return by_layer


def top_shares(squared: ndarray) -> ndarray:
    """Share of each layer's total that its top 5, 10, 15 % rows hold, `[layers, 3]`; NaN where the total is 0."""
    ordered = -np.sort(-squared, axis=1)
    rows = squared.shape[1]
    counts = [max(1, round(share * rows)) for share in TOP]
    sums = [ordered[:, :count].sum(1) for count in counts]
    top = np.stack(sums, 1)
    total = squared.sum(1, keepdims=True)
    return divide(top, total)


def rank_correlation(squared: ndarray) -> ndarray:
    """Spearman's rho between the layers' rows, `[layers, layers]`; NaN for a layer whose rows are all equal."""
    ranks = np.stack([_ranks(layer) for layer in squared])
    centred = ranks - ranks.mean(1, keepdims=True)
    norm = np.sqrt((centred**2).sum(1))
    scale = np.outer(norm, norm)
    return divide(centred @ centred.T, scale)


def _ranks(values: ndarray) -> ndarray:
    """Ranks from 0; equal values share the mean of their ranks."""
    _, group, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count) - 1
    mean: ndarray = (last - (count - 1) / 2)[group]
    return mean


def find_places(squared: ndarray, layout: PromptLayout, kinds: Sequence[int]) -> Places:
    """Count where the `HIGH` share of rows with the largest deviation sit.

    squared: `[layers, context rows]`; a row's deviation is the sum over layers, each layer scaled to mean 1. kinds: of all rows
    of the prompt. The first chunk is left out: it stands where it was computed and does not deviate.
    """
    lengths = np.array([span.length for span in layout.chunk_spans], dtype=np.int64)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    depth = np.arange(len(starts)) - starts
    from_end = np.repeat(lengths, lengths) - 1 - depth
    later = starts > 0
    score = divide(squared, squared.mean(1, keepdims=True), otherwise=0.0).sum(0)[later]
    high = np.argsort(-score, kind="stable")[: round(HIGH * len(score))]
    return Places(
        by_start=_count(np.digitize(depth[later], START_BINS) - 1, high, len(START_BINS)),
        by_end=_count(np.digitize(from_end[later], END_BINS) - 1, high, len(END_BINS)),
        by_kind=_count(np.array(kinds)[slice(*layout.context)][later], high, len(KINDS)),
    )


def bin_names(edges: Sequence[int]) -> tuple[str, ...]:
    """0, 1, 2-3, 4-7, ..., 128 and more."""
    names = [str(low) if high == low + 1 else f"{low}\u2013{high - 1}" for low, high in pairwise(edges)]
    return (*names, f"{edges[-1]}+")


def _count(bin_of_row: ndarray, high: ndarray, bins: int) -> ndarray:
    """`[bins, 2]`: rows in all, and the high ones, which `high` names."""
    rows = np.bincount(bin_of_row, minlength=bins)
    high_rows = np.bincount(bin_of_row[high], minlength=bins)
    return np.stack((rows, high_rows), 1).astype(np.float64)
