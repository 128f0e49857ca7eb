"""The index of a folder as it stands now: a running process takes up what another one writes."""

from __future__ import annotations

from pathlib import Path
from threading import Lock

from blend_retrieval.generations import manifest_digest
from blend_retrieval.index import ChunkIndex


class CurrentIndex:
    """The index in a directory, read again when a writer has replaced it. Threads may share it."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._lock = Lock()
        self._held: tuple[str, ChunkIndex] | None = None

    def get(self) -> ChunkIndex:
        """The index; raises what `ChunkIndex.load` raises. One small file is read where nothing has changed."""
        with self._lock:
            digest = manifest_digest(self.directory)  # asked first: what is written meanwhile shows the next time
            if self._held is None or self._held[0] != digest:
                self._held = digest, ChunkIndex.load(self.directory)
            return self._held[1]
