"""KV in blocks of vLLM's cache, mirrored where it can be read: only vLLM's own code knows how a block is laid out."""

from __future__ import annotations

from typing import NamedTuple

import torch

from blend.model.cache import BlendedCache, BlendedLayer


class Place(NamedTuple):
    """Blocks of vLLM's cache that hold a prompt; rows `start` to `stop - 1` of it are to be written."""

    blocks: tuple[int, ...]
    start: int
    stop: int


class PagedLayer(BlendedLayer):
    """One layer of a `PagedCache`. in_blocks: whether the blocks hold what the buffers do; fresh rows are written to both."""

    in_blocks = False

    def blank(self, rows: torch.Tensor) -> None:
        """As its base does."""
        self.in_blocks = False
        super().blank(rows)

    def write_run(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """As its base does."""
        self.in_blocks = False
        super().write_run(start, keys, values)

    def _buffer(self, states: torch.Tensor) -> torch.Tensor:
        # Zeros, because whole layers are written to the blocks, and attention may multiply what it masks: no NaN must be there.
        return states.new_zeros((*states.shape[:2], self.capacity, states.shape[3]))


class PagedCache(BlendedCache):
    """A prompt's KV in buffers of its own, to be brought to blocks layer by layer as they are computed.

    place: the blocks; None for caches that are computed in scratch memory, of which nothing stays.
    """

    layer = PagedLayer

    def __init__(self, layers: int, capacity: int, place: Place | None = None) -> None:
        super().__init__(layers, capacity)
        self.place, self.capacity = place, capacity
