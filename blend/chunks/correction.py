"""The KV correction: predicts how a chunk's KV changes because text stands before the chunk.

Most of the difference between a row's KV in context and alone follows from the row itself and from where it stands. One linear
map a layer, from the row's stored keys and values to that difference, is fitted on a few prompts of the user's own chunks
(`blend.chunks.fit`), once per model and prefix, and added to stored chunks that do not stand right behind the
prefix. There is one for isolated caches and one for contextual caches (`blend.chunks.library`), which already have most of
the difference:

    kv(in context) ~ kv + up^T down^T [(kv - centre) / scale, position features]

kv is a row's keys, with their position taken out (R(-p) k), and values, all heads side by side.
docs/study.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from blend.errors import EntryDamagedError
from blend.types import PromptLayout

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary, OpenLibrary
    from blend.model.cache import BlendedCache, LayerRotation
    from blend.model.decoder import RowDecoder
    from blend.store.base import ChunkStore


POSITION_FEATURES = 8


class Bounds(NamedTuple):
    """The largest values among a layer's fitted rows; predictions stay within them.

    reach: distance by the map's gauge. keys, values: norms of the gain.
    """

    reach: float
    keys: float
    values: float


@dataclass(frozen=True, eq=False)
class LayerCorrection:
    """The map of one layer, float32. `inputs` is the width of a row's keys and values together.

    Attributes:
        centre, scale: `[inputs]`.
        down: `[inputs + POSITION_FEATURES, rank]`.
        up: `[rank, inputs]`.
        gauge: `[inputs + POSITION_FEATURES, any]`; the norm of a row's product with it is about its Mahalanobis distance
            from the fitted rows.
        keys: how many of the inputs are keys.

    """

    centre: torch.Tensor
    scale: torch.Tensor
    down: torch.Tensor
    up: torch.Tensor
    gauge: torch.Tensor
    bounds: Bounds
    keys: int

    def add(self, keys: torch.Tensor, values: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Add each row's predicted gain to its KV, in place.

        keys, values: `[kv_heads, rows, head_dim]` each, fp32, positions taken out. features: `[rows, POSITION_FEATURES]`.
        Returns the gains before `up`, `[rows, rank]`, reduced for rows unlike the fitted ones (`shares`).
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
        """What `add` returns. both: the unreduced gains and the distances by the gauge, side by side."""
        hidden, distance = both[:, : self.up.shape[0]], both[:, self.up.shape[0] :].norm(dim=1)
        norms = [(hidden @ gram * hidden).sum(1).clamp_min(0).sqrt() for gram in self._grams]
        return hidden * shares(distance / self.bounds.reach, norms, self.bounds[1:])[:, None]

    @cached_property
    def _folded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Centre and scale folded into the factors, so that a prediction reads the rows once."""
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
    """The share of its predicted gain that each row gets, `[rows]`.

    distance: from the fitted rows, relative to the farthest. A row up to 1 gets all, one at 2 gets nothing. norms: of the
    predicted gains of keys and values, which are limited to `most`.
    """
    share = (2 - distance).clamp(0, 1)
    for size, limit in zip(norms, most, strict=True):
        share = share.minimum((limit / size.clamp_min(1e-20)).clamp_max(1))
    return share


