"""One of several places for the same bytes: asked while it answers, left alone while it does not."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

from blend.errors import EntryDamagedError, EntryTooLargeError, StoreError, StoreUnreachableError
from blend.store.backend import (
    CACHES,
    GENERATION,
    INDEXES,
    Backend,
    Blob,
    Buffer,
    CircuitBreaker,
    CircuitOpenError,
    Found,
    Range,
    Stored,
    TierHits,
    Timeouts,
    WarnOnce,
    close_all,
)
from blend.store.fetch import Download, EntrySource, FetchPool, Group, Prefetcher, TieredBlob
from blend.store.reader import CheckedEntry, EntryCheck

T = TypeVar("T")


class FarTier:
    """The place that has everything: an outage of it is one, and is raised, at once after the first time."""

    def __init__(self, backend: Backend, pause_s: float, told: WarnOnce) -> None:
        self.backend, self._told = backend, told
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
            self._told.once(self.backend.place, "down", f"{error}; only what is in nearer tiers is used meanwhile")
            raise


class CacheTier:
    """A place that is nearer and may lack anything: whatever is wrong with it, the others are asked instead."""

    def __init__(self, backend: Backend, pause_s: float, told: WarnOnce) -> None:
        self.backend, self._told = backend, told
        self._reading = CircuitBreaker(pause_s, lambda error: True)
        self._writing = CircuitBreaker(pause_s, lambda error: not isinstance(error, EntryTooLargeError))

    def read(self, call: Callable[[Backend], T], otherwise: T) -> T:
        """What `call` returns, or `otherwise` where the place fails or is left alone."""
        try:
            with self._reading():
                return call(self.backend)
        except EntryDamagedError:
            return otherwise
        except StoreError as error:
            self._tell("read", error)
            return otherwise

    def write(self, call: Callable[[Backend], object]) -> None:
        """Do it if it can be done; a place that cannot even be read is not written to."""
        if self._reading.open:
            return
        try:
            with self._writing():
                call(self.backend)
        except StoreError as error:
            self._tell("written", error)

    @contextmanager
    def asked(self) -> Iterator[Backend]:
        """The backend, for one read. Raises `StoreError`, at once while it is left alone."""
        with self._reading():
            yield self.backend

    def failed(self, name: str, error: StoreError) -> None:
        """Take note of what was wrong with a blob of this name: one that is damaged goes."""
        if not isinstance(error, EntryDamagedError):
            self._tell("read", error)
            return
        place = self.backend.place
        self._told.once(place, "damaged", f"{place} held bytes that were never written: they are fetched again")
        with suppress(StoreError):
            self.write(lambda backend: backend.delete(name))

    def _tell(self, doing: str, error: StoreError) -> None:
        if isinstance(error, CircuitOpenError):
            return
        if isinstance(error, EntryTooLargeError):
            self._told.once(self.backend.place, "too large", f"{error}; the store goes on without a copy there")
            return
        kind = "down" if isinstance(error, StoreUnreachableError) else doing
        self._told.once(self.backend.place, kind, f"{error}; the store goes on without this tier meanwhile")


# --- Where a cache is found that may be in several tiers, and how its bytes come from there.


class TierSearch:
    """far, hot, local: the tiers, guarded; the nearer ones may be missing. look: what a cache is, by its header."""

    def __init__(
        self, far: FarTier, hot: CacheTier | None, local: CacheTier | None, look: EntryCheck, fetchers: FetchPool
    ) -> None:
        self._far, self._hot, self._local, self._look, self._fetchers = far, hot, local, look, fetchers
        self._downloads: WeakValueDictionary[str, Download] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._hits = [0, 0, 0, 0, 0]

    @property
    def hits(self) -> TierHits:
        """Since this was made."""
        with self._lock:
            return TierHits(*self._hits)

    def forget(self, name: str) -> None:
        """What is on its way of it is no longer what it is."""
        with self._lock:
            self._downloads.pop(name, None)

    def open_many(self, names: Sequence[str], head: int) -> list[Found]:
        """One exchange with each tier, for what no nearer one has. What is opened together is fetched together."""
        found: dict[str, Found] = {}
        group = Group()
        caches = [name for name in dict.fromkeys(names) if name.startswith(CACHES)]
        try:
            for look in (self._arriving, self._on_disk, self._in_memory):
                found |= look([name for name in caches if name not in found], head, group)
            found |= self._far_away([name for name in dict.fromkeys(names) if name not in found], head, group)
        except BaseException:
            close_all(list(found.values()))
            raise
        return self._in_order(names, found, head)

    def nearer(self, name: str) -> Blob | None:
        """What the disk or the server in memory has of a cache."""
        for look in (self._on_disk, self._in_memory):
            found = look([name], 0, Group()).get(name)
            if isinstance(found, Blob):
                return found
        return None

    def _again(self, name: str, head: int) -> Found:
        (found,) = self.open_many([name], head)
        return found

    def _in_order(self, names: Sequence[str], found: dict[str, Found], head: int) -> list[Found]:
        """A name that stands several times is opened as often."""
        used: set[str] = set()
        result: list[Found] = []
        for name in names:
            again = name in used and isinstance(found[name], Blob)
            result.append(self._again(name, head) if again else found[name])
            used.add(name)
        return result

    def _arriving(self, names: Sequence[str], head: int, group: Group) -> dict[str, Found]:
        """What is being fetched, or was and is still in use."""
        with self._lock:
            pairs = [(name, self._downloads.get(name)) for name in names]
        return {
            name: TieredBlob(download, group)
            for name, download in pairs
            if download is not None and download.failure is None
        }

    def _on_disk(self, names: Sequence[str], head: int, group: Group) -> dict[str, Found]:
        tier, result = self._local, dict[str, Found]()
        for name, blob, entry in self._looked_at(tier, names, head):
            source = EntrySource(blob, tier.asked, lambda error, name=name: tier.failed(name, error))  # type: ignore[misc,union-attr]
            result[name] = TieredBlob(
                entry,
                group,
                source,
                lambda entry=entry, name=name: self._elsewhere(name, entry),  # type: ignore[misc]
            )
        self._count(0, len(result))
        return result

    def _elsewhere(self, name: str, entry: CheckedEntry) -> Download | None:
        """The same entry from another place than the disk."""
        near = self._source_in_memory(name, entry)
        source = near or self._source_far_away(name, entry)
        return None if source is None else self._download(name, entry, source, far=near is None)

    def _in_memory(self, names: Sequence[str], head: int, group: Group) -> dict[str, Found]:
        result: dict[str, Found] = {}
        for name, blob, entry in self._looked_at(self._hot, names, head):
            arriving = self._arriving_from(name, entry, self._hot_source(name, blob), group, far=False)
            if isinstance(arriving, TieredBlob):
                result[name] = arriving
        self._count(1, len(result))
        return result

    def _far_away(self, names: Sequence[str], head: int, group: Group) -> dict[str, Found]:
        """As they are where they are no entries that can be used: `ChunkStore` says what is wrong with them."""
        if not names:
            return {}
        with self._far.asked() as far:
            found = far.open_many(names, head)
        result: dict[str, Found] = {}
        for name, blob in zip(names, found, strict=True):
            entry = self._entry(name, blob) if isinstance(blob, Blob) and name.startswith(CACHES) else None
            if entry is None:
                result[name] = blob
            else:
                assert isinstance(blob, Blob)
                result[name] = self._arriving_from(name, entry, self._far_source(blob), group, far=True)
        missing = sum(one is None for one in result.values())
        self._count(2, len(result) - missing)
        self._count(3, missing)
        return result

    def _looked_at(
        self, tier: CacheTier | None, names: Sequence[str], head: int
    ) -> Iterator[tuple[str, Blob, CheckedEntry]]:
        """What a nearer tier has of these, as far as it can be used."""
        if tier is None or not names:
            return
        nothing: list[Found] = [None] * len(names)
        for name, blob in zip(names, tier.read(lambda it: it.open_many(names, head), nothing), strict=True):
            if isinstance(blob, EntryDamagedError):
                tier.failed(name, blob)
            elif blob is not None:
                try:
                    with tier.asked():
                        entry = self._look(name, blob)
                except StoreError as error:
                    blob.close()
                    tier.failed(name, error)
                else:
                    yield name, blob, entry

    def _entry(self, name: str, blob: Blob) -> CheckedEntry | None:
        try:
            with self._far.asked():
                return self._look(name, blob)
        except EntryDamagedError:
            return None

    def _arriving_from(
        self, name: str, entry: CheckedEntry, source: EntrySource, group: Group, *, far: bool
    ) -> TieredBlob | EntryDamagedError:
        """The damage of an entry that says it is larger than any memory."""
        try:
            return TieredBlob(self._download(name, entry, source, far=far), group)
        except EntryDamagedError as error:
            source.blob.close()
            source.failed(error)
            return error

    def _download(self, name: str, entry: CheckedEntry, source: EntrySource, *, far: bool) -> Download:
        """The one that is under way already, if it is of the same bytes. far: whether the source is the far place."""
        with self._lock:
            held = self._downloads.get(name)
            if held is not None and held.failure is None and held.entry.beginning == entry.beginning:
                source.blob.close()
                return held
            made = Download(
                entry,
                source,
                lambda: self._source_far_away(name, entry),  # itself once more: bytes change on the way, too
                lambda view: self._keep(name, view, far=far),
                self._fetchers,
            )
            self._downloads[name] = made
            return made

    def _hot_source(self, name: str, blob: Blob) -> EntrySource:
        tier = self._hot
        assert tier is not None
        return EntrySource(blob, tier.asked, lambda error: tier.failed(name, error))

    def _far_source(self, blob: Blob) -> EntrySource:
        return EntrySource(blob, self._far.asked, _is_told)

    def _source_in_memory(self, name: str, entry: CheckedEntry) -> EntrySource | None:
        for _, blob, found in self._looked_at(self._hot, [name], len(entry.beginning)):
            if found.beginning == entry.beginning:
                return self._hot_source(name, blob)
            blob.close()
        return None

    def _source_far_away(self, name: str, entry: CheckedEntry) -> EntrySource | None:
        """None where it has another version, or none. Raises `StoreError`."""
        with self._far.asked() as far:
            blob = far.open(name, len(entry.beginning))
        if blob is None:
            return None
        found = self._entry(name, blob)
        if found is None or found.beginning != entry.beginning:
            blob.close()
            return None
        return self._far_source(blob)

    def _keep(self, name: str, view: memoryview, *, far: bool) -> None:
        """In the nearer tiers that did not have it."""
        self._count(4, view.nbytes)
        with self._lock:
            held = self._downloads.get(name)
        if held is None or bytes(held.entry.beginning) != bytes(view[: len(held.entry.beginning)]):
            return  # it was put or deleted meanwhile
        if self._local is not None:
            self._local.write(lambda local: local.put(name, [view]))
        if self._hot is not None and far:
            self._hot.write(lambda hot: hot.put(name, [view]))

    def _count(self, which: int, more: int) -> None:
        with self._lock:
            self._hits[which] += more


def _is_told(error: StoreError) -> None:
    """The far place's errors are raised, and told about where it is asked."""


