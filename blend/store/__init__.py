"""The store of chunk caches: `ChunkStore` encodes and verifies, a `Backend` moves the bytes, `open_store` makes one of both.

Read: `base` (what the product asks of a store) -> `backend` (the contract of a place, which tells damage, outage and miss
apart) -> `memory` (the shortest backend) -> `disk` with `files`, `objects` and `redis` with `lease` -> `tiered` with `tier`
and `breaker`.
An entry: `format` (its file) -> `codecs` -> `reader` (verified, a layer at a time) -> `pool` with `ready`, `arena`, `gpu`
(decoded, in memory).
Where a store is: `addresses`. What operators do: `admin`. Keys and digests: `seal`. Downloads: `fetch`.

In: a `ChunkKey` and a `ChunkCache`. Out: a `ChunkReader`, and `ReadyChunk`s of the pool.
To add a backend: derive from `Backend`, and give it a scheme in `addresses`. To add a codec: derive from `Codec`, and
register it.

Importing this package loads no torch, nor does looking at what a store holds; opening an entry and putting one do.
"""

from __future__ import annotations

import os
from pathlib import Path

from blend.store.addresses import hot_backend, is_address, mounted_above, origin_of, remote_backend
from blend.store.admin import FarPins, note_of
from blend.store.backend import CACHES, SOURCES, Backend
from blend.store.base import ChunkStore, StoreStats, read_descriptions
from blend.store.breaker import Timeouts
from blend.store.codecs import Codec, codec_names, get_codec, register_codec
from blend.store.memory import MemoryBackend
from blend.store.pool import ChunkPool, MemoryStats
from blend.store.reader import ChunkReader
from blend.store.seal import Seal, read_store_key

__all__ = [
    "Backend",
    "ChunkPool",
    "ChunkReader",
    "ChunkStore",
    "Codec",
    "MemoryStats",
    "StoreStats",
    "Timeouts",
    "codec_names",
    "get_codec",
    "open_store",
    "read_precomputed",
    "read_store_key",
    "read_words",
    "register_codec",
]

MEMORY = "memory:"


def open_store(
    location: str | os.PathLike[str],
    *,
    codec: str | Codec = "native",
    budget_bytes: int | None = None,
    key: bytes | None = None,
    memory_bytes: int | ChunkPool | None = None,
    cache: str | os.PathLike[str] | None = None,
    hot: str | None = None,
    timeouts: Timeouts | None = None,
) -> ChunkStore:
    """Open a store in memory (`memory:`), in a directory, which is made when it does not exist, or at an address.

    An address is s3://bucket/prefix (gs://, az:// likewise), redis://host:port/db or file:///path; credentials come from the
    environment. Such a store is shared by machines, see `tiered`. A directory below a replica (see `addresses`) is the disk
    tier of the store that the replica stands for. A directory is closed to other users, unless its setgid bit is set:
    `chmod 2750` lets its group read, `chmod 2770` also write.

    >>> from blend import open_store
    >>> with_int8 = open_store("my-other-store", codec="int8", budget_bytes=10**9)
    >>> with_int8.stats().entries
    0

    Args:
        location: where the store is.
        codec: how new entries are kept, one of `codec_names()` or a `Codec` of your own, which is registered; "native" keeps
            the dtype they come in.
        budget_bytes: what all entries may take; the least recently used ones go first.
        key: a secret of at least 16 bytes (see `read_store_key`) that entries and artifacts are sealed with. What was not
            written with this key counts as damaged. It is written nowhere.
        memory_bytes: how much memory recently read entries may take; or a `ChunkPool` that several stores share.
        cache: of a store at an address, a directory of this machine that keeps what is read, within `budget_bytes`.
        hot: of a store at an address, the address of a Redis that keeps what is read for all machines.
        timeouts: how long servers are waited for.

    Raises:
        ConfigError: an unknown codec, a budget that is not positive or a key that is too short.
        StoreError: the directory is no store, was made by a newer kvblend, cannot be written or is sealed with another key.

    """
    encoding = get_codec(codec) if isinstance(codec, str) else register_codec(codec)
    seal = Seal(key)
    pool = ChunkPool(memory_bytes) if isinstance(memory_bytes, int) else memory_bytes
    backend = _backend(location, seal, budget_bytes, cache, hot, timeouts)
    if location == MEMORY and pool is None:
        pool = ChunkPool(budget_bytes)
    folder = None if location == MEMORY or is_address(location) else Path(location).expanduser()
    store = ChunkStore(backend, encoding, seal, pool, folder)
    if not backend.is_elsewhere:  # there it is checked before the first write
        store.require_its_key()
    return store


def read_words(location: str | os.PathLike[str]) -> dict[str, dict[str, str]]:
    """`ChunkStore.namespaces` of a store: words that say nothing secret, and need no key. Raises `StoreError`."""
    return read_descriptions(_backend(location, Seal(None)))


def read_precomputed(location: str | os.PathLike[str], corpus: str | None = None) -> list[dict[str, str]]:
    """`read_words` of the namespaces that a corpus was precomputed in, else any corpus, else of all that hold caches.

    Words are empty where a store has none. Raises `StoreError`.
    """
    backend = _backend(location, Seal(None))
    words: dict[str, dict[str, str]] = {namespace: {} for namespace in backend.folders(CACHES)}
    words |= read_descriptions(backend)
    notes = [note_of(note) for note in backend.names(SOURCES)]
    described = [(name, words[namespace]) for name, namespace in notes if "model" in words.get(namespace, {})]
    of_corpus = [corpus_words for name, corpus_words in described if name == corpus]
    return of_corpus or [corpus_words for _, corpus_words in described] or list(words.values())


def _backend(
    location: str | os.PathLike[str],
    seal: Seal,
    budget_bytes: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    hot: str | None = None,
    timeouts: Timeouts | None = None,
) -> Backend:
    from blend.store.disk import DiskBackend
    from blend.store.tiered import TieredBackend

    if location == MEMORY:
        return MemoryBackend(budget_bytes)
    address = str(location)
    if not is_address(location):
        path = Path(location).expanduser()
        origin = origin_of(path)
        if origin is None:
            return DiskBackend(path, budget_bytes)
        address = origin.address
        cache = path
        hot = origin.hot
    timeouts = timeouts or Timeouts()
    local = None if cache is None else DiskBackend(Path(cache).expanduser(), budget_bytes)
    above = None if cache is None else mounted_above(Path(cache).expanduser())
    far = remote_backend(address, timeouts, None if local else budget_bytes, local, above)
    if local is not None:
        local.pins = FarPins(far, local)
    near = None if hot is None else hot_backend(hot, far.place, timeouts)
    return TieredBackend(far, near, local, seal=seal, pause_s=timeouts.pause_s)
