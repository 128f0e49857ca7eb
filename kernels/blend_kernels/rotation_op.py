"""The public `rotate_keys`."""

from __future__ import annotations

import torch

from blend_kernels.backend import Backend, choose_backend
from blend_kernels.checks import FLOATS, WHOLE, check_beside, check_contiguous, require
from blend_kernels.overlap import share_memory
from blend_kernels.rotation_plain import Deltas, Layout, rotate_keys_plain

QUANTISED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def rotate_keys(
    k: torch.Tensor,
    delta: int | torch.Tensor | Deltas,
    inv_freq: torch.Tensor,
    *,
    interleaved: bool = False,
    rotary_offset: int = 0,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Move rotary keys by `delta` positions while copying them, in one pass: R(p + delta) = R(delta) R(p) (RoFormer, 2021).

    k: `[..., kv_heads, tokens, head_dim]`, three or four dimensions, any strides with a contiguous last dimension,
    floating point, or int8 / fp8 with a `scale`.
    delta: one int, or int64 / int32 `[tokens]` (several chunks in one call), in a `Deltas` where many calls have the same
    ones; for keys that were never rotated it is the position itself. inv_freq: `[pairs]`, radians per position, at least fp32,
    on any device; dimensions `rotary_offset` to `rotary_offset + 2 * pairs - 1` turn, the others are copied. interleaved: pairs
    are (0, 1), (2, 3) instead of (i, i + pairs). A factor that the model puts on cos and sin is part of k already and is not
    applied.
    scale: floating point, multiplies k before it turns; any shape that broadcasts to k's (`[tokens, 1]`, `[kv_heads, 1, 1]`).
    out: of k's shape, floating point, such as a slice of the blended cache; by default a new tensor in k's dtype (fp32
    when k is quantised). Angles are exact to fp32 however far keys move; products are fp32.

    Returns `out`. Never writes k. Raises ValueError for shapes, dtypes and devices, and for an out that shares memory with
    k (turning in place would turn again on the next use; other tokens of the same buffer are fine) or with itself.
    """
    layout = Layout(_pairs(inv_freq), rotary_offset, interleaved)
    _check_states(k, layout, scale)
    steps = delta.values if isinstance(delta, Deltas) else delta
    require(
        isinstance(steps, int) or (isinstance(steps, torch.Tensor) and tuple(steps.shape) == (k.shape[-2],)),
        f"delta must be an int or an integer tensor [{k.shape[-2]}], one per token, got {_shape(steps)}",
    )
    if isinstance(steps, torch.Tensor):
        check_beside("delta", steps, k, WHOLE)
    if out is None:
        out = torch.empty(k.shape, dtype=torch.float32 if k.dtype in QUANTISED else k.dtype, device=k.device)
    _check_out(out, k)
    check_contiguous(k=k, out=out)
    inv_freq = inv_freq.to(k.device)
    if choose_rotation_backend(k, out, backend) == "triton":
        from blend_kernels.rotation_launch import launch_rotation

        launch_rotation(k, steps, inv_freq, layout, scale, out)
    else:
        turns = Deltas(delta) if isinstance(delta, torch.Tensor) else delta
        rotate_keys_plain(k, turns, inv_freq, layout, scale, out)
    return out


def choose_rotation_backend(k: torch.Tensor, out: torch.Tensor, asked: Backend | None) -> Backend:
    """As `choose_backend`; fp8 on GPUs older than compute capability 8.9 goes to torch."""
    old = k.is_cuda and torch.cuda.get_device_capability(k.device) < (8, 9)
    beyond = k.dtype.itemsize == 1 and k.dtype != torch.int8 and old
    return "torch" if asked is None and beyond else choose_backend(asked, k, out)


def _pairs(inv_freq: torch.Tensor) -> int:
    require(
        inv_freq.ndim == 1 and inv_freq.shape[0] > 0 and inv_freq.dtype in (torch.float32, torch.float64),
        f"inv_freq must be [rotary_dim / 2] in fp32 or fp64 (half precision loses whole turns), got {_shape(inv_freq)}",
    )
    require(not inv_freq.is_meta, "inv_freq is on meta, where there are no numbers")
    return int(inv_freq.shape[0])


def _check_states(k: torch.Tensor, layout: Layout, scale: torch.Tensor | None) -> None:
    require(k.ndim in (3, 4), f"k must be [batch, kv_heads, tokens, head_dim] or without batch, got {list(k.shape)}")
    require(k.dtype in FLOATS or k.dtype in QUANTISED, f"k must be floating point or int8, got {k.dtype}")
    require(k.dtype in FLOATS or scale is not None, f"k is {k.dtype}: give the scale that dequantises it")
    stop = layout.offset + 2 * layout.pairs
    require(
        layout.offset >= 0 and stop <= k.shape[-1],
        f"dimensions {layout.offset} to {stop} should turn, but head_dim is {k.shape[-1]}",
    )
    if scale is not None:
        fits = scale.ndim <= k.ndim and all(
            s in (1, n) for s, n in zip(reversed(scale.shape), reversed(k.shape), strict=False)
        )
        require(fits, f"scale {list(scale.shape)} does not broadcast to k {list(k.shape)}")
        check_beside("scale", scale, k, FLOATS)


def _check_out(out: torch.Tensor, k: torch.Tensor) -> None:
    require(out.shape == k.shape, f"out must have the shape of k, {list(k.shape)}, got {list(out.shape)}")
    require(out.dtype in FLOATS, f"out must be floating point, got {out.dtype}")
    require(out.device == k.device, f"out is on {out.device}, k on {k.device}; copy k there first")
    repeated = any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True))
    require(not repeated, "out has elements that share memory (a dimension of stride 0); give one of its own")
    require(not share_memory(k, out), "out shares memory with k; turning in place is refused")


def _shape(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
