"""What makes prefill cheap on a CPU: memory that goes back to the system, one thread a worker, linear layers over few rows."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

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


_EXCHANGE = threading.Lock()


def take_threads(count: int) -> None:
    """Compute with so many threads in this one, whatever others are told later; what new threads begin with is the same number.

    A thread takes the number that holds for new threads at its first operation, also after one was set for it: so it is asked
    for its number at once.
    """
    torch.set_num_threads(count)
    torch.get_num_threads()


def compute_alone() -> None:
    """Compute without further threads in this one, a new one; others, and those made meanwhile or later, do as they did.

    Where that cannot be had, it computes with as many as they do.
    """
    before = torch.get_num_threads()  # asked first: from its first operation on, a thread's number is its own
    if before == 1:
        return
    _tell_runtimes()
    if torch.get_num_threads() != 1:
        _exchange(before)


def _tell_runtimes() -> None:
    """Tell what runs torch's threads, which counts by threads; torch would change what all new threads begin with.

    As torch's own libraries find it: among what is loaded for everybody, then among what they depend on.
    """
    for place in (None, torch._C.__file__):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(place).omp_set_num_threads(1)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(torch._C.__file__).MKL_Set_Num_Threads_Local(1)


def _exchange(before: int) -> None:
    """Through torch: for a moment new threads would begin with one as well."""
    told = threading.Event()

    def put_back() -> None:
        told.wait()
        _set(before)

    with _EXCHANGE:
        again = threading.Thread(target=put_back)
        try:
            again.start()
        except RuntimeError:  # the system has no more threads; then this one keeps its number
            return
        try:
            _set(1)
        finally:
            told.set()
            again.join()


def _set(count: int) -> None:
    # By torch's own name for it: a host that binds threads to cores, as vLLM does, puts a warning in place of the public one.
    torch._C.set_num_threads(count)


MOST_ROWS = 128
BY_COLUMNS = 5

_LINEAR = (
    "_linear_pointwise"  # private in torch, whose compiler calls it; where it is gone, rows are multiplied as many are
)


def worth_it(rows: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a forward pass over so many rows gains from `FewRows`, which knows no gradients."""
    if not 1 < rows <= MOST_ROWS or device.type != "cpu" or dtype != torch.float32:
        return False
    return not torch.is_grad_enabled() and bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]


class FewRows:
    """Inside, the plain linear layers of a model multiply in one of the other ways; sums are rounded in another order.

    Layers of another kind, and those whose `forward` somebody has replaced, stay as they are. One thread at a time.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers = [module for module in model.modules() if type(module) is torch.nn.Linear]
        self._turned: list[list[torch.nn.Linear]] = []

    def __enter__(self) -> None:
        self._turned.append([layer for layer in self._layers if "forward" not in vars(layer)])
        for layer in self._turned[-1]:
            vars(layer)["forward"] = partial(_forward, layer)

    def __exit__(self, *exception: object) -> None:
        for layer in self._turned.pop():
            vars(layer).pop("forward", None)


def _forward(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    rows, weight, bias = x.numel() // max(1, x.shape[-1]), layer.weight, layer.bias
    few = 1 < rows <= MOST_ROWS and x.dtype == weight.dtype
    if few and rows <= BY_COLUMNS:
        return _by_columns(x, rows, weight, bias)
    if few and hasattr(torch.ops.mkldnn, _LINEAR):
        out: torch.Tensor = getattr(torch.ops.mkldnn, _LINEAR)(x, weight, bias, "none", [], "")
        return out
    return torch.nn.functional.linear(x, weight, bias)


def _by_columns(x: torch.Tensor, rows: int, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = (weight @ x.reshape(rows, -1).t()).t()
    # Contiguous as any linear layer's output; the sum makes it so by itself.
    out = out.contiguous() if bias is None else torch.add(out, bias, out=x.new_empty(out.shape))
    return out.view(*x.shape[:-1], weight.shape[0])
