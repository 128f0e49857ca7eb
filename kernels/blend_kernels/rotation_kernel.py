"""Jit kernel and launcher of `rotate_keys`."""

import triton
import triton.language as tl
from torch import Tensor

from blend_kernels.attention_launch import multiprocessors
from blend_kernels.checks import Layout

# mypy: ignore-errors
# (jit functions are Triton's language, not Python's: their arguments have no Python types)


@triton.jit
def angles(
    delta_ptr, freq_ptr, delta, i_token, n_tokens,
    T: tl.constexpr, P: tl.constexpr, PAIRS: tl.constexpr, PER_TOKEN: tl.constexpr,
):  # fmt: skip
    # [P]: turns per position as a 64-bit fraction of a turn, so that the product with delta wraps exactly at whole turns
    o_pair = tl.arange(0, P)
    b_turn = tl.load(freq_ptr + o_pair, mask=o_pair < PAIRS, other=0.0).to(tl.float64) * 0.15915494309189535
    b_turn = b_turn - tl.floor(b_turn + 0.5)
    b_step = (b_turn * 1.8446744073709552e19).to(tl.int64)
    # [T, P]
    o_token = i_token + tl.arange(0, T)
    if PER_TOKEN:
        b_delta = tl.load(delta_ptr + o_token, mask=o_token < n_tokens, other=0).to(tl.int64)
    else:
        b_delta = tl.zeros([T], tl.int64) + delta
    return sine_cosine(((b_delta[:, None] * b_step[None, :]) >> 32).to(tl.int32))


@triton.jit
def sine_cosine(b_part):
    # of b_part / 2**32 turns: the nearest quarter turn, and Cephes' polynomials (sinf, cosf) on the remaining +-pi/4
    b_quarter = (b_part + 536870912) >> 30
    b_x = (b_part - (b_quarter << 30)).to(tl.float32) * 1.4629180792671596e-09
    b_z = b_x * b_x
    b_sin = ((-1.9515295891e-4 * b_z + 8.3321608736e-3) * b_z - 1.6666654611e-1) * b_z * b_x + b_x
    b_cos = (
        ((2.443315711809948e-5 * b_z - 1.388731625493765e-3) * b_z + 4.166664568298827e-2) * b_z * b_z - 0.5 * b_z + 1.0
    )
    m_odd = (b_quarter & 1) == 1
    b_s, b_c = tl.where(m_odd, b_cos, b_sin), tl.where(m_odd, b_sin, b_cos)
    return tl.where(((b_quarter + 1) & 2) == 2, -b_c, b_c), tl.where((b_quarter & 2) == 2, -b_s, b_s)


@triton.jit
def load_states(p_x, m_x):
    return tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["delta", "n_tokens"])
def rotate_tile(
    k_ptr, out_ptr, delta_ptr, freq_ptr, s_kb, s_kh, s_kt, s_ob, s_oh, s_ot,
    delta, n_tokens, n_heads,
    T: tl.constexpr, P: tl.constexpr, PAIRS: tl.constexpr, OFFSET: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, PER_TOKEN: tl.constexpr,
):  # fmt: skip
    i_token = tl.program_id(0) * T
    i_batch = tl.program_id(1).to(tl.int64)
    b_cos, b_sin = angles(delta_ptr, freq_ptr, delta, i_token, n_tokens, T, P, PAIRS, PER_TOKEN)
    o_token = (i_token + tl.arange(0, T)).to(tl.int64)[:, None]
    m_token = o_token < n_tokens
    dtype = out_ptr.dtype.element_ty
    for i_head in range(tl.program_id(2), n_heads, tl.num_programs(2)):
        p_k = k_ptr + i_batch * s_kb + tl.cast(i_head, tl.int64) * s_kh + o_token * s_kt
        p_o = out_ptr + i_batch * s_ob + tl.cast(i_head, tl.int64) * s_oh + o_token * s_ot
        if INTERLEAVED:
            # [T, 2P] in memory order, members of a pair side by side
            o_dim = OFFSET + tl.arange(0, 2 * P)[None, :]
            m_x = m_token & (o_dim < OFFSET + 2 * PAIRS)
            b_x = load_states(p_k + o_dim, m_x)
            b_first, b_second = tl.split(tl.reshape(b_x, [T, P, 2]))
            b_y = tl.join(b_first * b_cos - b_second * b_sin, b_second * b_cos + b_first * b_sin)
            tl.store(p_o + o_dim, tl.reshape(b_y, [T, 2 * P]).to(dtype), mask=m_x)
        else:
            # [T, P]
            o_dim = OFFSET + tl.arange(0, P)[None, :]
            m_x = m_token & (o_dim < OFFSET + PAIRS)
            b_first = load_states(p_k + o_dim, m_x)
            b_second = load_states(p_k + o_dim + PAIRS, m_x)
            tl.store(p_o + o_dim, (b_first * b_cos - b_second * b_sin).to(dtype), mask=m_x)
            tl.store(p_o + o_dim + PAIRS, (b_second * b_cos + b_first * b_sin).to(dtype), mask=m_x)
        if REST > 0:
            # [T, REST]: dimensions before and after those that turn
            o_rest = tl.arange(0, REST)[None, :]
            o_rest = tl.where(o_rest < OFFSET, o_rest, o_rest + 2 * PAIRS)
            m_x = m_token & (o_rest < DIM)
            b_x = load_states(p_k + o_rest, m_x)
            tl.store(p_o + o_rest, b_x.to(dtype), mask=m_x)


# Elements of one load of a program: 8 per thread of four warps, 16 bytes of bf16.
_ELEMENTS = 2048


def launch_rotation(
    k: Tensor,
    delta: int | Tensor,
    inv_freq: Tensor,
    layout: Layout,
    out: Tensor,
) -> None:
    """Write k, rotated, to `out`; arguments are checked."""
    if k.numel() == 0:
        return
    if k.ndim == 3:
        k = k[None]
        out = out[None]
    batch, heads, tokens, dim = k.shape
    pairs = triton.next_power_of_2(layout.pairs)
    still_dims = dim - 2 * layout.pairs
    rest = triton.next_power_of_2(still_dims) if still_dims else 0
    block = max(1, min(_ELEMENTS // max(pairs, rest), triton.next_power_of_2(tokens)))
    blocks = triton.cdiv(tokens, block)
    shares = max(1, min(heads, 4 * multiprocessors(k.device) // (blocks * batch)))
    per_token = isinstance(delta, Tensor)
    delta_of_token = delta.contiguous() if per_token else k
    one_delta = 0 if per_token else delta
    rotate_tile[(blocks, batch, shares)](
        k, out, delta_of_token, inv_freq.contiguous(), *k.stride()[:3], *out.stride()[:3], one_delta, tokens, heads,
        T=block, P=pairs, PAIRS=layout.pairs, OFFSET=layout.offset, DIM=dim, REST=rest, INTERLEAVED=layout.interleaved,
        PER_TOKEN=per_token, num_warps=4, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip
