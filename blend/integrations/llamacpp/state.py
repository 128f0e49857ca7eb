"""The KV of a sequence as `llama_state_seq_get_data` gives it and `llama_state_seq_set_data` takes it.

The format is llama.cpp's own. Nothing of it is assumed for a model: `StateFormat.read` learns it from the state of a short
prompt, and refuses a state of which it cannot account for every byte.

    a mark and the sequence (in memory, not in files), then for every cache (one, or one of all keys and one of windows):
        streams (1), cells, then for each: position, number of sequences (1), the sequence
        transposed values (0), layers, turned keys, turned values (in later versions)
        then for the keys of each layer, and for the values of each: type, bytes of a row, the rows

A quantised cache may keep keys and values turned by a Hadamard matrix, which spreads outliers over blocks of numbers. They are
turned back when they are read, and turned when they are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
KVRows = tuple[Tensor, Tensor]
"""Keys and values of rows, `[rows, kv_heads x head_dim]` each."""


class RowType(NamedTuple):
    """How a cache keeps one row of a layer's keys or values.

    number: of the type in ggml. turned: numbers that a Hadamard matrix turns together; 0 for none.
    """

    number: int
    nbytes: int
    turned: int = 0

    @property
    def width(self) -> int:
        """Numbers in a row."""
        kind = TYPES[self.number]
        return self.nbytes // kind.block_bytes * kind.block

    def encode(self, rows: Tensor) -> Bytes:
        """Rows `[rows, width]` as the cache keeps them, `[rows, nbytes]`."""
        rows = hadamard(rows, self.turned)
        if self.number == Q8_0:
            return _quantised(rows)
        return rows.to(TYPES[self.number].dtype).contiguous().view(torch.uint8).numpy()

    def decode(self, raw: Bytes) -> Tensor:
        """Kept rows `[rows, nbytes]` as numbers, `[rows, width]`; of a quantised type in float32."""
        if self.number == Q8_0:
            return hadamard(_dequantised(raw), self.turned)
        return hadamard(torch.from_numpy(raw).view(TYPES[self.number].dtype), self.turned)


class _Type(NamedTuple):
    dtype: torch.dtype
    block: int
    block_bytes: int


F32, F16, Q8_0, BF16 = 0, 1, 8, 30
TYPES = {
    F32: _Type(torch.float32, 1, 4),
    F16: _Type(torch.float16, 1, 2),
    BF16: _Type(torch.bfloat16, 1, 2),
    Q8_0: _Type(torch.float32, 32, 34),
}
"""The types of caches that can be read and written, by their number in ggml."""


class CacheFormat(NamedTuple):
    """One cache of a context: how it keeps the keys and the values of each of its layers.

    says_turned: whether a state says which keys and values are turned.
    """

    keys: tuple[RowType, ...] = ()
    values: tuple[RowType, ...] = ()
    says_turned: bool = False

    @property
    def turned(self) -> list[int]:
        """What a state says of turned keys and values."""
        return [self.keys[0].turned, self.values[0].turned] if self.says_turned else []


class CacheRows(NamedTuple):
    """Rows of one cache. raw: of each layer's keys, then of each layer's values, `[rows, bytes]`."""

    positions: NDArray[np.int64]
    raw: tuple[Bytes, ...]


class StateFormat(NamedTuple):
    """The format of a context's sequence states.

    Attributes:
        caches: all of one, or those of layers that see everything and those of layers with a window.
        mark: what a state in memory begins with; None in versions without a mark.
        order: for each layer of the model its cache, and its place among the layers there.

    """

    caches: tuple[CacheFormat, ...]
    mark: int | None = None
    order: tuple[tuple[int, int], ...] = ()

    def types(self, layer: int) -> tuple[RowType, RowType]:
        """How a layer's keys and values are kept."""
        cache, place = self.order[layer]
        return self.caches[cache].keys[place], self.caches[cache].values[place]

    def pack(self, positions: NDArray[np.int64], rows: Sequence[KVRows], sequence: int) -> Bytes:
        """The state of a sequence that holds these rows.

        Args:
            positions: sorted, `[rows]`.
            rows: of each layer of the model. One is asked for at a time, so that they may be made on the way.
            sequence: its number.

        """
        state = np.empty(self._state_bytes(len(positions)), np.uint8)
        at = 0
        for part in self._parts(positions, rows, sequence):
            state[at : at + len(part)] = part
            at += len(part)
        return state

    def _state_bytes(self, count: int) -> int:
        """Bytes of the state of so many rows."""
        words = 0 if self.mark is None else 2
        row_bytes = 0
        for cache in self.caches:
            types = (*cache.keys, *cache.values)
            words += 4 + len(cache.turned) + 3 * len(types) + 3 * count
            row_bytes += sum(kind.nbytes for kind in types)
        return 4 * words + count * row_bytes

    def _parts(self, positions: NDArray[np.int64], rows: Sequence[KVRows], sequence: int) -> Iterator[Bytes]:
        """The state, piece by piece."""
        if self.mark is not None:
            yield _words(self.mark, sequence)
        layer_of = {place: layer for layer, place in enumerate(self.order)}
        cells = np.empty((len(positions), 3), np.int32)
        cells[:, 0] = positions
        cells[:, 1:] = (1, sequence)
        for index, cache in enumerate(self.caches):
            yield _words(1, len(positions))
            yield cells.view(np.uint8).ravel()
            yield _words(0, len(cache.keys), *cache.turned)
            for part, types in enumerate((cache.keys, cache.values)):
                for place, kind in enumerate(types):
                    yield _words(kind.number, kind.nbytes, 0)
                    yield kind.encode(rows[layer_of[index, place]][part]).ravel()

    def unpack(self, state: Bytes) -> list[CacheRows]:
        """The rows of each cache, sorted by position. Raises `ValueError` for another format."""
        reader = _StateReader(state)
        if reader.mark() != self.mark:
            raise ValueError("the state begins otherwise than that of the first prompt")
        caches = [reader.cache(expected) for expected in self.caches]
        reader.expect_end()
        return caches

    @classmethod
    def read(cls, state: Bytes) -> StateFormat:
        """The format of a state of at least one row, its order still unknown. Raises `ValueError` for an unknown one."""
        reader = _StateReader(state)
        mark = reader.mark()
        caches = []
        while not reader.is_at_end:
            reader.cache(None)
            caches.append(reader.last_format)
        return cls(tuple(caches), mark)


