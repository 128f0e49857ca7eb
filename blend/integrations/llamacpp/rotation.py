"""How a model's cached keys rotate with position, measured: no metadata of a GGUF file is needed for it.

The same token alone in a sequence has the same keys at every position, but for their rotation. From one position to the next
power of two, each pair of numbers turns by an angle that is known in advance up to a little, so its frequency becomes as exact
as many positions apart allow. Interpolated, scaled and local frequencies all come out as the graph computes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blend.errors import UnsupportedModelError
from blend_kernels import Deltas, Turn, rotate_keys

DISTANCES = (0, *(1 << power for power in range(13)))
"""Positions at which each token is computed; the first is 0."""
TOLERANCE = 0.01  # largest difference of turned keys, as a share of the largest number; half precision rounds to 0.0005
_PARTS = (1.0, 0.75, 0.5, 0.25)  # shares of a head's numbers that may rotate


class KeysAt(NamedTuple):
    """One layer's keys of some tokens at all `DISTANCES`, float32 `[distances, kv_heads, tokens, head_dim]`."""

    keys: Tensor

    def error(self, turn: Turn | None) -> float:
        """The largest difference that a rotation leaves, as a share of the largest number."""
        start = self.keys[:1]
        largest = self.keys.abs().amax().clamp_min(1e-6)
        errors = []
        for distance, keys in zip(DISTANCES[1:], self.keys[1:], strict=True):
            steps = Deltas(torch.full((self.keys.shape[2],), distance))
            errors.append((rotate_keys(start, steps, turn) - keys).abs().amax())
        return float(torch.stack(errors).amax() / largest)


def measured_turns(layers: Sequence[KeysAt], name: str) -> list[Turn | None]:
    """How each layer's keys rotate. Layers that rotate alike share one `Turn`.

    Raises `UnsupportedModelError` where no rotation moves them.
    """
    distinct: list[Turn | None] = [None]
    turns = []
    for index, layer in enumerate(layers):
        turn = min(distinct, key=layer.error)
        if layer.error(turn) > TOLERANCE:
            turn = min(_candidates(layer.keys), key=layer.error)
            distinct.append(turn)
        if not layer.error(turn) <= TOLERANCE:
            raise UnsupportedModelError(
                f"{name}: no rotation moves the keys of layer {index} to another position; use full prefill for this model"
            )
        turns.append(turn)
    return turns


def _candidates(keys: Tensor) -> list[Turn]:
    """Every pairing of numbers, with the frequencies that fit it best. keys: as in `KeysAt`."""
    head_dim = keys.shape[-1]
    turns = []
    for part in _PARTS:
        width = 2 * int(part * head_dim / 2)
        for offset in sorted({0, head_dim - width}):
            rotated = keys[..., offset : offset + width]
            for interleaved in (False, True):
                first, second = _pairs(rotated, interleaved=interleaved)
                turns.append(Turn(_frequencies(torch.complex(first, second)), interleaved, offset))
    return turns


def _pairs(numbers: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return numbers[..., 0::2].contiguous(), numbers[..., 1::2].contiguous()
    first, second = numbers.chunk(2, -1)
    return first.contiguous(), second.contiguous()


def _frequencies(pairs: Tensor) -> Tensor:
    """Radians per position, float64 `[pairs]`. pairs: complex `[distances, kv_heads, tokens, pairs]`."""
    pairs = pairs.to(torch.complex128)
    turned = (pairs * pairs[:1].conj()).sum((1, 2)).angle()
    frequencies = turned[1]  # at distance 1; no frequency exceeds half a turn
    for distance, angle in zip(DISTANCES[2:], turned[2:], strict=True):
        expected = frequencies * distance
        remainder = torch.remainder(angle - expected + math.pi, 2 * math.pi) - math.pi
        frequencies = (expected + remainder) / distance
    return frequencies
