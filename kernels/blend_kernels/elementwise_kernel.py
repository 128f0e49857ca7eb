"""Jit kernels and launchers of `rms_norm` and `silu_mul`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: ignore-errors
# (jit functions are Triton's language, not Python's: their arguments have no Python types)


@triton.jit(do_not_specialize=["n_rows", "eps"])
def norm_rows(
    x_ptr,
    w_ptr,
    out_ptr,
    n_rows,
    eps,
    R: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    # [R, D]
    o_row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)[:, None]
    o_dim = tl.arange(0, D)[None, :]
    m_dim = o_dim < DIM
    m_x = (o_row < n_rows) & m_dim
    b_x = tl.load(x_ptr + o_row * DIM + o_dim, mask=m_x, other=0.0).to(tl.float32)
    # [R]
    b_mean = tl.sum(b_x * b_x, 1) / DIM
    # [R, D]
    b_out = b_x * tl.rsqrt(b_mean + eps)[:, None]
    if ROUNDS_FIRST:
        b_out = b_out.to(out_ptr.dtype.element_ty).to(tl.float32)
    b_w = tl.load(w_ptr + o_dim, mask=m_dim, other=0.0).to(tl.float32)
    if PLUS_ONE:
        b_w += 1
    tl.store(out_ptr + o_row * DIM + o_dim, (b_out * b_w).to(out_ptr.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=["n_elements"])
def gate_elements(gate_ptr, up_ptr, out_ptr, n_elements, N: tl.constexpr):
    # [N]
    o_x = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    m_x = o_x < n_elements
    b_gate = tl.load(gate_ptr + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_silu = (b_gate / (1 + tl.exp(-b_gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    b_up = tl.load(up_ptr + o_x, mask=m_x, other=0.0).to(tl.float32)
    tl.store(out_ptr + o_x, (b_silu * b_up).to(out_ptr.dtype.element_ty), mask=m_x)


_ELEMENTS = 2048  # of a program, unless one row has more
_MANY = 4096  # elements that take eight warps


def launch_rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool, rounds_first: bool) -> Tensor:
    """RMSNorm of checked, contiguous arguments."""
    out = torch.empty_like(x)
    dim = x.shape[-1]
    rows = x.numel() // dim
    width = triton.next_power_of_2(dim)
    block = max(1, _ELEMENTS // width)
    if rows:
        norm_rows[(triton.cdiv(rows, block),)](
            x,
            weight,
            out,
            rows,
            eps,
            R=block,
            D=width,
            DIM=dim,
            PLUS_ONE=plus_one,
            ROUNDS_FIRST=rounds_first,
            num_warps=8 if width >= _MANY else 4,
            num_stages=2,
            enable_fp_fusion=True,
        )
    return out


def launch_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The gated activation of checked, contiguous arguments."""
    out = torch.empty_like(gate)
    count = gate.numel()
    if count:
        gate_elements[(triton.cdiv(count, _ELEMENTS),)](
            gate, up, out, count, N=_ELEMENTS, num_warps=4, num_stages=2, enable_fp_fusion=True
        )
    return out
