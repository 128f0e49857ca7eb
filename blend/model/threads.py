"""How many threads of torch's a thread of ours computes with."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress

import torch

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
