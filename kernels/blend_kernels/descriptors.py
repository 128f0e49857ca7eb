"""TMA descriptors of keys and values: on Hopper one thread asks for a whole tile instead of every thread for its part."""

from __future__ import annotations

from typing import Any

import torch

from blend_kernels.tiles import Tile


def key_descriptor(x: torch.Tensor, tile: Tile) -> Any:
    """Descriptor of `[batch, kv_heads, keys, dim]` as a matrix with a row per key slot, or None where TMA cannot be used.

    Row `batch * (s_b / s_n) + head * (s_h / s_n) + key` is that key, which needs strides that are multiples of the
    key's, and what TMA asks of memory: 16-byte alignment, at most 256 rows of a tile, a power of two as its width.
    """
    batch, heads, keys, dim = x.shape
    step = x.stride(2)
    outer = x.stride(0) * (batch > 1), x.stride(1) * (heads > 1)
    aligned = x.data_ptr() % 16 == 0 and step * x.element_size() % 16 == 0
    if not tile.tma or not aligned or step < dim or any(s % step for s in outer) or dim & (dim - 1) or dim < 16:
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows = (batch - 1) * outer[0] // step + (heads - 1) * outer[1] // step + keys
    return TensorDescriptor(x, [rows, dim], [step, 1], [tile.keys, dim])
