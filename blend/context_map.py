"""The context map: what a chunk's KV gains because something stands before it, predicted from that KV.

Most of the difference between a row's KV in context and alone follows from the row itself and from where it stands. One linear
map a layer, from the row's stored keys and values to that difference, is fitted on a few prompts of the user's own chunks
(`blend.calibration`), once per model and prefix, and added to stored chunks that do not stand right behind the prefix. There is
one for chunks computed alone and one for those computed in company (`blend.library`), which have most of it already:

    kv(in context) ~ kv + up^T down^T [(kv - centre) / scale, position features]

kv is a row's keys, with their position taken out (R(-p) k), and values, all heads side by side.
docs/selection.md has the measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from blend.types import ChunkCache, PromptLayout

if TYPE_CHECKING:
    from blend.admission import LayerRotation
    from blend.blended_cache import BlendedCache
    from blend.decoder import Decoder

POSITION_FEATURES = 8
HEADER = 3  # rows of a stored map before its factors


@dataclass(frozen=True, eq=False)
class LayerMap:
    """The map of one layer, float32. `inputs` is the width of a row's keys and values together.

    centre, scale: `[inputs]`. down: `[inputs + POSITION_FEATURES, rank]`. up: `[rank, inputs]`.
    """

    centre: torch.Tensor
    scale: torch.Tensor
    down: torch.Tensor
    up: torch.Tensor

    def predict(self, rows: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """What each row `[rows, inputs]` gains, `[rows, inputs]`; features: `[rows, POSITION_FEATURES]`."""
        weight, bias = self._folded
        hidden = torch.addmm(bias, features, self.down[self.centre.shape[0] :])
        return hidden.addmm_(rows, weight) @ self.up

    @cached_property
    def _folded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Centre and scale inside the first factor, so that a prediction passes over the rows once."""
        weight = self.down[: self.centre.shape[0]] / self.scale[:, None]
        return weight, -(self.centre @ weight)


@dataclass(frozen=True)
class ContextMap:
    """One map a layer; None where nothing is to be added. extent: most tokens before a chunk that it was fitted on."""

    layers: tuple[LayerMap | None, ...]
    extent: int

    def apply(self, decoder: Decoder, cache: BlendedCache, layout: PromptLayout, rows: torch.Tensor) -> None:
        """Add to the stored KV at `rows`, sorted int64 positions of context rows `[rows]`, what the map predicts."""
        if rows.shape[0] == 0:
            return
        features = position_features(layout, rows, self.extent)
        first, last = int(rows[0]), int(rows[-1])
        index = slice(first, last + 1) if last - first + 1 == rows.shape[0] else rows
        for layer, rotation, part in zip(cache.layers, decoder.rotations, self.layers, strict=True):
            if part is None:
                continue
            keys, values = layer.keys[:, :, index], layer.values[:, :, index]
            gain = part.predict(rows_of(keys, values, rotation, rows), features)
            for turn, buffer, states, added in (
                (rotation.keys, layer.keys, keys, gain[:, : width_of(keys)]),
                (rotation.values, layer.values, values, gain[:, width_of(keys) :]),
            ):
                spread = added.reshape(rows.shape[0], *states.shape[1::2]).transpose(0, 1)[None].contiguous()
                buffer[:, :, index] += (spread if turn.inv_freq is None else turn.apply(spread, rows)).to(buffer.dtype)

    def to_cache(self) -> ChunkCache:
        """In the shape in which a store keeps it: a cache of one head whose rows are the map's own.

        keys: centre, scale and the extent, then the columns of `down`; values: as many rows of zeros, then `up`.
        """
        stored = [self._stored(part) for part in self._filled()]
        return ChunkCache(tuple(keys for keys, _ in stored), tuple(values for _, values in stored), start=0)

    def _filled(self) -> list[LayerMap]:
        """Maps that add nothing in place of None, as wide as the widest."""
        some = next(part for part in self.layers if part is not None)
        nothing = LayerMap(some.centre * 0, some.scale * 0 + 1, some.down * 0, some.up * 0)
        return [part if part is not None else nothing for part in self.layers]

    def _stored(self, part: LayerMap) -> tuple[torch.Tensor, torch.Tensor]:
        pad = torch.ones(POSITION_FEATURES, device=part.centre.device)
        header = [torch.cat((part.centre, pad)), torch.cat((part.scale, pad))]
        header.append(torch.full_like(header[0], float(self.extent)))
        zeros = part.up.new_zeros(HEADER, part.up.shape[1])
        return torch.cat((torch.stack(header), part.down.T))[None], torch.cat((zeros, part.up))[None]

    @classmethod
    def from_cache(cls, cache: ChunkCache, device: torch.device) -> ContextMap:
        """The map that `to_cache` made."""
        layers: list[LayerMap | None] = []
        extent = 0
        for keys, values in zip(cache.keys, cache.values, strict=True):
            stored, up = keys[0].float().to(device), values[0].float().to(device)[HEADER:]
            extent = int(stored[2, 0])
            centre, scale = stored[0, :-POSITION_FEATURES], stored[1, :-POSITION_FEATURES]
            part = LayerMap(centre, scale, stored[HEADER:].T.contiguous(), up)
            layers.append(part if up.any() else None)
        return cls(tuple(layers), extent)


def position_features(layout: PromptLayout, rows: torch.Tensor, extent: int | None = None) -> torch.Tensor:
    """Where context rows stand, fp32 `[rows, POSITION_FEATURES]`.

    A constant; the log of how much longer the row's context is than it was alone; the log of what stands before the chunk; and
    how near the row is to the start of its chunk. extent: what stands before a chunk counts as at most so many tokens.
    """
    start = layout.chunk_starts(rows)
    local = (rows - start).float()
    before = (start - len(layout.prefix)).float()
    before = before if extent is None else before.clamp_max(float(extent))
    near = [local == 0, local == 1, (local > 1) & (local < 4)]
    return torch.stack(
        (
            torch.ones_like(local),
            ((before + local + 1) / (local + 1)).log(),
            (before + 1).log(),
            *(place.float() for place in near),
            (-local / 8).exp(),
            (-local / 32).exp(),
        ),
        dim=1,
    )


def width_of(states: torch.Tensor) -> int:
    """Numbers a row of `[batch, heads, rows, head_dim]` has over all heads."""
    return int(states.shape[1] * states.shape[3])


def rows_of(keys: torch.Tensor, values: torch.Tensor, rotation: LayerRotation, rows: torch.Tensor) -> torch.Tensor:
    """KV `[1, kv_heads, rows, head_dim]` each, positions taken out, as fp32 `[rows, inputs]`."""
    flat = []
    for turn, states in ((rotation.keys, keys), (rotation.values, values)):
        still = states if turn.inv_freq is None else turn.apply(states.contiguous(), -rows)
        flat.append(still[0].transpose(0, 1).reshape(rows.shape[0], -1).float())
    return torch.cat(flat, dim=1)
