"""Jit kernels and launchers of `write_rows` and `attend_rows`.

Names follow the grammar of kernels/README.md. Loops over keys and results are those of `selective_attention`; only where keys
lie differs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blend_kernels.attention_kernel import add_sinks, attend_ranges, key_loops, load_queries, store_results
from blend_kernels.attention_launch import (
    capability,
    constants,
    in_parts,
    multiprocessors,
    power_of_two,
    softmax_scales,
    value_constants,
)
from blend_kernels.cache_addresses import MOST_ALONE, AddressedRows
from blend_kernels.tiles import Shape, Tile, best_tile, chunks, split_count

# mypy: ignore-errors
# (jit functions are Triton's language, not Python's: their arguments have no Python types)


# The last visible key of a row that stands in another request's tile; no cache is as long.
FOREIGN = tl.constexpr(1 << 30)


@triton.jit
def cache_address(
    table_ptr, like_ptr, i_layer, i_req, i_head, n_requests, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr
):
    # where keys and values of one head lie, typed as like_ptr, and how many there is room for; table: [layers, 3, requests]
    p_slot = table_ptr + tl.cast(i_layer, tl.int64) * 3 * n_requests + i_req
    n_keys = tl.load(p_slot + 2 * n_requests, mask=i_req >= 0, other=0)
    k_ptr = tl.multiple_of(tl.load(p_slot, mask=i_req >= 0, other=0).to(like_ptr.dtype), 16)
    v_ptr = tl.multiple_of(tl.load(p_slot + n_requests, mask=i_req >= 0, other=0).to(like_ptr.dtype), 16)
    i_first = tl.cast(i_head, tl.int64) * n_keys
    return (k_ptr + i_first * HEAD_DIM, v_ptr + i_first * VALUE_DIM, n_keys.to(tl.int32))


@triton.jit(do_not_specialize=["i_layer", "n_requests"])
def write_row(
    k_ptr,
    v_ptr,
    table_ptr,
    pos_ptr,
    req_ptr,
    s_kh,
    s_kr,
    s_vh,
    s_vr,
    i_layer,
    n_requests,
    n_heads,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_pos = tl.load(pos_ptr + i_row).to(tl.int64)
    i_req = tl.load(req_ptr + i_row).to(tl.int64)
    if (i_pos < 0) | (i_req < 0) | (i_req >= n_requests):
        return
    kc_ptr, vc_ptr, n_keys = cache_address(
        table_ptr, k_ptr,
        i_layer, i_req, 0, n_requests,
        HEAD_DIM, VALUE_DIM,
    )  # fmt: skip
    if i_pos >= n_keys:
        return
    # [HEADS, D]
    o_head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    o_dim = tl.arange(0, D)[None, :]
    m_k = (o_head < n_heads) & (o_dim < HEAD_DIM)
    b_k = tl.load(k_ptr + o_head * s_kh + i_row * s_kr + o_dim, mask=m_k)
    tl.store(kc_ptr + (o_head * n_keys + i_pos) * HEAD_DIM + o_dim, b_k, mask=m_k)
    # [HEADS, V]
    o_dim = tl.arange(0, V)[None, :]
    m_v = (o_head < n_heads) & (o_dim < VALUE_DIM)
    b_v = tl.load(v_ptr + o_head * s_vh + i_row * s_vr + o_dim, mask=m_v)
    tl.store(vc_ptr + (o_head * n_keys + i_pos) * VALUE_DIM + o_dim, b_v, mask=m_v)


@triton.jit
def last_keys(o_pos, m_own, n_keys):
    # last visible key of every line; of the first row and, plus one, of the last row; none past the keys there are
    o_last = tl.minimum(o_pos, n_keys - 1)
    i_first_end = tl.min(tl.where(m_own, o_last, n_keys), 0)
    i_last_end = tl.max(tl.where(m_own, o_last, -1), 0)
    # a line that is no row may see all keys, because its result is dropped
    return tl.where(m_own, o_last, i_last_end), i_first_end, i_last_end + 1


@triton.jit(do_not_specialize=["i_layer", "n_requests", "n_rows", "window"])
def attend_addressed(
    q_ptr,
    table_ptr,
    pos_ptr,
    req_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    s_qh,
    s_qr,
    i_layer,
    n_requests,
    n_rows,
    n_kv_heads,
    window,
    scale,
    cap,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    RAGGED: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # heads fastest, tiles from the last (heaviest) to the first
    i_head = tl.program_id(0) % n_kv_heads
    i_tile = tl.num_programs(0) // n_kv_heads - 1 - tl.program_id(0) // n_kv_heads

    # [M]: row and query head of every line; a row takes SPAN lines, of which the first GROUP are its heads
    o_line = i_tile * M + tl.arange(0, M)
    o_row = o_line // SPAN
    o_head = i_head * GROUP + tl.minimum(o_line % SPAN, GROUP - 1)
    m_line = (o_row < n_rows) & (o_line % SPAN < GROUP)
    o_pos = tl.load(pos_ptr + o_row, mask=m_line, other=-1).to(tl.int32)
    o_req = tl.load(req_ptr + o_row, mask=m_line, other=-1).to(tl.int32)

    # the request of the tile, its cache, and this program's share of the keys; no request has no keys
    m_row = (o_pos >= 0) & (o_req >= 0) & (o_req < n_requests)
    i_req = tl.max(tl.where(m_row, o_req, -1), 0)
    m_own = m_row & (o_req == i_req)
    k_ptr, v_ptr, n_keys = cache_address(
        table_ptr, q_ptr,
        i_layer, i_req, i_head, n_requests,
        HEAD_DIM, VALUE_DIM,
    )  # fmt: skip
    o_last, i_first_end, i_end = last_keys(o_pos, m_own, n_keys)
    # a row of a second request would read the cache of the first: it is marked, and NaN in the end
    o_last = tl.where(m_row & (o_req != i_req), FOREIGN, o_last)
    i_from, i_full, i_ragged, i_low, i_stop = key_loops(i_first_end, i_end, window, N, WINDOWED, SPLIT)
    i_part = tl.program_id(1).to(tl.int64)
    o_out = (i_part * n_rows + o_row) * n_kv_heads * GROUP + o_head
    if SPLIT:  # noqa: SIM102 (a constant, which decides what is compiled)
        if i_from >= i_stop:
            tl.store(lse_ptr + o_out, tl.where(o_last == FOREIGN, float("nan"), float("-inf")), mask=m_line)
            return

    # [M, D]
    p_q = q_ptr + o_head.to(tl.int64)[:, None] * s_qh + o_row.to(tl.int64)[:, None] * s_qr
    b_q0, b_q1 = load_queries(p_q, tl.arange(0, D0), m_line, HEAD_DIM, D0, D1)
    b_acc0, b_acc1, b_max, b_sum = attend_ranges(
        b_q0, b_q1, o_last,
        i_from, i_full, i_ragged, i_low, i_stop,
        k_ptr, v_ptr, None, None, 0, 0, HEAD_DIM, VALUE_DIM,
        window, scale, cap,
        N, RAGGED, HEAD_DIM, VALUE_DIM, D0, D1, V0, V1,
        WINDOWED, CAPPED, PRECISION, False,
    )  # fmt: skip
    if SINKS:
        b_acc0, b_acc1, b_max, b_sum = add_sinks(b_acc0, b_acc1, b_max, b_sum, sink_ptr + o_head)
    b_sum = tl.where(o_last == FOREIGN, float("nan"), b_sum)
    store_results(
        b_acc0, b_acc1, b_max, b_sum,
        o_out, m_row, m_line,
        out_ptr, lse_ptr,
        VALUE_DIM, V0, V1,
    )  # fmt: skip


# Elements of keys that one program writes.
_ELEMENTS = 2048


def launch_write(
    table: Tensor, layer: int, keys: Tensor, values: Tensor, positions: Tensor, request_of_row: Tensor
) -> None:
    """Write checked rows; see `write_rows`."""
    _, heads, rows, dim = keys.shape
    value_dim = values.shape[3]
    width = power_of_two(max(dim, value_dim))
    block = min(max(1, _ELEMENTS // width), power_of_two(heads))
    write_row[(rows, triton.cdiv(heads, block))](
        keys,
        values,
        table,
        positions.contiguous(),
        request_of_row.contiguous(),
        *keys.stride()[1:3],
        *values.stride()[1:3],
        layer,
        table.shape[2],
        heads,
        HEAD_DIM=dim,
        VALUE_DIM=value_dim,
        HEADS=block,
        D=power_of_two(dim),
        V=power_of_two(value_dim),
        num_warps=min(4, max(1, block * width // 256)),
        enable_fp_fusion=True,
    )


def attend_caches(rows: AddressedRows, most_keys: int) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; see `attend_rows`."""
    tile = choose_tile(rows, capability(rows.q.device))
    programs = _tiles(rows, tile) * rows.shape.kv_heads
    window = rows.rule.window
    if window is not None and _alone(rows):  # it bounds the keys of a tile only if a tile has one row
        most_keys = min(most_keys, window)
    splits = split_count(programs, most_keys, multiprocessors(rows.q.device))
    return launch_attend(rows, tile, splits)


