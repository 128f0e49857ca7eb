"""Entries in the memory of this process: a store of its own, and a tier in front of another backend.

Both are bounded by bytes and evict the least recently used entries first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from typing import NamedTuple

from cachetools import Cache, LRUCache

from blend.errors import ConfigError, StoreError
from blend.store.backend import (
    CACHES,
    Backend,
    Blob,
    Buffer,
    MemoryStats,
    Range,
    Stored,
    private_memory,
    require_budget,
)
from blend.store.format import EntryHeader
from blend.store.reader import verified_header
from blend.store.seal import Seal
from blend.types import ChunkKey


class MemoryBlob(Blob):
    """Bytes in memory; nothing to close. header: of an entry that was verified."""

    def __init__(self, content: memoryview, header: EntryHeader | None = None) -> None:
        self.nbytes, self.head, self.header = content.nbytes, content, header

    def read(self, *ranges: Range) -> bool:
        """Copy the bytes."""
        windows = [self.window(one.offset, one.into.nbytes) for one in ranges]
        for one, window in zip(ranges, windows, strict=True):
            if window is not None:
                one.into[:] = window
        return None not in windows

    def window(self, offset: int, nbytes: int) -> memoryview | None:
        """The memory itself."""
        return memoryview(self.head)[offset : offset + nbytes] if offset + nbytes <= self.nbytes else None


class _Stored(NamedTuple):
    blob: MemoryBlob
    used: float


class _ByteLRU(LRUCache[Hashable, _Stored]):
    """Evicts the least recently used entries above `budget_bytes`. Callers hold a lock."""

    def __init__(self, budget_bytes: float) -> None:
        super().__init__(budget_bytes, getsizeof=lambda held: held.blob.nbytes)
        self.evictions = 0

    def popitem(self) -> tuple[Hashable, _Stored]:
        """Evict one entry."""
        self.evictions += 1
        return super().popitem()

    def listed(self) -> list[tuple[str, _Stored]]:
        """Every entry; listing them is no use of them."""
        return [(str(name), Cache.__getitem__(self, name)) for name in self]


class MemoryBackend(Backend):
    """Names and their bytes for the threads of one process."""

    place, trusted = "memory", True

    def __init__(self, budget_bytes: int | None = None) -> None:
        require_budget(budget_bytes)
        self._budget = budget_bytes
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._caches = _ByteLRU(inf if budget_bytes is None else budget_bytes)
        self._others = _ByteLRU(inf)

    @property
    def evictions(self) -> int:
        """Caches that the budget evicted."""
        return self._caches.evictions

    def open(self, name: str, head: int) -> MemoryBlob | None:
        """The bytes that were put."""
        with self._lock:
            held = self._entries(name).get(name)
        return None if held is None else held.blob

    def put(self, name: str, blobs: Sequence[Buffer]) -> None:
        """Keep a copy in one piece, then evict."""
        blob, entries = MemoryBlob(memoryview(bytearray().join(blobs))), self._entries(name)
        with self._lock:
            if entries is self._caches:
                require_budget(self._budget, blob.nbytes)
            entries.pop(name, None)
            entries[name] = _Stored(blob, time.time())

    def swap(self, name: str, content: bytes, was: bytes | None) -> bool:
        """Compare and replace under the lock."""
        entries = self._entries(name)
        with self._lock:
            if (bytes(entries[name].blob.head) if name in entries else None) != was:
                return False
            entries[name] = _Stored(MemoryBlob(memoryview(content)), time.time())
        return True

    def delete(self, name: str) -> bool:
        """Drop it; open blobs keep their memory."""
        with self._lock:
            return self._entries(name).pop(name, None) is not None

    def touch(self, name: str) -> None:
        """Make it the most recently used."""
        entries = self._entries(name)
        with self._lock:
            if (held := entries.get(name)) is not None:
                entries[name] = held._replace(used=time.time())

    def listing(self, prefix: str) -> Iterator[Stored]:
        """As of this moment."""
        with self._lock:
            held = self._caches.listed() + self._others.listed()
        return (Stored(name, blob.nbytes, used) for name, (blob, used) in held if name.startswith(prefix))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A lock of this process."""
        with self._writing:
            yield

    def _entries(self, name: str) -> _ByteLRU:
        return self._caches if name.startswith(CACHES) else self._others


