"""Open the store's entries for chunks, and refuse those that are not what is expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from blend.errors import EntryDamagedError
from blend.store.base import ChunkStore
from blend.store.reader import ChunkReader
from blend.types import ChunkKey


class Expected(NamedTuple):
    """A chunk cache as it must be.

    Under which key, how many tokens, the position of the first when it was computed, and the most bytes that it may take: a
    header can say anything, and what is read is fetched as far as it says.
    """

    key: ChunkKey
    tokens: int
    start: int
    most_bytes: int


class OpenChunks(NamedTuple):
    """One reader for each chunk asked for, or None for a miss; and one line for every entry that was refused."""

    readers: tuple[ChunkReader | None, ...]
    problems: tuple[str, ...]


def open_chunks(
    store: ChunkStore, entries: Sequence[Expected], layers: int, refused: Mapping[ChunkKey, str] | None = None
) -> OpenChunks:
    """Open these entries. A damaged one becomes a miss and a line in `problems`; so does one whose place is not as expected.

    Layers are verified when they are read. layers: of the decoder. refused: entries known to be damaged already, with the line
    that says so. Raises `StoreError` when the store cannot be read: that is an outage, not a miss.
    """
    known, unrefused = refused or {}, [one for one in entries if one.key not in (refused or {})]
    found = iter(zip(unrefused, store.open_many([one.key for one in unrefused]), strict=True))
    readers: list[ChunkReader | None] = []
    problems: dict[ChunkKey, str] = {}
    for one in entries:
        reader = EntryDamagedError(known[one.key]) if one.key in known else _fitting(*next(found), layers)
        if isinstance(reader, EntryDamagedError):
            problems[one.key] = str(reader)
        readers.append(None if isinstance(reader, EntryDamagedError) else reader)
    return OpenChunks(tuple(readers), tuple(problems.values()))


def _fitting(
    expected: Expected, reader: ChunkReader | EntryDamagedError | None, layers: int
) -> ChunkReader | EntryDamagedError | None:
    """What was opened; an error when it stands for another place, or another number of tokens or layers."""
    if reader is None or isinstance(reader, EntryDamagedError):
        return reader
    found, needed = (reader.tokens, reader.layers, reader.start), (expected.tokens, layers, expected.start)
    if found == needed and reader.stored_bytes <= expected.most_bytes:
        return reader
    reader.close()
    if found == needed:
        return EntryDamagedError(
            f"store entry {expected.key.digest[:16]} must be computed again: it takes {reader.stored_bytes:,} bytes, one of "
            f"{expected.tokens} tokens at most {expected.most_bytes:,}"
        )
    return EntryDamagedError(
        f"store entry {expected.key.digest[:16]} must be computed again: it holds {found[0]} tokens in {found[1]} layers from "
        f"position {found[2]}, not {needed}"
    )