# --- One store in several places: a disk of this machine and a server in memory in front of the place that has everything.


FETCHERS = 16
_MOST_OF_A_GENERATION = 1 << 10
_FRESH_S = 1.0  # the generation is asked for before every prompt
_LAST_WAIT_S = 3.0


class Tiers(NamedTuple):
    """far: has everything. hot: a server in memory. local: a disk of this machine."""

    far: Backend
    hot: Backend | None = None
    local: Backend | None = None


class TieredBackend(Backend):
    """`tiers` as one. look: what a cache is, by its header. as_written: whether what else lies under a name is what was put."""

    def __init__(
        self,
        tiers: Tiers,
        look: EntryCheck,
        timeouts: Timeouts | None = None,
        as_written: Callable[[str, bytes], bool] = lambda name, content: True,
    ) -> None:
        self._as_written = as_written
        pause_s, told = (timeouts or Timeouts()).pause_s, WarnOnce()
        self.tiers, self.place, self._told = tiers, tiers.far.place, told
        self._far = FarTier(tiers.far, pause_s, told)
        self._hot = None if tiers.hot is None else CacheTier(tiers.hot, pause_s, told)
        self._local = None if tiers.local is None else CacheTier(tiers.local, pause_s, told)
        self._nearer = [tier for tier in (self._local, self._hot) if tier is not None]
        self._fetchers = FetchPool(FETCHERS)
        if self._nearer:  # a command that ends leaves what it has fetched in them
            atexit.register(self._fetchers.wait, _LAST_WAIT_S)
        self._search = TierSearch(self._far, self._hot, self._local, look, self._fetchers)
        self._ahead = Prefetcher(lambda names: self.open_many(names, 0), self._fetchers)
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
        """One exchange with each tier, for what no nearer one has. What is opened together is fetched together."""
        return self._search.open_many(names, head)

    def stored(self, names: Sequence[str], head: int) -> list[Found]:
        """What the far place has."""
        with self._far.asked() as far:
            return far.open_many(names, head)

    def restore(self, name: str) -> bool:
        """From the disk or the server in memory, every byte verified."""
        blob = self._search.nearer(name)
        if blob is None:
            return False
        content = memoryview(bytearray(blob.nbytes))
        try:
            whole = blob.read(Range(0, content))
        except EntryDamagedError:
            return False
        finally:
            blob.close()
        if whole:
            with self._far.asked() as far:
                far.put(name, [content])
        return whole

    def prefetch(self, names: Iterable[str], most_bytes: int | None = None) -> None:
        """In threads beside; what is on this machine's disk is left there."""
        self._ahead.add((name for name in dict.fromkeys(names) if name.startswith(CACHES)), most_bytes)

    def wait(self, timeout_s: float) -> bool:
        """Until all that is under way has come and is kept; whether that was in time."""
        return self._fetchers.wait(timeout_s)

    def read(self, name: str, most: int) -> bytes | None:
        """From the far place; while that is down what this machine's disk remembers of it, if that is anything."""
        if name == GENERATION and time.monotonic() - self._generation[0] < _FRESH_S:
            return self._generation[1]
        try:
            with self._far.asked() as far:
                content = far.read(name, most)
        except StoreUnreachableError:
            kept = self._remembered(name, most)
            if kept is None:
                raise
            return kept or None
        self._remember(name, content)
        return content

    def _remembered(self, name: str, most: int) -> bytes | None:
        """As it was last; empty where there was nothing, None where that is not known."""
        return None if self._local is None else self._local.read(lambda local: local.read(name, most), None)

    def _remember(self, name: str, content: bytes | None) -> None:
        if name == GENERATION:
            self._warn_where_emptied(content)
            self._generation = time.monotonic(), content
        if self._local is None or name.startswith((CACHES, INDEXES)):
            return
        kept = content or b""
        if kept and not self._as_written(name, kept):  # what it was before is worth more
            return
        if self._remembered(name, len(kept)) != kept:
            self._local.write(lambda local: local.put(name, [kept]))

    def _warn_where_emptied(self, generation: bytes | None) -> None:
        """Warn of a far place that had a generation and has none: nobody deletes it, so somebody has deleted everything."""
        if generation is None and (self._generation[1] or self._remembered(GENERATION, _MOST_OF_A_GENERATION)):
            self._told.once(
                self.place,
                "emptied",
                f"{self.place} has lost all that it held, as a Redis does that is flushed or started anew without persistence: "
                "run `blend precompute` again, and see that it keeps what it is given",
            )

    def put(self, name: str, blobs: Sequence[Buffer], *, if_absent: bool = False) -> bool:
        """In the far place, and then in the server in memory; what the disk has of it goes, for it may be another version."""
        with self._far.asked() as far:
            done = far.put(name, blobs, if_absent=if_absent)
        self._forget(name)
        if done and self._hot is not None and name.startswith(CACHES):
            self._hot.write(lambda hot: hot.put(name, blobs))
        return done

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
        """On the disk of this machine, whose budget asks for it."""
        if self._local is not None:
            self._local.write(lambda local: local.touch(name))

    def listing(self, prefix: str) -> Iterator[list[Stored]]:
        """What the far place has."""
        with self._far.asked() as far:
            yield from far.listing(prefix)

    def names(self, prefix: str) -> Iterator[list[str]]:
        """What the far place has."""
        with self._far.asked() as far:
            yield from far.names(prefix)

    def folders(self, prefix: str) -> set[str]:
        """What the far place has."""
        with self._far.asked() as far:
            return far.folders(prefix)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Of the far place."""
        with self.tiers.far.writing():
            yield
