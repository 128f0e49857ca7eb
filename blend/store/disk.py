"""Chunk caches in a directory: `objects/<namespace>/<digest[:2]>/<digest>.safetensors`, each as `header` lays it out.

Torch is loaded when an entry is opened or put, not to look at what a store holds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from blend.errors import StoreError
from blend.store.artifacts import Artifacts
from blend.store.base import ChunkStore, StoreStats, require_budget
from blend.store.codec import Codec
from blend.store.eviction import Evictor, StoredFile
from blend.store.header import SUFFIX
from blend.store.root import open_root, read_descriptions, write_description
from blend.store.seal import Seal
from blend.types import ChunkCache, ChunkKey

if TYPE_CHECKING:
    from blend.store.disk_reader import DiskReader, EntryOpener

_SAFE_NAME = re.compile(r"[0-9A-Za-z_-]{1,128}")


class DiskStore(ChunkStore):
    """A store in the directory `root`, shared by threads and processes of POSIX systems.

    codec: how new entries are written; entries of every codec are read.
    budget_bytes: after each `put` the least recently opened entries go until all files together are within it; several
    processes that write at the same time may exceed it for some seconds.
    seal: what entries and artifacts are sealed with; those with another seal count as damaged.
    """

    def __init__(self, root: Path, codec: Codec, seal: Seal, budget_bytes: int | None = None) -> None:
        require_budget(budget_bytes)
        self.root = root
        self._codec, self._seal = codec, seal
        self._files = open_root(root)
        self._artifacts = Artifacts(self._files, seal)
        self._evictor = Evictor(self._files, self._stored, budget_bytes)

    def open(self, key: ChunkKey) -> DiskReader | None:
        """One `open`, one read and one digest; the layers are read when asked for."""
        path = self._path(key)
        reader = self._opener.open(path, key)
        if reader is not None:
            self._evictor.opened(path)
        return reader

    def put(self, key: ChunkKey, cache: ChunkCache) -> None:
        """Encode, write beside, flush to the disk, move into place, then evict."""
        from blend.store.entry import encode_entry

        path = self._path(key)
        header, blobs = encoded = encode_entry(key, cache, self._codec, self._seal)
        require_budget(self._evictor.budget_bytes, encoded.nbytes)
        self._files.write(path, (header, *blobs), self._evictor.placing(path, encoded.nbytes))

    def delete(self, key: ChunkKey) -> None:
        """Unlink the file; open readers keep it."""
        self._evictor.remove(self._path(key))

    def keys(self, namespace: str | None = None) -> Iterator[ChunkKey]:
        """Keys as the directories list them; files are not opened."""
        for key, _ in self._listing(namespace):
            yield key

    def stats(self) -> StoreStats:
        """Files and their bytes, headers included."""
        sizes = [file.nbytes for file in self._stored()]
        return StoreStats(len(sizes), sum(sizes))

    def describe(self, namespace: str, description: Mapping[str, str]) -> None:
        """Write `namespaces/<namespace>.json`."""
        write_description(self._files, _safe(namespace), description)

    def namespaces(self) -> dict[str, dict[str, str]]:
        """Described namespaces and those that have a directory of entries."""
        listed: dict[str, dict[str, str]] = {entry.name: {} for entry in self._files.folders(self.root / "objects")}
        return {**listed, **read_descriptions(self._files)}

    @property
    def generation(self) -> str:
        """One small file."""
        return self._artifacts.generation

    def advance(self) -> None:
        """Replace the file."""
        self._artifacts.advance()

    def read_artifact(self, name: str) -> bytes | None:
        """One file, its digest verified."""
        return self._artifacts.read(name)

    def write_artifact(self, name: str, content: bytes) -> None:
        """Write beside, flush to the disk, move into place."""
        self._artifacts.write(name, content)

    def delete_artifact(self, name: str) -> None:
        """Unlink the file."""
        self._artifacts.delete(name)

    def artifacts(self) -> Iterator[str]:
        """Names as the directory lists them."""
        return self._artifacts.names()

    def writing(self) -> AbstractContextManager[None]:
        """A lock between processes."""
        return self._artifacts.writing()

    @cached_property
    def _opener(self) -> EntryOpener:
        from blend.store.disk_reader import EntryOpener

        return EntryOpener(self._files, self._seal)

    def _path(self, key: ChunkKey) -> Path:
        digest = _safe(key.digest)
        return self.root / "objects" / _safe(key.namespace) / digest[:2] / f"{digest}{SUFFIX}"

    def _listing(self, namespace: str | None = None) -> Iterator[tuple[ChunkKey, os.DirEntry[str]]]:
        for space in self._files.folders(self.root / "objects"):
            if namespace not in (None, space.name):
                continue
            for bucket in self._files.folders(space.path):
                for entry in self._files.scan(bucket.path):
                    if entry.name.endswith(SUFFIX):
                        yield ChunkKey(space.name, entry.name.removesuffix(SUFFIX)), entry

    def _stored(self) -> Iterator[StoredFile]:
        for _, entry in self._listing():
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # evicted by someone else since it was listed
                continue
            except OSError as error:
                raise self._files.failed("written", error) from None
            yield StoredFile(entry.path, info.st_size, info.st_mtime)


def _safe(name: str) -> str:
    if not _SAFE_NAME.fullmatch(name):
        raise StoreError(f"{name!r} cannot name a store entry: use the hex digests that CacheIdentity.key makes")
    return name
