"""Where the caches of prompts lie, in device memory, so that one captured graph serves every prompt and cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blend_kernels.checks import check_kind, check_shape
from blend_kernels.work import Rule

# Rows of the table per layer: address of the keys, address of the values, capacity.
_FIELDS = 3
# Kernels read and write so many bytes at once.
_ALIGNMENT = 16
# Up to so many rows are computed each alone: they are the next tokens of several prompts.
MOST_ALONE = 16


class CacheShape(NamedTuple):
    """What all caches of one layer share: KV heads, and dimensions of a key and of a value."""

    kv_heads: int
    head_dim: int
    value_dim: int


class LayerBuffers(NamedTuple):
    """Keys `[1, kv_heads, capacity, head_dim]` and values `[1, kv_heads, capacity, value_dim]` of one layer of a cache.

    They are contiguous and start at a multiple of 16 bytes, which kernels read and write at once.
    """

    keys: Tensor
    values: Tensor

    def address(self) -> tuple[int, int, int]:
        """Entries of the table: where keys and values lie, and for how many rows."""
        return self.keys.data_ptr(), self.values.data_ptr(), self.keys.shape[2]


class CacheAddresses:
    """Where the caches of up to `requests` prompts lie, in a table that kernels read.

    Nothing here keeps a cache on a GPU alive: keep it until the work over it is submitted, on the stream that freed memory
    belongs to.

    Args:
        requests: how many caches have an address at the same time.
        shapes: of the layers.
        device: of the caches.
        dtype: of the caches.

    Attributes:
        shapes: of the layers.
        dtype: of the caches.
        table: int64 `[layers, 3, requests]` on the device, at one address forever: address of the keys, address of the
            values, capacity in rows. An unassigned request has capacity 0, so kernels leave its rows out.
        buffers: of each request the layers, on a CPU, where plain torch needs them.
    """

    def __init__(self, requests: int, shapes: Sequence[CacheShape], device: torch.device, dtype: torch.dtype) -> None:
        self.shapes = tuple(shapes)
        self.dtype = dtype
        self.buffers: list[list[LayerBuffers]] = []
        self._assigned: list[list[tuple[int, int, int]]] = []
        with torch.inference_mode(False):  # else a copy outside of inference mode would be refused
            self.table = torch.zeros(len(shapes), _FIELDS, requests, dtype=torch.int64, device=device)
            self._on_host = torch.zeros(self.table.shape, dtype=torch.int64)

    def assign(self, caches: Sequence[Sequence[LayerBuffers]]) -> None:
        """The layers of the caches of the first requests; the others keep theirs.

        One copy on the current stream, that of the kernels or graphs, for which the host does not wait. None if nothing has
        changed. Never call it while a graph is captured.

        Raises:
            ValueError: more caches than requests, or a layer of another shape, dtype or device, that is not contiguous, or
                starts at no multiple of 16 bytes. Then all addresses stay as they were.
        """
        addresses = [[layer.address() for layer in layers] for layers in caches]
        is_changed = self._assigned[: len(caches)] != addresses
        if is_changed:
            self._check(caches)
        if self.table.device.type == "cpu":
            self.buffers[: len(caches)] = [list(layers) for layers in caches]
        if not is_changed:
            return
        self._assigned[: len(caches)] = addresses
        for request, layers in enumerate(addresses):
            self._on_host[:, :, request] = torch.tensor(layers)
        # A fresh page-locked block for each copy: torch reuses one only after its copy, so the table may change at once.
        staged = self._on_host.pin_memory() if self.table.is_cuda else self._on_host
        self.table.copy_(staged, non_blocking=True)

    def shape_of(self, layer: int) -> CacheShape:
        """The shape of a layer; `ValueError` for one that there is not."""
        if not 0 <= layer < len(self.shapes):
            raise ValueError(f"layer must lie in [0, {len(self.shapes)}), got {layer}")
        return self.shapes[layer]

    def capacities(self, layer: int) -> Tensor:
        """Rows of each request's cache, int64 `[requests]` on the host; 0 without a cache."""
        return self._on_host[layer, _FIELDS - 1]

    def _check(self, caches: Sequence[Sequence[LayerBuffers]]) -> None:
        requests = self.table.shape[2]
        if len(caches) > requests:
            raise ValueError(f"there are addresses for {requests} caches, got {len(caches)}")
        for layers in caches:
            if len(layers) != len(self.shapes):
                raise ValueError(f"a cache of {len(self.shapes)} layers is needed, got {len(layers)}")
            for number, (buffers, shape) in enumerate(zip(layers, self.shapes, strict=True)):
                capacity = buffers.keys.shape[2]
                self._check_buffer(f"keys of layer {number}", buffers.keys, shape, capacity, shape.head_dim)
                self._check_buffer(f"values of layer {number}", buffers.values, shape, capacity, shape.value_dim)

    def _check_buffer(self, name: str, buffer: Tensor, shape: CacheShape, capacity: int, dim: int) -> None:
        check_shape(name, buffer, (1, shape.kv_heads, capacity, dim))
        check_kind(name, buffer, (self.dtype,), self.table.device)
        if not buffer.is_contiguous():
            raise ValueError(f"{name} must be a whole contiguous buffer, not a view of its rows in use")
        if buffer.data_ptr() % _ALIGNMENT:
            raise ValueError(f"{name} must start at a multiple of {_ALIGNMENT} bytes")


class AddressedRows(NamedTuple):
    """Arguments of one attention over addressed caches, as in `attend_rows`; without requests all rows are of the first."""

    table: Tensor
    layer: int
    shape: CacheShape
    q: Tensor
    positions: Tensor
    request_of_row: Tensor | None
    rule: Rule
    sinks: Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.shape.kv_heads
