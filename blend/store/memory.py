"""A store in the memory of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

from blend.store.backend import CACHES, Backend, Blob, Buffer, Found, Stored, key_of, pinned, require_budget


class MemoryBlob(Blob):
    """Bytes in memory, all of them the head. used: when they were put or touched."""

    def __init__(self, content: memoryview) -> None:
        self.nbytes = content.nbytes
        self.head = content
        self.used = time.time()


class MemoryBackend(Backend):
    """Names and their bytes for the threads of one process.

    budget_bytes: the least recently used caches go before all together exceed it, but not pinned ones.
    """

    place = "memory"

    def __init__(self, budget_bytes: int | None = None) -> None:
        require_budget(budget_bytes)
        self._budget = budget_bytes
        self._evictions = 0
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._blobs: dict[str, MemoryBlob] = {}

    @property
    def evictions(self) -> int:
        """Caches that the budget evicted."""
        return self._evictions

    def open_many(self, names: Sequence[str]) -> list[Found]:
        """The bytes that were put."""
        return [self._blobs.get(name) for name in names]

    def put(self, name: str, blobs: Sequence[Buffer]) -> None:
        """Keep a copy in one piece, then evict."""
        content = bytearray().join(blobs)
        if name.startswith(CACHES):
            require_budget(self._budget, len(content))
        with self._lock:
            self._keep(name, content)

    def _keep(self, name: str, content: bytearray) -> None:
        self._blobs[name] = MemoryBlob(memoryview(content))
        if self._budget is not None and name.startswith(CACHES):
            self._make_room(self._budget, name)

    def _make_room(self, budget: int, newest: str) -> None:
        """Drop the least recently used caches, but not the newest."""
        pins = pinned(self) | self.spared()
        caches = list(self.listing(CACHES))
        total = sum(cache.nbytes for cache in caches)
        for cache in sorted(caches, key=attrgetter("used")):
            if total > budget and cache.name != newest and key_of(cache.name).digest not in pins:
                self.delete(cache.name)
                total -= cache.nbytes
                self._evictions += 1

    def touch(self, name: str) -> None:
        """Set its time of last use to now."""
        blob = self._blobs.get(name)
        if blob is not None:
            blob.used = time.time()

    def swap(self, name: str, content: bytes, was: bytes | None) -> bool:
        """Compare and replace under a lock."""
        with self._lock:
            blob = self._blobs.get(name)
            if was != (None if blob is None else blob.head):
                return False
            self._keep(name, bytearray(content))
            return True

    def delete(self, name: str) -> None:
        """Drop it; open blobs keep their memory."""
        self._blobs.pop(name, None)

    def listing(self, prefix: str) -> Iterator[Stored]:
        """List the names of this moment."""
        blobs = self._blobs.copy()
        return (Stored(name, blob.nbytes, blob.used) for name, blob in blobs.items() if name.startswith(prefix))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A lock of this process."""
        with self._writing:
            yield
