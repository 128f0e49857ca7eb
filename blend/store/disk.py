"""A store in files: every name is a path below one directory, shared by threads and processes of POSIX systems."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from operator import attrgetter
from pathlib import Path

from blend.errors import EntryDamagedError
from blend.store.backend import CACHES, SUFFIX, Backend, Blob, Buffer, Range, Stored, key_of, pinned, require_budget
from blend.store.files import StoreFiles, locked, open_root

_TOUCH_EVERY_S = 1.0
_RECOUNT_EVERY_S = 5.0
_LISTINGS_SHARE = 20  # listing takes one second in so many at most
_RECOUNT_SHARE = 8  # and after writing one byte in so many of the budget
_QUEUE = 4096
_INSTANT = 1e-6

_LEVELS = {"objects": 2, "indexes": 1}  # of folders between a name's first part and its last
_SUFFIXES = {"objects": SUFFIX}


class UseClock:
    """The machine's clock, but never going back: not behind the latest moment that any process wrote into the store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ahead = 0.0
        self._latest = float("-inf")

    def now(self) -> float:
        """The moment, later than any that was asked for or seen."""
        with self._lock:
            moment = time.time()
            self._ahead = max(self._ahead, self._latest + _INSTANT - moment)
            self._latest = moment + self._ahead
            return self._latest

    def saw(self, moment: float) -> None:
        """Take note of a moment of another process."""
        with self._lock:
            self._latest = max(self._latest, moment)


