"""Who reads files when: a short first try for all, a long one for those that need it, within one budget of memory.

`ReaderLanes` is shared by the corpora of all tenants. A file that its first try did not finish waits for the lane of long
ones, and holds up neither its own corpus nor others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future

from blend.serve.documents.uploads import Upload
from blend.serve.turns import RecentUse, Turns
from blend_retrieval.document import LoadedDocuments
from blend_retrieval.isolated import FIRST_MEMORY, IsolatedReader, ReadingLimits

FIRST_TRIES = 3  # that run at a time
READER_MEMORY = FIRST_TRIES * FIRST_MEMORY + ReadingLimits.memory
"""Bytes of memory of all readers together, 4 GiB."""
_SHARE = 2  # first tries of one tenant
_RESERVED = 1  # for tenants whose files took little time lately


class ReaderLanes:
    """Places of readers. Tenants whose files took long lately come last."""

    def __init__(self) -> None:
        use = RecentUse()
        self._first = Turns(FIRST_TRIES, _SHARE, use=use, reserved=_RESERVED)
        self._long = Turns(1, 1, use=use)

    def place(self, tenant: str, *, is_long: bool) -> ReaderPlace:
        """A place that the tenant waits for, and must leave. Raises the error of `close`."""
        return ReaderPlace(self._long if is_long else self._first, tenant)

    def close(self, error: Callable[[], Exception]) -> None:
        """End all waiting with this error."""
        self._first.close(error)
        self._long.close(error)


class ReaderPlace:
    """A place for the reader of one file, with the file's reading."""

    def __init__(self, turns: Turns, tenant: str) -> None:
        self._turns = turns
        self._tenant = tenant
        self._future = turns.line_up(tenant)
        self._reader: IsolatedReader | None = None
        self._begun_at = 0.0

    def wait(self, on_done: Callable[[], None]) -> Generator[Future[None], None, None]:
        """Wait for the place: yields what is waited for. on_done: called from any thread when that has come."""
        self._future.add_done_callback(lambda future: on_done())
        while not self._future.done():
            yield self._future
        self._future.result()

    def read(
        self, limits: ReadingLimits, upload: Upload, on_done: Callable[[], None]
    ) -> Generator[Future[LoadedDocuments], None, LoadedDocuments]:
        """Read a file in the place that has come: yields what is waited for. Raises as `IsolatedReader.attempt` does."""
        self._begun_at = time.monotonic()
        self._reader = IsolatedReader(limits)
        future = Future[LoadedDocuments]()
        future.add_done_callback(lambda future: on_done())
        reading = threading.Thread(
            target=_read, args=(self._reader, upload, future), name="kvblend-reader", daemon=True
        )
        reading.start()
        del upload
        while not future.done():
            yield future
        return future.result()

    def leave(self) -> None:
        """Give the place back; a file that is still being read is given up."""
        if self._reader is not None:
            self._reader.close()
        seconds = time.monotonic() - self._begun_at if self._begun_at else 0.0
        self._turns.leave(self._tenant, self._future, seconds)


def _read(reader: IsolatedReader, upload: Upload, future: Future[LoadedDocuments]) -> None:
    try:
        future.set_result(reader.attempt(upload.id, upload.data, upload.text_field))
    except BaseException as error:  # it is raised where the result is waited for
        future.set_exception(error)
