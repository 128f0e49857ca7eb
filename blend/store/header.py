"""The header of a chunk cache's file: what is in it, how it is sealed, and what makes one that may be used.

    8 bytes       length of the header, little endian
    header        JSON, padded with blanks so that the data begins at a multiple of 64 bytes
      __metadata__  checksum (first, over the length and everything after the checksum), format, namespace, digest,
                    start, tokens, layers, codec, dtype, checksums (one digest a layer, joined by commas)
      000.k  000.v  001.k  ...   dtype, shape and byte range of each tensor
    data          layer 0, layer 1, ...: each one contiguous byte range

That is the layout of safetensors, so any safetensors reader opens such a file. A digest is what the store's seal makes; that of
the header stands for the key, the place and the digest of every layer. Nothing here needs torch.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from blend.errors import ConfigError, StoreError
from blend.store.codecs import get_codec
from blend.store.codecs.base import Codec
from blend.store.format import StoredType, as_count, as_counts, as_fields, as_text, as_type, shown
from blend.store.seal import DIGEST_CHARS, Seal
from blend.types import ChunkKey

ENTRY_FORMATS = ("1", "2")  # keys at their positions; positions taken out of keys
LENGTH = struct.Struct("<Q")
LONGEST = 1 << 20  # bytes of header: some 4,000 layers
_ALIGNMENT = 64
_OPENING = b'{"__metadata__":{"checksum":"'
_DIGEST_AT = LENGTH.size + len(_OPENING)
_LARGEST_SIZE = 1 << 31
_MOST_PER_TOKEN = 4 << 20  # bytes in one layer: a file as long as it pleases must not fill the memory


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
    """A verified header. `type` is the one that was put in and that `ChunkReader.layer` decodes to. still: see `ChunkCache`."""

    start: int
    still: bool
    tokens: int
    codec: Codec
    type: StoredType
    layers: tuple[LayerLayout, ...]


def tensor_name(index: int, part: str) -> str:
    """Name of one tensor of layer `index` in the file."""
    return f"{index:03d}.{part}"


def pack_header(metadata: Mapping[str, str], tensors: Mapping[str, Any], seal: Seal) -> bytes:
    """The header as it stands in the file, sealed. metadata: all of `__metadata__` but the checksum.

    Raises `StoreError` when it is longer than `LONGEST`.
    """
    fields = {"__metadata__": {"checksum": "0" * DIGEST_CHARS, **metadata}, **tensors}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH.size + len(text)) % _ALIGNMENT)
    if LENGTH.size + len(text) > LONGEST:
        raise StoreError(f"a chunk cache of so many layers needs a header of more than {LONGEST} bytes")
    raw = bytearray(LENGTH.pack(len(text)) + text)
    after = _DIGEST_AT + DIGEST_CHARS
    raw[_DIGEST_AT:after] = seal.digest("header", raw[: LENGTH.size], raw[after:]).encode()
    return bytes(raw)


def decode_header(raw: bytes, key: ChunkKey, file_size: int, seal: Seal) -> EntryHeader:
    """Parse the first bytes of the file of `key`, all of the header. Raises ValueError that says what is wrong.

    Nothing is believed because the digest holds: without a store key anyone can make one that does.
    """
    after = _DIGEST_AT + DIGEST_CHARS
    if not raw.startswith(_OPENING, LENGTH.size):
        raise ValueError("its header is damaged, or it is not a chunk cache")
    if not seal.holds(raw[_DIGEST_AT:after], "header", raw[: LENGTH.size], raw[after:]):
        raise ValueError(seal.foreign)
    tensors = _parsed(raw[LENGTH.size :])
    meta = as_fields(tensors.pop("__metadata__", None), "its metadata")
    if meta.get("format") not in ENTRY_FORMATS:
        known = " and ".join(ENTRY_FORMATS)
        raise ValueError(f"it has format version {shown(meta.get('format'))}, this kvblend reads {known}")
    if (meta.get("namespace"), meta.get("digest")) != key:
        raise ValueError("it was written under another key")
    codec, checksums = _codec(as_text(meta, "codec")), as_text(meta, "checksums").split(",")
    layers = as_count(meta, "layers")
    if not 0 < layers == len(checksums) or len(tensors) != layers * len(codec.parts):
        raise ValueError("it does not hold every layer")
    header = EntryHeader(
        start=as_count(meta, "start"),
        still=meta["format"] == ENTRY_FORMATS[True],
        tokens=as_count(meta, "tokens"),
        codec=codec,
        type=as_type(meta.get("dtype")),
        layers=tuple(_layers(tensors, codec, checksums, len(raw))),
    )
    _require_whole(header, file_size)
    return header


def _require_whole(header: EntryHeader, file_size: int) -> None:
    last = header.layers[-1]
    begin, end = header.layers[0].offset, last.offset + last.nbytes
    if end != file_size:
        raise ValueError(f"it holds {file_size - begin} bytes of data, {end - begin} were written")
    if max(layer.nbytes for layer in header.layers) > header.tokens * _MOST_PER_TOKEN:
        raise ValueError(f"a layer of it is too large for {header.tokens} tokens")
    if header.tokens == 0 or not header.type.is_floating_point:
        raise ValueError(f"it holds {header.tokens} tokens of {header.type.name}")


def _layers(tensors: dict[str, Any], codec: Codec, checksums: list[str], data_start: int) -> Iterator[LayerLayout]:
    """Where each layer lies: one right behind the other, in each the tensors in the order in which `entry` writes them."""
    layer_begin = 0
    for index, checksum in enumerate(checksums):
        found = [_part(part, tensor_name(index, part), tensors) for part in codec.parts]
        at, parts = layer_begin, []
        for part in sorted(found, key=lambda one: -one.type.nbytes):
            if part.offset != at:
                raise ValueError(f"the tensors of layer {index} are not one byte range of the file")
            parts.append(part._replace(offset=at - layer_begin))
            at += part.nbytes
        yield LayerLayout(data_start + layer_begin, at - layer_begin, tuple(parts), checksum)
        layer_begin = at


def _part(part: str, name: str, tensors: Mapping[str, object]) -> PartLayout:
    """One tensor, its offset counted from the first byte of the data."""
    spec = as_fields(tensors.get(name), name)
    stored = as_type(spec.get("dtype"))
    shape = as_counts(spec.get("shape"), 3, f"the shape of {name}")
    begin, end = as_counts(spec.get("data_offsets"), 2, f"the byte range of {name}")
    if max(shape) >= _LARGEST_SIZE or end - begin != math.prod(shape) * stored.nbytes:
        raise ValueError(f"{name} has impossible shapes for its bytes")
    return PartLayout(part, stored, tuple(shape), begin, end - begin)


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        return as_fields(json.loads(text), "its header")
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None


def _codec(name: str) -> Codec:
    try:
        return get_codec(name)
    except ConfigError:
        raise ValueError(f"it was written with the codec {shown(name)}, which this kvblend does not know") from None
