"""Reading one chunk cache, a layer at a time, each verified and decoded, whatever bytes come."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from blend.errors import EntryDamagedError, first_line
from blend.store.backend import Blob, Range
from blend.store.format import (
    LENGTH,
    LONGEST,
    OPERATOR_PARTS,
    EntryHeader,
    LayerLayout,
    PartLayout,
    as_bytes,
    decode_header,
)
from blend.store.seal import Seal, Unsealed
from blend.types import ChunkKey, dtype_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from blend_kernels import Packing

HEAD = 16 << 10  # one read for the header of most models: of some 80 layers of two parts, or 45 of four


class LayerBuffer(NamedTuple):
    """One layer's bytes, and its parts as tensors over them."""

    parts: tuple[PartLayout, ...]
    view: memoryview
    tensors: dict[str, Tensor]

    @classmethod
    def over(cls, layout: LayerLayout, view: memoryview | None = None) -> LayerBuffer:
        """Over this memory, or new memory. Raises RuntimeError for a layer of impossible size."""
        import torch

        buffer = torch.frombuffer(view, dtype=torch.uint8) if view else torch.empty(layout.nbytes, dtype=torch.uint8)
        tensors: dict[str, Tensor] = {}
        for part in layout.parts:
            dtype = getattr(torch, part.type.name)
            content = buffer[part.offset :][: part.nbytes]
            tensors[part.name] = content.view(dtype).view(part.shape)
        return cls(layout.parts, as_bytes(buffer), tensors)


class LayerScratch(threading.local):
    """One reusable buffer a thread: a layer read into it is still in the processor's cache when it is hashed."""

    buffer: LayerBuffer | None = None

    def take(self, layout: LayerLayout) -> LayerBuffer:
        """A buffer for that layout, valid until this thread takes again; made anew only when the layout changes."""
        if self.buffer is None or self.buffer.parts != layout.parts:
            self.buffer = LayerBuffer.over(layout)
        return self.buffer


