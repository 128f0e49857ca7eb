"""Checks of what callers pass to the public ops: `ValueError` with one clear line instead of wrong numbers.

Shapes, dtypes, strides and devices are checked in every call, which takes microseconds. Numbers (do positions ascend, are
they in range?) are checked where plain torch runs on a CPU, which reads them anyway. Kernels' callers have them checked with
`KVBLEND_KERNEL_CHECKS=1`: on a GPU the host then waits for the device.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from blend_kernels.backend import Backend
from blend_kernels.positions import Positions
from blend_kernels.work import Rule

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WHOLE = (torch.int64, torch.int32)
SWITCH = "KVBLEND_KERNEL_CHECKS"


def reads_numbers(x: Tensor, backend: Backend) -> bool:
    """Whether the numbers of `x` are checked, for a call that runs on this backend."""
    if backend == "torch" and x.device.type == "cpu":
        return True
    if os.environ.get(SWITCH) != "1" or x.is_meta:
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def check_kind(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    """Require one of the dtypes, and the device of the other arguments."""
    if x.dtype not in dtypes:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} must be {kinds}, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device} like the others, got {x.device}; move it there first")


def check_states(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    """`check_kind`, and a contiguous last dimension, which every implementation reads at once."""
    if x.dtype not in dtypes or x.device != device:
        check_kind(name, x, dtypes, device)
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"the last dimension of {name} must be contiguous; call .contiguous()")


def check_shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """Require this shape."""
    if x.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, got {list(x.shape)}")


def check_queries(q: Tensor, k: Tensor) -> None:
    """Require `[batch, heads, rows, head_dim]` and `[batch, kv_heads, keys, head_dim]` of one dtype and device."""
    if q.ndim != 4:
        raise ValueError(f"q must be [batch, heads, rows, head_dim], got {list(q.shape)}")
    if k.ndim != 4:
        raise ValueError(f"k must be [batch, kv_heads, keys, head_dim], got {list(k.shape)}")
    batch, heads, rows, dim = q.shape
    key_batch, kv_heads, keys, key_dim = k.shape
    if key_batch != batch or key_dim != dim:
        raise ValueError(f"k has batch {key_batch} and head_dim {key_dim}, q has {batch} and {dim}; they must be equal")
    check_heads(heads, kv_heads)
    if keys == 0 and rows > 0:
        raise ValueError("k has no keys; every row must see its own key")
    check_states("q", q, FLOATS, q.device)
    check_states("k", k, (q.dtype,), q.device)


def check_heads(heads: int, kv_heads: int) -> None:
    """Require a whole number of query heads for each KV head."""
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} kv heads")


def check_values(v: Tensor, k: Tensor) -> None:
    """Require `[batch, kv_heads, keys, value_dim]`, with the dtype and device of k."""
    if v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v must be [batch, kv_heads, keys] = {list(k.shape[:3])} by any value_dim, got {list(v.shape)}"
        )
    check_states("v", v, (k.dtype,), k.device)


def checked_rule(window: int | None, softcap: float | None, scale: float | None, head_dim: int) -> Rule:
    """The options of an attention, with the default scale filled in."""
    if window is not None and not (isinstance(window, int) and window >= 1):
        raise ValueError(f"window must be None or a whole number of at least 1, got {window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be None or positive, got {softcap}")
    if scale is None:
        scale = head_dim**-0.5
    if not scale > 0:
        raise ValueError(f"scale must be None or positive, got {scale}")
    return Rule(window, softcap, scale)


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Require one logit for each query head."""
    if sinks is not None:
        check_shape("sinks", sinks, (q.shape[1],))
        check_kind("sinks", sinks, FLOATS, q.device)


def check_lse(lse: Tensor, q: Tensor) -> None:
    """Require a log-sum-exp, fp32 `[batch, heads, rows]`."""
    check_shape("lse", lse, q.shape[:3])
    check_kind("lse", lse, (torch.float32,), q.device)


def check_positions(positions: Positions, q: Tensor, keys: int, backend: Backend) -> None:
    """Require one position for each row, ascending and inside the keys; the order is checked once for all layers."""
    if not isinstance(positions, Positions):
        raise ValueError(f"positions must be Positions(tensor), which calls share, got a {type(positions).__name__}")
    values = positions.values
    check_rows("positions", values, q.shape[2], q.device)
    if values.numel() == 0 or not reads_numbers(values, backend):
        return
    if not positions.ascend:
        raise ValueError("positions must be sorted in ascending order; sort them together with the rows of q")
    first = positions.ends[0]
    last = positions.ends[-1]
    if first < 0 or last >= keys:
        raise ValueError(f"positions must lie in [0, {keys}), got {first} to {last}")


def check_rows(name: str, numbers: Tensor, rows: int, device: torch.device) -> None:
    """Require one whole number for each row."""
    check_shape(name, numbers, (rows,))
    check_kind(name, numbers, WHOLE, device)


def check_turn(name: str, inv_freq: Tensor, offset: int, head_dim: int) -> None:
    """Require frequencies whose pairs lie inside the head."""
    if inv_freq.ndim != 1 or inv_freq.dtype not in (torch.float32, torch.float64):
        kind = f"{inv_freq.dtype} {list(inv_freq.shape)}"
        raise ValueError(f"{name}: inv_freq must be [pairs] in float32 or float64, got {kind}")
    stop = offset + 2 * inv_freq.shape[0]
    if offset < 0 or stop > head_dim:
        raise ValueError(f"{name}: dimensions {offset} to {stop} should turn, but head_dim is {head_dim}")


def check_written(name: str, x: Tensor) -> None:
    """Require a tensor whose elements do not share memory, because an op writes each of them."""
    if 0 in x.stride() and any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        raise ValueError(f"elements of {name} share memory (a dimension of stride 0); allocate it whole")


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether an element of `x` overlaps one of `y`. Interleaved views, such as other tokens of a cache, do not."""
    if x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr() or x.is_meta:
        return False
    return np.shares_memory(_Extent(x), _Extent(y))


class _Extent:
    """Where a tensor lies, for NumPy, which computes with addresses alone."""

    def __init__(self, x: Tensor) -> None:
        strides = tuple(stride * x.itemsize for stride in x.stride())
        self.__array_interface__ = {
            "data": (x.data_ptr(), False),
            "shape": tuple(x.shape),
            "strides": strides,
            "typestr": f"|V{x.itemsize}",
            "version": 3,
        }
