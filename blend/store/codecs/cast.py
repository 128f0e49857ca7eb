"""Keys and values as they are, in one floating-point dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from blend.errors import StoreError
from blend.store.codecs.base import Codec

if TYPE_CHECKING:
    import torch


class CastCodec(Codec):
    """name: of the dtype in torch, or "native" for whatever dtype comes."""

    parts = ("k", "v")

    def __init__(self, name: str) -> None:
        self.name = name

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Both tensors rounded to the nearest value of the dtype; raises `StoreError` where one exceeds its range."""
        return {"k": self._cast(keys), "v": self._cast(values)}

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Both tensors widened or rounded to `dtype`; no copy without one, or when they have it already."""
        for part in parts.values():
            kept = str(part.dtype).removeprefix("torch.")
            if self.name not in ("native", kept) or not part.dtype.is_floating_point:
                raise ValueError(f"codec {self.name!r} does not write {part.dtype}")
        keys, values = parts["k"], parts["v"]
        return (keys, values) if dtype is None else (keys.to(dtype), values.to(dtype))

    def lossless(self, dtype: torch.dtype) -> bool:
        """Where the dtype that is written holds every value of `dtype`."""
        import torch

        kept = dtype if self.name == "native" else getattr(torch, self.name)
        return bool(torch.promote_types(dtype, kept) == kept)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        dtype = tensor.dtype if self.name == "native" else getattr(torch, self.name)
        cast = torch.empty(tensor.shape, dtype=dtype).copy_(tensor.detach())
        if dtype == torch.float16 != tensor.dtype and not torch.equal(cast.isinf(), tensor.detach().cpu().isinf()):
            raise StoreError("a value exceeds the range of float16; use the codec bfloat16 or float32 for this model")
        return cast
