"""Downloads of entries from a server: in pieces, each verified before anybody sees it, once for all readers.

A `FetchPool` runs requests by priority. A `Download` holds one entry. A `TieredBlob` is an open entry of a tiered store, backed
by a download or by a file of this machine. A `Prefetcher` starts downloads ahead of their readers.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import NamedTuple
from weakref import WeakSet

from blend.errors import EntryDamagedError, StoreError
from blend.store.backend import Blob, Found, Range, close_all, private_memory
from blend.store.format import LayerLayout
from blend.store.reader import CheckedEntry

IN_FLIGHT_BYTES = 64 << 20
_REQUEST_BYTES = 1 << 20  # smaller pieces are fetched together
_LOOK_UP, _KEEP = -1, 1 << 30  # ranks before and after all pieces
_BATCH = 64


class FetchPool:
    """Runs jobs in at most `most` daemon threads, which end when nothing is left to do. A job must not raise."""

    def __init__(self, most: int) -> None:
        self._most, self._threads = most, 0
        self._changed = threading.Condition()
        self._jobs: list[tuple[int, int, Callable[[], None]]] = []
        self._turns = count()

    def add(self, rank: int, run: Callable[[], None]) -> None:
        """Queue a job. Lower ranks run first, jobs of one rank in their order."""
        with self._changed:
            heapq.heappush(self._jobs, (rank, next(self._turns), run))
            if self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name="kvblend-fetch", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do; whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._threads == 0, timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:  # the thread ends in the same critical section in which it found no job
                    self._end()
                    return
                run = heapq.heappop(self._jobs)[2]
            try:
                run()
            except BaseException:
                with self._changed:
                    self._end()
                raise

    def _end(self) -> None:
        self._threads -= 1
        self._changed.notify_all()


class EntrySource(NamedTuple):
    """A blob that holds the entry. asking: guards each read. failed: reports what was wrong with it."""

    blob: Blob
    asking: Callable[[], AbstractContextManager[object]]
    failed: Callable[[StoreError], None]


class Download:
    """One entry on its way into memory. failure: why it cannot be completed.

    first: where its bytes come from. another: finds another source after that failed; None when there is none. keep: called in
    a pool thread with all bytes. Raises `EntryDamagedError` for an entry larger than memory, as a forged header may claim.
    """

    def __init__(
        self,
        entry: CheckedEntry,
        first: EntrySource,
        another: Callable[[], EntrySource | None],
        keep: Callable[[memoryview], None],
        pool: FetchPool,
    ) -> None:
        self.entry, self._keep, self._pool = entry, keep, pool
        self._source = first
        self._another: Callable[[], EntrySource | None] | None = another
        try:
            self._view = private_memory(entry.nbytes)
        except (OSError, OverflowError, ValueError):
            raise EntryDamagedError(f"it claims {entry.nbytes:,} bytes, which there is no memory for") from None
        self._view[: len(entry.beginning)] = entry.beginning
        self._changed, self._switching = threading.Condition(), threading.Lock()
        self._arrived = [False] * len(entry.pieces)
        self._started = self._settled = False
        self._then: list[Callable[[], None]] = []
        self.failure: StoreError | None = None

    def start(self, then: Callable[[], None] | None = None) -> None:
        """Fetch everything, the first pieces first. then: called when the entry has been kept, or has failed."""
        with self._changed:
            started, settled, self._started = self._started, self._settled, True
            if then is not None and not settled:
                self._then.append(then)
        if then is not None and settled:
            then()
        if not started:
            for pieces in _requests(self.entry):
                self._pool.add(pieces.start, lambda pieces=pieces: self._fetch(pieces))  # type: ignore[misc]

    def piece(self, index: int) -> memoryview:
        """One verified piece; waits for it. Raises `EntryDamagedError` or `StoreError`."""
        self.start()
        with self._changed:
            self._changed.wait_for(lambda: self._arrived[index] or self.failure is not None)
            if not self._arrived[index]:
                assert self.failure is not None
                raise type(self.failure)(str(self.failure))
        return self._bytes_of(self.entry.pieces[index])

    def _bytes_of(self, piece: LayerLayout) -> memoryview:
        return self._view[piece.offset : piece.offset + piece.nbytes]

    def _fetch(self, pieces: range) -> None:
        try:
            if self.failure is None:
                self._fill(pieces)
        except StoreError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(StoreError(f"an entry could not be fetched ({error!r:.200})"))
            raise

    def _fill(self, pieces: range) -> None:
        """Read pieces from one source after another; raises the error of the last."""
        done = False
        while not done:
            source = self._source
            try:
                self._read(source, pieces)
                done = True
            except StoreError as error:
                self._switch(source, error)
        with self._changed:
            for index in pieces:
                self._arrived[index] = True
            complete = all(self._arrived) and not self._settled
            self._changed.notify_all()
        if complete:
            self._source.blob.close()
            self._pool.add(_KEEP, self._finish)

    def _finish(self) -> None:
        try:
            self._keep(self._view)
        finally:
            self._settle()

    def _settle(self) -> None:
        with self._changed:
            self._settled, then, self._then = True, self._then, []
        for call in then:
            call()

    def _read(self, source: EntrySource, indexes: range) -> None:
        pieces = self.entry.pieces[indexes.start : indexes.stop]
        begin, end = pieces[0].offset, pieces[-1].offset + pieces[-1].nbytes
        with source.asking():
            whole = source.blob.read(Range(begin, self._view[begin:end]))
        if not whole:
            raise EntryDamagedError("it is truncated")
        for index, piece in zip(indexes, pieces, strict=True):
            if not self.entry.holds(index, self._bytes_of(piece)):
                raise EntryDamagedError(f"layer {index} is not what was written")

    def _switch(self, failed: EntrySource, error: StoreError) -> None:
        """Take the other source, once for all threads. Raises `error` when none is left.

        An entry that no place holds any more is damaged, whatever kept its last copy from being read: that is no outage.
        """
        with self._switching:
            if self._source is not failed:
                return
            failed.failed(error)
            another, self._another = self._another, None
            if another is None:
                raise error
            source = another()
            if source is None:
                raise EntryDamagedError(str(error)) from None
            self._source = source

    def _fail(self, error: StoreError) -> None:
        with self._changed:
            self.failure = error
            self._changed.notify_all()
        self._settle()


def _requests(entry: CheckedEntry) -> Sequence[range]:
    """Runs of pieces that one request fetches."""
    requests, begin, nbytes = [], 0, 0
    for index, piece in enumerate(entry.pieces):
        nbytes += piece.nbytes
        if nbytes >= _REQUEST_BYTES or index == len(entry.pieces) - 1:
            requests.append(range(begin, index + 1))
            begin, nbytes = index + 1, 0
    return requests


class OpenedTogether:
    """Blobs that one call opened. Reading one of them starts the downloads of all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: WeakSet[TieredBlob] = WeakSet()

    def add(self, blob: TieredBlob) -> None:
        """Include a blob."""
        with self._lock:
            self._waiting.add(blob)

    def start(self) -> None:
        """Start the downloads of those that are still open."""
        with self._lock:
            waiting, self._waiting = list(self._waiting), WeakSet()
        for blob in waiting:
            blob.start()

    def drop(self, blob: TieredBlob) -> None:
        """Forget a blob that was closed unread."""
        with self._lock:
            self._waiting.discard(blob)


