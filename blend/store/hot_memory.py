"""Entries in the memory of this process: once each, whole, within a budget, whoever reads them and however many.

They are kept as they are stored, encoded. Widening bfloat16 to float32 while a layer is copied into place is faster than
copying float32, whose bytes are twice as many: 8 chunks of 256 tokens of a decoder of 24 layers with 2 KV heads of 64 take
34 ms instead of 41, and half the memory (one thread of a server processor).

Each lies in pages of its own and not on the heap, which would fill them 1.6 to 4 times as fast and keep what is freed: after a
while of coming and going, 64 MB of entries took 80 to 109 MB there. Pages go back to the system when the last reader is done.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from weakref import finalize

import xxhash

from blend.errors import ConfigError
from blend.store.backend import Blob, MemoryStats, Range
from blend.store.gdsf import Gdsf

RECHECK_S = 60.0


@dataclass(eq=False, slots=True, weakref_slot=True)
class Held:
    """One entry.

    checked: when `digest` was last found to hold. ahead: whether nobody has used it yet. users: open blobs over it.
    """

    name: Hashable
    view: memoryview
    digest: bytes
    checked: float
    ahead: bool
    users: int = 0

    @property
    def pages_nbytes(self) -> int:
        """What it takes in memory."""
        return _in_pages(self.view.nbytes)

    def same(self, blob: Blob) -> bool:
        """Whether a blob with as much of a head as tells entries apart is what is held."""
        return blob.nbytes == self.view.nbytes and bytes(self.view[: len(blob.head)]) == bytes(blob.head)

    def sound(self) -> bool:
        """Whether every bit is what it was."""
        return _digest(self.view) == self.digest


class HotMemory:
    """Whole entries under names, `budget_bytes` of them at most; several stores may share one, each with names of its own.

    Memory counts until the last tensor over it is gone, evicted or not. So that an accident in memory does not go on for ever,
    an entry is hashed again when it is taken after `recheck_s` seconds, and goes if it has changed.
    Raises `ConfigError` for a budget that is not positive.
    """

    def __init__(self, budget_bytes: int, *, recheck_s: float = RECHECK_S) -> None:
        if budget_bytes <= 0:
            raise ConfigError(f"{budget_bytes} bytes of memory for chunk caches; it must be a positive number")
        self._budget, self._recheck_s = budget_bytes, recheck_s
        self._lock = threading.Lock()
        self._held: dict[Hashable, Held] = {}
        self._order: Gdsf[Hashable] = Gdsf()
        self._nbytes = 0
        self._freed: deque[int] = deque()  # by whichever thread lets go last: it may hold the lock already
        self._hits = self._misses = self._evictions = self._loaded_bytes = self._damaged = 0

    @property
    def stats(self) -> MemoryStats:
        """The figures at this moment."""
        with self._lock:
            self._count_freed()
            return MemoryStats(
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                damaged=self._damaged,
                entries=len(self._held),
                nbytes=self._nbytes,
                budget_bytes=self._budget,
                loaded_bytes=self._loaded_bytes,
            )

    def take(self, name: Hashable, blob: Blob) -> Held | None:
        """What is held under `name`, to be given back by `release`, if that is the same as `blob`; if not, it goes."""
        with self._lock:
            held = self._held.get(name)
            if held is None or not self._current(held, blob):
                return None
            held.users += 1
        if time.monotonic() - held.checked < self._recheck_s or self._recheck(held):
            return held
        self.release(held)
        return None

    def release(self, held: Held) -> None:
        """One who took it is done."""
        with self._lock:
            held.users -= 1

    def used(self, held: Held) -> None:
        """One who took it reads it. Whom it was loaded ahead for was counted then."""
        with self._lock:
            self._hits += 1
            if not held.ahead and self._held.get(held.name) is held:
                self._order.use(held.name)
            held.ahead = False

    def missed(self) -> None:
        """One reads what is not here."""
        with self._lock:
            self._misses += 1

    def drop(self, name: Hashable) -> None:
        """Hold nothing under `name`; who has taken it keeps it."""
        with self._lock:
            if (held := self._held.get(name)) is not None:
                self._forget(held)

    def load(self, name: Hashable, blob: Blob, sound: Callable[[Blob], bool], *, ahead: bool) -> None:
        """Hold all of `blob` if the order has a place for it, and if `sound` says of the copy that it may be used.

        ahead: whether nobody has used it yet.

        Raises `EntryDamagedError` and `StoreError` as reading the blob does.
        """
        with self._lock:
            held = self._held.get(name)
            if blob.nbytes == 0 or (held is not None and self._current(held, blob)):
                return
            memory = self._room(blob.nbytes)
        if memory is None or not blob.read(Range(0, memory)) or not sound(HeldBytes(memory)):
            return
        held = Held(name, memory, _digest(memory), time.monotonic(), ahead)
        with self._lock:
            self._loaded_bytes += memory.nbytes
            if name in self._held:  # put there by another thread meanwhile
                return
            self._held[name] = held
            self._order.add(name, held.pages_nbytes)

    def _room(self, nbytes: int) -> memoryview | None:
        """Memory for an entry, after evicting what must go; None when it is not worth that, or nothing more can go."""
        size = _in_pages(nbytes)
        self._count_freed()
        while (excess := self._nbytes + size - self._budget) > 0:  # once more where tensors outlive their readers
            gone = self._order.evict(size, excess, lambda name: self._held[name].users > 0)
            if gone is None:
                return None
            for name in gone:
                del self._held[name]
            self._evictions += len(gone)
            self._count_freed()
        try:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:  # the system has no more
            return None
        self._nbytes += size
        finalize(pages, self._freed.append, size).atexit = False
        return memoryview(pages)

    def _current(self, held: Held, blob: Blob) -> bool:
        """Whether `held` is the same as `blob`; if not, it goes."""
        if held.same(blob):
            return True
        self._forget(held)
        return False

    def _recheck(self, held: Held) -> bool:
        if held.sound():
            held.checked = time.monotonic()
            return True
        with self._lock:
            if self._held.get(held.name) is held:  # nobody else has found it
                self._damaged += 1
                self._forget(held)
        return False

    def _forget(self, held: Held) -> None:
        del self._held[held.name]
        self._order.remove(held.name)

    def _count_freed(self) -> None:
        while self._freed:
            self._nbytes -= self._freed.popleft()


class HeldBytes(Blob):
    """A blob over memory; nothing to close."""

    def __init__(self, view: memoryview) -> None:
        self.head = self._view = view
        self.nbytes = view.nbytes

    def read(self, *ranges: Range) -> bool:
        """One copy each."""
        return all(self._read(one.offset, one.into) for one in ranges)

    def window(self, offset: int, nbytes: int) -> memoryview | None:
        """The memory itself."""
        return self._view[offset : offset + nbytes] if offset + nbytes <= self.nbytes else None

    def _read(self, offset: int, into: memoryview) -> bool:
        part = self._view[offset : offset + into.nbytes]
        if part.nbytes < into.nbytes:
            return False
        into[:] = part
        return True


def _digest(view: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(view)


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
