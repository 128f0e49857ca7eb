"""Launches `kv_deviation`."""

from __future__ import annotations

import torch

from blend_kernels.deviation_kernel import deviation_rows

Pair = tuple[torch.Tensor, torch.Tensor]
_ELEMENTS = 2048


def launch_deviation(keys: Pair | None, values: Pair | None, norm: str) -> torch.Tensor:
    """Deviation of the pairs that are given, fp32 `[batch, rows]`; arguments are checked."""
    some = keys or values
    assert some is not None
    batch, _, rows, _ = some[0].shape
    out = torch.empty(batch, rows, dtype=torch.float32, device=some[0].device)
    k_dim, v_dim = (0 if pair is None else int(pair[0].shape[3]) for pair in (keys, values))
    block = max(1, _ELEMENTS // _power_of_two(max(k_dim, v_dim)))
    tensors = [*(keys or some), *(values or some)]
    strides = [stride for tensor in tensors for stride in tensor.stride()[:3]]
    if rows:
        deviation_rows[(-(-rows // block), batch)](
            *tensors, out, *strides, rows, tensors[0].shape[1], tensors[2].shape[1],
            R=block, KD=_power_of_two(k_dim), K_DIM=k_dim, VD=_power_of_two(v_dim), V_DIM=v_dim, L1=norm == "l1",
            num_warps=4, num_stages=2, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _power_of_two(n: int) -> int:
    return 1 if n == 0 else 1 << (n - 1).bit_length()
