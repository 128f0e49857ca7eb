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
from blend_kernels.cache_addresses import AddressedRows, CacheAddresses
from blend_kernels.mass import attention_mass_plain
from blend_kernels.positions import Positions
from blend_kernels.work import Rule, Work, empty_results


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
        positions: int64 `[rows]`, of each row in its request; negative for a padded row, which is not written.
        request_of_row: int64 `[rows]`.
        backend: "triton" or "torch"; None chooses by device. "torch" reads positions on the host.
    """
    if choose_backend(backend, keys) == "triton":
        from blend_kernels.addressed_kernel import launch_write

        launch_write(addresses.table, layer, keys, values, positions, request_of_row)
        return
    for request, rows in _rows_of_requests(positions, request_of_row):
        buffers = addresses.buffers[request][layer]
        buffers.keys.index_copy_(2, positions[rows], keys[:, :, rows])
        buffers.values.index_copy_(2, positions[rows], values[:, :, rows])


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
    with their neighbours, so they must all be of one request, and run fastest if they ascend.

    Args:
        addresses: of the caches. Rows see what was written there, their own keys included.
        layer: which layer of the caches is read.
        q: `[1, heads, rows, head_dim]`, any strides with a contiguous last dimension; heads is a multiple of kv_heads.
        positions: int64 `[rows]`: row r sees keys `j <= positions[r]`. A padded row has a negative one.
        request_of_row: int64 `[rows]`.
        window: W hides keys `j <= positions[r] - W`.
        softcap: c replaces scaled scores s by `c tanh(s / c)`.
        scale: of the scores; by default `head_dim ** -0.5`.
        sinks: `[heads]`, one logit per head that joins the denominator only.
        most_keys: no row sees more keys; it bounds the parts.
        backend: "triton" or "torch"; None chooses by device. "torch" reads positions on the host.

    Returns:
        `[1, heads, rows, value_dim]` in q's dtype over memory `[1, rows, heads, value_dim]`, and the log-sum-exp of each row,
        sinks included, fp32 `[1, heads, rows]`. Padded rows and those of an unassigned request have zeros, and a log-sum-exp
        that means nothing.
    """
    if scale is None:
        scale = q.shape[3] ** -0.5
    shape = addresses.shapes[layer]
    rule = Rule(window, softcap, scale)
    rows = AddressedRows(addresses.table, layer, shape, q, positions, request_of_row, rule, sinks)
    if choose_attention_backend(backend, q, shape.value_dim) == "triton":
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
        positions: int64 `[rows]`, ascending; padded rows have negative ones and stand at the end.
        lse: the log-sum-exp that `attend_rows` returned for the same arguments.
        window: sliding window.
        softcap: of the scores.
        scale: of the scores.
        most_keys: keys in the result; no row sees more.
        peak: see `attention_mass`.
        backend: "triton" or "torch"; None chooses by device. "torch" reads positions on the host.

    Returns:
        fp32 `[1, heads, most_keys]`, with `peak` `[2, heads, most_keys]`; zeros for keys that no row sees.
    """
    if scale is None:
        scale = q.shape[3] ** -0.5
    shape = addresses.shapes[layer]
    rule = Rule(window, softcap, scale)
    rows = AddressedRows(addresses.table, layer, shape, q, positions, None, rule)
    if choose_attention_backend(backend, q, shape.value_dim) == "triton":
        from blend_kernels.mass_kernel import launch_addressed_mass

        return launch_addressed_mass(rows, lse[0], most_keys, peak)
    return _mass_rows_plain(addresses, rows, lse, most_keys, peak)


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