class _StateReader:
    """Reads a state from its start. Raises `ValueError` where it is not as described above."""

    def __init__(self, state: Bytes) -> None:
        self._state = state
        self._at = 0
        self.last_format = CacheFormat()

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._state)

    def expect_end(self) -> None:
        """Raise `ValueError` if something follows."""
        if not self.is_at_end:
            raise ValueError(f"{len(self._state) - self._at} bytes follow the state's last cache")

    def mark(self) -> int | None:
        """The mark; None if the state begins with its number of streams."""
        (first,) = self._words(1)
        if first == 1:
            self._at = 0
            return None
        self._words(1)
        return first

    def _take(self, count: int) -> Bytes:
        stop = self._at + count
        if count < 0 or stop > len(self._state):
            raise ValueError("the state ends early")
        taken = self._state[self._at : stop]
        self._at = stop
        return taken

    def _words(self, count: int) -> list[int]:
        return [int(word) for word in self._take(4 * count).view("<u4")]

    def cache(self, expected: CacheFormat | None) -> CacheRows:
        """One cache; its format is known, or is kept as `last_format`."""
        streams, cells = self._words(2)
        if streams != 1:
            raise ValueError(f"the state has {streams} streams")
        if not cells:
            return CacheRows(np.empty(0, np.int64), ())
        table = self._take(12 * cells).view("<i4").reshape(cells, 3)
        if (table[:, 1] != 1).any():
            raise ValueError("a cell of the state has something else than one sequence")
        transposed, layers = self._words(2)
        if transposed or not 0 < layers < 10_000:
            raise ValueError("the state holds transposed values")
        order = np.argsort(table[:, 0], kind="stable")
        raw = self._rows(cells, layers, order)
        if expected is not None and self.last_format != expected:
            raise ValueError("the state has another format than that of the first prompt")
        return CacheRows(table[order, 0].astype(np.int64), tuple(raw))

    def _turned(self) -> list[int]:
        """The blocks in which keys and values are turned; empty in versions that do not say so."""
        at = self._at
        first, second, third = self._words(3)
        self._at = at
        is_type = first in TYPES and second > 0 and third == 0
        return [] if is_type else self._words(2)

    def _rows(self, cells: int, layers: int, order: NDArray[np.intp]) -> list[Bytes]:
        turned = self._turned()
        is_sorted = bool((np.diff(order) == 1).all())
        kinds: list[RowType] = []
        raw: list[Bytes] = []
        for index in range(2 * layers):
            number, low, high = self._words(3)
            if number not in TYPES or high:
                raise ValueError(f"a cache of ggml's type {number} cannot be read")
            kinds.append(RowType(number, low, turned[index // layers] if turned else 0))
            rows = self._take(low * cells).reshape(cells, low)
            raw.append(rows if is_sorted else rows[order])
        self.last_format = CacheFormat(tuple(kinds[:layers]), tuple(kinds[layers:]), bool(turned))
        return raw


def _words(*numbers: int) -> Bytes:
    return np.array(numbers, "<u4").view(np.uint8)


def hadamard(numbers: Tensor, block: int) -> Tensor:
    """Numbers `[..., width]` times a normed Hadamard matrix, block by block; twice gives the numbers again. block: 0: none."""
    if not block:
        return numbers
    shape = numbers.shape
    turned: Tensor = numbers.float().reshape(-1, block)
    step = 1
    while step < block:
        pairs = turned.view(-1, block // (2 * step), 2, step)
        first, second = pairs.unbind(2)
        turned = torch.stack((first + second, first - second), 2).view(-1, block)
        step *= 2
    return turned.div(block**0.5).view(shape)


def _quantised(rows: Tensor) -> Bytes:
    """Rows in blocks of 32 numbers of 8 bits behind a scale in half precision, as ggml's `quantize_row_q8_0_ref`."""
    kind = TYPES[Q8_0]
    blocks = rows.float().reshape(rows.shape[0], -1, kind.block)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    scaled = blocks * inverse
    numbers = (scaled.abs() + 0.5).floor().copysign(scaled).to(torch.int8)
    halves = scale.to(torch.float16).contiguous().view(torch.int8)
    packed = torch.cat((halves, numbers), -1).contiguous()
    return packed.view(torch.uint8).reshape(rows.shape[0], -1).numpy()


def _dequantised(raw: Bytes) -> Tensor:
    kind = TYPES[Q8_0]
    blocks = torch.from_numpy(raw.copy()).view(raw.shape[0], -1, kind.block_bytes)
    scale = blocks[..., :2].contiguous().view(torch.float16).float()
    numbers = blocks[..., 2:].contiguous().view(torch.int8).float()
    return (scale * numbers).reshape(raw.shape[0], -1)
