"""Whether two views of one buffer share an element."""

from __future__ import annotations

from collections import defaultdict

import torch

# One term of a distance in bytes: `step * n` for a whole n from `low` to `high`.
_Term = tuple[int, int, int]


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether some element of a lies on some element of b; interleaved views, such as other tokens of a cache, do not.

    An element of b is `distance + sum of step * n` bytes after one of a, n within what the sizes of the dimensions of that
    stride allow: they meet where that sum can be zero.
    """
    if a.numel() == 0 or b.numel() == 0 or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    lows: defaultdict[int, int] = defaultdict(int)
    highs: defaultdict[int, int] = defaultdict(int)
    for size, stride in zip(a.shape, a.stride(), strict=True):
        lows[stride * a.itemsize] -= size - 1
    for size, stride in zip(b.shape, b.stride(), strict=True):
        highs[stride * b.itemsize] += size - 1
    lows[1] -= a.itemsize - 1
    highs[1] += b.itemsize - 1
    steps = sorted({*lows, *highs} - {0}, reverse=True)
    return _can_be_zero(b.data_ptr() - a.data_ptr(), [(step, lows[step], highs[step]) for step in steps])


def _can_be_zero(distance: int, terms: list[_Term]) -> bool:
    if not terms:
        return distance == 0
    (step, low, high), *rest = terms
    # what the smaller steps can still add bounds this one from both sides: one or two values in buffers of nested strides
    least, most = (sum(term[0] * term[side] for term in rest) for side in (1, 2))
    first, last = max(low, -((distance + most) // step)), min(high, -(distance + least) // step)
    return any(_can_be_zero(distance + step * n, rest) for n in range(first, last + 1))
