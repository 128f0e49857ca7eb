"""Bytes in the memory of this process: the pieces that were put, as they are."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

from blend.store.backend import CACHES, Backend, Blob, Buffer, Range, Stored, require_budget


class MemoryBlob(Blob):
    """What was put under one name, in pieces; nothing to close. own: whether the pieces are of this process's making."""

    def __init__(self, pieces: Sequence[Buffer], *, own: bool = True) -> None:
        self._own = own
        self._pieces = tuple(memoryview(piece) for piece in pieces)
        ends = list(accumulate(piece.nbytes for piece in self._pieces))
        self._starts = [0, *ends]
        self.nbytes = self._starts[-1]
        self.head = self._pieces[0] if self._pieces else b""

    @property
    def shared(self) -> MemoryBlob | None:
        """Itself: nobody else can write there."""
        return self if self._own else None

    def read(self, *ranges: Range) -> bool:
        """One copy."""
        return all(self._read(one.offset, one.into) for one in ranges)

    def window(self, offset: int, nbytes: int) -> memoryview | None:
        """The memory that was put, where all of it lies in one piece."""
        index = bisect_right(self._starts, offset) - 1
        begin = offset - self._starts[index]
        if index >= len(self._pieces) or begin + nbytes > self._pieces[index].nbytes:
            return None
        return self._pieces[index][begin : begin + nbytes]

    def whole(self) -> bytes:
        """A copy of all."""
        return b"".join(self._pieces)

    def _read(self, offset: int, into: memoryview) -> bool:
        done = 0
        while done < into.nbytes and offset + done < self.nbytes:
            index = bisect_right(self._starts, offset + done) - 1
            part = self._pieces[index][offset + done - self._starts[index] :][: into.nbytes - done]
            into[done : done + part.nbytes] = part
            done += part.nbytes
        return done == into.nbytes


class _Held(NamedTuple):
    blob: MemoryBlob
    used: float


class MemoryBackend(Backend):
    """Names and their bytes for the threads of one process. trusted: whether what is put is of this process's own making."""

    place = "memory"

    def __init__(self, budget_bytes: int | None = None, *, trusted: bool = True) -> None:
        require_budget(budget_bytes)
        self._budget, self.trusted = budget_bytes, trusted
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._caches: OrderedDict[str, _Held] = OrderedDict()  # least recently used first
        self._others: OrderedDict[str, _Held] = OrderedDict()
        self._cache_bytes = 0

    def open(self, name: str, head: int) -> MemoryBlob | None:
        """What is there anyway."""
        held = self._room(name).get(name)
        return None if held is None else held.blob

    def put(self, name: str, blobs: Sequence[Buffer], *, if_absent: bool = False) -> bool:
        """Keep the memory that is given, then evict."""
        blob, room = MemoryBlob(blobs, own=self.trusted), self._room(name)
        with self._lock:
            if if_absent and name in room:
                return False
            if room is self._caches:
                require_budget(self._budget, blob.nbytes)
            self._remove(name)
            room[name] = _Held(blob, time.time())
            self._cache_bytes += blob.nbytes if room is self._caches else 0
            while self._budget is not None and self._cache_bytes > self._budget:
                self._remove(next(iter(self._caches)))
        return True

    def swap(self, name: str, content: bytes, was: bytes | None) -> bool:
        """Under the lock."""
        room = self._room(name)
        with self._lock:
            if (room[name].blob.whole() if name in room else None) != was:
                return False
            room[name] = _Held(MemoryBlob([content], own=self.trusted), time.time())
        return True

    def delete(self, name: str) -> bool:
        """Drop it; open blobs keep their memory."""
        with self._lock:
            return self._remove(name)

    def touch(self, name: str) -> None:
        """Last in the order from now on."""
        room = self._room(name)
        with self._lock:
            if (held := room.get(name)) is not None:
                room[name] = held._replace(used=time.time())
                room.move_to_end(name)

    def listing(self, prefix: str) -> Iterator[list[Stored]]:
        """One page."""
        with self._lock:
            held = [*self._caches.items(), *self._others.items()]
        yield [Stored(name, blob.nbytes, used) for name, (blob, used) in held if name.startswith(prefix)]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A lock of this process."""
        with self._writing:
            yield

    def _room(self, name: str) -> OrderedDict[str, _Held]:
        return self._caches if name.startswith(CACHES) else self._others

    def _remove(self, name: str) -> bool:
        room = self._room(name)
        held = room.pop(name, None)
        if held is not None and room is self._caches:
            self._cache_bytes -= held.blob.nbytes
        return held is not None
