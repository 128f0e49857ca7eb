"""One byte a number, floating point with three bits of mantissa (e4m3, Micikevicius et al. 2022)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blend.store.codecs.grid import Grid, GridCodec

if TYPE_CHECKING:
    import torch

_BELOW_SIGN = 7  # by so many bits a byte moves up to stand in a float16 as it does in e4m3, but for its sign
_WITHOUT_COPY_OF_SIGN = -16385  # 0xBFFF: widening has put the sign into the bit below it too
_LESS = 2.0**-8  # what it stands for there: float16 has twice as many exponents below 1, 15 instead of 7


class _Floats(Grid):
    """Those of e4m3, all by `_LESS`."""

    dtype = "float8_e4m3fn"
    most = 448 * _LESS

    def nearest(self, numbers: torch.Tensor) -> torch.Tensor:
        import torch

        return numbers.clamp_(-self.most, self.most).div_(_LESS).to(torch.float8_e4m3fn).float().mul_(_LESS)

    def pack(self, numbers: torch.Tensor) -> torch.Tensor:
        import torch

        return numbers.div(_LESS).to(torch.float8_e4m3fn).contiguous()

    def unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        """By way of float16, which has instructions of its own: torch takes fp8 apart number by number, ten times as long."""
        import torch

        bits = packed.view(torch.int8).numpy().astype("int16")
        bits <<= _BELOW_SIGN
        bits &= _WITHOUT_COPY_OF_SIGN
        out.copy_(torch.from_numpy(bits).view(torch.float16))


FP8 = GridCodec("fp8", _Floats(), group=256)
