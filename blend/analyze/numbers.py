"""Numbers of a prompt that do not depend on its length or chunks, so that those of many prompts can be averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar, cast

import numpy as np

from blend.analyze.study import KINDS, Deviation, PromptAnalysis
from blend.types import PromptLayout

QUANTILES = (0.05, 0.25, 0.50, 0.75, 0.95)
TOP = (0.05, 0.10, 0.15)
# Share of the rows that count as high.
HIGH = 0.10
START_BINS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
END_BINS = (0, 1, 2, 4, 8, 16, 32)
T = TypeVar("T")


@dataclass(frozen=True)
class SparsityNumbers:
    """`[layers, heads, 3]`: share of weights below the thresholds, keys that hold the masses; `[layers]`: visible keys."""

    below: np.ndarray
    keys: np.ndarray
    visible: np.ndarray


@dataclass(frozen=True)
class DeviationNumbers:
    """Of keys or values, the reused cache (before) and the blended one (after).

    before, after: quantiles of the rows' relative deviation, `[layers, quantiles]`. mean_before, mean_after: their means,
    `[layers]`. top: share of the squared deviation that the top rows of the reused cache hold, `[layers, 3]`. correlation:
    Spearman's rho between the layers of the reused cache, `[layers, layers]`.
    """

    before: np.ndarray
    after: np.ndarray
    mean_before: np.ndarray
    mean_after: np.ndarray
    top: np.ndarray
    correlation: np.ndarray


@dataclass(frozen=True)
class Places:
    """Counts of rows of the chunks after the first, all of them and the high ones; float64, so that means of them make sense.

    by_start: `[bins of START_BINS, 2]`, distance from the chunk's first token. by_end: the same from its last token.
    by_kind: `[KINDS, 2]`. Column 0 counts all rows, column 1 the high ones.
    """

    by_start: np.ndarray
    by_end: np.ndarray
    by_kind: np.ndarray


@dataclass(frozen=True)
class CrossNumbers:
    """Attention to other chunks, `[layers]` each; plain reuse has none by construction.

    full: share of a context row's attention that goes to chunks other than its own, mean over context rows. blended: the same
    where rows that were not recomputed have none. full_read, blended_read: the same means with every row weighted by how much
    the question reads it under full recompute. variation_reuse, variation_blended: total variation distance between the
    question's attention and that under full recompute, mean over heads and rows. chunks: share of the question's attention
    that goes to chunks under full recompute, plain reuse and the blend, `[3, layers]`.
    """

    full: np.ndarray
    blended: np.ndarray
    full_read: np.ndarray
    blended_read: np.ndarray
    variation_reuse: np.ndarray
    variation_blended: np.ndarray
    chunks: np.ndarray


@dataclass(frozen=True)
class Numbers:
    """Everything that is averaged. size: tokens, chunks, rows recomputed, share of all rows x layers that was computed."""

    sparsity: SparsityNumbers
    keys: DeviationNumbers
    values: DeviationNumbers
    places: Places
    cross: CrossNumbers
    size: np.ndarray


def summarize(analysis: PromptAnalysis) -> Numbers:
    """The numbers of one prompt."""
    layers = [layer.sparsity for layer in analysis.attention]
    layout, before, after = analysis.layout, analysis.before, analysis.after
    sizes = (layout.rows, len(layout.chunks), len(analysis.recomputed), analysis.rows_share)
    return Numbers(
        SparsityNumbers(
            np.stack([s.below for s in layers]),
            np.stack([s.keys for s in layers]),
            np.array([s.visible for s in layers]),
        ),
        _deviation(before.keys, after.keys),
        _deviation(before.values, after.values),
        find_places(before.values.squared, layout, analysis.kinds),
        _cross(analysis),
        np.array(sizes, dtype=np.float64),
    )


def mean_numbers(many: Sequence[Numbers]) -> Numbers:
    """Means over prompts; what is undefined (NaN) on a prompt is left out of its mean."""
    return _mean(many)


def _mean(many: Sequence[T]) -> T:
    first: Any = many[0]
    if is_dataclass(first):
        parts = {f.name: _mean([getattr(one, f.name) for one in many]) for f in fields(first)}
        return cast(T, replace(first, **parts))  # type: ignore[type-var]  # an instance, not a class
    return cast(T, _mean_known(np.stack(cast(Sequence[np.ndarray], many))))


def _mean_known(stacked: np.ndarray) -> np.ndarray:
    known = ~np.isnan(stacked)
    total, count = np.where(known, stacked, 0.0).sum(0), known.sum(0)
    mean: np.ndarray = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    return mean


def _cross(analysis: PromptAnalysis) -> CrossNumbers:
    context = slice(analysis.layout.context.start, analysis.layout.context.stop)
    full = np.stack([layer.cross for layer in analysis.attention])[:, context]
    blended = analysis.exchange.cross[:, context]
    read = np.stack([layer.question for layer in analysis.attention])[:, context].sum(0)
    read = read / max(read.sum(), 1e-30)
    variation, question = analysis.exchange.variation, analysis.exchange.question
    return CrossNumbers(
        full.mean(1),
        blended.mean(1),
        full @ read,
        blended @ read,
        variation[0].mean(1),
        variation[1].mean(1),
        question[:, :, 1:-1].sum(2),
    )


def _deviation(before: Deviation, after: Deviation) -> DeviationNumbers:
    return DeviationNumbers(
        quantiles(before.relative),
        quantiles(after.relative),
        before.relative.mean(1),
        after.relative.mean(1),
        top_shares(before.squared),
        rank_correlation(before.squared),
    )


def quantiles(relative: np.ndarray) -> np.ndarray:
    """`QUANTILES` over the rows of each layer, `[layers, quantiles]`."""
    found: np.ndarray = np.quantile(relative, QUANTILES, axis=1).T
    return found


def top_shares(squared: np.ndarray) -> np.ndarray:
    """Share of each layer's total that its top 5, 10, 15 % rows hold, `[layers, 3]`; NaN where the total is 0."""
    ordered = -np.sort(-squared, axis=1)
    rows = squared.shape[1]
    counts = [max(1, round(share * rows)) for share in TOP]
    held = np.stack([ordered[:, :count].sum(1) for count in counts], 1)
    total = squared.sum(1, keepdims=True)
    shares: np.ndarray = np.divide(held, total, out=np.full_like(held, np.nan), where=total > 0)
    return shares


