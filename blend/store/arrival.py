"""An entry on its way from a server into memory: piece by piece, each verified before it is seen, once for all who wait."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from blend.errors import EntryDamagedError, StoreError
from blend.store.backend import Blob, Range
from blend.store.fetch import Fetchers
from blend.store.reader import Entry

_EXCHANGE_BYTES = 1 << 20  # smaller pieces are fetched together: an exchange takes its time
KEEPING = 1 << 30  # the rank of what nobody waits for


class Source(NamedTuple):
    """A blob that has the entry. tier: of which. asking: around each read of it. failed: told what was wrong with it."""

    blob: Blob
    tier: str
    asking: Callable[[], AbstractContextManager[object]]
    failed: Callable[[StoreError], None]


class Arrival:
    """The bytes of `entry`, in memory of their own.

    first: where they come from. another: where else, after that has failed; None where there is nothing else, or something
    else. keep: called with the bytes when all have come, in a thread beside. Raises `EntryDamagedError` for an entry of a size
    that there is no memory for: without a store key anybody can write a header that says so.
    """

    def __init__(
        self,
        entry: Entry,
        first: Source,
        another: Callable[[], Source | None],
        keep: Callable[[memoryview], None],
        fetchers: Fetchers,
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

    @property
    def tier(self) -> str:
        """Where it comes from now."""
        return self._source.tier

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

    def _read(self, source: Source, group: range) -> None:
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

    def _switch(self, failed: Source, error: StoreError) -> None:
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


def _groups(entry: Entry) -> Sequence[range]:
    """Pieces that are fetched in one exchange."""
    groups, begin, nbytes = [], 0, 0
    for index, piece in enumerate(entry.pieces):
        nbytes += piece.nbytes
        if nbytes >= _EXCHANGE_BYTES or index == len(entry.pieces) - 1:
            groups.append(range(begin, index + 1))
            begin, nbytes = index + 1, 0
    return groups
