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
from blend_kernels.cache_addresses import MOST_ALONE, AddressedRows, CacheAddresses
from blend_kernels.checks import (
    check_heads,
    check_lse,
    check_rows,
    check_shape,
    check_sinks,
    check_states,
    checked_rule,
    reads_numbers,
)
from blend_kernels.mass import attention_mass_plain
from blend_kernels.positions import Positions
from blend_kernels.work import Work, empty_results


@torch.no_grad()
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

    Kernels leave out rows of an unassigned request, and rows past the capacity of their cache.

    Args:
        addresses: of the caches.
        layer: which layer of the caches is written.
        keys: `[1, kv_heads, rows, head_dim]` in the dtype of the caches, any strides with a contiguous last dimension.
        values: `[1, kv_heads, rows, value_dim]`, likewise.
        positions: int64 or int32 `[rows]`, of each row in its request; negative for a padded row, which is not written.
        request_of_row: int64 or int32 `[rows]`.
        backend: "triton" or "torch"; None chooses by device. "torch" reads positions on the host.

    Raises:
        ValueError: wrong shapes, dtypes, devices or options, or a backend that cannot compute this. With "torch" on a CPU, and
            for kernels with `KVBLEND_KERNEL_CHECKS=1`, also rows without a place in a cache.
    """
    shape = addresses.shape_of(layer)
    rows = positions.shape[0]
    device = addresses.table.device
    for name, states, dim in (("keys", keys, shape.head_dim), ("values", values, shape.value_dim)):
        check_shape(name, states, (1, shape.kv_heads, rows, dim))
        check_states(name, states, (addresses.dtype,), device)
    check_rows("positions", positions, rows, device)
    check_rows("request_of_row", request_of_row, rows, device)
    chosen = choose_backend(backend, keys)
    _require_host(addresses, chosen)
    if reads_numbers(positions, chosen):
        _check_places(addresses, layer, positions, request_of_row)
    if chosen == "triton":
        from blend_kernels.addressed_kernel import launch_write

        launch_write(addresses.table, layer, keys, values, positions, request_of_row)
        return
    for request, own_rows in _rows_of_requests(positions, request_of_row):
        buffers = addresses.buffers[request][layer]
        places = positions[own_rows].long()
        buffers.keys.index_copy_(2, places, keys[:, :, own_rows])
        buffers.values.index_copy_(2, places, values[:, :, own_rows])


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
    most_keys: int,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of rows over the caches of their requests, as `selective_attention`.

    Up to 16 rows may each be of another request, as in decoding several prompts. More rows share the keys that they read
    with their neighbours, so they must all be of one request, and run fastest if they ascend. Kernels cannot refuse what
    stands in device memory: a row that would read the cache of another request is NaN.

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
        most_keys: no row sees more keys; it bounds the parts.
        backend: "triton" or "torch"; None chooses by device. "torch" reads positions on the host.

    Returns:
        `[1, heads, rows, value_dim]` in q's dtype over memory `[1, rows, heads, value_dim]`, and the log-sum-exp of each row,
        sinks included, fp32 `[1, heads, rows]`. Padded rows have zeros, and a log-sum-exp that means nothing. So do, from a
        kernel, rows of an unassigned request.

    Raises:
        ValueError: wrong shapes, dtypes, devices or options, or a backend that cannot compute this. With "torch" on a CPU, and
            for kernels with `KVBLEND_KERNEL_CHECKS=1`, also rows without a place in a cache, and more than 16 rows of
            several requests.
    """
    shape = addresses.shape_of(layer)
    _check_queries(q, addresses, layer)
    check_rows("positions", positions, q.shape[2], q.device)
    check_rows("request_of_row", request_of_row, q.shape[2], q.device)
    check_sinks(sinks, q)
    _check_most_keys(most_keys)
    rule = checked_rule(window, softcap, scale, q.shape[3])
    rows = AddressedRows(addresses.table, layer, shape, q, positions, request_of_row, rule, sinks)
    chosen = choose_attention_backend(backend, q, shape.value_dim)
    _require_host(addresses, chosen)
    if reads_numbers(positions, chosen):
        _check_places(addresses, layer, positions, request_of_row)
        _check_one_request(positions, request_of_row)
    if q.numel() == 0:
        return empty_results(q, shape.value_dim)
    if chosen == "triton":
        from blend_kernels.addressed_kernel import attend_caches

        return attend_caches(rows, most_keys)
    return _attend_rows_plain(addresses, rows, request_of_row)


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
    peak: bool = False,
    backend: Backend | None = None,
) -> Tensor:
    """Attention that each key of the first request's cache receives from rows, as `attention_mass`.

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
        peak: see `attention_mass`.
        backend: "triton" or "torch"; None chooses by device. "torch" reads positions on the host.

    Returns:
        fp32 `[1, heads, most_keys]`, with `peak` `[2, heads, most_keys]`; zeros for keys that no row sees.

    Raises:
        ValueError: wrong shapes, dtypes, devices or options, or a backend that cannot compute this. With "torch" on a CPU, and
            for kernels with `KVBLEND_KERNEL_CHECKS=1`, also positions that do not ascend, or lie outside the cache or
            the result.
    """
    shape = addresses.shape_of(layer)
    _check_queries(q, addresses, layer)
    check_rows("positions", positions, q.shape[2], q.device)
    check_lse(lse, q)
    _check_most_keys(most_keys)
    rule = checked_rule(window, softcap, scale, q.shape[3])
    rows = AddressedRows(addresses.table, layer, shape, q, positions, None, rule)
    chosen = choose_attention_backend(backend, q, shape.value_dim)
    _require_host(addresses, chosen)
    if reads_numbers(positions, chosen):
        _check_places(addresses, layer, positions, torch.zeros_like(positions))
        _check_order(positions, most_keys)
    if q.numel() == 0:
        return q.new_zeros(1 + peak, q.shape[1], most_keys, dtype=torch.float32)
    if chosen == "triton":
        from blend_kernels.mass_kernel import launch_addressed_mass

        return launch_addressed_mass(rows, lse[0], most_keys, peak)
    return _mass_rows_plain(addresses, rows, lse, most_keys, peak)


