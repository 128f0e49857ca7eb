"""Jit kernel that merges the partial results of split keys by their log-sum-exp."""
# mypy: ignore-errors
# (jit functions are Triton's language, not Python's: their arguments have no Python types)

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_splits"])
def combine_splits(
    part_ptr, part_lse_ptr, sink_ptr, out_ptr, lse_ptr,
    s_ps, s_pb, s_ph, s_pr, s_ms, s_mb, s_mh, s_ob, s_oh, s_or, s_lb, s_lh, n_heads, n_splits,
    VALUE_DIM: tl.constexpr, V: tl.constexpr, S: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    i_head = (tl.program_id(1) % n_heads).to(tl.int64)
    i_batch = (tl.program_id(1) // n_heads).to(tl.int64)
    # [S]
    o_split = tl.arange(0, S)
    m_split = o_split < n_splits
    p_m = part_lse_ptr + i_batch * s_mb + i_head * s_mh + i_row + o_split * s_ms
    b_lse = tl.load(p_m, mask=m_split, other=float("-inf"))
    b_max = tl.max(b_lse, 0)
    if SINKS:
        b_sink = tl.load(sink_ptr + i_head).to(tl.float32)
        b_max = tl.maximum(b_max, b_sink)
    b_w = tl.exp(b_lse - b_max)
    b_sum = tl.sum(b_w, 0)
    if SINKS:
        b_sum += tl.exp(b_sink - b_max)
    # [S, V]
    o_dim = tl.arange(0, V)
    p_x = part_ptr + i_batch * s_pb + i_head * s_ph + i_row * s_pr + o_split[:, None] * s_ps + o_dim[None, :]
    b_x = tl.load(p_x, mask=m_split[:, None] & (o_dim[None, :] < VALUE_DIM), other=0.0)
    b_out = tl.sum(b_x * b_w[:, None], 0) / b_sum
    p_o = out_ptr + i_batch * s_ob + i_head * s_oh + i_row * s_or + o_dim
    tl.store(p_o, b_out.to(out_ptr.dtype.element_ty), mask=o_dim < VALUE_DIM)
    if LSE:
        tl.store(lse_ptr + i_batch * s_lb + i_head * s_lh + i_row, b_max + tl.log(b_sum))