class Added:
    """What a correction adds to a prompt, filled layer by layer.

    Attributes:
        map: the correction.
        rows: sorted positions of the context rows that it adds to.
        parts: for each layer the results of `LayerCorrection.add` for these rows, in order.

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

    before, length: most tokens before a chunk and in a chunk that it was fitted on; larger numbers count as these.
    """

    layers: tuple[LayerCorrection | None, ...]
    before: int
    length: int

    def to_bytes(self) -> bytes:
        """The content of a safetensors file, as stores keep it."""
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
        """Read what `to_bytes` wrote. Raises ValueError for anything else."""
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
    """The position features of context rows, fp32 `[rows, POSITION_FEATURES]`.

    A constant; the log ratio of the row's context to its context alone; the log of the tokens between prefix and chunk; and how
    near the row is to its chunk's start. before, length: limits for the tokens before a chunk and before a row in it.
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
        unrotated = states if turn.inv_freq is None else turn.apply(states.contiguous(), -rows)
        flat.append(unrotated[0].transpose(0, 1).reshape(rows.shape[0], -1).float())
    return torch.cat(flat, dim=1)


_Many = TypeVar("_Many", torch.Tensor, list[int])
MOST_ROWS = 64  # compared in a layer
MOST_LAYERS = 12  # compared of a map


class CorrectionCheck:
    """Checks a KV correction on the rows that are recomputed anyway; `BlendedCache.watched` calls `see`, `Recompute` `choose`.

    A prompt may be unlike the chunks that the map was fitted on. Every recomputed row with stored KV has fresh KV in every
    layer, to compare with the stored and the corrected KV. Recomputed rows are no fair sample, so each one counts for the
    rows of its chunk that are nearest to it.

    Sums run over all pieces in float64, so the score does not depend on how the rows were cut. added: the additions of the
    maps.
    """

    def __init__(self, decoder: RowDecoder, layout: PromptLayout, added: Sequence[Added]) -> None:
        self._decoder, self._layout, self._added = decoder, layout, added
        self._first = [int(one.rows[0]) < layout.chunk_spans[0].stop for one in added]
        self._layers = [_spread([i for i, part in enumerate(one.map.layers) if part], MOST_LAYERS) for one in added]
        self._samples: list[_Sample] = []
        self._piece: tuple[torch.Tensor, int, list[_Sample]] | None = None
        depth = len(decoder.rotations)
        self._until = [-1] * depth  # the last position that each layer has seen
        # Behind the first chunk and of it; layers; keys and values; squared norms, see `_norms`.
        self._sums = torch.zeros((2, depth, 2, 3), dtype=torch.float64, device=decoder.device)

    def choose(self, rows: torch.Tensor) -> None:
        """Take the sorted positions `[rows]` that are computed from here on."""
        self._samples = [_Sample.of(self._layout, rows, added.rows) for added in self._added]
        self._piece = None

    def see(
        self, index: int, positions: torch.Tensor, cache: BlendedCache, fresh: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Compare a layer's fresh KV `[1, kv_heads, rows, head_dim]` at `positions`, before it replaces the old.

        Pieces come in ascending order. Rows that a layer writes twice count once.
        """
        if not self._samples or not any(index in layers for layers in self._layers):
            return
        _, last, samples = self._piece = self._piece_at(positions)
        if last <= self._until[index]:
            return
        self._until[index] = last
        for added, first, layers, sample in zip(self._added, self._first, self._layers, samples, strict=True):
            part, hidden = added.map.layers[index], added.hidden(index)
            if part is None or hidden is None or index not in layers or sample.rows.shape[0] == 0:
                continue
            keys, values = (
                new[:, :, sample.here] - old[:, :, sample.rows]
                for new, old in zip(fresh, cache.view(index), strict=True)
            )
            left = rows_of(keys, values, self._decoder.rotations[index], sample.rows)
            gain = hidden[sample.there] @ part.up
            for sums, mine in zip(
                self._sums[int(first), index], (slice(part.keys), slice(part.keys, None)), strict=True
            ):
                sums += _norms(left[:, mine].double(), gain[:, mine].double()) @ sample.weight

    def _piece_at(self, positions: torch.Tensor) -> tuple[torch.Tensor, int, list[_Sample]]:
        """Positions of a pass, the last of them, and those that are compared, for each map; the same in most layers."""
        if self._piece is not None and self._piece[0] is positions:
            return self._piece
        return positions, int(positions[-1]), [sample.among(positions) for sample in self._samples]

    def score(self) -> float:
        """From -1 (the maps made everything worse) to 1 (they made it exact); 0 if nothing could be compared.

        Keys, values and layers count alike; parts without a map do not count. A map that adds to the first chunk is scored
        separately, and the worse score counts. Single rows are not judged: many gain nothing, and get next to nothing.
        """
        stored, mapped, gained = self._sums.unbind(-1)
        scores = (stored - mapped) / (stored + mapped).clamp_min(1e-20)
        means = scores.masked_fill(gained == 0, torch.nan).flatten(1).nanmean(1)
        return min((mean for mean in means.tolist() if mean == mean), default=0.0)


