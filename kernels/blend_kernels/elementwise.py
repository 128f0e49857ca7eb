"""RMSNorm and a gated MLP's activation, each in one pass over memory, and their plain-torch twins.

HuggingFace's RMSNorm takes six launches with float32 results between them: 36 bytes of traffic for a bfloat16 element, where
the kernel reads 2 and writes 2. The gated activation takes two launches and 10 bytes, the kernel 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blend_kernels.backend import Backend, choose_backend
from blend_kernels.checks import FLOATS, check_kind, check_shape


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    plus_one: bool = False,
    rounds_first: bool = True,
    backend: Backend | None = None,
) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension (Zhang and Sennrich 2019), in float32.

    Args:
        x: `[..., dim]`.
        weight: `[dim]`, of the same dtype.
        eps: keeps the root from zero.
        plus_one: multiply by `1 + weight` instead, as Gemma does.
        rounds_first: round to the dtype of `x` before multiplying, as Llama does; else once, afterwards.
        backend: "triton" or "torch"; None chooses by device.

    Returns:
        Of the shape and dtype of `x`.

    Raises:
        ValueError: wrong shapes, dtypes or devices, or a backend that cannot compute this.
    """
    check_kind("x", x, FLOATS, x.device)
    check_shape("weight", weight, x.shape[-1:])
    check_kind("weight", weight, (x.dtype,), x.device)
    if choose_backend(backend, x) == "triton":
        from blend_kernels.elementwise_kernel import launch_rms_norm

        return launch_rms_norm(x.contiguous(), weight.contiguous(), eps, plus_one, rounds_first)
    wide = x.float()
    mean_square = wide.pow(2).mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(mean_square + eps)
    factor = 1 + weight.float() if plus_one else weight.float()
    if rounds_first:
        normed = normed.to(x.dtype).float()
    return (normed * factor).to(x.dtype)


def silu_mul(gate: Tensor, up: Tensor, *, backend: Backend | None = None) -> Tensor:
    """`silu(gate) * up` (SwiGLU, Shazeer 2020); `silu(gate)` is rounded to the dtype of `gate` before it is multiplied.

    Args:
        gate: any shape.
        up: of the same shape and dtype.
        backend: "triton" or "torch"; None chooses by device.

    Returns:
        Of the shape and dtype of `gate`.

    Raises:
        ValueError: wrong shapes, dtypes or devices, or a backend that cannot compute this.
    """
    check_kind("gate", gate, FLOATS, gate.device)
    check_shape("up", up, gate.shape)
    check_kind("up", up, (gate.dtype,), gate.device)
    if choose_backend(backend, gate) == "triton":
        from blend_kernels.elementwise_kernel import launch_silu_mul

        return launch_silu_mul(gate.contiguous(), up.contiguous())
    return torch.nn.functional.silu(gate) * up
