"""What a store has for the chunks of a prompt: open entries, of which nothing but the header was read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.errors import EntryDamagedError
from blend.store.reader import ChunkReader
from blend.types import ChunkCache, ChunkKey

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.model.decoder import RowDecoder

Tokens = tuple[int, ...]


class Variant(NamedTuple):
    """One cache of a chunk: isolated or contextual."""

    chunk: Tokens
    contextual: bool


class OpenLibrary(NamedTuple):
    """What a store has for the chunks of a prompt.

    library: where it came from. used: for each chunk the cache that is used. readers: its open entry, or None. problems: a line
    for every entry that was refused. missing: the caches that would have been used and could not, each once.
    """

    library: ChunkLibrary
    used: tuple[Variant, ...]
    readers: tuple[ChunkReader | None, ...]
    problems: tuple[str, ...]
    missing: tuple[Variant, ...]

    @property
    def hits(self) -> tuple[bool, ...]:
        """Which chunks are in the store."""
        return tuple(reader is not None for reader in self.readers)

    @property
    def pairs(self) -> list[tuple[Variant, bool]]:
        """For each chunk the cache that is used, and whether it is there."""
        return list(zip(self.used, self.hits, strict=True))

    @property
    def first_exact(self) -> bool:
        """Whether the first chunk is there and exact where it stands, as far as its codec goes: its isolated cache."""
        return any((hit and not one.contextual) for one, hit in self.pairs[:1])

    @property
    def first_lossless(self) -> bool:
        """Whether the first chunk's KV, where it is there, came through the store without losing a bit."""
        return all(reader is None or reader.lossless(self.library.decoder.dtype) for reader in self.readers[:1])

    @property
    def nbytes(self) -> int:
        """Bytes of the KV of all chunks that are there, each once, in the decoder's dtype."""
        decoder = self.library.decoder
        rows = sum(len(one.chunk) for one, hit in dict(self.pairs).items() if hit)
        return rows * sum(layer.width for layer in decoder.rotations) * decoder.dtype.itemsize

    def damaged(self) -> dict[ChunkKey, str]:
        """Read everything; a line for every entry that is not what was written, under its key."""
        found: dict[ChunkKey, str] = {}
        for reader, one in zip(self.readers, self.used, strict=True):
            try:
                if reader is not None:
                    read_cache(reader, self.library.decoder)
            except EntryDamagedError as error:
                found[self.library.key(one)] = str(error)
        return found

    def close(self) -> None:
        """Close all entries."""
        for reader in self.readers:
            if reader is not None:
                reader.close()


def read_cache(reader: ChunkReader, decoder: RowDecoder) -> ChunkCache:
    """All layers of an entry, in the decoder's dtype. Raises `EntryDamagedError`."""
    pairs = [_read_layer(reader, index, decoder) for index in range(reader.layers)]
    return ChunkCache(tuple(k for k, _ in pairs), tuple(v for _, v in pairs), reader.start, reader.still)


def _read_layer(reader: ChunkReader, index: int, decoder: RowDecoder) -> tuple[torch.Tensor, torch.Tensor]:
    shape = decoder.rotations[index]
    keys, values = (
        torch.empty((heads, reader.tokens, width), dtype=decoder.dtype)
        for heads, width in (shape.key_shape, shape.value_shape)
    )
    reader.read_into(index, keys, values)
    return keys, values
