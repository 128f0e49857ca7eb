"""Keys of deleted caches, which running prompts must not write again."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from math import inf
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from cachetools import TTLCache

from blend.serve.databases import NewerDatabaseError, damage_of, is_damage, renew, set_foreign_log_aside
from blend.types import ChunkKey

if TYPE_CHECKING:
    from blend.store import ChunkStore

KEEP_S = 3600.0
_BUSY_S = 60.0  # how long another process may write a cache
_LISTED = "SELECT space, digest, at FROM removed"


class RemovedKeys:
    """Keys of deleted caches that running prompts must not write again. Threads may share it, and processes of one machine.

    A prompt from before a deletion may find the cache missing and compute it for later prompts. A key is forgotten after
    `KEEP_S`: nothing is stored any more for prompts of that age.

    path: a SQLite file that the processes share. One that cannot be used, as on a full disk, concerns the others only; a
    damaged one is set aside.
    clock: gives seconds, the same in all processes.
    """

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = monotonic) -> None:
        self._path = path
        self._clock = clock
        self._lock = Lock()
        self._keys: TTLCache[ChunkKey, None] = TTLCache(inf, KEEP_S, clock)

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[ChunkKey]) -> None:
        """Refuse these keys from now on. Call it before deleting their caches."""
        now = self._clock()
        added = dict.fromkeys(keys)
        with self._lock, self._shared() as file:
            self._keys.update(added)
            file.execute(
                "DELETE FROM removed WHERE at NOT BETWEEN ? AND ?", (now - KEEP_S, now)
            )  # later: before a reboot
            file.executemany("INSERT OR REPLACE INTO removed VALUES (?, ?, ?)", [(*key, now) for key in added])

    def allow(self, keys: Iterable[ChunkKey]) -> None:
        """Accept these keys again: a document or a question brought their chunks."""
        with self._lock, self._shared() as file:
            removed = {*self._keys, *(ChunkKey(*row) for row in file.execute("SELECT space, digest FROM removed"))}
            allowed = removed.intersection(keys) if removed else ()
            for key in allowed:
                self._keys.pop(key, None)
            file.executemany("DELETE FROM removed WHERE space = ? AND digest = ?", allowed)

    def unless_removed(self, key: ChunkKey, begun: float, keep: Callable[[], object]) -> None:
        """Call `keep`, which stores this cache, unless its key is refused.

        begun: when the prompt began, by the clock; `KEEP_S` later nothing is stored for it.
        """
        now = self._clock()
        with self._lock, self._shared() as file:  # while it is written a removal waits, and deletes it then
            where = "space = ? AND digest = ? AND at BETWEEN ? AND ?"
            removed = file.execute(f"SELECT 1 FROM removed WHERE {where}", (*key, now - KEEP_S, now)).fetchone()
            if not removed and key not in self._keys and begun >= now - KEEP_S:
                keep()

    @contextmanager
    def _shared(self) -> Iterator[sqlite3.Connection]:
        """A transaction on the keys that all processes removed; on none if the file cannot be used."""
        with closing(self._opened()) as file:
            try:
                yield file
                file.execute("COMMIT")
            except sqlite3.Error as error:
                if is_damage(error):
                    self._renew()

    def _opened(self) -> sqlite3.Connection:
        for _ in range(2):  # a damaged file is set aside
            if self._path is None:
                break
            try:
                self._path.touch(mode=0o600)
                set_foreign_log_aside(self._path)
                return _begun(str(self._path))
            except (OSError, sqlite3.Error) as error:
                if is_damage(error) or self._path.is_dir():
                    self._renew()
        return _begun(":memory:")

    def _renew(self) -> None:
        """Set a damaged file aside. The next transaction begins a new one."""
        path = self._path
        if path is not None:
            with suppress(OSError, sqlite3.Error, NewerDatabaseError):
                renew(path, lambda: damage_of(path, [_LISTED]), path.touch)


def _begun(place: str) -> sqlite3.Connection:
    """A connection in a transaction that no other process has at the same time."""
    file = sqlite3.connect(place, timeout=_BUSY_S, isolation_level=None)
    try:
        file.execute("PRAGMA synchronous = OFF")
        file.execute("BEGIN IMMEDIATE")
        file.execute(
            "CREATE TABLE IF NOT EXISTS removed (space TEXT, digest TEXT, at REAL, PRIMARY KEY (space, digest))"
        )
        file.execute(f"{_LISTED} LIMIT 0")
    except BaseException:
        file.close()
        raise
    return file


_REMOVED: WeakKeyDictionary[ChunkStore, RemovedKeys] = WeakKeyDictionary()
_REMOVED_LOCK = Lock()


def removed_from(store: ChunkStore) -> RemovedKeys:
    """The removed keys of a store, shared by all that write to it from this machine."""
    with _REMOVED_LOCK:
        if store not in _REMOVED:
            _REMOVED[store] = RemovedKeys(store.folder and store.folder.with_name("removed.sqlite"))
        return _REMOVED[store]
