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
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from blend.errors import EntryDamagedError, first_line
from blend.layout import PromptLayout
from blend.types import CacheKind
from blend_kernels import Deltas, rotate_keys

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.chunks.opened import OpenChunks
    from blend.model.cache import LayerRotation
    from blend.model.row_decoder import RowDecoder
    from blend.store.base import ChunkStore


ROW_FEATURES = (0, 3, 4, 5, 6, 7)
"""Which position features follow from the row's number in its chunk."""
PLACE_FEATURES = (1, 2)
"""Which of them depend on the prompt."""
POSITION_FEATURES = len(ROW_FEATURES) + len(PLACE_FEATURES)


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

    centre: Tensor
    scale: Tensor
    down: Tensor
    up: Tensor
    gauge: Tensor
    bounds: Bounds
    keys: int

    @property
    def rank(self) -> int:
        """Numbers of a gain before `up`."""
        return self.up.shape[0]

    @cached_property
    def folded(self) -> tuple[Tensor, Tensor]:
        """Weights `[inputs, any]` and bias of the gains before `up` and of the distance by the gauge, side by side."""
        inputs = self.centre.shape[0]
        factors = self._factors[:inputs].double()
        weight = factors / self.scale[:, None].double()
        bias = -(self.centre.double() @ weight)
        return weight.float(), bias.float()

    @cached_property
    def position(self) -> Tensor:
        """The same weights for the position features."""
        inputs = self.centre.shape[0]
        return self._factors[inputs:]

    @property
    def _factors(self) -> Tensor:
        return torch.cat((self.down, self.gauge), dim=1)

    @cached_property
    def of_place(self) -> Tensor:
        """The same weights for those of them that depend on the prompt."""
        return self.position[list(PLACE_FEATURES)]


def shares(distance: Tensor, norms: Sequence[Tensor], most: Sequence[float | Tensor]) -> Tensor:
    """The share of its predicted gain that each row gets, `[rows]`.

    distance: from the fitted rows, relative to the farthest. A row up to 1 gets all, one at 2 gets nothing. norms: of the
    predicted gains of keys and values, which are limited to `most`.
    """
    share = (2 - distance).clamp(0, 1)
    for size, limit in zip(norms, most, strict=True):
        within = limit / size.clamp_min(1e-20)
        share = share.minimum(within.clamp_max(1))
    return share


@dataclass(frozen=True, eq=False)
class KVCorrection:
    """One map a layer; None where nothing is to be added.

    before, length: most tokens before a chunk and in a chunk that it was fitted on; larger numbers count as these.
    provisional: whether it was fitted on other text than the corpus's; a fit on the corpus replaces it.
    """

    layers: tuple[LayerCorrection | None, ...]
    before: int
    length: int
    provisional: bool = False

    def to_bytes(self) -> bytes:
        """The content of a safetensors file, as stores keep it."""
        from safetensors.torch import save

        tensors = {
            "format": torch.tensor(CORRECTION_FORMAT),
            "layers": torch.tensor(len(self.layers)),
            "before": torch.tensor(self.before),
            "length": torch.tensor(self.length),
            "provisional": torch.tensor(self.provisional),
        }
        for index, part in enumerate(self.layers):
            if part is None:
                continue
            for name in _FACTORS:
                factor: Tensor = getattr(part, name)
                tensors[f"{index}.{name}"] = factor.contiguous().cpu()
            tensors[f"{index}.bounds"] = torch.tensor(part.bounds)
            tensors[f"{index}.keys"] = torch.tensor(part.keys)
        return save(tensors)

    @classmethod
    def from_bytes(cls, content: bytes, device: torch.device) -> KVCorrection:
        """Read what `to_bytes` wrote. Raises ValueError for anything else, other formats included."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            tensors = {name: tensor.to(device) for name, tensor in load(content).items()}
            written_as = int(tensors.get("format", 1))  # the first format did not say so
            if written_as != CORRECTION_FORMAT:
                raise ValueError(
                    f"it has format {written_as}, not {CORRECTION_FORMAT}: fit it again with `blend precompute`"
                )
            depth = int(tensors["layers"])
            layers = tuple(_layer_of(tensors, index) for index in range(depth))
            provisional = bool(tensors.get("provisional", False))  # earlier versions stored none
            return cls(layers, int(tensors["before"]), int(tensors["length"]), provisional)
        except (SafetensorError, KeyError, IndexError, RuntimeError, TypeError) as error:
            raise ValueError(f"it is no KV correction ({first_line(error)})") from None

    def require_fit(self, rotations: Sequence[LayerRotation]) -> None:
        """Raise ValueError unless it has maps, each as wide as its layer's keys and values."""
        fits = len(self.layers) == len(rotations) and any(self.layers)
        for part, rotation in zip(self.layers, rotations, strict=False):
            if part is not None:
                widths = (part.centre.shape[0], part.keys)
                fits &= widths == (rotation.width, math.prod(rotation.key_shape))
        if not fits:
            raise ValueError("it was measured on a model of another shape")


CORRECTION_FORMAT = 1
"""Of a stored correction: another formula needs another number, so that nothing reads the old factors as its own."""
_FACTORS = ("centre", "scale", "down", "up", "gauge")


