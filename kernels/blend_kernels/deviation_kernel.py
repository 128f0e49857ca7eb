"""Jit kernel and launcher of `kv_deviation`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: ignore-errors
# (jit functions are Triton's language, not Python's: their arguments have no Python types)


@triton.jit
def pair_deviation(
    new_ptr, old_ptr, s_nh, s_nr, s_oh, s_or, n_rows, n_heads, i_row,
    R: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, L1: tl.constexpr,
):  # fmt: skip
    # [R, D]
    o_row = (i_row + tl.arange(0, R)).to(tl.int64)[:, None]
    o_dim = tl.arange(0, D)[None, :]
    m_x = (o_row < n_rows) & (o_dim < DIM)
    b_sum = tl.zeros([R, D], tl.float32)
    for i_head in range(n_heads):
        p_new = new_ptr + tl.cast(i_head, tl.int64) * s_nh + o_row * s_nr + o_dim
        p_old = old_ptr + tl.cast(i_head, tl.int64) * s_oh + o_row * s_or + o_dim
        b_d = tl.load(p_new, mask=m_x, other=0.0).to(tl.float32) - tl.load(p_old, mask=m_x, other=0.0).to(tl.float32)
        b_sum += tl.abs(b_d) if L1 else b_d * b_d
    return tl.sum(b_sum, 1)


@triton.jit(do_not_specialize=["n_rows"])
def deviation_rows(
    kn_ptr, ko_ptr, vn_ptr, vo_ptr, out_ptr,
    s_knb, s_knh, s_knr, s_kob, s_koh, s_kor, s_vnb, s_vnh, s_vnr, s_vob, s_voh, s_vor, n_rows, n_kheads, n_vheads,
    R: tl.constexpr, KD: tl.constexpr, K_DIM: tl.constexpr, VD: tl.constexpr, V_DIM: tl.constexpr, L1: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0) * R
    i_batch = tl.program_id(1).to(tl.int64)
    b_sum = tl.zeros([R], tl.float32)
    if K_DIM > 0:
        p_new, p_old = kn_ptr + i_batch * s_knb, ko_ptr + i_batch * s_kob
        b_sum += pair_deviation(p_new, p_old, s_knh, s_knr, s_koh, s_kor, n_rows, n_kheads, i_row, R, KD, K_DIM, L1)
    if V_DIM > 0:
        p_new, p_old = vn_ptr + i_batch * s_vnb, vo_ptr + i_batch * s_vob
        b_sum += pair_deviation(p_new, p_old, s_vnh, s_vnr, s_voh, s_vor, n_rows, n_vheads, i_row, R, VD, V_DIM, L1)
    o_row = i_row + tl.arange(0, R)
    tl.store(out_ptr + i_batch * n_rows + o_row, b_sum, mask=o_row < n_rows)


Pair = tuple[Tensor, Tensor]
_ELEMENTS = 2048


def launch_deviation(
    keys: Pair | None,
    values: Pair | None,
    norm: str,
) -> Tensor:
    """Distance of the given pairs, fp32 `[batch, rows]`, of checked arguments."""
    # a pair that is not wanted has no dimensions, and any tensors in its place
    k_new, k_old = keys or values
    v_new, v_old = values or keys
    k_dim = k_new.shape[3] if keys else 0
    v_dim = v_new.shape[3] if values else 0
    k_width = _padded(k_dim)
    v_width = _padded(v_dim)
    batch, k_heads, rows, _ = k_new.shape
    out = torch.empty(batch, rows, dtype=torch.float32, device=k_new.device)
    block = max(1, _ELEMENTS // max(k_width, v_width))
    if rows:
        deviation_rows[(triton.cdiv(rows, block), batch)](
            k_new, k_old, v_new, v_old, out,
            *k_new.stride()[:3], *k_old.stride()[:3], *v_new.stride()[:3], *v_old.stride()[:3],
            rows, k_heads, v_new.shape[1],
            R=block, KD=k_width, K_DIM=k_dim, VD=v_width, V_DIM=v_dim, L1=norm == "l1",
            num_warps=4, num_stages=2, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _padded(dim: int) -> int:
    return triton.next_power_of_2(dim) if dim else 1
