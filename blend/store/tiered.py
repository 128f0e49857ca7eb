"""One store in several places: a disk of this machine and a Redis in front of the far place, which has everything.

The far place decides: what it acknowledged is stored, what it lists is there, and its outage is an outage. The nearer tiers
hold copies of caches, byte for byte, and may lack any. An error of theirs costs one timeout, one line in the log and a longer
way. A cache's name stands for its content, so a copy needs no check with the far place. Every layer is verified, from whichever
tier it comes. One that is not as written is taken from the next tier; only the far place's own damage is damage.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple, TypeVar
from weakref import WeakSet, WeakValueDictionary

from blend.errors import EntryDamagedError, EntryTooLargeError, StoreError, StoreUnreachableError
from blend.store.backend import (
    ARTIFACTS,
    CACHES,
    GENERATION,
    INDEXES,
    SEALED,
    SOURCES,
    Backend,
    Blob,
    Buffer,
    CircuitBreaker,
    CircuitOpenError,
    Found,
    Stored,
    TierHits,
    Timeouts,
    WarnOnce,
    close_all,
    key_of,
)
from blend.store.fetch import IN_FLIGHT_BYTES, Download, EntrySource, FetchPool, Prefetcher, TieredBlob
from blend.store.format import EntryHeader
from blend.store.reader import read_header
from blend.store.seal import Seal, unpack_artifact

FETCHERS = 16
_MOST_OF_A_GENERATION = 1 << 10
_FRESH_S = 1.0  # the generation is asked for before every prompt
_LAST_WAIT_S = 3.0

T = TypeVar("T")


class FarTier:
    """The place that has everything. Its outage is raised, from then on without another try until the breaker closes."""

    def __init__(self, backend: Backend, pause_s: float, warnings: WarnOnce) -> None:
        self.backend, self._warnings = backend, warnings
        self._breaker = CircuitBreaker(pause_s, lambda error: isinstance(error, StoreUnreachableError))

    @contextmanager
    def asked(self) -> Iterator[Backend]:
        """The backend, for one call. Raises `StoreError`."""
        try:
            with self._breaker():
                yield self.backend
        except CircuitOpenError:
            raise
        except StoreUnreachableError as error:
            self._warnings.warn(self.backend.place, "down", f"{error}; only what is in nearer tiers is used meanwhile")
            raise

    def source(self, blob: Blob) -> EntrySource:
        """A blob to read from; its errors are raised."""
        return EntrySource(blob, self.asked, lambda error: None)


class CacheTier:
    """A nearer place, which may lack anything. Its errors are logged, and the next tier is asked instead."""

    def __init__(self, backend: Backend, pause_s: float, warnings: WarnOnce) -> None:
        self.backend, self._warnings = backend, warnings
        self._reading = CircuitBreaker(pause_s, lambda error: isinstance(error, StoreError))
        self._writing = CircuitBreaker(
            pause_s, lambda error: isinstance(error, StoreError) and not isinstance(error, EntryTooLargeError)
        )

    def read(self, call: Callable[[Backend], T], otherwise: T) -> T:
        """The result of `call`, or `otherwise` when the tier fails or its breaker is open."""
        try:
            with self._reading():
                return call(self.backend)
        except EntryDamagedError:
            return otherwise
        except StoreError as error:
            self._warn("read", error)
            return otherwise

    def write(self, call: Callable[[Backend], object]) -> None:
        """Do `call` if the tier works; one that cannot be read is not written to."""
        if self._reading.open:
            return
        try:
            with self._writing():
                call(self.backend)
        except StoreError as error:
            self._warn("written", error)

    @contextmanager
    def asked(self) -> Iterator[Backend]:
        """The backend, for one read. Raises `StoreError`, at once while the breaker is open."""
        with self._reading():
            yield self.backend

    def source(self, name: str, blob: Blob) -> EntrySource:
        """A blob to read from."""
        return EntrySource(blob, self.asked, partial(self.failed, name))

    def failed(self, name: str, error: StoreError) -> None:
        """Log what was wrong with a blob; a damaged one is deleted."""
        if not isinstance(error, EntryDamagedError):
            self._warn("read", error)
            return
        place = self.backend.place
        self._warnings.warn(place, "damaged", f"{place} held bytes that were never written: they are fetched again")
        with suppress(StoreError):
            self.write(lambda backend: backend.delete(name))

    def _warn(self, doing: str, error: StoreError) -> None:
        if isinstance(error, CircuitOpenError):
            return
        kind, outcome = doing, "the store goes on without this tier meanwhile"
        if isinstance(error, EntryTooLargeError):
            kind, outcome = "too large", "the store goes on without a copy there"
        elif isinstance(error, StoreUnreachableError):
            kind = "down"
        self._warnings.warn(self.backend.place, kind, f"{error}; {outcome}")


class TierSearch:
    """Finds caches in the tiers and downloads them, each once for all who read it at the same time.

    A complete download is written to the tiers that lacked it.
    """

    def __init__(
        self, far: FarTier, hot: CacheTier | None, local: CacheTier | None, seal: Seal, pool: FetchPool
    ) -> None:
        self._far, self._hot, self._local, self._seal, self._pool = far, hot, local, seal, pool
        self._downloads: WeakValueDictionary[str, Download] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._counts = Counter[str]()

    @property
    def hits(self) -> TierHits:
        """Since this was made."""
        with self._lock:
            return TierHits(*(self._counts[field] for field in TierHits._fields))

    def forget(self, name: str) -> None:
        """A download of this name holds an older version from now on."""
        with self._lock:
            self._downloads.pop(name, None)

    def open_many(self, names: Sequence[str], head: int) -> list[Found]:
        """One exchange with each tier, for what no nearer one has."""
        found: dict[str, Found] = {}
        together = WeakSet[Download]()
        caches = [name for name in dict.fromkeys(names) if name.startswith(CACHES)]
        try:
            for search in (self._in_flight, self._in_local, self._in_hot):
                found |= search([name for name in caches if name not in found], head, together)
            found |= self._in_far([name for name in dict.fromkeys(names) if name not in found], head, together)
        except BaseException:
            close_all(list(found.values()))
            raise
        return self._in_order(names, found, head)

    def _in_order(self, names: Sequence[str], found: dict[str, Found], head: int) -> list[Found]:
        """In the order of the names; a name that is given twice is opened twice."""
        used: set[str] = set()
        result: list[Found] = []
        for name in names:
            again = name in used and isinstance(found[name], Blob)
            result.append(self.open_many([name], head)[0] if again else found[name])
            used.add(name)
        return result

    def _in_flight(self, names: Sequence[str], head: int, together: WeakSet[Download]) -> dict[str, Found]:
        """Entries that are downloading, or still in use afterwards."""
        with self._lock:
            pairs = [(name, self._downloads.get(name)) for name in names]
        return {name: TieredBlob(one, together) for name, one in pairs if one is not None and one.failure is None}

    def _in_local(self, names: Sequence[str], head: int, together: WeakSet[Download]) -> dict[str, Found]:
        result: dict[str, Found] = {}
        for name, source, entry in self._checked(self._local, names, head):
            result[name] = TieredBlob(entry, together, source, partial(self._from_elsewhere, name, entry))
        self._count("local", len(result))
        return result

    def _from_elsewhere(self, name: str, entry: EntryHeader) -> Download:
        """The same entry from another place than the disk."""
        for _, source, found in self._checked(self._hot, [name], len(entry.beginning)):
            if found.beginning == entry.beginning:
                return self._started(name, entry, source, far=False)
            source.blob.close()
        return self._started(name, entry, self._far_again(name, entry), far=True)

    def _in_hot(self, names: Sequence[str], head: int, together: WeakSet[Download]) -> dict[str, Found]:
        result: dict[str, Found] = {}
        for name, source, entry in self._checked(self._hot, names, head):
            opened = self._opened(name, entry, source, together, far=False)
            if isinstance(opened, TieredBlob):
                result[name] = opened
        self._count("hot", len(result))
        return result

    def _in_far(self, names: Sequence[str], head: int, together: WeakSet[Download]) -> dict[str, Found]:
        """What is no usable entry is returned as it is: `ChunkStore` says what is wrong with it."""
        if not names:
            return {}
        with self._far.asked() as far:
            result = dict(zip(names, far.open_many(names, head), strict=True))
        for name, blob in result.items():
            if isinstance(blob, Blob) and name.startswith(CACHES):
                entry = self._far_entry(name, blob)
                if entry is not None:
                    result[name] = self._opened(name, entry, self._far.source(blob), together, far=True)
        missing = sum(one is None for one in result.values())
        self._count("far", len(result) - missing)
        self._count("missing", missing)
        return result

    def _checked(
        self, tier: CacheTier | None, names: Sequence[str], head: int
    ) -> Iterator[tuple[str, EntrySource, EntryHeader]]:
        """The usable entries that a nearer tier has of these."""
        if tier is None or not names:
            return
        nothing: list[Found] = [None] * len(names)
        for name, blob in zip(names, tier.read(lambda it: it.open_many(names, head), nothing), strict=True):
            if isinstance(blob, EntryDamagedError):
                tier.failed(name, blob)
            elif blob is not None:
                try:
                    with tier.asked():
                        entry = read_header(blob, key_of(name), self._seal)
                except StoreError as error:
                    blob.close()
                    tier.failed(name, error)
                else:
                    yield name, tier.source(name, blob), entry

    def _far_entry(self, name: str, blob: Blob) -> EntryHeader | None:
        try:
            with self._far.asked():
                return read_header(blob, key_of(name), self._seal)
        except EntryDamagedError:
            return None

    def _opened(
        self, name: str, entry: EntryHeader, source: EntrySource, together: WeakSet[Download], *, far: bool
    ) -> TieredBlob | EntryDamagedError:
        """A download's blob, or the damage of an entry that claims to be larger than memory."""
        try:
            return TieredBlob(self._started(name, entry, source, far=far), together)
        except EntryDamagedError as error:
            source.blob.close()
            source.failed(error)
            return error

    def _started(self, name: str, entry: EntryHeader, source: EntrySource, *, far: bool) -> Download:
        """A download, one that is under way where it is of the same bytes. far: whether the source is the far place."""
        with self._lock:
            held = self._downloads.get(name)
            if held is not None and held.failure is None and held.entry.beginning == entry.beginning:
                source.blob.close()
                return held
            made = Download(entry, self._sources(name, entry, source), partial(self._keep, name, far=far), self._pool)
            self._downloads[name] = made
            return made

    def _sources(self, name: str, entry: EntryHeader, first: EntrySource) -> Iterator[EntrySource]:
        yield first
        yield self._far_again(name, entry)  # after the far place, too: bytes change on the way

    def _far_again(self, name: str, entry: EntryHeader) -> EntrySource:
        """The same version from the far place. Raises `EntryDamagedError` where that lacks it, `StoreError`."""
        with self._far.asked() as far:
            blob = far.open(name, len(entry.beginning))
        found = None if blob is None else self._far_entry(name, blob)
        if blob is not None and found is not None and found.beginning == entry.beginning:
            return self._far.source(blob)
        close_all([blob])
        raise EntryDamagedError("it cannot be read, and no other place holds it")

    def _keep(self, name: str, view: memoryview, *, far: bool) -> None:
        """Write a complete entry to the nearer tiers that lacked it, unless it was put or deleted meanwhile."""
        self._count("fetched_bytes", view.nbytes)
        with self._lock:
            held = self._downloads.get(name)
        if held is None or bytes(held.entry.beginning) != bytes(view[: len(held.entry.beginning)]):
            return
        if self._local is not None:
            self._local.write(lambda local: local.put(name, [view]))
        if self._hot is not None and far:
            self._hot.write(lambda hot: hot.put(name, [view]))

    def _count(self, field: str, more: int) -> None:
        with self._lock:
            self._counts[field] += more


