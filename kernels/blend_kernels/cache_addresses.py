"""Where the caches of prompts lie, in device memory, so that one captured graph serves every prompt and cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from blend_kernels.checks import Rule, check_dtype_and_device, require

# The kernels read and write 16 bytes at once.
_ALIGNMENT = 16
# Rows of the table per layer: address of the keys, address of the values, capacity.
_FIELDS = 3


class CacheShape(NamedTuple):
    """What all caches of one layer share: KV heads, and dimensions of a key and of a value."""

    kv_heads: int
    head_dim: int
    value_dim: int


class LayerBuffers(NamedTuple):
    """Keys `[1, kv_heads, capacity, head_dim]` and values `[1, kv_heads, capacity, value_dim]` of one layer of a cache."""

    keys: Tensor
    values: Tensor

    @property
    def shape(self) -> CacheShape:
        """The shape that every cache of this layer has."""
        return CacheShape(self.keys.shape[1], self.keys.shape[3], self.values.shape[3])

    def address(self) -> tuple[int, int, int]:
        """Entries of the table: where keys and values lie, and for how many rows; zeros for a layer without KV."""
        if self.keys.shape[1] == 0:
            return 0, 0, 0
        return self.keys.data_ptr(), self.values.data_ptr(), self.keys.shape[2]


class _WeakBuffers:
    """The buffers of one cache, without keeping them alive."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._keys = list(map(ref, keys))
        self._values = list(map(ref, values))

    def are(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
        """Whether they are these very tensors."""
        return _same_tensors(self._keys, keys) and _same_tensors(self._values, values)

    def layer(self, layer: int) -> LayerBuffers | None:
        """The buffers of a layer, if they still exist."""
        keys = self._keys[layer]()
        values = self._values[layer]()
        return None if keys is None or values is None else LayerBuffers(keys, values)


def _same_tensors(references: list[ReferenceType[Tensor]], tensors: Sequence[Tensor]) -> bool:
    if len(references) != len(tensors):
        return False
    return all(reference() is tensor for reference, tensor in zip(references, tensors, strict=True))


class CacheAddresses:
    """Where the caches of up to `requests` prompts lie, in a table that kernels read.

    `assign` takes effect for both backends at the next `upload`. Nothing here keeps a cache alive: keep it until
    the work over it is submitted, on the stream that freed memory belongs to.

    Args:
        requests: how many caches have an address at the same time.
        layers: of the model.
        device: of the caches.
        dtype: of the caches.

    Attributes:
        table: int64 `[layers, 3, requests]` on the device, at one address forever: address of the keys, address of the
            values, capacity in rows. An unassigned request has capacity 0, so kernels leave its rows out.
    """

    def __init__(
        self,
        requests: int,
        layers: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        self.dtype = dtype
        with torch.inference_mode(False):  # else an upload outside of inference mode would be refused
            self.table = torch.zeros(layers, _FIELDS, requests, dtype=torch.int64, device=device)
            self._staged_table = torch.zeros(layers, _FIELDS, requests, dtype=torch.int64)
        self._staged_buffers: list[_WeakBuffers | None] = [None] * requests
        self._buffers = list(self._staged_buffers)
        self._shapes: tuple[CacheShape, ...] = ()
        self._changed = False

    @property
    def requests(self) -> int:
        """How many caches have an address at the same time."""
        return self.table.shape[2]

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self.table.shape[0]

    def assign(
        self,
        request: int,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> None:
        """Stage the buffers of one prompt's cache; call again after a buffer grew. Costs little if they are the same.

        Args:
            request: from 0 to `requests - 1`.
            keys: of each layer `[1, kv_heads, capacity, head_dim]`, contiguous. A layer without KV has no heads.
            values: of each layer `[1, kv_heads, capacity, value_dim]`, contiguous.

        Raises:
            ValueError: wrong number of layers, shapes, dtypes or devices; other heads or dimensions than the first
                cache, because captured graphs contain those.
        """
        self._check_request(request)
        staged = self._staged_buffers[request]
        if staged is not None and staged.are(keys, values):
            return
        require(
            len(keys) == len(values) == self.layers,
            f"a cache of {self.layers} layers is needed, got keys of {len(keys)} and values of {len(values)}",
        )
        buffers = tuple(map(LayerBuffers, keys, values))
        for layer, pair in enumerate(buffers):
            self._check_buffers(layer, pair)
        shapes = tuple(pair.shape for pair in buffers)
        require(
            self._shapes in ((), shapes),
            "heads and dimensions differ from those of the first cache; use one CacheAddresses per model",
        )
        self._shapes = shapes
        self._staged_table[:, :, request] = torch.tensor([pair.address() for pair in buffers])
        self._staged_buffers[request] = _WeakBuffers(keys, values)
        self._changed = True

    def upload(self) -> None:
        """Make staged changes visible: one copy on the current stream that the host does not wait for.

        Call it on the stream of the kernels or graphs, and never while a graph is captured.
        """
        if not self._changed:
            return
        # A fresh page-locked block for each upload: torch reuses one only after its copy, so staging goes on at once.
        staged = self._staged_table.pin_memory() if self.table.is_cuda else self._staged_table
        self.table.copy_(staged, non_blocking=True)
        self._buffers = list(self._staged_buffers)
        self._changed = False

    def shape(self, layer: int) -> CacheShape:
        """Heads and dimensions of a layer. Raises ValueError before the first cache is assigned."""
        require(0 <= layer < self.layers, f"layer must lie in [0, {self.layers}), got {layer}")
        require(bool(self._shapes), "assign a cache first: it says which heads and dimensions the layers have")
        return self._shapes[layer]

    def buffers(self, request: int, layer: int) -> LayerBuffers:
        """Buffers of a visible cache. Raises ValueError if the request has none."""
        self._check_request(request)
        visible = self._buffers[request]
        buffers = None if visible is None else visible.layer(layer)
        if buffers is None:
            raise ValueError(f"request {request} has no cache; call assign and upload first")
        return buffers

    def _check_request(self, request: int) -> None:
        require(0 <= request < self.requests, f"request must lie in [0, {self.requests}), got {request}")

    def _check_buffers(self, layer: int, buffers: LayerBuffers) -> None:
        # messages are made when one is needed: this runs for every layer of every prompt
        for name, buffer in zip(("keys", "values"), buffers, strict=True):
            if buffer.ndim != 4 or buffer.shape[0] != 1 or buffer.shape[:3] != buffers.keys.shape[:3]:
                raise ValueError(
                    f"{name} of layer {layer} must be [1, kv_heads, capacity, dim], alike for keys and values, "
                    f"got {list(buffer.shape)}"
                )
            if buffer.dtype != self.dtype or buffer.device != self.table.device:
                check_dtype_and_device(f"{name} of layer {layer}", buffer, self.table, (self.dtype,))
            if not buffer.is_contiguous():
                raise ValueError(
                    f"{name} of layer {layer} must be a whole contiguous buffer, not a view of its rows in use"
                )
            if buffer.data_ptr() % _ALIGNMENT:
                raise ValueError(f"{name} of layer {layer} must start at a multiple of {_ALIGNMENT} bytes")


class AddressedRows(NamedTuple):
    """Checked arguments of one attention over addressed caches, as in `attend_rows`; None: all rows are of request 0."""

    table: Tensor
    layer: int
    shape: CacheShape
    q: Tensor
    positions: Tensor
    request_of_row: Tensor | None
    rule: Rule
    sinks: Tensor | None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.shape.kv_heads

    def empty_out(self) -> Tensor:
        """Empty `[1, heads, rows, value_dim]` over memory `[1, rows, heads, value_dim]`."""
        batch, heads, rows, _ = self.q.shape
        return self.q.new_empty(batch, rows, heads, self.shape.value_dim).transpose(1, 2)
