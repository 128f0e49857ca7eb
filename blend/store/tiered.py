"""One store in several places: a disk of this machine and a Redis in front of the far place, which has everything.

The far place decides: what it acknowledged is stored, what it lists is there, and its outage is an outage. The nearer tiers
hold copies of caches, byte for byte, and may lack any. An error of theirs costs one timeout, one line in the log and a longer
way. A cache's name stands for its content, so a copy needs no check with the far place.

A server sends a cache whole. It is verified in memory, where its readers of that moment read it, and a copy goes to the disk.
Later readers read the copy layer by layer, each verified. A damaged copy is fetched again from the next tier; only the far
place's own damage is damage.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple
from weakref import WeakSet, WeakValueDictionary

from blend.errors import EntryDamagedError, StoreError, StoreUnreachableError
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
    Found,
    Stored,
    TierHits,
    close_all,
    key_of,
)
from blend.store.breaker import Timeouts, WarnOnce
from blend.store.fetch import IN_FLIGHT_BYTES, Download, EntrySource, FetchPool, Prefetcher, TieredBlob
from blend.store.format import EntryHeader
from blend.store.reader import read_header
from blend.store.seal import Seal, unpack_artifact
from blend.store.tier import CacheTier, FarTier

FETCHERS = 16
_MOST_OF_A_GENERATION = 1 << 10
_FRESH_S = 1.0  # the generation is asked for before every prompt
_LAST_WAIT_S = 3.0

Siblings = WeakSet[Download]


class TierSearch:
    """Finds caches in the tiers and downloads them, each once for all who read it at the same time.

    A complete download is written to the tiers that lacked it.

    Args:
        far: the place that has everything.
        hot: a Redis.
        local: a disk of this machine.
        seal: verifies entries.
        pool: runs downloads.

    """

    def __init__(
        self,
        far: FarTier,
        hot: CacheTier | None,
        local: CacheTier | None,
        *,
        seal: Seal,
        pool: FetchPool,
    ) -> None:
        self._far = far
        self._hot = hot
        self._local = local
        self._seal = seal
        self._pool = pool
        self._downloads: WeakValueDictionary[str, Download] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._counts = Counter[str]()

    @property
    def hits(self) -> TierHits:
        """Entries that were opened since this was made."""
        with self._lock:
            return TierHits(*(self._counts[field] for field in TierHits._fields))

    def forget(self, name: str) -> None:
        """A download of this name holds an older version from now on."""
        with self._lock:
            self._downloads.pop(name, None)

    def open_many(self, names: Sequence[str], head: int) -> list[Found]:
        """Open names, in one exchange with each tier, for what no nearer one has."""
        opened: dict[str, Found] = {}
        siblings = Siblings()
        unique = list(dict.fromkeys(names))
        try:
            for search in (self._in_flight, self._in_local, self._in_hot, self._in_far):
                missing = [name for name in unique if name not in opened]
                opened |= search(missing, head, siblings)
        except BaseException:
            close_all(list(opened.values()))
            raise
        return self._in_order(names, opened, head)

    def _in_order(
        self,
        names: Sequence[str],
        opened: dict[str, Found],
        head: int,
    ) -> list[Found]:
        """What was opened, in the order of the names; a name that comes twice is opened twice."""
        blobs: list[Found] = []
        returned: set[str] = set()
        for name in names:
            if name in returned and isinstance(opened[name], Blob):
                blobs += self.open_many([name], head)
            else:
                blobs.append(opened[name])
            returned.add(name)
        return blobs

    def _in_flight(
        self,
        names: Sequence[str],
        head: int,
        siblings: Siblings,
    ) -> dict[str, Found]:
        """Entries that are downloading, or still in use afterwards."""
        with self._lock:
            downloads = {name: self._downloads.get(name) for name in names}
        return {
            name: TieredBlob(download.header, siblings, download)
            for name, download in downloads.items()
            if download is not None and not download.has_failed
        }

    def _in_local(
        self,
        names: Sequence[str],
        head: int,
        siblings: Siblings,
    ) -> dict[str, Found]:
        blobs: dict[str, Found] = {}
        for name, file, header in self._copies(self._local, names, head):
            begin_download = partial(self._begin_elsewhere, name, header)
            blobs[name] = TieredBlob(header, siblings, file=file, begin_download=begin_download)
        self._count("local", len(blobs))
        return blobs

    def _begin_elsewhere(self, name: str, header: EntryHeader) -> Download:
        """Download the same entry from another place than the disk."""
        for _, source, hot_header in self._copies(self._hot, [name], len(header.beginning)):
            if hot_header.beginning == header.beginning:
                return self._begin(name, header, source, from_far=False)
            source.blob.close()
        return self._begin(name, header, self._far_source(name, header), from_far=True)

    def _in_hot(
        self,
        names: Sequence[str],
        head: int,
        siblings: Siblings,
    ) -> dict[str, Found]:
        blobs: dict[str, Found] = {}
        for name, source, header in self._copies(self._hot, names, head):
            download = self._begin(name, header, source, from_far=False)
            blobs[name] = TieredBlob(header, siblings, download)
        self._count("hot", len(blobs))
        return blobs

    def _in_far(
        self,
        names: Sequence[str],
        head: int,
        siblings: Siblings,
    ) -> dict[str, Found]:
        """Entries in the far place; an unusable one as it is: `ChunkStore` says what is wrong with it."""
        if not names:
            return {}
        with self._far.guard() as far:
            blobs = dict(zip(names, far.open_many(names, head), strict=True))
        for name, blob in blobs.items():
            if isinstance(blob, Blob) and name.startswith(CACHES):
                header = self._far_header(name, blob)
                if header is not None:
                    download = self._begin(name, header, self._far.source(blob), from_far=True)
                    blobs[name] = TieredBlob(header, siblings, download)
        missing = sum(blob is None for blob in blobs.values())
        self._count("far", len(blobs) - missing)
        self._count("missing", missing)
        return blobs

    def _copies(
        self,
        tier: CacheTier | None,
        names: Sequence[str],
        head: int,
    ) -> Iterator[tuple[str, EntrySource, EntryHeader]]:
        """The usable copies that a nearer tier has of these caches."""
        caches = [name for name in names if name.startswith(CACHES)]
        if tier is None or not caches:
            return
        nothing: list[Found] = [None] * len(caches)
        blobs = tier.read(lambda backend: backend.open_many(caches, head), nothing)
        for name, blob in zip(caches, blobs, strict=True):
            if isinstance(blob, EntryDamagedError):
                tier.report(name, blob)
            elif blob is not None:
                try:
                    with tier.guard():
                        header = read_header(blob, key_of(name), self._seal)
                except StoreError as error:
                    blob.close()
                    tier.report(name, error)
                else:
                    yield name, tier.source(name, blob), header

    def _far_header(self, name: str, blob: Blob) -> EntryHeader | None:
        try:
            with self._far.guard():
                return read_header(blob, key_of(name), self._seal)
        except EntryDamagedError:
            return None

    def _begin(
        self,
        name: str,
        header: EntryHeader,
        source: EntrySource,
        *,
        from_far: bool,
    ) -> Download:
        """A download, or the one that is under way, if it is of the same bytes."""
        with self._lock:
            current = self._downloads.get(name)
            if current is not None and not current.has_failed and current.header.beginning == header.beginning:
                source.blob.close()
                return current
            download = Download(
                header,
                fetch=partial(self._fetch, name, header, source),
                keep=partial(self._keep, name, from_far),
                pool=self._pool,
            )
            self._downloads[name] = download
            return download

    def _fetch(self, name: str, header: EntryHeader, source: EntrySource) -> memoryview:
        """All bytes of an entry, verified; after an error from the far place, once more: bytes change on the way."""
        try:
            return source.download(header)
        except StoreError as error:
            source.report(error)
            return self._far_source(name, header).download(header)

    def _far_source(self, name: str, header: EntryHeader) -> EntrySource:
        """The same version in the far place. Raises `EntryDamagedError` where that lacks it, `StoreError`."""
        with self._far.guard() as far:
            blob = far.open(name, len(header.beginning))
        if blob is not None:
            far_header = self._far_header(name, blob)
            if far_header is not None and far_header.beginning == header.beginning:
                return self._far.source(blob)
            blob.close()
        raise EntryDamagedError("it cannot be read, and no other place holds it")

    def _keep(
        self,
        name: str,
        from_far: bool,
        download: Download,
        content: memoryview,
    ) -> None:
        """Write a whole entry to the nearer tiers that lacked it, unless it was put or deleted meanwhile."""
        self._count("fetched_bytes", content.nbytes)
        with self._lock:
            is_current = self._downloads.get(name) is download
        if is_current and self._local is not None:
            self._local.write(lambda local: local.put(name, [content]))
        if is_current and self._hot is not None and from_far:
            self._hot.write(lambda hot: hot.put(name, [content]))

    def _count(self, field: str, more: int) -> None:
        with self._lock:
            self._counts[field] += more


class _Generation(NamedTuple):
    """The generation of the far place as last read. fresh_until: a moment of the monotonic clock."""

    fresh_until: float
    token: bytes | None


_UNKNOWN = _Generation(float("-inf"), None)


class TieredBackend(Backend):
    """Several places as one backend.

    Args:
        far: the place that has everything.
        hot: a Redis.
        local: a disk of this machine.
        seal: verifies entries and artifacts.
        timeouts: how long a failed place is left alone.
        prefetch_bytes: how much `prefetch` has in flight at most.

    """

    is_elsewhere = True

    def __init__(
        self,
        far: Backend,
        hot: Backend | None = None,
        local: Backend | None = None,
        *,
        seal: Seal,
        timeouts: Timeouts | None = None,
        prefetch_bytes: int = IN_FLIGHT_BYTES,
    ) -> None:
        self.place = far.place
        self._seal = seal
        self._warnings = WarnOnce()
        pause_s = (timeouts or Timeouts()).pause_s
        self._far = FarTier(far, pause_s, self._warnings)
        self._hot = None if hot is None else CacheTier(hot, pause_s, self._warnings)
        self._local = None if local is None else CacheTier(local, pause_s, self._warnings)
        self._pool = FetchPool(FETCHERS)
        if self._hot is not None or self._local is not None:  # a command that ends leaves what it has fetched in them
            atexit.register(self._pool.wait, _LAST_WAIT_S)
        self._search = TierSearch(self._far, self._hot, self._local, seal=seal, pool=self._pool)
        self._prefetcher = Prefetcher(lambda names: self.open_many(names, 0), self._pool, prefetch_bytes)
        self._generation = _UNKNOWN

    @property
    def tiers(self) -> dict[str, Backend]:
        """The tiers by "far", "hot" and "local"."""
        tiers = {"far": self._far.backend}
        if self._hot is not None:
            tiers["hot"] = self._hot.backend
        if self._local is not None:
            tiers["local"] = self._local.backend
        return tiers

    @property
    def tier_hits(self) -> TierHits:
        """See `Backend.tier_hits`."""
        return self._search.hits

    @property
    def evictions(self) -> int:
        """Caches that all tiers evicted."""
        return sum(tier.evictions for tier in self.tiers.values())

    def open(self, name: str, head: int) -> Blob | None:
        """See `open_many`."""
        (blob,) = self.open_many([name], head)
        if isinstance(blob, EntryDamagedError):
            raise blob
        return blob

    def open_many(self, names: Sequence[str], head: int) -> list[Found]:
        """Open names, in one exchange with each tier, for what no nearer one has."""
        return self._search.open_many(names, head)

    def stored(self, names: Sequence[str], head: int) -> list[Found]:
        """Open entries in the far place only, not in a nearer copy."""
        with self._far.guard() as far:
            return far.open_many(names, head)

    def prefetch(self, names: Iterable[str], most_bytes: int | None = None) -> None:
        """Download in background threads what is not on this machine's disk."""
        caches = [name for name in dict.fromkeys(names) if name.startswith(CACHES)]
        self._prefetcher.add(caches, most_bytes)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all downloads are kept. Returns whether that came in time."""
        return self._pool.wait(timeout_s)

    def read(self, name: str, most: int) -> bytes | None:
        """Read from the far place; during its outage from the copy on this machine's disk, if there is one."""
        if name == GENERATION and time.monotonic() < self._generation.fresh_until:
            return self._generation.token
        try:
            with self._far.guard() as far:
                content = far.read(name, most)
        except StoreUnreachableError:
            copy = self._copy_of(name, most)
            if copy is None:
                raise
            return copy or None
        self._keep_copy(name, content)
        return content

    def _copy_of(self, name: str, most: int) -> bytes | None:
        """Its last content; empty for a miss, None when unknown."""
        if self._local is None:
            return None
        return self._local.read(lambda local: local.read(name, most), None)

    def _keep_copy(self, name: str, content: bytes | None) -> None:
        if name == GENERATION:
            self._warn_where_emptied(content)
            self._generation = _Generation(time.monotonic() + _FRESH_S, content)
        if self._local is None or name.startswith((CACHES, INDEXES)):
            return
        copy = content or b""
        if copy and name.startswith((ARTIFACTS, SOURCES, SEALED)):
            try:
                unpack_artifact(name.removeprefix(ARTIFACTS), copy, self._seal)
            except EntryDamagedError:  # keep the older, sound copy
                return
        if self._copy_of(name, len(copy)) != copy:
            self._local.write(lambda local: local.put(name, [copy]))

    def _warn_where_emptied(self, generation: bytes | None) -> None:
        """Warn when the far place lost its generation, which is never deleted alone: it lost everything."""
        if generation is None and (self._generation.token or self._copy_of(GENERATION, _MOST_OF_A_GENERATION)):
            self._warnings.warn(
                self.place,
                "emptied",
                f"{self.place} has lost all that it held, as a Redis does that is flushed or started anew without persistence: "
                "run `blend precompute` again, and see that it keeps what it is given",
            )

    def put(self, name: str, blobs: Sequence[Buffer]) -> None:
        """Put in the far place, then in the Redis; the disk drops its copy, which may be another version."""
        with self._far.guard() as far:
            far.put(name, blobs)
        self._forget(name)
        if self._hot is not None and name.startswith(CACHES):
            self._hot.write(lambda hot: hot.put(name, blobs))

    def swap(self, name: str, content: bytes, was: bytes | None) -> bool:
        """Swap in the far place."""
        with self._far.guard() as far:
            is_swapped = far.swap(name, content, was)
        self._forget(name)
        return is_swapped

    def require_lasting(self) -> None:
        """Look at the far place."""
        with self._far.guard() as far:
            far.require_lasting()

    def delete(self, name: str) -> bool:
        """Delete the name in every tier."""
        with self._far.guard() as far:
            is_deleted = far.delete(name)
        self._forget(name)
        if self._hot is not None and name.startswith(CACHES):
            self._hot.write(lambda hot: hot.delete(name))
        return is_deleted

    def _forget(self, name: str) -> None:
        self._search.forget(name)
        if name == GENERATION:
            self._generation = _UNKNOWN
        if self._local is not None:
            self._local.write(lambda local: local.delete(name))

    def touch(self, name: str) -> None:
        """Note the use on this machine's disk, which has a budget."""
        if self._local is not None:
            self._local.write(lambda local: local.touch(name))

    def listing(self, prefix: str) -> Iterator[Stored]:
        """List the far place."""
        with self._far.guard() as far:
            yield from far.listing(prefix)

    def names(self, prefix: str) -> Iterator[str]:
        """Names in the far place."""
        with self._far.guard() as far:
            yield from far.names(prefix)

    def folders(self, prefix: str) -> set[str]:
        """Folders in the far place."""
        with self._far.guard() as far:
            return far.folders(prefix)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The lock of the far place."""
        with self._far.backend.writing():
            yield