class TieredBlob(Blob):
    """An open entry of a tiered store; every byte that it hands out is verified.

    held: a download, or the entry that `source`, a file of this machine, is read for. elsewhere: downloads the same entry from
    another place when the file fails.
    """

    def __init__(
        self,
        held: Download | CheckedEntry,
        together: OpenedTogether,
        source: EntrySource | None = None,
        elsewhere: Callable[[], Download | None] | None = None,
    ) -> None:
        self._download = held if isinstance(held, Download) else None
        self._entry = held.entry if isinstance(held, Download) else held
        self._source, self._elsewhere, self._together = source, elsewhere, together
        self._lock = threading.Lock()
        self.nbytes, self.head, self.header = self._entry.nbytes, self._entry.beginning, self._entry.header
        if self._download is not None:
            together.add(self)

    @property
    def remote(self) -> bool:
        """Whether a download backs it."""
        return self._download is not None

    def used(self, *, counts: bool = True) -> None:
        """Start the downloads of all that was opened with it."""
        self._together.start()

    def start(self, then: Callable[[], None] | None = None) -> None:
        """See `Download.start`."""
        if self._download is not None:
            self._download.start(then)

    def read(self, *ranges: Range) -> bool:
        """Piece by piece."""
        return all(self._read(one) for one in ranges)

    def window(self, offset: int, nbytes: int) -> memoryview | None:
        """The memory of the download."""
        if self._download is not None and nbytes:
            for index, piece in enumerate(self._entry.pieces):
                begin = offset - piece.offset
                if 0 <= begin <= piece.nbytes - nbytes:
                    return self._download.piece(index)[begin : begin + nbytes]
        return None

    def close(self) -> None:
        """Close the file. A download ends with its last reader."""
        self._together.drop(self)
        if self._source is not None:
            self._source.blob.close()

    def _read(self, one: Range) -> bool:
        begin, end = one.offset, one.offset + one.into.nbytes
        if end > self.nbytes:
            return False
        first = self._entry.beginning[begin:end]
        one.into[: len(first)] = first
        for index, piece in enumerate(self._entry.pieces):
            low, high = max(begin, piece.offset), min(end, piece.offset + piece.nbytes)
            if low < high:
                self._fill(index, piece, low, one.into[low - begin : high - begin])
        return True

    def _fill(self, index: int, piece: LayerLayout, low: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `low` on, which lie in that piece."""
        whole = into if into.nbytes == piece.nbytes else memoryview(bytearray(piece.nbytes))
        if self._download is not None or not self._read_file(index, whole):
            assert self._download is not None
            whole = self._download.piece(index)
        if whole is not into:
            into[:] = whole[low - piece.offset : low - piece.offset + into.nbytes]

    def _read_file(self, index: int, into: memoryview) -> bool:
        """Read a piece from the file. False when it failed and a download takes its place; raises when there is none."""
        source = self._source
        assert source is not None
        try:
            with source.asking():
                whole = source.blob.read(Range(self._entry.pieces[index].offset, into))
            if not (whole and self._entry.holds(index, into)):
                raise EntryDamagedError(f"layer {index} is not what was written")
        except StoreError as error:
            self._switch(source, error)
            return False
        return True

    def _switch(self, source: EntrySource, error: StoreError) -> None:
        with self._lock:
            if self._download is None:
                source.failed(error)
                assert self._elsewhere is not None
                self._download = self._elsewhere()
                if self._download is None:
                    raise EntryDamagedError(str(error)) from None


class Prefetcher:
    """Downloads entries before they are read, with at most `most_bytes` in flight, or one larger entry.

    opening: opens several names.
    """

    def __init__(self, opening: Callable[[Sequence[str]], list[Found]], pool: FetchPool, most_bytes: int) -> None:
        self._opening, self._pool, self._most_bytes = opening, pool, most_bytes
        self._lock = threading.Lock()
        self._names: deque[tuple[str, int | None]] = deque()
        self._opened: deque[TieredBlob] = deque()
        self._in_flight_bytes = 0
        self._looking = False

    def add(self, names: Iterable[str], most_bytes: int | None = None) -> None:
        """Download these in their order, but for entries larger than `most_bytes`. Returns at once; readers meet errors."""
        with self._lock:
            self._names.extend((name, most_bytes) for name in names)
        self._go_on()

    def _go_on(self) -> None:
        while (blob := self._next()) is not None:
            nbytes = blob.nbytes
            blob.start(lambda nbytes=nbytes: self._arrived(nbytes))  # type: ignore[misc]
            blob.close()

    def _next(self) -> TieredBlob | None:
        """The next entry that may start; opens more when none is left."""
        with self._lock:
            if self._opened and (
                not self._in_flight_bytes or self._in_flight_bytes + self._opened[0].nbytes <= self._most_bytes
            ):
                self._in_flight_bytes += self._opened[0].nbytes
                return self._opened.popleft()
            if self._names and not self._opened and not self._looking:
                self._looking = True
                self._pool.add(_LOOK_UP, self._open)
            return None

    def _open(self) -> None:
        with self._lock:
            batch = dict(self._names.popleft() for _ in range(min(_BATCH, len(self._names))))
        found: list[Found] = []
        try:
            found = self._opening(list(batch))
        except StoreError:
            pass  # readers meet it
        finally:
            wanted = [
                blob
                for blob, most in zip(found, batch.values(), strict=False)
                if isinstance(blob, TieredBlob) and blob.remote and (most is None or blob.nbytes <= most)
            ]
            close_all([blob for blob in found if blob not in wanted])
            with self._lock:
                self._opened.extend(wanted)
                self._looking = False
        self._go_on()

    def _arrived(self, nbytes: int) -> None:
        with self._lock:
            self._in_flight_bytes -= nbytes
        self._go_on()
