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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

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
from blend.store.fetch import Download, FetchPool, LocalCopy
from blend.store.format import EntryHeader
from blend.store.reader import read_header
from blend.store.seal import Seal, unpack_artifact
from blend.store.tier import Copy, Tier

_FRESH_S = 1.0  # the generation is asked for before every prompt
_LAST_WAIT_S = 3.0
T = TypeVar("T")


class _UnusableCopy(NamedTuple):
    """A copy in a nearer tier that is not the entry of the name at this place of a look-up."""

    tier: Tier
    place: int
    error: EntryDamagedError


class TierSearch:
    """Finds caches in the tiers and downloads them, each once for all who read it at the same time.

    A complete download is written to the tiers that lacked it.

    Args:
        tiers: the nearest first; the last one has everything.
        seal: verifies entries.
        pool: runs downloads.

    """

    def __init__(self, tiers: Sequence[Tier], seal: Seal, pool: FetchPool) -> None:
        self._tiers = tiers
        self._far = tiers[-1]
        self._seal = seal
        self._pool = pool
        self._downloads: WeakValueDictionary[str, Download] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._counts = Counter[str]()

    @property
    def hits(self) -> TierHits:
        """Entries that were opened since this was made."""
        return TierHits(*(self._counts[field] for field in TierHits._fields))

    def forget(self, name: str) -> None:
        """A download of this name holds an older version from now on."""
        with self._lock:
            self._downloads.pop(name, None)

    def open_many(self, names: Sequence[str]) -> list[Found]:
        """Open names, in one exchange with each tier, for what no nearer one has."""
        with self._lock:
            blobs: list[Found] = [self._downloads.get(name) for name in names]
        group: list[Download] = []
        unusable: list[_UnusableCopy] = []
        try:
            for tier in self._tiers:
                places = [place for place, blob in enumerate(blobs) if blob is None]
                if tier is not self._far:
                    places = [place for place in places if names[place].startswith(CACHES)]
                if places:
                    tier_blobs = tier.open_many([names[place] for place in places])
                    for place, blob in zip(places, tier_blobs, strict=True):
                        entry = self._entry(tier, names[place], blob, group)
                        if isinstance(entry, EntryDamagedError) and tier is not self._far:
                            unusable.append(_UnusableCopy(tier, place, entry))
                            entry = None
                        blobs[place] = entry
        except BaseException:
            close_all(blobs)
            raise
        for copy in unusable:
            if isinstance(
                blobs[copy.place], Blob
            ):  # else the seal may be the wrong one, and the copy others' sound one
                copy.tier.report(names[copy.place], copy.error)
        self._count("missing", sum(blob is None for blob in blobs))
        return blobs

    def _entry(self, tier: Tier, name: str, blob: Found, group: list[Download]) -> Found:
        """What readers get of that blob of a tier, or its damage. Raises `StoreError`."""
        if isinstance(blob, Blob) and name.startswith(CACHES):
            try:
                copy = self._checked(tier, name, blob)
            except EntryDamagedError as error:
                blob = EntryDamagedError(str(error))  # one that holds no frames, and so no download
            else:
                self._count(tier.kind, 1)
                if tier.kind == "local":
                    return LocalCopy(copy, partial(self._replaced, name, copy))
                return self._begin(name, copy.header, copy, group)
        return blob

    def _checked(self, tier: Tier, name: str, blob: Blob) -> Copy:
        """An open copy, if its header is that of the entry of this name. Raises `EntryDamagedError` or `StoreError`."""
        try:
            with tier.guard():
                return Copy(tier, blob, read_header(blob, key_of(name), self._seal))
        except BaseException:
            blob.close()
            raise

    def _begin(self, name: str, header: EntryHeader, copy: Copy | None, group: list[Download]) -> Download:
        """A download, or the one that is under way, if it is of the same bytes. copy: what is tried before the far place."""
        with self._lock:
            current = self._downloads.get(name)
            if current is not None and current.head == header.beginning:
                if copy is not None:
                    copy.blob.close()
                return current
            fetch = partial(self._fetch, name, header, copy)
            keep = partial(self._keep, name, copy.tier if copy else self._far)
            download = Download(header, fetch, keep, pool=self._pool, group=group)
            group.append(download)
            self._downloads[name] = download
            return download

    def _replaced(self, name: str, copy: Copy, error: StoreError) -> Download:
        """A download in place of a file that failed with this error."""
        copy.tier.report(name, error)
        return self._begin(name, copy.header, None, [])

    def _fetch(self, name: str, header: EntryHeader, copy: Copy | None) -> memoryview:
        """All bytes of an entry, verified; after an error once more, from the far place: bytes change on the way."""
        try:
            if copy is not None:
                try:
                    return copy.whole()
                except StoreError as error:
                    copy.tier.report(name, error)
            return self._far_copy(name, header).whole()
        except BaseException:
            self.forget(name)
            raise

    def _far_copy(self, name: str, header: EntryHeader) -> Copy:
        """The same version in the far place. Raises `EntryDamagedError` where that lacks it, `StoreError`."""
        with self._far.guard() as far:
            blob = far.open(name)
        if blob is not None:
            copy = self._checked(self._far, name, blob)
            if copy.header.beginning == header.beginning:
                return copy
            blob.close()
        raise EntryDamagedError("it cannot be read, and no other place holds it")

    def _keep(self, name: str, source: Tier, download: Download, content: memoryview) -> None:
        """Write a whole entry to the tiers nearer than its source, unless it was put or deleted meanwhile."""
        self._count("fetched_bytes", content.nbytes)
        with self._lock:
            is_current = self._downloads.get(name) is download
        for tier in self._tiers if is_current else ():
            if tier is source:
                break
            tier.attempt(lambda backend: backend.put(name, [content]), None)

    def copy_of(self, name: str) -> memoryview | None:
        """All bytes of a cache out of the nearest tier that has a sound copy, but not of the far one; None without a copy."""
        for tier in self._tiers[:-1]:
            (blob,) = tier.open_many([name])
            try:
                if isinstance(blob, EntryDamagedError):
                    raise blob
                if blob is not None:
                    return self._checked(tier, name, blob).whole()
            except StoreError as error:
                tier.report(name, error)
        return None

    def _count(self, field: str, more: int) -> None:
        with self._lock:
            self._counts[field] += more


