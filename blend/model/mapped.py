"""Memory for KV on a CPU that goes back to the system when it is let go of.

The C library keeps what is freed in pools of each thread, between what is still held. A server's prompts come and go beside
KV that is kept for later ones, and its memory would stay near what its busiest moment took. What is too small for pages of its
own is left to these pools, and to `give_back` now and then.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch

LEAST = 1 << 18  # bytes; smaller ones are not worth a mapping, of which a process may have 65,530


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor with anything in it, as `torch.empty` gives; in pages of its own where it is large and on a CPU."""
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < LEAST or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(
            OSError
        ):  # a kernel without them; neighbouring buffers are one mapping to it, and share large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))


def copies(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copies of tensors of one dtype and device, in one piece of memory: all of it stays as long as one of them does."""
    whole = empty((sum(part.numel() for part in parts),), parts[0].dtype, parts[0].device)
    found, end = list[torch.Tensor](), 0
    for part in parts:
        begin, end = end, end + part.numel()
        found.append(whole[begin:end].view(part.shape).copy_(part))
    return tuple(found)


def give_back() -> bool:
    """Have the C library hand to the system what it keeps of freed memory; False where it has no such call (glibc has)."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return False
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    trim(0)
    return True
