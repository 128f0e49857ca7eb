"""The public op `place_layer`, which puts the KV of a prompt's stored chunks into the prompt's cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blend_kernels.backend import Backend, choose_backend
from blend_kernels.checks import FLOATS, check_contiguous, check_dtype_and_device, require
from blend_kernels.chunk_kv import LayerShape
from blend_kernels.placing_plain import place_layer_plain
from blend_kernels.placing_table import PlacingTable, Turn


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
        ValueError: wrong shapes, dtypes or devices, or a cache that is too short.
    """
    shape = table.shape.layers[layer]
    if shape.width == 0 or table.total_rows == 0:
        return
    layers = keys.shape[:-3]
    if any(table.shape.layers[layer + number] != shape for number in range(1, *layers)):
        raise ValueError(f"the layers from {layer} on have several shapes: place them one by one")
    if shape.key_width:
        _check_cache("keys", keys, layers, shape.key_heads, shape.key_dim, table)
    if shape.value_width:
        _check_cache("values", values, layers, shape.value_heads, shape.value_dim, table)
    _check_turn("key_turn", key_turn, shape.key_dim)
    _check_turn("value_turn", value_turn, shape.value_dim)
    if gain is not None:
        _check_gain(gain, layers, shape, table, keys)
    tensors = [keys, values, table.chunks[0].keys[layer]]
    if gain is not None:
        tensors.append(gain)
    if choose_backend(backend, *tensors) == "triton":
        from blend_kernels.placing_kernel import launch_placing

        launch_placing(table, layer, keys, values, key_turn, value_turn, gain)
    else:
        place_layer_plain(table, layer, keys, values, key_turn, value_turn, gain)


def _check_cache(
    name: str,
    cache: Tensor,
    layers: Sequence[int],
    heads: int,
    dim: int,
    table: PlacingTable,
) -> None:
    if len(layers) > 1 or cache.shape[:-2] != (*layers, heads) or cache.shape[-1] != dim:
        shape = ", ".join(map(str, (*layers, heads, "capacity", dim)))
        raise ValueError(f"{name} must be [{shape}], got {list(cache.shape)}")
    if cache.shape[-2] < table.stop:
        raise ValueError(f"{name} has {cache.shape[-2]} rows, the table goes up to row {table.stop}")
    if cache.dtype not in FLOATS:
        raise ValueError(f"{name} must be floating point, got {cache.dtype}")
    if cache.device.type != table.device.type:
        raise ValueError(f"{name} is on {cache.device}, the table was made for {table.device}")
    if 0 in cache.stride():
        raise ValueError(f"{name} has elements that share memory (a dimension of stride 0)")
    check_contiguous(**{name: cache})


def _check_turn(
    name: str,
    turn: Turn | None,
    dim: int,
) -> None:
    if turn is None:
        return
    freq = turn.inv_freq
    require(
        freq.ndim == 1 and freq.shape[0] > 0 and freq.dtype in (torch.float32, torch.float64),
        f"inv_freq of {name} must be [pairs] in fp32 or fp64, got {freq.dtype} {list(freq.shape)}",
    )
    stop = turn.offset + 2 * freq.shape[0]
    require(
        turn.offset >= 0 and stop <= dim,
        f"{name}: dimensions {turn.offset} to {stop} should turn, but head_dim is {dim}",
    )


def _check_gain(gain: Tensor, layers: Sequence[int], shape: LayerShape, table: PlacingTable, like: Tensor) -> None:
    needed = [*layers, table.total_rows, shape.width]
    if list(gain.shape) != needed:
        raise ValueError(f"gain must be {needed}, got {list(gain.shape)}")
    check_dtype_and_device("gain", gain, like, FLOATS)
    check_contiguous(gain=gain)
