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
from itertools import count
from typing import NamedTuple

from blend.errors import ConfigError, EntryDamagedError, EntryTooLargeError, StoreError, StoreUnreachableError
from blend.store.format import EntryHeader
from blend.types import ChunkKey

CACHES = "objects/"
SUFFIX = ".safetensors"
ARTIFACTS, DESCRIPTIONS, GENERATION, INDEXES = "artifacts/", "namespaces/", "generation", "indexes/"
SOURCES, PINS, SEALED = "sources/", "pins/", "sealed"

_HEX = re.compile(r"[0-9A-Za-z_-]{1,128}")
_ARTIFACT = re.compile(r"[0-9a-z_-]{1,128}")
_DIGEST = re.compile(r"[0-9a-f]{8,128}")
_AT_ONCE = 500
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

    def close(self) -> None:  # noqa: B027 - most blobs hold nothing
        """Release what the blob holds; idempotent."""


Found = Blob | EntryDamagedError | None
"""What opening a name gives: its blob, its damage, or None for a miss."""


class Backend(ABC):
    """Moves bytes under names.

    place: where they are, for messages. trusted: whether only this process can write here; the bytes then need no digest.
    on_evicted: called with the name of each cache that the budget evicts, where `trusted`.
    """

    place: str
    trusted: bool = False
    on_evicted: Callable[[str], None] = staticmethod(lambda name: None)

    @property
    def tier_hits(self) -> TierHits | None:
        """Since this was made; None without tiers."""
        return None

    @property
    def evictions(self) -> int:
        """Caches that were evicted since this was made."""
        return 0

    def prefetch(self, names: Iterable[str], most_bytes: int | None = None) -> None:  # noqa: B027 - most have nothing nearer
        """Bring caches nearer that will be read soon, but for larger ones. Returns at once, never fails."""

    @abstractmethod
    def open(self, name: str, head: int) -> Blob | None:
        """What the name holds now, or None. head: how many of its first bytes to bring along in the same exchange, at least.

        Raises `EntryDamagedError` for something that no `put` made.
        """

    def open_many(self, names: Sequence[str], head: int) -> list[Found]:
        """`open` several names in as few exchanges as possible; damage takes its place.

        Raises `StoreError`, and leaves nothing open.
        """
        found: list[Found] = []
        try:
            found.extend(self._open_or_damage(name, head) for name in names)
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

    def touch(self, name: str) -> None:  # noqa: B027 - only where there is a budget
        """Note that a cache was used just now, which the budget's eviction asks for. Never fails."""

    @abstractmethod
    def listing(self, prefix: str) -> Iterator[Stored]:
        """What lies under a folder such as `objects/` or `objects/<namespace>/`, in no particular order."""

    def names(self, prefix: str) -> Iterator[str]:
        """The names alone, where they are cheaper to get than their sizes and ages."""
        return (stored.name for stored in self.listing(prefix))

    def folders(self, prefix: str) -> set[str]:
        """The names of the folders right below a folder."""
        found = (name.removeprefix(prefix).split("/") for name in self.names(prefix))
        return {parts[0] for parts in found if len(parts) > 1}

    def writing(self) -> AbstractContextManager[None]:
        """The lock of all processes that write; not nested. Raises `StoreError` when it takes too long to get.

        A server's is a lease, which ends half a minute after the process that holds it.
        """
        return leased(self)


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


def pinned(backend: Backend) -> frozenset[str]:
    """Digests of the caches that are pinned."""
    return frozenset(name.removeprefix(PINS) for name in backend.names(PINS))


def still_pinned(backend: Backend, digests: Sequence[str]) -> frozenset[str]:
    """Which of these caches are pinned, each asked for by its name: listings may be of a moment ago. Raises `StoreError`."""
    found = set[str]()
    for begin in range(0, len(digests), _AT_ONCE):
        batch = digests[begin : begin + _AT_ONCE]
        blobs = backend.stored([PINS + digest for digest in batch], 0)
        close_all(blobs)
        found |= {digest for digest, blob in zip(batch, blobs, strict=True) if blob is not None}
    return frozenset(found)


def pin_cache(backend: Backend, digest: str, *, on: bool) -> None:
    """Pin a cache, or let it go again. Raises `StoreError`."""
    if not _DIGEST.fullmatch(digest):
        raise StoreError(f"{digest!r:.80} is no digest of a cache: `blend store ls` shows them")
    if on:
        backend.put(PINS + digest, [b"pinned"])
    else:
        backend.delete(PINS + digest)


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
    """Refuses calls for `pause_s` seconds after one failed with an outage, then lets one at a time through to try.

    counts: whether an error is an outage; damage never is. Others show that the place answers.
    """

    def __init__(self, pause_s: float, counts: Callable[[Exception], bool]) -> None:
        self._pause_s, self._counts = pause_s, counts
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._until, self._trying = 0.0, False

    @property
    def open(self) -> bool:
        """Whether calls are refused."""
        with self._lock:
            return self._refuses()

    def _refuses(self) -> bool:
        return self._error is not None and (self._trying or time.monotonic() < self._until)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Guards one call. Raises `CircuitOpenError` with the last error while the breaker is open."""
        with self._lock:
            if self._refuses():
                raise CircuitOpenError(str(self._error))
            tries = self._error is not None
            self._trying = self._trying or tries
        outage: Exception | None = None
        try:
            yield
        except Exception as error:
            if not isinstance(error, EntryDamagedError) and self._counts(error):
                outage = error
            raise
        except BaseException:  # the caller gave up: nothing is known of the place
            outage = self._error
            raise
        finally:
            with self._lock:
                self._error, self._until = outage, time.monotonic() + self._pause_s
                self._trying = self._trying and not tries


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
    lease, done = _Lease(backend, lease_s), threading.Event()
    lease.acquire(wait_s)
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
            lease.write(_FREE)


def require_lease(backend: Backend, name: str) -> None:
    """Before a write to a name: raise `StoreError` where this thread writes under a lease of that backend and has lost it."""
    for lease in _WRITERS.leases:
        if lease.backend is backend and name != _NAME:
            lease.require()


class _Lease:
    """The name holds the owner and a number that changes with every renewal, so that others see that the owner is alive.

    It was certainly ours at the moment `_since` of the monotonic clock.
    """

    def __init__(self, backend: Backend, lease_s: float) -> None:
        self.backend, self._lease_s = backend, lease_s
        self._owner, self._turns = uuid.uuid4().hex, count()
        self._since, self._lost = float("-inf"), False
        self._lock = threading.Lock()

    def acquire(self, wait_s: float) -> None:
        """Take it when it is free, or was not renewed for as long as it lasts."""
        mine, began, delay = self._token(), time.monotonic(), _LOOK_AFTER_S
        seen, since = b"", began
        while True:
            content, looked = self.backend.read(_NAME, _MOST), time.monotonic()
            if content != seen:
                seen, since = content or b"", looked
            free = content in (None, _FREE) or looked - since > self._lease_s
            # It may be ours by a swap whose answer got lost.
            if content == mine or (free and self.backend.swap(_NAME, mine, content)):
                self._since = looked
                return
            if time.monotonic() - began > wait_s:
                raise StoreError(
                    f"another process has been writing to {self.backend.place} for {wait_s:g} s; wait for it and try again"
                )
            time.sleep(delay)
            delay = min(1.5 * delay, _LOOK_EVERY_S)

    def keep(self, done: threading.Event) -> None:
        """Renew it until then."""
        while not done.wait(self._lease_s / 4):
            with suppress(StoreError):  # the next attempt, or whoever writes, finds out
                self.write(self._token())

    def require(self) -> None:
        """Raise `StoreError` unless it is certainly ours."""
        if not self._is_certain():
            self.write(self._token())
        if not self._is_certain():
            raise StoreError(
                f"{self.backend.place} did not answer for {self._lease_s:g} s, and another process may be writing to it: "
                "run the same command again"
            )

    def write(self, new: bytes) -> None:
        """Have the name hold `new`, if it is ours. Raises `StoreError` where that is not known."""
        with self._lock:
            began = time.monotonic()
            held = self.backend.read(_NAME, _MOST)
            if self._lost or held is None or not held.startswith(self._owner.encode()):
                self._lost = True
            elif self.backend.swap(_NAME, new, held):
                self._since = began

    def _is_certain(self) -> bool:
        return not self._lost and time.monotonic() - self._since <= self._lease_s

    def _token(self) -> bytes:
        return f"{self._owner} {next(self._turns)}".encode()
