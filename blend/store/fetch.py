"""Downloads of whole entries from a server: each once for all its readers, and verified before anyone reads it.

A `Download` brings one entry into memory. A `LocalCopy` is an entry in a file of this machine, with a download in reserve.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from blend.errors import EntryDamagedError, StoreError
from blend.store.backend import Blob
from blend.store.format import EntryHeader
from blend.store.tier import Copy

AT_ONCE = 16


class FetchPool:
    """Runs each job in a daemon thread, which a hung server cannot keep alive. room: for `AT_ONCE` of them to fetch."""

    def __init__(self) -> None:
        self.room = threading.Semaphore(AT_ONCE)
        self._running = 0
        self._changed = threading.Condition()

    def start(self, job: Callable[[], None]) -> None:
        """Begin a job."""
        with self._changed:
            self._running += 1
        try:
            threading.Thread(target=self._run, args=([job],), name="kvblend-fetch", daemon=True).start()
        except RuntimeError:  # the system has no more threads
            self._run([job])

    def wait(self, timeout_s: float) -> bool:
        """Wait until no job runs. Returns whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._running == 0, timeout_s)

    def _run(self, jobs: list[Callable[[], None]]) -> None:
        try:
            jobs.pop()()  # nothing holds it afterwards: it holds a download's memory
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()


class EntryBlob(Blob):
    """An open entry whose header is verified."""

    def __init__(self, header: EntryHeader) -> None:
        self.header = header
        self.nbytes = header.nbytes
        self.head = header.beginning


class Download(EntryBlob):
    """One whole entry on its way into memory, from its first reader on, or in use afterwards.

    Args:
        header: the header of the entry.
        fetch: returns all bytes of the entry, verified; raises `StoreError`.
        keep: called with these bytes once readers have them.
        pool: runs the download.
        group: the downloads that were opened together and have not begun; reading one of them starts all.

    """

    is_verified = True

    def __init__(
        self,
        header: EntryHeader,
        fetch: Callable[[], memoryview],
        keep: Callable[[Download, memoryview], None],
        *,
        pool: FetchPool,
        group: list[Download],
    ) -> None:
        super().__init__(header)
        self._fetch_all = fetch
        self._keep = keep
        self._pool = pool
        self._group = group
        self._start = threading.Lock()  # taken once, by the first to start
        self._content: Future[memoryview] = Future()

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._start.acquire(blocking=False):
            self._pool.start(self._run)

    def wait(self) -> None:
        """Wait until it has ended, well or not."""
        self._content.exception()

    def _fetch(self, offset: int, into: memoryview) -> None:
        for download in (self, *self._group):
            download.start()
        self._group.clear()
        into[:] = self._content.result()[offset : offset + into.nbytes]

    def close(self) -> None:
        """Let go of the others. A download ends with its last reader."""
        self._group = []

    def _run(self) -> None:
        try:
            with self._pool.room:
                content = self._fetch_all()
        except BaseException as error:
            self._content.set_exception(error)
        else:
            self._content.set_result(content)
            self._keep(self, content)


class LocalCopy(EntryBlob):
    """An entry in a file of this machine, until that fails.

    Args:
        copy: the file.
        replace: begins, or finds, a download of the same entry after this error of the file; raises `StoreError`.

    """

    def __init__(self, copy: Copy, replace: Callable[[StoreError], Download]) -> None:
        super().__init__(copy.header)
        self._copy = copy
        self._replace = replace
        self._download: Download | None = None

    @property
    def is_verified(self) -> bool:
        """Whether a download holds the bytes. Those of a file are verified by their reader."""
        return self._download is not None

    def _fetch(self, offset: int, into: memoryview) -> None:
        if self._download is None:
            try:
                self._copy.read(offset, into)
                return
            except StoreError as error:
                self._download = self._replace(error)
        self._download.read(offset, into)

    def reject(self) -> bool:
        """Leave the file, which has other bytes than were written."""
        self._download = self._replace(EntryDamagedError("it is not what was written"))
        return True

    def close(self) -> None:
        """Close the file."""
        self._copy.blob.close()
