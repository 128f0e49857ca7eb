"""How keys rotate with position, and the public op `rotate_keys`."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from blend_kernels.checks import FLOATS, check_kind, check_rows, check_shape, check_turn, check_written, share_memory

Angles: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines."""


class Layout(NamedTuple):
    """The rotating dimensions of a key: `2 * pairs` from `offset` on. Pairs are neighbours if interleaved, else halves."""

    pairs: int
    offset: int
    interleaved: bool

    def split(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the first and the second members of all pairs, `[..., pairs]`."""
        rotating = states.narrow(-1, self.offset, 2 * self.pairs)
        if self.interleaved:
            return rotating[..., 0::2], rotating[..., 1::2]
        return rotating[..., : self.pairs], rotating[..., self.pairs :]

    def still(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the dimensions before and after the rotating ones."""
        stop = self.offset + 2 * self.pairs
        return states[..., : self.offset], states[..., stop:]


class Turn(NamedTuple):
    """How one tensor of a layer rotates with position.

    Attributes:
        inv_freq: `[pairs]`, radians per position, float64 or float32, best on the cache's device. Layers that rotate alike
            share it.
        interleaved: pairs are neighbours instead of halves.
        offset: the first dimension that rotates.
    """

    inv_freq: Tensor
    interleaved: bool = False
    offset: int = 0

    @property
    def layout(self) -> Layout:
        """The dimensions that rotate."""
        return Layout(self.inv_freq.shape[0], self.offset, self.interleaved)


class Deltas:
    """How many positions each token moves, int64 or int32 `[tokens]`.

    Calls with the same object share its tables of cos and sin, because the layers of a cache all move alike and making
    the tables costs more than the rotation itself. Do not change the numbers meanwhile.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._tables: dict[tuple[int, torch.dtype], tuple[Tensor, Angles]] = {}

    def tables(self, inv_freq: Tensor, dtype: torch.dtype) -> Angles:
        """Cos and sin of each token's angles, `[tokens, pairs]`: angles in fp64, and once per run of equal deltas."""
        key = (inv_freq.data_ptr(), dtype)
        if key not in self._tables:  # with the frequencies, so that their address stays taken
            distinct, run_of_token = torch.unique_consecutive(self.values, return_inverse=True)
            frequencies = inv_freq.to(distinct.device).double()
            angles = torch.outer(distinct.double(), frequencies)
            cos = angles.cos().to(dtype)
            sin = angles.sin().to(dtype)
            self._tables[key] = (inv_freq, (cos[run_of_token], sin[run_of_token]))
        return self._tables[key][1]


@torch.no_grad()
def rotate_keys(k: Tensor, delta: Deltas, turn: Turn | None, out: Tensor | None = None) -> Tensor:
    """Move rotary keys by `delta` positions while copying them: R(p + delta) = R(delta) R(p) (RoFormer, 2021).

    Never writes k. Angles are exact to fp32 at any distance; products are fp32. A factor of the model on cos and sin is
    part of k already and is not applied again.

    Args:
        k: `[..., tokens, head_dim]`.
        delta: how far each token moves. For unrotated keys it is the position itself.
        turn: how they rotate; other dimensions are copied, and with None all of them.
        out: of k's shape, floating point, apart from k in memory; by default a new tensor in k's dtype.

    Returns:
        `out`.

    Raises:
        ValueError: wrong shapes, dtypes or devices, or an `out` that shares memory with itself or with k: keys that rotate in
            place would rotate again. Other tokens of the same cache are fine.
    """
    if k.ndim < 2:
        raise ValueError(f"k must be [..., tokens, head_dim], got {list(k.shape)}")
    check_kind("k", k, FLOATS, k.device)
    check_rows("delta", delta.values, k.shape[-2], k.device)
    if turn is not None:
        check_turn("turn", turn.inv_freq, turn.offset, k.shape[-1])
    if out is None:
        out = k.new_empty(k.shape)
    else:
        check_shape("out", out, k.shape)
        check_kind("out", out, FLOATS, k.device)
        check_written("out", out)
        if share_memory(k, out):
            raise ValueError("out shares memory with k; keys never rotate in place, so give another tensor")
    if turn is None:
        return out.copy_(k)
    layout = turn.layout
    compute = torch.promote_types(out.dtype, torch.float32)
    states = k.to(compute)
    cos, sin = delta.tables(turn.inv_freq, compute)
    first, second = layout.split(states)
    to_first, to_second = layout.split(out)
    turned_first = torch.mul(first, cos).addcmul_(second, sin, value=-1)
    turned_second = torch.mul(second, cos).addcmul_(first, sin)
    to_first.copy_(turned_first)
    to_second.copy_(turned_second)
    for source, target in zip(layout.still(states), layout.still(out), strict=True):
        target.copy_(source)
    return out
