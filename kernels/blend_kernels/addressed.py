"""Attention over caches, and writes into caches, whose addresses stand in device memory.

A CUDA graph repeats its launches with the arguments of the capture. So whatever changes from prompt to prompt stands in
tensors that stay where they are: positions, the request of each row, and a table of cache addresses (`CacheAddresses`).
Grids depend on shapes alone, and the host reads no device value. One captured graph then serves every prompt and cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from blend_kernels.attention_plain import selective_attention_plain
from blend_kernels.backend import Backend, choose_attention_backend, choose_backend
from blend_kernels.cache_addresses import AddressedRows, CacheAddresses, CacheShape, LayerBuffers
from blend_kernels.checks import (
    WHOLE,
    Reduce,
    Work,
    check_contiguous,
    check_dtype_and_device,
    check_lse,
    check_rule,
    check_sinks,
    require,
)
from blend_kernels.mass import attention_mass_plain


def write_rows(
    addresses: CacheAddresses,
    layer: int,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    request_of_row: Tensor,
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
    q: Tensor,
    positions: Tensor,
    request_of_row: Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    splits: int | None = None,
    most_keys: int,
    backend: Backend | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
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
        window: W hides keys `j <= positions[r] - W`.
        softcap: c replaces scaled scores s by `c tanh(s / c)`.
        scale: of the scores; by default `head_dim ** -0.5`.
        sinks: `[heads]`, one logit per head that joins the denominator only.
        splits: into how many parts a row's keys are cut, at most 128; None fills the GPU. Parts are equal shares of the
            keys that a row sees at the time of the run.
        most_keys: no row sees more keys; it bounds the parts.
        backend: "triton" or "torch"; None chooses by device. "torch" reads positions on the host.
        return_lse: also return the log-sum-exp of each row, sinks included.

    Returns:
        `[1, heads, rows, value_dim]` in q's dtype over memory `[1, rows, heads, value_dim]`; zeros for padded rows. With
        `return_lse` a pair: that, and fp32 `[1, heads, rows]`, which means nothing for padded rows.

    Raises:
        ValueError: wrong shapes, dtypes or devices; with "torch" also rows without a place in a cache.
    """
    shape = addresses.shape(layer)
    _check_queries(q, shape, addresses)
    _check_rows(positions, request_of_row, q.shape[2], q)
    require(splits is None or splits >= 1, f"splits must be at least 1, got {splits}")
    require(most_keys >= 1, f"most_keys must be at least 1, got {most_keys}")
    check_sinks(sinks, q)
    rule = check_rule("exact", window, softcap, scale, q, q)
    rows = AddressedRows(addresses.table, layer, shape, q, positions, request_of_row, rule, sinks)
    lse = q.new_empty((q.shape[2], q.shape[1]), dtype=torch.float32)
    if q.numel() == 0:
        out = rows.empty_out()
    elif choose_attention_backend(backend, q, shape.value_dim) == "triton":
        from blend_kernels.addressed_kernel import attend_caches

        out = attend_caches(rows, splits, most_keys, lse if return_lse else None)
    else:
        out = _attend_rows_plain(addresses, rows, lse)
    return (out, lse.t()[None]) if return_lse else out


def mass_rows(
    addresses: CacheAddresses,
    layer: int,
    q: Tensor,
    positions: Tensor,
    lse: Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    most_keys: int,
    reduce: Reduce = "sum",
    with_last: bool = False,
    backend: Backend | None = None,
) -> Tensor:
    """Attention that each key of the first request's cache receives from rows, as `attention_mass` with `per_head`.

    Args:
        addresses: of the caches.
        layer: which layer of the caches is read.
        q: `[1, heads, rows, head_dim]`; it and the arguments up to `scale` are as in `attend_rows`.
        positions: int64 or int32 `[rows]`, ascending; padded rows have negative ones and stand at the end.
        lse: the log-sum-exp that `attend_rows` returned for the same arguments.
        window: sliding window.
        softcap: of the scores.
        scale: of the scores.
        most_keys: keys in the result; no row sees more.
        reduce: "sum" adds the weights of all rows; "max" takes the largest weight of any row.
        with_last: also give the weights of the last row alone.
        backend: "triton" or "torch"; None chooses by device. "torch" reads positions on the host.

    Returns:
        fp32 `[1, heads, most_keys]`, with `with_last` `[2, heads, most_keys]`; zeros for keys that no row sees.

    Raises:
        ValueError: as `attend_rows`.
    """
    shape = addresses.shape(layer)
    _check_queries(q, shape, addresses)
    _check_rows(positions, positions, q.shape[2], q)
    check_lse(lse, q)
    require(most_keys >= 1, f"most_keys must be at least 1, got {most_keys}")
    rule = check_rule("exact", window, softcap, scale, q, q)
    rows = AddressedRows(addresses.table, layer, shape, q, positions, None, rule, None)
    if choose_attention_backend(backend, q, shape.value_dim) == "triton":
        from blend_kernels.mass_kernel import launch_addressed_mass

        return launch_addressed_mass(rows, lse[0], most_keys, reduce, with_last)
    return _mass_rows_plain(addresses, rows, lse, most_keys, reduce, with_last)


