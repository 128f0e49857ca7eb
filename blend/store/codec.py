"""How one layer's keys and values become the named tensors that a store keeps, and back.

A store writes and reads whatever parts a codec names; a new codec is one class, made known by `register_codec` or by opening
a store with it. Every entry names its own codec, so a store may hold entries of several.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from blend.errors import ConfigError, StoreError

if TYPE_CHECKING:
    import torch


class Codec(ABC):
    """Encodes one layer; stateless, so one instance serves every thread.

    name: what entries call it, the same for as long as they are to be read. parts: names of the tensors that `encode` makes,
    always all of them.
    """

    name: str
    parts: tuple[str, ...]

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


class CastCodec(Codec):
    """Keeps keys and values as they are, in one floating-point dtype."""

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

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        dtype = tensor.dtype if self.name == "native" else getattr(torch, self.name)
        cast = torch.empty(tensor.shape, dtype=dtype).copy_(tensor.detach())
        if dtype == torch.float16 != tensor.dtype and not torch.equal(cast.isinf(), tensor.detach().cpu().isinf()):
            raise StoreError("a value exceeds the range of float16; use the codec bfloat16 or float32 for this model")
        return cast


_BUILT_IN = ("native", "float32", "bfloat16", "float16")
_CODECS: dict[str, Codec] = {name: CastCodec(name) for name in _BUILT_IN}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def register_codec(codec: Codec) -> Codec:
    """Make a codec known in this process, so that entries written with it are read; returns it.

    Every process that reads such entries has to do so: to others they are damaged, and are computed again. Raises
    `ConfigError` for a name that belongs to another class of codecs, and for names that cannot stand in an entry.
    """
    if not _NAME.fullmatch(codec.name) or not codec.parts or not all(map(_NAME.fullmatch, codec.parts)):
        raise ConfigError(
            f"the codec {codec.name!r:.80} needs a name, and parts with names, of letters, digits, dots, dashes, underscores"
        )
    if len(set(codec.parts)) < len(codec.parts):
        raise ConfigError(f"the codec {codec.name!r} has two parts of one name: {', '.join(codec.parts)}")
    if codec.name in _BUILT_IN or _class_name(_CODECS.get(codec.name, codec)) != _class_name(codec):
        raise ConfigError(f"there is another codec of the name {codec.name!r}; give yours a name of its own")
    _CODECS[codec.name] = codec
    return codec


def _class_name(codec: Codec) -> str:
    """The same for a class that was defined once more, as in a notebook."""
    return f"{type(codec).__module__}.{type(codec).__qualname__}"


def codec_names() -> tuple[str, ...]:
    """Every name that `get_codec` knows."""
    return tuple(_CODECS)


def get_codec(name: str) -> Codec:
    """The codec of that name; raises `ConfigError` that lists the choices."""
    try:
        return _CODECS[name]
    except KeyError:
        raise ConfigError(f"unknown codec {name!r}; choose one of {', '.join(_CODECS)}") from None
