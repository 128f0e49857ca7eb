"""The public op `place_layer`, which puts the KV of a prompt's stored chunks into the prompt's cache."""

from __future__ import annotations

from torch import Tensor

from blend_kernels.backend import Backend, choose_backend
from blend_kernels.checks import FLOATS, check_shape, check_states, check_turn, check_written
from blend_kernels.chunk_kv import LayerShape
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
        values: the same for values. Of what a layer does not have (keys or values of no width), any tensor.
        key_turn: how keys rotate; None if they have no position in them.
        value_turn: how values rotate, where a cache keeps rotating dimensions there.
        gain: what to add, without position, `[(layers,) table.total_rows, key width + value width]`: rows in the order of the
            table, keys' heads side by side, then values' heads. Floating point.
        backend: "triton" or "torch"; None chooses by device.

    Raises:
        ValueError: a layer that there is not, a cache that is too short, wrong shapes, dtypes or devices, a cache whose
            elements share memory, dimensions that turn outside the head, or a backend that cannot compute this.
    """
    layers = table.shape.layers
    if not 0 <= layer < len(layers):
        raise ValueError(f"layer must lie in [0, {len(layers)}), got {layer}")
    shape = layers[layer]
    if shape.width == 0 or table.total_rows == 0:
        return
    if shape.key_width:
        _check_cache("keys", keys, shape.key_heads, shape.key_dim, key_turn, table)
    if shape.value_width:
        _check_cache("values", values, shape.value_heads, shape.value_dim, value_turn, table)
    # a cache of no width may have any shape
    keys = keys if shape.key_width else values
    values = values if shape.value_width else keys
    check_states("values", values, (keys.dtype,), keys.device)
    check_shape("values", values, (*keys.shape[:-3], *values.shape[-3:]))
    if any(other != shape for other in _layers_from(table, layer, keys)):
        raise ValueError(f"{keys.shape[0]} layers from layer {layer} on do not exist, or have several shapes")
    if gain is not None:
        check_shape("gain", gain, (*keys.shape[:-3], table.total_rows, shape.width))
        check_states("gain", gain, FLOATS, keys.device)
    if choose_backend(backend, keys, values) == "triton":
        from blend_kernels.placing_launch import launch_placing

        launch_placing(table, layer, keys, values, key_turn, value_turn, gain)
    else:
        place_layer_plain(table, layer, keys, values, key_turn, value_turn, gain)


def _check_cache(name: str, cache: Tensor, heads: int, dim: int, turn: Turn | None, table: PlacingTable) -> None:
    """Require `[(layers,) heads, capacity, dim]` with room for the table, on its device."""
    if cache.ndim not in (3, 4) or cache.shape[-3] != heads or cache.shape[-1] != dim:
        raise ValueError(f"{name} must be [{heads}, capacity, {dim}], by layers or not, got {list(cache.shape)}")
    if cache.shape[-2] < table.stop:
        raise ValueError(f"{name} has {cache.shape[-2]} rows, the table goes up to row {table.stop}")
    if cache.device.type != table.device.type:
        raise ValueError(f"{name} is on {cache.device}, the table on {table.device}; make the table for that device")
    check_states(name, cache, FLOATS, cache.device)
    check_written(name, cache)
    if turn is not None:
        check_turn(f"how {name} turn", turn.inv_freq, turn.offset, dim)


def _layers_from(table: PlacingTable, layer: int, cache: Tensor) -> tuple[LayerShape | None, ...]:
    """Shapes of the layers that a call writes; None for those that the table does not have."""
    if cache.ndim == 3:
        return ()
    stop = layer + cache.shape[0]
    layers = table.shape.layers[layer:stop]
    return (*layers, None) if len(layers) < cache.shape[0] else layers
