"""Reading one chunk cache, a layer at a time, each verified and decoded, whatever bytes come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from blend.errors import EntryDamagedError, first_line
from blend.store.backend import Blob
from blend.store.format import LENGTH, LONGEST, OPERATOR_PARTS, EntryHeader, as_bytes, decode_header
from blend.store.seal import Seal
from blend.types import ChunkKey, dtype_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from blend_kernels import Packing


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

    def __init__(self, blob: Blob, key: ChunkKey, header: EntryHeader) -> None:
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

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each `[kv_heads, tokens, head_dim]`, in the dtype that was put.

        Raises `EntryDamagedError` when the bytes are not those that were written, `StoreError` when they cannot be read.
        """
        import torch

        parts = self._read(index)
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

    def read_into(self, index: int, keys_out: Tensor, values_out: Tensor) -> None:
        """Decode one layer into two `[kv_heads, tokens, head_dim]` tensors of any floating dtype and device.

        The cheapest way into a larger cache: pass slices of it. Raises as `layer` does, and `EntryDamagedError` when the shapes
        are not those of the destination; nothing is written then.
        """
        parts = self._read(index)
        with self._decoding(index):
            if parts or keys_out.numel() or values_out.numel():
                _copy(self._header.codec.decode(parts, None), (keys_out, values_out))

    def read_parts(self, index: int, outs: Mapping[str, Tensor]) -> None:
        """Copy a layer's numbers and scales, as its codec made them, into tensors of their shapes. Raises as `layer` does."""
        parts = self._read(index)
        with self._decoding(index):
            if parts or any(out.numel() for out in outs.values()):
                sources = [parts[name] for name in outs]
                if [part.dtype for part in sources] != [out.dtype for out in outs.values()]:
                    raise ValueError(f"it has parts of the types {[part.dtype for part in sources]}")
                _copy(sources, [*outs.values()])

    def operator(self, index: int) -> tuple[Tensor, ...]:
        """The tensors of a recurrent layer's operator, one-dimensional; none for other layers. Raises as `layer` does."""
        parts = self._read(index, operator=True) if self.has_operators else {}
        return tuple(parts[name].flatten() for name in OPERATOR_PARTS if name in parts)

    @property
    def groups(self) -> int:
        """How many groups of tokens have scales of their own; 1 for plain numbers."""
        parts = (part for layer in self._header.layers for part in layer.parts)
        return next((part.shape[1] // 2 for part in parts if part.name.endswith(".s")), 1)

    def lossless(self, dtype: torch.dtype) -> bool:
        """Whether every layer is, bit for bit, what was computed in `dtype`: neither codec nor rotation changed it."""
        header = self._header
        return not self.unrotated and header.type.name == dtype_name(dtype) and header.codec.lossless(dtype)

    def close(self) -> None:
        """Release what the reader holds; idempotent."""
        blob = self._blob
        self._blob = None  # a download's memory goes with its last reader
        if blob is not None:
            blob.close()

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self, index: int, *, operator: bool = False) -> dict[str, Tensor]:
        """The parts of the layer's KV, or of its operator, verified."""
        import torch

        place = index * (1 + self.has_operators) + operator
        layout = self._header.layers[place]
        parts: dict[str, Tensor] = {}
        if not layout.parts:
            return parts
        try:
            buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
            self._fill(place, as_bytes(buffer))
            for part in layout.parts:
                content = buffer[part.offset :][: part.nbytes]
                parts[part.name] = content.view(getattr(torch, part.type.name)).view(part.shape)
        except EntryDamagedError as error:
            raise damaged(self._key, f"layer {index}: {error}") from None
        except RuntimeError as error:
            raise damaged(self._key, f"layer {index} has impossible shapes: {first_line(error)}") from None
        return parts

    def _fill(self, place: int, view: memoryview) -> None:
        """Fill with a range of the file as it was written, whichever copy has it. Raises `EntryDamagedError` when none has."""
        blob = self._blob
        assert blob is not None, "the reader is closed"
        offset = self._header.layers[place].offset
        while True:
            is_verified = blob.is_verified  # before the read: another thread may reject the copy meanwhile
            blob.read(offset, view)
            if is_verified or self._header.holds(place, view):
                return
            if not blob.reject():
                raise EntryDamagedError("it is not what was written")

    @contextmanager
    def _decoding(self, index: int) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError, KeyError) as error:
            raise damaged(self._key, f"layer {index} does not decode: {first_line(error)}") from None


def _copy(sources: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Copy each; raises ValueError, and writes nothing, where shapes differ: a plain copy would broadcast."""
    shapes = [list(source.shape) for source in sources]
    needed = [list(out.shape) for out in outs]
    if shapes != needed:
        raise ValueError(f"it has shapes {shapes}, needed are {needed}")
    for source, out in zip(sources, outs, strict=True):
        out.copy_(source)


def require_finite(key: ChunkKey, index: int, parts: Iterable[Tensor]) -> None:
    """Raise `EntryDamagedError` if a number of a layer is NaN or infinite: one of them spoils every row that reads it."""
    import torch

    for part in parts:
        if not part.is_floating_point():
            continue
        # Nothing but a number that is not finite, or a sum out of float32's range, makes a sum that is not.
        total = part.sum(dtype=torch.float32)
        if not total.isfinite() and not part.isfinite().all():
            raise damaged(key, f"layer {index} holds numbers that are not finite")


def read_header(blob: Blob, key: ChunkKey, seal: Seal) -> EntryHeader:
    """The header of the entry of `key`, verified. Raises `EntryDamagedError` when the entry must not be used."""
    try:
        head = bytes(blob.head)
        end = LENGTH.size + int.from_bytes(head[: LENGTH.size], "little")
        if not LENGTH.size < end <= min(blob.nbytes, LONGEST):
            raise ValueError("it is truncated, or not a chunk cache")
        if end > len(head):
            missing = bytearray(end - len(head))
            blob.read(len(head), memoryview(missing))
            head += missing
        return decode_header(head[:end], key, blob.nbytes, seal)
    except (ValueError, RecursionError) as error:
        raise EntryDamagedError(first_line(error)) from None


def damaged(key: ChunkKey, what: str) -> EntryDamagedError:
    """The one-line error for an entry that must be computed again."""
    return EntryDamagedError(f"store entry {key.digest[:16]} must be computed again: {what}")
