"""Stores of chunk caches: contract in `base`, one implementation a file, `open_store` makes one.

Importing this package loads no torch; opening a store does.
"""

from __future__ import annotations

import os
from pathlib import Path

from blend.store.base import ChunkReader, ChunkStore, StoreStats
from blend.store.codec import Codec, codec_names, get_codec

__all__ = ["ChunkReader", "ChunkStore", "Codec", "StoreStats", "codec_names", "get_codec", "open_store"]

MEMORY = "memory:"


def open_store(
    location: str | os.PathLike[str], *, codec: str = "native", budget_bytes: int | None = None
) -> ChunkStore:
    """A store in memory (`memory:`) or in a directory, which is made when it does not exist.

    codec: how new entries are kept, one of `codec_names()`; "native" keeps the dtype they come in.
    budget_bytes: what all entries may take; the least recently used ones go first.
    Raises `ConfigError` for an unknown codec or a budget that is not positive, `StoreError` for a directory that is no
    store, was made by a newer kvblend or cannot be written.
    """
    encoding = get_codec(codec)
    if location == MEMORY:
        from blend.store.memory import MemoryStore

        return MemoryStore(encoding, budget_bytes)
    from blend.store.disk import DiskStore

    return DiskStore(Path(location).expanduser(), encoding, budget_bytes)
