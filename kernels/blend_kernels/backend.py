"""Chooses the implementation of an op: Triton for tensors on a GPU, plain torch elsewhere."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["triton", "torch"]
# Widest head that the attention kernels hold in registers.
_WIDEST = 256


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def choose_attention_backend(backend: Backend | None, q: Tensor, value_dim: int) -> Backend:
    """`choose_backend` for an attention. Heads too wide for the kernels use torch, and are refused with "triton"."""
    if max(q.shape[3], value_dim) <= _WIDEST:
        return choose_backend(backend, q)
    if backend == "triton":
        raise ValueError(f"backend 'triton' takes heads of up to {_WIDEST} dimensions; use backend 'torch'")
    return choose_backend("torch" if backend is None else backend, q)


def choose_backend(backend: Backend | None, *tensors: Tensor) -> Backend:
    """The backend for an op on these tensors: `backend` if set, else Triton on a GPU if installed, else torch.

    Kernels compute in fp32, so float64 takes torch.

    Raises:
        ValueError: an unknown backend, or Triton for what it cannot compute.
    """
    if backend == "torch":
        return "torch"
    on_gpu = tensors[0].is_cuda
    has_double = any(tensor.dtype == torch.float64 for tensor in tensors)
    if backend is None:
        return "triton" if on_gpu and not has_double and _has_triton() else "torch"
    if backend != "triton":
        raise ValueError(f"backend must be None, 'triton' or 'torch', got {backend!r}")
    if not _has_triton():
        raise ValueError("backend 'triton' needs Triton; install it, or use backend 'torch'")
    if has_double:
        raise ValueError("backend 'triton' computes in float32 and takes no float64; use backend 'torch'")
    if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "backend 'triton' needs CUDA tensors, or TRITON_INTERPRET=1, which interprets kernels on a CPU"
        )
    return backend
