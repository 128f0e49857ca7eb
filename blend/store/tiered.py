"""One store in several places: a disk of this machine and a server in memory in front of the place that has everything.

The far place decides: what was put there is put, what it lists is there, and its outage is one. The nearer ones hold copies of
caches, bytes as they are, and may lack any: what is wrong with them costs their timeout once, a line in the log, and a way that
is longer. Contents are named by what they are made of, so a copy is not asked for again.

How a cache is found in them and fetched: `blend.store.tiered`.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from blend.errors import EntryDamagedError, StoreUnreachableError
from blend.store.backend import (
    CACHES,
    GENERATION,
    INDEXES,
    Backend,
    Blob,
    Buffer,
    Patience,
    Range,
    Stored,
    TierHits,
    Told,
)
from blend.store.fetch import Ahead, Fetchers
from blend.store.reader import Look
from blend.store.tiered import Authority, Found, Nearer, Search
from blend.store.uses import Uses

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
        look: Look,
        patience: Patience | None = None,
        as_written: Callable[[str, bytes], bool] = lambda name, content: True,
    ) -> None:
        self._as_written = as_written
        pause_s, told = (patience or Patience()).pause_s, Told()
        self.tiers, self.place, self._told = tiers, tiers.far.place, told
        self._far = Authority(tiers.far, pause_s, told)
        self._hot = None if tiers.hot is None else Nearer(tiers.hot, pause_s, told)
        self._local = None if tiers.local is None else Nearer(tiers.local, pause_s, told)
        self._nearer = [tier for tier in (self._local, self._hot) if tier is not None]
        self._fetchers = Fetchers(FETCHERS)
        if self._nearer:  # a command that ends leaves what it has fetched in them
            atexit.register(self._fetchers.wait, _LAST_WAIT_S)
        self._search = Search(self._far, self._hot, self._local, look, self._fetchers)
        self._ahead = Ahead(lambda names: self.open_many(names, 0), self._fetchers)
        self._generation: tuple[float, bytes | None] = (float("-inf"), None)

    @property
    def tier_hits(self) -> TierHits:
        """See `Backend.tier_hits`."""
        return self._search.hits

    @property
    def uses(self) -> Uses | None:
        """Kept on this machine's disk, of whatever tier."""
        return None if self.tiers.local is None else self.tiers.local.uses

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
