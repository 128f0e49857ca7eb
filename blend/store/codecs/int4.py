"""Half a byte a number, sixteen numbers from -7.5 to 7.5."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blend.store.codecs.grid import Grid, GridCodec

if TYPE_CHECKING:
    import torch


class _Nibbles(Grid):
    """A head's numbers in a row, the first half of them in the lower halves of the bytes, the second half in the upper ones.

    Heads of one number or none have a byte a token, so that their tokens can be told.
    """

    dtype = "uint8"
    most = 7.5
    zero = 7.5

    def nearest(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.sub_(0.5).round_().clamp_(-8, 7).add_(0.5)

    def pack(self, numbers: torch.Tensor) -> torch.Tensor:
        import torch

        heads, tokens, width = numbers.shape
        flat = (numbers + self.zero).to(torch.uint8).flatten(1)
        packed = flat.new_zeros(heads, 1, _bytes(tokens, width))
        half = packed.shape[2]
        packed[:, 0, : flat.shape[1]] = flat[:, :half]
        packed[:, 0, : max(0, flat.shape[1] - half)] |= flat[:, half:] << 4
        return packed

    def tokens(self, packed: torch.Tensor, width: int) -> int:
        half = packed.shape[2]
        tokens = half if width < 2 else 2 * half // width
        if packed.shape[1] != 1 or half != _bytes(tokens, width):
            raise ValueError(f"{half} bytes a head do not go with scales of {width}")
        return tokens

    def unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        import torch

        flat, both = out.flatten(1), packed.squeeze(1).numpy()
        half = min(both.shape[1], flat.shape[1])
        flat[:, :half] = torch.from_numpy(both[:, :half] & 15)
        flat[:, half:] = torch.from_numpy(both[:, : flat.shape[1] - half] >> 4)


def _bytes(tokens: int, width: int) -> int:
    """Of a head."""
    return tokens if width < 2 else -(-tokens * width // 2)


INT4 = GridCodec("int4", _Nibbles(), group=48, clips=(0.9, 0.75), fits=3)
