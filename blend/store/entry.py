"""The file of one chunk cache: a safetensors file whose layers lie one after another.

    8 bytes       length of the header, little endian
    header        JSON, padded with blanks so that the data begins at a multiple of 64 bytes
      __metadata__  checksum (first, over the length and everything after the checksum), format, namespace, digest,
                    start, tokens, layers, codec, dtype, checksums (one xxh3_128 a layer, joined by commas)
      000.k  000.v  001.k  ...   dtype, shape and byte range of each tensor
    data          layer 0, layer 1, ...: each one contiguous byte range

Any safetensors reader opens such a file. It is written here and not by the safetensors library, whose serializer sorts
tensors by dtype first and would tear a layer of mixed dtypes (quantised values and their scales) apart.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from blend.errors import ConfigError, StoreError
from blend.store.codec import Codec, get_codec
from blend.types import ChunkCache, ChunkKey

ENTRY_FORMAT = "1"
SUFFIX = ".safetensors"
LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64
_OPENING = b'{"__metadata__":{"checksum":"'
_DIGEST_CHARS = 32
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class EncodedEntry(NamedTuple):
    """A file ready to be written: `header`, then `blobs` in order."""

    header: bytes
    blobs: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(blob.nbytes for blob in self.blobs)


class PartLayout(NamedTuple):
    """One tensor inside its layer: `offset` counts from the first byte of the layer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class LayerLayout(NamedTuple):
    """Where one layer lies in the file, and what its bytes must hash to."""

    offset: int
    nbytes: int
    parts: tuple[PartLayout, ...]
    checksum: str


class EntryHeader(NamedTuple):
    """A verified header. `dtype` is the one that was put in and that `ChunkReader.layer` decodes to."""

    start: int
    tokens: int
    layers: int
    codec: Codec
    dtype: torch.dtype
    checksums: tuple[str, ...]
    data_start: int
    data_nbytes: int
    tensors: Mapping[str, Mapping[str, Any]]

    def layer(self, index: int) -> LayerLayout:
        """Where layer `index` lies; raises ValueError when its tensors do not form one byte range."""
        specs = [(part, self.tensors[_tensor_name(index, part)]) for part in self.codec.parts]
        begin = min([spec["data_offsets"][0] for _, spec in specs])
        parts = tuple([_part_layout(part, spec, begin) for part, spec in specs])
        nbytes = max([part.offset + part.nbytes for part in parts])
        if nbytes != sum([part.nbytes for part in parts]) or not 0 <= begin <= self.data_nbytes - nbytes:
            raise ValueError(f"the tensors of layer {index} are not one byte range of the file")
        return LayerLayout(self.data_start + begin, nbytes, parts, self.checksums[index])


def encode_entry(key: ChunkKey, cache: ChunkCache, codec: Codec) -> EncodedEntry:
    """The file of `cache` under `key`; raises `StoreError` when the cache is not well formed."""
    require_sound(cache)
    tensors: dict[str, Any] = {}
    blobs: list[memoryview] = []
    checksums: list[str] = []
    offset = 0
    for index, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        digest = xxhash.xxh3_128()
        parts = codec.encode(keys, values)
        # Wide dtypes first, so that every tensor of a layer that is read into an aligned buffer is aligned itself.
        for part in sorted(codec.parts, key=lambda name: -parts[name].element_size()):
            blob = as_bytes(parts[part])
            digest.update(blob)
            blobs.append(blob)
            tensors[_tensor_name(index, part)] = {
                "dtype": _DTYPE_NAMES[parts[part].dtype],
                "shape": list(parts[part].shape),
                "data_offsets": [offset, offset + blob.nbytes],
            }
            offset += blob.nbytes
        checksums.append(digest.hexdigest())
    return EncodedEntry(_pack_header(_metadata(key, cache, codec, checksums), tensors), tuple(blobs))


