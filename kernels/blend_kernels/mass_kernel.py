"""Jit kernel and launcher of `attention_mass`.

One program takes a block of keys and all query heads of its KV head, so keys are read once. Scores stand as [keys, rows]:
a key's weights lie in one thread and its neighbours, and the reduction over rows needs no shared memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blend_kernels.addressed_kernel import cache_address
from blend_kernels.attention_kernel import load_keys, product
from blend_kernels.attention_launch import constants, softmax_scales
from blend_kernels.cache_addresses import AddressedRows
from blend_kernels.tiles import Tile
from blend_kernels.work import Work

# mypy: ignore-errors
# (jit functions are Triton's language, not Python's: their arguments have no Python types)


@triton.jit
def first_row(pos_ptr, i_key, n_rows):
    # first row whose last visible key is i_key or later
    i_low = i_key * 0
    i_high = i_low + n_rows
    while i_low < i_high:
        i_mid = (i_low + i_high) // 2
        before = tl.load(pos_ptr + i_mid).to(tl.int32) < i_key
        i_low = tl.where(before, i_mid + 1, i_low)
        i_high = tl.where(before, i_high, i_mid)
    return i_low


@triton.jit
def mass_of_keys(
    p_q,
    p_k,
    p_lse,
    p_pos,
    p_out,
    s_qh,
    s_qr,
    s_kn,
    s_lh,
    s_lr,
    s_kind,
    i_key,
    i_kv,
    n_rows,
    n_keys,
    n_out,
    window,
    scale,
    cap,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PEAK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # of N keys in all heads of a KV head, into [kinds, heads, n_out]
    # [N, D]
    b_k0 = load_keys(p_k, i_key, s_kn, 0, n_keys, N, 0, D0, HEAD_DIM, True)
    b_k1 = b_k0
    if D1 > 0:
        b_k1 = load_keys(p_k, i_key, s_kn, 0, n_keys, N, D0, D1, HEAD_DIM, True)
    o_key = i_key + tl.arange(0, N)
    o_d0 = tl.arange(0, D0)
    # rows [i_low, i_high) see one of these keys
    i_low = first_row(p_pos, i_key, n_rows)
    i_high = n_rows
    if WINDOWED:
        i_high = first_row(p_pos, i_key + N - 1 + window, n_rows)

    # head after head, and of each all its rows; a block that no row sees takes one step without rows
    unit = cap if CAPPED else scale
    n_steps = tl.maximum((i_high - i_low + M - 1) // M, 1)
    b_mass = tl.zeros([N], tl.float32)
    for i_step in range(GROUP * n_steps):
        # [M, D]
        i_head = (i_kv * GROUP + i_step // n_steps).to(tl.int64)
        i_row = i_low + i_step % n_steps * M
        o_row = i_row + tl.arange(0, M)
        m_row = o_row < i_high
        b_lse = tl.load(p_lse + i_head * s_lh + o_row.to(tl.int64) * s_lr, mask=m_row, other=0.0) * 1.4426950408889634
        i_first_end = tl.load(p_pos + tl.minimum(i_row, n_rows - 1)).to(tl.int32)
        p_rows = p_q + i_head * s_qh + o_row.to(tl.int64)[:, None] * s_qr
        b_q0 = tl.load(p_rows + o_d0[None, :], mask=m_row[:, None] & (o_d0[None, :] < HEAD_DIM), other=0.0)
        # [N, M]
        b_s = product(b_k0, tl.trans(b_q0), tl.zeros([N, M], tl.float32), PRECISION)
        if D1 > 0:
            o_d1 = D0 + tl.arange(0, D1)
            b_q1 = tl.load(p_rows + o_d1[None, :], mask=m_row[:, None] & (o_d1[None, :] < HEAD_DIM), other=0.0)
            b_s = product(b_k1, tl.trans(b_q1), b_s, PRECISION)
        if CAPPED:
            b_s = 2.0 / (1.0 + tl.exp2(-b_s * scale)) - 1.0
        b_s = b_s * unit - b_lse[None, :]
        # most blocks of keys are seen by all rows of the step
        if WINDOWED | (i_row + M > i_high) | (i_key + N > i_first_end + 1):
            o_last = tl.load(p_pos + o_row, mask=m_row, other=-1).to(tl.int32)
            m_seen = m_row[None, :] & (o_key[:, None] <= o_last[None, :])
            if WINDOWED:
                m_seen = m_seen & (o_key[:, None] > o_last[None, :] - window)
            b_s = tl.where(m_seen, b_s, float("-inf"))
        b_p = tl.exp2(b_s)
        b_mass = tl.maximum(b_mass, tl.max(b_p, 1)) if PEAK else b_mass + tl.sum(b_p, 1)
        if i_step % n_steps == n_steps - 1:
            # [N]
            tl.store(p_out + i_head * n_out + o_key, b_mass, mask=o_key < n_out)
            if PEAK:
                b_last = tl.sum(tl.where((o_row == n_rows - 1)[None, :], b_p, 0.0), 1)
                tl.store(p_out + s_kind + i_head * n_out + o_key, b_last, mask=o_key < n_out)
            b_mass = tl.zeros([N], tl.float32)


@triton.jit(do_not_specialize=["n_rows", "n_keys", "n_batch", "n_kv_heads", "window"])
def mass_tile(
    q_ptr,
    k_ptr,
    lse_ptr,
    pos_ptr,
    out_ptr,
    s_qb,
    s_qh,
    s_qr,
    s_kb,
    s_kh,
    s_kn,
    s_lb,
    s_lh,
    s_lr,
    n_rows,
    n_keys,
    n_batch,
    n_kv_heads,
    window,
    scale,
    cap,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PEAK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_kv = tl.program_id(1) % n_kv_heads
    i_batch = (tl.program_id(1) // n_kv_heads).to(tl.int64)
    n_numbers = n_kv_heads.to(tl.int64) * GROUP * n_keys
    mass_of_keys(
        q_ptr + i_batch * s_qb,
        k_ptr + i_batch * s_kb + i_kv.to(tl.int64) * s_kh,
        lse_ptr + i_batch * s_lb,
        pos_ptr,
        out_ptr + i_batch * n_numbers,
        s_qh, s_qr, s_kn, s_lh, s_lr, n_batch * n_numbers,
        tl.program_id(0) * N, i_kv,
        n_rows, n_keys, n_keys,
        window, scale, cap,
        GROUP, HEAD_DIM, M, N, D0, D1,
        WINDOWED, CAPPED, PEAK, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["i_layer", "n_requests", "n_lines", "n_out", "n_kv_heads", "window"])
def mass_addressed(
    q_ptr,
    table_ptr,
    lse_ptr,
    pos_ptr,
    out_ptr,
    s_qh,
    s_qr,
    s_lh,
    s_lr,
    i_layer,
    n_requests,
    n_lines,
    n_out,
    n_kv_heads,
    window,
    scale,
    cap,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LINES: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PEAK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # every n-th block of keys; padded lines stand at the end
    i_kv = tl.program_id(1)
    o_line = tl.arange(0, LINES)
    b_pos = tl.load(pos_ptr + o_line, mask=o_line < n_lines, other=-1).to(tl.int32)
    n_rows = tl.sum((b_pos >= 0).to(tl.int32), 0)
    k_ptr, _, n_capacity = cache_address(
        table_ptr, q_ptr,
        i_layer, 0, i_kv, n_requests,
        HEAD_DIM, VALUE_DIM,
    )  # fmt: skip
    n_keys = tl.minimum(tl.max(b_pos, 0) + 1, n_capacity)
    s_kind = n_kv_heads.to(tl.int64) * GROUP * n_out
    for i_first in range(tl.program_id(0) * N, n_out, tl.num_programs(0) * N):
        i_key = tl.cast(i_first, tl.int32)
        if i_key < n_keys:
            mass_of_keys(
                q_ptr, k_ptr, lse_ptr, pos_ptr, out_ptr,
                s_qh, s_qr, HEAD_DIM, s_lh, s_lr, s_kind,
                i_key, i_kv,
                n_rows, n_keys, n_out,
                window, scale, cap,
                GROUP, HEAD_DIM, M, N, D0, D1,
                WINDOWED, CAPPED, PEAK, PRECISION,
            )  # fmt: skip
        else:
            o_key = i_key + tl.arange(0, N)
            for i_head in range(i_kv * GROUP, i_kv * GROUP + GROUP):
                p_out = out_ptr + tl.cast(i_head, tl.int64) * n_out + o_key
                tl.store(p_out, tl.zeros([N], tl.float32), mask=o_key < n_out)
                if PEAK:
                    tl.store(p_out + s_kind, tl.zeros([N], tl.float32), mask=o_key < n_out)


# Programs of a KV head: each takes several blocks of keys.
_PROGRAMS = 64


def launch_addressed_mass(rows: AddressedRows, lse: Tensor, most_keys: int, peak: bool) -> Tensor:
    """As `mass_rows`; lse: `[heads, rows]`."""
    q = rows.q
    shape = rows.shape
    rule = rows.rule
    _, heads, n_rows, _ = q.shape
    masses = q.new_empty(1 + peak, heads, most_keys, dtype=torch.float32)
    tile = mass_tile_of(q.dtype, shape.head_dim)
    programs = min(_PROGRAMS, triton.cdiv(most_keys, tile.keys))
    mass_addressed[(programs, shape.kv_heads)](
        q,
        rows.table,
        lse,
        rows.positions.contiguous(),
        masses,
        *q.stride()[1:3],
        *lse.stride(),
        rows.layer,
        rows.table.shape[2],
        n_rows,
        most_keys,
        shape.kv_heads,
        rule.window or 0,
        *softmax_scales(rule),
        **constants(q, rows.group, rule, tile),
        VALUE_DIM=shape.value_dim,
        LINES=triton.next_power_of_2(n_rows),
        PEAK=peak,
    )
    return masses


def mass_tile_of(dtype: torch.dtype, dim: int) -> Tile:
    """Rows and keys of one step: as many keys as registers allow, because each block of keys reads all queries."""
    if dtype == torch.float32:
        return Tile(16, 32, 4, 2)
    if dim <= 128:
        return Tile(64, 128, 4, 3)
    return Tile(32, 64, 4, 2)


def launch_mass(work: Work, lse: Tensor, peak: bool) -> Tensor:
    """As `attention_mass`, with the log-sum-exp."""
    q = work.q
    k = work.k
    rule = work.rule
    batch, _, rows, dim = q.shape
    _, kv_heads, keys, _ = k.shape
    masses = work.empty_masses(peak)
    tile = mass_tile_of(q.dtype, dim)
    mass_tile[(triton.cdiv(keys, tile.keys), kv_heads * batch)](
        q,
        k,
        lse,
        work.positions.values.contiguous(),
        masses,
        *q.stride()[:3],
        *k.stride()[:3],
        *lse.stride(),
        rows,
        keys,
        batch,
        kv_heads,
        rule.window or 0,
        *softmax_scales(rule),
        **constants(q, work.group, rule, tile),
        PEAK=peak,
    )
    return masses
