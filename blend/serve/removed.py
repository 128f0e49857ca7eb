"""What was removed from a store and must not come back: caches of chunks that only a deleted document had.

A prompt that was asked before the deletion may find afterwards that the store lacks them, and would have them computed for
later prompts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import takewhile
from time import monotonic
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from blend.types import ChunkKey

if TYPE_CHECKING:
    from blend.store import ChunkStore


KEEP_S = 3600.0


class Removed:
    """Keys of one store, until somebody calls for them anew. Threads may share it.

    A key is forgotten after `KEEP_S`: by then nothing more is stored for the prompts that began before it was removed.
    """

    def __init__(self) -> None:
        self._lock, self._keys = threading.Lock(), dict[ChunkKey, float]()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[ChunkKey]) -> None:
        """Nothing more is put under these. To be called before they are deleted: what was put by then goes with them."""
        with self._lock:
            now = monotonic()
            for key in keys:
                self._keys.pop(key, None)  # the oldest stay in front
                self._keys[key] = now
            for key in list(takewhile(lambda key: self._keys[key] < now - KEEP_S, self._keys)):
                del self._keys[key]

    def allow(self, keys: Iterable[ChunkKey]) -> None:
        """A document or a question brings them anew."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    def unless_removed(self, key: ChunkKey, begun: float, keep: Callable[[], None]) -> None:
        """Have a cache stored under this key, unless it was removed. keep: stores it; what it raises goes on.

        begun: when what calls for it began, by `time.monotonic`. Nothing is stored `KEEP_S` later.
        """
        with self._lock:  # until it is written: a removal waits, and deletes it then
            if key not in self._keys and begun >= monotonic() - KEEP_S:
                keep()


_OF: WeakKeyDictionary[ChunkStore, Removed] = WeakKeyDictionary()
_MAKING = threading.Lock()


def removed_from(store: ChunkStore) -> Removed:
    """The one of this store, for all who write to it in this process."""
    with _MAKING:
        return _OF.setdefault(store, Removed())
