"""The least time that a blended prefill can take on this machine, which its measured time is held against."""

from __future__ import annotations

from statistics import median

import torch

from blend.timing import Stopwatch


def floor_seconds(compute_s: float, load_s: float, layers: int) -> float:
    """The least time a blended prefill can take: its share of compute, plus loading that compute cannot hide.

    One layer can be computed while the next one loads; the first layer's load is always waited for.
    """
    return compute_s + max(load_s / layers, load_s - compute_s)


def copy_bandwidth(device: torch.device, nbytes: int = 64 << 20) -> float:
    """Measured bytes per second of a copy in the device's memory, median of five."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(5):
        watch = Stopwatch(device)
        target.copy_(source)
        seconds.append(watch.total())
    return nbytes / median(seconds)