def decode_header(raw: bytes, key: ChunkKey, file_size: int) -> EntryHeader:
    """Parse the first bytes of the file of `key`, all of the header; raises ValueError that says what is wrong."""
    check = raw[len(_OPENING) + LENGTH.size :][:_DIGEST_CHARS]
    if not raw.startswith(_OPENING, LENGTH.size) or check != _header_checksum(raw):
        raise ValueError("its header is damaged, or it is not a chunk cache")
    tensors = json.loads(raw[LENGTH.size :])
    meta = tensors.pop("__metadata__")
    if meta["format"] != ENTRY_FORMAT:
        raise ValueError(f"it has format version {meta['format']}, this kvblend reads {ENTRY_FORMAT}")
    if (meta["namespace"], meta["digest"]) != key:
        raise ValueError("it was written under another key")
    header = EntryHeader(
        start=int(meta["start"]),
        tokens=int(meta["tokens"]),
        layers=int(meta["layers"]),
        codec=_known_codec(meta["codec"]),
        dtype=_DTYPES[meta["dtype"]],
        checksums=tuple(meta["checksums"].split(",")),
        data_start=len(raw),
        data_nbytes=file_size - len(raw),
        tensors=tensors,
    )
    _require_complete(header)
    return header


def require_sound(cache: ChunkCache) -> None:
    """Raise `StoreError` unless `cache` has layers of `[kv_heads, tokens, head_dim]`, of one dtype and length."""
    tensors = (*cache.keys, *cache.values)
    sound = (
        0 < len(cache.keys) == len(cache.values)
        and all(t.ndim == 3 and t.shape[1] == cache.tokens and t.dtype == cache.keys[0].dtype for t in tensors)
        and cache.tokens > 0
        and cache.keys[0].dtype in _DTYPE_NAMES
        and cache.keys[0].dtype.is_floating_point
    )
    if not sound:
        raise StoreError(
            "not a chunk cache: every layer needs keys and values of shape [kv_heads, tokens, head_dim], "
            "with one dtype and the same number of tokens, at least one"
        )


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()  # as numpy arrays, whose stubs lack the buffer protocol
    return memoryview(array)


def _metadata(key: ChunkKey, cache: ChunkCache, codec: Codec, checksums: Sequence[str]) -> dict[str, str]:
    return {
        "format": ENTRY_FORMAT,
        "namespace": key.namespace,
        "digest": key.digest,
        "start": str(cache.start),
        "tokens": str(cache.tokens),
        "layers": str(cache.layers),
        "codec": codec.name,
        "dtype": _DTYPE_NAMES[cache.keys[0].dtype],
        "checksums": ",".join(checksums),
    }


def _pack_header(metadata: Mapping[str, str], tensors: Mapping[str, Any]) -> bytes:
    fields = {"__metadata__": {"checksum": "0" * _DIGEST_CHARS, **metadata}, **tensors}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH.size + len(text)) % _ALIGNMENT)
    raw = bytearray(LENGTH.pack(len(text)) + text)
    at = LENGTH.size + len(_OPENING)
    raw[at : at + _DIGEST_CHARS] = _header_checksum(raw)
    return bytes(raw)


def _header_checksum(raw: bytes | bytearray) -> bytes:
    digest = xxhash.xxh3_128(raw[: LENGTH.size])
    digest.update(raw[LENGTH.size + len(_OPENING) + _DIGEST_CHARS :])
    return digest.hexdigest().encode()


def _tensor_name(index: int, part: str) -> str:
    return f"{index:03d}.{part}"


def _part_layout(name: str, spec: Mapping[str, Any], layer_begin: int) -> PartLayout:
    begin, end = spec["data_offsets"]
    return PartLayout(name, _DTYPES[spec["dtype"]], tuple(spec["shape"]), begin - layer_begin, end - begin)


def _known_codec(name: str) -> Codec:
    try:
        return get_codec(name)
    except ConfigError:
        raise ValueError(f"it was written with the codec {name!r}, which this kvblend does not know") from None


def _require_complete(header: EntryHeader) -> None:
    if not 0 < header.layers == len(header.checksums) or len(header.tensors) != header.layers * len(header.codec.parts):
        raise ValueError("it does not hold every layer")
    written = max(spec["data_offsets"][1] for spec in header.tensors.values())
    if written != header.data_nbytes:
        raise ValueError(f"it holds {header.data_nbytes} bytes of data, {written} were written")
