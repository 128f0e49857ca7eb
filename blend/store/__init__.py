"""The store of chunk caches: `ChunkStore` encodes and verifies, a `Backend` moves the bytes, `open_store` makes one of both.

Importing this package loads no torch, nor does looking at what a store holds; opening an entry and putting one do.
"""

from __future__ import annotations

import os
from pathlib import Path

from blend.store.backend import Backend, Blob, MemoryStats, Range, Stored
from blend.store.base import ChunkStore, StoreStats
from blend.store.codec import Codec
from blend.store.hot import HotBackend
from blend.store.hot_memory import HotMemory
from blend.store.names import key_of
from blend.store.reader import ChunkReader, is_sound
from blend.store.registry import codec_names, get_codec, register_codec
from blend.store.seal import make_seal, read_store_key

__all__ = [
    "Backend",
    "Blob",
    "ChunkReader",
    "ChunkStore",
    "Codec",
    "HotMemory",
    "MemoryStats",
    "Range",
    "StoreStats",
    "Stored",
    "codec_names",
    "get_codec",
    "open_store",
    "read_store_key",
    "register_codec",
]

MEMORY = "memory:"


def open_store(
    location: str | os.PathLike[str],
    *,
    codec: str | Codec = "native",
    budget_bytes: int | None = None,
    key: bytes | None = None,
    memory_bytes: int | HotMemory | None = None,
) -> ChunkStore:
    """A store in memory (`memory:`) or in a directory, which is made when it does not exist.

    codec: how new entries are kept, one of `codec_names()` or a `Codec` of your own, which is registered; "native" keeps the
    dtype they come in.
    budget_bytes: what all entries may take; the least recently used ones go first.
    key: a secret of at least 16 bytes (see `read_store_key`) that entries and artifacts are sealed with. Whatever was not
    written with this key counts as damaged then, so that nobody without it can put KV of their own under a model. It is
    written nowhere. A store in memory has no use for it.
    memory_bytes: what entries may take that are kept in memory besides, the most useful ones, so that those who use them share
    them; or a `HotMemory` that several stores share. A store in memory has no use for it.

    A directory is closed to other users: new files 0600, new folders 0700, whatever the umask, and a store of this user's
    that everybody may enter is closed when it is opened. To share one within a group, set the setgid bit on it: what the
    group may do there (`chmod 2750` read, `chmod 2770` write) it may do with everything written from then on.

    Raises `ConfigError` for an unknown codec, a budget that is not positive or a key that is too short, `StoreError` for a
    directory that is no store, was made by a newer kvblend or cannot be written. A store that this user may only read is
    opened all the same.
    """
    encoding, seal = get_codec(codec) if isinstance(codec, str) else register_codec(codec), make_seal(key)
    memory = HotMemory(memory_bytes) if isinstance(memory_bytes, int) else memory_bytes
    backend = _backend(location, budget_bytes)
    if memory is not None and not backend.trusted:
        backend = HotBackend(backend, memory, lambda name, blob: is_sound(blob, key_of(name), seal))
    return ChunkStore(backend, encoding, seal)


def _backend(location: str | os.PathLike[str], budget_bytes: int | None) -> Backend:
    if location == MEMORY:
        from blend.store.memory import MemoryBackend

        return MemoryBackend(budget_bytes)
    from blend.store.disk import DiskBackend

    return DiskBackend(Path(location).expanduser(), budget_bytes)