class TieredBackend(Backend):
    """Several places as one backend.

    Args:
        far: the place that has everything.
        hot: a Redis.
        local: a disk of this machine.
        seal: verifies entries and artifacts.
        pause_s: how long a failed place is left alone.

    """

    is_elsewhere = True

    def __init__(
        self, far: Backend, hot: Backend | None = None, local: Backend | None = None, *, seal: Seal, pause_s: float
    ) -> None:
        self.place = far.place
        self._seal = seal
        self._tiers: dict[str, Tier] = {}
        for kind, backend in (("local", local), ("hot", hot), ("far", far)):
            if backend is not None:
                self._tiers[kind] = Tier(kind, backend, pause_s)
        self._far = self._tiers["far"]
        self._pool = FetchPool()
        if len(self._tiers) > 1:  # a command that ends leaves what it has fetched in the nearer ones
            atexit.register(self._pool.wait, _LAST_WAIT_S)
        self._search = TierSearch([*self._tiers.values()], seal, self._pool)
        self._generation: bytes | None = None
        self._fresh_until = float("-inf")

    @property
    def tiers(self) -> dict[str, Backend]:
        """The tiers by "far", "hot" and "local"."""
        return {kind: tier.backend for kind, tier in reversed(self._tiers.items())}

    @property
    def tier_hits(self) -> TierHits:
        """See `Backend.tier_hits`."""
        return self._search.hits

    @property
    def evictions(self) -> int:
        """Caches that all tiers evicted."""
        return sum(tier.evictions for tier in self.tiers.values())

    def open_many(self, names: Sequence[str]) -> list[Found]:
        """Open names, in one exchange with each tier, for what no nearer one has."""
        return self._search.open_many(names)

    def bring(self, names: Sequence[str]) -> None:
        """See `Backend.bring`. Errors of a download are those of its readers, too."""
        if len(self._tiers) == 1:
            return
        blobs = self.open_many(names)
        downloads = [blob for blob in blobs if isinstance(blob, Download)]
        for download in downloads:
            download.start()
        for download in downloads:
            download.wait()
        close_all(blobs)

    def stored(self, names: Sequence[str]) -> list[Found]:
        """Open entries in the far place only, not in a nearer copy."""
        return self._far.open_many(names)

    def restore(self, name: str) -> bool:
        """Put a copy of a nearer tier in the far place, which lost this cache."""
        content = self._search.copy_of(name)
        if content is None:
            return False
        with self._far.guard() as far:
            far.put(name, [content])
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until all downloads are kept. Returns whether that came in time."""
        return self._pool.wait(timeout_s)

    def read(self, name: str) -> bytes | None:
        """Read from the far place; during its outage from the copy on this machine's disk, if there is one."""
        if name == GENERATION and time.monotonic() < self._fresh_until:
            return self._generation
        try:
            with self._far.guard() as far:
                content = far.read(name)
        except StoreUnreachableError:
            copy = self._copy_of(name)
            if copy is None:
                raise
            return copy or None
        if name == GENERATION:
            self._warn_where_emptied(content)
            self._generation = content
            self._fresh_until = time.monotonic() + _FRESH_S
        copy = content or b""
        if self._may_copy(name, copy) and self._copy_of(name) != copy:
            self._nearer("local", lambda disk: disk.put(name, [copy]), None)
        return content

    def _warn_where_emptied(self, generation: bytes | None) -> None:
        """Warn when the far place has lost its generation: nothing deletes that alone, so all else is lost, too."""
        if generation is None and (self._generation or self._copy_of(GENERATION)):
            self._far.warn_once(
                "emptied",
                f"{self.place} has lost all that it held, as a Redis does that is flushed, or restarted without persistence: "
                "run `blend precompute` again, and see that it keeps its data",
            )

    def _copy_of(self, name: str) -> bytes | None:
        """Its last content; empty for a miss, None when unknown."""
        return self._nearer("local", lambda disk: disk.read(name), None)

    def _may_copy(self, name: str, content: bytes) -> bool:
        """Whether this may take the place of an older copy."""
        if content and name.startswith((ARTIFACTS, SOURCES, SEALED)):
            try:
                unpack_artifact(name.removeprefix(ARTIFACTS), content, self._seal)
            except EntryDamagedError:
                return False
        return not name.startswith((CACHES, INDEXES))

    def _nearer(self, kind: str, call: Callable[[Backend], T], otherwise: T) -> T:
        """Do this in a nearer tier; `otherwise` where there is none, or it fails."""
        tier = self._tiers.get(kind)
        return otherwise if tier is None else tier.attempt(call, otherwise)

    def put(self, name: str, blobs: Sequence[Buffer]) -> None:
        """Put in the far place; nearer ones drop their copies, which may be of another version."""
        with self._far.guard() as far:
            far.put(name, blobs)
        self._forget(name)

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

    def delete(self, name: str) -> None:
        """Delete the name in every tier."""
        with self._far.guard() as far:
            far.delete(name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        self._search.forget(name)
        if name == GENERATION:
            self._fresh_until = float("-inf")
        for kind in ("local", "hot") if name.startswith(CACHES) else ("local",):
            self._nearer(kind, lambda nearer: nearer.delete(name), None)

    def touch(self, name: str) -> None:
        """Note the use on this machine's disk, which has a budget."""
        self._nearer("local", lambda disk: disk.touch(name), None)

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

    def writing(self) -> AbstractContextManager[None]:
        """The lock of the far place."""
        return self._far.backend.writing()