def _check_states(
    name: str,
    states: Tensor,
    shape: tuple[int, ...],
    addresses: CacheAddresses,
) -> None:
    require(tuple(states.shape) == shape, f"{name} must be {list(shape)}, got {list(states.shape)}")
    check_dtype_and_device(name, states, addresses.table, (addresses.dtype,))
    check_contiguous(**{name: states})


def _check_queries(
    q: Tensor,
    shape: CacheShape,
    addresses: CacheAddresses,
) -> None:
    require(
        q.ndim == 4 and q.shape[0] == 1 and q.shape[3] == shape.head_dim,
        f"q must be [1, heads, rows, {shape.head_dim}], got {list(q.shape)}",
    )
    require(
        shape.kv_heads > 0 and q.shape[1] % shape.kv_heads == 0,
        f"{q.shape[1]} query heads are no multiple of {shape.kv_heads} kv heads",
    )
    check_dtype_and_device("q", q, addresses.table, (addresses.dtype,))
    check_contiguous(q=q)


def _check_rows(
    positions: Tensor,
    request_of_row: Tensor,
    rows: int,
    like: Tensor,
) -> None:
    for name, numbers in (("positions", positions), ("request_of_row", request_of_row)):
        require(tuple(numbers.shape) == (rows,), f"{name} must be [{rows}], got {list(numbers.shape)}")
        check_dtype_and_device(name, numbers, like, WHOLE)


def _rows_of_requests(positions: Tensor, request_of_row: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each request with the indices of its rows, ascending by position; padded rows are left out."""
    order = positions.argsort(stable=True)
    order = order[positions[order] >= 0]
    request_in_order = request_of_row[order]
    for request in sorted(set(request_in_order.tolist())):
        yield request, order[request_in_order == request]


def _buffers_for(
    addresses: CacheAddresses,
    request: int,
    layer: int,
    last: int,
) -> LayerBuffers:
    """The buffers of a request, which have room for position `last`."""
    buffers = addresses.buffers(request, layer)
    capacity = buffers.keys.shape[2]
    require(last < capacity, f"positions of request {request} must lie in [0, {capacity}), got {last}")
    return buffers


@torch.no_grad()
def _write_rows_plain(
    addresses: CacheAddresses,
    layer: int,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    request_of_row: Tensor,
) -> None:
    for request, rows in _rows_of_requests(positions, request_of_row):
        places = positions[rows].long()
        buffers = _buffers_for(addresses, request, layer, int(places[-1]))
        buffers.keys.index_copy_(2, places, keys[:, :, rows])
        buffers.values.index_copy_(2, places, values[:, :, rows])


@torch.no_grad()
def _attend_rows_plain(
    addresses: CacheAddresses,
    work: AddressedRows,
    lse: Tensor,
) -> Tensor:
    out = work.empty_out().zero_()
    lse.fill_(float("-inf"))
    assert work.request_of_row is not None
    for request, rows in _rows_of_requests(work.positions, work.request_of_row):
        last_keys = work.positions[rows]
        keys = int(last_keys[-1]) + 1
        buffers = _buffers_for(addresses, request, work.layer, keys - 1)
        visible_keys = buffers.keys[:, :, :keys]
        visible_values = buffers.values[:, :, :keys]
        part = Work(work.q[:, :, rows], visible_keys, visible_values, last_keys, work.rule, work.sinks)
        out[:, :, rows], part_lse = selective_attention_plain(part)
        lse[rows] = part_lse[0].t()
    return out


@torch.no_grad()
def _mass_rows_plain(
    addresses: CacheAddresses,
    work: AddressedRows,
    lse: Tensor,
    most_keys: int,
    reduce: Reduce,
    with_last: bool,
) -> Tensor:
    masses = work.q.new_zeros((1 + with_last, work.q.shape[1], most_keys), dtype=torch.float32)
    last_keys = work.positions[work.positions >= 0]
    rows = last_keys.shape[0]
    if rows == 0:
        return masses
    keys = int(last_keys.max()) + 1
    visible_keys = _buffers_for(addresses, 0, work.layer, keys - 1).keys[:, :, :keys]
    part = Work(work.q[:, :, :rows], visible_keys, None, last_keys, work.rule)
    masses[:, :, :keys] = attention_mass_plain(part, lse[:, :, :rows], reduce, with_last)[:, 0]
    return masses
