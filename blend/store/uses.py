"""How often each cache was used for a prompt on this machine: counted in memory, kept in a small database beside the caches.

uses.sqlite3    digest of a cache, where it was read from ("local", "hot", "far", "memory", "store"), how often, when last

Counting never fails and hardly waits: every few seconds, when an entry was read, what was counted is added to the database,
and what is left is added when the process ends. A process that is killed loses that. A database that cannot be written, or is
damaged, costs figures and nothing else.
"""

from __future__ import annotations

import atexit
import errno
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sqlite3 import Connection

NAME = "uses.sqlite3"
_EVERY_S = 5.0
_WAIT_S, _LAST_WAIT_S = 0.1, 5.0  # for another process that is writing; at the end of this one
_FORGOTTEN_AFTER_S = 365 * 86400.0
_TABLE = (
    "CREATE TABLE IF NOT EXISTS uses"
    " (digest TEXT, tier TEXT, hits INTEGER, last REAL, PRIMARY KEY (digest, tier)) WITHOUT ROWID"
)
_ADD = (
    "INSERT INTO uses VALUES (?, ?, ?, ?)"
    " ON CONFLICT DO UPDATE SET hits = hits + excluded.hits, last = max(last, excluded.last)"
)


class Hits(NamedTuple):
    """How often caches were used: by their digest, and by the tier that they were read from."""

    of_caches: dict[str, int]
    of_tiers: dict[str, int]


class Uses:
    """The counts of the store in the directory `root`. file_mode: what its files may be opened by."""

    def __init__(self, root: Path, file_mode: Callable[[], int]) -> None:
        self._path, self._file_mode = root.absolute() / NAME, file_mode
        self._lock = threading.Lock()
        self._counted = Counter[tuple[str, str]]()
        self._written_at = float("-inf")
        self._writes_at_exit = self._swept = False

    def count(self, digest: str, tier: str) -> None:
        """One more use of this cache, read from that tier. Safe to call from any thread."""
        with self._lock:
            self._counted[digest, tier] += 1
            if not self._writes_at_exit:
                atexit.register(self.write, _LAST_WAIT_S)
                self._writes_at_exit = True

    def settle(self) -> None:
        """Called when something was read: writes, unless that was done some seconds ago."""
        if self._counted and time.monotonic() >= self._written_at + _EVERY_S:
            self.write()

    def write(self, wait_s: float = _WAIT_S) -> None:
        """Add what was counted to the database; what cannot be added now is added another time."""
        from sqlite3 import DatabaseError, OperationalError

        with self._lock:
            counted, self._counted = self._counted, Counter()
            self._written_at = time.monotonic()
        if not counted:
            return
        try:
            self._add(counted, wait_s)
        except (OSError, OperationalError):  # read-only, full, locked for long, or gone
            with self._lock:
                self._counted.update(counted)
        except DatabaseError:  # damaged: figures begin anew
            with suppress(OSError):
                self._path.unlink()
            with self._lock:
                self._counted.update(counted)

    def read(self) -> Hits:
        """What all processes of this machine have counted; nothing where there is no database that can be read."""
        from sqlite3 import Error

        caches, tiers = Counter[str](), Counter[str]()
        with suppress(OSError, Error, TypeError):  # and values of other types than were written
            if stat.S_ISREG(self._path.lstat().st_mode):
                with self._opened("ro", _LAST_WAIT_S) as database:
                    for digest, tier, hits in database.execute("SELECT digest, tier, hits FROM uses"):
                        caches[digest] += hits
                        tiers[tier] += hits
        return Hits(dict(caches), dict(tiers))

    def _add(self, counted: Counter[tuple[str, str]], wait_s: float) -> None:
        self._make()
        now = time.time()
        with self._opened("rw", wait_s) as database, database:
            database.execute("PRAGMA synchronous = OFF")  # no figure is worth a prompt's wait for the disk
            database.execute(_TABLE)
            database.executemany(_ADD, [(*what, times, now) for what, times in counted.items()])
            if not self._swept:
                database.execute("DELETE FROM uses WHERE last < ?", (now - _FORGOTTEN_AFTER_S,))
                self._swept = True

    def _make(self) -> None:
        """The file, if it is not there, with the rights of the store's others: SQLite's own are what the umask leaves."""
        mode = self._file_mode()
        with suppress(FileExistsError):
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, mode)
            try:
                os.fchmod(descriptor, mode)
            finally:
                os.close(descriptor)
        if not stat.S_ISREG(self._path.lstat().st_mode):
            raise OSError(errno.EINVAL, "not a file of the store")

    @contextmanager
    def _opened(self, mode: str, wait_s: float) -> Iterator[Connection]:
        import sqlite3

        with closing(sqlite3.connect(f"{self._path.as_uri()}?mode={mode}", uri=True, timeout=wait_s)) as database:
            yield database
