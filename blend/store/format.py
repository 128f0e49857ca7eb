"""The file of a chunk cache: a safetensors file whose layers lie one after another.

    8 bytes       length of the header, little endian
    header        JSON, padded with blanks so that the data begins at a multiple of 64 bytes
      __metadata__  blake3 (first: the digest of the length and of everything after the digest), format, namespace, digest,
                    start, tokens, layers, codec, dtype, checksums (one digest a layer, joined by commas)
      000.k  000.v  001.k  ...   dtype, shape and byte range of each tensor
    data          layer 0, layer 1, ...: each one contiguous byte range

Entries of models with recurrent layers have the formats 3 and 4, and `lead` in their metadata. Each layer has two ranges then,
with a digest each: its KV, and its operator `000.o0 000.o1 ...`, as it was computed. Both may be empty.

No value is believed before its type is known. Parsing needs no torch. The safetensors library does not write these files: it
sorts tensors by dtype and would tear a layer of mixed dtypes apart.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from blend.errors import ConfigError, StoreError
from blend.store.codecs import Codec, get_codec
from blend.store.seal import DIGEST_CHARS, Buffer, Seal
from blend.types import ChunkCache, ChunkKey, dtype_name

if TYPE_CHECKING:
    from torch import Tensor

_COUNT = re.compile(r"0|[1-9][0-9]{0,9}")

ENTRY_FORMATS = ("1", "2", "3", "4")  # keys at their positions, positions taken out of keys; the same with operators
LENGTH = struct.Struct("<Q")
LONGEST = 1 << 20  # bytes of header: some 4,000 layers
_ALIGNMENT = 64
_OPENING = b'{"__metadata__":{"blake3":"'
_DIGEST_BEGIN = LENGTH.size + len(_OPENING)
_DIGEST_END = _DIGEST_BEGIN + DIGEST_CHARS
_BEFORE_DIGEST = slice(LENGTH.size)
_DIGEST = slice(_DIGEST_BEGIN, _DIGEST_END)
_BEHIND_DIGEST = slice(_DIGEST_END, None)
_LARGEST_SIZE = 1 << 31
_MOST_OPERATOR_PARTS = 16


class StoredType(NamedTuple):
    """A dtype: its name in torch and the bytes of one value."""

    name: str
    nbytes: int


TYPES = {
    "F64": StoredType("float64", 8),
    "F32": StoredType("float32", 4),
    "F16": StoredType("float16", 2),
    "BF16": StoredType("bfloat16", 2),
    "F8_E4M3": StoredType("float8_e4m3fn", 1),
    "F8_E5M2": StoredType("float8_e5m2", 1),
    "I32": StoredType("int32", 4),
    "I16": StoredType("int16", 2),
    "I8": StoredType("int8", 1),
    "U8": StoredType("uint8", 1),
}
_NAMES = {stored.name: name for name, stored in TYPES.items()}


def _fields(value: object, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"{what} is not described")
    return value


def _count(meta: Mapping[str, str], name: str) -> int:
    """A whole number that is not negative, written in a string as `str` writes it."""
    value = meta.get(name, "")
    if not _COUNT.fullmatch(value):
        raise ValueError(f"{name} is {_shown(value)}")
    return int(value)


def _counts(value: object, length: int, what: str) -> list[int]:
    """So many whole numbers, none negative; true and false are no numbers."""
    if type(value) is list and len(value) == length and all(type(count) is int and count >= 0 for count in value):
        return value
    raise ValueError(f"{what} is {_shown(value)}")


def _type(name: object) -> StoredType:
    stored = TYPES.get(name) if type(name) is str else None
    if stored is None:
        raise ValueError(f"it has values of type {_shown(name)}")
    return stored


def _shown(value: object) -> str:
    """A value for a message, not all of a long one."""
    return f"{value!r:.60}"


class PartLayout(NamedTuple):
    """One tensor inside its layer: `offset` counts from the first byte of the layer."""

    name: str
    type: StoredType
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
    """A verified header.

    Attributes:
        beginning: the bytes of the file up to the first layer.
        start, unrotated, lead: see `ChunkCache`.
        tokens: how many it has.
        codec: decodes its layers.
        type: the dtype that was put in, to which `ChunkReader.layer` decodes.
        layers: where each range of bytes lies.
        seal: verifies it.
        operators: whether every layer has two ranges in `layers`, KV and operator.

    """

    beginning: bytes
    start: int
    unrotated: bool
    tokens: int
    codec: Codec
    type: StoredType
    layers: tuple[LayerLayout, ...]
    seal: Seal
    lead: int = 0
    operators: bool = False

    @property
    def depth(self) -> int:
        """Decoder layers."""
        return len(self.layers) // (1 + self.operators)

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        last = self.layers[-1]
        return last.offset + last.nbytes

    def holds(self, index: int, content: Buffer) -> bool:
        """Whether these are the bytes of that layer."""
        return self.seal.holds(self.layers[index].checksum.encode(errors="replace"), "layer", content)


OPERATOR_PARTS = tuple(f"o{number}" for number in range(_MOST_OPERATOR_PARTS))


def tensor_name(index: int, part: str) -> str:
    """Name of one tensor of layer `index` in the file."""
    return f"{index:03d}.{part}"


def pack_header(metadata: Mapping[str, str], tensors: Mapping[str, Any], seal: Seal) -> bytes:
    """The header as it stands in the file, sealed. metadata: all of `__metadata__` but the checksum."""
    fields = {"__metadata__": {"blake3": "0" * DIGEST_CHARS, **metadata}, **tensors}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH.size + len(text)) % _ALIGNMENT)
    raw = bytearray(LENGTH.pack(len(text)) + text)
    digest = seal.digest("header", raw[_BEFORE_DIGEST], raw[_BEHIND_DIGEST])
    raw[_DIGEST] = digest.encode()
    return bytes(raw)


def decode_header(raw: bytes, key: ChunkKey, file_size: int, seal: Seal) -> EntryHeader:
    """Parse a header.

    Nothing is believed because the digest holds: without a store key anyone can make one that does.

    Args:
        raw: the first bytes of the file, all of the header.
        key: the key of the entry.
        file_size: bytes of the file.
        seal: verifies the header.

    Raises:
        ValueError: the entry must not be used; the message says why.

    """
    if not raw.startswith(_OPENING, LENGTH.size):
        raise ValueError("its header is damaged, or it is not a chunk cache")
    if not seal.holds(raw[_DIGEST], "header", raw[_BEFORE_DIGEST], raw[_BEHIND_DIGEST]):
        raise ValueError(seal.foreign)
    tensors = _fields(json.loads(raw[LENGTH.size :]), "its header")
    meta = _fields(tensors.pop("__metadata__", None), "its metadata")
    if any(type(value) is not str for value in meta.values()):
        raise ValueError("its metadata is not all text")
    if meta.get("format") not in ENTRY_FORMATS:
        raise ValueError(
            f"it has format version {_shown(meta.get('format'))}, this kvblend reads {', '.join(ENTRY_FORMATS)}"
        )
    operators, unrotated = divmod(ENTRY_FORMATS.index(meta["format"]), 2)
    if (meta.get("namespace"), meta.get("digest")) != key:
        raise ValueError("it was written under another key")
    codec = _codec(meta.get("codec", ""))
    checksums = meta.get("checksums", "").split(",")
    if len(checksums) != _count(meta, "layers") * (1 + operators):
        raise ValueError("it does not hold every layer")
    layouts = tuple(_layers(tensors, codec, checksums, data_start=len(raw), operators=bool(operators)))
    if len(tensors) != sum(len(layout.parts) for layout in layouts):
        raise ValueError("it holds tensors of no layer")
    header = EntryHeader(
        beginning=raw,
        start=_count(meta, "start"),
        unrotated=bool(unrotated),
        tokens=_count(meta, "tokens"),
        codec=codec,
        type=_type(meta.get("dtype")),
        layers=layouts,
        seal=seal,
        lead=_count(meta, "lead") if operators else 0,
        operators=bool(operators),
    )
    _require_whole(header, file_size)
    return header


def _require_whole(header: EntryHeader, file_size: int) -> None:
    begin = len(header.beginning)
    if header.nbytes != file_size:
        raise ValueError(f"it holds {file_size - begin} bytes of data, {header.nbytes - begin} were written")
    if header.lead > header.tokens:
        raise ValueError(f"it holds operators behind {header.lead} of {header.tokens} tokens")
    if header.tokens == 0 or "float" not in header.type.name:
        raise ValueError(f"it holds {header.tokens} tokens of {header.type.name}")


def _layers(
    tensors: dict[str, Any], codec: Codec, checksums: list[str], *, data_start: int, operators: bool
) -> Iterator[LayerLayout]:
    """Where each range lies: one right behind the other, in each the tensors in the order in which `entry` writes them."""
    layer_begin = 0
    for place, checksum in enumerate(checksums):
        index, is_operator = divmod(place, 2) if operators else (place, 0)
        names: Sequence[str] = OPERATOR_PARTS if is_operator else codec.parts
        if operators:  # both may be empty
            names = [name for name in names if tensor_name(index, name) in tensors]
        named_parts = [_part(name, tensor_name(index, name), tensors) for name in names]
        nbytes = 0
        parts = []
        for part in sorted(named_parts, key=lambda part: -part.type.nbytes):
            if part.offset != layer_begin + nbytes:
                raise ValueError(f"the tensors of layer {index} are not one byte range of the file")
            parts.append(part._replace(offset=nbytes))
            nbytes += part.nbytes
        yield LayerLayout(data_start + layer_begin, nbytes, tuple(parts), checksum)
        layer_begin += nbytes


def _part(part: str, name: str, tensors: Mapping[str, object]) -> PartLayout:
    """One tensor, its offset counted from the first byte of the data."""
    spec = _fields(tensors.get(name), name)
    stored = _type(spec.get("dtype"))
    shape = _counts(spec.get("shape"), 3, f"the shape of {name}")
    begin, end = _counts(spec.get("data_offsets"), 2, f"the byte range of {name}")
    if max(shape) >= _LARGEST_SIZE or end - begin != math.prod(shape) * stored.nbytes:
        raise ValueError(f"{name} has impossible shapes for its bytes")
    return PartLayout(part, stored, tuple(shape), begin, end - begin)


def _codec(name: str) -> Codec:
    try:
        return get_codec(name)
    except ConfigError:
        raise ValueError(f"it was written with the codec {_shown(name)}, which this kvblend does not know") from None


class EncodedEntry(NamedTuple):
    """A file ready to be written: `header`, then `blobs` in order."""

    header: bytes
    blobs: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(blob.nbytes for blob in self.blobs)


def encode_entry(key: ChunkKey, cache: ChunkCache, codec: Codec, seal: Seal) -> EncodedEntry:
    """The file of a cache.

    Args:
        key: the key of the entry.
        cache: what the entry holds.
        codec: encodes its layers.
        seal: makes the digests.

    Raises:
        StoreError: the cache is not well formed.

    """
    _require_sound(cache)
    tensors: dict[str, Any] = {}
    blobs: list[memoryview] = []
    checksums: list[str] = []
    offset = 0
    for index, parts in _ranges(cache, codec):
        layer = []
        # Wide dtypes first, so that every tensor of a layer that is read into an aligned buffer is aligned itself.
        for part in sorted(parts, key=lambda name: -parts[name].element_size()):
            blob = as_bytes(parts[part])
            layer.append(blob)
            tensors[tensor_name(index, part)] = {
                "dtype": _NAMES[dtype_name(parts[part].dtype)],
                "shape": list(parts[part].shape),
                "data_offsets": [offset, offset + blob.nbytes],
            }
            offset += blob.nbytes
        checksums.append(seal.digest("layer", *layer))
        blobs += layer
    metadata = {
        "format": ENTRY_FORMATS[cache.unrotated + 2 * bool(cache.operators)],
        "namespace": key.namespace,
        "digest": key.digest,
        "start": str(cache.start),
        "tokens": str(cache.tokens),
        "layers": str(cache.layers),
        "codec": codec.name,
        "dtype": _NAMES[dtype_name(cache.keys[0].dtype)],
        "checksums": ",".join(checksums),
    }
    if cache.operators:
        metadata["lead"] = str(cache.lead)
    return EncodedEntry(pack_header(metadata, tensors, seal), tuple(blobs))


def _ranges(cache: ChunkCache, codec: Codec) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The tensors of each byte range, with the index of their layer."""
    for index, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        encoded: dict[str, Tensor] = {}
        if keys.numel() or not cache.operators:
            encoded = _encoded(codec, keys, values)
        yield index, {part: encoded[part] for part in codec.parts if part in encoded}
        if cache.operators:
            flat = map(_flat, cache.operators[index])
            yield index, dict(zip(OPERATOR_PARTS, flat, strict=False))


