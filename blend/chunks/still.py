"""Chunk caches without positions: what every token's keys would be if it stood at position 0, whatever the model calls that.

A codec of few bits keeps such keys better, and they turn once when they are put into a prompt:
R(p) k instead of R(p - q) R(q) k.
Right behind its prefix such a chunk is not exact to the last bit: it turns back and forth in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from blend.model.admission import Rotation, moves
from blend.types import ChunkCache

if TYPE_CHECKING:
    from blend.model.admission import LayerRotation


def without_positions(cache: ChunkCache, rotations: Sequence[LayerRotation]) -> ChunkCache:
    """The same cache with the positions taken out of whatever turns, float32. rotations: of the decoder it is of."""
    positions = torch.arange(cache.start, cache.start + cache.tokens, device=cache.keys[0].device)
    back = moves(-positions)

    def still(states: Sequence[torch.Tensor], turns: Sequence[Rotation]) -> tuple[torch.Tensor, ...]:
        return tuple(
            turn.apply(one[None], back, out=torch.empty_like(one, dtype=torch.float32)[None])[0]
            for one, turn in zip(states, turns, strict=True)
        )

    keys, values = still(cache.keys, [r.keys for r in rotations]), still(cache.values, [r.values for r in rotations])
    return replace(cache, keys=keys, values=values, still=True)
