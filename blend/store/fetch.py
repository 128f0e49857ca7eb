"""Threads that fetch what matters first first, and are there only while there is something to fetch."""

from __future__ import annotations

import heapq
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import NamedTuple
from weakref import WeakSet

from blend.errors import EntryDamagedError, StoreError
from blend.store.backend import Blob, Found, Range, close_all
from blend.store.reader import CheckedEntry, Piece


class _Job(NamedTuple):
    """Jobs of a lower rank run first, and of one rank those that came first."""

    rank: int
    turn: int
    run: Callable[[], None]


class FetchPool:
    """Runs jobs in `most` threads at once. A job must not raise."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._turn = threading.Condition()
        self._jobs: list[_Job] = []
        self._turns = count()
        self._threads = 0

    def add(self, rank: int, run: Callable[[], None]) -> None:
        """Have it run."""
        with self._turn:
            heapq.heappush(self._jobs, _Job(rank, next(self._turns), run))
            if self._threads < min(self._most, len(self._jobs) + self._threads):
                self._threads += 1
                threading.Thread(target=self._work, name="kvblend-fetch", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Until nothing is left to do; whether that came in time."""
        with self._turn:
            return self._turn.wait_for(lambda: self._threads == 0, timeout_s)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.run()
            except BaseException:
                self._ended()
                raise

    def _next(self) -> _Job | None:
        """The first that waits; where there is none this thread is at its end, decided together."""
        with self._turn:
            if self._jobs:
                return heapq.heappop(self._jobs)
            self._end()
            return None

    def _ended(self) -> None:
        with self._turn:
            self._end()

    def _end(self) -> None:
        self._threads -= 1
        self._turn.notify_all()


# --- An entry on its way from a server into memory: piece by piece, each verified before it is seen, once for all who wait.


_EXCHANGE_BYTES = 1 << 20  # smaller pieces are fetched together: an exchange takes its time
KEEPING = 1 << 30  # the rank of what nobody waits for


class EntrySource(NamedTuple):
    """A blob that has the entry. asking: around each read of it. failed: told what was wrong with it."""

    blob: Blob
    asking: Callable[[], AbstractContextManager[object]]
    failed: Callable[[StoreError], None]


class Download:
    """The bytes of `entry`, in memory of their own.

    first: where they come from. another: where else, after that has failed; None where there is nothing else, or something
    else. keep: called with the bytes when all have come, in a thread beside. Raises `EntryDamagedError` for an entry of a size
    that there is no memory for: without a store key anybody can write a header that says so.
    """

    def __init__(
        self,
        entry: CheckedEntry,
        first: EntrySource,
        another: Callable[[], EntrySource | None],
        keep: Callable[[memoryview], None],
        fetchers: FetchPool,
    ) -> None:
        self.entry, self._keep, self._fetchers = entry, keep, fetchers
        self._source, self._another = first, another
        self._view = _memory(entry.nbytes)
        self._view[: len(entry.beginning)] = entry.beginning
        self._turn = threading.Condition()
        self._switching = threading.Lock()
        self._here = [False] * len(entry.pieces)
        self._lacking = len(entry.pieces)
        self._started = self._settled = False
        self._then: list[Callable[[], None]] = []
        self.failure: StoreError | None = None

    def start(self, then: Callable[[], None] | None = None) -> None:
        """Have everything fetched, the first pieces first. then: called when it has been kept, or has failed."""
        with self._turn:
            started, settled, self._started = self._started, self._settled, True
            if then is not None and not settled:
                self._then.append(then)
        if then is not None and settled:
            then()
        if started:
            return
        for group in _groups(self.entry):
            self._fetchers.add(group.start, lambda group=group: self._fetch(group))  # type: ignore[misc]

    def piece(self, index: int) -> memoryview:
        """One piece, waited for. Raises `EntryDamagedError` or `StoreError`."""
        self.start()
        with self._turn:
            self._turn.wait_for(lambda: self._here[index] or self.failure is not None)
            if not self._here[index]:
                assert self.failure is not None
                raise type(self.failure)(str(self.failure))
        piece = self.entry.pieces[index]
        return self._view[piece.offset : piece.offset + piece.nbytes]

    def _fetch(self, group: range) -> None:
        try:
            if self.failure is None:
                self._filled(group)
        except StoreError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(StoreError(f"an entry could not be fetched ({error!r:.200})"))
            raise

    def _filled(self, group: range) -> None:
        """Raises what the last source fails with."""
        while True:
            source = self._source
            try:
                self._read(source, group)
            except StoreError as error:
                self._switch(source, error)
            else:
                break
        with self._turn:
            for index in group:
                self._here[index] = True
            self._lacking -= len(group)
            complete = not self._lacking
            self._turn.notify_all()
        if complete:
            self._source.blob.close()
            self._fetchers.add(KEEPING, self._kept)

    def _kept(self) -> None:
        try:
            self._keep(self._view)
        finally:
            self._settle()

    def _settle(self) -> None:
        with self._turn:
            self._settled, then, self._then = True, self._then, []
        for call in then:
            call()

    def _read(self, source: EntrySource, group: range) -> None:
        pieces = self.entry.pieces
        begin, end = pieces[group.start].offset, pieces[group[-1]].offset + pieces[group[-1]].nbytes
        with source.asking():
            whole = source.blob.read(Range(begin, self._view[begin:end]))
        if not whole:
            raise EntryDamagedError("it is truncated")
        for index in group:
            piece = pieces[index]
            if not self.entry.holds(index, self._view[piece.offset : piece.offset + piece.nbytes]):
                raise EntryDamagedError(f"layer {index} is not what was written")

    def _switch(self, failed: EntrySource, error: StoreError) -> None:
        """To another source, once for all threads; raises the error where there is none.

        What no place has any more is no outage, whatever kept its last copy from being read.
        """
        with self._switching:
            if self._source is not failed:
                return
            failed.failed(error)
            another, self._another = self._another, _nothing
            other = another()
            if other is None:
                raise error if another is _nothing else EntryDamagedError(str(error)) from None
            self._source = other

    def _fail(self, error: StoreError) -> None:
        with self._turn:
            self.failure = error
            self._turn.notify_all()
        self._settle()


