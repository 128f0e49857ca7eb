"""The contract of a backend, and what all backends share: names, circuit breakers, the lease that is the lock of servers.

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

import logging
import mmap
import re
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from blend.errors import ConfigError, EntryDamagedError, EntryTooLargeError, StoreError, StoreUnreachableError
from blend.types import ChunkKey

if TYPE_CHECKING:
    from blend.store.format import EntryHeader


CACHES = "objects/"
IDENTIFYING_BYTES = 512
"""So many first bytes tell two versions of one entry apart: the header's digest is among the first hundred."""

SUFFIX = ".safetensors"
ARTIFACTS, DESCRIPTIONS, GENERATION, INDEXES = "artifacts/", "namespaces/", "generation", "indexes/"
SOURCES, PINS, SEALED = "sources/", "pins/", "sealed"

_HEX = re.compile(r"[0-9A-Za-z_-]{1,128}")
_ARTIFACT = re.compile(r"[0-9a-z_-]{1,128}")
LOG = logging.getLogger("kvblend.store")
WAIT_S = 600.0  # choosing and measuring takes minutes on a slow machine
LEASE_S = 30.0
_NAME = "writing"
_MOST = 1 << 10
_FREE = b"free"
_LOOK_AFTER_S, _LOOK_EVERY_S = 0.02, 1.0  # at first, and in the end

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

    hits, misses: entries that were read from it, and from below it. evictions: for want of room. entries, nbytes: held now.
    """

    hits: int
    misses: int
    evictions: int
    entries: int
    nbytes: int
    budget_bytes: int


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
    """What a name held when it was opened. Threads may share it; close it.

    It stays readable when the name is put again, deleted or evicted. On a server that keeps no old versions, reading the rest
    raises `EntryDamagedError` then. No blob ever reads as something that was never put.

    nbytes: its length. head: its first bytes, see `Backend.open`. header: set when the backend has verified the entry.
    """

    nbytes: int
    head: Buffer
    header: EntryHeader | None = None

    @abstractmethod
    def read(self, *ranges: Range) -> bool:
        """Fill every buffer; False when the blob is shorter. Raises `EntryDamagedError` or `StoreError`."""

    def window(self, offset: int, nbytes: int) -> memoryview | None:
        """These bytes without a copy, where they lie in memory as one piece. Do not write to them."""
        return None

    def used(self, *, counts: bool = True) -> None:  # noqa: B027 - most backends do not ask
        """Say that the blob is read now. counts: whether for a prompt; verifying an entry does not count."""

    def close(self) -> None:  # noqa: B027 - most blobs hold nothing
        """Release what the blob holds; idempotent."""


Found = Blob | EntryDamagedError | None
"""What opening a name gives: its blob, its damage, or None for a miss."""


class Backend(ABC):
    """Moves bytes under names.

    place: where they are, for messages. trusted: whether nobody but this process can write here, and what was put comes back
    as it was: its bytes then need no digest.
    """

    place: str
    trusted: bool = False

    @property
    def tier_hits(self) -> TierHits | None:
        """Since this was made, where there are tiers."""
        return None

    @property
    def evictions(self) -> int:
        """Caches that were evicted since this was made."""
        return 0

    def prefetch(self, names: Iterable[str], most_bytes: int | None = None) -> None:  # noqa: B027 - most have nothing nearer
        """Bring caches nearer that will be read soon, but for larger ones. Returns at once, never fails."""

    @abstractmethod
    def open(self, name: str, head: int) -> Blob | None:
        """What the name holds now, or None.

        head: how many of its first bytes to bring along in the same exchange, at least. Raises `EntryDamagedError` for
        something that no `put` made.
        """

    def open_many(self, names: Sequence[str], head: int) -> list[Found]:
        """`open` several names in as few exchanges as possible; damage is returned in its place.

        Raises `StoreError`, and leaves nothing open.
        """
        found: list[Found] = []
        try:
            for name in names:
                found.append(self._open_or_damage(name, head))
        except BaseException:
            close_all(found)
            raise
        return found

    def _open_or_damage(self, name: str, head: int) -> Found:
        try:
            return self.open(name, head)
        except EntryDamagedError as error:
            return error

    def stored(self, names: Sequence[str], head: int) -> list[Found]:
        """`open_many` of the place that decides what is stored: copies in nearer tiers do not count."""
        return self.open_many(names, head)

    def restore(self, name: str) -> bool:
        """Copy a cache from a nearer tier to the far place; whether one had it. Raises `StoreError`."""
        return False

    def read(self, name: str, most: int) -> bytes | None:
        """The whole content, or None. Raises `EntryDamagedError` when it is longer than `most` bytes."""
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
    def put(self, name: str, blobs: Sequence[Buffer]) -> None:
        """Let the name hold these bytes in a row. Readers get the old bytes or the new ones, never a mixture.

        The backend owns the memory from then on. Raises `StoreError`, and changes nothing, when it cannot be written or a
        cache alone exceeds the budget.
        """

    @abstractmethod
    def swap(self, name: str, content: bytes, was: bytes | None) -> bool:
        """Compare and swap, atomic between all processes: put `content` if the name holds exactly `was` (None: nothing).

        For small contents, such as manifests. Returns whether it did. After a `StoreError` that is not known.
        """

    @abstractmethod
    def delete(self, name: str) -> bool:
        """Delete the name; whether it held anything. Open blobs stay readable."""

    @abstractmethod
    def touch(self, name: str) -> None:
        """Note that a cache was used just now, which the budget's eviction asks for. Never fails."""

    @abstractmethod
    def listing(self, prefix: str) -> Iterator[list[Stored]]:
        """What lies under a folder such as `objects/` or `objects/<namespace>/`, in pages and in no particular order."""

    def names(self, prefix: str) -> Iterator[list[str]]:
        """The names alone, where they are cheaper to get than their sizes and ages."""
        for page in self.listing(prefix):
            yield [stored.name for stored in page]

    def folders(self, prefix: str) -> set[str]:
        """The names of the folders right below a folder."""
        found = (name.removeprefix(prefix).split("/") for page in self.names(prefix) for name in page)
        return {parts[0] for parts in found if len(parts) > 1}

    @abstractmethod
    def writing(self) -> AbstractContextManager[None]:
        """The lock of all processes that write; not nested. Raises `StoreError` when it takes too long to get."""


def close_all(blobs: Sequence[Found]) -> None:
    """Close every blob among these."""
    for blob in blobs:
        if isinstance(blob, Blob):
            blob.close()


def private_memory(nbytes: int) -> memoryview:
    """Writable pages that go back to the system when the last view of them is gone. Raises `OSError`."""
    return memoryview(mmap.mmap(-1, nbytes))


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


def caches_of(namespace: str) -> str | None:
    """The folder of a namespace's caches; None for what no namespace is called, and no cache lies under."""
    return f"{CACHES}{namespace}/" if _HEX.fullmatch(namespace) else None


def key_of(name: str) -> ChunkKey:
    """The key that `cache_name` made this name of."""
    parts = name.split("/")
    return ChunkKey(parts[1], parts[-1].removesuffix(SUFFIX))


def description_name(namespace: str) -> str:
    """Name of a namespace's description."""
    return f"{DESCRIPTIONS}{_safe(namespace)}.json"


def artifact_name(name: str) -> str:
    """Name of an artifact; raises `StoreError` when this cannot name one."""
    if not _ARTIFACT.fullmatch(name):
        raise StoreError(f"{name!r} cannot name an artifact: use lower-case letters, digits, dashes and underscores")
    return ARTIFACTS + name


def _safe(name: str) -> str:
    if not _HEX.fullmatch(name):
        raise StoreError(f"{name!r} cannot name a store entry: use the hex digests that CacheIdentity.key makes")
    return name


class Timeouts(NamedTuple):
    """Seconds: for a connection, for one answer, and until a server that did not answer is asked again."""

    connect_s: float = 2.0
    answer_s: float = 10.0
    pause_s: float = 15.0


class CircuitOpenError(StoreUnreachableError):
    """The breaker is open: the place has just failed. Its error was reported then."""


class CircuitBreaker:
    """Refuses calls for `pause_s` seconds after one failed with an outage, then lets one through to try.

    counts: whether an error is an outage; damage never is. Others show that the place answers.
    """

    def __init__(self, pause_s: float, counts: Callable[[Exception], bool]) -> None:
        self._pause_s, self._counts = pause_s, counts
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._until = 0.0

    @property
    def open(self) -> bool:
        """Whether calls are refused."""
        with self._lock:
            return self._error is not None and time.monotonic() < self._until

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Guards one call. Raises `CircuitOpenError` with the last error while the breaker is open."""
        self._enter()
        try:
            yield
        except EntryDamagedError:
            self._answered()
            raise
        except Exception as error:
            if self._counts(error):
                self._trip(error)
            else:
                self._answered()
            raise
        else:
            self._answered()

    def _enter(self) -> None:
        with self._lock:
            if self._error is None:
                return
            now = time.monotonic()
            if now < self._until:
                raise CircuitOpenError(str(self._error))
            self._until = now + self._pause_s  # this call tries; the others stay refused

    def _trip(self, error: Exception) -> None:
        with self._lock:
            self._error, self._until = error, time.monotonic() + self._pause_s

    def _answered(self) -> None:
        with self._lock:
            self._error = None


class WarnOnce:
    """Warnings in the log `kvblend.store`, each kind once a place."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kinds: set[tuple[str, str]] = set()

    def warn(self, place: str, kind: str, line: str) -> None:
        """Warn, unless this kind of warning was given for this place before."""
        with self._lock:
            known = (place, kind) in self._kinds
            self._kinds.add((place, kind))
        if not known:
            LOG.warning("%s", line)


