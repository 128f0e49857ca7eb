"""Whether kernels that were written elsewhere can be trusted on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain, product

import numpy as np
import torch
from torch import Tensor

from blend_kernels.backend import Backend
from blend_kernels.chunk_kv import ChunkKV, ChunkShape, LayerShape, Packing
from blend_kernels.placing import place_layer
from blend_kernels.placing_table import PlacingTable
from blend_kernels.rotation import Turn

LayerKind = tuple[LayerShape, Turn | None, Turn | None]
"""Shape of a layer, and how its keys and values turn."""

# More than a tile of the kernel, and not a multiple.
_TOKENS = 70
_FIRST, _AT, _MOVED = 3, 5, 40
_PACKINGS: tuple[Packing, ...] = ("plain", "int8", "int4")
# The kernel's sines and cosines are as exact as that.
_ANGLES = 1e-5


@torch.inference_mode()
def placing_fault(layers: Iterable[LayerKind], dtype: torch.dtype, device: torch.device) -> str | None:
    """Why `place_layer`'s kernel cannot be trusted with such chunks on this machine, or None.

    A chunk of each packing, in page-locked memory and on the device, with and without a gain, is placed by the kernel and by
    plain torch. What is only copied must be equal bit by bit, what turns or is decoded up to two roundings.

    Args:
        layers: of the model; one of each shape is tried.
        dtype: of chunks and cache.
        device: of the cache.
    """
    kinds = {kind[0]: kind for kind in layers if kind[0].width}
    places = (False,) if device.type == "cpu" else (False, True)
    cases = product(kinds.values(), _PACKINGS, places, (False, True))
    try:
        for kind, packing, near, with_gain in cases:
            if not _agree(kind, packing, dtype, device, near=near, with_gain=with_gain):
                where = "on the GPU" if near else "in page-locked memory"
                return f"{packing} chunks {where} come out different"
    except Exception as error:  # of a compiler or driver
        lines = str(error).strip().splitlines()
        return lines[0] if lines else type(error).__name__
    return None


def _agree(
    kind: LayerKind, packing: Packing, dtype: torch.dtype, device: torch.device, *, near: bool, with_gain: bool
) -> bool:
    """Whether the kernel and plain torch place a random chunk alike."""
    layer, *turns = kind
    shape = ChunkShape((layer,), dtype, packing)
    chunk = _random_chunk(shape, device, near=near)
    rows = _TOKENS - _FIRST
    gain = torch.randn(rows, layer.width, device=device) if with_gain else None
    table = PlacingTable(
        [chunk],
        first=np.array([_FIRST]),
        at=np.array([_AT]),
        rows=np.array([rows]),
        moved=np.array([_MOVED]),
        absolute=np.array([with_gain]),
        device=device,
    )
    capacity = _AT + _TOKENS
    zeros = partial(torch.zeros, dtype=dtype, device=device)
    caches = []
    backends: tuple[Backend, ...] = ("triton", "torch")
    for backend in backends:
        keys = zeros(layer.key_heads, capacity, layer.key_dim)
        values = zeros(layer.value_heads, capacity, layer.value_dim)
        place_layer(table, 0, keys, values, *turns, gain=gain, backend=backend)
        caches.append((keys, values))
    is_unchanged = packing == "plain" and gain is None
    for by_kernel, by_torch, turn in zip(*caches, turns, strict=True):
        agree = torch.equal if is_unchanged and turn is None else _close
        if not agree(by_kernel, by_torch):
            return False
    return True


def _random_chunk(shape: ChunkShape, device: torch.device, *, near: bool) -> ChunkKV:
    groups = 1 if shape.packing == "plain" else 2
    size = shape.nbytes(_TOKENS, groups)
    memory = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    chunk = ChunkKV(shape, _TOKENS, memory, groups)
    for part in chain(chunk.keys, chunk.values, chunk.key_scales, chunk.value_scales):
        if part.is_floating_point():
            part.copy_(torch.rand(part.shape) + 0.5)
        else:
            part.copy_(torch.randint(0, 127, part.shape))
    return chunk.to(device) if near else chunk


def _close(states: Tensor, expected: Tensor) -> bool:
    step = max(2 * torch.finfo(states.dtype).eps, _ANGLES)
    expected = expected.float()
    size = float(expected.square().mean().sqrt())
    return torch.allclose(states.float(), expected, rtol=step, atol=step * size)