class MemoryCache:
    """Whole entries in memory, encoded as they are stored; several stores may share one.

    A store opens its backend's blob first, whose first bytes hold a digest of the whole entry. Memory therefore never serves
    what another process has deleted or replaced. An entry comes into memory, verified, when its first reader closes it; later
    readers hash nothing. An entry that is evicted while it is read stays in memory until its last reader is done.
    Raises `ConfigError` for a budget that is not positive.
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes <= 0:
            raise ConfigError(f"{budget_bytes} bytes of memory for chunk caches; it must be a positive number")
        self._budget = budget_bytes
        self._lock = threading.Lock()
        self._entries = _ByteLRU(budget_bytes)
        self._hits = self._misses = 0

    @property
    def stats(self) -> MemoryStats:
        """The figures at this moment."""
        with self._lock:
            held = self._entries
            return MemoryStats(
                self._hits, self._misses, held.evictions, len(held), int(held.currsize), budget_bytes=self._budget
            )

    def nearest(self, owner: object, key: ChunkKey, below: Blob, seal: Seal) -> Blob:
        """The owner's entry if it is the same as `below`, which is then closed.

        Else `below`, which comes into memory when it was used and read to its end.
        """
        with self._lock:
            held = self._entries.get((owner, key))
            found = held is not None and _same(held.blob, below)
            if not found:
                self._entries.pop((owner, key), None)
        if held is not None and found:
            below.close()
            return held.blob
        return _ReadThrough(below, lambda: self._load(owner, key, below, seal))

    def count(self, blob: Blob) -> None:
        """One more entry of `nearest` is used."""
        with self._lock:
            if isinstance(blob, _ReadThrough):
                blob.used = True
                self._misses += 1
            else:
                self._hits += 1

    def drop(self, owner: object, key: ChunkKey) -> None:
        """Hold nothing under this key."""
        with self._lock:
            self._entries.pop((owner, key), None)

    def _load(self, owner: object, key: ChunkKey, blob: Blob, seal: Seal) -> None:
        """Keep a copy of an entry that is as it was written. Its next reader meets what goes wrong here."""
        if blob.nbytes > self._budget:
            return
        with suppress(StoreError, OSError):
            view = private_memory(blob.nbytes)
            if blob.read(Range(0, view)) and (header := verified_header(MemoryBlob(view), key, seal)) is not None:
                with self._lock:
                    self._entries.pop((owner, key), None)
                    self._entries[owner, key] = _Stored(MemoryBlob(view, header), 0.0)


def _same(held: MemoryBlob, below: Blob) -> bool:
    return held.nbytes == below.nbytes and bytes(held.head[: len(below.head)]) == bytes(below.head)


class _ReadThrough(Blob):
    """An entry of the backend below. When it was used and read to its end, `keep` is called before it is closed."""

    def __init__(self, below: Blob, keep: Callable[[], None]) -> None:
        self._below, self._keep = below, keep
        self.used, self._ends, self._closed = False, set[int](), False  # of ranges that were read, by any thread
        self.nbytes, self.head, self.header = below.nbytes, below.head, below.header

    def read(self, *ranges: Range) -> bool:
        """From below."""
        self._ends.update(one.offset + one.into.nbytes for one in ranges)
        return self._below.read(*ranges)

    def window(self, offset: int, nbytes: int) -> memoryview | None:
        """From below."""
        self._ends.add(offset + nbytes)
        return self._below.window(offset, nbytes)

    def close(self) -> None:
        """Keep what was used and read to its end, then close the blob below."""
        whole, self._closed = self.used and max(self._ends, default=0) >= self.nbytes and not self._closed, True
        try:
            if whole:
                self._keep()
        finally:
            self._below.close()
