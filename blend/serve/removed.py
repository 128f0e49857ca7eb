"""What was removed from a store and must not come back: caches of chunks that only a deleted document had.

A prompt that was asked before the deletion may find afterwards that the store lacks them, and would have them computed for
later prompts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from blend.types import ChunkKey

if TYPE_CHECKING:
    from blend.store import ChunkStore


class Removed:
    """Keys of one store, until somebody calls for them anew. Threads may share it."""

    def __init__(self) -> None:
        self._lock, self._keys, self._namespaces = threading.Lock(), set[ChunkKey](), set[str]()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[ChunkKey]) -> None:
        """Nothing more is put under these. To be called before they are deleted: what was put by then goes with them."""
        with self._lock:
            self._keys.update(keys)

    def add_all(self, namespace: str) -> None:
        """Nothing more is put into this namespace, whatever calls for it: a surrogate context was exchanged."""
        with self._lock:
            self._namespaces.add(namespace)

    def allow(self, keys: Iterable[ChunkKey]) -> None:
        """A document or a question brings them anew."""
        with self._lock:
            self._keys.difference_update(keys)

    def unless_removed(self, key: ChunkKey, keep: Callable[[], None]) -> None:
        """Have a cache stored under this key, unless it was removed. keep: stores it; what it raises goes on."""
        with self._lock:  # until it is written: a removal waits, and deletes it then
            if key not in self._keys and key.namespace not in self._namespaces:
                keep()


_OF: WeakKeyDictionary[ChunkStore, Removed] = WeakKeyDictionary()
_MAKING = threading.Lock()


def removed_from(store: ChunkStore) -> Removed:
    """The one of this store, for all who write to it in this process."""
    with _MAKING:
        return _OF.setdefault(store, Removed())
