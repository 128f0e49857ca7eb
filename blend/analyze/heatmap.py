"""A token-by-token picture of attention in at most a few hundred cells a side, pooled while the tiles go by."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import numpy as np
import torch

from blend.analyze.tiles import Tile

# Weights below 1e-4 are drawn as nothing; the levels between are equal steps of the logarithm.
DECADES = 4


@dataclass(frozen=True)
class HeadMap:
    """The largest weight in each cell of `width` x `width` tokens, `[cells, cells]`, of one head of one layer."""

    layer: int
    head: int
    width: int
    cells: np.ndarray

    def encoded(self) -> str:
        """Base64 of one byte a cell, row by row up to the diagonal: 0 below 1e-4, else 255 x (1 + log10(weight) / 4)."""
        lower = self.cells[np.tril_indices(len(self.cells))]
        levels = 1 + np.log10(np.maximum(lower, 10.0**-DECADES)) / DECADES
        return base64.b64encode(np.round(255 * np.clip(levels, 0, 1)).astype(np.uint8).tobytes()).decode("ascii")


def cell_width(rows: int, most: int) -> int:
    """Tokens a side of a cell, so that at most `most` cells cover `rows`."""
    return max(1, -(-rows // most))


class MapMaker:
    """Pools one layer's tiles, all heads; tiles must start at multiples of `width` rows."""

    def __init__(self, heads: int, rows: int, width: int) -> None:
        self._width = width
        cells = -(-rows // width)
        self._cells = torch.zeros(heads, cells, cells)

    def add(self, tile: Tile) -> None:
        """Pool a tile in."""
        heads, rows, keys = tile.weights.shape
        pad = (0, -keys % self._width, 0, -rows % self._width)
        padded = torch.nn.functional.pad(tile.weights, pad)
        blocks = padded.view(heads, padded.shape[1] // self._width, self._width, -1, self._width)
        pooled = blocks.amax((2, 4)).cpu()
        top = tile.start // self._width
        self._cells[:, top : top + pooled.shape[1], : pooled.shape[2]] = pooled

    def result(self, layer: int, head: int) -> HeadMap:
        """The picture of one head."""
        return HeadMap(layer, head, self._width, self._cells[head].numpy().copy())
