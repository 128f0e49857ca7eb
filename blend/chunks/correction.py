"""The context map: what a chunk's KV gains because something stands before it, predicted from that KV.

Most of the difference between a row's KV in context and alone follows from the row itself and from where it stands. One linear
map a layer, from the row's stored keys and values to that difference, is fitted on a few prompts of the user's own chunks
(`blend.chunks.fit_correction`), once per model and prefix, and added to stored chunks that do not stand right behind the
prefix. There is one for chunks computed alone and one for those computed in company (`blend.chunks.library`), which have most
of it already:

    kv(in context) ~ kv + up^T down^T [(kv - centre) / scale, position features]

kv is a row's keys, with their position taken out (R(-p) k), and values, all heads side by side.
docs/selection.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from blend.types import PromptLayout

if TYPE_CHECKING:
    from blend.model.admission import LayerRotation
    from blend.model.cache import BlendedCache
    from blend.model.decoder import Decoder

POSITION_FEATURES = 8


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

    def to_bytes(self) -> bytes:
        """As a store keeps it: a safetensors file."""
        from safetensors.torch import save

        tensors = {"layers": torch.tensor(len(self.layers)), "extent": torch.tensor(self.extent)}
        for index, part in enumerate(self.layers):
            if part is not None:
                tensors |= {f"{index}.{name}": getattr(part, name).contiguous().cpu() for name in _FACTORS}
        return save(tensors)

    @classmethod
    def from_bytes(cls, content: bytes, device: torch.device) -> ContextMap:
        """What `to_bytes` made. Raises ValueError for anything else."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            tensors = {name: tensor.to(device) for name, tensor in load(content).items()}
            depth, extent = int(tensors["layers"]), int(tensors["extent"])
            return cls(tuple(_layer_of(tensors, index) for index in range(depth)), extent)
        except (SafetensorError, KeyError, RuntimeError) as error:
            raise ValueError(f"it is no context map ({str(error).partition(chr(10))[0]})") from None

    def require_fit(self, widths: Sequence[int]) -> None:
        """Raise ValueError unless layer i's rows are `widths[i]` numbers wide, keys and values together."""
        found = [None if part is None else part.centre.shape[0] for part in self.layers]
        if len(found) != len(widths) or any(f not in (None, w) for f, w in zip(found, widths, strict=False)):
            raise ValueError("it was measured on a model of another shape")


_FACTORS = ("centre", "scale", "down", "up")


def _layer_of(tensors: Mapping[str, torch.Tensor], index: int) -> LayerMap | None:
    if f"{index}.up" not in tensors:
        return None
    part = LayerMap(*(tensors[f"{index}.{name}"] for name in _FACTORS))
    (inputs,), rank = part.centre.shape, part.up.shape[0]
    shapes = [tuple(getattr(part, name).shape) for name in _FACTORS]
    sound = shapes == [(inputs,), (inputs,), (inputs + POSITION_FEATURES, rank), (rank, inputs)]
    if not sound or any(getattr(part, name).dtype != torch.float32 for name in _FACTORS):
        raise ValueError(f"layer {index} of the context map has impossible shapes")
    return part


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
