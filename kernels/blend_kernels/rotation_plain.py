"""`rotate_keys` in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Deltas:
    """By how many positions each token moves, int64 or int32 `[tokens]`.

    Calls that are given the same one share its tables of cos and sin: the layers of a cache all move alike, and making the
    tables costs more than the rotation itself. The numbers must not change meanwhile.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self._made: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def tables(self, inv_freq: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin of each token's angles, `[tokens, pairs]`."""
        key = (inv_freq.data_ptr(), dtype)
        if key not in self._made:  # with the frequencies, so that their address stays taken
            self._made[key] = (inv_freq, *_tables(self.values, inv_freq, dtype))
        return self._made[key][1:]


class Layout(NamedTuple):
    """Which dimensions turn: `2 * pairs` of them from `offset` on; pairs are neighbours when interleaved, else halves."""

    pairs: int
    offset: int
    interleaved: bool

    def split(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the first and of the second member of every pair, `[..., pairs]`."""
        turned = states[..., self.offset : self.offset + 2 * self.pairs]
        if self.interleaved:
            return turned[..., 0::2], turned[..., 1::2]
        return turned[..., : self.pairs], turned[..., self.pairs :]

    def still(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of what does not turn, before and after."""
        return states[..., : self.offset], states[..., self.offset + 2 * self.pairs :]


@torch.no_grad()
def rotate_keys_plain(
    k: torch.Tensor,
    delta: int | Deltas,
    inv_freq: torch.Tensor,
    layout: Layout,
    scale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write k, dequantised and turned by `delta * inv_freq`, to `out`; arguments are checked."""
    compute = torch.promote_types(out.dtype, torch.float32)
    states = k.to(compute) if scale is None else k.to(compute) * scale.to(compute)
    cos, sin = delta.tables(inv_freq, compute) if isinstance(delta, Deltas) else _tables(delta, inv_freq, compute)
    (first, second), (to_first, to_second) = layout.split(states), layout.split(out)
    to_first.copy_(torch.mul(first, cos).addcmul_(second, sin, value=-1))
    to_second.copy_(torch.mul(second, cos).addcmul_(first, sin))
    for source, target in zip(layout.still(states), layout.still(out), strict=True):
        target.copy_(source)


def _tables(delta: int | torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cos and sin, `[pairs]` or `[tokens, pairs]`: angles in fp64, and once per run of equal deltas."""
    freq = inv_freq.double()
    if isinstance(delta, int):
        angles = freq * delta
        return angles.cos().to(dtype), angles.sin().to(dtype)
    values, which = torch.unique_consecutive(delta, return_inverse=True)
    angles = values[:, None].double() * freq
    return angles.cos().to(dtype)[which], angles.sin().to(dtype)[which]
