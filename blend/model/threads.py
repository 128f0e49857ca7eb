"""How many threads of torch's a thread of ours computes with."""

from __future__ import annotations

import threading

import torch


def take_threads(count: int) -> None:
    """Compute with so many threads in this one, whatever others are told later; what new threads begin with is the same number.

    A thread takes the number that holds for new threads at its first operation, also after one was set for it: so it is asked
    for its number at once.
    """
    torch.set_num_threads(count)
    torch.get_num_threads()


def compute_alone() -> None:
    """Compute without further threads in this one, a new one; others, and those that are made later, do as they did."""
    before = torch.get_num_threads()  # of a thread that has computed nothing yet: what new threads begin with
    # By torch's own name for it: a host that binds threads to cores, as vLLM does, puts a warning in place of the public one.
    torch._C.set_num_threads(1)
    if before != 1:
        again = threading.Thread(target=torch._C.set_num_threads, args=(before,))
        again.start()
        again.join()
