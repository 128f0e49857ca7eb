"""What the KV correction adds to the stored chunks of one prompt.

A gain is affine in a row's own KV and in its position features, then limited (`shares`). What depends on the row alone is
computed once, when its chunk comes into memory, and kept there: its row part. A prompt adds the position features, limits the
sum, and multiplies it by the map's second factor, one product a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from blend.chunks.correction import (
    PLACE_FEATURES,
    ROW_FEATURES,
    KVCorrection,
    LayerCorrection,
    place_features,
    row_features,
    shares,
)
from blend.chunks.opened import memory_of
from blend_kernels import ChunkKV, ChunkShape, Deltas, LayerShape, PlacingTable, place_layer, rotate_keys

if TYPE_CHECKING:
    from blend.layout import PromptLayout
    from blend.model.row_decoder import RowDecoder
    from blend.store.ready import ReadyChunk
    from blend_kernels.chunk_kv import Integers

_ROW_PART = attrgetter("row_part")
_AT_ONCE = 1 << 24  # numbers of several layers that are limited together
_ALIGNED = 4  # numbers of 16 bytes, which kernels read at once


class StackedMaps:
    """The maps of one correction, all layers that have one side by side, padded with zeros to one rank.

    A row's gain before `up` is h = r + f P, with r of the row alone and f the two features of its place. How far the row is
    from the fitted ones, and the norms of its gain, are square roots of a + 2 b f + f C f, with a and b of the row alone.

    Attributes:
        number: the number of each layer's map.
        rank: numbers of h.
        width: numbers in a row part of one layer: r, then a and the two of b for keys, for values and for the distance, then
            zeros.
        shape: of row parts in memory, a layer for each map.
        together: the same memory as one layer with a head for each map, which a kernel places at once.
        up: the second factor of each map, `[rank, inputs]`.

    """

    def __init__(self, correction: KVCorrection) -> None:
        self.layers = [(index, layer) for index, layer in enumerate(correction.layers) if layer is not None]
        self.number = {index: number for number, (index, _) in enumerate(self.layers)}
        self.rank = max(layer.rank for _, layer in self.layers)
        self._used = self.rank + len(_FORMS) * (1 + len(PLACE_FEATURES))
        self.width = -(-self._used // _ALIGNED) * _ALIGNED
        alone = LayerShape(1, self.width, 0, 0)
        self.shape = ChunkShape((alone,) * len(self.layers), torch.float32)
        stacked_layers = alone._replace(key_heads=len(self.layers))
        self.together = ChunkShape((stacked_layers,), torch.float32)
        self._length = correction.length
        self._narrow_up: dict[tuple[range, torch.dtype], Tensor] = {}
        maps = [layer for _, layer in self.layers]
        self.up = [pad(layer.up, (0, 0, 0, self.rank - layer.rank)) for layer in maps]
        # P, `[maps, 2, rank]`; the numbers of C, `[maps, 3, forms]`; bounds of norms and distance, `[maps, 1, forms]`.
        self._place = torch.stack([self._padded(layer.of_place, layer.rank) for layer in maps])
        self._squares = torch.stack(list(map(_squares_of, maps)))
        bounds = [(layer.bounds.keys, layer.bounds.values, layer.bounds.reach) for layer in maps]
        self._bounds = self.up[0].new_tensor(bounds)[:, None]

    def _padded(self, products: Tensor, rank: int) -> Tensor:
        """The gains before `up` among products of a map's factors, of all maps' rank."""
        return pad(products[:, :rank], (0, self.rank - rank))

    def row_part(self, number: int, keys: Tensor, values: Tensor, local: Tensor) -> Tensor:
        """What a map makes of rows alone, `[rows, width]`.

        keys, values: `[kv_heads, rows, head_dim]` each, fp32, positions taken out. local: numbers of the rows in their chunks.
        """
        layer = self.layers[number][1]
        weight, bias = layer.folded
        features = row_features(local, self._length)
        products = torch.addmm(bias, features, layer.position[list(ROW_FEATURES)])
        first = 0
        for states in (keys, values):
            heads, rows, dim = states.shape
            width = heads * dim
            if width:
                flat = states.transpose(0, 1).reshape(rows, width)
                products = torch.addmm(products, flat, weight[first : first + width])
                first += width
        columns = [self._padded(products, layer.rank)]
        for part, through, by_place in _forms(layer, products, layer.of_place):
            columns.append((through * part).sum(1, keepdim=True))
            columns.append(through @ by_place.T)
        filled = torch.cat(columns, dim=1)
        return pad(filled, (0, self.width - filled.shape[1]))

    def narrow_up(self, numbers: range, dtype: torch.dtype) -> Tensor:
        """The second factors of neighbouring maps of one width, `[maps, rank, inputs]`, made once."""
        key = (numbers, dtype)
        if key not in self._narrow_up:
            up = torch.stack([self.up[number] for number in numbers])
            self._narrow_up[key] = up.to(dtype)
        return self._narrow_up[key]

    def hidden(self, numbers: slice, row_parts: Tensor, features: Tensor) -> Tensor:
        """Gains before `up`, `[maps, rows, rank]`, limited for rows unlike the fitted ones.

        row_parts: `[maps, rows, width]`. features: of the rows' places, `[rows, 2]`.
        """
        place = self._place[numbers]
        bounds = self._bounds[numbers]
        count = place.shape[0]
        of_rows = row_parts[..., : self.rank]
        hidden = torch.baddbmm(of_rows, features.expand(count, -1, -1), place)
        first, second = features.unbind(1)
        products = torch.stack((first * first, first * second, second * second), dim=1)
        numbers_of_forms = row_parts[..., self.rank : self._used]
        forms = torch.unflatten(numbers_of_forms, 2, (len(_FORMS), -1))
        linear = torch.addcmul(forms[..., 1] * first[:, None], forms[..., 2], second[:, None])
        square = forms[..., 0] + 2 * linear + products @ self._squares[numbers]
        sizes = square.clamp_min(0).sqrt() / bounds
        keys, values, distance = sizes.unbind(-1)
        share = shares(distance, (keys, values), (1.0, 1.0))
        return hidden * share[..., None]


_STACKED: WeakKeyDictionary[KVCorrection, StackedMaps] = WeakKeyDictionary()


def stacked(correction: KVCorrection) -> StackedMaps:
    """The maps of a correction side by side, made once."""
    if correction not in _STACKED:
        _STACKED[correction] = StackedMaps(correction)
    return _STACKED[correction]


_FORMS = ("keys", "values", "distance")


def _forms(layer: LayerCorrection, products: Tensor, place: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For keys, values and distance: rows x, x G, and the weights of the place's features, where x G x is the squared norm.

    products: gains before `up`, then products with the gauge.
    """
    hidden = products[:, : layer.rank]
    gauge = products[:, layer.rank :]
    place_hidden = place[:, : layer.rank]
    place_gauge = place[:, layer.rank :]
    for part in (layer.up[:, : layer.keys], layer.up[:, layer.keys :]):
        yield hidden, hidden @ (part @ part.T), place_hidden
    yield gauge, gauge, place_gauge