def _check_queries(q: Tensor, addresses: CacheAddresses, layer: int) -> None:
    """Require `[1, heads, rows, head_dim]` with the dtype and device of the caches."""
    shape = addresses.shapes[layer]
    if q.ndim != 4 or q.shape[0] != 1 or q.shape[3] != shape.head_dim:
        raise ValueError(f"q must be [1, heads, rows, {shape.head_dim}], got {list(q.shape)}")
    check_heads(q.shape[1], shape.kv_heads)
    check_states("q", q, (addresses.dtype,), addresses.table.device)


def _require_host(addresses: CacheAddresses, chosen: Backend) -> None:
    """Require caches on a CPU for plain torch, because on a GPU only their addresses are kept."""
    if chosen == "torch" and addresses.table.device.type != "cpu":
        raise ValueError("plain torch reads addressed caches on a CPU alone; use selective_attention on the caches")


def _check_most_keys(most_keys: int) -> None:
    if most_keys < 1:
        raise ValueError(f"most_keys must be at least 1, got {most_keys}")


def _check_places(addresses: CacheAddresses, layer: int, positions: Tensor, request_of_row: Tensor) -> None:
    """Require a row of an assigned cache for each row that is not padded."""
    capacities = addresses.capacities(layer).tolist()
    for position, request in zip(positions.tolist(), request_of_row.tolist(), strict=True):
        if position < 0:
            continue
        capacity = capacities[request] if 0 <= request < len(capacities) else 0
        if capacity == 0:
            raise ValueError(f"request {request} has no cache; assign one first")
        if position >= capacity:
            raise ValueError(f"positions of request {request} must lie in [0, {capacity}), got {position}")


def _check_one_request(positions: Tensor, request_of_row: Tensor) -> None:
    """Require rows of one request where rows share the keys that they read."""
    if len(positions) <= MOST_ALONE:
        return
    requests = set(request_of_row[positions >= 0].tolist())
    if len(requests) > 1:
        raise ValueError(f"more than {MOST_ALONE} rows must be of one request, got {len(requests)}; call once for each")


def _check_order(positions: Tensor, most_keys: int) -> None:
    """Require ascending positions inside the result, and padded rows at the end."""
    last = positions.tolist()
    rows = [position for position in last if position >= 0]
    if last[: len(rows)] != sorted(rows):
        raise ValueError("positions must be sorted in ascending order, padded rows at the end")
    if rows and rows[-1] >= most_keys:
        raise ValueError(f"positions must lie in [0, {most_keys}), the keys of the result, got {rows[-1]}")


def _rows_of_requests(positions: Tensor, request_of_row: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each request with the indices of its rows, ascending by position; padded rows are left out."""
    order = positions.argsort(stable=True)
    order = order[positions[order] >= 0]
    request_in_order = request_of_row[order]
    for request in sorted(set(request_in_order.tolist())):
        yield request, order[request_in_order == request]


@torch.no_grad()
def _attend_rows_plain(addresses: CacheAddresses, work: AddressedRows, request_of_row: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = empty_results(work.q, work.shape.value_dim)
    out.zero_()
    lse.fill_(float("-inf"))
    for request, rows in _rows_of_requests(work.positions, request_of_row):
        buffers = addresses.buffers[request][work.layer]
        positions = Positions(work.positions[rows])
        of_request = Work(
            q=work.q[:, :, rows],
            k=buffers.keys,
            v=buffers.values,
            positions=positions,
            rule=work.rule,
            sinks=work.sinks,
        )
        out[:, :, rows], lse[:, :, rows] = selective_attention_plain(of_request)
    return out, lse


@torch.no_grad()
def _mass_rows_plain(addresses: CacheAddresses, work: AddressedRows, lse: Tensor, most_keys: int, peak: bool) -> Tensor:
    heads = work.q.shape[1]
    masses = work.q.new_zeros(1 + peak, heads, most_keys, dtype=torch.float32)
    positions = work.positions[work.positions >= 0]
    rows = positions.shape[0]
    if rows == 0:
        return masses
    keys = int(positions[-1]) + 1
    buffers = addresses.buffers[0][work.layer]
    visible = buffers.keys[:, :, :keys]
    of_request = Work(work.q[:, :, :rows], visible, visible, Positions(positions), work.rule)
    of_keys = attention_mass_plain(of_request, lse[:, :, :rows], peak)
    masses[:, :, :keys] = of_keys[:, 0]
    return masses
