"""Downloads of entries from a server: in pieces, each verified before it is read, once for all readers.

A `FetchPool` runs requests by priority. A `Download` holds one entry. A `TieredBlob` is an open entry of a tiered store, backed
by a download or by a file of this machine. A `Prefetcher` starts downloads ahead of their readers.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import count
from typing import NamedTuple
from weakref import WeakSet

from blend.errors import EntryDamagedError, StoreError
from blend.store.backend import Blob, Found, Range, close_all, private_memory
from blend.store.format import EntryHeader, LayerLayout

IN_FLIGHT_BYTES = 64 << 20
_REQUEST_BYTES = 1 << 20  # smaller layers are fetched together
_LOOK_UP, _KEEP = -1, 1 << 30  # ranks before and after all layers
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
                del run  # it holds a download's memory
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

    def fill(self, entry: EntryHeader, layers: range, into: memoryview) -> None:
        """Read consecutive layers and verify them. Raises `EntryDamagedError` or `StoreError`."""
        begin = entry.layers[layers.start].offset
        with self.asking():
            whole = not into or self.blob.read(Range(begin, into))  # the last ranges may be empty
        if not whole:
            raise EntryDamagedError("it is truncated")
        for index in layers:
            layout = entry.layers[index]
            if not entry.holds(index, into[layout.offset - begin :][: layout.nbytes]):
                raise EntryDamagedError(f"layer {index} is not what was written")


class Download:
    """One entry on its way into memory.

    sources: where its bytes come from, the next one after an error; raises where no place holds the entry. keep: called in a
    pool thread with all bytes. failure: why it cannot be completed. settled: set when it was kept, or has failed.
    Raises `EntryDamagedError` for an entry larger than memory, as a forged header may claim.
    """

    def __init__(
        self,
        entry: EntryHeader,
        sources: Iterator[EntrySource],
        keep: Callable[[memoryview], None],
        pool: FetchPool,
    ) -> None:
        self.entry, self._keep, self._pool = entry, keep, pool
        self._sources, self._source = sources, next(sources)
        try:
            self._view = private_memory(entry.nbytes)
        except (OSError, OverflowError, ValueError):
            raise EntryDamagedError(f"it claims {entry.nbytes:,} bytes, which there is no memory for") from None
        self._view[: len(entry.beginning)] = entry.beginning
        self._changed, self._switching = threading.Condition(), threading.Lock()
        self._arrived = [False] * len(entry.layers)
        self._started = False
        self.failure: StoreError | None = None
        self.settled = threading.Event()

    def start(self) -> None:
        """Fetch everything, the first layers first."""
        with self._changed:
            started, self._started = self._started, True
        if not started:
            for layers in _requests(self.entry):
                self._pool.add(layers.start, lambda layers=layers: self._fetch(layers))  # type: ignore[misc]

    def layer(self, index: int) -> memoryview:
        """The bytes of one verified layer; waits for it. Raises `EntryDamagedError` or `StoreError`."""
        self.start()
        with self._changed:
            self._changed.wait_for(lambda: self._arrived[index] or self.failure is not None)
            if not self._arrived[index]:
                assert self.failure is not None
                raise type(self.failure)(str(self.failure))
        layout = self.entry.layers[index]
        return self._view[layout.offset : layout.offset + layout.nbytes]

    def _fetch(self, layers: range) -> None:
        try:
            if self.failure is None:
                self._fill(layers)
        except StoreError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(StoreError(f"an entry could not be fetched ({error!r:.200})"))
            raise

    def _fill(self, layers: range) -> None:
        """Read layers from one source after another; raises the error of the last."""
        last = self.entry.layers[layers[-1]]
        into = self._view[self.entry.layers[layers.start].offset : last.offset + last.nbytes]
        filled = False
        while not filled:
            source = self._source
            try:
                source.fill(self.entry, layers, into)
                filled = True
            except StoreError as error:
                self._switch(source, error)
        with self._changed:
            for index in layers:
                self._arrived[index] = True
            complete = all(self._arrived)
            self._changed.notify_all()
        if complete:
            self._source.blob.close()
            self._pool.add(_KEEP, self._finish)

    def _finish(self) -> None:
        try:
            self._keep(self._view)
        finally:
            self.settled.set()

    def _switch(self, failed: EntrySource, error: StoreError) -> None:
        """Take the next source, once for all threads. Raises `error` when none is left."""
        with self._switching:
            if self._source is failed:
                failed.failed(error)
                source = next(self._sources, None)
                if source is None:
                    raise error
                self._source = source

    def _fail(self, error: StoreError) -> None:
        with self._changed:
            self.failure = error
            self._changed.notify_all()
        self.settled.set()


def _requests(entry: EntryHeader) -> Sequence[range]:
    """Runs of layers that one request fetches."""
    requests, begin, nbytes = [], 0, 0
    for index, layout in enumerate(entry.layers):
        nbytes += layout.nbytes
        if nbytes >= _REQUEST_BYTES or index == len(entry.layers) - 1:
            requests.append(range(begin, index + 1))
            begin, nbytes = index + 1, 0
    return requests


class TieredBlob(Blob):
    """An open entry of a tiered store; every byte that it hands out is verified.

    held: a download, or the entry that `source`, a file of this machine, is read for. together: downloads that one call opened;
    reading one of them starts all. elsewhere: downloads the same entry from another place when the file fails.
    """

    def __init__(
        self,
        held: Download | EntryHeader,
        together: WeakSet[Download],
        source: EntrySource | None = None,
        elsewhere: Callable[[], Download] | None = None,
    ) -> None:
        self.download = held if isinstance(held, Download) else None
        self.header = held.entry if isinstance(held, Download) else held
        self._source, self._elsewhere, self._together = source, elsewhere, together
        self._lock = threading.Lock()
        self.nbytes, self.head = self.header.nbytes, self.header.beginning
        if self.download is not None:
            together.add(self.download)

    def read(self, *ranges: Range) -> bool:
        """Layer by layer."""
        self._start_all()
        return all(self._read(one) for one in ranges)

    def window(self, offset: int, nbytes: int) -> memoryview | None:
        """The memory of the download."""
        self._start_all()
        if self.download is not None and nbytes:
            for index, layout in enumerate(self._layouts):
                begin = offset - layout.offset
                if 0 <= begin <= layout.nbytes - nbytes:
                    return self.download.layer(index)[begin : begin + nbytes]
        return None

    def close(self) -> None:
        """Close the file. A download ends with its last reader."""
        if self.download is not None:
            self._together.discard(self.download)
        if self._source is not None:
            self._source.blob.close()

    @property
    def _layouts(self) -> tuple[LayerLayout, ...]:
        assert self.header is not None
        return self.header.layers

    def _start_all(self) -> None:
        while self._together:
            with suppress(KeyError):  # another thread took the last one
                self._together.pop().start()

    def _read(self, one: Range) -> bool:
        begin, end = one.offset, one.offset + one.into.nbytes
        if end > self.nbytes:
            return False
        first = self.head[begin:end]
        one.into[: len(first)] = first
        for index, layout in enumerate(self._layouts):
            low, high = max(begin, layout.offset), min(end, layout.offset + layout.nbytes)
            if low < high:
                self._fill(index, layout, low, one.into[low - begin : high - begin])
        return True

    def _fill(self, index: int, layout: LayerLayout, low: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `low` on, which lie in that layer."""
        whole = into if into.nbytes == layout.nbytes else memoryview(bytearray(layout.nbytes))
        if self.download is None:
            self._read_file(index, whole)
        if self.download is not None:
            whole = self.download.layer(index)
        if whole is not into:
            into[:] = whole[low - layout.offset :][: into.nbytes]

    def _read_file(self, index: int, into: memoryview) -> None:
        """Read a layer from the file. When that fails, a download takes its place; raises when there is none."""
        assert self._source is not None
        assert self._elsewhere is not None
        assert self.header is not None
        try:
            self._source.fill(self.header, range(index, index + 1), into)
        except StoreError as error:
            with self._lock:
                if self.download is None:
                    self._source.failed(error)
                    self.download = self._elsewhere()