class Evictor:
    """Removes the least recently used files once all together exceed `budget_bytes`.

    A listing of the store gives sizes and order. Between two listings the evictor counts what it writes and works off that
    order, so that a full store is not listed for every write. The next listing, after some seconds or an eighth of the budget,
    finds what other processes wrote.
    """

    def __init__(
        self,
        files: StoreFiles,
        listing: Callable[[], Iterator[Stored]],
        budget_bytes: int | None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.evictions = 0
        self._files = files
        self._listing = listing
        self._clock = UseClock()
        self._lock = threading.Lock()
        self._used_bytes = self._written_bytes = 0
        self._list_after = float("-inf")
        self._oldest: deque[Stored] = deque()

    @contextmanager
    def placing(self, name: str, nbytes: int) -> Iterator[None]:
        """Held while a file of `nbytes` comes to its place; other files are evicted then. Raises `StoreError`."""
        path = self._files.root / name
        with self._lock:
            if self.budget_bytes is not None and self._is_due(self.budget_bytes):
                self._list(name)
            replaced = _size(path)
            yield
            self._stamp(path)
            self._used_bytes += nbytes - replaced
            self._written_bytes += nbytes
            if self.budget_bytes is not None:
                self._evict(self.budget_bytes, name)

    def opened(self, path: Path) -> None:
        """Remember that the file was used just now."""
        # The modification time is ours to keep: no system changes it when a file is read. A store that cannot be written to is
        # still readable; it only forgets what was used last.
        with suppress(OSError):
            used = path.stat().st_mtime
            self._clock.saw(used)
            if self._clock.now() - used > _TOUCH_EVERY_S:
                self._stamp(path)

    def remove(self, path: Path) -> bool:
        """Remove what is at `path`; whether there was anything. Raises `StoreError`."""
        with self._lock:
            nbytes = _size(path)
            removed = self._files.remove(path)
            self._used_bytes -= nbytes if removed else 0
            return removed

    def _stamp(self, path: Path) -> None:
        now = self._clock.now()
        with suppress(OSError):
            os.utime(path, (now, now))

    def _is_due(self, budget: int) -> bool:
        return self._written_bytes > budget // _RECOUNT_SHARE or time.monotonic() >= self._list_after

    def _evict(self, budget: int, newest: str) -> None:
        while self._used_bytes > budget:
            if not self._oldest:
                self._list(newest)
            if not self._oldest:
                return
            file = self._oldest.popleft()
            path = self._files.root / file.name
            # What another process has evicted meanwhile made room for what it wrote, and neither is in our count.
            if _is_unused_since(path, file.used) and self._files.remove(path):
                self._used_bytes -= file.nbytes
                self.evictions += 1

    def _list(self, newest: str) -> None:
        began = time.monotonic()
        files = sorted(self._listing(), key=attrgetter("used"))
        self._used_bytes = sum(file.nbytes for file in files)
        self._written_bytes = 0
        if files:
            self._clock.saw(files[-1].used)
        evictable = [file for file in files if file.name != newest]
        self._oldest = deque(evictable[: max(_QUEUE, len(evictable) // 10)])
        ended = time.monotonic()
        self._list_after = ended + max(_RECOUNT_EVERY_S, _LISTINGS_SHARE * (ended - began))


def _is_unused_since(path: Path, used: float) -> bool:
    """Whether it is there and was neither opened nor replaced since it was listed."""
    with suppress(OSError):
        return path.lstat().st_mtime <= used
    return False


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_size
    return 0


class DiskBlob(Blob):
    """An open file.

    Read by `pread` and not through a memory map: a file that shrinks under a map kills the process, while a short read is
    an error like any other.
    """

    def __init__(
        self,
        descriptor: int,
        files: StoreFiles,
        head: int,
    ) -> None:
        self._descriptor = descriptor
        self._files = files
        try:
            self.nbytes = os.fstat(descriptor).st_size
            self.head = os.pread(descriptor, head, 0) if head else b""
        except OSError as error:
            self.close()
            raise self._failed(error) from None

    def read(self, *ranges: Range) -> bool:
        """Read each range from the file."""
        try:
            return all(self._read(part.offset, part.into) for part in ranges)
        except OSError as error:
            raise self._failed(error) from None

    def close(self) -> None:
        """Close the file."""
        descriptor = self._descriptor
        self._descriptor = -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def _read(self, offset: int, into: memoryview) -> bool:
        filled = 0
        while filled < into.nbytes:
            count = os.preadv(self._descriptor, [into[filled:]], offset + filled)
            if count == 0:
                return False
            filled += count
        return True

    def _failed(self, error: OSError) -> Exception:
        # A network file system says "stale" of an open file that another machine has evicted.
        if error.errno == errno.ESTALE:
            self._files.require_present()
            return EntryDamagedError(f"it cannot be read ({error.strerror})")
        return self._files.failed("read", error)


class DiskBackend(Backend):
    """The directory `root`, which is made when it does not exist; or the store of these `files`.

    budget_bytes: after each `put` the least recently used caches go until all together are within it; several processes
    that write at the same time may exceed it for some seconds. Pinned caches are not evicted.
    """

    def __init__(
        self,
        root: Path,
        budget_bytes: int | None = None,
        files: StoreFiles | None = None,
    ) -> None:
        require_budget(budget_bytes)
        self.root = root
        self.place = str(root)
        self._pins: Callable[[], frozenset[str]] = partial(pinned, self)
        self._files = files or open_root(root)
        self._evictor = Evictor(self._files, self._caches, budget_bytes)

    def take_pins_from(self, pins: Callable[[], frozenset[str]]) -> None:
        """Spare the caches with these digests from eviction, instead of those that are pinned here."""
        self._pins = pins

    def open(self, name: str, head: int) -> DiskBlob | None:
        """Open the file: one `open`, one `fstat`, one read."""
        descriptor = self._files.open(self.root / name)
        return None if descriptor is None else DiskBlob(descriptor, self._files, head)

    def put(self, name: str, blobs: Sequence[Buffer]) -> None:
        """Write beside, flush to the disk, move into place, then evict."""
        path = self.root / name
        placing = None
        if name.startswith(CACHES):
            nbytes = sum(memoryview(blob).nbytes for blob in blobs)
            require_budget(self._evictor.budget_bytes, nbytes)
            placing = self._evictor.placing(name, nbytes)
        self._files.write(path, blobs, placing)

    def swap(
        self,
        name: str,
        content: bytes,
        was: bytes | None,
    ) -> bool:
        """Swap under another lock than `writing`, which may be held meanwhile."""
        with locked(self._files, ".swapping"):
            if self.read(name, 1 << 30) != was:
                return False
            self.put(name, [content])
        return True

    def delete(self, name: str) -> bool:
        """Unlink the file; open blobs keep it."""
        path = self.root / name
        return self._evictor.remove(path) if name.startswith(CACHES) else self._files.remove(path)

    def touch(self, name: str) -> None:
        """Renew the modification time, when it is more than a second old."""
        self._evictor.opened(self.root / name)

    @property
    def evictions(self) -> int:
        """Caches that this process evicted."""
        return self._evictor.evictions

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
        return {entry.name for entry in self._files.folders(self.root / prefix)}

    def writing(self) -> AbstractContextManager[None]:
        """A lock on the file `.writing`, which ends with the process that holds it."""
        return locked(self._files)

    def _entries(self, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        first, *path = prefix.rstrip("/").split("/")
        suffix = _SUFFIXES.get(first, "")
        folders = iter([first])
        for level in range(_LEVELS.get(first, 0)):
            name = path[level] if level < len(path) else None
            folders = self._below(folders, name)
        for folder in folders:
            for entry in self._files.scan(self.root / folder):
                if entry.name.endswith(suffix):
                    yield f"{folder}/{entry.name}", entry

    def _below(self, folders: Iterator[str], name: str | None) -> Iterator[str]:
        """The folders in these folders; with a name those that are called so."""
        for folder in folders:
            for entry in self._files.folders(self.root / folder):
                if name in (None, entry.name):
                    yield f"{folder}/{entry.name}"

    def _caches(self) -> Iterator[Stored]:
        """What may be evicted: pinned caches neither count nor go."""
        pins = self._pins() | self.spared()
        return (stored for stored in self.listing(CACHES) if key_of(stored.name).digest not in pins)
