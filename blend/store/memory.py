"""A store in the memory of this process, without a budget."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from blend.store.backend import Backend, Blob, Buffer, Found, Stored


class MemoryBlob(Blob):
    """Bytes in memory, all of them the head. put: when they were put."""

    def __init__(self, content: memoryview) -> None:
        self.nbytes = content.nbytes
        self.head = content
        self.put = time.time()


class MemoryBackend(Backend):
    """Names and their bytes for the threads of one process."""

    place = "memory"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._blobs: dict[str, MemoryBlob] = {}

    def open_many(self, names: Sequence[str]) -> list[Found]:
        """The bytes that were put."""
        return [self._blobs.get(name) for name in names]

    def put(self, name: str, blobs: Sequence[Buffer]) -> None:
        """Keep a copy in one piece."""
        self._blobs[name] = MemoryBlob(memoryview(bytearray().join(blobs)))

    def swap(self, name: str, content: bytes, was: bytes | None) -> bool:
        """Compare and replace under a lock."""
        with self._lock:
            blob = self._blobs.get(name)
            if was != (None if blob is None else blob.head):
                return False
            self.put(name, [content])
            return True

    def delete(self, name: str) -> None:
        """Drop it; open blobs keep their memory."""
        self._blobs.pop(name, None)

    def listing(self, prefix: str) -> Iterator[Stored]:
        """List the names of this moment."""
        blobs = self._blobs.copy()
        return (Stored(name, blob.nbytes, blob.put) for name, blob in blobs.items() if name.startswith(prefix))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A lock of this process."""
        with self._writing:
            yield
