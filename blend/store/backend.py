"""The contract of a backend, and the names that all backends share.

A backend moves bytes under names and knows nothing of what they mean. Names are the same in every backend, so that one's
content can be copied into another's:

    objects/<namespace>/<dd>/<digest>.safetensors   caches: they count towards a budget, the least recently used ones go
    artifacts/<name>  namespaces/<namespace>.json  generation  sealed  writing
    indexes/<corpus>/<file>  sources/<corpus>.<namespace>  pins/<digest>
                                                    all others: they stay until they are deleted

`EntryDamagedError` is the damage of one name, which is then made again. `StoreError` is an outage. None, or False, is a miss:
the backend was reached and holds no such name. Methods block, and threads may call them at the same time.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

from blend.errors import ConfigError, EntryDamagedError, EntryTooLargeError, StoreError
from blend.store.format import EntryHeader
from blend.types import ChunkKey

CACHES = "objects/"
SUFFIX = ".safetensors"
ARTIFACTS = "artifacts/"
DESCRIPTIONS = "namespaces/"
GENERATION = "generation"
INDEXES = "indexes/"
SOURCES = "sources/"
PINS = "pins/"
SEALED = "sealed"

SMALL = 1 << 20
"""Bytes that all names have at most, but those that hold caches, artifacts, indexes and notes."""
_LARGE = (CACHES, ARTIFACTS, INDEXES, SOURCES)

HEAD = 16 << 10  # bytes: the header of most models, of some 80 layers of two parts, or 45 of four

_HEX = re.compile(r"[0-9A-Za-z_-]{1,128}")
_CACHE = re.compile(rf"{CACHES}[0-9A-Za-z_-]{{1,128}}/([0-9A-Za-z_-]{{2}})/\1[0-9A-Za-z_-]{{0,126}}{re.escape(SUFFIX)}")
_ARTIFACT = re.compile(r"[0-9a-z_-]{1,128}")

Buffer = bytes | memoryview
T = TypeVar("T")


class Stored(NamedTuple):
    """One name as a listing shows it, whatever is there. used: when it was last put or touched, in seconds since 1970."""

    name: str
    nbytes: int
    used: float


class TierHits(NamedTuple):
    """Entries that were opened, by where they were, and the bytes that came over the network."""

    local: int
    hot: int
    far: int
    missing: int
    fetched_bytes: int


class Blob:
    """What a name held when it was opened. Threads may share it; close it.

    It stays readable when the name is put again, deleted or evicted. On a server that keeps no old versions, reading the rest
    raises `EntryDamagedError` then. No blob ever reads as something that was never put.

    Attributes:
        nbytes: its length.
        head: its first bytes, at least `HEAD` where it has as many.
        header: the verified header of the entry, where the backend has read it.

    """

    nbytes: int
    head: Buffer
    header: EntryHeader | None = None

    @property
    def is_verified(self) -> bool:
        """Whether the backend has verified every byte."""
        return False

    def read(self, offset: int, into: memoryview) -> None:
        """Fill this memory with the bytes from `offset` on.

        Raises `EntryDamagedError`, also when the blob is shorter, or `StoreError`.
        """
        end = offset + into.nbytes
        if end > self.nbytes:
            raise EntryDamagedError("it is truncated")
        if end <= len(self.head):
            into[:] = self.head[offset:end]
        else:
            self._fetch(offset, into)

    def _fetch(self, offset: int, into: memoryview) -> None:
        """Fill this memory with bytes that did not all come along in `head`. Only blobs whose head is short have it."""
        raise NotImplementedError

    def reject(self) -> bool:
        """Read from another copy from now on: the bytes are not as written. False where there is none. Raises `StoreError`."""
        return False

    def close(self) -> None:
        """Release what the blob holds; idempotent."""


Found = Blob | EntryDamagedError | None
"""What opening a name gives: its blob, its damage, or None for a miss."""


class Backend(ABC):
    """Moves bytes under names.

    Attributes:
        place: where they are, for messages.
        is_elsewhere: whether making it asks nothing of it yet: a server that is down shows at the first use.
        spared: gives digests of caches that this process's budget does not evict, as if they were pinned; takes no lock.

    """

    place: str
    is_elsewhere: bool = False
    spared: Callable[[], frozenset[str]] = staticmethod(frozenset)

    @property
    def tier_hits(self) -> TierHits | None:
        """Since this was made; None without tiers."""
        return None

    @property
    def evictions(self) -> int:
        """Caches that were evicted since this was made."""
        return 0

    @property
    def tiers(self) -> dict[str, Backend]:
        """Every place by its name, the one that decides first. Nearer ones hold copies of its caches."""
        return {"store": self}

    def wait(self, timeout_s: float) -> bool:
        """Wait until what was read of servers is kept in nearer places. Returns whether that came in time."""
        return True

    @abstractmethod
    def open_many(self, names: Sequence[str]) -> list[Found]:
        """What each name holds now, in as few exchanges as possible, with its first bytes; damage takes its place.

        Raises `StoreError`, and leaves nothing open.
        """

    def open(self, name: str) -> Blob | None:
        """`open_many` of one name. Raises `EntryDamagedError` or `StoreError`."""
        (blob,) = self.open_many([name])
        if isinstance(blob, EntryDamagedError):
            raise blob
        return blob

    def bring(self, names: Sequence[str]) -> None:  # noqa: B027 (most places have nothing nearer)
        """Copy caches that will be read soon to the nearest place. Returns when that has ended. Raises `StoreError`."""

    def stored(self, names: Sequence[str]) -> list[Found]:
        """`open_many` of the place that decides what is stored: copies in nearer tiers do not count."""
        return self.open_many(names)

    def restore(self, name: str) -> bool:
        """Store a cache again that a nearer tier has a sound copy of. Returns whether one has. Raises `StoreError`."""
        return False

    def read(self, name: str) -> bytes | None:
        """The whole content, or None. Raises `EntryDamagedError`, also for one that is too large to be of kvblend."""
        blob = self.open(name)
        if blob is None:
            return None
        try:
            if blob.nbytes > SMALL and not name.startswith(_LARGE):
                raise EntryDamagedError(f"it has {blob.nbytes:,} bytes")
            content = bytearray(blob.nbytes)
            blob.read(0, memoryview(content))
            return bytes(content)
        except (MemoryError, OverflowError):
            raise EntryDamagedError(f"it has {blob.nbytes:,} bytes, which there is no memory for") from None
        finally:
            blob.close()

    @abstractmethod
    def put(self, name: str, blobs: Sequence[Buffer]) -> None:
        """Let the name hold these bytes in a row, at least one. Readers get the old bytes or the new ones, never a mixture.

        The backend owns the memory from then on. Raises `StoreError`, and changes nothing, when it cannot be written or a
        cache alone exceeds the budget.
        """

    @abstractmethod
    def swap(self, name: str, content: bytes, was: bytes | None) -> bool:
        """Compare and swap, atomic between all processes: put `content` if the name holds exactly `was` (None: nothing).

        For small contents, such as manifests. Returns whether it did. After a `StoreError` that is not known.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete the name, if it holds anything. Open blobs stay readable."""

    def require_lasting(self) -> None:  # noqa: B027 - most evict caches at most
        """Raise `StoreError` if the place is set to evict what has to stay, such as indexes."""

    def touch(self, name: str) -> None:  # noqa: B027 - only where there is a budget
        """Note that a cache was used just now, which the budget's eviction asks for. Never fails."""

    @abstractmethod
    def listing(self, prefix: str) -> Iterator[Stored]:
        """What lies under a folder such as `objects/` or `objects/<namespace>/`, in no particular order.

        Names below `objects/` that are no names of caches are left out.
        """

    def names(self, prefix: str) -> Iterator[str]:
        """The names alone, where they are cheaper to get than their sizes and ages."""
        return (stored.name for stored in self.listing(prefix))

    def folders(self, prefix: str) -> set[str]:
        """The names of the folders right below a folder."""
        paths = (name.removeprefix(prefix).split("/") for name in self.names(prefix))
        return {path[0] for path in paths if len(path) > 1}

    @abstractmethod
    def writing(self) -> AbstractContextManager[None]:
        """The lock of all processes that write; not nested. Raises `StoreError` when it takes too long to get.

        It ends with the process that holds it: a server's within half a minute, see `blend.store.lease`.
        """


