"""The public op `kv_deviation` and its plain-torch twin."""

from __future__ import annotations

from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from blend_kernels.backend import Backend, choose_backend
from blend_kernels.checks import FLOATS, check_contiguous, require


@torch.no_grad()
def deviation_plain(
    new: Tensor,
    old: Tensor,
    norm: str,
) -> Tensor:
    """Distance of one pair, fp32 `[batch, rows]`, of checked arguments."""
    difference = new.float() - old.float()
    if norm == "l1":
        return difference.abs_().sum((1, 3))
    squares: Tensor = torch.linalg.vecdot(difference, difference)
    return squares.sum(1)


Norm = Literal["l2sq", "l1"]
Parts = Literal["k", "v", "kv"]


def kv_deviation(
    k_new: Tensor | None,
    k_old: Tensor | None,
    v_new: Tensor | None,
    v_old: Tensor | None,
    *,
    norm: Norm = "l2sq",
    parts: Parts = "v",
    backend: Backend | None = None,
) -> Tensor:
    """Distance of fresh from stored keys or values per row, summed over heads and dimensions in fp32.

    Args:
        k_new: fresh keys `[batch, kv_heads, rows, dim]`, any strides; may be None if `parts` is "v".
        k_old: stored keys of the same shape; the dtype may differ.
        v_new: fresh values; dim may differ from the keys'. May be None if `parts` is "k".
        v_old: stored values of the same shape; the dtype may differ.
        norm: "l2sq" sums squared differences, "l1" absolute differences.
        parts: "k", "v" or "kv".
        backend: "triton" or "torch"; None chooses by device.

    Returns:
        fp32 `[batch, rows]`.

    Raises:
        ValueError: wrong shapes, dtypes or devices.
    """
    require(norm in ("l2sq", "l1"), f"norm must be 'l2sq' or 'l1', got {norm!r}")
    require(parts in ("k", "v", "kv"), f"parts must be 'k', 'v' or 'kv', got {parts!r}")
    keys = _pair(k_new, k_old, "k") if "k" in parts else None
    values = _pair(v_new, v_old, "v") if "v" in parts else None
    pairs = [pair for pair in (keys, values) if pair is not None]
    sizes = {(new.shape[0], new.shape[2]) for new, _ in pairs}
    require(len(sizes) == 1, "keys and values must have the same batch and rows")
    devices = [str(new.device) for new, _ in pairs]
    require(len(set(devices)) == 1, f"keys and values must be on the same device, got {', '.join(devices)}")
    if choose_backend(backend, *chain(*pairs)) == "triton":
        from blend_kernels.deviation_kernel import launch_deviation

        return launch_deviation(keys, values, norm)
    deviations = [deviation_plain(new, old, norm) for new, old in pairs]
    return deviations[0] if len(deviations) == 1 else deviations[0] + deviations[1]


def _pair(
    new: Tensor | None,
    old: Tensor | None,
    name: str,
) -> tuple[Tensor, Tensor]:
    if new is None or old is None:
        raise ValueError(f"{name}_new and {name}_old are needed for the parts asked for")
    require(
        new.ndim == 4 and new.shape == old.shape,
        f"{name}_new, {name}_old must both be [batch, kv_heads, rows, dim], got {list(new.shape)}, {list(old.shape)}",
    )
    require(new.dtype in FLOATS and old.dtype in FLOATS, f"{name} must be floating point, got {new.dtype}, {old.dtype}")
    check_contiguous(**{f"{name}_new": new, f"{name}_old": old})
    require(new.device == old.device, f"{name}_new is on {new.device}, {name}_old on {old.device}; move one of them")
    return new, old
