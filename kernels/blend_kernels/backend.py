"""Chooses the implementation of an op: Triton for tensors on a GPU, plain torch elsewhere."""

from __future__ import annotations

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
    """`choose_backend` for an attention; heads too wide for the kernels use torch."""
    return choose_backend(backend, q) if max(q.shape[3], value_dim) <= _WIDEST else "torch"


def choose_backend(backend: Backend | None, *tensors: Tensor) -> Backend:
    """The backend for an op on these tensors: `backend` if set, else Triton on a GPU if installed, else torch.

    Kernels compute in fp32, so float64 takes torch.
    """
    if backend is not None:
        return backend
    on_gpu = tensors[0].is_cuda and _has_triton()
    if on_gpu and all(tensor.dtype != torch.float64 for tensor in tensors):
        return "triton"
    return "torch"
