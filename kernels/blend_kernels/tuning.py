"""Measured choice among a few tiles, once per kind of work and machine, kept in a file.

`BLEND_KERNELS_TUNE=0` takes the best guess instead; `BLEND_KERNELS_CACHE` names the file (default
`~/.cache/blend_kernels/tiles.json`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from blend_kernels.tiles import Tile

Measure = Callable[[Tile], float]


def choose(key: str, tiles: Sequence[Tile], measure: Measure) -> Tile:
    """The fastest tile for `key`: remembered, or measured now and remembered.

    measure: seconds of one run with a tile, infinity for one that does not run on the GPU. With nothing to choose from,
    nothing is measured; when no tile runs, it is the first, and nothing is remembered.
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
    """Where choices are kept."""
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
    """Write through a temporary file, so that a reader never sees half of it; a read-only home costs only the memory."""
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(choices, indent=1))
        partial.replace(path)
    except OSError:
        return
