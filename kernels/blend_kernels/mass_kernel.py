"""Jit kernel and launcher of `attention_mass`.

The attention kernel computes the log-sum-exp without values. Then one program runs per block of keys.
"""

import torch
import triton
import triton.language as tl

from blend_kernels.attention_kernel import load_keys, product
from blend_kernels.attention_launch import launch_attention, precision, softmax_scales, split_count
from blend_kernels.checks import Reduce, Work
from blend_kernels.tiles import Tile, chunks

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


@triton.jit(do_not_specialize=["n_rows", "n_keys", "window"])
def mass_tile(
    q_ptr, k_ptr, lse_ptr, pos_ptr, out_ptr, s_qb, s_qh, s_qr, s_kb, s_kh, s_kn, s_lb, s_lh, s_pb, s_ob, s_oh,
    n_rows, n_keys, window, scale, cap,
    GROUP: tl.constexpr, SHARE: tl.constexpr, HEAD_DIM: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, EXACT: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    PEAK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_key = tl.program_id(0) * N
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2).to(tl.int64)
    p_pos = pos_ptr + i_batch * s_pb
    # rows [i_low, i_high) see a key of this block
    i_high = n_rows
    if EXACT:
        i_low = first_row(p_pos, i_key, n_rows)
        if WINDOWED:
            i_high = first_row(p_pos, i_key + N - 1 + window, n_rows)
    else:
        i_low = tl.maximum(i_key - (n_keys - n_rows), 0)
        if WINDOWED:
            i_high = tl.maximum(tl.minimum(i_key + N - 1 + window - (n_keys - n_rows), n_rows), 0)

    # [N, D]
    p_k = k_ptr + i_batch * s_kb + (i_head // SHARE).to(tl.int64) * s_kh
    b_k0 = load_keys(p_k, i_key, s_kn, 0, n_keys, N, 0, D0, HEAD_DIM, True)
    b_k1 = b_k0
    if D1 > 0:
        b_k1 = load_keys(p_k, i_key, s_kn, 0, n_keys, N, D0, D1, HEAD_DIM, True)
    o_key = i_key + tl.arange(0, N)
    o_d0 = tl.arange(0, D0)
    b_mass = tl.zeros([N], tl.float32)
    for i_line in range(i_low * GROUP, i_high * GROUP, M):
        # [M, D]
        o_line = i_line + tl.arange(0, M)
        m_line = o_line < n_rows * GROUP
        o_row = tl.minimum(o_line // GROUP, n_rows - 1)
        o_head = (i_head * GROUP + o_line % GROUP).to(tl.int64)
        p_q = q_ptr + i_batch * s_qb + o_head[:, None] * s_qh + o_row.to(tl.int64)[:, None] * s_qr
        b_q0 = tl.load(p_q + o_d0[None, :], mask=m_line[:, None] & (o_d0[None, :] < HEAD_DIM), other=0.0)
        b_s = product(b_q0, tl.trans(b_k0), tl.zeros([M, N], tl.float32), PRECISION)
        if D1 > 0:
            o_d1 = D0 + tl.arange(0, D1)
            b_q1 = tl.load(p_q + o_d1[None, :], mask=m_line[:, None] & (o_d1[None, :] < HEAD_DIM), other=0.0)
            b_s = product(b_q1, tl.trans(b_k1), b_s, PRECISION)
        b_s = cap * (2.0 / (1.0 + tl.exp2(-b_s * scale)) - 1.0) if CAPPED else b_s * scale
        b_lse = tl.load(lse_ptr + i_batch * s_lb + o_head * s_lh + o_row) * 1.4426950408889634
        o_last = tl.load(p_pos + o_row).to(tl.int32) if EXACT else o_row + (n_keys - n_rows)
        m_seen = m_line[:, None] & (o_key[None, :] <= o_last[:, None])
        if WINDOWED:
            m_seen = m_seen & (o_key[None, :] > o_last[:, None] - window)
        b_p = tl.exp2(tl.where(m_seen, b_s - b_lse[:, None], float("-inf")))
        b_mass = tl.maximum(b_mass, tl.max(b_p, 0)) if PEAK else b_mass + tl.sum(b_p, 0)
    tl.store(out_ptr + i_batch * s_ob + i_head.to(tl.int64) * s_oh + o_key, b_mass, mask=o_key < n_keys)


_ROWS, _KEYS = 64, 64


def launch_mass(work: Work, tile: Tile, per_head: bool, reduce: Reduce) -> torch.Tensor:
    """Weights reduced over rows, fp32 `[batch, heads, keys]`, or `[batch, kv_heads, keys]` summed over each group."""
    _, lse = launch_attention(work._replace(v=None), tile, split_count(work, tile), True)
    assert lse is not None
    return mass_from_lse(work, lse, per_head, reduce)


def mass_from_lse(work: Work, lse: torch.Tensor, per_head: bool, reduce: Reduce = "sum") -> torch.Tensor:
    """The second pass alone."""
    q, k, rule = work.q, work.k, work.rule
    batch, heads, rows, dim = q.shape
    programs = heads if per_head or reduce == "max" else k.shape[1]  # the peaks of a group's heads are summed
    mass = torch.empty(batch, programs, k.shape[2], dtype=torch.float32, device=q.device)
    positions = work.positions.contiguous().expand(batch, rows)
    scale, cap = softmax_scales(rule)
    first = chunks(dim)
    small = 16 if q.dtype == torch.float32 or dim > 128 else _ROWS
    mass_tile[(-(-k.shape[2] // _KEYS), programs, batch)](
        q, k, lse, positions, mass, *q.stride()[:3], *k.stride()[:3], *lse.stride()[:2], positions.stride(0),
        *mass.stride()[:2], rows, k.shape[2], rule.window or 0, scale, cap,
        GROUP=heads // programs, SHARE=programs // k.shape[1], HEAD_DIM=dim, M=small, N=_KEYS, D0=first.first,
        D1=first.second, EXACT=rule.mode == "exact", WINDOWED=rule.window is not None, CAPPED=rule.softcap is not None,
        PEAK=reduce == "max", PRECISION=precision(q.dtype), num_warps=4, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip
    return mass
