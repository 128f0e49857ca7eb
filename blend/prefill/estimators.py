"""The estimators that a store keeps: they choose how many rows of a prompt are recomputed."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Protocol

from cachetools import LRUCache

from blend.errors import EntryDamagedError
from blend.quality import Estimator, Judge, Quality, Target
from blend.store.base import ChunkStore

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary

_MOST_TARGETS = 64  # qualities that are remembered: requests may name any


class Estimators(Protocol):
    """Gives the judge of a prompt."""

    def target(self, library: ChunkLibrary, quality: Quality) -> Judge | None:
        """The judge for this quality; None if nothing can be promised."""


class StoredEstimators:
    """The estimators of one store, in memory while they are current. Threads may share it."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._lock = Lock()
        self._targets: LRUCache[tuple[str, Quality, str], Target | None] = LRUCache(_MOST_TARGETS)

    def target(self, library: ChunkLibrary, quality: Quality) -> Target | None:
        """The target for this quality; None if there is no estimator, or it is damaged."""
        name = library.isolated.identity.quality_name
        key = (name, quality, library.generation)
        with self._lock:
            if key not in self._targets:
                self._targets[key] = self._read(name, quality)
            return self._targets[key]

    def _read(self, name: str, quality: Quality) -> Target | None:
        try:
            content = self._store.read_artifact(name)
            if content is None:
                return None
            return Target.of(quality, Estimator.from_bytes(content))
        except (EntryDamagedError, ValueError, TypeError, KeyError):
            return None
