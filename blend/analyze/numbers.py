"""The numbers of a prompt that do not depend on its length or its chunks, so that those of many prompts can be averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from blend.analyze.deviation import Deviation, quantiles, rank_correlation, top_shares
from blend.analyze.places import Places, find_places

if TYPE_CHECKING:
    from blend.analyze.study import PromptAnalysis

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


def _deviation(before: Deviation, after: Deviation) -> DeviationNumbers:
    return DeviationNumbers(
        quantiles(before.relative),
        quantiles(after.relative),
        before.relative.mean(1),
        after.relative.mean(1),
        top_shares(before.squared),
        rank_correlation(before.squared),
    )


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