class Tiers(NamedTuple):
    """far: the place that has everything. hot: a Redis. local: a disk of this machine."""

    far: Backend
    hot: Backend | None = None
    local: Backend | None = None


class TieredBackend(Backend):
    """`tiers` as one backend.

    seal: what entries and artifacts are verified with. prefetch_bytes: how much `prefetch` has in flight at most.
    """

    def __init__(
        self, tiers: Tiers, seal: Seal, timeouts: Timeouts | None = None, prefetch_bytes: int = IN_FLIGHT_BYTES
    ) -> None:
        self._seal = seal
        pause_s, warnings = (timeouts or Timeouts()).pause_s, WarnOnce()
        self.tiers, self.place, self._warnings = tiers, tiers.far.place, warnings
        self._far = FarTier(tiers.far, pause_s, warnings)
        self._hot = None if tiers.hot is None else CacheTier(tiers.hot, pause_s, warnings)
        self._local = None if tiers.local is None else CacheTier(tiers.local, pause_s, warnings)
        self._nearer = [tier for tier in (self._local, self._hot) if tier is not None]
        self._pool = FetchPool(FETCHERS)
        if self._nearer:  # a command that ends leaves what it has fetched in them
            atexit.register(self._pool.wait, _LAST_WAIT_S)
        self._search = TierSearch(self._far, self._hot, self._local, seal, self._pool)
        self._prefetcher = Prefetcher(lambda names: self.open_many(names, 0), self._pool, prefetch_bytes)
        self._generation: tuple[float, bytes | None] = (float("-inf"), None)

    @property
    def tier_hits(self) -> TierHits:
        """See `Backend.tier_hits`."""
        return self._search.hits

    @property
    def evictions(self) -> int:
        """Of all tiers."""
        return sum(tier.evictions for tier in self.tiers if tier is not None)

    def open(self, name: str, head: int) -> Blob | None:
        """See `open_many`."""
        (found,) = self.open_many([name], head)
        if isinstance(found, EntryDamagedError):
            raise found
        return found

    def open_many(self, names: Sequence[str], head: int) -> list[Found]:
        """One exchange with each tier, for what no nearer one has."""
        return self._search.open_many(names, head)

    def stored(self, names: Sequence[str], head: int) -> list[Found]:
        """Of the far place."""
        with self._far.asked() as far:
            return far.open_many(names, head)

    def prefetch(self, names: Iterable[str], most_bytes: int | None = None) -> None:
        """Download in background threads what is not on this machine's disk."""
        self._prefetcher.add((name for name in dict.fromkeys(names) if name.startswith(CACHES)), most_bytes)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all downloads are kept; whether that came in time."""
        return self._pool.wait(timeout_s)

    def read(self, name: str, most: int) -> bytes | None:
        """From the far place; during its outage from the copy on this machine's disk, if there is one."""
        if name == GENERATION and time.monotonic() - self._generation[0] < _FRESH_S:
            return self._generation[1]
        try:
            with self._far.asked() as far:
                content = far.read(name, most)
        except StoreUnreachableError:
            kept = self._copy_of(name, most)
            if kept is None:
                raise
            return kept or None
        self._keep_copy(name, content)
        return content

    def _copy_of(self, name: str, most: int) -> bytes | None:
        """Its last content; empty for a miss, None when unknown."""
        return None if self._local is None else self._local.read(lambda local: local.read(name, most), None)

    def _keep_copy(self, name: str, content: bytes | None) -> None:
        if name == GENERATION:
            self._warn_where_emptied(content)
            self._generation = time.monotonic(), content
        if self._local is None or name.startswith((CACHES, INDEXES)):
            return
        kept = content or b""
        if kept and name.startswith((ARTIFACTS, SOURCES, SEALED)):
            try:
                unpack_artifact(name.removeprefix(ARTIFACTS), kept, self._seal)
            except EntryDamagedError:  # keep the older, sound copy
                return
        if self._copy_of(name, len(kept)) != kept:
            self._local.write(lambda local: local.put(name, [kept]))

    def _warn_where_emptied(self, generation: bytes | None) -> None:
        """Warn when the far place lost its generation, which is never deleted alone: it lost everything."""
        if generation is None and (self._generation[1] or self._copy_of(GENERATION, _MOST_OF_A_GENERATION)):
            self._warnings.warn(
                self.place,
                "emptied",
                f"{self.place} has lost all that it held, as a Redis does that is flushed or started anew without persistence: "
                "run `blend precompute` again, and see that it keeps what it is given",
            )

    def put(self, name: str, blobs: Sequence[Buffer]) -> None:
        """In the far place, then in the Redis; the disk drops its copy, which may be another version."""
        with self._far.asked() as far:
            far.put(name, blobs)
        self._forget(name)
        if self._hot is not None and name.startswith(CACHES):
            self._hot.write(lambda hot: hot.put(name, blobs))

    def swap(self, name: str, content: bytes, was: bytes | None) -> bool:
        """In the far place."""
        with self._far.asked() as far:
            done = far.swap(name, content, was)
        self._forget(name)
        return done

    def delete(self, name: str) -> bool:
        """Everywhere."""
        with self._far.asked() as far:
            done = far.delete(name)
        self._forget(name)
        if self._hot is not None and name.startswith(CACHES):
            self._hot.write(lambda hot: hot.delete(name))
        return done

    def _forget(self, name: str) -> None:
        self._search.forget(name)
        if name == GENERATION:
            self._generation = float("-inf"), None
        if self._local is not None:
            self._local.write(lambda local: local.delete(name))

    def touch(self, name: str) -> None:
        """On this machine's disk, which has a budget."""
        if self._local is not None:
            self._local.write(lambda local: local.touch(name))

    def listing(self, prefix: str) -> Iterator[Stored]:
        """Of the far place."""
        with self._far.asked() as far:
            yield from far.listing(prefix)

    def names(self, prefix: str) -> Iterator[str]:
        """Of the far place."""
        with self._far.asked() as far:
            yield from far.names(prefix)

    def folders(self, prefix: str) -> set[str]:
        """Of the far place."""
        with self._far.asked() as far:
            return far.folders(prefix)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Of the far place."""
        with self.tiers.far.writing():
            yield
