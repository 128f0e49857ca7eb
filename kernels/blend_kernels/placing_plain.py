"""The plain-torch twin of `place_layer`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import repeat
from operator import attrgetter
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from blend_kernels.chunk_kv import ChunkKV, Integers, numbers_of, sums_before
from blend_kernels.placing_table import PlacingTable
from blend_kernels.rotation import Angles, Deltas, Layout, Turn

PartName = Literal["keys", "values"]
_SCALES = {"keys": "key_scales", "values": "value_scales"}
# int4 numbers are stored above the lowest of their grid.
_INT4_ZERO = 7.5


class PlainRows:
    """The rows of a table for plain torch: indices and angles that layers share, and all chunks' tensors of each layer.

    Args:
        table: the table; its chunks are copied to its device unless that is the CPU.
    """

    def __init__(self, table: PlacingTable) -> None:
        self._packing = table.shape.packing
        self._device = table.device
        is_whole = (table.first == 0) & (table.rows == table.tokens)
        self._whole = bool(is_whole.all())
        chunks, chunk_of_place = _joined(table, self._whole)
        if self._device.type != "cpu":
            chunks = tuple(chunk.to(self._device) for chunk in chunks)
        self._chunks = chunks
        self._tokens = numbers_of("tokens", chunks)
        self._groups = numbers_of("groups", chunks)
        place = np.repeat(np.arange(len(table.rows)), table.rows)
        row_of_place = np.arange(table.total_rows) - sums_before(table.rows)[place]
        position = table.at[place] + row_of_place
        moved = np.where(table.absolute[place], position, table.moved[place])
        self._chunk = chunk_of_place[place]
        self._row = table.first[place] + row_of_place
        self._starts, self._lengths = _runs(table.at, table.rows)
        self._absolute = bool(table.absolute.all())
        self._position = Deltas(self._tensor(position))
        self._moved = self._position if self._absolute else Deltas(self._tensor(moved))
        self._angles: dict[tuple[object, ...], tuple[Tensor, Angles]] = {}
        self._units: dict[int, Tensor] = {}
        self._buffers: dict[tuple[object, ...], Tensor] = {}

    def place(self, layer: int, name: PartName, cache: Tensor, turn: Turn | None, gain: Tensor | None) -> None:
        """Write the keys or the values of a layer.

        Args:
            layer: index of the layer.
            name: which of the two.
            cache: `[kv_heads, capacity, head_dim]`.
            turn: how they rotate.
            gain: what to add, `[rows, kv_heads * head_dim]`.
        """
        states = self._states(layer, name)
        if turn is None and gain is None:
            self._write(cache, states)
            return
        wide = torch.float64 if cache.dtype == torch.float64 else torch.float32
        states = self._widened(states, wide)
        late_gain = None
        if gain is not None:
            heads, _, dim = cache.shape
            added = gain.to(wide).view(-1, heads, dim).transpose(0, 1)
            if turn is None or self._absolute:
                states.add_(added)
            else:
                late_gain = added
        if turn is None:
            self._write(cache, states)
        else:
            self._write_turned(cache, states, turn, late_gain)

    def _write_turned(self, cache: Tensor, states: Tensor, turn: Turn, gain: Tensor | None) -> None:
        """Turn states by how far they move, and a gain to the positions."""
        # Products go straight into a cache of their dtype.
        target = self._only_run(cache) if cache.dtype == states.dtype else None
        turned = self._buffer("turned", states.shape, states.dtype) if target is None else target
        cos, sin = self._tables(turn, self._moved, states)
        torch.mul(states, cos, out=turned)
        _add_crossed(turned, states, sin, turn.layout)
        if gain is not None:
            cos, sin = self._tables(turn, self._position, states)
            turned.addcmul_(gain, cos)
            _add_crossed(turned, gain, sin, turn.layout)
        if target is None:
            self._write(cache, turned)

    def _states(self, layer: int, name: PartName) -> Tensor:
        """A part's rows in a buffer, `[kv_heads, rows, head_dim]`; decoded to fp32 if quantised."""
        numbers = self._sources[name][layer]
        if self._packing == "plain":
            return self._rows(numbers)
        joined_scales = torch.cat(self._sources[_SCALES[name]][layer], 1).float()
        scales = joined_scales.index_select(1, self._scale_rows)
        centre, step = scales.chunk(2, 1)
        if self._packing == "int8":
            packed = self._rows(numbers)
        else:
            centre = torch.sub(centre, step, alpha=_INT4_ZERO)
            packed = self._unpacked(numbers, scales.shape[2])
        states = self._widened(packed, torch.float32)
        row_centres = self._gathered("centres", centre, self._group)
        row_steps = self._gathered("steps", step, self._group)
        return torch.addcmul(row_centres, states, row_steps, out=states)

    def _rows(self, numbers: tuple[Tensor, ...]) -> Tensor:
        """The rows that places use, of chunks `[kv_heads, tokens, head_dim]`."""
        heads, _, dim = numbers[0].shape
        shape = (heads, int(self._tokens.sum()), dim)
        buffer = self._buffer("joined", shape, numbers[0].dtype)
        joined = torch.cat(numbers, 1, out=buffer)
        return joined if self._whole else self._gathered("rows", joined, self._joined_rows)

    def _unpacked(self, numbers: tuple[Tensor, ...], dim: int) -> Tensor:
        """int4 numbers above the grid's lowest, uint8 `[kv_heads, rows, dim]`, of chunks `[kv_heads, 1, bytes]`."""
        joined = torch.cat(numbers, 2)
        heads = joined.shape[0]
        halves = torch.cat((joined & 15, joined >> 4), 1)
        units = halves.view(heads, -1, _unit(dim))
        gathered = self._gathered("units", units, self._units_of(dim))
        return gathered.view(heads, -1, dim)

    def _gathered(self, name: str, rows: Tensor, index: Tensor) -> Tensor:
        """Rows `[kv_heads, any, head_dim]` by index, in the buffer of that name."""
        shape = (rows.shape[0], index.shape[0], rows.shape[2])
        buffer = self._buffer(name, shape, rows.dtype)
        return torch.index_select(rows, 1, index, out=buffer)

    def _widened(self, states: Tensor, dtype: torch.dtype) -> Tensor:
        """The same in a wider dtype."""
        if states.dtype == dtype:
            return states
        return self._buffer("wide", states.shape, dtype).copy_(states)

    def _buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory that all layers of a shape use in turn; new memory for each would cost more than the work in it."""
        key = (name, *shape, dtype)
        if key not in self._buffers:
            with torch.inference_mode(False):  # so that it can be written in any mode
                self._buffers[key] = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        return self._buffers[key]

    def _units_of(self, dim: int) -> Tensor:
        """Where the rows' units are among those of all lower halves, then all upper halves, of the joined bytes."""
        if dim not in self._units:
            unit = _unit(dim)
            nbytes = self._tokens if dim < 2 else -(-self._tokens * dim // 2)
            units = nbytes // unit
            start = sums_before(units)[self._chunk][:, None]
            lower = units[self._chunk][:, None]
            row_units = dim // unit
            index = self._row[:, None] * row_units + np.arange(row_units)
            in_upper_half = int(units.sum()) - lower
            joined = start + index + np.where(index < lower, 0, in_upper_half)
            self._units[dim] = self._tensor(joined.ravel())
        return self._units[dim]

    def _tables(self, turn: Turn, deltas: Deltas, states: Tensor) -> Angles:
        """Cosines `[rows, head_dim]`, 1 where nothing turns, and sines `[rows, pairs]`."""
        dim = states.shape[2]
        dtype = states.dtype
        layout = turn.layout
        key = (turn.inv_freq.data_ptr(), layout, dim, dtype, deltas is self._moved)
        if key not in self._angles:
            cos, sin = deltas.tables(turn.inv_freq.to(self._device), dtype)
            wide = cos.new_ones(cos.shape[0], dim)
            for members in layout.split(wide):
                members.copy_(cos)
            # With the frequencies, so that their address stays taken.
            self._angles[key] = (turn.inv_freq, (wide, sin))
        return self._angles[key][1]

    def _only_run(self, cache: Tensor) -> Tensor | None:
        """The rows of the cache that the places cover, if they follow one another."""
        if len(self._starts) > 1:
            return None
        return cache.narrow(1, self._starts[0], self._lengths[0])

    def _write(self, cache: Tensor, states: Tensor) -> None:
        """Write the rows; places that follow one another count as one."""
        target = self._only_run(cache)
        if target is not None:
            target.copy_(states)
            return
        targets = list(map(cache.narrow, repeat(1), self._starts, self._lengths))
        torch._foreach_copy_(targets, torch.split(states, self._lengths, 1))

    @cached_property
    def _sources(self) -> dict[str, tuple[tuple[Tensor, ...], ...]]:
        """For each kind of tensor and each layer all chunks' tensors."""
        sources = {}
        for name in ("keys", "values", *_SCALES.values()):
            tensors = map(attrgetter(name), self._chunks)
            sources[name] = tuple(zip(*tensors, strict=True))
        return sources

    @cached_property
    def _joined_rows(self) -> Tensor:
        first = sums_before(self._tokens)[self._chunk]
        return self._tensor(first + self._row)

    @cached_property
    def _group(self) -> Tensor:
        """The group of each row among those of all chunks."""
        size = -(-self._tokens // self._groups)
        first = sums_before(self._groups)[self._chunk]
        return self._tensor(first + self._row // size[self._chunk])

    @cached_property
    def _scale_rows(self) -> Tensor:
        """Where the groups' centres are among the joined scales, then where their steps are."""
        before = np.repeat(sums_before(self._groups), self._groups)
        centre = np.arange(self._groups.sum()) + before
        step = centre + np.repeat(self._groups, self._groups)
        return self._tensor(np.concatenate((centre, step)))

    def _tensor(self, numbers: Integers) -> Tensor:
        return torch.from_numpy(numbers).to(self._device)


_ROWS = WeakKeyDictionary[PlacingTable, PlainRows]()


def _rows_of(table: PlacingTable) -> PlainRows:
    """What is computed once for all layers of a table."""
    if table not in _ROWS:
        _ROWS[table] = PlainRows(table)
    return _ROWS[table]


def _joined(table: PlacingTable, whole: bool) -> tuple[tuple[ChunkKV, ...], Integers]:
    """The chunks to join, and the index of each place's chunk among them.

    A chunk of which parts are used may stand in many places, and is joined once.
    """
    if whole:
        return table.chunks, np.arange(len(table.chunks))
    chunks = tuple(dict.fromkeys(table.chunks))
    index = {chunk: number for number, chunk in enumerate(chunks)}
    chunk_of_place = map(index.__getitem__, table.chunks)
    return chunks, np.fromiter(chunk_of_place, np.int64, len(table.chunks))


def _unit(dim: int) -> int:
    """Numbers of an int4 head that lie in the same half of neighbouring bytes, whatever the number of tokens."""
    return dim // 2 if dim % 2 == 0 else 1


def _runs(at: Integers, rows: Integers) -> tuple[list[int], list[int]]:
    """Start and length of each run of places that follow one another in the prompt."""
    used = rows > 0
    at = at[used]
    rows = rows[used]
    follows = at[1:] == (at + rows)[:-1]
    opens = np.flatnonzero(np.concatenate(([True], ~follows)))
    lengths: list[int] = np.add.reduceat(rows, opens).tolist()
    return at[opens].tolist(), lengths


def _add_crossed(turned: Tensor, states: Tensor, sin: Tensor, layout: Layout) -> None:
    """Add to each member of a pair what its partner contributes to a rotation."""
    first, second = layout.split(states)
    to_first, to_second = layout.split(turned)
    to_first.addcmul_(second, sin, value=-1)
    to_second.addcmul_(first, sin)


@torch.no_grad()
def place_layer_plain(
    table: PlacingTable,
    layer: int,
    keys: Tensor,
    values: Tensor,
    key_turn: Turn | None,
    value_turn: Turn | None,
    gain: Tensor | None,
) -> None:
    """As `place_layer`, in plain torch; arguments are checked. The number of calls does not depend on that of chunks.

    Args:
        table: rows and chunks.
        layer: index of the layer.
        keys: cache of the keys.
        values: cache of the values.
        key_turn: how keys rotate.
        value_turn: how values rotate.
        gain: what to add.
    """
    if keys.ndim == 4:
        for number in range(keys.shape[0]):
            layer_gain = None if gain is None else gain[number]
            place_layer_plain(table, layer + number, keys[number], values[number], key_turn, value_turn, layer_gain)
        return
    rows = _rows_of(table)
    shape = table.shape.layers[layer]
    key_gain = None if gain is None else gain[:, : shape.key_width]
    value_gain = None if gain is None else gain[:, shape.key_width :]
    if shape.key_width:
        rows.place(layer, "keys", keys, key_turn, key_gain)
    if shape.value_width:
        rows.place(layer, "values", values, value_turn, value_gain)
