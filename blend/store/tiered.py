"""One store in several places: a disk of this machine and a server in memory in front of the place that has everything.

The far place decides: what was put there is put, what it lists is there, and its outage is one. The nearer ones hold copies of
caches, bytes as they are, and may lack any: what is wrong with them costs their timeout once, a line in the log, and a way that
is longer. Contents are named by what they are made of, so a copy is not asked for again.

Every layer is held against its digest before anybody sees it, from whichever tier it comes. One that is not what was written is
taken from the next tier; only the far place's own damage is damage. What is read is fetched whole, in the order of its layers,
once for all who read it at the same time, and then kept in the nearer tiers.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakValueDictionary

from blend.errors import EntryDamagedError, StoreError, StoreUnreachableError
from blend.store.arrival import Arrival, Source
from blend.store.backend import CACHES, Backend, Blob, Buffer, Stored, close_all
from blend.store.breaker import Told
from blend.store.fetchers import Fetchers
from blend.store.names import GENERATION, INDEXES
from blend.store.patience import Patience
from blend.store.sealed import Entry, Look
from blend.store.tier import Authority, Nearer
from blend.store.tiered_blob import Group, TieredBlob

FETCHERS = 16
_FRESH_S = 1.0  # the generation is asked for before every prompt
_BATCH = 64
_LAST_WAIT_S = 3.0

Found = Blob | EntryDamagedError | None


class Tiers(NamedTuple):
    """far: has everything. hot: a server in memory. local: a disk of this machine."""

    far: Backend
    hot: Backend | None = None
    local: Backend | None = None


class TierHits(NamedTuple):
    """Entries that were opened, by where they were.

    far: from the far place. missing: nowhere. fetched_bytes: that came over the network.
    """

    local: int
    hot: int
    far: int
    missing: int
    fetched_bytes: int


class TieredBackend(Backend):
    """`tiers` as one. look: what a cache is, by its header."""

    def __init__(self, tiers: Tiers, look: Look, patience: Patience | None = None) -> None:
        pause_s, told = (patience or Patience()).pause_s, Told()
        self.tiers, self.place, self._look = tiers, tiers.far.place, look
        self._far = Authority(tiers.far, pause_s, told)
        self._hot = None if tiers.hot is None else Nearer(tiers.hot, pause_s, told)
        self._local = None if tiers.local is None else Nearer(tiers.local, pause_s, told)
        self._nearer = [tier for tier in (self._local, self._hot) if tier is not None]
        self._fetchers = Fetchers(FETCHERS)
        if self._nearer:  # a command that ends leaves what it has fetched in them
            atexit.register(self._fetchers.wait, _LAST_WAIT_S)
        self._arrivals: WeakValueDictionary[str, Arrival] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._generation: tuple[float, bytes | None] = (float("-inf"), None)
        self._hits = [0, 0, 0, 0, 0]

    @property
    def hits(self) -> TierHits:
        """Since this was made."""
        with self._lock:
            return TierHits(*self._hits)

    def open(self, name: str, head: int) -> Blob | None:
        """See `open_many`."""
        (found,) = self.open_many([name], head)
        if isinstance(found, EntryDamagedError):
            raise found
        return found

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

    def _in_order(self, names: Sequence[str], found: dict[str, Found], head: int) -> list[Found]:
        """A name that stands several times is opened as often."""
        used: set[str] = set()
        result: list[Found] = []
        for name in names:
            again = name in used and isinstance(found[name], Blob)
            result.append(self._open_or_damage(name, head) if again else found[name])
            used.add(name)
        return result

    def _arriving(self, names: Sequence[str], head: int, group: Group) -> dict[str, Found]:
        """What is being fetched, or was and is still in use."""
        with self._lock:
            pairs = [(name, self._arrivals.get(name)) for name in names]
        return {
            name: TieredBlob(arrival, group)
            for name, arrival in pairs
            if arrival is not None and arrival.failure is None
        }

    def _on_disk(self, names: Sequence[str], head: int, group: Group) -> dict[str, Found]:
        tier, result = self._local, dict[str, Found]()
        for name, blob, entry in self._looked_at(tier, names, head):
            source = Source(blob, tier.asked, lambda error, name=name: tier.failed(name, error))  # type: ignore[misc,union-attr]
            result[name] = TieredBlob(
                entry,
                group,
                source,
                lambda entry=entry, name=name: self._elsewhere(name, entry),  # type: ignore[misc]
            )
        self._count(0, len(result))
        return result

    def _elsewhere(self, name: str, entry: Entry) -> Arrival | None:
        """The same entry from another place than the disk."""
        near = self._source_in_memory(name, entry)
        source = near or self._source_far_away(name, entry)
        return None if source is None else self._arrival(name, entry, source, far=near is None)

    def _in_memory(self, names: Sequence[str], head: int, group: Group) -> dict[str, Found]:
        result: dict[str, Found] = {}
        for name, blob, entry in self._looked_at(self._hot, names, head):
            result[name] = TieredBlob(self._arrival(name, entry, self._hot_source(name, blob), far=False), group)
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
                result[name] = TieredBlob(self._arrival(name, entry, self._far_source(blob), far=True), group)
        missing = sum(one is None for one in result.values())
        self._count(2, len(result) - missing)
        self._count(3, missing)
        return result

    def _looked_at(self, tier: Nearer | None, names: Sequence[str], head: int) -> Iterator[tuple[str, Blob, Entry]]:
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

    def _entry(self, name: str, blob: Blob) -> Entry | None:
        try:
            with self._far.asked():
                return self._look(name, blob)
        except EntryDamagedError:
            return None

    def _arrival(self, name: str, entry: Entry, source: Source, *, far: bool) -> Arrival:
        """The one that is under way already, if it is of the same bytes. far: whether the source is the far place."""
        with self._lock:
            held = self._arrivals.get(name)
            if held is not None and held.failure is None and held.entry.beginning == entry.beginning:
                source.blob.close()
                return held
            made = Arrival(
                entry,
                source,
                (lambda: None) if far else (lambda: self._source_far_away(name, entry)),
                lambda view: self._keep(name, view, far=far),
                self._fetchers,
            )
            self._arrivals[name] = made
            return made

    def _hot_source(self, name: str, blob: Blob) -> Source:
        tier = self._hot
        assert tier is not None
        return Source(blob, tier.asked, lambda error: tier.failed(name, error))

    def _far_source(self, blob: Blob) -> Source:
        return Source(blob, self._far.asked, _is_told)

    def _source_in_memory(self, name: str, entry: Entry) -> Source | None:
        for _, blob, found in self._looked_at(self._hot, [name], len(entry.beginning)):
            if found.beginning == entry.beginning:
                return self._hot_source(name, blob)
            blob.close()
        return None

    def _source_far_away(self, name: str, entry: Entry) -> Source | None:
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
            held = self._arrivals.get(name)
        if held is None or bytes(held.entry.beginning) != bytes(view[: len(held.entry.beginning)]):
            return  # it was put or deleted meanwhile
        if self._local is not None:
            self._local.write(lambda local: local.put(name, [view]))
        if self._hot is not None and far:
            self._hot.write(lambda hot: hot.put(name, [view]))

    def prefetch(self, names: Iterable[str]) -> None:
        """In threads beside; what is on this machine's disk is left there."""
        wanted = [name for name in dict.fromkeys(names) if name.startswith(CACHES)]
        for begin in range(0, len(wanted), _BATCH):
            batch = wanted[begin : begin + _BATCH]
            self._fetchers.add(-1, lambda batch=batch: self._prefetch(batch))  # type: ignore[misc]

    def _prefetch(self, names: Sequence[str]) -> None:
        try:
            found = self.open_many(names, 0)
        except StoreError:
            return  # who reads them meets it
        for blob in found:
            if isinstance(blob, TieredBlob):
                blob.start()
        close_all(found)

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
            return kept
        self._remember(name, content)
        return content

    def _remembered(self, name: str, most: int) -> bytes | None:
        return None if self._local is None else self._local.read(lambda local: local.read(name, most), None)

    def _remember(self, name: str, content: bytes | None) -> None:
        if name == GENERATION:
            self._generation = time.monotonic(), content
        if self._local is None or name.startswith((CACHES, INDEXES)):
            return
        if content is None:
            self._local.write(lambda local: local.delete(name))
        elif self._remembered(name, len(content)) != content:
            self._local.write(lambda local: local.put(name, [content]))

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
        with self._lock:
            self._arrivals.pop(name, None)
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

    def _count(self, which: int, more: int) -> None:
        with self._lock:
            self._hits[which] += more


def _is_told(error: StoreError) -> None:
    """The far place's errors are raised, and told about where it is asked."""
