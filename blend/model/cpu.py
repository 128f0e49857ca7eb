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

# Memory. The C library keeps freed memory in pools of each thread, between pieces still in use. A server would stay near the
# memory of its busiest moment; so large buffers get pages of their own, and `trim_heap` returns the rest now and then.
LEAST = 1 << 18  # bytes; smaller buffers are not worth a mapping, of which a process may have 65,530


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor, as `torch.empty`; a large one on a CPU has its own pages, which go back when it is freed."""
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < LEAST or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))


def copies(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copies of tensors of one dtype and device in one buffer, which lives as long as any of them."""
    whole = empty((sum(part.numel() for part in parts),), parts[0].dtype, parts[0].device)
    found, end = list[torch.Tensor](), 0
    for part in parts:
        begin, end = end, end + part.numel()
        found.append(whole[begin:end].view(part.shape).copy_(part))
    return tuple(found)


def trim_heap() -> bool:
    """Return the C library's freed memory to the system. False where it has no such call (glibc has)."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return False
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    trim(0)
    return True


# Threads.
_EXCHANGE = threading.Lock()


def set_threads(count: int) -> None:
    """Compute with `count` threads in this thread and in new ones, whatever others set later.

    A thread fixes its number at its first operation. Asking for the number is such an operation.
    """
    torch.set_num_threads(count)
    torch.get_num_threads()


def use_one_thread() -> None:
    """Compute single-threaded in this new thread; all other threads, present and future, keep their number.

    Where the system does not allow it, this thread keeps the number of the others.
    """
    before = torch.get_num_threads()  # asked first: from its first operation on, a thread's number is its own
    if before == 1:
        return
    _set_in_runtimes()
    if torch.get_num_threads() != 1:
        _exchange(before)


def _set_in_runtimes() -> None:
    """Set OpenMP's and MKL's own number, which each thread has; torch would change what new threads start with."""
    for library in (None, torch._C.__file__):  # as torch's own libraries look it up
        with suppress(OSError, AttributeError):
            ctypes.CDLL(library).omp_set_num_threads(1)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(torch._C.__file__).MKL_Set_Num_Threads_Local(1)


def _exchange(before: int) -> None:
    """Set it through torch, and let another thread restore what new threads start with."""
    done = threading.Event()

    def restore() -> None:
        done.wait()
        _set(before)

    with _EXCHANGE:
        restoring = threading.Thread(target=restore)
        try:
            restoring.start()
        except RuntimeError:  # the system has no more threads: keep the number
            return
        try:
            _set(1)
        finally:
            done.set()
            restoring.join()


def _set(count: int) -> None:
    # Not the public function: vLLM, which binds threads to cores, replaces it by a warning.
    torch._C.set_num_threads(count)


# Linear layers over few rows. MKL packs the second factor of a product before it multiplies. In x W^T that is the weight: for
# few rows, packing takes longer than the arithmetic. Up to `BY_COLUMNS` rows (W x^T)^T is faster, which packs x; above, oneDNN,
# which reads weights in place. From about 100 rows on all are equal. Milliseconds of all linear layers + LM head of
# Qwen2.5-0.5B in float32 on one AVX2 core (AMD EPYC):
#
#     rows          2          4          5          8         16         28         72
#     x W^T     219 +  93  265 + 133  275 + 134  316 + 148  385 + 178  430 + 212  1040 + 496
#     (W x^T)^T 160 +  62  154 +  59  193 +  73  301 + 108  342 + 165  580 + 263  1027 + 487
#     oneDNN    208 +  75  226 +  84  235 +  78  272 +  99  344 + 123  458 + 158   978 + 387
MOST_ROWS = 128
BY_COLUMNS = 5
ONEDNN_LINEAR = "_linear_pointwise"  # private in torch, whose compiler calls it; without it the usual product is taken


def few_rows_pay_off(rows: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a forward pass over `rows` rows is faster inside `FewRows`, which has no gradients."""
    if not 1 < rows <= MOST_ROWS or device.type != "cpu" or dtype != torch.float32:
        return False
    return not torch.is_grad_enabled() and bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]


class FewRows:
    """Context manager: the model's plain linear layers use `few_rows_linear`, whose sums are rounded in another order.

    Subclasses of `Linear`, and layers whose `forward` was replaced, stay as they are. For one thread at a time.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers = [module for module in model.modules() if type(module) is torch.nn.Linear]
        self._replaced: list[list[torch.nn.Linear]] = []

    def __enter__(self) -> None:
        self._replaced.append([layer for layer in self._layers if "forward" not in vars(layer)])
        for layer in self._replaced[-1]:
            vars(layer)["forward"] = partial(few_rows_linear, layer)

    def __exit__(self, *exception: object) -> None:
        for layer in self._replaced.pop():
            vars(layer).pop("forward", None)


def few_rows_linear(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """What `layer.forward(x)` gives, by the fastest product for so many rows."""
    rows, weight, bias = x.numel() // max(1, x.shape[-1]), layer.weight, layer.bias
    few = 1 < rows <= MOST_ROWS and x.dtype == weight.dtype
    if few and rows <= BY_COLUMNS:
        return _by_columns(x, rows, weight, bias)
    if few and hasattr(torch.ops.mkldnn, ONEDNN_LINEAR):
        out: torch.Tensor = getattr(torch.ops.mkldnn, ONEDNN_LINEAR)(x, weight, bias, "none", [], "")
        return out
    return torch.nn.functional.linear(x, weight, bias)


def _by_columns(x: torch.Tensor, rows: int, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = (weight @ x.reshape(rows, -1).t()).t()
    # Contiguous, as any linear layer's output; the sum makes it so by itself.
    out = out.contiguous() if bias is None else torch.add(out, bias, out=x.new_empty(out.shape))
    return out.view(*x.shape[:-1], weight.shape[0])