def _flat(part: Tensor) -> Tensor:
    return part.detach().cpu().contiguous().view(1, 1, -1)


def _encoded(codec: Codec, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
    parts = codec.encode(keys, values)
    is_storable = set(parts) == set(codec.parts)
    for part in parts.values():
        is_storable &= part.device.type == "cpu" and part.is_contiguous()
        is_storable &= part.ndim == 3 and dtype_name(part.dtype) in _NAMES
    if not is_storable:
        raise StoreError(
            f"the codec {codec.name!r} does not make what it says: contiguous CPU tensors of three dimensions, "
            f"of the types {', '.join(_NAMES)}, named {', '.join(codec.parts)}"
        )
    return parts


def _require_sound(cache: ChunkCache) -> None:
    """Raise `StoreError` unless `cache` has layers of `[kv_heads, tokens, head_dim]`, of one dtype and length."""
    states = (*cache.keys, *cache.values)
    is_sound = 0 < len(cache.keys) == len(cache.values) and states[0].is_floating_point()
    for part in states:
        is_sound &= part.ndim == 3 and 0 < part.shape[1] == cache.tokens and part.dtype == states[0].dtype
    if not is_sound:
        raise StoreError(
            "not a chunk cache: every layer needs keys and values of shape [kv_heads, tokens, head_dim], "
            "with one dtype and the same number of tokens, at least one"
        )


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    import torch

    array: Any = tensor.view(-1).view(torch.uint8).numpy()  # numpy's stubs lack the buffer protocol
    return memoryview(array)
