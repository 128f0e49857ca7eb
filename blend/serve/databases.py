"""SQLite files: whether one is damaged, and a new one in its place.

SQLite has no checksums. It notices a broken page, but not a changed byte in a text. What must not be lost therefore
needs a second source, or digests.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from blend.files import set_aside

_DAMAGED = {1, 11, 24, 26}  # SQLITE_ERROR (a missing table or column), CORRUPT, FORMAT, NOTADB
_PRIMARY = 0xFF
_ROLLBACK = b"\x01\x01"  # a file's bytes 18 and 19 if it has no write-ahead log
_BUSY_S = 60.0


class NewerDatabaseError(Exception):
    """A later version of kvblend wrote the file. It is not damaged."""


def is_damage(error: BaseException) -> bool:
    """Whether SQLite says that the content of its file is damaged, rather than locked, full or out of reach."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None:
        return (code & _PRIMARY) in _DAMAGED
    # Errors of Python's module have no code: a text that is no UTF-8, a value of another type.
    return isinstance(error, sqlite3.DatabaseError) and "decode" in str(error)


def damage_of(path: Path, queries: Sequence[str], version: int = 0) -> str:
    """Why a SQLite file cannot be used, in a few words; empty if it can, or if there is none.

    Args:
        path: the file. One of no bytes is an empty database.
        queries: statements that the tables of a sound file can answer.
        version: the file's highest `user_version` that this program knows.

    Raises:
        NewerDatabaseError: the file has a higher one.
        OSError, sqlite3.Error: the file is locked or cannot be read, so nothing is known of it.

    """
    if not os.path.lexists(path):
        return ""
    if not path.is_file():
        return "it is no file"
    if not path.stat().st_size:
        return ""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=_BUSY_S)) as database:
            if database.execute("PRAGMA user_version").fetchone()[0] > version:
                raise NewerDatabaseError
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
            for query in queries:
                database.execute(query).fetchall()
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        return str(error)
    return "" if verdict == "ok" else str(verdict).splitlines()[-1]


def set_foreign_log_aside(path: Path) -> None:
    """Set the write-ahead log next to a SQLite file aside, if the file has none: SQLite would read it as the file's content."""
    log = path.with_name(f"{path.name}-wal")
    if not os.path.lexists(log):
        return
    with path.open("rb") as file:
        header = file.read(20)
    if header[18:] == _ROLLBACK or not header:
        set_aside(log)


def renew(path: Path, damage: Callable[[], str], create: Callable[[], object]) -> tuple[Path, str] | None:
    """Set a damaged file aside and make a new one; None if it is not damaged (any more).

    Of several processes that notice it one does so, while it holds a lock.

    Args:
        path: the file.
        damage: why it cannot be used, or empty; asked again under the lock.
        create: makes the new file.

    Returns:
        The damaged file's new path, and why it could not be used.

    Raises:
        OSError: it cannot be renamed.

    """
    from filelock import FileLock

    with FileLock(path.with_name(f".{path.name}.lock"), mode=0o600):
        if not (why := damage()):
            return None
        path.touch()  # it may be lost
        aside = set_aside(path)
        create()
    return aside, why
