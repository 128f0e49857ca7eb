"""Moving cached keys to other positions, found out by measurement instead of by model name.

A rotary key is stored as R(p) k. Moving it from p to p' multiplies by R(p' - p), whatever the model is called (RoFormer,
Su et al. 2021, eq. 14-16; R is orthogonal and R(a) R(b) = R(a + b)). What differs between models is which dimensions rotate, in
which pairs, and at which frequencies, layer by layer. `find_rotation` tries the known layouts on two real forward passes of the
same tokens at different positions and keeps the one that maps the first onto the second; a model with none is refused.
A factor on cos and sin (YaRN's attention scaling) is part of the stored key already and is never applied again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from blend_kernels import Deltas, rotate_keys


@dataclass(frozen=True)
class Rotation:
    """How one cached tensor of one layer turns with position.

    inv_freq: float64 `[pairs]`, radians per position; None when the tensor does not depend on position.
    interleaved: pairs are neighbours (0,1), (2,3) instead of halves (i, i + pairs). offset: first dimension that rotates.
    """

    inv_freq: torch.Tensor | None = None
    interleaved: bool = False
    offset: int = 0

    def apply(
        self, states: torch.Tensor, delta: int | torch.Tensor | Deltas, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Move `states` `[batch, kv_heads, tokens, head_dim]` by `delta` positions (int, or int64 `[tokens]`, or `Deltas`).

        Writes to `out` (any dtype, may be a view) when given; never to its input.
        """
        if self.inv_freq is None:
            return states.clone() if out is None else out.copy_(states)
        return rotate_keys(
            states, delta, self.inv_freq, interleaved=self.interleaved, rotary_offset=self.offset, out=out
        )


def moves(deltas: torch.Tensor) -> Deltas:
    """By how many positions each token moves, int64 `[tokens]`, for many calls of `Rotation.apply` that move alike."""
    return Deltas(deltas)


FIXED = Rotation()


def find_rotation(
    at_start: torch.Tensor, moved: torch.Tensor, delta: int, frequencies: Sequence[torch.Tensor], tolerance: float
) -> Rotation | None:
    """The layout that maps `at_start` to `moved`, both `[1, kv_heads, tokens, head_dim]`, `delta` positions apart.

    None when no layout maps one to the other within `tolerance` (relative to the largest entry).
    """
    scale = moved.abs().amax().clamp_min(1e-6)
    best = min(_candidates(at_start.shape[-1], frequencies), key=lambda r: _error(r, at_start, moved, delta))
    return best if _error(best, at_start, moved, delta) <= tolerance * scale else None


def _error(rotation: Rotation, at_start: torch.Tensor, moved: torch.Tensor, delta: int) -> float:
    return (rotation.apply(at_start, delta) - moved).abs().amax().item()


def _candidates(head_dim: int, frequencies: Iterable[torch.Tensor]) -> Iterable[Rotation]:
    yield FIXED
    for inv_freq in frequencies:
        width = 2 * inv_freq.shape[0]
        if width > head_dim:
            continue
        for offset in sorted({0, head_dim - width}):
            yield Rotation(inv_freq, interleaved=False, offset=offset)
            yield Rotation(inv_freq, interleaved=True, offset=offset)
