"""Launches the kernel of `place_layer`: programs, alignment, and what is known when it is compiled."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from blend_kernels.attention_launch import multiprocessors
from blend_kernels.chunk_kv import ALIGNMENT, Packing, Part, row_bytes
from blend_kernels.placing_kernel import place_tiles
from blend_kernels.placing_table import FIELDS, TILE_ROWS, PlacingTable
from blend_kernels.rotation import Layout, Turn

# Elements of one load of a program: 16 per thread of four warps, 8 of eight.
_ELEMENTS = 2048
# Programs that read host memory: enough for the bus, and few enough to leave the multiprocessors to other kernels.
HOST_PROGRAMS = 48
_PROGRAMS_PER_MULTIPROCESSOR = 4
# Items of work for each program, so that the last ones end together.
_ITEMS_PER_PROGRAM = 4
_NO_TURN = Layout(0, 0, False)
_WIDE = 128  # numbers of a head


def launch_placing(
    table: PlacingTable,
    layer: int,
    keys: Tensor,
    values: Tensor,
    key_turn: Turn | None,
    value_turn: Turn | None,
    gain: Tensor | None,
) -> None:
    """Write some layers by one launch; as `place_layer`.

    Few programs share the work if a chunk lies in host memory, else enough for the GPU.
    """
    if keys.ndim == 3:
        keys = keys[None]
        values = values[None]
        gain = None if gain is None else gain[None]
    shape = table.shape
    key_part, value_part = shape.parts[2 * layer : 2 * layer + 2]
    # Caches of no width may have any shape.
    if key_part.width == 0:
        keys = values
    if value_part.width == 0:
        values = keys
    programs = HOST_PROGRAMS if table.reads_host else _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(table.device)
    key_heads = key_part.heads if key_part.width else 0
    value_heads = value_part.heads if value_part.width else 0
    tiles = len(table.tiles)
    layers = keys.shape[0]
    most_shares = max(key_heads, value_heads)
    filling = _ITEMS_PER_PROGRAM * programs // (2 * tiles * layers)
    shares = max(1, min(most_shares, filling))
    items = 2 * tiles * shares * layers
    numbers = table.on_device
    # any tensor stands in the place of one that there is not
    key_freq = numbers if key_turn is None else key_turn.inv_freq.to(keys.device).contiguous()
    value_freq = numbers if value_turn is None else value_turn.inv_freq.to(keys.device).contiguous()
    gain_strides = (0, 0) if gain is None else gain.stride()[:2]
    options = _options(table, key_part, value_part, key_turn, value_turn, with_gain=gain is not None)
    place_tiles[(min(programs, items),)](
        numbers,
        keys,
        values,
        numbers if gain is None else gain,
        key_freq,
        value_freq,
        *keys.stride()[:3],
        *values.stride()[:3],
        *gain_strides,
        key_heads,
        value_heads,
        key_part.start,
        key_part.column,
        value_part.start,
        value_part.column,
        shape.layer_bytes(layer),
        key_part.width + value_part.width,
        layers,
        len(table.chunks),
        tiles,
        shares,
        **options,
        num_stages=2,
        enable_fp_fusion=True,
    )


def _options(
    table: PlacingTable,
    key_part: Part,
    value_part: Part,
    key_turn: Turn | None,
    value_turn: Turn | None,
    *,
    with_gain: bool,
) -> dict[str, Any]:
    """Compile-time constants and warps of a launch."""
    packing = table.shape.packing
    dtype = table.shape.number_dtype
    # A gain, the two halves of int4, and wide heads take more registers.
    wide = max(key_part.dim, value_part.dim) > _WIDE
    warps = 8 if with_gain or packing == "int4" or wide else 4
    elements = _ELEMENTS // 2 if with_gain and packing == "int4" else _ELEMENTS
    gain = "before" if table.absolute_places == "all" else "turned"
    parts = {}
    for prefix, part, turn in (("K", key_part, key_turn), ("V", value_part, value_turn)):
        layout = _NO_TURN if turn is None else turn.layout
        alignment = math.gcd(table.alignment, part.start)
        part_options = _part_options(prefix, part.dim, layout, packing, dtype.itemsize, alignment, elements)
        parts.update(part_options)
    return {
        **parts,
        "SOURCE": getattr(tl, str(dtype).removeprefix("torch.")),
        "PACKING": packing,
        "GAIN": gain if with_gain else "none",
        "ABSOLUTE": table.absolute_places,
        "TILE": TILE_ROWS,
        "FIELDS": FIELDS,
        "num_warps": warps,
    }


@lru_cache(maxsize=1024)
def _part_options(
    prefix: str, dim: int, layout: Layout, packing: Packing, size: int, alignment: int, elements: int
) -> dict[str, Any]:
    """Compile-time constants for keys or values.

    Args:
        prefix: of their names.
        dim: head dimension.
        layout: the dimensions that turn.
        packing: of the chunks.
        size: bytes of a number; 1 for int4.
        alignment: of the first row of every head, in bytes.
        elements: how many a program loads at a time.

    Returns:
        Values by name.
    """
    pairs = triton.next_power_of_2(max(1, layout.pairs))
    still_dims = dim - 2 * layout.pairs
    still = triton.next_power_of_2(still_dims) if still_dims else 0
    # An int4 row counts as two: the upper halves of an odd number of tokens begin in the middle of a row.
    half = dim // 2 if dim % 2 == 0 else 1
    row = half if packing == "int4" else dim
    # The largest power of two up to 16 so that every load of so many bytes is aligned and contiguous.
    vector_bytes = math.gcd(ALIGNMENT, alignment, row * size, layout.offset * size, layout.pairs * size)
    block_rows = elements // max(pairs, still)
    options = {
        "B": max(1, min(TILE_ROWS, block_rows)),
        "P": pairs,
        "PAIRS": layout.pairs,
        "OFFSET": layout.offset,
        "DIM": max(1, dim),
        "STILL": still,
        "INTERLEAVED": layout.interleaved,
        "VECTOR": vector_bytes // size,
        "BYTES": vector_bytes,
        "ROW": row_bytes(dim, packing, size),
    }
    return {f"{prefix}_{name}": value for name, value in options.items()}
