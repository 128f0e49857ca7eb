"""How sparse attention is: weights below a threshold, and how few keys hold most of the mass."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from blend.analyze.tiles import Tile

THRESHOLDS = (1e-2, 1e-3, 1e-4)
MASSES = (0.90, 0.95, 0.99)


class LayerSparsity(NamedTuple):
    """One layer, head by head.

    below: share of the visible weights below each of `THRESHOLDS`, `[heads, thresholds]`. keys: fewest keys that hold each of
    `MASSES` of a row's attention, mean over rows, `[heads, masses]`. visible: keys that a row may look at, mean over rows.
    """

    below: np.ndarray
    keys: np.ndarray
    visible: float


class SparsityMeter:
    """Adds up one layer's tiles."""

    def __init__(self, heads: int) -> None:
        self._below = np.zeros((heads, len(THRESHOLDS)))
        self._keys = np.zeros((heads, len(MASSES)))
        self._visible = 0
        self._rows = 0

    def add(self, tile: Tile) -> None:
        """Count a tile in."""
        _, rows, keys = tile.weights.shape
        visible = int(tile.visible.sum())
        for index, threshold in enumerate(THRESHOLDS):
            small = (tile.weights < threshold).sum((1, 2)).cpu().numpy()
            self._below[:, index] += small - (rows * keys - visible)
        # The share that may be dropped, smallest weights first; hidden keys weigh 0 and are dropped before all others.
        dropped = torch.from_numpy(np.sort(tile.weights.cpu().numpy(), axis=-1)).cumsum(-1)
        for index, mass in enumerate(MASSES):
            self._keys[:, index] += (dropped > 1 - mass).sum((1, 2)).numpy()
        self._visible += visible
        self._rows += rows

    def result(self) -> LayerSparsity:
        """The layer's numbers."""
        return LayerSparsity(self._below / self._visible, self._keys / self._rows, self._visible / self._rows)
