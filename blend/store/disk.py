"""Chunk caches in a directory: `objects/<namespace>/<digest[:2]>/<digest>.safetensors`, each as `entry` lays it out."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NamedTuple

from blend.errors import StoreError
from blend.store.artifacts import Artifacts
from blend.store.base import ChunkStore, StoreStats, require_budget
from blend.store.codec import Codec
from blend.store.disk_reader import DiskReader, Scratch, open_entry
from blend.store.entry import SUFFIX, encode_entry
from blend.store.root import open_root, read_descriptions, unusable, write_atomically, write_description
from blend.types import ChunkCache, ChunkKey

_TOUCH_EVERY_S = 1.0
_RECOUNT_EVERY_S = 5.0
_SAFE_NAME = re.compile(r"[0-9A-Za-z_-]{1,128}")


class StoredFile(NamedTuple):
    """One entry as the directory lists it; `used` is when it was last opened, in seconds since the epoch."""

    key: ChunkKey
    path: str
    nbytes: int
    used: float


class DiskStore(ChunkStore):
    """A store in the directory `root`, shared by threads and processes of POSIX systems.

    codec: how new entries are written; entries of every codec are read.
    budget_bytes: after each `put` the least recently opened entries go until all files together are within it; several
    processes that write at the same time may exceed it for some seconds.
    """

    def __init__(self, root: Path, codec: Codec, budget_bytes: int | None = None) -> None:
        require_budget(budget_bytes)
        self.root = root
        self._codec = codec
        self._budget = budget_bytes
        self._scratch = Scratch()
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._counted_at = float("-inf")
        open_root(root)
        self._artifacts = Artifacts(root)

    def open(self, key: ChunkKey) -> DiskReader | None:
        """One `open`, one read and one checksum; the layers are read when asked for."""
        path = self._path(key)
        reader = open_entry(path, key, self._scratch)
        if reader is not None:
            _touch(path)
        return reader

    def put(self, key: ChunkKey, cache: ChunkCache) -> None:
        """Encode, write beside, flush to the disk, move into place, then evict."""
        path = self._path(key)
        header, blobs = encoded = encode_entry(key, cache, self._codec)
        require_budget(self._budget, encoded.nbytes)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, (header, *blobs), self.root / "tmp")
        except OSError as error:
            raise unusable(self.root, error) from None
        self._evict(path, encoded.nbytes)

    def delete(self, key: ChunkKey) -> None:
        """Unlink the file; open readers keep it."""
        try:
            self._path(key).unlink(missing_ok=True)
        except NotADirectoryError:
            return
        except OSError as error:
            raise unusable(self.root, error) from None

    def keys(self, namespace: str | None = None) -> Iterator[ChunkKey]:
        """Keys as the directories list them; files are not opened."""
        for key, _ in self._listing(namespace):
            yield key

    def stats(self) -> StoreStats:
        """Files and their bytes, headers included."""
        sizes = [file.nbytes for file in self._files()]
        return StoreStats(len(sizes), sum(sizes))

    def describe(self, namespace: str, description: Mapping[str, str]) -> None:
        """Write `namespaces/<namespace>.json`."""
        write_description(self.root, _safe(namespace), description)

    def namespaces(self) -> dict[str, dict[str, str]]:
        """Described namespaces and those that have a directory of entries."""
        listed: dict[str, dict[str, str]] = {entry.name: {} for entry in _subdirectories(self.root / "objects")}
        return {**listed, **read_descriptions(self.root)}

    @property
    def generation(self) -> str:
        """One small file."""
        return self._artifacts.generation

    def advance(self) -> None:
        """Replace the file."""
        self._artifacts.advance()

    def read_artifact(self, name: str) -> bytes | None:
        """One file, its checksum verified."""
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

    def _path(self, key: ChunkKey) -> Path:
        digest = _safe(key.digest)
        return self.root / "objects" / _safe(key.namespace) / digest[:2] / f"{digest}{SUFFIX}"

    def _listing(self, namespace: str | None = None) -> Iterator[tuple[ChunkKey, os.DirEntry[str]]]:
        for space in _subdirectories(self.root / "objects"):
            if namespace not in (None, space.name):
                continue
            for bucket in _subdirectories(space.path):
                for entry in _scan(bucket.path):
                    if entry.name.endswith(SUFFIX):
                        yield ChunkKey(space.name, entry.name.removesuffix(SUFFIX)), entry

    def _files(self) -> Iterator[StoredFile]:
        for key, entry in self._listing():
            with suppress(OSError):  # evicted by someone else since it was listed
                info = entry.stat()
                yield StoredFile(key, entry.path, info.st_size, info.st_mtime)

    def _evict(self, newest: Path, added: int) -> None:
        if self._budget is None:
            return
        with self._lock:
            self._used_bytes += added
            fresh = time.monotonic() - self._counted_at < _RECOUNT_EVERY_S
            if fresh and self._used_bytes <= self._budget:
                return
            files = sorted(self._files(), key=lambda file: file.used)
            self._used_bytes = sum(file.nbytes for file in files)
            self._counted_at = time.monotonic()
            for file in files:
                if self._used_bytes <= self._budget:
                    return
                if file.path != str(newest):
                    self._drop(file)

    def _drop(self, file: StoredFile) -> None:
        try:
            Path(file.path).unlink()
        except FileNotFoundError:  # another process evicted it first
            pass
        except OSError as error:
            raise unusable(self.root, error) from None
        self._used_bytes -= file.nbytes


def _safe(name: str) -> str:
    if not _SAFE_NAME.fullmatch(name):
        raise StoreError(f"{name!r} cannot name a store entry: use the hex digests that CacheIdentity.key makes")
    return name


def _touch(path: Path) -> None:
    # The modification time is ours to keep: no system changes it when a file is read. A store that cannot be written
    # to is still readable; it only forgets what was used last.
    now = time.time()
    with suppress(OSError):
        if abs(now - path.stat().st_mtime) > _TOUCH_EVERY_S:
            os.utime(path, (now, now))


def _subdirectories(path: Path | str) -> Iterator[os.DirEntry[str]]:
    return (entry for entry in _scan(path) if entry.is_dir())


def _scan(path: Path | str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        return
