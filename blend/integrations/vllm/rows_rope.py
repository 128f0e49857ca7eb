"""The frequencies of a model's rotary embeddings, from vLLM's tables of their cosines and sines."""

from __future__ import annotations

import torch

_USED = 4096  # positions that the frequencies are fitted to


def frequencies(model: torch.nn.Module) -> list[torch.Tensor]:
    """Every distinct set of frequencies, float64 `[pairs]` in radians per position, in the model's tables."""
    found: list[torch.Tensor] = []
    for name, table in model.named_buffers():
        if name.endswith("cos_sin_cache") and table.ndim == 2 and table.shape[0] > 1:
            mine = from_table(table).to(table.device)
            if not any(mine.shape == other.shape and torch.equal(mine, other) for other in found):
                found.append(mine)
    return found


def from_table(table: torch.Tensor) -> torch.Tensor:
    """Frequencies `[pairs]` from the cosines and sines `[positions, 2 * pairs]` of position times frequency, times any factor.

    The angle at position 1 says them roughly; angles at twice, four times ... the position, which are known up to full turns,
    ever better; the best line through all of them is as good as the single-precision numbers that models compute with.
    """
    cos, sin = table[:_USED].detach().double().cpu().chunk(2, dim=-1)
    angles = torch.atan2(sin, cos)
    found, place = angles[1].clone(), 2
    while place < angles.shape[0]:
        found = _unwrapped(angles[place], found, torch.tensor(float(place))) / place
        place *= 2
    places = torch.arange(1, angles.shape[0], dtype=torch.float64)[:, None]
    lines = _unwrapped(angles[1:], found, places)
    return ((places * lines).sum(0) / places.square().sum()).float().double()


def _unwrapped(angles: torch.Tensor, rough: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Angles with the full turns that they lack, by rough frequencies."""
    turn = 2 * torch.pi
    return angles + turn * torch.round((places * rough - angles) / turn)
