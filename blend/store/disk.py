"""A store in files: every name is a path below one directory, shared by threads and processes of POSIX systems."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from math import inf
from operator import attrgetter
from pathlib import Path

from blend.errors import EntryDamagedError
from blend.store.backend import (
    CACHES,
    HEAD,
    SUFFIX,
    Backend,
    Blob,
    Buffer,
    Found,
    Stored,
    close_all,
    is_of_kvblend,
    key_of,
    pinned,
    require_budget,
)
from blend.store.files import StoreFiles, locked

_LOW_WATER = 15 / 16  # of the budget is left after an eviction, so that a full store is not listed for every write

_LEVELS = {"objects": 2, "indexes": 1}  # of folders between a name's first part and its last
_SUFFIXES = {"objects": SUFFIX}


class DiskBlob(Blob):
    """An open file.

    Read by `pread` and not through a memory map: a file that shrinks under a map kills the process, while a short read is
    an error like any other.
    """

    def __init__(self, descriptor: int, files: StoreFiles) -> None:
        self._descriptor = descriptor
        self._files = files
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):  # a folder, a pipe, a device without an end
                raise EntryDamagedError("it is no file")
            self.nbytes = info.st_size
            self.head = os.pread(descriptor, HEAD, 0)
        except OSError as error:
            self.close()
            raise self._files.failed("read", error) from None
        except EntryDamagedError:
            self.close()
            raise

    def read(self, offset: int, into: memoryview) -> None:
        """Read from the file, which may have shrunk."""
        while into.nbytes:
            try:
                count = os.preadv(self._descriptor, [into], offset)
            except OSError as error:
                raise self._files.failed("read", error) from None
            if count == 0:
                raise EntryDamagedError("it is truncated")
            into = into[count:]
            offset += count

    def close(self) -> None:
        """Close the file."""
        descriptor = self._descriptor
        self._descriptor = -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


class DiskBackend(Backend):
    """The directory `root`, which is made when it does not exist; or the store of these `files`.

    budget_bytes: the least recently used caches go before all together exceed it. Several processes that write at the same
    time may each exceed it by a sixteenth for a while. Pinned caches are not evicted: those that are pinned here, unless
    other `pins` are set.
    """

    def __init__(self, root: Path, budget_bytes: int | None = None, files: StoreFiles | None = None) -> None:
        require_budget(budget_bytes)
        self.root = root
        self.place = str(root)
        self.pins: Callable[[], frozenset[str]] = partial(pinned, self)
        self._files = files or StoreFiles(root)
        if files is None:
            self._files.require_writable()
        self._files.tidy()
        self._budget = budget_bytes
        self._lock = threading.Lock()
        self._room = 0.0 if budget_bytes else inf  # bytes that may be written before the store is listed
        self._evictions = 0

    def open_many(self, names: Sequence[str]) -> list[Found]:
        """Open the files, each by one `open`, one `fstat` and one read."""
        blobs: list[Found] = []
        try:
            for name in names:
                try:
                    blobs.append(self._opened(name))
                except EntryDamagedError as error:
                    blobs.append(error)
        except BaseException:
            close_all(blobs)
            raise
        return blobs

    def _opened(self, name: str) -> DiskBlob | None:
        descriptor = self._files.open(self.root / name)
        return None if descriptor is None else DiskBlob(descriptor, self._files)

    def put(self, name: str, blobs: Sequence[Buffer]) -> None:
        """Write beside, flush to the disk, move into place, then evict."""
        if not name.startswith(CACHES):
            self._files.write(self.root / name, blobs)
            return
        nbytes = sum(memoryview(blob).nbytes for blob in blobs)
        require_budget(self._budget, nbytes)
        self._files.write(self.root / name, blobs)
        self.touch(name)
        with self._lock:
            self._room -= nbytes
            if self._budget is not None and self._room < 0:
                self._make_room(self._budget, name)

    def _make_room(self, budget: int, newest: str) -> None:
        """Remove the least recently used caches, but not the newest, until a sixteenth of the budget is free."""
        pins = self.pins() | self.spared()
        caches = [stored for stored in self.listing(CACHES) if key_of(stored.name).digest not in pins]
        total = sum(stored.nbytes for stored in caches)
        most = budget * _LOW_WATER
        for stored in sorted(caches, key=attrgetter("used")):
            if total > most and stored.name != newest:
                total -= stored.nbytes
                self._evictions += self._files.remove(self.root / stored.name)
        self._room = budget - most

    def swap(self, name: str, content: bytes, was: bytes | None) -> bool:
        """Swap under another lock than `writing`, which may be held meanwhile."""
        with locked(self._files, ".swapping"):
            current: bytes | None = b""  # of what is no file, as `read_manifest` has it
            with suppress(EntryDamagedError):
                current = self.read(name)
            if current != was:
                return False
            self.put(name, [content])
        return True

    def delete(self, name: str) -> None:
        """Unlink the file; open blobs keep it."""
        self._files.remove(self.root / name)

    def touch(self, name: str) -> None:
        """Set the modification time to now, if this user may: reading a file does not change it."""
        with suppress(OSError):
            now = time.time()
            os.utime(self.root / name, (now, now))

    @property
    def evictions(self) -> int:
        """Caches that this process evicted."""
        return self._evictions

    def listing(self, prefix: str) -> Iterator[Stored]:
        """List the files, folder by folder."""
        for name, entry in self._entries(prefix):
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # evicted by another process since it was listed
                continue
            except OSError as error:
                raise self._files.failed("written", error) from None
            yield Stored(name, info.st_size, info.st_mtime)

    def names(self, prefix: str) -> Iterator[str]:
        """Names as the folders list them; files are not looked at."""
        return (name for name, _ in self._entries(prefix))

    def folders(self, prefix: str) -> set[str]:
        """Folders as the folder lists them, empty ones too."""
        return set(self._files.folders(self.root / prefix))

    def writing(self) -> AbstractContextManager[None]:
        """A lock on the file `.writing`, which ends with the process that holds it."""
        return locked(self._files)

    def _entries(self, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        first, *path = prefix.rstrip("/").split("/")
        suffix = _SUFFIXES.get(first, "")
        folders = [first]
        for level in range(_LEVELS.get(first, 0)):
            names = path[level : level + 1]
            folders = [
                f"{folder}/{name}" for folder in folders for name in self.folders(folder) if name in (names or [name])
            ]
        for folder in folders:
            for entry in self._files.scan(self.root / folder):
                name = f"{folder}/{entry.name}"
                if entry.name.endswith(suffix) and is_of_kvblend(name):
                    yield name, entry
