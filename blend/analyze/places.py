"""Where the rows of high deviation sit: how far into their chunk, how far from its end, in what kind of word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from blend.analyze.tokens import KINDS
from blend.types import PromptLayout

# Share of the rows that count as high.
HIGH = 0.10
START_BINS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
END_BINS = (0, 1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Places:
    """Counts of rows of the chunks after the first, all of them and the high ones; float64, so that means of them make sense.

    by_start: `[bins of START_BINS, 2]`, distance from the chunk's first token. by_end: the same from its last token.
    by_kind: `[KINDS, 2]`. Column 0 counts all rows, column 1 the high ones.
    """

    by_start: np.ndarray
    by_end: np.ndarray
    by_kind: np.ndarray


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
