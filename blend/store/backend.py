"""The contract of a backend: it moves bytes under names, and knows nothing of what they mean.

`ChunkStore` encodes, seals and verifies above it, so a new place to keep caches in (files, memory, a server, a bucket) is one
class here and one line in `open_store`. Names are paths of letters, digits, dashes, underscores and dots, the same everywhere,
so that one backend's content can be copied into another's:

    objects/<namespace>/<dd>/<digest>.safetensors   caches: they count towards a budget, and the least recently used ones go
    artifacts/<name>  namespaces/<namespace>.json  generation  sealed  writing
    indexes/<corpus>/<file>  sources/<corpus>  pins/<digest>
                                                    all others: they stay until they are deleted

Two kinds of failure, never to be mixed up: `EntryDamagedError` is what lies in one name, which is then made again; `StoreError`
is an outage. None, or False, is a miss: the backend was reached and holds no such name. No method waits on an event loop, and
every one may be called by several threads at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

from blend.errors import ConfigError, EntryDamagedError, EntryTooLargeError
from blend.store.uses import Uses

if TYPE_CHECKING:
    from blend.store.format import EntryHeader

CACHES = "objects/"

Buffer = bytes | memoryview


class Range(NamedTuple):
    """Bytes of a blob from `offset` on, as many as `into` takes: writable memory of the caller."""

    offset: int
    into: memoryview


class Stored(NamedTuple):
    """One name as a listing shows it.

    nbytes: as stored. used: when it was last put or touched, in seconds since 1970. whole: False where something that no `put`
    made takes its place; it counts, and goes when the name is put or deleted.
    """

    name: str
    nbytes: int
    used: float
    whole: bool = True


class MemoryStats(NamedTuple):
    """What a tier of memory has done since it was made, and what it holds.

    hits, misses: entries that were read out of it, and below it. evictions: for want of room. damaged: entries that had changed
    in memory. entries, nbytes: held now; what was evicted counts while it is read. loaded_bytes: that came in from below.
    """

    hits: int
    misses: int
    evictions: int
    damaged: int
    entries: int
    nbytes: int
    budget_bytes: int
    loaded_bytes: int


class TierHits(NamedTuple):
    """Entries that were opened, by where they were.

    far: from the far place. missing: nowhere. fetched_bytes: that came over the network.
    """

    local: int
    hot: int
    far: int
    missing: int
    fetched_bytes: int


class Blob(ABC):
    """What a name held when it was opened. It stays readable when the name is put again, deleted or evicted meanwhile.

    Of a server that keeps no old versions a blob that was not wholly read by then raises `EntryDamagedError` instead; no blob
    ever reads as something that was never put.

    nbytes: its length. head: its first bytes; how many says `Backend.open`. Threads may share it; close it.
    """

    nbytes: int
    head: Buffer

    @abstractmethod
    def read(self, *ranges: Range) -> bool:
        """Fill every buffer; False when the blob has turned out to be shorter.

        All at once where that is cheaper than one after another. A layer is one range. Raises `EntryDamagedError` or
        `StoreError`; the buffers hold anything then.
        """

    def window(self, offset: int, nbytes: int) -> memoryview | None:
        """These bytes without a copy, where they lie in this process as one piece; they must not be written to."""
        return None

    @property
    def tier(self) -> str:
        """Where it is read from: "far", "hot", "local", "memory"; a store in one place is "store"."""
        return "store"

    @property
    def shared(self) -> object | None:
        """Where the bytes are known to be those that were written: one object for all blobs over them.

        Nothing of such a blob needs to be verified twice. It can be referred to weakly.
        """
        return None

    @property
    def header(self) -> EntryHeader | None:
        """Of a cache, where the backend has had to verify it: with the store's seal, for the name that was opened."""
        return None

    def used(self, *, counts: bool = True) -> None:  # noqa: B027 - most backends do not ask
        """The blob is read now, and was not only looked at. May be called again.

        counts: whether for a prompt, which figures and orders of use are about, and not only to see that it is sound.
        """

    def close(self) -> None:  # noqa: B027 - most blobs hold nothing
        """Release what the blob holds; idempotent."""


class Backend(ABC):
    """Moves bytes under names.

    place: where they are, for messages. trusted: whether nobody but this process can write here, and what was put comes back
    as it was: its bytes then need no digest.
    """

    place: str
    trusted: bool = False

    @property
    def memory(self) -> MemoryStats | None:
        """Of a tier of memory, where there is one."""
        return None

    @property
    def tier_hits(self) -> TierHits | None:
        """Since this was made, where there are tiers; those of a tier of memory are apart."""
        return None

    @property
    def evictions(self) -> int:
        """Caches that went for want of room since this was made, but for those of a tier of memory."""
        return 0

    @property
    def uses(self) -> Uses | None:
        """How often caches were used on this machine; None where it keeps nothing of the store."""
        return None

    def prefetch(self, names: Iterable[str], most_bytes: int | None = None) -> None:  # noqa: B027 - most have nothing nearer
        """These caches will be read soon: bring them nearer meanwhile, but for larger ones. Returns at once, never fails."""

    @abstractmethod
    def open(self, name: str, head: int) -> Blob | None:
        """What the name holds now, or None when it holds nothing.

        head: how many of its first bytes to bring along, in the same exchange; a shorter blob brings all, and one whose
        bytes are here anyway as many as it pleases. Raises `EntryDamagedError` for something that no `put` made.
        """

    def open_many(self, names: Sequence[str], head: int) -> list[Blob | EntryDamagedError | None]:
        """`open` for several names, in their order, in as few exchanges as it takes; damage of one is returned in its place.

        Raises `StoreError`, and leaves nothing open.
        """
        found: list[Blob | EntryDamagedError | None] = []
        try:
            for name in names:
                found.append(self._open_or_damage(name, head))
        except BaseException:
            close_all(found)
            raise
        return found

    def _open_or_damage(self, name: str, head: int) -> Blob | EntryDamagedError | None:
        try:
            return self.open(name, head)
        except EntryDamagedError as error:
            return error

    def stored(self, names: Sequence[str], head: int) -> list[Blob | EntryDamagedError | None]:
        """`open_many`, of the place alone that decides what is stored: copies in nearer ones do not count."""
        return self.open_many(names, head)

    def restore(self, name: str) -> bool:
        """Put a copy that a nearer place has of a cache into the one that decides; whether any has one.

        Raises `StoreError` when it cannot be written.
        """
        return False

    def read(self, name: str, most: int) -> bytes | None:
        """All that the name holds, or None. Raises `EntryDamagedError` when that is more than `most` bytes."""
        blob = self.open(name, 0)
        if blob is None:
            return None
        try:
            if blob.nbytes > most:
                raise EntryDamagedError(f"it is longer than {most} bytes")
            content = bytearray(blob.nbytes)
            if not blob.read(Range(0, memoryview(content))):
                raise EntryDamagedError("it is truncated")
            return bytes(content)
        finally:
            blob.close()

    @abstractmethod
    def put(self, name: str, blobs: Sequence[Buffer], *, if_absent: bool = False) -> bool:
        """Let the name hold these bytes in a row, whatever it held; who opens it gets all of the old ones or of the new.

        The memory belongs to the backend from then on: a caller writes to it no more. if_absent: only when the name holds
        nothing, which is decided between all processes; returns whether it was put. Raises `StoreError`, and leaves all as it
        was, when it cannot be written or a cache alone exceeds the budget.
        """

    @abstractmethod
    def swap(self, name: str, content: bytes, was: bytes | None) -> bool:
        """Let the name hold `content` if it holds exactly `was` now, None for nothing; whether it did.

        Decided between all processes. For small things, such as manifests. Raises `StoreError`: then it is not known whether
        it was done.
        """

    @abstractmethod
    def delete(self, name: str) -> bool:
        """Let the name hold nothing; whether it held anything. Open blobs stay readable."""

    @abstractmethod
    def touch(self, name: str) -> None:
        """Remember that a cache was used just now, for the budget's sake. Never fails."""

    @abstractmethod
    def listing(self, prefix: str) -> Iterator[list[Stored]]:
        """What lies under a folder such as `objects/` or `objects/<namespace>/`, a page at a time, in no particular order.

        The backend may change meanwhile: what is put or deleted since is in it or not.
        """

    def names(self, prefix: str) -> Iterator[list[str]]:
        """The names alone, where they are cheaper to get than their sizes and ages."""
        for page in self.listing(prefix):
            yield [stored.name for stored in page]

    def folders(self, prefix: str) -> set[str]:
        """What names have right behind a folder's name and in front of the next slash."""
        found = (name.removeprefix(prefix).split("/") for page in self.names(prefix) for name in page)
        return {parts[0] for parts in found if len(parts) > 1}

    @abstractmethod
    def writing(self) -> AbstractContextManager[None]:
        """Held by one thread of one process at a time; not nested. Raises `StoreError` when it takes too long to get."""


def close_all(blobs: Sequence[Blob | EntryDamagedError | None]) -> None:
    """Close every blob among these."""
    for blob in blobs:
        if isinstance(blob, Blob):
            blob.close()


def require_budget(budget_bytes: int | None, nbytes: int = 0) -> None:
    """Raise `ConfigError` for a budget that is not positive, `EntryTooLargeError` for an entry of `nbytes` above it."""
    if budget_bytes is None:
        return
    if budget_bytes <= 0:
        raise ConfigError(f"the store's budget is {budget_bytes} bytes; it must be positive")
    if nbytes > budget_bytes:
        raise EntryTooLargeError(
            f"one chunk cache takes {nbytes} bytes, the store's budget is {budget_bytes}: "
            "raise the budget or use smaller chunks"
        )
