"""Tile shapes of the attention kernels, and into how many parts keys are cut.

Tiles are predictions from registers and shared memory (kernels/README.md). None spills registers in the calls that
scripts/aot_report compiles, except fp32 at 256 dimensions; otherwise the report fails.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Folded rows and keys of one step, and how the compiler arranges them.

    rows: folded rows.
    keys: keys of one step that all rows see.
    warps: of a program.
    stages: of the pipeline that loads keys.
    tma: whether TMA descriptors load the keys.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    tma: bool = False

    @property
    def ragged(self) -> int:
        """Keys of one step that some rows do not see: fewer, because the mask takes registers and what it hides is waste."""
        return min(self.keys, _MOST_RAGGED)


_MOST_RAGGED = 64


class Chunks(NamedTuple):
    """A head dimension as a power of two plus a second, smaller one (0 if not needed): 80 = 64 + 16, 192 = 128 + 64."""

    first: int
    second: int


class Shape(NamedTuple):
    """What determines the tile: dtype, head dimensions, folded rows (rows times group), window, and whether TMA is possible."""

    dtype: torch.dtype
    dim: int
    value_dim: int
    lines: int
    windowed: bool
    tma: bool


@cache
def chunks(dim: int) -> Chunks:
    """Cut a head dimension into chunks with little padding; tensor cores want at least 16."""
    first = max(16, 1 << (dim.bit_length() - 1))
    remainder = dim - first
    if remainder <= 0:
        return Chunks(first, 0)
    second = max(16, 1 << (remainder - 1).bit_length())
    return Chunks(first, second)


# Tables are keyed by the padded width of the wider of head and value dimension. Tiles are rows, keys, warps and stages.
_HOPPER = {64: Tile(128, 128, 8, 3), 128: Tile(128, 64, 8, 3), 192: Tile(128, 32, 8, 2), 256: Tile(64, 32, 8, 2)}
_HOPPER_TMA = {64: Tile(128, 64, 8, 3, tma=True), 128: Tile(128, 128, 8, 2, tma=True)}
_AMPERE = {64: Tile(128, 64, 8, 3), 128: Tile(128, 32, 8, 3), 192: Tile(64, 32, 8, 2), 256: Tile(64, 32, 8, 2)}
# With a window all three loops run, and the masked ones hold the mask besides the scores.
_WINDOWED_HOPPER = {64: Tile(128, 64, 8, 3), 128: Tile(128, 32, 8, 3), 192: Tile(64, 32, 8, 2), 256: Tile(64, 32, 8, 2)}
_WINDOWED_HOPPER_TMA = {128: Tile(128, 128, 8, 2, tma=True)}
_WINDOWED_AMPERE = {128: Tile(64, 32, 8, 2)}
# Three tf32 products for one of fp32 hold six operands in registers.
_FP32 = {64: Tile(32, 32, 4, 2), 128: Tile(32, 16, 8, 2), 192: Tile(16, 16, 8, 1), 256: Tile(16, 16, 8, 1)}
# Two accumulators as well as two chunks of keys: heads of 192 whose values are as wide.
_AMPERE_WIDE_VALUES = Tile(64, 16, 8, 2)
# Up to so many folded rows, keys are cut as far as fills the GPU. Then two programs of a multiprocessor are better than a
# large one: one multiplies while the other takes exponentials.
_SHORT = 512
_SHORT_HOPPER = {64: Tile(128, 64, 4, 3)}
_SHORT_HOPPER_TMA = {128: Tile(128, 32, 4, 3, tma=True)}
# Few rows are bound by memory: the tile is as small as the rows, and several programs of one multiprocessor load at once.
_FEW_ROWS = (16, 32, 64)
_FEW = {
    (64, 16): Tile(16, 64, 4, 3),
    (64, 32): Tile(32, 64, 4, 3),
    (64, 64): Tile(64, 64, 4, 3),
    (128, 16): Tile(16, 64, 4, 3),
    (128, 32): Tile(32, 64, 4, 3),
    (128, 64): Tile(64, 64, 4, 2),
    (192, 16): Tile(16, 32, 4, 3),
    (192, 32): Tile(32, 64, 8, 2),
    (192, 64): Tile(64, 64, 8, 2),
    (256, 16): Tile(16, 32, 4, 3),
    (256, 32): Tile(32, 32, 4, 3),
}
_FEW_AMPERE = {(128, 64): Tile(64, 64, 8, 3)}


@cache
def best_tile(major: int, shape: Shape) -> Tile:
    """The tile for a call on a GPU of this major compute capability."""
    hopper = major in (9, 10)  # 11 and above have the shared memory of Ampere's consumer parts
    width = _width(max(shape.dim, shape.value_dim))
    is_cut = chunks(shape.dim).second > 0
    if shape.dtype == torch.float32:
        return _FP32[width]
    few = next((rows for rows in _FEW_ROWS if shape.lines <= rows), 0)
    if (width, few) in _FEW:
        few_tiles = _FEW if hopper else _FEW | _FEW_AMPERE
        tile = few_tiles[width, few]
        # two chunks of a head hold twice the addresses
        if is_cut and width < 192:
            return tile._replace(warps=8)
        return tile
    if hopper:
        return _hopper_tiles(shape)[width]
    if width == 192 and chunks(shape.value_dim).second > 0:
        return _AMPERE_WIDE_VALUES
    tiles = _AMPERE | _WINDOWED_AMPERE if shape.windowed else _AMPERE
    return tiles[width]


def _hopper_tiles(shape: Shape) -> dict[int, Tile]:
    """By width. TMA loads heads that are not cut."""
    is_cut = chunks(shape.dim).second or chunks(shape.value_dim).second
    tma = shape.tma and not is_cut
    tiles = _WINDOWED_HOPPER if shape.windowed else _HOPPER
    if tma:
        tiles = tiles | (_WINDOWED_HOPPER_TMA if shape.windowed else _HOPPER_TMA)
    if shape.lines <= _SHORT:
        tiles = tiles | _SHORT_HOPPER
        if tma and not shape.windowed:
            tiles = tiles | _SHORT_HOPPER_TMA
    return tiles


def _width(dim: int) -> int:
    padded = sum(chunks(dim))
    return next(width for width in (64, 128, 192, 256) if padded <= width)


# Keys of one part at least: below this the merge costs more than the part saves.
_LEAST_PART = 256
# Parts that the merge reads at most.
MOST_SPLITS = 128


def split_count(programs: int, keys: int, multiprocessors: int) -> int:
    """Into how many parts the keys are cut, so that few rows fill the GPU twice over.

    Args:
        programs: without a split.
        keys: of one program.
        multiprocessors: of the GPU.
    """
    filling = 2 * multiprocessors // programs
    return max(1, min(filling, keys // _LEAST_PART, MOST_SPLITS))
