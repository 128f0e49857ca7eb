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
        self.nbytes, self.head = content.nbytes, content

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
    """Evicts the least recently used entries above `budget_bytes`. Callers hold a lock. on_evicted: called with each."""

    def __init__(self, budget_bytes: float, on_evicted: Callable[[str], None]) -> None:
        super().__init__(budget_bytes, getsizeof=lambda held: held.blob.nbytes)
        self.evictions, self._on_evicted = 0, on_evicted

    def popitem(self) -> tuple[Hashable, _Stored]:
        """Evict one entry."""
        self.evictions += 1
        name, stored = super().popitem()
        self._on_evicted(str(name))
        return name, stored

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
        self._caches = _ByteLRU(inf if budget_bytes is None else budget_bytes, lambda name: self.on_evicted(name))
        self._others = _ByteLRU(inf, lambda name: None)

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
