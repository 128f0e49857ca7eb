"""Which rows of which chunks go where in a prompt: the table that `place_layer` reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blend_kernels.chunk_kv import ALIGNMENT, PAGE_LOCKED, ChunkKV, ChunkShape, Integers, numbers_of, sums_before

Booleans: TypeAlias = npt.NDArray[np.bool_]

# Rows of a place that a program of the kernel copies at a time.
TILE_ROWS = 32
# Numbers of a place in the table on the device.
FIELDS = 11


class PlacingTable:
    """Which rows of which chunks go where in a prompt. Built once a prompt, used for every layer.

    Keeps the chunks alive. On a GPU the first `place_layer` copies the table there, on its stream: place all layers on one
    stream, and keep the table until that work is done.

    Args:
        chunks: one for each place, all of one `ChunkShape`; an object may occur several times.
        first: int64 `[places]`, the first row of the chunk that is used.
        at: int64 `[places]`, the row of the prompt where that row goes. The rows of two places do not overlap.
        rows: int64 `[places]`, how many rows are used.
        moved: int64 `[places]`, how many positions keys move: position in the prompt less position when computed.
        absolute: bool `[places]`, whether keys come without positions. Row i then turns to position `at + i`, and `moved`
            does not count.
        device: of the prompt's cache.
        shape: how the chunks' memory is cut into layers, if not as they say; for kernels alone.

    Attributes:
        total_rows: rows of all places.
        stop: the row of the prompt behind the last place.

    Raises:
        ValueError: no chunk, chunks of several shapes, columns of another size or dtype, rows outside their chunk or the
            prompt, overlapping places, or chunks in memory that the device cannot read.
    """

    def __init__(
        self,
        chunks: Sequence[ChunkKV],
        first: Integers,
        at: Integers,
        rows: Integers,
        moved: Integers,
        absolute: Booleans,
        device: torch.device,
        shape: ChunkShape | None = None,
    ) -> None:
        self.chunks = tuple(chunks)
        self.device = torch.device(device)
        self.first = first
        self.at = at
        self.rows = rows
        self.moved = moved
        self.absolute = absolute
        _check_shapes(self.chunks)
        self.shape = shape or self.chunks[0].shape
        self._check_columns()
        self.tokens = numbers_of("tokens", self.chunks)
        self.locations = numbers_of("location", self.chunks)
        _check_ranges(first, at, rows, self.tokens)
        _check_locations(self.locations, self.device)
        self.total_rows = int(rows.sum())
        self.stop = int((at + rows).max())

    def _check_columns(self) -> None:
        places = (len(self.chunks),)
        for name in ("first", "at", "rows", "moved", "absolute"):
            column = getattr(self, name)
            dtype = "bool" if name == "absolute" else "int64"
            if column.shape != places or column.dtype != dtype:
                kind = f"{column.dtype} {list(column.shape)}"
                raise ValueError(f"{name} must be {dtype} {list(places)}, one for each place, got {kind}")

    @cached_property
    def reads_host(self) -> bool:
        """Whether a chunk lies in host memory."""
        return bool((self.locations < 0).any())

    @cached_property
    def alignment(self) -> int:
        """The largest power of two up to 16 that divides the address of every chunk."""
        bits = int(np.bitwise_or.reduce(numbers_of("address", self.chunks)))
        return math.gcd(bits, ALIGNMENT)

    @cached_property
    def absolute_places(self) -> Literal["none", "some", "all"]:
        """How many places have keys without positions."""
        if self.absolute.all():
            return "all"
        return "some" if self.absolute.any() else "none"

    @cached_property
    def tiles(self) -> Integers:
        """For each tile of the kernel its place and its first row in the chunk, `[tiles, 2]`.

        A byte of int4 holds numbers of two rows half a chunk apart. A tile of such a chunk takes both, so it starts in the
        chunk's first half, and a program skips the rows that the place does not use.
        """
        packed = self.shape.packing == "int4"
        lower = (self.tokens + 1) // 2
        tiled_rows = lower if packed else self.rows
        tiles = -(-tiled_rows // TILE_ROWS)
        place = np.repeat(np.arange(len(tiles)), tiles)
        number = np.arange(len(place)) - sums_before(tiles)[place]
        start = number * TILE_ROWS
        if not packed:
            return np.stack((place, start + self.first[place]), axis=1)
        meets_lower = self._meets(place, start)
        meets_upper = self._meets(place, start + lower[place])
        starts = np.stack((place, start), axis=1)
        return starts[meets_lower | meets_upper]

    def _meets(self, place: Integers, start: Integers) -> Booleans:
        """Whether the place uses a row of the chunk among those of a tile."""
        first = self.first[place]
        stop = first + self.rows[place]
        return (first < stop) & (start < stop) & (first < start + TILE_ROWS)

    @cached_property
    def on_device(self) -> Tensor:
        """What the kernel reads, int64: eleven numbers a place, then the tiles. One copy from page-locked memory."""
        address = numbers_of("address", self.chunks)
        groups = numbers_of("groups", self.chunks)
        number_bytes = self.tokens * self.shape.token_bytes
        scales = address + -(-number_bytes // ALIGNMENT) * ALIGNMENT
        fields = (
            address,
            self.tokens,
            scales,
            groups,
            -(-self.tokens // groups),
            self.first,
            self.at,
            self.rows,
            self.moved,
            self.absolute,
            sums_before(self.rows),
        )
        assert len(fields) == FIELDS
        places = np.stack(fields, axis=1)
        size = places.size + self.tiles.size
        table = torch.empty(size, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        np.concatenate((places.ravel(), self.tiles.ravel()), out=table.numpy())
        return table.to(self.device, non_blocking=True)


def _check_shapes(chunks: tuple[ChunkKV, ...]) -> None:
    if not chunks:
        raise ValueError("a table needs at least one chunk")
    shapes = tuple(map(attrgetter("shape"), chunks))
    # by identity first, without Python code for each chunk
    distinct = dict(zip(map(id, shapes), shapes, strict=True))
    if any(shape != shapes[0] for shape in distinct.values()):
        raise ValueError("the chunks of a table must have one ChunkShape")


def _check_ranges(first: Integers, at: Integers, rows: Integers, tokens: Integers) -> None:
    inside = (first >= 0) & (rows >= 0) & (first + rows <= tokens)
    if not inside.all():
        raise ValueError(f"place {int(inside.argmin())} uses rows that its chunk does not have")
    order = np.lexsort((rows, at))
    starts = at[order]
    stops = starts + rows[order]
    apart = stops[:-1] <= starts[1:]
    if at.min() < 0 or not apart.all():
        raise ValueError("two places overlap in the prompt, or one begins before it")


def _check_locations(locations: Integers, device: torch.device) -> None:
    if device.type != "cuda":
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    readable = (locations == index) | (locations == PAGE_LOCKED)
    if not readable.all():
        raise ValueError(f"the chunk of place {int(readable.argmin())} is not readable from {device}: lock its pages")