class _Writers(threading.local):
    """The leases that this thread writes under."""

    def __init__(self) -> None:
        self.leases: list[_Lease] = []


_WRITERS = _Writers()


@contextmanager
def leased(backend: Backend, *, lease_s: float = LEASE_S, wait_s: float = WAIT_S) -> Iterator[None]:
    """Held by one thread of one process at a time. Raises `StoreError` when another keeps it for `wait_s` seconds."""
    lease = _acquired(backend, lease_s, wait_s)
    done = threading.Event()
    renewal = threading.Thread(target=lease.keep, args=(done,), name="kvblend-lease", daemon=True)
    renewal.start()
    _WRITERS.leases.append(lease)
    try:
        yield
    finally:
        _WRITERS.leases.remove(lease)
        done.set()
        renewal.join()
        with suppress(StoreError):  # it ends by itself after `lease_s`
            lease.release()


def require_lease(backend: Backend, name: str) -> None:
    """Before a write to a name: raise `StoreError` where this thread writes under a lease of that backend and has lost it."""
    for lease in _WRITERS.leases:
        if lease.backend is backend and name != _NAME:
            lease.require()


class _Lease:
    """held: what the name holds, as far as is known, and held at the moment `since` of the monotonic clock."""

    def __init__(self, backend: Backend, held: bytes, since: float, lease_s: float) -> None:
        self.backend, self._lease_s = backend, lease_s
        self._held, self._since = held, since
        self._tried: set[bytes] = set()  # the name may hold one of these: the answer may have got lost
        self._lost = False
        self._lock = threading.Lock()

    def keep(self, done: threading.Event) -> None:
        """Write it anew until then."""
        while not done.wait(self._lease_s / 4):
            with suppress(StoreError):  # the next attempt, or whoever writes, finds out
                self._write(_token())

    def require(self) -> None:
        """Raise `StoreError` unless it is ours for certain."""
        if not self._certain():
            self._write(_token())
        if not self._certain():
            raise StoreError(
                f"{self.backend.place} did not answer for {self._lease_s:g} s, and another process may be writing to it: "
                "run the same command again"
            )

    def release(self) -> None:
        """It is anybody's."""
        self._write(_FREE)

    def _certain(self) -> bool:
        return not self._lost and time.monotonic() - self._since <= self._lease_s

    def _write(self, new: bytes) -> None:
        """Have the name hold `new`, if it is ours. Raises `StoreError` where that is not known."""
        with self._lock:
            began = time.monotonic()
            if self._lost:
                return
            if not self._swapped(new):
                found = self.backend.read(_NAME, _MOST)
                if found is None or found not in {self._held, *self._tried}:
                    self._lost = True
                    return
                self._held = found
                if not self._swapped(new):
                    return
            self._since = began

    def _swapped(self, new: bytes) -> bool:
        self._tried.add(new)
        if not self.backend.swap(_NAME, new, self._held):
            return False
        self._held, self._tried = new, set()
        return True


def _acquired(backend: Backend, lease_s: float, wait_s: float) -> _Lease:
    mine, began = _token(), time.monotonic()
    seen, since, delay = b"", began, _LOOK_AFTER_S
    while True:
        content = backend.read(_NAME, _MOST)
        looked = time.monotonic()
        if content != seen:
            seen, since = content or b"", looked
        stale = looked - since > lease_s
        taken = content == mine  # by a swap whose answer got lost
        if taken or ((content in (None, _FREE) or stale) and backend.swap(_NAME, mine, content)):
            return _Lease(backend, mine, looked, lease_s)
        if time.monotonic() - began > wait_s:
            raise StoreError(
                f"another process has been writing to {backend.place} for {wait_s:g} s; wait for it and try again"
            )
        time.sleep(delay)
        delay = min(1.5 * delay, _LOOK_EVERY_S)


def _token() -> bytes:
    return uuid.uuid4().hex.encode()