def launch_attend(rows: AddressedRows, tile: Tile, splits: int) -> tuple[Tensor, Tensor]:
    """Run the kernel with this tile and keys cut into `splits`."""

    def launch(sinks: Tensor | None, out: Tensor, lse: Tensor) -> None:
        _launch(rows._replace(sinks=sinks), tile, splits, out, lse)

    return in_parts(launch, splits, rows.q, rows.shape.value_dim, rows.sinks)


def choose_tile(rows: AddressedRows, major: int) -> Tile:
    """The tile for these shapes.

    Rows that share a tile take that of `selective_attention`. The tile of a row alone is as small as its group,
    and more of them run at once. In fp32 only small tiles keep six operands of three tf32 products in registers.
    """
    dims = rows.shape.head_dim, rows.shape.value_dim
    keys = chunks(max(dims))
    windowed = rows.rule.window is not None
    if rows.q.dtype == torch.float32:
        is_small = sum(keys) <= 128 and keys.second != 16
        return Tile(16, 32, 4, 2) if is_small else Tile(16, 16, 8, 1)
    if not _alone(rows):
        lines = rows.q.shape[2] * rows.group
        return best_tile(major, Shape(rows.q.dtype, *dims, lines, windowed, tma=False))
    lines = next((few for few in (16, 32) if rows.group <= few), 64)
    if keys.second:
        return Tile(lines, 32, 4 if lines == 16 else 8, 2)
    warps = 4 if lines <= 32 else 8
    if keys.first == 256:
        return Tile(lines, 32, warps, 3)
    if windowed:
        return Tile(lines, 32, warps, 4 if keys.first <= 64 else 3)
    return Tile(lines, 64, warps, 3)