def in_batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items, so many at a time."""
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


def close_all(blobs: Sequence[Found]) -> None:
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


def cache_name(key: ChunkKey) -> str:
    """Name of a chunk cache; raises `StoreError` for a key that `CacheIdentity` cannot have made."""
    digest = _safe(key.digest)
    return f"{CACHES}{_safe(key.namespace)}/{digest[:2]}/{digest}{SUFFIX}"


def key_of(name: str) -> ChunkKey:
    """The key that `cache_name` made this name of."""
    parts = name.split("/")
    return ChunkKey(parts[1], parts[-1].removesuffix(SUFFIX))


def is_of_kvblend(name: str) -> bool:
    """Whether `cache_name` makes names like this one; true of all that is no cache. Others may have put files in between."""
    return not name.startswith(CACHES) or _CACHE.fullmatch(name) is not None


def description_name(namespace: str) -> str:
    """Name of a namespace's description."""
    return f"{DESCRIPTIONS}{_safe(namespace)}.json"


def is_artifact(name: str) -> bool:
    """Whether `artifact_name` makes this name."""
    return bool(_ARTIFACT.fullmatch(name.removeprefix(ARTIFACTS)))


def artifact_name(name: str) -> str:
    """Name of an artifact; raises `StoreError` when this cannot name one."""
    if not _ARTIFACT.fullmatch(name):
        raise StoreError(f"{name!r} cannot name an artifact: use lower-case letters, digits, dashes and underscores")
    return ARTIFACTS + name


def pinned(backend: Backend) -> frozenset[str]:
    """Digests of the caches that are pinned."""
    return frozenset(name.removeprefix(PINS) for name in backend.names(PINS))


def pin_cache(backend: Backend, digest: str, *, on: bool) -> None:
    """Pin a cache, or let it go again. Raises `StoreError`."""
    if on:
        backend.put(PINS + digest, [b"pinned"])
    else:
        backend.delete(PINS + digest)


def _safe(name: str) -> str:
    if not _HEX.fullmatch(name):
        raise StoreError(f"{name!r} cannot name a store entry: use the hex digests that CacheIdentity.key makes")
    return name
