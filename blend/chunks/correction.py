"""The KV correction: what a chunk's KV gains because something stands before it, predicted from that KV.

Most of the difference between a row's KV in context and alone follows from the row itself and from where it stands. One linear
map a layer, from the row's stored keys and values to that difference, is fitted on a few prompts of the user's own chunks
(`blend.chunks.fit_correction`), once per model and prefix, and added to stored chunks that do not stand right behind the
prefix. There is one for isolated caches and one for contextual caches (`blend.chunks.library`), which have most of it already;
where these stand in the first place too, a third one takes out of them there what the surrogate context put in:

    kv(in context) ~ kv + up^T down^T [(kv - centre) / scale, position features]

kv is a row's keys, with their position taken out (R(-p) k), and values, all heads side by side.
docs/study.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.types import PromptLayout

if TYPE_CHECKING:
    from blend.model.admission import LayerRotation

POSITION_FEATURES = 8


class Bounds(NamedTuple):
    """What the rows seen in fitting reached, in one layer; nothing is predicted beyond.

    reach: the largest distance of a row, by the map's gauge. keys, values: the largest norms of what a row's keys and values
    gained.
    """

    reach: float
    keys: float
    values: float


@dataclass(frozen=True, eq=False)
class LayerCorrection:
    """The map of one layer, float32. `inputs` is the width of a row's keys and values together.

    centre, scale: `[inputs]`. down: `[inputs + POSITION_FEATURES, rank]`. up: `[rank, inputs]`. gauge: `[inputs +
    POSITION_FEATURES, any]`; the norm of a row's product with it is about its Mahalanobis distance from the rows seen in
    fitting. keys: how many of the inputs are keys.
    """

    centre: torch.Tensor
    scale: torch.Tensor
    down: torch.Tensor
    up: torch.Tensor
    gauge: torch.Tensor
    bounds: Bounds
    keys: int

    def add(self, keys: torch.Tensor, values: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Add to KV what each row gains, head by head and in place.

        keys, values: `[kv_heads, rows, head_dim]` each, fp32, positions taken out. features: `[rows, POSITION_FEATURES]`.
        Returns what `up` makes these gains of, `[rows, rank]`, shrunk for rows unlike those seen in fitting (`shares`).
        """
        weight, bias = self._folded
        heads = [*keys, *values]
        widths = [head.shape[1] for head in heads]
        both = torch.addmm(bias, features, self._position)
        for head, mine in zip(heads, torch.split(weight, widths), strict=True):
            both.addmm_(head, mine)
        hidden = self._shrunk(both)
        for head, mine in zip(heads, torch.split(self.up, widths, dim=1), strict=True):
            head.addmm_(hidden, mine)
        return hidden

    def _shrunk(self, both: torch.Tensor) -> torch.Tensor:
        """What `add` returns, from it unshrunk and the row's distance by the gauge, side by side."""
        hidden, distance = both[:, : self.up.shape[0]], both[:, self.up.shape[0] :].norm(dim=1)
        norms = [(hidden @ gram * hidden).sum(1).clamp_min(0).sqrt() for gram in self._grams]
        return hidden * shares(distance / self.bounds.reach, norms, self.bounds[1:])[:, None]

    @cached_property
    def _folded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Centre and scale inside the factors, so that a prediction passes over the rows once."""
        both = torch.cat((self.down, self.gauge), dim=1)[: self.centre.shape[0]].double()
        weight = both / self.scale[:, None].double()
        return weight.float(), -(self.centre.double() @ weight).float()

    @cached_property
    def _position(self) -> torch.Tensor:
        return torch.cat((self.down, self.gauge), dim=1)[self.centre.shape[0] :]

    @cached_property
    def _grams(self) -> tuple[torch.Tensor, ...]:
        """For keys and values `[rank, rank]`, by which the norm of a gain follows from `hidden`."""
        return tuple(part @ part.T for part in (self.up[:, : self.keys], self.up[:, self.keys :]))


def shares(distance: torch.Tensor, norms: Sequence[torch.Tensor], most: Sequence[float | torch.Tensor]) -> torch.Tensor:
    """How much of what is predicted for rows they are to gain, `[rows]`.

    distance: from the rows seen in fitting, relative to the farthest of those. A row no farther keeps all, one twice as far
    none. norms: of the keys' and the values' gains as predicted; neither may be larger than the largest that was seen, `most`.
    """
    share = (2 - distance).clamp(0, 1)
    for size, limit in zip(norms, most, strict=True):
        share = share.minimum((limit / size.clamp_min(1e-20)).clamp_max(1))
    return share


class Added:
    """What a correction adds to a prompt, layer by layer as the prompt's cache is filled.

    map: the correction. rows: sorted positions of the context rows that it adds to. parts: for each layer the results of
    `LayerCorrection.add` for these rows, in order.
    """

    def __init__(self, correction: KVCorrection, rows: torch.Tensor) -> None:
        self.map, self.rows = correction, rows
        self.parts: tuple[list[torch.Tensor], ...] = tuple([] for _ in correction.layers)

    def hidden(self, layer: int) -> torch.Tensor | None:
        """`[rows, rank]`, or None where nothing is added in this layer."""
        parts = self.parts[layer]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]) if parts else None


@dataclass(frozen=True)
class KVCorrection:
    """One map a layer; None where nothing is to be added.

    before, length: the most tokens before a chunk and in a chunk that it was fitted on; further ones count as those.
    """

    layers: tuple[LayerCorrection | None, ...]
    before: int
    length: int

    def to_bytes(self) -> bytes:
        """As a store keeps it: a safetensors file."""
        from safetensors.torch import save

        tensors = {name: torch.tensor(value) for name, value in zip(_COUNTS, self._counts, strict=True)}
        for index, part in enumerate(self.layers):
            if part is not None:
                tensors |= {f"{index}.{name}": getattr(part, name).contiguous().cpu() for name in _FACTORS}
                tensors |= {f"{index}.bounds": torch.tensor(part.bounds), f"{index}.keys": torch.tensor(part.keys)}
        return save(tensors)

    @property
    def _counts(self) -> tuple[int, int, int]:
        return len(self.layers), self.before, self.length

    @classmethod
    def from_bytes(cls, content: bytes, device: torch.device) -> KVCorrection:
        """What `to_bytes` made. Raises ValueError for anything else."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            tensors = {name: tensor.to(device) for name, tensor in load(content).items()}
            depth, before, length = (int(tensors[name]) for name in _COUNTS)
            return cls(tuple(_layer_of(tensors, index) for index in range(depth)), before, length)
        except (SafetensorError, KeyError, RuntimeError, TypeError) as error:
            raise ValueError(f"it is no KV correction ({str(error).partition(chr(10))[0]})") from None

    def require_fit(self, rotations: Sequence[LayerRotation]) -> None:
        """Raise ValueError unless every layer's rows are as wide as these layers' keys and values."""
        shapes = [(rotation.width, math.prod(rotation.key_shape)) for rotation in rotations]
        found = [None if part is None else (part.centre.shape[0], part.keys) for part in self.layers]
        if len(found) != len(shapes) or any(f not in (None, s) for f, s in zip(found, shapes, strict=False)):
            raise ValueError("it was measured on a model of another shape")


