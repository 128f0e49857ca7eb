"""A store in the memory of this process, bounded by bytes; it evicts the least recently used caches first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import NamedTuple

from cachetools import Cache, LRUCache

from blend.store.backend import (
    CACHES,
    Backend,
    Blob,
    Buffer,
    Range,
    Stored,
    require_budget,
)


class MemoryBlob(Blob):
    """Bytes in memory; nothing to close."""

    def __init__(self, content: memoryview) -> None:
        self.nbytes = content.nbytes
        self.head = content

    def read(self, *ranges: Range) -> bool:
        """Copy the bytes."""
        if any(part.end > self.nbytes for part in ranges):
            return False
        for part in ranges:
            part.into[:] = self.head[part.offset : part.end]
        return True

    def window(self, offset: int, nbytes: int) -> memoryview | None:
        """The memory itself."""
        end = offset + nbytes
        return memoryview(self.head)[offset:end] if end <= self.nbytes else None


class _Entry(NamedTuple):
    blob: MemoryBlob
    used: float


class _ByteLRU(LRUCache[Hashable, _Entry]):
    """Evicts the least recently used entries above `budget_bytes`. Callers hold a lock. on_evicted: called with each."""

    def __init__(self, budget_bytes: float, on_evicted: Callable[[str], None]) -> None:
        super().__init__(budget_bytes, getsizeof=lambda entry: entry.blob.nbytes)
        self.evictions = 0
        self._on_evicted = on_evicted

    def popitem(self) -> tuple[Hashable, _Entry]:
        """Evict one entry."""
        self.evictions += 1
        name, entry = super().popitem()
        self._on_evicted(str(name))
        return name, entry

    def listing(self) -> list[Stored]:
        """Every entry; listing them is no use of them."""
        entries = {str(name): Cache.__getitem__(self, name) for name in self}
        return [Stored(name, entry.blob.nbytes, entry.used) for name, entry in entries.items()]


class MemoryBackend(Backend):
    """Names and their bytes for the threads of one process."""

    place = "memory"
    trusted = True

    def __init__(self, budget_bytes: int | None = None) -> None:
        require_budget(budget_bytes)
        self._budget = budget_bytes
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._caches = _ByteLRU(inf if budget_bytes is None else budget_bytes, lambda name: self.on_evicted(name))
        self._others = _ByteLRU(inf, lambda name: None)

    @property
    def evictions(self) -> int:
        """Caches that the budget evicted."""
        return self._caches.evictions

    def open(self, name: str, head: int) -> MemoryBlob | None:
        """The bytes that were put."""
        with self._lock:
            entry = self._entries(name).get(name)
        return None if entry is None else entry.blob

    def put(self, name: str, blobs: Sequence[Buffer]) -> None:
        """Keep a copy in one piece, then evict."""
        content = bytearray().join(blobs)
        entries = self._entries(name)
        with self._lock:
            if entries is self._caches:
                require_budget(self._budget, len(content))
            entries.pop(name, None)
            entries[name] = _Entry(MemoryBlob(memoryview(content)), time.time())

    def swap(
        self,
        name: str,
        content: bytes,
        was: bytes | None,
    ) -> bool:
        """Compare and replace under the lock."""
        entries = self._entries(name)
        with self._lock:
            current = bytes(entries[name].blob.head) if name in entries else None
            if current != was:
                return False
            entries[name] = _Entry(MemoryBlob(memoryview(content)), time.time())
        return True

    def delete(self, name: str) -> bool:
        """Drop it; open blobs keep their memory."""
        with self._lock:
            return self._entries(name).pop(name, None) is not None

    def touch(self, name: str) -> None:
        """Make it the most recently used."""
        entries = self._entries(name)
        with self._lock:
            entry = entries.get(name)
            if entry is not None:
                entries[name] = entry._replace(used=time.time())

    def listing(self, prefix: str) -> Iterator[Stored]:
        """List the names of this moment."""
        with self._lock:
            everything = self._caches.listing() + self._others.listing()
        return (stored for stored in everything if stored.name.startswith(prefix))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A lock of this process."""
        with self._writing:
            yield

    def _entries(self, name: str) -> _ByteLRU:
        return self._caches if name.startswith(CACHES) else self._others
