"""Reading one chunk cache from its file, a layer at a time, each verified before it is used."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import torch

from blend.errors import EntryDamagedError
from blend.store.base import ChunkReader, copy_layer
from blend.store.entry import as_bytes
from blend.store.files import StoreFiles
from blend.store.header import LENGTH, LONGEST, EntryHeader, LayerLayout, PartLayout, decode_header
from blend.store.seal import Seal
from blend.types import ChunkKey

_HEADER_GUESS = 16 << 10  # one read for the header of any model with up to about 80 layers


class LayerBuffer:
    """The bytes of one layer and, in the same memory, its tensors; made anew only when the layout changes."""

    def __init__(self, parts: tuple[PartLayout, ...], nbytes: int) -> None:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.parts = parts
        self.view = as_bytes(buffer)
        self.tensors = {
            part.name: buffer[part.offset : part.offset + part.nbytes]
            .view(getattr(torch, part.type.name))
            .view(part.shape)
            for part in parts
        }


class Scratch(threading.local):
    """One reusable buffer a thread: a layer read into it is still in the processor's cache when it is hashed."""

    buffer = LayerBuffer((), 0)

    def take(self, layout: LayerLayout) -> LayerBuffer:
        """A buffer for that layout, valid until this thread takes again."""
        if self.buffer.parts != layout.parts:
            self.buffer = LayerBuffer(layout.parts, layout.nbytes)
        return self.buffer


class EntryOpener:
    """Opens the entries of one store."""

    def __init__(self, files: StoreFiles, seal: Seal) -> None:
        self.files, self.seal, self.scratch = files, seal, Scratch()

    def open(self, path: Path, key: ChunkKey) -> DiskReader | None:
        """The entry of `key` at `path`, its header verified; None when there is no such file.

        Raises `EntryDamagedError` when it must not be used, `StoreError` when the store cannot be read.
        """
        try:
            descriptor = self.files.open(path)
        except EntryDamagedError as error:
            raise damaged(key, str(error)) from None
        if descriptor is None:
            return None
        try:
            return DiskReader(descriptor, key, self._header(descriptor, key), self)
        except BaseException:
            os.close(descriptor)
            raise

    def _header(self, descriptor: int, key: ChunkKey) -> EntryHeader:
        try:
            size = os.fstat(descriptor).st_size
            raw = os.pread(descriptor, _HEADER_GUESS, 0)
            end = LENGTH.size + (LENGTH.unpack_from(raw)[0] if len(raw) >= LENGTH.size else 0)
            if end == LENGTH.size or end > min(size, LONGEST):
                raise ValueError("it is truncated, or not a chunk cache")
            if end > len(raw):
                raw += os.pread(descriptor, end - len(raw), len(raw))
            return decode_header(raw[:end], key, size, self.seal)
        except OSError as error:
            raise self.unreadable(key, "it", error) from None
        except (ValueError, RecursionError) as error:
            raise damaged(key, first_line(error)) from None

    def unreadable(self, key: ChunkKey, what: str, error: OSError) -> Exception:
        """What to raise when an open file cannot be read."""
        # A network file system says "stale" of an open file that another machine has evicted.
        failed = self.files.failed("read", error)
        if error.errno == errno.ESTALE or isinstance(failed, EntryDamagedError):
            return damaged(key, f"{what} cannot be read: {error.strerror}")
        return failed


class DiskReader(ChunkReader):
    """An open file. Threads may share it; it stays readable when the entry is evicted or replaced meanwhile.

    Read by `pread` and not through a memory map: a file that shrinks under a map kills the process, while a short
    read is an error like any other.
    """

    def __init__(self, descriptor: int, key: ChunkKey, header: EntryHeader, opener: EntryOpener) -> None:
        self.tokens, self.layers, self.start = header.tokens, len(header.layers), header.start
        self.codec = header.codec.name
        self._descriptor = descriptor
        self._key = key
        self._header = header
        self._opener = opener

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in memory of their own."""
        return self._read(index, getattr(torch, self._header.type.name), reuse=False)

    def read_into(self, index: int, keys_out: torch.Tensor, values_out: torch.Tensor) -> None:
        """One read into a warm buffer, one hash, one converting copy each."""
        copy_layer(index, self._read(index, None, reuse=True), (keys_out, values_out))

    def close(self) -> None:
        """Close the file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def _layout(self, index: int) -> LayerLayout:
        if self._descriptor < 0:
            raise ValueError("the reader is closed")
        if not 0 <= index < self.layers:
            raise IndexError(f"layer {index} of {self.layers}")
        return self._header.layers[index]

    def _read(self, index: int, dtype: torch.dtype | None, *, reuse: bool) -> tuple[torch.Tensor, torch.Tensor]:
        layout, opener = self._layout(index), self._opener
        try:
            buffer = opener.scratch.take(layout) if reuse else LayerBuffer(layout.parts, layout.nbytes)
            complete = _read_fully(self._descriptor, buffer.view, layout.offset)
        except OSError as error:
            raise opener.unreadable(self._key, f"layer {index}", error) from None
        except RuntimeError as error:
            raise damaged(self._key, f"layer {index} has impossible shapes: {first_line(error)}") from None
        if not complete or not opener.seal.holds(layout.checksum, "layer", buffer.view):
            raise damaged(self._key, f"layer {index} is not what was written")
        return self._decode(index, buffer, dtype)

    def _decode(self, index: int, buffer: LayerBuffer, dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            keys, values = self._header.codec.decode(buffer.tensors, dtype)
        except (RuntimeError, ValueError) as error:
            raise damaged(self._key, f"layer {index} does not decode: {first_line(error)}") from None
        for tensor in (keys, values):
            if tensor.ndim != 3 or tensor.shape[1] != self.tokens:
                raise damaged(self._key, f"layer {index} has shape {list(tensor.shape)} for {self.tokens} tokens")
        return keys, values


def damaged(key: ChunkKey, what: str) -> EntryDamagedError:
    """The one-line error for an entry that must be computed again."""
    return EntryDamagedError(f"store entry {key.digest[:16]} must be computed again: {what}")


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).partition("\n")[0]


def _read_fully(descriptor: int, view: memoryview, offset: int) -> bool:
    done = 0
    while done < view.nbytes:
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            return False
        done += count
    return True