def _squares_of(layer: LayerCorrection) -> Tensor:
    """The numbers of C that belong to f1 f1, f1 f2 and f2 f2, for each form, `[3, forms]`."""
    columns = []
    for _, through, by_place in _forms(layer, layer.of_place, layer.of_place):
        gram = through @ by_place.T
        mixed = gram[0, 1] + gram[1, 0]
        columns.append(torch.stack((gram[0, 0], mixed, gram[1, 1])))
    return torch.stack(columns, dim=1)


class ChunkRows(NamedTuple):
    """The rows of some chunks that a prompt uses, int64 `[chunks]` each.

    Attributes:
        places: the places of the chunks in the prompt.
        first: the first row of each that is used.
        at: where that row stands in the prompt.
        rows: how many rows are used.
        order: the number of that row in a placing table.

    """

    places: Integers
    first: Integers
    at: Integers
    rows: Integers
    order: Integers

    @classmethod
    def of(cls, layout: PromptLayout, places: Integers) -> ChunkRows:
        """The rows of these places, one after another in the table."""
        bounds = np.array(layout.bounds, np.int64)
        firsts = np.array([place.first for place in layout.places], np.int64)
        at = bounds[places]
        count = bounds[places + 1] - at
        return cls(places, firsts[places], at, count, np.cumsum(count) - count)

    def only(self, chosen: Integers) -> ChunkRows:
        """Those of some of the chunks."""
        return ChunkRows(*[column[chosen] for column in self])

    def each(self, start: Integers) -> Integers:
        """For every row the number that its chunk starts with, counted up."""
        return counted_up(start, self.rows)


