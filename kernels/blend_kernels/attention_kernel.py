"""Jit kernel of `selective_attention`: one tile of rows against its visible keys (FlashAttention-2 with row positions).

Names follow the grammar of kernels/README.md, which also derives the ranges of the three loops. Scores are in units of
log 2, so that every exponential is one `exp2`.

`merge_parts` merges the partial results of split keys by their log-sum-exp.
"""

import triton
import triton.language as tl

# mypy: ignore-errors
# (jit functions are Triton's language, not Python's: their arguments have no Python types)


@triton.jit
def product(b_x, b_y, b_acc, PRECISION: tl.constexpr):
    if PRECISION == "interpreted":  # the interpreter cannot multiply bf16
        return tl.dot(b_x.to(tl.float32), b_y.to(tl.float32), b_acc)
    return tl.dot(b_x, b_y, b_acc, input_precision=PRECISION)


@triton.jit
def load_keys(
    ptr,
    i_key,
    s_n,
    i_low,
    i_end,
    N: tl.constexpr,
    OFFSET: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    # [N, D]: keys i_key.., dimensions OFFSET..; zeros outside of keys [i_low, i_end) and of the head
    o_key = tl.arange(0, N)
    o_dim = OFFSET + tl.arange(0, D)
    p_x = ptr + i_key.to(tl.int64) * s_n + o_key[:, None] * s_n + o_dim[None, :]
    if MASKED:
        m_key = (i_key + o_key >= i_low) & (i_key + o_key < i_end)
        if OFFSET + D > DIM:
            return tl.load(p_x, mask=m_key[:, None] & (o_dim[None, :] < DIM), other=0.0)
        return tl.load(p_x, mask=m_key[:, None], other=0.0)
    if OFFSET + D > DIM:
        return tl.load(p_x, mask=o_dim[None, :] < DIM, other=0.0)
    return tl.load(p_x)


@triton.jit
def attend_keys(
    b_acc0,
    b_acc1,
    b_max,
    b_sum,
    b_q0,
    b_q1,
    o_last,
    i_from,
    i_to,
    i_low,
    i_end,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    i_kdesc,
    i_vdesc,
    s_kn,
    s_vn,
    window,
    scale,
    cap,
    N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    MASKED: tl.constexpr,
):
    # a positive factor turns scores into units of log 2; the maximum is taken before it, and the exponent is one FMA
    unit = cap if CAPPED else scale
    for i_key in tl.range(i_from, i_to, N):
        i_key = tl.multiple_of(i_key, N)
        # [M, N]
        if TMA:
            b_k0 = k_desc.load([i_kdesc + i_key, 0])
        else:
            b_k0 = load_keys(k_ptr, i_key, s_kn, i_low, i_end, N, 0, D0, HEAD_DIM, MASKED)
        b_s = product(b_q0, tl.trans(b_k0), tl.zeros([b_q0.shape[0], N], tl.float32), PRECISION)
        if D1 > 0:
            b_k1 = load_keys(k_ptr, i_key, s_kn, i_low, i_end, N, D0, D1, HEAD_DIM, MASKED)
            b_s = product(b_q1, tl.trans(b_k1), b_s, PRECISION)
        if CAPPED:
            # tanh(x) = 2 sigmoid(2x) - 1
            b_s = 2.0 / (1.0 + tl.exp2(-b_s * scale)) - 1.0
        if MASKED:
            o_key = i_key + tl.arange(0, N)
            m_seen = o_key[None, :] <= o_last[:, None]
            if WINDOWED:
                m_seen = m_seen & (o_key[None, :] > o_last[:, None] - window)
            b_s = tl.where(m_seen, b_s, float("-inf"))
        # [M]
        b_new = tl.maximum(b_max, tl.max(b_s, 1) * unit)
        # a row that has seen nothing yet keeps minus infinity; subtracting it from itself would be NaN
        b_ref = tl.where(b_new == float("-inf"), 0.0, b_new) if MASKED else b_new
        b_p = tl.exp2(b_s * unit - b_ref[:, None])
        b_old = tl.exp2(b_max - b_ref)
        b_sum = b_sum * b_old + tl.sum(b_p, 1)
        b_max = b_new
        # [M, V]
        if TMA:
            b_v0 = v_desc.load([i_vdesc + i_key, 0])
        else:
            b_v0 = load_keys(v_ptr, i_key, s_vn, i_low, i_end, N, 0, V0, VALUE_DIM, MASKED)
        b_w = b_p.to(b_v0.dtype)
        b_acc0 = product(b_w, b_v0, b_acc0 * b_old[:, None], PRECISION)
        if V1 > 0:
            b_v1 = load_keys(v_ptr, i_key, s_vn, i_low, i_end, N, V0, V1, VALUE_DIM, MASKED)
            b_acc1 = product(b_w, b_v1, b_acc1 * b_old[:, None], PRECISION)
    return b_acc0, b_acc1, b_max, b_sum


@triton.jit
def attend_ranges(
    b_q0,
    b_q1,
    o_last,
    i_from,
    i_full,
    i_ragged,
    i_low,
    i_stop,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    i_kdesc,
    i_vdesc,
    s_kn,
    s_vn,
    window,
    scale,
    cap,
    N: tl.constexpr,
    RAGGED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    # the three ranges of `key_loops`: ragged, seen by all rows, ragged
    b_max = tl.full([b_q0.shape[0]], float("-inf"), tl.float32)
    b_sum = tl.zeros([b_q0.shape[0]], tl.float32)
    b_acc0 = tl.zeros([b_q0.shape[0], V0], tl.float32)
    b_acc1 = tl.zeros([b_q0.shape[0], V1 if V1 > 0 else 16], tl.float32)
    if WINDOWED:
        b_acc0, b_acc1, b_max, b_sum = attend_keys(
            b_acc0, b_acc1, b_max, b_sum,
            b_q0, b_q1, o_last,
            i_from, i_full, i_low, i_stop,
            k_ptr, v_ptr, None, None, 0, 0, s_kn, s_vn,
            window, scale, cap,
            RAGGED, HEAD_DIM, VALUE_DIM, D0, D1, V0, V1,
            WINDOWED, CAPPED, PRECISION, False, True,
        )  # fmt: skip
    b_acc0, b_acc1, b_max, b_sum = attend_keys(
        b_acc0, b_acc1, b_max, b_sum,
        b_q0, b_q1, o_last,
        i_full, i_ragged, i_low, i_stop,
        k_ptr, v_ptr, k_desc, v_desc, i_kdesc, i_vdesc, s_kn, s_vn,
        window, scale, cap,
        N, HEAD_DIM, VALUE_DIM, D0, D1, V0, V1,
        WINDOWED, CAPPED, PRECISION, TMA, False,
    )  # fmt: skip
    return attend_keys(
        b_acc0, b_acc1, b_max, b_sum,
        b_q0, b_q1, o_last,
        i_ragged, i_stop, i_low, i_stop,
        k_ptr, v_ptr, None, None, 0, 0, s_kn, s_vn,
        window, scale, cap,
        RAGGED, HEAD_DIM, VALUE_DIM, D0, D1, V0, V1,
        WINDOWED, CAPPED, PRECISION, False, True,
    )  # fmt: skip


@triton.jit
def load_queries(p_q, o_d0, m_line, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    # [M, D0], [M, D1]: the queries of every line; the first again if a head is not cut in two
    b_q0 = tl.load(p_q + o_d0[None, :], mask=m_line[:, None] & (o_d0[None, :] < HEAD_DIM), other=0.0)
    b_q1 = b_q0
    if D1 > 0:
        o_d1 = D0 + tl.arange(0, D1)
        b_q1 = tl.load(p_q + o_d1[None, :], mask=m_line[:, None] & (o_d1[None, :] < HEAD_DIM), other=0.0)
    return b_q0, b_q1


@triton.jit
def lines_of(i_line, i_head, n_rows, GROUP: tl.constexpr, M: tl.constexpr):
    # row and query head of every line of a tile; lines past the end repeat the last row and are not stored
    o_line = i_line + tl.arange(0, M)
    o_row = tl.minimum(o_line // GROUP, n_rows - 1)
    return o_row, i_head * GROUP + o_line % GROUP, o_line < n_rows * GROUP


@triton.jit
def visible(pos_ptr, o_row, i_first, i_last, n_keys):
    # last visible key of every line; of the first row; one past that of the last row; none past the keys there are
    o_last = tl.minimum(tl.load(pos_ptr + o_row).to(tl.int32), n_keys - 1)
    i_end = tl.minimum(tl.load(pos_ptr + i_last).to(tl.int32) + 1, n_keys)
    return o_last, tl.load(pos_ptr + i_first).to(tl.int32), i_end


@triton.jit
def key_loops(i_first_end, i_end, window, N: tl.constexpr, WINDOWED: tl.constexpr, SPLIT: tl.constexpr):
    # ragged [i_from, i_full), seen by all rows [i_full, i_ragged), ragged [i_ragged, i_stop); all but i_stop on tile bounds
    i_low = 0
    i_full = 0
    if WINDOWED:
        i_low = tl.maximum(i_first_end - window + 1, 0)
        i_full = (tl.maximum(i_end - window, 0) + N - 1) // N * N
    i_from = i_low // N * N
    i_stop = i_end
    if SPLIT:
        # equal parts, in blocks, of what this tile sees; later parts may be empty
        split_keys = (tl.maximum(i_end - i_from, 0) + tl.num_programs(1) * N - 1) // (tl.num_programs(1) * N) * N
        i_from += tl.program_id(1) * split_keys
        i_stop = tl.minimum(i_end, i_from + split_keys)
    i_ragged = tl.maximum(tl.minimum((i_first_end + 1) // N * N, i_stop // N * N), i_from)
    i_full = tl.minimum(tl.maximum(i_full, i_from), i_ragged)
    return i_from, i_full, i_ragged, i_low, i_stop


@triton.jit
def add_sinks(b_acc0, b_acc1, b_max, b_sum, p_sink):
    b_sink = tl.load(p_sink).to(tl.float32) * 1.4426950408889634
    b_new = tl.maximum(b_max, b_sink)
    b_old = tl.exp2(b_max - b_new)
    return (b_acc0 * b_old[:, None], b_acc1 * b_old[:, None], b_new, b_sum * b_old + tl.exp2(b_sink - b_new))


@triton.jit
def store_results(
    b_acc0,
    b_acc1,
    b_max,
    b_sum,
    o_out,
    m_row,
    m_line,
    out_ptr,
    lse_ptr,
    VALUE_DIM: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
):
    # of every line; lines that are no row or saw nothing: zeros, and minus infinity as their log-sum-exp
    m_any = m_row & (b_sum != 0.0)
    b_norm = tl.where(m_any, b_sum, 1.0)
    b_lse = tl.where(m_any, (b_max + tl.log2(b_norm)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + o_out, b_lse, mask=m_line)
    p_o = out_ptr + o_out[:, None] * VALUE_DIM
    o_v0 = tl.arange(0, V0)
    b_o0 = tl.where(m_any[:, None], b_acc0 / b_norm[:, None], 0.0).to(out_ptr.dtype.element_ty)
    tl.store(p_o + o_v0[None, :], b_o0, mask=m_line[:, None] & (o_v0[None, :] < VALUE_DIM))
    if V1 > 0:
        o_v1 = V0 + tl.arange(0, V1)
        b_o1 = tl.where(m_any[:, None], b_acc1 / b_norm[:, None], 0.0).to(out_ptr.dtype.element_ty)
        tl.store(p_o + o_v1[None, :], b_o1, mask=m_line[:, None] & (o_v1[None, :] < VALUE_DIM))


@triton.jit(do_not_specialize=["n_rows", "n_keys", "n_batch", "window"])
def attend_tile(
    q_ptr,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    pos_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    s_qb,
    s_qh,
    s_qr,
    s_kb,
    s_kh,
    s_kn,
    s_vb,
    s_vh,
    s_vn,
    n_rows,
    n_keys,
    n_batch,
    n_kv_heads,
    window,
    scale,
    cap,
    GROUP: tl.constexpr,
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
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # heads fastest, then the batch, tiles from the last (heaviest) to the first
    i_head = tl.program_id(0) % n_kv_heads
    i_batch = tl.program_id(0) // n_kv_heads % n_batch
    n_tiles = tl.num_programs(0) // (n_kv_heads * n_batch)
    i_tile = n_tiles - 1 - tl.program_id(0) // (n_kv_heads * n_batch)

    # [M]
    o_row, o_head, m_line = lines_of(i_tile * M, i_head, n_rows, GROUP, M)
    i_first = i_tile * M // GROUP
    i_last = tl.minimum((i_tile * M + M - 1) // GROUP, n_rows - 1)
    o_last, i_first_end, i_end = visible(pos_ptr, o_row, i_first, i_last, n_keys)
    i_from, i_full, i_ragged, i_low, i_stop = key_loops(i_first_end, i_end, window, N, WINDOWED, SPLIT)
    i_kdesc = 0
    i_vdesc = 0
    if TMA:
        i_kdesc = (i_batch * (s_kb // s_kn) + i_head * (s_kh // s_kn)).to(tl.int32)
        i_vdesc = (i_batch * (s_vb // s_vn) + i_head * (s_vh // s_vn)).to(tl.int32)

    # [M, D]
    i_batch = i_batch.to(tl.int64)
    p_q = q_ptr + i_batch * s_qb + o_head.to(tl.int64)[:, None] * s_qh + o_row.to(tl.int64)[:, None] * s_qr
    b_q0, b_q1 = load_queries(p_q, tl.arange(0, D0), m_line, HEAD_DIM, D0, D1)
    k_ptr += i_batch * s_kb + i_head.to(tl.int64) * s_kh
    v_ptr += i_batch * s_vb + i_head.to(tl.int64) * s_vh
    b_acc0, b_acc1, b_max, b_sum = attend_ranges(
        b_q0, b_q1, o_last,
        i_from, i_full, i_ragged, i_low, i_stop,
        k_ptr, v_ptr, k_desc, v_desc, i_kdesc, i_vdesc, s_kn, s_vn,
        window, scale, cap,
        N, RAGGED, HEAD_DIM, VALUE_DIM, D0, D1, V0, V1,
        WINDOWED, CAPPED, PRECISION, TMA,
    )  # fmt: skip

    # a zero that the compiler does not know: it computes these anew, instead of keeping registers for them in the loops
    # (for the fp32 results of large tiles it would keep none, and computing them takes more)
    zero = 0 if SPLIT and M >= 128 else n_batch // (n_batch + 1)
    o_row, o_head, m_line = lines_of(i_tile * M + zero, i_head, n_rows, GROUP, M)
    if SINKS:
        b_acc0, b_acc1, b_max, b_sum = add_sinks(b_acc0, b_acc1, b_max, b_sum, sink_ptr + o_head)
    i_part = tl.program_id(1).to(tl.int64) * n_batch + i_batch
    o_out = (i_part * n_rows + o_row) * n_kv_heads * GROUP + o_head
    store_results(
        b_acc0, b_acc1, b_max, b_sum,
        o_out, m_line, m_line,
        out_ptr, lse_ptr,
        VALUE_DIM, V0, V1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_splits", "n_heads"])
def merge_parts(
    part_ptr,
    part_lse_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    n_heads,
    n_splits,
    VALUE_DIM: tl.constexpr,
    V: tl.constexpr,
    S: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SINKS: tl.constexpr,
):
    # one row and head: parts lie in [splits, rows, heads], the results in [rows, heads]
    i_out = tl.program_id(0).to(tl.int64)
    n_out = tl.num_programs(0).to(tl.int64)
    # [S]
    o_split = tl.arange(0, S)
    b_lse = tl.load(part_lse_ptr + o_split * n_out + i_out, mask=o_split < n_splits, other=float("-inf"))
    b_max = tl.max(b_lse, 0)
    if SINKS:
        b_sink = tl.load(sink_ptr + i_out % n_heads).to(tl.float32)
        b_max = tl.maximum(b_max, b_sink)
    b_max = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_sum = tl.sum(tl.exp(b_lse - b_max), 0)
    if SINKS:
        b_sum += tl.exp(b_sink - b_max)
    b_norm = tl.where(b_sum != 0.0, b_sum, 1.0)
    tl.store(lse_ptr + i_out, tl.where(b_sum != 0.0, b_max + tl.log(b_norm), float("-inf")))
    # [AT_ONCE, V]: parts that saw nothing may never have been written
    o_dim = tl.arange(0, V)
    m_dim = o_dim < VALUE_DIM
    b_out = tl.zeros([V], tl.float32)
    for i_split in tl.static_range(0, S, AT_ONCE):
        o_split = i_split + tl.arange(0, AT_ONCE)
        b_part = tl.load(part_lse_ptr + o_split * n_out + i_out, mask=o_split < n_splits, other=float("-inf"))
        m_part = (b_part != float("-inf"))[:, None] & m_dim[None, :]
        p_x = part_ptr + (o_split[:, None] * n_out + i_out) * VALUE_DIM + o_dim[None, :]
        b_out += tl.sum(tl.load(p_x, mask=m_part, other=0.0) * tl.exp(b_part - b_max)[:, None], 0)
    tl.store(out_ptr + i_out * VALUE_DIM + o_dim, (b_out / b_norm).to(out_ptr.dtype.element_ty), mask=m_dim)
