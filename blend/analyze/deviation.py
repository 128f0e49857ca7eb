"""How far a cache's rows lie from full recompute, layer by layer, and what the distribution looks like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache
    from blend.types import Span

QUANTILES = (0.05, 0.25, 0.50, 0.75, 0.95)
TOP = (0.05, 0.10, 0.15)


@dataclass(frozen=True)
class Deviation:
    """Of keys or of values, float64 `[layers, context rows]` each.

    squared: squared L2 distance to full recompute, summed over heads and dimensions. size: squared L2 norm of full recompute.
    """

    squared: np.ndarray
    size: np.ndarray

    @property
    def relative(self) -> np.ndarray:
        """Distance over norm, `[layers, context rows]`."""
        relative: np.ndarray = np.sqrt(self.squared / np.maximum(self.size, 1e-30))
        return relative


@dataclass(frozen=True)
class KVDeviation:
    """Keys and values of one cache against another."""

    keys: Deviation
    values: Deviation


def measure_deviation(cache: BlendedCache, exact: BlendedCache, context: Span) -> KVDeviation:
    """Compare the context rows of two caches of one prompt, layer by layer, in fp32 or better."""
    found: tuple[list[tuple[np.ndarray, np.ndarray]], ...] = ([], [])
    for layer in range(len(exact.layers)):
        for into, mine, true in zip(found, cache.view(layer), exact.view(layer), strict=True):
            into.append(_rows(mine, true, context))
    keys, values = (Deviation(*map(np.stack, zip(*part, strict=True))) for part in found)
    return KVDeviation(keys, values)


def _rows(mine: torch.Tensor, true: torch.Tensor, context: Span) -> tuple[np.ndarray, np.ndarray]:
    span = slice(context.start, context.stop)
    true = true[0, :, span].float()
    gap = mine[0, :, span].float() - true
    squared, size = (t.double().square().sum((0, 2)).cpu().numpy() for t in (gap, true))
    return squared, size


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
