"""The file that lists learned texts: its tables, what has changed in it, and a new one in place of a damaged one."""

from __future__ import annotations

import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import NamedTuple

import numpy as np

from blend.errors import StoreError
from blend.files import make_private_folder
from blend.serve.databases import damage_of, is_damage, renew, set_foreign_log_aside
from blend.serve.failures import LOG
from blend.serve.token_index import Ids, TokenIndex, digest_of

# pins: the sessions that use a text, each with the time until which it keeps the text, 0 for none. The session "" stands for
# all requests that name none; a text without a row here is theirs alone.
_TABLES = """
CREATE TABLE IF NOT EXISTS pieces (user TEXT, name BLOB, tokens BLOB, used INTEGER, recurs INTEGER, PRIMARY KEY (user, name));
CREATE INDEX IF NOT EXISTS pieces_used ON pieces (used);
CREATE TABLE IF NOT EXISTS caches (
    user TEXT, name BLOB, namespace TEXT, digest TEXT, nbytes INTEGER, PRIMARY KEY (user, name, namespace, digest)
);
CREATE INDEX IF NOT EXISTS caches_digest ON caches (digest);
CREATE TABLE IF NOT EXISTS pins (
    user TEXT, name BLOB, session TEXT, until REAL, nbytes INTEGER, PRIMARY KEY (user, name, session)
);
CREATE TABLE IF NOT EXISTS holders (user TEXT, name BLOB, client TEXT, used_at REAL, PRIMARY KEY (user, name));
"""
_READABLE = (
    "SELECT user, name, used, recurs, length(tokens) FROM pieces",
    "SELECT user, name, namespace, digest, nbytes FROM caches",
    "SELECT user, name, session, until, nbytes FROM pins",
    "SELECT user, name, client, used_at FROM holders",
)
# Files of kvblend before 2026-11-28 list a piece's caches as JSON.
_IS_OLD = "SELECT 1 FROM sqlite_master WHERE name = 'texts'"
_CONVERT = (
    "INSERT OR IGNORE INTO pieces SELECT user, name, tokens, used, 0 FROM texts",
    "INSERT OR IGNORE INTO caches SELECT user, name, json_extract(value, '$[0]'), json_extract(value, '$[1]'), "
    "json_extract(value, '$[2]') FROM texts, json_each(caches)",
    "DROP TABLE texts",
)
PIECE = "user = ? AND name = ?"
_CHANGE = slice(24, 28)  # of a SQLite file: counts its changes
_BUSY_S = 60.0  # how long another process may delete caches


class Piece(NamedTuple):
    """A learned text of an end user, by its digest. user: "" for all who name none."""

    user: str
    digest: bytes


class LearnedTexts:
    """The texts in a list of `LearnedCaches`, as they are now: other processes change it. Thread-safe.

    path: a SQLite file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = RLock()
        # Of users that have a text; threads may search while one changes.
        self._indexes: dict[str, TokenIndex[bytes]] = {}
        self._change = (0, 0)  # of the file, as it was read last

    def index(self, user: str = "") -> TokenIndex[bytes]:
        """Finds a user's texts in prompts; their digests are its names. If the list cannot be read, it stays as it was."""
        if self._lock.acquire(blocking=False):  # else it is being changed, which may wait for the store
            try:
                self._follow()
            finally:
                self._lock.release()
        return self._indexes.get(user) or TokenIndex()

    def _follow(self) -> None:
        """Take over what has changed in the file, if it can be read."""
        with suppress(OSError, sqlite3.Error, ValueError):
            change = _change_of(self._path)
            if change != self._change:
                self._read_changes()
                self._change = change

    def _read_changes(self) -> None:
        indexed = {Piece(user, name) for user, index in self._indexes.items() for name in index.names}
        # Of each user: texts that are gone, and new ones.
        changes = defaultdict[str, tuple[list[bytes], dict[bytes, Ids]]](lambda: ([], {}))
        with self._reading() as file:
            # In one order everywhere: of equal runs in several texts a search prefers the latest.
            listed = [Piece(*row) for row in file.execute("SELECT user, name FROM pieces ORDER BY used")]
            for piece in listed:
                if piece not in indexed:
                    (tokens,) = file.execute(f"SELECT tokens FROM pieces WHERE {PIECE}", piece).fetchone()
                    if _is_sound(piece, tokens):  # else it is learned anew when it comes again
                        changes[piece.user][1][piece.digest] = np.frombuffer(tokens, np.int32)
        for piece in indexed.difference(listed):
            changes[piece.user][0].append(piece.digest)
        for user, (removed, new) in changes.items():
            index = self._indexes.setdefault(user, TokenIndex())
            index.update(removed, new)
            if not index:
                del self._indexes[user]

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(f"{self._path.resolve().as_uri()}?mode=ro", uri=True)) as file:
            file.execute("BEGIN")  # one state of it
            yield file


