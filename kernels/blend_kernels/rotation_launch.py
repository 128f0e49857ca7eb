"""Launches `rotate_keys`."""

from __future__ import annotations

import torch

from blend_kernels.attention_launch import multiprocessors
from blend_kernels.rotation_kernel import rotate_tile
from blend_kernels.rotation_plain import Layout

# Elements of one load of a program: 8 per thread of four warps, 16 bytes of bf16.
_ELEMENTS = 2048


def launch_rotation(
    k: torch.Tensor,
    delta: int | torch.Tensor,
    inv_freq: torch.Tensor,
    layout: Layout,
    scale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write k, dequantised and turned, to `out`; arguments are checked."""
    if k.ndim == 3:
        k, out = k[None], out[None]
    batch, heads, tokens, dim = k.shape
    if k.numel() == 0:
        return
    scales = k if scale is None else scale.expand(k.shape)
    pairs = 1 << (layout.pairs - 1).bit_length()
    still = dim - 2 * layout.pairs
    rest = 0 if still == 0 else 1 << (still - 1).bit_length()
    block = max(1, min(_ELEMENTS // max(pairs, rest), 1 << (tokens - 1).bit_length()))
    blocks = -(-tokens // block)
    shares = max(1, min(heads, 4 * multiprocessors(k.device) // (blocks * batch)))
    per_token = isinstance(delta, torch.Tensor)
    steps = delta.contiguous() if isinstance(delta, torch.Tensor) else k
    rotate_tile[(blocks, batch, shares)](
        k, out, steps, inv_freq.contiguous(), scales,
        *k.stride()[:3], *out.stride()[:3], *(scales.stride() if scale is not None else (0, 0, 0, 0)),
        0 if per_token else delta, tokens, heads,
        T=block, P=pairs, PAIRS=layout.pairs, OFFSET=layout.offset, DIM=dim,
        REST=rest, INTERLEAVED=layout.interleaved, PER_TOKEN=per_token, SCALED=scale is not None,
        SCALE_DIMS=scale is not None and scales.stride(3) != 0,
        num_warps=4, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip
