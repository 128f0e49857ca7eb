"""What makes prefill cheap on a CPU: memory that goes back to the system, one thread a worker, weights in oneDNN's order."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

# Memory. The C library keeps freed memory in pools of each thread, between pieces still in use. A server would stay near the
# memory of its busiest moment; so large buffers get pages of their own, and `trim_heap` returns the rest now and then.
LEAST = 1 << 18  # bytes; smaller buffers are not worth a mapping, of which a process may have 65,530


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor, as `torch.empty`; a large one on a CPU has its own pages, which go back when it is freed."""
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < LEAST or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))


def copies(parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies of tensors of one dtype and device in one buffer, which lives as long as any of them."""
    sizes = [part.numel() for part in parts]
    first = parts[0]
    whole = empty((sum(sizes),), first.dtype, first.device)
    pieces = torch.split(whole, sizes)
    pairs = zip(pieces, parts, strict=True)
    return tuple(piece.view(part.shape).copy_(part) for piece, part in pairs)


def trim_heap() -> bool:
    """Return the C library's freed memory to the system. False where it has no such call (glibc has)."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return False
    trim.argtypes = [ctypes.c_size_t]
    trim.restype = ctypes.c_int
    trim(0)
    return True


# Threads.
_OPENMP = (None, torch._C.__file__)  # as torch's own libraries look it up


def set_threads(count: int) -> None:
    """Compute with `count` threads in this thread and in new ones, whatever others set later.

    A thread fixes its number at its first operation. Asking for the number is such an operation.
    """
    torch.set_num_threads(count)
    torch.get_num_threads()


def end_helpers() -> None:
    """End the helper threads that operations of this thread have left; its next large operation starts new ones.

    While a process has more helpers than cores, GNU's OpenMP lets all of them sleep between operations. So the helpers of a
    thread that only waits slow down the others: a step of decoding takes 1.2 to 1.5 times as long.
    """
    for library in _OPENMP:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(library).omp_pause_resource_all(1)  # a soft pause, which keeps settings


def use_one_thread() -> None:
    """Compute single-threaded in this new thread; all other threads, present and future, keep their number.

    It sets the number that OpenMP and MKL have for each thread; torch would change what new threads start with. Where the
    system has no such call, this thread keeps the number of the others.
    """
    torch.get_num_threads()  # asked first: from its first operation on, a thread's number is its own
    for library in _OPENMP:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(library).omp_set_num_threads(1)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(torch._C.__file__).MKL_Set_Num_Threads_Local(1)


# Linear layers. oneDNN multiplies faster when the weight lies in blocks. torch rearranges the weight in every call, which takes
# longer than the arithmetic for few rows. A packed weight is rearranged once. Milliseconds of one 896 x 4864 layer on one core
# (AMD EPYC, AVX512_BF16):
#
#     rows                       1       4       8      40     300    2000
#     float32, torch          1.01    1.47    1.79    4.26    24.7     169
#     float32, packed         0.45    0.53    0.67    1.75    10.8      95
#     bfloat16, torch         0.55    0.58    0.62    1.15    5.97    37.4
#     bfloat16, packed        0.27    0.29    0.36    0.88    5.43    35.5
# Both are private in torch, whose compiler calls them.
PACK = "_reorder_linear_weight"
MULTIPLY = "_linear_pointwise"


class PackedLinear(torch.nn.Module):
    """A linear layer on a CPU whose weight `[out_features, in_features]` lies in oneDNN's order; it has no gradients.

    Sums are rounded in another order than in `torch.nn.Linear`. `weight.to_dense()` is the weight in the usual order.
    """

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        packed = getattr(torch.ops.mkldnn, PACK)(layer.weight.detach())
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """`x` `[..., in_features]` in the weight's dtype; returns `[..., out_features]`."""
        multiply = getattr(torch.ops.mkldnn, MULTIPLY)
        out: Tensor = multiply(x, self.weight, self.bias, "none", [], "")
        return out


def packed(layer: torch.nn.Linear) -> torch.nn.Module:
    """The layer with its weight in oneDNN's order; the layer itself where oneDNN does not multiply its dtype."""
    dtype = layer.weight.dtype
    ops = torch.ops.mkldnn
    has_operations = hasattr(ops, PACK) and hasattr(ops, MULTIPLY)
    available = torch.backends.mkldnn.is_available() and has_operations  # type: ignore[no-untyped-call]
    fast = dtype == torch.float32 or (dtype == torch.bfloat16 and ops._is_mkldnn_bf16_supported())
    return PackedLinear(layer) if available and fast else layer


def replace_linear(model: torch.nn.Module, make: Callable[[torch.nn.Linear], torch.nn.Module]) -> None:
    """Put `make(layer)` in the place of each plain linear layer of a model; subclasses of `Linear` stay.

    Each old layer is let go of before the next one is made, so that a model never takes its memory twice.
    """
    names = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    for name in names:
        parent_name, _, attribute = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        setattr(parent, attribute, make(getattr(parent, attribute)))
        trim_heap()
