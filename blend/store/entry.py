"""From a chunk cache to its file: a safetensors file whose layers lie one after another, see `header`.

It is written here and not by the safetensors library, whose serializer sorts tensors by dtype first and would tear a layer of
mixed dtypes (quantised values and their scales) apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from blend.errors import StoreError
from blend.store.codecs.base import Codec
from blend.store.format import ENTRY_FORMATS, TYPES, pack_header, tensor_name
from blend.store.seal import Seal
from blend.types import ChunkCache, ChunkKey

if TYPE_CHECKING:
    import torch

_NAMES = {stored.name: name for name, stored in TYPES.items()}


class EncodedEntry(NamedTuple):
    """A file ready to be written: `header`, then `blobs` in order."""

    header: bytes
    blobs: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(blob.nbytes for blob in self.blobs)


def encode_entry(key: ChunkKey, cache: ChunkCache, codec: Codec, seal: Seal) -> EncodedEntry:
    """The file of `cache` under `key`; raises `StoreError` when the cache is not well formed."""
    require_sound(cache)
    tensors: dict[str, Any] = {}
    blobs: list[memoryview] = []
    checksums: list[str] = []
    offset = 0
    for index, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        parts = _encoded(codec, keys, values)
        layer = []
        # Wide dtypes first, so that every tensor of a layer that is read into an aligned buffer is aligned itself.
        for part in sorted(codec.parts, key=lambda name: -parts[name].element_size()):
            blob = as_bytes(parts[part])
            layer.append(blob)
            tensors[tensor_name(index, part)] = {
                "dtype": _NAMES[dtype_name(parts[part])],
                "shape": list(parts[part].shape),
                "data_offsets": [offset, offset + blob.nbytes],
            }
            offset += blob.nbytes
        checksums.append(seal.digest("layer", *layer))
        blobs += layer
    metadata = {
        "format": ENTRY_FORMATS[cache.still],
        "namespace": key.namespace,
        "digest": key.digest,
        "start": str(cache.start),
        "tokens": str(cache.tokens),
        "layers": str(cache.layers),
        "codec": codec.name,
        "dtype": _NAMES[dtype_name(cache.keys[0])],
        "checksums": ",".join(checksums),
    }
    return EncodedEntry(pack_header(metadata, tensors, seal), tuple(blobs))


def _encoded(codec: Codec, keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
    parts = codec.encode(keys, values)
    kept = [part.device.type == "cpu" and part.is_contiguous() and part.ndim == 3 for part in parts.values()]
    if (
        set(parts) != set(codec.parts)
        or not all(kept)
        or not all(dtype_name(part) in _NAMES for part in parts.values())
    ):
        raise StoreError(
            f"the codec {codec.name!r} does not make what it says: contiguous CPU tensors of three dimensions, "
            f"of the types {', '.join(_NAMES)}, named {', '.join(codec.parts)}"
        )
    return parts


def require_sound(cache: ChunkCache) -> None:
    """Raise `StoreError` unless `cache` has layers of `[kv_heads, tokens, head_dim]`, of one dtype and length."""
    tensors = (*cache.keys, *cache.values)
    sound = (
        0 < len(cache.keys) == len(cache.values)
        and all(t.ndim == 3 and t.shape[1] == cache.tokens and t.dtype == cache.keys[0].dtype for t in tensors)
        and cache.tokens > 0
        and cache.start >= 0
        and dtype_name(cache.keys[0]) in _NAMES
        and cache.keys[0].dtype.is_floating_point
    )
    if not sound:
        raise StoreError(
            "not a chunk cache: every layer needs keys and values of shape [kv_heads, tokens, head_dim], "
            "with one dtype and the same number of tokens, at least one"
        )


def dtype_name(tensor: torch.Tensor) -> str:
    """Name of a tensor's dtype in torch."""
    return str(tensor.dtype).removeprefix("torch.")


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    import torch

    array: Any = tensor.view(-1).view(torch.uint8).numpy()  # as numpy arrays, whose stubs lack the buffer protocol
    return memoryview(array)