def _norms(left: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Squared norms of fresh - stored, fresh - corrected (`left`) and the gain, for each row, `[3, rows]`."""
    return torch.stack([one.square().sum(1) for one in (left + gain, left, gain)])


class _Sample(NamedTuple):
    """Recomputed rows that a map added to.

    rows: their positions. here, there: indices of them among the recomputed, and among those the map added to. weight: for how
    many rows each speaks, float64.
    """

    rows: torch.Tensor
    here: torch.Tensor
    there: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def of(cls, layout: PromptLayout, recomputed: torch.Tensor, added: torch.Tensor) -> _Sample:
        """Both sorted int64 positions."""
        at = torch.searchsorted(added, recomputed).clamp_max(added.shape[0] - 1)
        here = _spread((added[at] == recomputed).nonzero()[:, 0], MOST_ROWS)
        rows = recomputed[here]
        return cls(rows, here, at[here], nearest(layout, rows).double())

    def among(self, piece: torch.Tensor) -> _Sample:
        """Those of them at the sorted positions of a piece, `here` being indices of these."""
        at = torch.searchsorted(piece, self.rows).clamp_max(piece.shape[0] - 1)
        mine = (piece[at] == self.rows).nonzero()[:, 0]
        return _Sample(self.rows[mine], at[mine], self.there[mine], self.weight[mine])


def _spread(many: _Many, most: int) -> _Many:
    """At most so many of them, at even distances."""
    return many[:: max(1, -(-len(many) // most))]


def nearest(layout: PromptLayout, rows: torch.Tensor) -> torch.Tensor:
    """How many rows of its chunk are nearest to each of these sorted context rows, fp32 `[rows]`."""
    if rows.shape[0] == 0:
        return rows.float()
    first = layout.chunk_starts(rows).float()
    stops = rows.new_tensor([span.stop for span in layout.chunk_spans])
    last = stops[torch.bucketize(rows, stops, right=True)].float()
    middle, same = (rows[1:] + rows[:-1] + 1) / 2, first[1:] == first[:-1]
    below = torch.cat((first[:1], torch.where(same, middle, first[1:])))
    return torch.cat((torch.where(same, middle, last[:-1]), last[-1:])) - below


class Corrections(NamedTuple):
    """The correction of each place of a prompt, or None; a line for every correction that was refused."""

    of_places: tuple[KVCorrection | None, ...] = ()
    problems: tuple[str, ...] = ()


class HeldCorrection(NamedTuple):
    """A correction as the store held it at one generation; problem: why it was refused, or nothing."""

    generation: str
    map: KVCorrection | None = None
    problem: str = ""


class StoredCorrections:
    """The KV corrections of one decoder in one store, held in memory while they are current."""

    def __init__(self, decoder: RowDecoder, store: ChunkStore) -> None:
        self.decoder = decoder
        self.store = store
        self._held: dict[str, HeldCorrection] = {}

    def held(self, library: ChunkLibrary, *, contextual: bool) -> HeldCorrection:
        """The correction of isolated or contextual caches, from memory or the store."""
        encoder = library.contextual if contextual else library.isolated
        if encoder is None:
            return HeldCorrection(library.generation)
        name = encoder.identity.correction_name
        held = self._held.get(name)
        if held is None or held.generation != library.generation:
            self._held[name] = held = self._read(name, library.generation)
        return held

    def of_prompt(self, library: ChunkLibrary, opened: OpenLibrary) -> Corrections:
        """The correction of each place. A first chunk right behind the prefix and caches taken in place need none."""
        exact = opened.first if opened.near else None
        kinds = [
            None if one is None or one.in_place or place == exact else one.contextual
            for place, one in enumerate(opened.used)
        ]
        held = {kind: self.held(library, contextual=kind) for kind in sorted({k for k in kinds if k is not None})}
        places = [
            held[kind].map if hit and kind is not None else None for kind, hit in zip(kinds, opened.hits, strict=True)
        ]
        return Corrections(tuple(places), tuple(one.problem for one in held.values() if one.problem))

    def _read(self, name: str, generation: str) -> HeldCorrection:
        try:
            content = self.store.read_artifact(name)
            if content is None:
                return HeldCorrection(generation)
            found = KVCorrection.from_bytes(content, self.decoder.device)
            found.require_fit(self.decoder.rotations)
        except (EntryDamagedError, ValueError) as error:
            return HeldCorrection(generation, None, f"the KV correction cannot be used: {error}")
        return HeldCorrection(generation, found)
