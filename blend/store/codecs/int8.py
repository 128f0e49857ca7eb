"""One byte a number, whole numbers from -127 to 127."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blend.store.codecs.grid import Grid, GridCodec

if TYPE_CHECKING:
    import torch


class _Bytes(Grid):
    dtype = "int8"
    most = 127.0

    def nearest(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.round_().clamp_(-self.most, self.most)

    def pack(self, numbers: torch.Tensor) -> torch.Tensor:
        import torch

        return numbers.to(torch.int8).contiguous()

    def unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(packed)


INT8 = GridCodec("int8", _Bytes(), group=256)
