"""Where a cache is found that may be in several tiers, and how its bytes come from there.

Every layer is held against its digest before anybody sees it, from whichever tier it comes. One that is not what was written is
taken from the next tier, or from the far place once more; only that one's own damage is damage. What is read is fetched whole,
in the order of its layers, once for all who read it at the same time, and then kept in the nearer tiers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from weakref import WeakValueDictionary

from blend.errors import EntryDamagedError, StoreError
from blend.store.backend import CACHES, Blob, TierHits, close_all
from blend.store.fetch import Arrival, Fetchers, Group, Source, TieredBlob
from blend.store.reader import Entry, Look
from blend.store.tiered import Authority, Nearer

Found = Blob | EntryDamagedError | None


class Search:
    """far, hot, local: the tiers, guarded; the nearer ones may be missing. look: what a cache is, by its header."""

    def __init__(
        self, far: Authority, hot: Nearer | None, local: Nearer | None, look: Look, fetchers: Fetchers
    ) -> None:
        self._far, self._hot, self._local, self._look, self._fetchers = far, hot, local, look, fetchers
        self._arrivals: WeakValueDictionary[str, Arrival] = WeakValueDictionary()
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
            self._arrivals.pop(name, None)

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
            pairs = [(name, self._arrivals.get(name)) for name in names]
        return {
            name: TieredBlob(arrival, group)
            for name, arrival in pairs
            if arrival is not None and arrival.failure is None
        }

    def _on_disk(self, names: Sequence[str], head: int, group: Group) -> dict[str, Found]:
        tier, result = self._local, dict[str, Found]()
        for name, blob, entry in self._looked_at(tier, names, head):
            source = Source(blob, "local", tier.asked, lambda error, name=name: tier.failed(name, error))  # type: ignore[misc,union-attr]
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

    def _arriving_from(
        self, name: str, entry: Entry, source: Source, group: Group, *, far: bool
    ) -> TieredBlob | EntryDamagedError:
        """The damage of an entry that says it is larger than any memory."""
        try:
            return TieredBlob(self._arrival(name, entry, source, far=far), group)
        except EntryDamagedError as error:
            source.blob.close()
            source.failed(error)
            return error

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
                lambda: self._source_far_away(name, entry),  # itself once more: bytes change on the way, too
                lambda view: self._keep(name, view, far=far),
                self._fetchers,
            )
            self._arrivals[name] = made
            return made

    def _hot_source(self, name: str, blob: Blob) -> Source:
        tier = self._hot
        assert tier is not None
        return Source(blob, "hot", tier.asked, lambda error: tier.failed(name, error))

    def _far_source(self, blob: Blob) -> Source:
        return Source(blob, "far", self._far.asked, _is_told)

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

    def _count(self, which: int, more: int) -> None:
        with self._lock:
            self._hits[which] += more


def _is_told(error: StoreError) -> None:
    """The far place's errors are raised, and told about where it is asked."""
