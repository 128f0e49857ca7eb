"""Blocks to compute in that are no request's: memory of one layer, which all layers use in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class Scratch:
    """Stands in for the cache of attention layers while rows run that are not to stay.

    layers: vLLM's attention modules, alike in what they cache. blocks: how many blocks their own cache has. What a layer
    holds is lost when the next one runs, so earlier rows must be written again for every layer of a pass.
    """

    def __init__(self, layers: Sequence[Any], blocks: int) -> None:
        self._layers, self._blocks = layers, blocks
        self._memory: torch.Tensor | None = None
        self._size = 0

    @contextmanager
    def bound(self, blocks: int) -> Iterator[None]:
        """Meanwhile blocks 0 to `blocks - 1` of every layer are scratch memory, and its own cache is out of reach."""
        own = [layer.kv_cache for layer in self._layers]
        memory = self._grown(own[0], blocks)
        try:
            for layer in self._layers:
                layer.kv_cache = memory
            yield
        finally:
            for layer, cache in zip(self._layers, own, strict=True):
                layer.kv_cache = cache

    def _grown(self, like: torch.Tensor, blocks: int) -> torch.Tensor:
        if self._memory is None or self._size < blocks:
            self._memory = None  # before the larger one is made
            self._memory, self._size = _alike(like, block_dimension(like, self._blocks), blocks), blocks
        return self._memory


def block_dimension(cache: torch.Tensor, blocks: int) -> int:
    """Which dimension of a layer's cache counts its blocks. Raises ValueError where that cannot be told."""
    found = [dimension for dimension, size in enumerate(cache.shape) if size == blocks]
    if len(found) != 1:
        raise ValueError(
            f"because a cache of shape {tuple(cache.shape)} does not show which dimension counts its {blocks} blocks"
        )
    return found[0]


def _alike(cache: torch.Tensor, dimension: int, blocks: int) -> torch.Tensor:
    """Zeros in the same order of dimensions in memory, with another number of blocks; masked numbers must not be NaN."""
    order = sorted(range(cache.ndim), key=lambda one: cache.stride(one), reverse=True)
    shape = [blocks if one == dimension else cache.shape[one] for one in order]
    back = [order.index(one) for one in range(cache.ndim)]
    return torch.zeros(shape, dtype=cache.dtype, device=cache.device).permute(back)
