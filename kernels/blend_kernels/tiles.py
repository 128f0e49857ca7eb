"""Tile shapes of the attention kernel: candidates per kind of work, and the choice among them.

Candidates are predictions from registers and shared memory (kernels/README.md), best guess first. None spills registers in
the calls that scripts/aot_report compiles, except fp32 at 256 dimensions; otherwise the report fails. A call takes the best
guess, or what `python -m blend_kernels.tune` has measured on this machine and written to `cache_file`.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Folded rows and keys of one step, and how the compiler arranges them.

    rows: folded rows.
    keys: keys of one step that all rows see.
    warps: of a program.
    stages: of the pipeline that loads keys.
    tma: whether TMA descriptors load the keys.
    resident: programs that a multiprocessor holds at once, by registers and shared memory.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    tma: bool = False
    resident: int = 1

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


class Kind(NamedTuple):
    """Work for which one tile is measured: the shape with folded rows in powers of two, and what else changes the kernel."""

    shape: Shape
    group: int
    capped: bool


# From so many folded rows on, all calls are one kind of work.
MOST_LINES = 1024


class Machine(NamedTuple):
    """A GPU's name, its major compute capability and Triton's version."""

    name: str
    major: int
    triton: str


@cache
def chunks(dim: int) -> Chunks:
    """Cut a head dimension into chunks with little padding; tensor cores want at least 16."""
    first = max(16, 1 << (dim.bit_length() - 1))
    remainder = dim - first
    if remainder <= 0:
        return Chunks(first, 0)
    return Chunks(first, max(16, 1 << (remainder - 1).bit_length()))


# Keyed by the padded width of the wider of head and value dimension.
_HOPPER = {
    64: (
        Tile(128, 64, 8, 3, True),
        Tile(128, 128, 8, 3, True),
        Tile(128, 128, 8, 3),
        Tile(128, 64, 4, 3, resident=2),
        Tile(128, 64, 8, 3),
    ),
    128: (
        Tile(128, 128, 8, 2, True),
        Tile(128, 32, 8, 3, True),
        Tile(128, 32, 4, 3, True, resident=2),
        Tile(128, 64, 8, 3, True),
        Tile(128, 64, 8, 3),
    ),
    192: (Tile(128, 32, 8, 2), Tile(64, 32, 8, 2)),
    256: (Tile(64, 32, 8, 2), Tile(128, 32, 8, 2), Tile(128, 32, 8, 2, True)),
}
_AMPERE = {
    64: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(128, 32, 8, 3)),
    128: (Tile(128, 32, 8, 3), Tile(64, 64, 8, 2)),
    192: (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
    256: (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
}
# Two accumulators as well as two chunks of keys: heads of 192 whose values are as wide.
_AMPERE_WIDE_VALUES = (Tile(64, 16, 8, 2), Tile(32, 32, 8, 2))
# Three tf32 products for one of fp32 hold six operands in registers; where heads are cut in two, only the first tile fits.
_FP32 = {
    64: (Tile(32, 32, 4, 2), Tile(32, 32, 8, 2)),
    128: (Tile(32, 16, 8, 2), Tile(16, 32, 4, 2)),
    192: (Tile(16, 16, 8, 1),),
    256: (Tile(16, 16, 8, 1),),
}
# With a window all three loops run, and the masked ones hold the mask besides the scores.
_WINDOWED_HOPPER = {
    64: (Tile(128, 64, 8, 3), Tile(128, 64, 4, 3, resident=2)),
    128: (Tile(128, 128, 8, 2, True), Tile(128, 64, 8, 3, True), Tile(128, 32, 8, 3)),
    192: (Tile(64, 32, 8, 2), Tile(128, 32, 8, 2)),
    256: (Tile(64, 32, 8, 2), Tile(128, 32, 8, 2)),
}
_WINDOWED_AMPERE = {
    64: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)),
    128: (Tile(64, 32, 8, 2), Tile(64, 64, 8, 2)),
    192: (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
    256: (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
}
# Few rows are bound by memory: the tile is as small as the rows, and several programs of one multiprocessor load at once.
_FEW_HOPPER = {
    (64, 16): (Tile(16, 64, 4, 3, resident=4), Tile(16, 128, 4, 2, resident=4)),
    (64, 32): (Tile(32, 64, 4, 3, resident=4),),
    (64, 64): (Tile(64, 64, 4, 3, resident=3),),
    (128, 16): (Tile(16, 64, 4, 3, resident=3), Tile(16, 32, 4, 3, resident=4)),
    (128, 32): (Tile(32, 64, 4, 3, resident=2), Tile(32, 32, 4, 3, resident=3)),
    (128, 64): (Tile(64, 64, 4, 2, resident=2), Tile(64, 64, 8, 3)),
    (192, 16): (Tile(16, 32, 4, 3, resident=3), Tile(16, 64, 8, 2)),
    (192, 32): (Tile(32, 64, 8, 2),),
    (192, 64): (Tile(64, 64, 8, 2),),
    (256, 16): (Tile(16, 32, 4, 3, resident=3), Tile(16, 64, 8, 2)),
    (256, 32): (Tile(32, 32, 4, 3, resident=2), Tile(32, 64, 8, 2)),
}
_FEW_AMPERE = {
    (64, 16): (Tile(16, 64, 4, 3, resident=4), Tile(16, 128, 4, 2, resident=4)),
    (64, 32): (Tile(32, 64, 4, 3, resident=3),),
    (64, 64): (Tile(64, 64, 4, 3, resident=2),),
    (128, 16): (Tile(16, 64, 4, 3, resident=2), Tile(16, 32, 4, 3, resident=4)),
    (128, 32): (Tile(32, 64, 4, 3, resident=2), Tile(32, 32, 4, 3, resident=3)),
    (128, 64): (Tile(64, 64, 8, 3), Tile(64, 32, 4, 3, resident=2)),
    (192, 16): (Tile(16, 32, 4, 3, resident=3), Tile(16, 64, 8, 2)),
    (192, 32): (Tile(32, 64, 8, 2),),
    (192, 64): (Tile(64, 64, 8, 2),),
    (256, 16): (Tile(16, 32, 4, 3, resident=2), Tile(16, 64, 8, 2)),
    (256, 32): (Tile(32, 32, 4, 3), Tile(32, 64, 8, 2)),
}


# Up to so many folded rows, keys are split as far as fills the GPU. Then two programs of a multiprocessor are better than a
# large one: one multiplies while the other takes exponentials.
_SHORT = 512


def candidates(major: int, shape: Shape) -> tuple[Tile, ...]:
    """Tiles worth trying on a GPU of this major compute capability, best guess first."""
    hopper = major in (9, 10)  # 11 and above have the shared memory of Ampere's consumer parts
    width = _width(max(shape.dim, shape.value_dim))
    cut = chunks(shape.dim).second > 0
    cut_values = chunks(shape.value_dim).second > 0
    if shape.dtype == torch.float32:
        return _FP32[width][:1] if cut else _FP32[width]
    few = next((rows for rows in (16, 32, 64) if shape.lines <= rows), 0)
    tiles = (_FEW_HOPPER if hopper else _FEW_AMPERE).get((width, few))
    if tiles is not None:
        # two chunks of a head hold twice the addresses
        return (tiles[0]._replace(warps=8, resident=1),) if cut and width < 192 else tiles
    if not hopper and width == 192 and cut_values:
        return _AMPERE_WIDE_VALUES
    hopper_tiles = _WINDOWED_HOPPER if shape.windowed else _HOPPER
    ampere_tiles = _WINDOWED_AMPERE if shape.windowed else _AMPERE
    tables = hopper_tiles if hopper else ampere_tiles
    tma = shape.tma and not cut and not cut_values
    fitting = tuple(tile for tile in tables[width] if tile.rows < 2 * shape.lines and (tma or not tile.tma))
    if shape.lines > _SHORT:
        return fitting
    return tuple(sorted(fitting, key=lambda tile: -tile.resident))


def _width(dim: int) -> int:
    padded = sum(chunks(dim))
    return next(width for width in (64, 128, 192, 256) if padded <= width)


@cache
def best_tile(machine: Machine, kind: Kind) -> Tile:
    """The measured tile for this kind of work on this machine; the best guess if none was measured or it is listed no more."""
    tiles = candidates(machine.major, kind.shape)
    measured = measured_tiles().get(key_of(machine, kind))
    return next((tile for tile in tiles if list(tile) == measured), tiles[0])


def key_of(machine: Machine, kind: Kind) -> str:
    """The name of a kind of work on a machine in the file."""
    return "/".join(map(str, (*machine, *kind.shape, *kind[1:])))


def cache_file() -> Path:
    """The file of measured tiles: `BLEND_KERNELS_CACHE`, by default `~/.cache/blend_kernels/tiles.json`."""
    return Path(os.environ.get("BLEND_KERNELS_CACHE") or Path.home() / ".cache" / "blend_kernels" / "tiles.json")


@cache
def measured_tiles() -> dict[str, list[int | bool]]:
    """What the file holds, read once; nothing if it is absent or damaged."""
    try:
        content = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def save(tiles: dict[str, Tile]) -> None:
    """Add measured tiles to the file, through a temporary one, so that readers see a whole file."""
    path = cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    content = {**measured_tiles(), **{key: list(tile) for key, tile in tiles.items()}}
    partial.write_text(json.dumps(content, indent=1))
    partial.replace(path)
    forget()


def forget() -> None:
    """Read the file again on the next choice."""
    measured_tiles.cache_clear()
    best_tile.cache_clear()


# What a part of the keys costs besides them, in keys: its start, and for each folded row a result to write and to merge.
_KEYS_OF_A_START = 128
_KEYS_OF_A_ROW = 2
# Parts that the merge reads at most.
MOST_SPLITS = 128


@cache
def split_count(
    programs: int,
    keys: int,
    tile: Tile,
    multiprocessors: int,
) -> int:
    """Into how many parts keys are cut, so that few rows fill the GPU and the slowest multiprocessor is done soonest.

    Args:
        programs: without a split.
        keys: of one program.
        tile: says how many keys are one step, and how many programs a multiprocessor holds at once.
        multiprocessors: of the GPU. Programs beyond what all of them hold wait for the next round.

    Returns:
        The fewest parts that reach the shortest time; 1 if the rows alone fill half of the GPU.
    """
    slots = multiprocessors * tile.resident
    steps = -(-keys // tile.keys)
    if 2 * programs > slots or steps == 1:
        return 1

    def duration(parts: int) -> int:
        rounds = -(-programs * parts // slots)
        part_keys = -(-steps // parts) * tile.keys
        return rounds * (part_keys + _KEYS_OF_A_START + _KEYS_OF_A_ROW * tile.rows)

    parts = min(range(2, min(MOST_SPLITS, steps) + 1), key=duration)
    return parts if duration(parts) + _KEYS_OF_A_START < steps * tile.keys else 1