_COUNTS = ("layers", "before", "length")
_FACTORS = ("centre", "scale", "down", "up", "gauge")


def _layer_of(tensors: Mapping[str, torch.Tensor], index: int) -> LayerCorrection | None:
    if f"{index}.up" not in tensors:
        return None
    bounds, keys = Bounds(*tensors[f"{index}.bounds"].tolist()), int(tensors[f"{index}.keys"])
    factors = [tensors[f"{index}.{name}"] for name in _FACTORS]
    centre, scale, down, up, gauge = factors
    part = LayerCorrection(centre, scale, down, up, gauge, bounds, keys)
    (inputs,), rank = centre.shape, up.shape[0]
    both = inputs + POSITION_FEATURES
    shapes = [(inputs,), (inputs,), (both, rank), (rank, inputs), (both, *gauge.shape[1:])]
    if [tuple(factor.shape) for factor in factors] != shapes or any(f.dtype != torch.float32 for f in factors):
        raise ValueError(f"layer {index} of the KV correction has impossible shapes")
    numbers = torch.stack([*(factor.abs().sum() for factor in factors), up.new_tensor(bounds).sum()])
    if not (numbers.isfinite().all() and (scale > 0).all() and min(bounds) >= 0 < bounds.reach):
        raise ValueError(f"layer {index} of the KV correction has impossible numbers")
    return part


def position_features(
    layout: PromptLayout, rows: torch.Tensor, before: int | None = None, length: int | None = None
) -> torch.Tensor:
    """Where context rows stand, fp32 `[rows, POSITION_FEATURES]`.

    A constant; the log of how much longer the row's context is than it was alone; the log of what stands before the chunk but
    for a prefix like that of its cache; and how near the row is to the start of its chunk. before, length: what stands before a
    chunk, and before a row in its chunk, counts as at most so many tokens.
    """
    start = layout.chunk_starts(rows)
    local = (rows - start).float().clamp_max(math.inf if length is None else length - 1)
    ahead = (start - len(layout.kept_behind)).float().clamp(0, math.inf if before is None else before)
    near = [local == 0, local == 1, (local > 1) & (local < 4)]
    return torch.stack(
        (
            torch.ones_like(local),
            ((ahead + local + 1) / (local + 1)).log(),
            (ahead + 1).log(),
            *(place.float() for place in near),
            (-local / 8).exp(),
            (-local / 32).exp(),
        ),
        dim=1,
    )


def rows_of(keys: torch.Tensor, values: torch.Tensor, rotation: LayerRotation, rows: torch.Tensor) -> torch.Tensor:
    """KV `[1, kv_heads, rows, head_dim]` each, positions taken out, as fp32 `[rows, inputs]`."""
    flat = []
    for turn, states in ((rotation.keys, keys), (rotation.values, values)):
        still = states if turn.inv_freq is None else turn.apply(states.contiguous(), -rows)
        flat.append(still[0].transpose(0, 1).reshape(rows.shape[0], -1).float())
    return torch.cat(flat, dim=1)
