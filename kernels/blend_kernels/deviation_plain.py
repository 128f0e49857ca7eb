"""`kv_deviation` in plain torch."""

from __future__ import annotations

import torch


@torch.no_grad()
def deviation_plain(new: torch.Tensor, old: torch.Tensor, norm: str) -> torch.Tensor:
    """Deviation of one pair, fp32 `[batch, rows]`; arguments are checked."""
    difference = new.float() - old.float()
    if norm == "l1":
        return difference.abs_().sum((1, 3))
    squares: torch.Tensor = torch.linalg.vecdot(difference, difference)
    return squares.sum(1)
