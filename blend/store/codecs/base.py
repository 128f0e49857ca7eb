"""The contract of codecs, and the trivial one: how a layer's keys and values become named tensors, and back.

A store reads and writes whatever parts a codec names. Every entry names its codec, so a store may hold entries of several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from blend.errors import StoreError

if TYPE_CHECKING:
    import torch


class Codec(ABC):
    """Encodes one layer; stateless, so one instance serves every thread.

    name: what entries call it, the same for as long as they are to be read. parts: names of the tensors that `encode` makes,
    always all of them. unrotated: whether keys come with positions taken out (`ChunkCache.unrotated`), because they
    encode better so; it has to encode others as well.
    """

    name: str
    parts: tuple[str, ...]
    unrotated: bool = False

    @abstractmethod
    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Contiguous CPU tensors of three dimensions under `parts`, which share no memory with the arguments.

        keys, values: `[kv_heads, tokens, head_dim]` each, on any device.
        Raises `StoreError` when the values do not fit into the encoding.
        """

    @abstractmethod
    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in `dtype`, each `[kv_heads, tokens, head_dim]`; they may share memory with `parts`.

        Without a dtype, in the floating-point dtype that is cheapest to make: the caller copies them elsewhere. Raises
        ValueError when the parts are not what `encode` makes.
        """

    def lossless(self, dtype: torch.dtype) -> bool:
        """Whether `decode` gives back every bit of keys and values that `encode` got in `dtype`."""
        return False

    def decode_into(self, parts: Mapping[str, torch.Tensor], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Decode into tensors of any floating-point dtype, strides and device.

        Raises ValueError, and writes nothing, when the parts are not what `encode` makes of tensors of these shapes. A codec
        that can write there directly does so in place of this.
        """
        decoded = self.decode(parts, None)
        require_shapes([tuple(one.shape) for one in decoded], (keys, values))
        for source, out in zip(decoded, (keys, values), strict=True):
            out.copy_(source)


def require_shapes(found: list[tuple[int, ...]], outs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Raise ValueError unless keys and values have the shapes of their destinations: a plain copy would broadcast."""
    needed = [tuple(out.shape) for out in outs]
    if found != needed:
        shown = [", ".join(str(list(shape)) for shape in shapes) for shapes in (found, needed)]
        raise ValueError(f"it has shapes {shown[0]}, needed are {shown[1]}")


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