def _memory(nbytes: int) -> memoryview:
    try:
        return memoryview(mmap.mmap(-1, nbytes))
    except (OSError, OverflowError, ValueError):
        raise EntryDamagedError(f"it is said to take {nbytes:,} bytes, which there is no memory for") from None


def _nothing() -> None:
    """There is no other source."""


def _groups(entry: CheckedEntry) -> Sequence[range]:
    """Pieces that are fetched in one exchange."""
    groups, begin, nbytes = [], 0, 0
    for index, piece in enumerate(entry.pieces):
        nbytes += piece.nbytes
        if nbytes >= _EXCHANGE_BYTES or index == len(entry.pieces) - 1:
            groups.append(range(begin, index + 1))
            begin, nbytes = index + 1, 0
    return groups


# --- An open entry of a tiered store: every byte that it hands out has been held against its digest.


class Group:
    """Blobs that were opened together: when the first of them is read, the others will be."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: WeakSet[TieredBlob] = WeakSet()

    def add(self, blob: TieredBlob) -> None:
        """One more."""
        with self._lock:
            self._waiting.add(blob)

    def start(self) -> None:
        """Have all fetched that are still open."""
        with self._lock:
            waiting, self._waiting = list(self._waiting), WeakSet()
        for blob in waiting:
            blob.start()

    def drop(self, blob: TieredBlob) -> None:
        """It was closed unread."""
        with self._lock:
            self._waiting.discard(blob)


class TieredBlob(Blob):
    """What was open when it was opened, from wherever it can be had.

    held: an download, or the entry that `source`, a file of this machine, is read for. elsewhere: the same entry from another
    place, for when the file fails.
    """

    def __init__(
        self,
        held: Download | CheckedEntry,
        group: Group,
        source: EntrySource | None = None,
        elsewhere: Callable[[], Download | None] | None = None,
    ) -> None:
        self._download = held if isinstance(held, Download) else None
        self._entry = held.entry if isinstance(held, Download) else held
        self._source, self._elsewhere, self._group = source, elsewhere, group
        self._lock = threading.Lock()
        self.nbytes, self.head, self.header = self._entry.nbytes, self._entry.beginning, self._entry.header
        if self._download is not None:
            group.add(self)

    def used(self, *, counts: bool = True) -> None:
        """What was opened with it is fetched too."""
        self._group.start()

    @property
    def on_its_way(self) -> bool:
        """Whether it comes, or came, from a server, and does not lie on this machine."""
        return self._download is not None

    def start(self, then: Callable[[], None] | None = None) -> None:
        """Have it fetched. then: called when it has been kept in nearer tiers, or has failed."""
        if self._download is not None:
            self._download.start(then)

    def read(self, *ranges: Range) -> bool:
        """Verified, piece by piece."""
        return all(self._read(one) for one in ranges)

    def window(self, offset: int, nbytes: int) -> memoryview | None:
        """The memory that it came into."""
        download = self._download
        if download is None or not nbytes:
            return None
        for index, piece in enumerate(self._entry.pieces):
            if piece.offset <= offset and offset + nbytes <= piece.offset + piece.nbytes:
                return download.piece(index)[offset - piece.offset : offset - piece.offset + nbytes]
        return None

    def close(self) -> None:
        """The file, and what nobody else reads."""
        self._group.drop(self)
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

    def _fill(self, index: int, piece: Piece, low: int, into: memoryview) -> None:
        """`into` gets the bytes from `low` on, which lie in that piece."""
        if self._download is None:
            target = into if into.nbytes == piece.nbytes else memoryview(bytearray(piece.nbytes))
            if self._from_disk(index, target):
                if target is not into:
                    into[:] = target[low - piece.offset : low - piece.offset + into.nbytes]
                return
        download = self._download
        assert download is not None
        view = download.piece(index)
        into[:] = view[low - piece.offset : low - piece.offset + into.nbytes]

    def _from_disk(self, index: int, target: memoryview) -> bool:
        """Whether the file had it; else there is an download from now on, or it raises what the file failed with."""
        source = self._source
        assert source is not None
        try:
            with source.asking():
                whole = source.blob.read(Range(self._entry.pieces[index].offset, target))
            if not (whole and self._entry.holds(index, target)):
                raise EntryDamagedError(f"layer {index} is not what was written")
        except StoreError as error:
            self._switch(source, error)
            return False
        return True

    def _switch(self, source: EntrySource, error: StoreError) -> None:
        with self._lock:
            if self._download is not None:
                return
            source.failed(error)
            assert self._elsewhere is not None
            found = self._elsewhere()
            if found is None:
                raise EntryDamagedError(str(error)) from None
            self._download = found


# --- Entries that are fetched before anybody reads them: a few at a time, so that a long list of them takes little memory.


IN_FLIGHT_BYTES = 64 << 20
_BATCH = 64
_FIRST = -1  # the rank of looking where they are


class Prefetcher:
    """opening: looks where several entries are. At most `most_bytes` of them are on their way, or one that is larger."""

    def __init__(
        self, opening: Callable[[Sequence[str]], list[Found]], fetchers: FetchPool, most_bytes: int = IN_FLIGHT_BYTES
    ) -> None:
        self._opening, self._fetchers, self._most_bytes = opening, fetchers, most_bytes
        self._lock = threading.Lock()
        self._names: deque[tuple[str, int | None]] = deque()
        self._opened: deque[TieredBlob] = deque()
        self._in_flight_bytes = 0
        self._looking = False

    def add(self, names: Iterable[str], most_bytes: int | None = None) -> None:
        """Have these fetched, in their order. Returns at once; what fails is met by who reads it.

        most_bytes: that any of them may take; what takes more is not fetched.
        """
        with self._lock:
            self._names.extend((name, most_bytes) for name in names)
        self._go_on()

    def _go_on(self) -> None:
        """Start what there is room for, and look for more where nothing is left to start."""
        while (blob := self._next()) is not None:
            nbytes = blob.nbytes
            blob.start(lambda nbytes=nbytes: self._came(nbytes))  # type: ignore[misc]
            blob.close()

    def _next(self) -> TieredBlob | None:
        with self._lock:
            if self._opened and (
                not self._in_flight_bytes or self._in_flight_bytes + self._opened[0].nbytes <= self._most_bytes
            ):
                self._in_flight_bytes += self._opened[0].nbytes
                return self._opened.popleft()
            if self._names and not self._opened and not self._looking:
                self._looking = True
                self._fetchers.add(_FIRST, self._look)
            return None

    def _look(self) -> None:
        with self._lock:
            batch = dict(self._names.popleft() for _ in range(min(_BATCH, len(self._names))))
        found: list[Found] = []
        try:
            found = self._opening(list(batch))
        except StoreError:
            pass  # who reads them meets it
        finally:
            allowed = zip(found, batch.values(), strict=False)
            blobs = [
                blob
                for blob, most in allowed
                if isinstance(blob, TieredBlob) and blob.on_its_way and (most is None or blob.nbytes <= most)
            ]
            close_all([blob for blob in found if blob not in blobs])
            with self._lock:
                self._opened.extend(blobs)
                self._looking = False
        self._go_on()

    def _came(self, nbytes: int) -> None:
        with self._lock:
            self._in_flight_bytes -= nbytes
        self._go_on()