class ChunkReader:
    """One open entry. Layers may be read in any order and by several threads; close it, or use it in a `with`.

    It stays readable when the entry is evicted or replaced meanwhile.

    Attributes:
        tokens, layers: of the chunk.
        start: position of its first token when it was computed.
        unrotated, lead: see `ChunkCache`.
        codec: how it is stored.
        has_operators: whether it has operators of recurrent layers.
        stored_bytes: its length in the store.
        beginning: its header, which holds a digest of all of it.
        packing: the numbers that `read_parts` gives: "plain", or those of the codec of this name.

    """

    def __init__(
        self,
        blob: Blob,
        key: ChunkKey,
        header: EntryHeader,
        scratch: LayerScratch,
    ) -> None:
        self.tokens = header.tokens
        self.layers = header.depth
        self.start = header.start
        self.lead = header.lead
        self.has_operators = header.operators
        self.unrotated = header.unrotated
        self.codec = header.codec.name
        self.stored_bytes = blob.nbytes
        self.beginning = header.beginning
        self.packing: Packing = header.codec.name if header.codec.name in ("int8", "int4") else "plain"  # type: ignore[assignment]
        self._blob: Blob | None = blob
        self._key = key
        self._header = header
        self._scratch = scratch
        self._is_trusted = isinstance(header.seal, Unsealed)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each `[kv_heads, tokens, head_dim]`, in the dtype that was put. Do not write to them.

        Raises `EntryDamagedError` when the bytes are not those that were written, `StoreError` when they cannot be read.
        """
        import torch

        parts = self._read(index, reuse=False)
        dtype = getattr(torch, self._header.type.name)
        if not parts and self.has_operators:  # a layer without KV
            nothing = torch.empty((0, self.tokens, 0), dtype=dtype)
            return nothing, nothing
        with self._decoding(index):
            keys, values = self._header.codec.decode(parts, dtype)
        for tensor in (keys, values):
            if tensor.ndim != 3 or tensor.shape[1] != self.tokens:
                raise damaged(self._key, f"layer {index} has shape {list(tensor.shape)} for {self.tokens} tokens")
        return keys, values

    def read_into(
        self,
        index: int,
        keys_out: Tensor,
        values_out: Tensor,
    ) -> None:
        """Decode one layer into two `[kv_heads, tokens, head_dim]` tensors of any floating dtype and device.

        The cheapest way into a larger cache: pass slices of it. Raises as `layer` does, and `EntryDamagedError` when the shapes
        are not those of the destination; nothing is written then.
        """
        parts = self._read(index, reuse=True)
        with self._decoding(index):
            if parts or keys_out.numel() or values_out.numel():
                self._header.codec.decode_into(parts, keys_out, values_out)

    @property
    def groups(self) -> int:
        """How many groups of tokens have scales of their own; 1 for plain numbers."""
        scales = (part for part in self._parts() if part.name.endswith(".s"))
        return max((part.shape[1] // 2 for part in scales), default=1)

    def _parts(self) -> Iterator[PartLayout]:
        for layer in self._header.layers:
            yield from layer.parts

    def read_parts(self, index: int, outs: Mapping[str, Tensor]) -> None:
        """Copy a layer's numbers and scales, as its codec made them, into tensors of their shapes. Raises as `layer` does."""
        parts = self._read(index, reuse=True)
        if not parts and not any(out.numel() for out in outs.values()):
            return
        with self._decoding(index):
            for name, out in outs.items():
                part = parts[name]
                if part.shape != out.shape or part.dtype != out.dtype:
                    raise ValueError(f"part {name} has shape {list(part.shape)}, needed is {list(out.shape)}")
                out.copy_(part)

    def whole(self, dtype: torch.dtype) -> memoryview | None:
        """All layers where they lie in memory, if they lie there as they are used in `dtype`: plain, one behind another."""
        header = self._header
        blob = self._blob
        is_plain = self.packing == "plain" and not header.operators
        name = dtype_name(dtype)
        is_as_used = is_plain and all(part.type.name == name for part in self._parts())
        if blob is None or not self._is_trusted or not is_as_used:
            return None
        begin = len(header.beginning)
        return blob.window(begin, header.nbytes - begin)

    def operator(self, index: int) -> tuple[Tensor, ...]:
        """The tensors of a recurrent layer's operator, one-dimensional; none for other layers. Raises as `layer` does."""
        parts = self._read(index, reuse=True, operator=True) if self.has_operators else {}
        return tuple(parts[name].flatten().clone() for name in OPERATOR_PARTS if name in parts)

    def lossless(self, dtype: torch.dtype) -> bool:
        """Whether every layer is, bit for bit, what was computed in `dtype`: neither codec nor rotation changed it."""
        header = self._header
        return not self.unrotated and header.type.name == dtype_name(dtype) and header.codec.lossless(dtype)

    def close(self) -> None:
        """Release what the reader holds; idempotent."""
        blob = self._blob
        self._blob = None
        if blob is not None:
            blob.close()

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(
        self,
        index: int,
        *,
        reuse: bool,
        operator: bool = False,
    ) -> dict[str, Tensor]:
        """The parts of the layer's KV, or of its operator, verified."""
        if (blob := self._blob) is None:
            raise ValueError("the reader is closed")
        if not 0 <= index < self.layers:
            raise IndexError(f"layer {index} of {self.layers}")
        place = index * (1 + self.has_operators) + operator
        if not self._header.layers[place].parts:
            return {}
        try:
            buffer = self._verified(blob, place, reuse=reuse)
        except EntryDamagedError as error:
            raise damaged(self._key, f"layer {index}: {error}") from None
        except RuntimeError as error:
            raise damaged(self._key, f"layer {index} has impossible shapes: {first_line(error)}") from None
        if buffer is None:
            raise damaged(self._key, f"layer {index} is not what was written")
        return buffer.tensors

    def _verified(
        self,
        blob: Blob,
        place: int,
        *,
        reuse: bool,
    ) -> LayerBuffer | None:
        """The bytes of a range of the file as they were written, whichever copy has them; None when none has."""
        while True:
            is_verified = blob.is_verified  # before the read: another thread may reject the copy meanwhile
            buffer = self._filled(blob, place, reuse=reuse)
            if buffer is not None and (is_verified or self._header.holds(place, buffer.view)):
                return buffer
            if is_verified or not blob.reject():
                return None

    def _filled(
        self,
        blob: Blob,
        place: int,
        *,
        reuse: bool,
    ) -> LayerBuffer | None:
        """The bytes of a range of the file; None when the blob is shorter."""
        layout = self._header.layers[place]
        if window := blob.window(layout.offset, layout.nbytes):
            return LayerBuffer.over(layout, window)
        buffer = self._scratch.take(layout) if reuse else LayerBuffer.over(layout)
        return buffer if blob.read(Range(layout.offset, buffer.view)) else None

    @contextmanager
    def _decoding(self, index: int) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise damaged(self._key, f"layer {index} does not decode: {first_line(error)}") from None


def read_header(blob: Blob, key: ChunkKey, seal: Seal) -> EntryHeader:
    """The header of the entry of `key`, verified. Raises `EntryDamagedError` when the entry must not be used."""
    try:
        (length,) = LENGTH.unpack(_beginning(blob, LENGTH.size))
        end: int = LENGTH.size + length
        if end == LENGTH.size or end > min(blob.nbytes, LONGEST):
            raise ValueError("it is truncated, or not a chunk cache")
        return decode_header(_beginning(blob, end), key, blob.nbytes, seal)
    except (EntryDamagedError, ValueError, RecursionError) as error:
        raise damaged(key, first_line(error)) from None


def _beginning(blob: Blob, nbytes: int) -> bytes:
    """The first bytes of a blob, out of its head as far as that goes."""
    head = bytes(blob.head[:nbytes])
    missing = bytearray(nbytes - len(head))
    if missing:
        is_whole = nbytes <= blob.nbytes and blob.read(Range(len(head), memoryview(missing)))
        if not is_whole:
            raise ValueError("it is truncated, or not a chunk cache")
    return head + missing


def damaged(key: ChunkKey, what: str) -> EntryDamagedError:
    """The one-line error for an entry that must be computed again."""
    return EntryDamagedError(f"store entry {key.digest[:16]} must be computed again: {what}")