def counted_up(start: Integers, count: Integers) -> Integers:
    """The numbers from each start on, so many of each."""
    before = np.cumsum(count) - count
    within = np.arange(int(count.sum())) - np.repeat(before, count)
    return np.repeat(start, count) + within


class PromptGain:
    """What one correction adds to the rows of a placing table, layer by layer.

    Args:
        decoder: the model.
        layout: the prompt.
        correction: the correction.
        chunks: the caches that it adds to.
        rows: those of the chunks that are used.
        total: rows of the table.

    Attributes:
        covered: whether it adds to each row of the table, bool `[total]`.

    """

    def __init__(
        self,
        decoder: RowDecoder,
        layout: PromptLayout,
        correction: KVCorrection,
        chunks: Sequence[ReadyChunk],
        rows: ChunkRows,
        total: int,
    ) -> None:
        self.adds_to_first = bool((rows.places == 0).any())
        self.correction = correction
        self.maps = stacked(correction)
        self._decoder = decoder
        self._total = total
        without_part = [chunk for chunk in chunks if chunk.row_part_of is not correction]
        self._new = _NewRowParts(decoder, correction, without_part)
        new = self._new.parts
        parts = list(map(_ROW_PART, chunks))
        if new:
            parts = [new.get(chunk, part) for chunk, part in zip(chunks, parts, strict=True)]
        still = np.zeros(len(chunks), np.int64)
        self._together = decoder.device.type == "cuda" and decoder.placing != "torch" and not new
        self._table = PlacingTable(
            parts,
            rows.first,
            rows.order,
            rows.rows,
            still,
            still.astype(bool),
            decoder.device,
            self.maps.together if self._together else None,
        )
        numbers = torch.from_numpy(rows.each(rows.order))
        ahead = np.repeat(rows.at - rows.first - len(layout.kept_behind), rows.rows)
        local = torch.from_numpy(rows.each(rows.first))
        features = place_features(torch.from_numpy(ahead), local, correction.before, correction.length)
        all_features = features.new_zeros(total, 2).index_copy_(0, numbers, features)
        self._features = all_features.to(decoder.device, non_blocking=True)
        covered = torch.zeros(total, dtype=torch.bool).index_fill_(0, numbers, True)
        self.covered = covered.to(decoder.device, non_blocking=True)
        self._hidden: dict[int, Tensor] = {}
        self._narrow: Tensor | None = None  # those of all maps in the decoder's dtype

    def layers(self, start: int, stop: int) -> Tensor | None:
        """The gains of layers `start ... stop - 1`, which have maps of one width or none.

        `[layers, rows, key width + value width]`, without positions; None where they have no map. The layers of the chunks up
        to these are in memory.
        """
        if start not in self.maps.number:
            return None
        hidden = list(map(self.hidden, range(start, stop)))
        first = self.maps.number[start]
        numbers = range(first, self.maps.number[stop - 1] + 1)
        if self._decoder.device.type == "cpu" and len(numbers) == 1:
            return (hidden[0] @ self.maps.up[numbers.start])[None]
        if self._narrow is None:
            joined = torch.stack(hidden).to(self._decoder.dtype)
        else:
            joined = self._narrow[numbers.start : numbers.stop]
        return joined @ self.maps.narrow_up(numbers, self._decoder.dtype)

    def hidden(self, index: int) -> Tensor:
        """The gains before `up` of a layer that has a map, `[rows, rank]`."""
        number = self.maps.number[index]
        if number not in self._hidden:
            self._compute(number)
        return self._hidden[number]

    def _compute(self, number: int) -> None:
        """The gains of a map, and of the following ones if their row parts are known."""
        self._new.compute(number)
        count = len(self.maps.layers)
        if self._together:
            numbers = range(count)
        elif self._new.parts:
            numbers = range(number, number + 1)
        else:
            map_numbers = max(1, self._total * self.maps.width)
            at_once = max(1, _AT_ONCE // map_numbers)
            numbers = range(number, min(number + at_once, count))
        row_parts = torch.zeros(
            (len(numbers), self._total, self.maps.width), dtype=torch.float32, device=self._decoder.device
        )
        nothing = row_parts.new_empty((0, self._total, 0))
        if self._together:
            place_layer(self._table, 0, row_parts, nothing, None, None)
        else:
            for layer, rows in zip(numbers, row_parts, strict=True):
                place_layer(self._table, layer, rows[None], nothing, None, None)
        hidden = self.maps.hidden(slice(numbers.start, numbers.stop), row_parts, self._features)
        if self._together:
            self._narrow = hidden.to(self._decoder.dtype)
        self._hidden |= zip(numbers, hidden, strict=True)

    def keep(self) -> None:
        """Let the chunks keep row parts that were computed for this prompt."""
        self._new.keep()


class _NewRowParts:
    """Computes the row parts of chunks that have none of this correction, layer by layer."""

    def __init__(self, decoder: RowDecoder, correction: KVCorrection, chunks: Sequence[ReadyChunk]) -> None:
        self._decoder = decoder
        self._correction = correction
        self._maps = stacked(correction)
        self.parts: dict[ReadyChunk, ChunkKV] = {}
        for chunk in dict.fromkeys(chunks):
            nbytes = self._maps.shape.nbytes(chunk.tokens)
            memory = memory_of(nbytes, decoder.device)
            self.parts[chunk] = ChunkKV(self._maps.shape, chunk.tokens, memory)
        self._computed = 0
        if self.parts:
            self._prepare([*self.parts])

    def _prepare(self, chunks: Sequence[ReadyChunk]) -> None:
        tokens = np.fromiter(map(attrgetter("tokens"), chunks), np.int64, len(chunks))
        at = np.cumsum(tokens) - tokens
        still = np.zeros(len(chunks), np.int64)
        kvs = list(map(attrgetter("near"), chunks))
        self._table = PlacingTable(kvs, still, at, tokens, still, still.astype(bool), self._decoder.device)
        local = counted_up(still, tokens)
        self._local = torch.from_numpy(local).to(self._decoder.device)
        rotated = np.array([not chunk.unrotated for chunk in chunks])
        start = np.array([chunk.start for chunk in chunks], np.int64)
        positions = np.repeat(rotated, tokens) * (np.repeat(start, tokens) + local)
        self._back: Deltas | None = None
        if rotated.any():
            self._back = Deltas(torch.from_numpy(-positions).to(self._decoder.device))

    def compute(self, number: int) -> None:
        """The row parts of a map."""
        if not self.parts or number < self._computed:
            return
        index = self._maps.layers[number][0]
        rotation = self._decoder.rotations[index]
        keys = self._empty_rows(*rotation.key_shape)
        values = self._empty_rows(*rotation.value_shape)
        place_layer(self._table, index, keys, values, None, None)
        if self._back is not None:
            keys = rotate_keys(keys, self._back, rotation.keys)
            values = rotate_keys(values, self._back, rotation.values)
        row_part = self._maps.row_part(number, keys, values, self._local)
        rows = torch.split(row_part, [part.tokens for part in self.parts.values()])
        for part, part_rows in zip(self.parts.values(), rows, strict=True):
            part.keys[number][0].copy_(part_rows, non_blocking=True)
        self._computed = number + 1

    def _empty_rows(self, heads: int, dim: int) -> Tensor:
        return torch.empty((heads, self._table.total_rows, dim), dtype=torch.float32, device=self._decoder.device)

    def keep(self) -> None:
        """Let the chunks keep them, if all are computed."""
        if self._computed < len(self._maps.layers):
            return
        for chunk, part in self.parts.items():
            chunk.row_part = part
            chunk.row_part_of = self._correction
