"""Chooses the implementation of an op: Triton for tensors on a GPU, plain torch elsewhere."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["triton", "torch"]


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


# Widest head that the attention kernels hold in registers.
_WIDEST = 256


def choose_attention_backend(
    backend: Backend | None,
    q: Tensor,
    value_dim: int,
) -> Backend:
    """`choose_backend` for an attention. Heads too wide for the kernels use torch, or are refused with "triton"."""
    if max(q.shape[3], value_dim) <= _WIDEST:
        return choose_backend(backend, q)
    if backend == "triton":
        raise ValueError(f"backend 'triton' takes heads of up to {_WIDEST} dimensions; use backend 'torch'")
    return "torch"


def choose_backend(backend: Backend | None, *tensors: Tensor) -> Backend:
    """The backend for an op on these tensors: `backend` if set, else Triton on a GPU if installed, else torch.

    Raises ValueError for an unknown name, and for Triton on float64 or on CPU tensors outside its interpreter.
    """
    on_gpu = tensors[0].is_cuda
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    if backend is None:
        return "triton" if on_gpu and not wide and _has_triton() else "torch"
    if backend not in ("triton", "torch"):
        raise ValueError(f"backend must be None, 'triton' or 'torch', got {backend!r}")
    if backend == "triton" and wide:
        raise ValueError("backend 'triton' computes in fp32 and takes no float64; use backend 'torch'")
    if backend == "triton" and not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "backend 'triton' needs CUDA tensors (or TRITON_INTERPRET=1 to interpret the kernels on a CPU)"
        )
    return backend
