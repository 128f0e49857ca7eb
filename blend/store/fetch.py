"""Downloads of whole entries from a server: each once for all its readers, and verified before anyone reads it.

A `Download` brings one entry into memory. A `TieredBlob` is an open entry of a tiered store, in a file of this machine or in a
download. A `Prefetcher` starts downloads ahead of their readers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple
from weakref import WeakSet

from blend.errors import EntryDamagedError, StoreError
from blend.store.backend import Blob, Found, Range, close_all, private_memory
from blend.store.format import EntryHeader
from blend.store.memory import MemoryBlob

IN_FLIGHT_BYTES = 64 << 20
_BATCH = 64


class FetchPool:
    """Runs jobs in their order, in daemon threads that end when no job waits. A job must not raise."""

    def __init__(self, most_threads: int) -> None:
        self._most_threads = most_threads
        self._threads = 0
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()

    def add(self, job: Callable[[], None]) -> None:
        """Queue a job."""
        with self._changed:
            self._jobs.append(job)
            if self._threads < self._most_threads:
                self._threads += 1
                threading.Thread(target=self._work, name="kvblend-fetch", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until no job waits or runs. Returns whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._threads == 0, timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:  # the thread ends in the same critical section in which it found no job
                    self._end()
                    return
                job = self._jobs.popleft()
            try:
                job()
                del job  # it holds a download's memory
            except BaseException:
                with self._changed:
                    self._end()
                raise

    def _end(self) -> None:
        self._threads -= 1
        self._changed.notify_all()


class EntrySource(NamedTuple):
    """An open copy of an entry. guard: stands around each read. report: takes note of an error of this copy."""

    blob: Blob
    guard: Callable[[], AbstractContextManager[object]]
    report: Callable[[StoreError], None]

    def read(self, *ranges: Range) -> None:
        """Fill every buffer. Raises `EntryDamagedError` or `StoreError`."""
        with self.guard():
            is_whole = self.blob.read(*ranges)
        if not is_whole:
            raise EntryDamagedError("it is truncated")

    def download(self, header: EntryHeader) -> memoryview:
        """Read the whole entry, verify it and close the copy. Raises `EntryDamagedError` or `StoreError`."""
        try:
            content = _memory_for(header)
            begin = len(header.beginning)
            if begin < header.nbytes:  # a model may have no layer with bytes
                self.read(Range(begin, content[begin:]))
            for index, layer in enumerate(header.layers):
                if not header.holds(index, content[layer.offset :][: layer.nbytes]):
                    raise EntryDamagedError(f"layer {index} is not what was written")
            return content
        finally:
            self.blob.close()


def _memory_for(header: EntryHeader) -> memoryview:
    """Memory that begins with the header. Raises `EntryDamagedError` when there is too little: a header can be forged."""
    try:
        content = private_memory(header.nbytes)
    except (OSError, OverflowError, ValueError):
        raise EntryDamagedError(f"it claims {header.nbytes:,} bytes, which there is no memory for") from None
    content[: len(header.beginning)] = header.beginning
    return content


class Download:
    """One whole entry on its way into memory.

    Args:
        header: the header of the entry.
        fetch: returns all bytes of the entry, verified; raises `StoreError`.
        keep: called with these bytes in a thread of the pool, after readers have them.
        pool: runs the download.

    Attributes:
        settled: set once the entry was kept, or has failed.

    """

    def __init__(
        self,
        header: EntryHeader,
        fetch: Callable[[], memoryview],
        keep: Callable[[Download, memoryview], None],
        pool: FetchPool,
    ) -> None:
        self.header = header
        self.settled = threading.Event()
        self._fetch = fetch
        self._keep = keep
        self._pool = pool
        self._start = threading.Lock()  # taken once, by the first to start
        self._entry: Future[MemoryBlob] = Future()

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._start.acquire(blocking=False):
            self._pool.add(self._run)

    def entry(self) -> MemoryBlob:
        """The whole entry; starts the download and waits for it. Raises `EntryDamagedError` or `StoreError`."""
        self.start()
        return self._entry.result()

    @property
    def has_failed(self) -> bool:
        """Whether `entry` raises."""
        return self._entry.done() and self._entry.exception() is not None

    def _run(self) -> None:
        try:
            content = self._fetch()
        except StoreError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(StoreError(f"an entry could not be fetched ({error!r:.200})"))
            raise
        else:
            self._entry.set_result(MemoryBlob(content))
            self._pool.add(lambda: self._finish(content))  # behind the downloads that readers wait for

    def _fail(self, error: StoreError) -> None:
        self._entry.set_exception(error)
        self.settled.set()

    def _finish(self, content: memoryview) -> None:
        try:
            self._keep(self, content)
        finally:
            self.settled.set()


class TieredBlob(Blob):
    """An open entry of a tiered store: a file of this machine, until that fails, or a download.

    Args:
        header: the header of the entry, verified.
        siblings: the downloads that were opened together; reading one of them starts all.
        download: the download, where there is no file.
        file: the copy on this machine's disk.
        begin_download: begins, or finds, a download of the same entry once the file has failed.

    """

    def __init__(
        self,
        header: EntryHeader,
        siblings: WeakSet[Download],
        download: Download | None = None,
        *,
        file: EntrySource | None = None,
        begin_download: Callable[[], Download] | None = None,
    ) -> None:
        self.header = header
        self.nbytes = header.nbytes
        self.head = header.beginning
        self.download = download
        self._file = file
        self._begin_download = begin_download
        self._siblings = siblings
        self._lock = threading.Lock()
        if download is not None:
            siblings.add(download)

    @property
    def is_verified(self) -> bool:
        """Whether a download holds the bytes. Those of a file are verified by their reader."""
        return self.download is not None

    def read(self, *ranges: Range) -> bool:
        """From the file; when that fails, from a download."""
        self._start_siblings()
        if self.download is None and self._file is not None:
            try:
                self._file.read(*ranges)
                return True
            except StoreError as error:
                self._leave_file(error)
        assert self.download is not None
        return self.download.entry().read(*ranges)

    def window(self, offset: int, nbytes: int) -> memoryview | None:
        """The memory of the download."""
        self._start_siblings()
        return None if self.download is None else self.download.entry().window(offset, nbytes)

    def reject(self) -> bool:
        """Leave the file, which has other bytes than were written."""
        self._leave_file(EntryDamagedError("it is not what was written"))
        return True

    def close(self) -> None:
        """Close the file. A download ends with its last reader."""
        if self.download is not None:
            self._siblings.discard(self.download)
        if self._file is not None:
            self._file.blob.close()

    def _start_siblings(self) -> None:
        while self._siblings:
            with suppress(KeyError):  # another thread took the last one
                self._siblings.pop().start()

    def _leave_file(self, error: StoreError) -> None:
        """Read a download from now on. Raises `StoreError` when no other place has the entry."""
        with self._lock:
            if self.download is None and self._file is not None and self._begin_download is not None:
                self._file.report(error)
                self.download = self._begin_download()


class Prefetcher:
    """Downloads entries before they are read.

    Args:
        open_many: opens several names.
        pool: runs the downloads.
        most_bytes: how many bytes are in flight at most; a single entry may be larger.

    """

    def __init__(
        self,
        open_many: Callable[[Sequence[str]], list[Found]],
        pool: FetchPool,
        most_bytes: int,
    ) -> None:
        self._open_many = open_many
        self._pool = pool
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._names: deque[tuple[str, int | None]] = deque()
        self._running = False

    def add(self, names: Iterable[str], largest: int | None = None) -> None:
        """Download entries of up to `largest` bytes, in this order. Returns at once; readers meet errors."""
        with self._lock:
            self._names.extend((name, largest) for name in names)
            is_running = self._running
            self._running = True
        if not is_running:
            self._pool.add(self._run)

    def _run(self) -> None:
        in_flight: list[Download] = []
        try:
            while batch := self._next_batch():
                downloads = self._begun(batch)
                while downloads:  # what was kept gives its memory back: nothing here may hold it
                    self._wait_for_room(in_flight, downloads[0].header.nbytes)
                    in_flight.append(downloads.popleft())
                    in_flight[-1].start()
        except BaseException:
            with self._lock:
                self._running = False
            raise

    def _next_batch(self) -> dict[str, int | None]:
        with self._lock:
            self._running = bool(self._names)
            return dict(self._names.popleft() for _ in range(min(_BATCH, len(self._names))))

    def _begun(self, batch: dict[str, int | None]) -> deque[Download]:
        """Downloads of the entries that are not on this machine and not too large."""
        try:
            blobs = self._open_many(list(batch))
        except StoreError:  # readers meet it
            return deque()
        downloads: deque[Download] = deque()
        for blob, largest in zip(blobs, batch.values(), strict=True):
            download = blob.download if isinstance(blob, TieredBlob) else None
            if download is not None and (largest is None or download.header.nbytes <= largest):
                downloads.append(download)
        close_all(blobs)
        return downloads

    def _wait_for_room(self, in_flight: list[Download], nbytes: int) -> None:
        """Wait until `nbytes` more may be in flight; takes what has settled out of the list."""
        while True:
            in_flight[:] = [download for download in in_flight if not download.settled.is_set()]
            if not in_flight or sum(download.header.nbytes for download in in_flight) + nbytes <= self._most_bytes:
                return
            in_flight[0].settled.wait()
