"""A tier of memory over any backend: what is read often is in memory once, shared by all who read it.

Every open still asks the backend below for the entry's first bytes. An entry's header holds a digest of all its bytes, so what
another process has deleted or replaced since is never served from memory, for the price of opening a file. Where only later
bytes are damaged below, memory still serves what was written.

The first reader of an entry reads it from below; when it is closed, the entry is loaded in a thread beside. A waiting prompt
has its entries loaded before it reads them: `prefetch`. What comes into memory is verified there, whole, and no reader
hashes it again.
Artifacts, descriptions and the generation are not kept in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import TYPE_CHECKING

from blend.errors import EntryDamagedError
from blend.store.backend import CACHES, Backend, Blob, Buffer, MemoryStats, Range, Stored, TierHits
from blend.store.memory import Held, HeldBytes, HotMemory
from blend.store.read_ahead import ReadAhead
from blend.store.uses import Uses

if TYPE_CHECKING:
    from blend.store.format import EntryHeader

TELLING = 512
"""So many first bytes tell two entries of one name apart: the digest over the header stands among the first hundred."""

_TIERS = count()


class HotBlob(HeldBytes):
    """What was in memory when it was opened. Holds no file."""

    def __init__(self, held: Held, memory: HotMemory) -> None:
        super().__init__(held.view)
        self._memory, self._unused = memory, threading.Lock()
        self._held: Held | None = held

    @property
    def tier(self) -> str:
        """See `Blob.tier`."""
        return "memory"

    @property
    def shared(self) -> Held | None:
        """The entry in memory."""
        return self._held

    def used(self, *, counts: bool = True) -> None:
        """Counts once."""
        if counts and (held := self._held) is not None and self._unused.acquire(blocking=False):
            self._memory.used(held)

    def close(self) -> None:
        """Let it be evicted."""
        held, self._held = self._held, None
        if held is not None:
            self._memory.release(held)

    def __del__(self) -> None:
        self.close()


class ColdBlob(Blob):
    """What was not in memory when it was opened; if it is used, `on_used` is called when it is closed."""

    def __init__(self, below: Blob, memory: HotMemory, on_used: Callable[[], None]) -> None:
        self._below, self._memory, self._on_used = below, memory, on_used
        self._unused = threading.Lock()
        self.nbytes, self.head = below.nbytes, below.head

    @property
    def tier(self) -> str:
        """What the backend below says."""
        return self._below.tier

    @property
    def shared(self) -> object | None:
        """What the backend below says."""
        return self._below.shared

    @property
    def header(self) -> EntryHeader | None:
        """What the backend below says."""
        return self._below.header

    def read(self, *ranges: Range) -> bool:
        """From below."""
        return self._below.read(*ranges)

    def window(self, offset: int, nbytes: int) -> memoryview | None:
        """From below."""
        return self._below.window(offset, nbytes)

    def used(self, *, counts: bool = True) -> None:
        """Counts once."""
        if counts and self._unused.acquire(blocking=False):
            self._memory.missed()

    def close(self) -> None:
        """Close the blob below, and have what was used loaded for the next."""
        on_used, self._on_used = self._on_used, _nothing
        self._below.close()
        if self._unused.locked():
            on_used()


class HotBackend(Backend):
    """`below` with caches in `memory`.

    sound: whether a cache that was read from below, whole, under this name is what was written.
    """

    def __init__(self, below: Backend, memory: HotMemory, sound: Callable[[str, Blob], bool]) -> None:
        self.below, self.place, self.trusted = below, below.place, below.trusted
        self._memory, self._sound = memory, sound
        self._number = next(_TIERS)
        self._ahead = ReadAhead(self._load)

    @property
    def memory(self) -> MemoryStats:
        """Of the memory, with all that other stores have in it."""
        return self._memory.stats

    @property
    def tier_hits(self) -> TierHits | None:
        """Of the tiers below."""
        return self.below.tier_hits

    @property
    def uses(self) -> Uses | None:
        """From below."""
        return self.below.uses

    @property
    def evictions(self) -> int:
        """From below."""
        return self.below.evictions

    def prefetch(self, names: Iterable[str], most_bytes: int | None = None) -> None:
        """In a thread beside, one after another; what the order has no place for is not loaded."""
        wanted = [name for name in names if name.startswith(CACHES)]
        self.below.prefetch(wanted, most_bytes)
        self._ahead.add(wanted, ahead=True, most_bytes=most_bytes)

    def wait(self, timeout_s: float) -> bool:
        """Until all that is to be loaded has been; whether that came in time."""
        return self._ahead.wait(timeout_s)

    def open(self, name: str, head: int) -> Blob | None:
        """One exchange with the backend below, whatever is in memory."""
        if not name.startswith(CACHES):
            return self.below.open(name, head)
        return self._best(name, self.below.open(name, max(head, TELLING)))

    def open_many(self, names: Sequence[str], head: int) -> list[Blob | EntryDamagedError | None]:
        """As few exchanges as the backend below takes."""
        found = self.below.open_many(names, max(head, TELLING))
        return [
            one if isinstance(one, EntryDamagedError) or not name.startswith(CACHES) else self._best(name, one)
            for name, one in zip(names, found, strict=True)
        ]

    def stored(self, names: Sequence[str], head: int) -> list[Blob | EntryDamagedError | None]:
        """As the backend below says."""
        return self.below.stored(names, head)

    def restore(self, name: str) -> bool:
        """Below."""
        return self.below.restore(name)

    def read(self, name: str, most: int) -> bytes | None:
        """From below."""
        return self.below.read(name, most)

    def put(self, name: str, blobs: Sequence[Buffer], *, if_absent: bool = False) -> bool:
        """Below; what is in memory goes."""
        done = self.below.put(name, blobs, if_absent=if_absent)
        self._memory.drop(self._own(name))
        return done

    def swap(self, name: str, content: bytes, was: bytes | None) -> bool:
        """Below; what is in memory goes."""
        done = self.below.swap(name, content, was)
        self._memory.drop(self._own(name))
        return done

    def delete(self, name: str) -> bool:
        """Below and in memory."""
        done = self.below.delete(name)
        self._memory.drop(self._own(name))
        return done

    def touch(self, name: str) -> None:
        """Below: what memory holds is in use there as well."""
        self.below.touch(name)

    def listing(self, prefix: str) -> Iterator[list[Stored]]:
        """From below."""
        return self.below.listing(prefix)

    def names(self, prefix: str) -> Iterator[list[str]]:
        """From below."""
        return self.below.names(prefix)

    def folders(self, prefix: str) -> set[str]:
        """From below."""
        return self.below.folders(prefix)

    def writing(self) -> AbstractContextManager[None]:
        """Of the backend below."""
        return self.below.writing()

    def _own(self, name: str) -> tuple[int, str]:
        """What this backend's entries are called in a memory that others share."""
        return self._number, name

    def _best(self, name: str, below: Blob | None) -> Blob | None:
        if below is None:
            self._memory.drop(self._own(name))
            return None
        held = self._memory.take(self._own(name), below)
        if held is None:
            return ColdBlob(below, self._memory, lambda: self._ahead.add([name], ahead=False))
        below.close()
        return HotBlob(held, self._memory)

    def _load(self, name: str, ahead: bool, most_bytes: int | None) -> None:
        blob = self.below.open(name, TELLING)
        if blob is None:
            return
        try:
            if most_bytes is None or blob.nbytes <= most_bytes:
                self._memory.load(self._own(name), blob, lambda copy: self._sound(name, copy), ahead=ahead)
        finally:
            blob.close()


def _nothing() -> None:
    """Called when a blob is closed again."""