def _alone(rows: AddressedRows) -> bool:
    return rows.q.shape[2] <= MOST_ALONE


def _span(rows: AddressedRows, tile: Tile) -> int:
    """Lines that a row takes: those of its heads, or whole tiles if rows are alone."""
    if _alone(rows):
        return triton.cdiv(rows.group, tile.rows) * tile.rows
    return rows.group


def _tiles(rows: AddressedRows, tile: Tile) -> int:
    lines = rows.q.shape[2] * _span(rows, tile)
    return triton.cdiv(lines, tile.rows)


def _launch(rows: AddressedRows, tile: Tile, splits: int, out: Tensor, lse: Tensor) -> None:
    q = rows.q
    shape = rows.shape
    rule = rows.rule
    # any tensor stands in the place of one that there is not
    sinks = q if rows.sinks is None else rows.sinks.contiguous()
    attend_addressed[(_tiles(rows, tile) * shape.kv_heads, splits)](
        q,
        rows.table,
        rows.positions.contiguous(),
        rows.request_of_row.contiguous(),
        sinks,
        out,
        lse,
        *q.stride()[1:3],
        rows.layer,
        rows.table.shape[2],
        q.shape[2],
        shape.kv_heads,
        rule.window or 0,
        *softmax_scales(rule),
        **constants(q, rows.group, rule, tile),
        **value_constants(shape.value_dim, tile),
        SPAN=_span(rows, tile),
        SINKS=rows.sinks is not None,
        SPLIT=splits > 1,
    )
