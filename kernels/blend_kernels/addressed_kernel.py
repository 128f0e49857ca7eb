"""Jit kernels and launchers of `write_rows` and `attend_rows`.

Names follow the grammar of kernels/README.md. Scores and log-sum-exp are in units of log 2, so that every exponential is
one `exp2`. The loops over keys are those of `selective_attention`; only where keys lie differs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blend_kernels.attention_kernel import add_sinks, attend_ranges, key_loops, load_queries
from blend_kernels.attention_launch import machine, multiprocessors, power_of_two, precision, softmax_scales
from blend_kernels.cache_addresses import AddressedRows
from blend_kernels.tiles import MOST_SPLITS, Shape, Tile, candidates, chunks

# mypy: ignore-errors
# (jit functions are Triton's language, not Python's: their arguments have no Python types)


@triton.jit
def cache_address(
    table_ptr, like_ptr, i_layer, i_req, i_head, n_requests, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr
):  # fmt: skip
    # where keys and values of one head lie, typed as like_ptr, and how many there is room for; table: [layers, 3, requests]
    p_slot = table_ptr + tl.cast(i_layer, tl.int64) * 3 * n_requests + i_req
    n_keys = tl.load(p_slot + 2 * n_requests, mask=i_req >= 0, other=0)
    k_ptr = tl.multiple_of(tl.load(p_slot, mask=i_req >= 0, other=0).to(like_ptr.dtype), 16)
    v_ptr = tl.multiple_of(tl.load(p_slot + n_requests, mask=i_req >= 0, other=0).to(like_ptr.dtype), 16)
    i_first = tl.cast(i_head, tl.int64) * n_keys
    return k_ptr + i_first * HEAD_DIM, v_ptr + i_first * VALUE_DIM, n_keys.to(tl.int32)


@triton.jit(do_not_specialize=["i_layer", "n_requests"])
def write_row(
    k_ptr, v_ptr, table_ptr, pos_ptr, req_ptr, s_kh, s_kr, s_vh, s_vr, i_layer, n_requests, n_heads,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    i_pos = tl.load(pos_ptr + i_row).to(tl.int64)
    i_req = tl.load(req_ptr + i_row).to(tl.int64)
    if (i_pos < 0) | (i_req < 0) | (i_req >= n_requests):
        return
    kc_ptr, vc_ptr, n_keys = cache_address(table_ptr, k_ptr, i_layer, i_req, 0, n_requests, HEAD_DIM, VALUE_DIM)
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
    # a line that is no row of this request may see all keys, because its result is dropped
    return tl.where(m_own, o_last, i_last_end), i_first_end, i_last_end + 1


@triton.jit
def result_place(o_row, o_head, n_rows, n_heads):
    # of every line in [splits, rows, heads]
    return (tl.program_id(1).to(tl.int64) * n_rows + o_row) * n_heads + o_head


@triton.jit(do_not_specialize=["i_layer", "n_requests", "n_rows", "window"])
def attend_addressed(
    q_ptr, table_ptr, pos_ptr, req_ptr, sink_ptr, out_ptr, lse_ptr, s_qh, s_qr,
    i_layer, n_requests, n_rows, n_kv_heads, window, scale, cap,
    GROUP: tl.constexpr, SPAN: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, RAGGED: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
    m_seen = (o_pos >= 0) & (o_req >= 0) & (o_req < n_requests)
    i_req = tl.max(tl.where(m_seen, o_req, -1), 0)
    m_own = m_seen & (o_req == i_req)
    k_ptr, v_ptr, n_keys = cache_address(table_ptr, q_ptr, i_layer, i_req, i_head, n_requests, HEAD_DIM, VALUE_DIM)
    o_last, i_first_end, i_end = last_keys(o_pos, m_own, n_keys)
    i_from, i_full, i_ragged, i_low, i_stop = key_loops(i_first_end, i_end, window, N, WINDOWED, SPLIT)
    if SPLIT:  # noqa: SIM102 (a constant, which decides what is compiled)
        if i_from >= i_stop:
            o_out = result_place(o_row, o_head, n_rows, n_kv_heads * GROUP)
            tl.store(lse_ptr + o_out, tl.where(m_seen & (o_req != i_req), float("nan"), float("-inf")), mask=m_line)
            return

    # [M, D]
    p_q = q_ptr + o_head.to(tl.int64)[:, None] * s_qh + o_row.to(tl.int64)[:, None] * s_qr
    b_q0, b_q1 = load_queries(p_q, tl.arange(0, D0), m_line, HEAD_DIM, D0, D1)
    b_acc0, b_acc1, b_max, b_sum = attend_ranges(
        b_q0, b_q1, o_last, i_from, i_full, i_ragged, i_low, i_stop,
        k_ptr, v_ptr, None, None, 0, 0, HEAD_DIM, VALUE_DIM, window, scale, cap,
        N, RAGGED, HEAD_DIM, VALUE_DIM, D0, D1, V0, V1, WINDOWED, CAPPED, True, PRECISION, False,
    )  # fmt: skip

    if SINKS:
        b_acc0, b_acc1, b_max, b_sum = add_sinks(b_acc0, b_acc1, b_max, b_sum, sink_ptr + o_head)
    # a row of a second request in a tile would be wrong: it is NaN instead
    b_sum = tl.where(m_seen & (o_req != i_req), float("nan"), b_sum)
    # what saw nothing: zeros, or as a part of the keys minus infinity as its log-sum-exp and no output
    m_any = m_seen & (b_sum != 0.0)
    b_norm = tl.where(m_any, b_sum, 1.0)
    o_out = result_place(o_row, o_head, n_rows, n_kv_heads * GROUP)
    m_out = m_line
    if SPLIT:
        tl.store(lse_ptr + o_out, tl.where(m_any, b_max + tl.log2(b_norm), float("-inf")), mask=m_line)
        m_out = m_line & m_any
    p_o = out_ptr + o_out[:, None] * VALUE_DIM
    o_v0 = tl.arange(0, V0)
    b_o0 = tl.where(m_any[:, None], b_acc0 / b_norm[:, None], 0.0).to(out_ptr.dtype.element_ty)
    tl.store(p_o + o_v0[None, :], b_o0, mask=m_out[:, None] & (o_v0[None, :] < VALUE_DIM))
    if V1 > 0:
        o_v1 = V0 + tl.arange(0, V1)
        b_o1 = tl.where(m_any[:, None], b_acc1 / b_norm[:, None], 0.0).to(out_ptr.dtype.element_ty)
        tl.store(p_o + o_v1[None, :], b_o1, mask=m_out[:, None] & (o_v1[None, :] < VALUE_DIM))


@triton.jit(do_not_specialize=["n_splits"])
def merge_splits(
    part_ptr, lse_ptr, sink_ptr, out_ptr, whole_ptr, n_heads, n_splits,
    VALUE_DIM: tl.constexpr, V: tl.constexpr, S: tl.constexpr, SINKS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    # one row and head
    i_out = tl.program_id(0).to(tl.int64)
    n_out = tl.num_programs(0).to(tl.int64)
    # [S]
    o_split = tl.arange(0, S)
    b_lse = tl.load(lse_ptr + o_split * n_out + i_out, mask=o_split < n_splits, other=float("-inf"))
    b_max = tl.max(b_lse, 0)
    if SINKS:
        b_sink = tl.load(sink_ptr + i_out % n_heads).to(tl.float32) * 1.4426950408889634
        b_max = tl.maximum(b_max, b_sink)
    b_max = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_w = tl.exp2(b_lse - b_max)
    b_sum = tl.sum(b_w, 0)
    if SINKS:
        b_sum += tl.exp2(b_sink - b_max)
    if WHOLE:
        b_log = tl.where(b_sum == 0.0, float("-inf"), tl.log2(tl.where(b_sum == 0.0, 1.0, b_sum)))
        tl.store(whole_ptr + i_out, (b_max + b_log) * 0.6931471805599453)
    # [S, V]: parts that saw nothing were never written
    o_dim = tl.arange(0, V)
    m_part = (b_lse != float("-inf"))[:, None] & (o_dim[None, :] < VALUE_DIM)
    p_x = part_ptr + (o_split[:, None] * n_out + i_out) * VALUE_DIM + o_dim[None, :]
    b_x = tl.load(p_x, mask=m_part, other=0.0)
    b_out = tl.sum(b_x * b_w[:, None], 0) / tl.where(b_sum == 0.0, 1.0, b_sum)
    tl.store(out_ptr + i_out * VALUE_DIM + o_dim, b_out.to(out_ptr.dtype.element_ty), mask=o_dim < VALUE_DIM)


# Elements of keys that one program writes.
_ELEMENTS = 2048
# Up to so many rows are computed each alone: they are the next tokens of several prompts.
_MOST_ALONE = 16
# By default, keys of one part at least: below this the merge costs more than the part saves.
_LEAST_SPLIT = 256


def launch_write(
    table: Tensor,
    layer: int,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    request_of_row: Tensor,
) -> None:
    """Write checked rows; see `write_rows`."""
    _, heads, rows, dim = keys.shape
    value_dim = values.shape[3]
    width = power_of_two(max(dim, value_dim))
    block = min(max(1, _ELEMENTS // width), power_of_two(heads))
    write_row[(rows, triton.cdiv(heads, block))](
        keys, values, table, positions.contiguous(), request_of_row.contiguous(),
        *keys.stride()[1:3], *values.stride()[1:3], layer, table.shape[2], heads,
        HEAD_DIM=dim, VALUE_DIM=value_dim, HEADS=block, D=power_of_two(dim), V=power_of_two(value_dim),
        num_warps=min(4, max(1, block * width // 256)), enable_fp_fusion=True,
    )  # fmt: skip


def attend_caches(rows: AddressedRows, splits: int | None, most_keys: int, lse: Tensor | None = None) -> Tensor:
    """Attention of checked rows; see `attend_rows`. lse: takes the log-sum-exp, `[rows, heads]`."""
    tile = choose_tile(rows, machine(rows.q.device).major)
    keys = _keys_of_a_tile(rows, most_keys)
    if splits is None:
        splits = split_count(rows, tile, keys)
    steps = triton.cdiv(keys, tile.keys)
    return launch_attend(rows, tile, min(splits, steps, MOST_SPLITS), lse)


def launch_attend(
    rows: AddressedRows,
    tile: Tile,
    splits: int,
    lse: Tensor | None = None,
) -> Tensor:
    """Run the kernel with this tile and keys cut into `splits`, and merge the parts; a log-sum-exp comes from the merge."""
    out = rows.empty_out()
    if lse is not None:
        splits = max(2, splits)
    if splits == 1:
        _launch_tiles(rows, tile, 1, out, out)
        return out
    _, heads, n_rows, _ = rows.q.shape
    part = torch.empty(splits, n_rows, heads, rows.shape.value_dim, dtype=torch.float32, device=out.device)
    part_lse = torch.empty(splits, n_rows, heads, dtype=torch.float32, device=out.device)
    _launch_tiles(rows, tile, splits, part, part_lse)
    _merge_parts(rows, part, part_lse, out, lse)
    return out


def choose_tile(rows: AddressedRows, major: int) -> Tile:
    """The best guess for these shapes; nothing is measured, because a graph may be under capture.

    Rows that share a tile take the first guess of `selective_attention`. The tile of a row alone is as small as its group,
    and more of them run at once. In fp32 only small tiles keep six operands of three tf32 products in registers.
    """
    dims = rows.shape.head_dim, rows.shape.value_dim
    keys = chunks(max(dims))
    windowed = rows.rule.window is not None
    if rows.q.dtype == torch.float32:
        return Tile(16, 32, 4, 2) if sum(keys) <= 128 and keys.second != 16 else Tile(16, 16, 8, 1)
    if not _alone(rows):
        lines = rows.q.shape[2] * rows.group
        return candidates(major, Shape(rows.q.dtype, *dims, lines, windowed, tma=False))[0]
    lines = next((few for few in (16, 32) if rows.group <= few), 64)
    if keys.second:
        return Tile(lines, 32, 4 if lines == 16 else 8, 2)
    warps = 4 if lines <= 32 else 8
    if keys.first == 256:
        return Tile(lines, 32, warps, 3)
    if keys.first <= 64 and windowed:
        return Tile(lines, 32, warps, 4)
    return Tile(lines, 64, warps, 3)


def split_count(rows: AddressedRows, tile: Tile, keys: int) -> int:
    """Number of parts that fill the GPU twice over, if a tile sees so many keys."""
    programs = _tiles(rows, tile) * rows.shape.kv_heads
    parts_to_fill = 2 * multiprocessors(rows.q.device) // programs
    return max(1, min(parts_to_fill, keys // _LEAST_SPLIT))


def _keys_of_a_tile(rows: AddressedRows, most_keys: int) -> int:
    """The most keys that a tile sees. A window bounds them only if a tile has one row."""
    window = rows.rule.window
    return most_keys if window is None or not _alone(rows) else min(most_keys, window)


def _alone(rows: AddressedRows) -> bool:
    return rows.q.shape[2] <= _MOST_ALONE


def _span(rows: AddressedRows, tile: Tile) -> int:
    """Lines that a row takes: those of its heads, or whole tiles if rows are alone."""
    return triton.cdiv(rows.group, tile.rows) * tile.rows if _alone(rows) else rows.group


def _tiles(rows: AddressedRows, tile: Tile) -> int:
    return triton.cdiv(rows.q.shape[2] * _span(rows, tile), tile.rows)


def _launch_tiles(
    rows: AddressedRows,
    tile: Tile,
    splits: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    q = rows.q
    shape = rows.shape
    rule = rows.rule
    keys = chunks(shape.head_dim)
    values = chunks(shape.value_dim)
    sinks = _sinks(rows)
    scale, cap = softmax_scales(rule)
    attend_addressed[(_tiles(rows, tile) * shape.kv_heads, splits)](
        q, rows.table, rows.positions.contiguous(), rows.request_of_row.contiguous(), sinks, out, lse,
        *q.stride()[1:3], rows.layer, rows.table.shape[2], q.shape[2], shape.kv_heads, rule.window or 0, scale, cap,
        GROUP=rows.group, SPAN=_span(rows, tile), HEAD_DIM=shape.head_dim, VALUE_DIM=shape.value_dim,
        M=tile.rows, N=tile.keys, RAGGED=tile.ragged,
        D0=keys.first, D1=keys.second, V0=values.first, V1=values.second,
        WINDOWED=rule.window is not None, CAPPED=rule.softcap is not None,
        SINKS=rows.sinks is not None and splits == 1, SPLIT=splits > 1, PRECISION=precision(q.dtype),
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )  # fmt: skip


def _merge_parts(
    rows: AddressedRows,
    part: Tensor,
    part_lse: Tensor,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    splits, n_rows, heads, dim = part.shape
    s = max(2, power_of_two(splits))
    v = max(16, power_of_two(dim))
    merge_splits[(n_rows * heads,)](
        part, part_lse, _sinks(rows), out, part_lse if lse is None else lse, heads, splits,
        VALUE_DIM=dim, V=v, S=s, SINKS=rows.sinks is not None, WHOLE=lse is not None,
        num_warps=min(8, max(1, s * v // 1024)), enable_fp_fusion=True,
    )  # fmt: skip


def _sinks(rows: AddressedRows) -> Any:
    """The sinks, or any tensor in their place where there are none."""
    return rows.q if rows.sinks is None else rows.sinks.contiguous()