def _layer_of(tensors: Mapping[str, Tensor], index: int) -> LayerCorrection | None:
    if f"{index}.up" not in tensors:
        return None
    bounds = Bounds(*tensors[f"{index}.bounds"].tolist())
    factors = [tensors[f"{index}.{name}"] for name in _FACTORS]
    centre, scale, down, up, gauge = factors
    (inputs,) = centre.shape
    features = inputs + POSITION_FEATURES
    shapes = [(inputs,), (inputs,), (features, up.shape[0]), (up.shape[0], inputs), (features, gauge.shape[1])]
    are_float = all(factor.dtype == torch.float32 for factor in factors)
    if not are_float or [tuple(factor.shape) for factor in factors] != shapes:
        raise ValueError(f"layer {index} of the KV correction has impossible shapes")
    are_finite = all(bool(factor.isfinite().all()) for factor in (*factors, torch.tensor(bounds)))
    if not are_finite or scale.min() <= 0 or min(bounds) <= 0:
        raise ValueError(f"layer {index} of the KV correction has impossible numbers")
    return LayerCorrection(centre, scale, down, up, gauge, bounds, int(tensors[f"{index}.keys"]))


def position_features(layout: PromptLayout, rows: Tensor, before: float = math.inf, length: float = math.inf) -> Tensor:
    """The position features of context rows of whole chunks, fp32 `[rows, POSITION_FEATURES]`.

    before, length: limits for the tokens before a chunk and in a chunk.
    """
    start = layout.chunk_starts(rows)
    local = rows - start
    of_row = row_features(local, length)
    of_place = place_features(start - len(layout.kept_behind), local, before, length)
    return torch.cat((of_row[:, :1], of_place, of_row[:, 1:]), dim=1)


def row_features(local: Tensor, length: float = math.inf) -> Tensor:
    """Features of rows that do not depend on the prompt, `[rows, 6]`: a constant, and how near the chunk's start each is.

    local: the row's number in its chunk. length: as in `position_features`.
    """
    local = local.float().clamp_max(length - 1)
    columns = (
        torch.ones_like(local),
        (local == 0).float(),
        (local == 1).float(),
        ((local > 1) & (local < 4)).float(),
        (-local / 8).exp(),
        (-local / 32).exp(),
    )
    return torch.stack(columns, dim=1)


def place_features(ahead: Tensor, local: Tensor, before: float, length: float) -> Tensor:
    """Features of where rows stand in a prompt, `[rows, 2]`.

    The log ratio of the row's context to its context alone, and the log of the tokens between prefix and chunk.

    Args:
        ahead: tokens between the prefix and the chunk.
        local: the row's number in its chunk.
        before: limits `ahead`.
        length: limits `local`, as in `position_features`.

    """
    local = local.float().clamp_max(length - 1)
    ahead = ahead.float().clamp(0, before)
    context_ratio = (ahead + local + 1) / (local + 1)
    tokens_ahead = (ahead + 1).log()
    return torch.stack((context_ratio.log(), tokens_ahead), dim=1)


def rows_of(keys: Tensor, values: Tensor, rotation: LayerRotation, rows: Tensor) -> Tensor:
    """KV `[n, kv_heads, rows, head_dim]` each, positions taken out, as fp32 `[n, rows, inputs]`."""
    flat = []
    for turn, states in ((rotation.keys, keys), (rotation.values, values)):
        unrotated = rotate_keys(states, Deltas(-rows), turn)
        flat.append(unrotated.transpose(1, 2).flatten(2).float())
    return torch.cat(flat, dim=2)


def nearest(layout: PromptLayout, rows: Tensor) -> Tensor:
    """How many rows of its chunk are nearest to each of these sorted context rows, fp32 `[rows]`."""
    if rows.shape[0] == 0:
        return rows.float()
    first = layout.chunk_starts(rows).float()
    stops = torch.tensor(layout.bounds[1:]).to(rows.device, non_blocking=True)
    last = stops[torch.bucketize(rows, stops, right=True)].float()
    middle = (rows[1:] + rows[:-1] + 1) / 2
    in_same_chunk = first[1:] == first[:-1]
    later_begins = torch.where(in_same_chunk, middle, first[1:])
    earlier_ends = torch.where(in_same_chunk, middle, last[:-1])
    begins = torch.cat((first[:1], later_begins))
    ends = torch.cat((earlier_ends, last[-1:]))
    return ends - begins


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

    def held(self, library: ChunkLibrary, kind: CacheKind) -> HeldCorrection:
        """The correction of isolated or contextual caches, from memory or the store."""
        encoder = library.contextual if kind is CacheKind.CONTEXTUAL else library.isolated
        if encoder is None:
            return HeldCorrection(library.generation)
        name = encoder.identity.correction_name
        correction = self._held.get(name)
        if correction is None or correction.generation != library.generation:
            correction = self._read(name, library.generation)
            self._held[name] = correction
        return correction

    def of_prompt(self, library: ChunkLibrary, opened: OpenChunks) -> Corrections:
        """The correction of each place. A first chunk right behind the prefix needs none."""
        kinds = [None if chunk is None else chunk.key.kind for chunk in opened.stored]
        if opened.first_in_place and opened.first_place is not None:
            kinds[opened.first_place] = None
        by_kind = {kind: self.held(library, kind) for kind in CacheKind if kind in kinds}
        problems = tuple(correction.problem for correction in by_kind.values() if correction.problem)
        places: list[KVCorrection | None] = [None] * len(kinds)
        for kind, correction in by_kind.items():
            # Compared by identity: a look-up by an Enum costs calls for each place.
            pairs = zip(kinds, places, strict=True)
            places = [correction.map if of is kind else added for of, added in pairs]
        return Corrections(tuple(places), problems)

    def _read(self, name: str, generation: str) -> HeldCorrection:
        try:
            content = self.store.read_artifact(name)
            if content is None:
                return HeldCorrection(generation)
            correction = KVCorrection.from_bytes(content, self.decoder.device)
            correction.require_fit(self.decoder.rotations)
        except (EntryDamagedError, ValueError) as error:
            return HeldCorrection(generation, None, f"the KV correction cannot be used: {error}")
        return HeldCorrection(generation, correction)