class LearnedList(LearnedTexts):
    """The same list, which this process changes, too. Threads and processes may share it.

    Args:
        path: a SQLite file, private to its owner. A damaged one is set aside, and a new list begins.
        clock: gives seconds since 1970, the same in all processes.

    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        super().__init__(path)
        self._clock = clock
        if path.exists():
            self._open()

    def _open(self) -> None:
        """Read the file, in whichever form it is, or set a damaged one aside. One that cannot be read now stays."""
        with suppress(StoreError, OSError, sqlite3.Error):
            self._renew()
            with self._changing() as file:
                if file.execute(_IS_OLD).fetchone():
                    for statement in _CONVERT:
                        file.execute(statement)
        self._follow()

    def _renew(self) -> bool:
        """Set the file aside and begin a new one, if it is damaged. Raises `OSError` and `sqlite3.Error`."""
        if self._path.is_file():
            set_foreign_log_aside(self._path)
        if not self._damage():
            return False
        renewed = renew(self._path, self._damage, self._create)
        if renewed is None:
            return False
        aside, why = renewed
        LOG.warning("learned_texts_set_aside", extra={"path": str(aside), "why": why})
        return True

    def _damage(self) -> str:
        if why := damage_of(self._path, ()):
            return why
        with suppress(sqlite3.OperationalError), closing(sqlite3.connect(self._path, timeout=_BUSY_S)) as file:
            file.executescript(_TABLES)  # an older file lacks some
        return damage_of(self._path, _READABLE)

    def _create(self) -> None:
        self._path.touch(mode=0o600)

    def _renewed_because_of(self, error: Exception) -> bool:
        """Whether an error showed damage, so that a new list has begun."""
        if not is_damage(error) or not self._lock.acquire(blocking=False):  # another thread may wait for this one
            return False
        try:
            with suppress(OSError, sqlite3.Error):
                return self._renew()
            return False
        finally:
            self._lock.release()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            with super()._reading() as file:
                yield file
        except sqlite3.Error as error:
            self._renewed_because_of(error)
            raise

    @contextmanager
    def _changing(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """A transaction on the file. Pins that have ended for texts that are not learned are gone behind it.

        durable: whether a crash of the machine leaves it. Text that such a crash loses is learned again.

        Raises `StoreError` if the file cannot be used.
        """
        try:
            make_private_folder(self._path.parent)
            self._path.touch(mode=0o600)
            with closing(sqlite3.connect(self._path, timeout=_BUSY_S)) as file, file:
                file.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
                file.executescript(_TABLES)
                file.execute("BEGIN IMMEDIATE")
                yield file
                stray = "(user, name) NOT IN (SELECT user, name FROM pieces)"
                file.execute(f"DELETE FROM pins WHERE until <= ? AND {stray}", (self._clock(),))
                file.execute(f"DELETE FROM holders WHERE {stray} AND (user, name) NOT IN (SELECT user, name FROM pins)")
        except (OSError, sqlite3.Error) as error:
            if self._renewed_because_of(error):
                raise StoreError(
                    "the list of learned texts was damaged; it was set aside, and a new one begins"
                ) from error
            raise StoreError(f"the list of learned texts {self._path} cannot be used: {error}") from error


def _change_of(path: Path) -> tuple[int, int]:
    """Tells a SQLite file from another one, and counts its changes. Raises `OSError` without one."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_ino, int.from_bytes(file.read(_CHANGE.stop)[_CHANGE])


def _is_sound(piece: Piece, tokens: object) -> bool:
    """Whether these are the bytes of a piece's tokens: SQLite notices no changed byte."""
    if not isinstance(tokens, bytes) or len(tokens) % 4:
        return False
    return digest_of(np.frombuffer(tokens, np.int32).tolist()) == piece.digest
