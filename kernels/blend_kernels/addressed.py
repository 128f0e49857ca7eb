"""Attention over caches, and writes into caches, whose addresses stand in device memory.

A CUDA graph repeats its launches with the arguments of the capture. So whatever changes from prompt to prompt stands in
tensors that stay where they are: positions, the request of each row, and a table of cache addresses (`CacheAddresses`).
Grids depend on shapes alone, and the host reads no device value. One captured graph then serves every prompt and cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch

from blend_kernels.attention_plain import selective_attention_plain
from blend_kernels.backend import Backend, choose_backend
from blend_kernels.checks import (
    WHOLE,
    Rule,
    Work,
    check_beside,
    check_contiguous,
    check_rule,
    check_sinks,
    require,
)

# Widest head that the kernels hold in registers.
_WIDEST = 256
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

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def shape(self) -> CacheShape:
        """The shape that every cache of this layer has."""
        return CacheShape(self.keys.shape[1], self.keys.shape[3], self.values.shape[3])

    def address(self) -> tuple[int, int, int]:
        """Entries of the table: where keys and values lie, and for how many rows; zeros for a layer without KV."""
        if self.keys.shape[1] == 0:
            return 0, 0, 0
        return self.keys.data_ptr(), self.values.data_ptr(), self.keys.shape[2]


class _Held:
    """The buffers of one cache, without keeping them alive."""

    def __init__(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        self._keys, self._values = [[ref(buffer) for buffer in buffers] for buffers in (keys, values)]

    def are(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> bool:
        """Whether they are these very tensors."""
        pairs = ((self._keys, keys), (self._values, values))
        return all(len(mine) == len(theirs) and all(map(_is, mine, theirs)) for mine, theirs in pairs)

    def layer(self, layer: int) -> LayerBuffers | None:
        """The buffers of a layer, if they still exist."""
        keys, values = self._keys[layer](), self._values[layer]()
        return None if keys is None or values is None else LayerBuffers(keys, values)


def _is(held: ReferenceType[torch.Tensor], buffer: torch.Tensor) -> bool:
    return held() is buffer


class CacheAddresses:
    """Where the caches of up to `requests` prompts lie, in a table that kernels read.

    `assign` and `release` take effect for both backends at the next `upload`. Nothing here keeps a cache alive: keep it until
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

    def __init__(self, requests: int, layers: int, device: torch.device | str, dtype: torch.dtype) -> None:
        self.dtype = dtype
        with torch.inference_mode(False):  # else an upload outside of inference mode would be refused
            self.table = torch.zeros(layers, _FIELDS, requests, dtype=torch.int64, device=device)
            self._staged_table = torch.zeros(layers, _FIELDS, requests, dtype=torch.int64)
        self._staged_buffers: list[_Held | None] = [None] * requests
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

    def assign(self, request: int, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
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
        held = self._staged_buffers[request]
        if held is not None and held.are(keys, values):
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
        self._stage(request, _Held(keys, values), torch.tensor([pair.address() for pair in buffers]))

    def release(self, request: int) -> None:
        """Stage that this request has no cache."""
        self._check_request(request)
        self._stage(request, None, torch.zeros(self.layers, _FIELDS, dtype=torch.int64))

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
        held = self._buffers[request]
        buffers = None if held is None else held.layer(layer)
        if buffers is None:
            raise ValueError(f"request {request} has no cache; call assign and upload first")
        return buffers

    def _stage(self, request: int, buffers: _Held | None, fields: torch.Tensor) -> None:
        self._staged_table[:, :, request] = fields
        self._staged_buffers[request] = buffers
        self._changed = True

    def _check_request(self, request: int) -> None:
        require(0 <= request < self.requests, f"request must lie in [0, {self.requests}), got {request}")

    def _check_buffers(self, layer: int, buffers: LayerBuffers) -> None:
        for name, buffer in zip(("keys", "values"), buffers, strict=True):
            label = f"{name} of layer {layer}"
            require(
                buffer.ndim == 4 and buffer.shape[0] == 1 and buffer.shape[:3] == buffers.keys.shape[:3],
                f"{label} must be [1, kv_heads, capacity, dim], alike for keys and values, got {list(buffer.shape)}",
            )
            check_beside(label, buffer, self.table, (self.dtype,))
            require(buffer.is_contiguous(), f"{label} must be a whole contiguous buffer, not a view of its rows in use")
            require(buffer.data_ptr() % _ALIGNMENT == 0, f"{label} must start at a multiple of {_ALIGNMENT} bytes")


def padded(rows: torch.Tensor, bucket: int) -> torch.Tensor:
    """Positions (or requests) `[rows]` as `[bucket]`: the rows at the end are -1 and take no part."""
    missing = bucket - rows.shape[0]
    require(missing >= 0, f"{rows.shape[0]} rows do not fit into a bucket of {bucket}")
    return torch.nn.functional.pad(rows, (0, missing), value=-1)


class AddressedRows(NamedTuple):
    """Checked arguments of one attention over addressed caches, as in `attend_rows`."""

    table: torch.Tensor
    layer: int
    shape: CacheShape
    q: torch.Tensor
    positions: torch.Tensor
    request_of_row: torch.Tensor
    rule: Rule
    sinks: torch.Tensor | None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.shape.kv_heads

    def empty_out(self) -> torch.Tensor:
        """Empty `[1, heads, rows, value_dim]` over memory `[1, rows, heads, value_dim]`."""
        batch, heads, rows, _ = self.q.shape
        return self.q.new_empty(batch, rows, heads, self.shape.value_dim).transpose(1, 2)


def write_rows(
    addresses: CacheAddresses,
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    request_of_row: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """Write fresh keys and values of rows into the caches of their requests.

    Kernels cannot refuse what stands in device memory. They leave out rows of an unassigned request, and rows past the
    capacity of their cache.

    Args:
        addresses: of the caches.
        layer: which layer of the caches is written.
        keys: `[1, kv_heads, rows, head_dim]` in the dtype of the caches, any strides with a contiguous last dimension.
        values: `[1, kv_heads, rows, value_dim]`, likewise.
        positions: int64 or int32 `[rows]`, of each row in its request; negative for a padded row, which is not written.
        request_of_row: int64 or int32 `[rows]`.
        backend: "triton" or "torch"; None chooses by device. "torch" reads positions on the host.

    Raises:
        ValueError: wrong shapes, dtypes or devices; with "torch" also rows without a place in a cache.
    """
    shape = addresses.shape(layer)
    rows = positions.shape[0]
    for name, states, dim in (("keys", keys, shape.head_dim), ("values", values, shape.value_dim)):
        _check_states(name, states, (1, shape.kv_heads, rows, dim), addresses)
    _check_rows(positions, request_of_row, rows, keys)
    if rows == 0 or shape.kv_heads == 0:
        return
    if choose_backend(backend, keys) == "triton":
        from blend_kernels.addressed_kernel import launch_write

        launch_write(addresses.table, layer, keys, values, positions, request_of_row)
        return
    _write_rows_plain(addresses, layer, keys, values, positions, request_of_row)


def attend_rows(
    addresses: CacheAddresses,
    layer: int,
    q: torch.Tensor,
    positions: torch.Tensor,
    request_of_row: torch.Tensor,
    *,
    value_dim: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    splits: int | None = None,
    most_keys: int,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Softmax attention of rows over the caches of their requests, as `selective_attention` in mode "exact".

    Up to 16 rows may each be of another request, as in decoding several prompts. More rows share the keys that they read
    with their neighbours, so they must all be of one request, and run fastest if they ascend.

    Kernels cannot refuse what stands in device memory. A row of an unassigned request gives zeros, a row past the capacity
    of its cache sees all keys there are, and rows of two requests where one is allowed give NaN.

    Args:
        addresses: of the caches. Rows see what was written there, their own keys included.
        layer: which layer of the caches is read.
        q: `[1, heads, rows, head_dim]`, any strides with a contiguous last dimension; heads is a multiple of kv_heads.
        positions: int64 or int32 `[rows]`: row r sees keys `j <= positions[r]`. A padded row has a negative one.
        request_of_row: int64 or int32 `[rows]`.
        value_dim: dimension of a value; checked against the caches if set.
        window: W hides keys `j <= positions[r] - W`.
        softcap: c replaces scaled scores s by `c tanh(s / c)`.
        scale: of the scores; by default `head_dim ** -0.5`.
        sinks: `[heads]`, one logit per head that joins the denominator only.
        splits: into how many parts a row's keys are cut, at most 128; None fills the GPU. Parts are equal shares of the
            keys that a row sees at the time of the run.
        most_keys: no row sees more keys; it bounds the parts.
        backend: "triton" or "torch"; None chooses by device. "torch" reads positions on the host.

    Returns:
        `[1, heads, rows, value_dim]` in q's dtype over memory `[1, rows, heads, value_dim]`; zeros for padded rows.

    Raises:
        ValueError: wrong shapes, dtypes or devices; with "torch" also rows without a place in a cache.
    """
    shape = addresses.shape(layer)
    _check_queries(q, shape, addresses)
    _check_rows(positions, request_of_row, q.shape[2], q)
    require(value_dim in (None, shape.value_dim), f"values of layer {layer} have {shape.value_dim} dimensions")
    require(splits is None or splits >= 1, f"splits must be at least 1, got {splits}")
    require(most_keys >= 1, f"most_keys must be at least 1, got {most_keys}")
    check_sinks(sinks, q)
    rule = check_rule("exact", window, softcap, scale, q, q)
    rows = AddressedRows(addresses.table, layer, shape, q, positions, request_of_row, rule, sinks)
    if q.numel() == 0:
        return rows.empty_out()
    if _choose_attention_backend(rows, backend) == "triton":
        from blend_kernels.addressed_kernel import attend_caches

        return attend_caches(rows, splits, most_keys)
    return _attend_rows_plain(addresses, rows)


def _check_states(name: str, states: torch.Tensor, shape: tuple[int, ...], addresses: CacheAddresses) -> None:
    require(tuple(states.shape) == shape, f"{name} must be {list(shape)}, got {list(states.shape)}")
    check_beside(name, states, addresses.table, (addresses.dtype,))
    check_contiguous(**{name: states})


def _check_queries(q: torch.Tensor, shape: CacheShape, addresses: CacheAddresses) -> None:
    require(
        q.ndim == 4 and q.shape[0] == 1 and q.shape[3] == shape.head_dim,
        f"q must be [1, heads, rows, {shape.head_dim}], got {list(q.shape)}",
    )
    require(
        shape.kv_heads > 0 and q.shape[1] % shape.kv_heads == 0,
        f"{q.shape[1]} query heads are no multiple of {shape.kv_heads} kv heads",
    )
    check_beside("q", q, addresses.table, (addresses.dtype,))
    check_contiguous(q=q)


def _check_rows(positions: torch.Tensor, request_of_row: torch.Tensor, rows: int, like: torch.Tensor) -> None:
    for name, numbers in (("positions", positions), ("request_of_row", request_of_row)):
        require(tuple(numbers.shape) == (rows,), f"{name} must be [{rows}], got {list(numbers.shape)}")
        check_beside(name, numbers, like, WHOLE)


def _choose_attention_backend(rows: AddressedRows, asked: Backend | None) -> Backend:
    if max(rows.shape.head_dim, rows.shape.value_dim) <= _WIDEST:
        return choose_backend(asked, rows.q)
    require(asked != "triton", f"backend 'triton' takes heads of up to {_WIDEST} dimensions; use backend 'torch'")
    return "torch"


def _rows_of_requests(positions: torch.Tensor, request_of_row: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Each request with the indices of its rows, ascending by position; padded rows are left out."""
    order = positions.argsort(stable=True)
    order = order[positions[order] >= 0]
    request_in_order = request_of_row[order]
    for request in sorted(set(request_in_order.tolist())):
        yield request, order[request_in_order == request]


def _buffers_for(addresses: CacheAddresses, request: int, layer: int, last: int) -> LayerBuffers:
    """The buffers of a request, which have room for position `last`."""
    buffers = addresses.buffers(request, layer)
    capacity = buffers.keys.shape[2]
    require(last < capacity, f"positions of request {request} must lie in [0, {capacity}), got {last}")
    return buffers


@torch.no_grad()
def _write_rows_plain(
    addresses: CacheAddresses,
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    request_of_row: torch.Tensor,
) -> None:
    for request, rows in _rows_of_requests(positions, request_of_row):
        places = positions[rows].long()
        buffers = _buffers_for(addresses, request, layer, int(places[-1]))
        buffers.keys.index_copy_(2, places, keys[:, :, rows])
        buffers.values.index_copy_(2, places, values[:, :, rows])


@torch.no_grad()
def _attend_rows_plain(addresses: CacheAddresses, work: AddressedRows) -> torch.Tensor:
    out = work.empty_out().zero_()
    for request, rows in _rows_of_requests(work.positions, work.request_of_row):
        last_keys = work.positions[rows]
        keys = int(last_keys[-1]) + 1
        buffers = _buffers_for(addresses, request, work.layer, keys - 1)
        seen_keys, seen_values = buffers.keys[:, :, :keys], buffers.values[:, :, :keys]
        part = Work(work.q[:, :, rows], seen_keys, seen_values, last_keys, work.rule, work.sinks)
        out[:, :, rows], _ = selective_attention_plain(part)
    return out
