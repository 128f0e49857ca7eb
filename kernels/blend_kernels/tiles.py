"""Tile shapes of the attention kernel: candidates per kind of work, and the measured choice among them.

Candidates are predictions from registers and shared memory (kernels/README.md), best guess first. None spills registers
in the calls that scripts/aot_report compiles for compute capabilities 8.0 and 9.0, except fp32 at 256 dimensions;
otherwise the report fails. `choose` measures them once per kind of work and machine and keeps the result in
`BLEND_KERNELS_CACHE`, by default `~/.cache/blend_kernels/tiles.json`. `BLEND_KERNELS_TUNE=0` takes the best guess.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Folded rows and keys of one step, warps, pipeline stages, and whether TMA descriptors load the keys."""

    rows: int
    keys: int
    warps: int
    stages: int
    tma: bool = False


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


def chunks(dim: int) -> Chunks:
    """Cut a head dimension into chunks with little padding; tensor cores want at least 16."""
    first = max(16, 1 << (dim.bit_length() - 1))
    rest = dim - first
    return Chunks(first, max(16, 1 << (rest - 1).bit_length()) if rest > 0 else 0)


# Keyed by the padded width of the wider of head and value dimension.
_HOPPER = {
    64: (Tile(128, 128, 8, 3, True), Tile(128, 128, 8, 3), Tile(128, 64, 4, 3), Tile(128, 64, 8, 3)),
    128: (Tile(128, 64, 8, 3, True), Tile(128, 128, 8, 2, True), Tile(128, 64, 8, 3)),
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
    64: (Tile(128, 64, 8, 3), Tile(128, 64, 4, 3)),
    128: (Tile(128, 64, 8, 3, True), Tile(128, 32, 8, 3)),
    192: (Tile(64, 32, 8, 2), Tile(128, 32, 8, 2)),
    256: (Tile(64, 32, 8, 2), Tile(128, 32, 8, 2)),
}
_WINDOWED_AMPERE = {
    64: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)),
    128: (Tile(64, 32, 8, 2), Tile(64, 64, 8, 2)),
    192: (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
    256: (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
}
# Few rows: the tile is as small as the rows, and more stages hide the latency of memory.
_FEW = {
    64: (Tile(16, 64, 4, 3), Tile(16, 128, 4, 2)),
    128: (Tile(16, 64, 4, 3),),
    192: (Tile(16, 64, 8, 2),),
    256: (Tile(16, 64, 8, 2),),
}


def candidates(major: int, shape: Shape) -> tuple[Tile, ...]:
    """Tiles worth trying on a GPU of this major compute capability, best guess first."""
    hopper = major in (9, 10)  # 11 and above have the shared memory of Ampere's consumer parts
    width = _width(max(shape.dim, shape.value_dim))
    cut, cut_values = chunks(shape.dim).second > 0, chunks(shape.value_dim).second > 0
    if shape.dtype == torch.float32:
        return _FP32[width][:1] if cut else _FP32[width]
    few = next((rows for rows in ((16, 32) if width == 256 else (16, 32, 64)) if shape.lines <= rows), None)
    if few is not None:
        warps = 8 if few == 64 or cut else 4
        return tuple(tile._replace(rows=few, warps=max(warps, tile.warps)) for tile in _FEW[width])
    if not hopper and width == 192 and cut_values:
        return _AMPERE_WIDE_VALUES
    tables = (_WINDOWED_HOPPER if hopper else _WINDOWED_AMPERE) if shape.windowed else (_HOPPER if hopper else _AMPERE)
    tma = shape.tma and not cut and not cut_values
    return tuple(tile for tile in tables[width] if tile.rows < 2 * shape.lines and (tma or not tile.tma))


def _width(dim: int) -> int:
    padded = sum(chunks(dim))
    return next(width for width in (64, 128, 192, 256) if padded <= width)


Measure = Callable[[Tile], float]


def choose(key: str, tiles: Sequence[Tile], measure: Measure) -> Tile:
    """The fastest tile for `key`, from memory or measured now.

    measure: seconds of one run with a tile; infinity if it does not run on the GPU. A single candidate is not measured.
    If no tile runs, returns the first and remembers nothing.
    """
    if len(tiles) == 1 or os.environ.get("BLEND_KERNELS_TUNE") == "0":
        return tiles[0]
    known = _choices()
    best = next((tile for tile in tiles if list(tile) == known.get(key)), None)
    if best is None:
        seconds = [measure(tile) for tile in tiles]
        best = tiles[seconds.index(min(seconds))]
        if min(seconds) < float("inf"):
            known[key] = list(best)
            _save(known)
    return best


def cache_file() -> Path:
    """The file of measured choices."""
    return Path(os.environ.get("BLEND_KERNELS_CACHE") or Path.home() / ".cache" / "blend_kernels" / "tiles.json")


@cache
def _choices() -> dict[str, list[int | bool]]:
    try:
        found = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def forget() -> None:
    """Read the file again on the next choice."""
    _choices.cache_clear()


def _save(choices: dict[str, list[int | bool]]) -> None:
    """Write through a temporary file, so readers see a whole file. On a read-only home, choices stay in memory only."""
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(choices, indent=1))
        partial.replace(path)
    except OSError:
        return