def rank_correlation(squared: np.ndarray) -> np.ndarray:
    """Spearman's rho between the layers' rows, `[layers, layers]`; NaN for a layer whose rows are all equal."""
    ranks = np.stack([_ranks(layer) for layer in squared])
    centred = ranks - ranks.mean(1, keepdims=True)
    norm = np.sqrt((centred**2).sum(1))
    scale = np.outer(norm, norm)
    rho: np.ndarray = np.divide(centred @ centred.T, scale, out=np.full_like(scale, np.nan), where=scale > 0)
    return rho


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0; equal values share the mean of their ranks."""
    _, group, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count) - 1
    mean: np.ndarray = (last - (count - 1) / 2)[group]
    return mean


def find_places(squared: np.ndarray, layout: PromptLayout, kinds: Sequence[int]) -> Places:
    """Count where the `HIGH` share of rows with the largest deviation sit.

    squared: `[layers, context rows]`; a row's deviation is the sum over layers, each layer scaled to mean 1. kinds: of all rows
    of the prompt. The first chunk is left out: it stands where it was computed and does not deviate.
    """
    lengths = np.array([span.length for span in layout.chunk_spans], dtype=np.int64)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    depth = np.arange(len(starts)) - starts
    left = np.repeat(lengths, lengths) - 1 - depth
    later = starts > 0
    high = _highest(row_score(squared)[later])
    kind = np.asarray(kinds[layout.context.start : layout.context.stop], dtype=np.int64)
    return Places(
        _count(_bin(depth[later], START_BINS), high, len(START_BINS)),
        _count(_bin(left[later], END_BINS), high, len(END_BINS)),
        _count(kind[later], high, len(KINDS)),
    )


def row_score(squared: np.ndarray) -> np.ndarray:
    """Deviation of a row over all layers, each layer scaled to mean 1 first, `[context rows]`."""
    mean = squared.mean(1, keepdims=True)
    score: np.ndarray = np.divide(squared, mean, out=np.zeros_like(squared), where=mean > 0).sum(0)
    return score


def bin_names(edges: Sequence[int]) -> tuple[str, ...]:
    """0, 1, 2-3, 4-7, ..., 128 and more."""
    closed = [str(low) if high == low + 1 else f"{low}\u2013{high - 1}" for low, high in pairwise(edges)]
    return (*closed, f"{edges[-1]}+")


def _highest(score: np.ndarray) -> np.ndarray:
    chosen = np.zeros(len(score), dtype=bool)
    chosen[np.argsort(-score, kind="stable")[: round(HIGH * len(score))]] = True
    return chosen


def _bin(distance: np.ndarray, edges: Sequence[int]) -> np.ndarray:
    which: np.ndarray = np.digitize(distance, edges) - 1
    return which


def _count(which: np.ndarray, high: np.ndarray, bins: int) -> np.ndarray:
    every, some = np.bincount(which, minlength=bins), np.bincount(which[high], minlength=bins)
    return np.stack((every, some), 1).astype(np.float64)