class Prefetcher:
    """Downloads entries before they are read, with at most `most_bytes` in flight, or one larger entry.

    opening: opens several names.
    """

    def __init__(self, opening: Callable[[Sequence[str]], list[Found]], pool: FetchPool, most_bytes: int) -> None:
        self._opening, self._pool, self._most_bytes = opening, pool, most_bytes
        self._lock = threading.Lock()
        self._names: deque[tuple[str, int | None]] = deque()
        self._running = False

    def add(self, names: Iterable[str], most_bytes: int | None = None) -> None:
        """Download these in their order, but for entries larger than `most_bytes`. Returns at once; readers meet errors."""
        with self._lock:
            self._names.extend((name, most_bytes) for name in names)
            running, self._running = self._running, True
        if not running:
            self._pool.add(_LOOK_UP, self._run)

    def _run(self) -> None:
        in_flight: list[Download] = []
        try:
            while batch := self._next_batch():
                opened = self._opened(batch)
                while opened:  # what has arrived and is not kept here gives its memory back
                    in_flight = self._once_there_is_room(in_flight, opened[0].entry.nbytes)
                    in_flight.append(opened.popleft())
                    in_flight[-1].start()
        except BaseException:
            with self._lock:
                self._running = False
            raise

    def _next_batch(self) -> dict[str, int | None]:
        with self._lock:
            self._running = bool(self._names)
            return dict(self._names.popleft() for _ in range(min(_BATCH, len(self._names))))

    def _opened(self, batch: dict[str, int | None]) -> deque[Download]:
        """The entries that are not on this machine and not too large."""
        try:
            found = self._opening(list(batch))
        except StoreError:  # readers meet it
            return deque()
        pairs = zip(found, batch.values(), strict=True)
        wanted = [
            blob for blob, most in pairs if isinstance(blob, TieredBlob) and (most is None or blob.nbytes <= most)
        ]
        close_all(found)
        return deque(blob.download for blob in wanted if blob.download is not None)

    def _once_there_is_room(self, in_flight: list[Download], nbytes: int) -> list[Download]:
        """Wait until `nbytes` more may be in flight; returns what still is."""
        left = [one for one in in_flight if not one.settled.is_set()]
        while left and sum(one.entry.nbytes for one in left) + nbytes > self._most_bytes:
            left[0].settled.wait()
            left = [one for one in left if not one.settled.is_set()]
        return left
