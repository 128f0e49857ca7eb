"""An open entry of a tiered store: every byte that it hands out has been held against its digest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import WeakSet

from blend.errors import EntryDamagedError, StoreError
from blend.store.backend import Blob, Range
from blend.store.fetch import Arrival, Source
from blend.store.format import EntryHeader
from blend.store.reader import Entry, Piece


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

    held: an arrival, or the entry that `source`, a file of this machine, is read for. elsewhere: the same entry from another
    place, for when the file fails.
    """

    def __init__(
        self,
        held: Arrival | Entry,
        group: Group,
        source: Source | None = None,
        elsewhere: Callable[[], Arrival | None] | None = None,
    ) -> None:
        self._arrival = held if isinstance(held, Arrival) else None
        self._entry = held.entry if isinstance(held, Arrival) else held
        self._source, self._elsewhere, self._group = source, elsewhere, group
        self._lock = threading.Lock()
        self.nbytes, self.head = self._entry.nbytes, self._entry.beginning
        if self._arrival is not None:
            group.add(self)

    @property
    def tier(self) -> str:
        """See `Blob.tier`."""
        return "local" if self._arrival is None else self._arrival.tier

    @property
    def shared(self) -> object | None:
        """Itself, or what many read: everything was verified."""
        return self._arrival or self

    @property
    def header(self) -> EntryHeader:
        """By which its pieces are known."""
        return self._entry.header

    def used(self, *, counts: bool = True) -> None:
        """What was opened with it is fetched too."""
        self._group.start()

    @property
    def on_its_way(self) -> bool:
        """Whether it comes, or came, from a server, and does not lie on this machine."""
        return self._arrival is not None

    def start(self, then: Callable[[], None] | None = None) -> None:
        """Have it fetched. then: called when it has been kept in nearer tiers, or has failed."""
        if self._arrival is not None:
            self._arrival.start(then)

    def read(self, *ranges: Range) -> bool:
        """Verified, piece by piece."""
        return all(self._read(one) for one in ranges)

    def window(self, offset: int, nbytes: int) -> memoryview | None:
        """The memory that it came into."""
        arrival = self._arrival
        if arrival is None or not nbytes:
            return None
        for index, piece in enumerate(self._entry.pieces):
            if piece.offset <= offset and offset + nbytes <= piece.offset + piece.nbytes:
                return arrival.piece(index)[offset - piece.offset : offset - piece.offset + nbytes]
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
        if self._arrival is None:
            target = into if into.nbytes == piece.nbytes else memoryview(bytearray(piece.nbytes))
            if self._from_disk(index, target):
                if target is not into:
                    into[:] = target[low - piece.offset : low - piece.offset + into.nbytes]
                return
        arrival = self._arrival
        assert arrival is not None
        view = arrival.piece(index)
        into[:] = view[low - piece.offset : low - piece.offset + into.nbytes]

    def _from_disk(self, index: int, target: memoryview) -> bool:
        """Whether the file had it; else there is an arrival from now on, or it raises what the file failed with."""
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

    def _switch(self, source: Source, error: StoreError) -> None:
        with self._lock:
            if self._arrival is not None:
                return
            source.failed(error)
            assert self._elsewhere is not None
            found = self._elsewhere()
            if found is None:
                raise EntryDamagedError(str(error)) from None
            self._arrival = found
