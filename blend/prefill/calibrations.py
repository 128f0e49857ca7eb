"""Calibrations of quality, as the store keeps them: they give the judge of a prompt."""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from cachetools import LRUCache

from blend.errors import EntryDamagedError
from blend.quality import Calibration, Drift, Judge, Quality, Target
from blend.store.base import ChunkStore

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary

_MOST_TARGETS = 64  # qualities that are remembered: requests may name any


class Calibrations(Protocol):
    """Gives the judge of a prompt. drift: see `StoredCalibrations`."""

    @property
    def drift(self) -> Drift:
        """Of the estimates."""

    def target(self, library: ChunkLibrary, quality: Quality) -> Judge | None:
        """For this quality; None if nothing can be promised."""


class StoredCalibrations:
    """The calibrations of one store, held in memory while they are current. Threads may share it.

    drift: of the current calibration's estimates, as audits find it. audits: the file that keeps them, under the name `corpus`.
    """

    def __init__(self, store: ChunkStore, audits: Path | None = None, corpus: str = "") -> None:
        self._store, self._lock, self.drift, self._calibration = store, Lock(), Drift(), ""
        self._new_drift = partial(Drift, audits, corpus)
        self._held: LRUCache[tuple[str, Quality], tuple[str, Target | None]] = LRUCache(_MOST_TARGETS)

    def target(self, library: ChunkLibrary, quality: Quality) -> Target | None:
        """For this quality; None if there is no calibration, or it is damaged."""
        name = library.isolated.identity.quality_name
        with self._lock:
            generation, target = self._held.get((name, quality), ("", None))
        if generation != library.generation:
            target = self._read(name, quality)
            with self._lock:
                self._held[name, quality] = library.generation, target
        return target

    def _read(self, name: str, quality: Quality) -> Target | None:
        try:
            content = self._store.read_artifact(name)
            if content is None:
                return None
            calibration, digest = Calibration.from_bytes(content), sha256(content).hexdigest()
            with self._lock:
                if digest != self._calibration:
                    self._calibration, self.drift = digest, self._new_drift(digest)
            return Target.of(quality, calibration, self.drift)
        except (EntryDamagedError, ValueError, TypeError, KeyError):
            return None
