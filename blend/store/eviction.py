"""Keeping a disk store within its budget: the least recently used files go."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from blend.store.backend import require_budget
from blend.store.files import StoreFiles

_TOUCH_EVERY_S = 1.0
_RECOUNT_EVERY_S = 5.0
_LISTINGS_SHARE = 20  # listing takes one second in so many at most
_RECOUNT_SHARE = 8  # and after writing one byte in so many of the budget
_QUEUE = 4096
_INSTANT = 1e-6


class StoredFile(NamedTuple):
    """One file as the directory lists it; `used` is when it was last opened, see `UseClock`."""

    path: str
    nbytes: int
    used: float


class UseClock:
    """Seconds that never go back, whatever the machine's clock does: the order of use is kept in them.

    Follows the machine's clock, from the latest moment that any process has written into the store.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ahead = 0.0
        self._latest = float("-inf")

    def now(self) -> float:
        """The moment, later than any that was asked for or seen."""
        with self._lock:
            moment = time.time()
            self._ahead = max(self._ahead, self._latest + _INSTANT - moment)
            self._latest = moment + self._ahead
            return self._latest

    def saw(self, moment: float) -> None:
        """Take note of a moment of another process."""
        with self._lock:
            self._latest = max(self._latest, moment)


class Evictor:
    """Counts what is written and removes the least recently used files once it is more than `budget_bytes`.

    A listing of the store says what it holds and in which order it may go; between two listings the count is kept and that
    order worked off, so that a store that is always full is not listed for every write. What other processes write meanwhile
    is found by the next listing: after some seconds, or after this one has written an eighth of the budget.
    """

    def __init__(
        self, files: StoreFiles, listing: Callable[[], Iterator[StoredFile]], budget_bytes: int | None
    ) -> None:
        require_budget(budget_bytes)
        self.budget_bytes = budget_bytes
        self.evictions = 0
        self._files, self._listing = files, listing
        self._clock = UseClock()
        self._lock = threading.Lock()
        self._used_bytes = self._written_bytes = 0
        self._list_after = float("-inf")
        self._oldest: deque[StoredFile] = deque()

    @contextmanager
    def placing(self, path: Path, nbytes: int) -> Iterator[None]:
        """Held while a file of `nbytes` comes to `path`; other files are evicted then. Raises `StoreError`."""
        with self._lock:
            listed = self.budget_bytes is not None and self._list_if_due(str(path))
            replaced = _size(path)
            yield
            self._stamp(path)
            self._used_bytes += nbytes - replaced
            self._written_bytes += nbytes
            if self.budget_bytes is not None:
                self._evict(self.budget_bytes, str(path), listed=listed)

    def opened(self, path: Path) -> None:
        """Remember that the file was used just now."""
        # The modification time is ours to keep: no system changes it when a file is read.
        with suppress(OSError):
            used = path.stat().st_mtime
            self._clock.saw(used)
            if self._clock.now() - used > _TOUCH_EVERY_S:
                self._stamp(path)

    def remove(self, path: Path) -> bool:
        """Remove what is at `path`; whether there was anything. Raises `StoreError`."""
        with self._lock:
            nbytes = _size(path)
            removed = self._files.remove(path)
            self._used_bytes -= nbytes if removed else 0
            return removed

    def _stamp(self, path: Path) -> None:
        # A store that cannot be written to is still readable; it only forgets what was used last.
        now = self._clock.now()
        with suppress(OSError):
            os.utime(path, (now, now))

    def _list_if_due(self, newest: str) -> bool:
        written = self._written_bytes > (self.budget_bytes or 0) // _RECOUNT_SHARE
        if written or time.monotonic() >= self._list_after:
            self._list(newest)
            return True
        return False

    def _evict(self, budget: int, newest: str, *, listed: bool) -> None:
        while self._used_bytes > budget:
            if not self._oldest:
                self._list(newest)
                listed = True
            if not self._oldest:
                return
            file = self._oldest.popleft()
            # What another process has evicted meanwhile made room for what it wrote, and neither is in our count.
            if (listed or _unused_since(file)) and self._files.remove(Path(file.path)):
                self._used_bytes -= file.nbytes
                self.evictions += 1

    def _list(self, newest: str) -> None:
        began = time.monotonic()
        files = sorted(self._listing(), key=lambda file: file.used)
        self._used_bytes, self._written_bytes = sum(file.nbytes for file in files), 0
        if files:
            self._clock.saw(files[-1].used)
        others = [file for file in files if file.path != newest]
        self._oldest = deque(others[: max(_QUEUE, len(others) // 10)])
        ended = time.monotonic()
        self._list_after = ended + max(_RECOUNT_EVERY_S, _LISTINGS_SHARE * (ended - began))


def _unused_since(file: StoredFile) -> bool:
    """Whether it is there and was neither opened nor replaced since it was listed."""
    with suppress(OSError):
        return os.lstat(file.path).st_mtime <= file.used
    return False


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_size
    return 0
