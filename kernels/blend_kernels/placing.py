"""The public op `place_layer`, which puts the KV of a prompt's stored chunks into the prompt's cache."""

from __future__ import annotations

from torch import Tensor

from blend_kernels.backend import Backend, choose_backend
from blend_kernels.placing_plain import place_layer_plain
from blend_kernels.placing_table import PlacingTable
from blend_kernels.rotation import Turn


def place_layer(
    table: PlacingTable,
    layer: int,
    keys: Tensor,
    values: Tensor,
    key_turn: Turn | None,
    value_turn: Turn | None,
    *,
    gain: Tensor | None = None,
    backend: Backend | None = None,
) -> None:
    """Write a layer, or several of one shape, of every chunk of the table into the prompt's cache; its other rows stay.

    A key k goes to R(moved) k, and to R(moved) k + R(position) gain with a gain. A key without position goes to
    R(position) (k + gain). A value that does not turn goes to v + gain. Quantised numbers are decoded first, as their codec
    does it. Products and sums are fp32, and rounded once; what is only copied keeps every bit.

    Args:
        table: rows and chunks.
        layer: index into `table.shape.layers`; a layer without KV is left alone.
        keys: the prompt's cache of the layer `[kv_heads, capacity, head_dim]`, or of it and the next ones, which have its shape
            `[layers, kv_heads, capacity, head_dim]`; floating point, any strides with a contiguous last dimension.
        values: the same for values.
        key_turn: how keys rotate; None if they have no position in them.
        value_turn: how values rotate, where a cache keeps rotating dimensions there.
        gain: what to add, without position, `[(layers,) table.total_rows, key width + value width]`: rows in the order of the
            table, keys' heads side by side, then values' heads. Floating point.
        backend: "triton" or "torch"; None chooses by device.

    Raises:
        ValueError: a cache that is too short.
    """
    shape = table.shape.layers[layer]
    if shape.width == 0 or table.total_rows == 0:
        return
    capacity = min(cache.shape[-2] for cache in (keys, values) if cache.numel())
    if capacity < table.stop:
        raise ValueError(f"the cache has {capacity} rows, the table goes up to row {table.stop}")
    if choose_backend(backend, keys, values) == "triton":
        from blend_kernels.placing_launch import launch_placing

        launch_placing(table, layer, keys, values, key_turn, value_turn, gain)
    else:
        place_layer_plain(table, layer, keys, values, key_turn, value_turn, gain)
