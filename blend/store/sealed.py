"""An entry as a tier sees it: its header, verified, and the pieces behind it, each with a digest of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from blend.errors import EntryDamagedError
from blend.store.backend import Blob, Range, key_of
from blend.store.format import EntryHeader
from blend.store.reader import read_header
from blend.store.seal import Seal


class Piece(NamedTuple):
    """One layer: where it lies, and what its bytes must hash to."""

    offset: int
    nbytes: int
    checksum: str


class Entry(NamedTuple):
    """beginning: all bytes in front of the first piece. The pieces lie one right behind the other, up to the end."""

    header: EntryHeader
    beginning: bytes
    pieces: tuple[Piece, ...]
    nbytes: int
    seal: Seal

    def holds(self, index: int, view: memoryview) -> bool:
        """Whether these are the bytes of that piece."""
        return self.seal.holds(self.pieces[index].checksum, "layer", view)


Look = Callable[[str, Blob], Entry]
"""What a blob under a name is, by its header. Raises `EntryDamagedError`, `StoreError` where it cannot be read."""


def looker(seal: Seal) -> Look:
    """By the headers that `ChunkStore` writes."""

    def look(name: str, blob: Blob) -> Entry:
        header = read_header(blob, key_of(name), seal)
        layers = header.layers
        beginning = bytearray(blob.head[: layers[0].offset])
        rest = bytearray(layers[0].offset - len(beginning))
        if rest and not blob.read(Range(len(beginning), memoryview(rest))):
            raise EntryDamagedError("it is truncated")
        pieces = tuple(Piece(layer.offset, layer.nbytes, layer.checksum) for layer in layers)
        return Entry(header, bytes(beginning + rest), pieces, blob.nbytes, seal)

    return look
