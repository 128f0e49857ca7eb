"""Attention weights a block of rows at a time: the rows x keys matrix of a layer is never in memory as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from blend.model.forward import AttentionCall

# Weights in memory at once, in elements: 8 MiB of fp32.
MOST_WEIGHTS = 1 << 21


class Tile(NamedTuple):
    """Softmax weights of rows `start` to `stop - 1` of a call.

    weights: fp32 `[heads, rows, keys]`, exactly 0 where a row may not look; keys beyond the tile's last row are left out.
    visible: how many keys each row may look at, int64 `[rows]`.
    """

    start: int
    stop: int
    weights: torch.Tensor
    visible: torch.Tensor


def tiles(call: AttentionCall, *, multiple: int = 1, first: int = 0, most: int = MOST_WEIGHTS) -> Iterator[Tile]:
    """The weights of a call of batch 1 in its exact mask, from row `first` on, as softmax of the scaled, capped scores.

    multiple: every tile but the last has a multiple of so many rows. most: about how many weights a tile may hold; at least
    `multiple` rows are taken. A layer's window is honoured; a model's learned attention sinks are not part of the weights.
    """
    assert call.mask == "exact"
    heads, rows = call.query.shape[1:3]
    step = max(1, most // (heads * call.key.shape[2] * multiple)) * multiple
    for start in range(first, rows, step):
        yield _tile(call, start, min(start + step, rows))


def _tile(call: AttentionCall, start: int, stop: int) -> Tile:
    last = call.positions[start:stop]
    keys = int(last[-1]) + 1
    scores = _scores(call, start, stop, keys)
    key = torch.arange(keys, device=last.device)
    hidden = key > last[:, None]
    visible = last + 1
    if call.window is not None:
        hidden |= key <= last[:, None] - call.window
        visible = visible.clamp_max(call.window)
    return Tile(start, stop, scores.masked_fill_(hidden, float("-inf")).softmax(-1), visible)


def _scores(call: AttentionCall, start: int, stop: int, keys: int) -> torch.Tensor:
    """Scaled and capped scores, `[heads, rows, keys]`; query heads of one group share a KV head."""
    query, key = call.query[0, :, start:stop].float(), call.key[0, :, :keys].float()
    heads, rows, dim = query.shape
    grouped = query.reshape(key.shape[0], -1, dim)
    scale = dim**-0.5 if call.scale is None else call.scale
    scores = (grouped @ key.mT).mul_(scale).view(heads, rows, keys)
    if call.softcap is not None:
        scores = scores.div_(call.softcap).tanh_().mul_(call.softcap)
    return scores
