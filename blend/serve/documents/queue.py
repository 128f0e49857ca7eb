"""The uploads of one corpus, which all servers over its folder share.

    incoming/uploads.sqlite   uploads in order, failed ones with the reason, progress of caches, chunks that leave the index
    incoming/<name>.upload    the bytes of an upload, until they are useless
    incoming/.owner           a lock; the server that holds it reads and indexes, the others accept, list and stand by

An upload is on the disk before it is acknowledged. Files are private to their owner.

The database keeps a rollback journal whose file stays (PERSIST), not a write-ahead log: a full disk then takes a deletion, and
it can be read while nothing at all can be written. Rows are short, and so are transactions.
"""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple

from blend.errors import ConfigError, StoreError, StoreNotWritableError
from blend.files import STALE_AFTER_S, make_private_folder, sweep, write_atomically
from blend.layout import Tokens
from blend.serve.documents.uploads import DocumentState, Upload
from blend.text import shown
from blend_retrieval.errors import DocumentsError

INCOMING = "incoming"  # the folder next to an index
MOST_TRIES = 5  # how often a server may die during an upload
MOST_FAILED = 1000  # failures to remember
_OVERTAKEN = 1 << 15  # bytes for which one later upload goes first
_BUSY_S = 60.0  # how long another server's transaction may take
_WAITING = "state IN ('queued', 'reading', 'indexing')"
_COLUMNS = "number, state, nbytes, tries, place, kind, id, title, reason, text_field"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS uploads (
    number INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT, id TEXT, title TEXT, text_field TEXT, reason TEXT,
    state TEXT, nbytes INTEGER, tries INTEGER DEFAULT 0, place INTEGER DEFAULT 0, file TEXT, bytes TEXT);
CREATE TABLE IF NOT EXISTS gone (ids TEXT);
CREATE TABLE IF NOT EXISTS progress (id TEXT PRIMARY KEY, done INTEGER, total INTEGER, reason TEXT);
"""


class SupersededError(Exception):
    """The upload was deleted, or replaced by a later one."""


class GivenUpError(DocumentsError):
    """The upload was begun and not finished again and again."""


class QueuedUpload(NamedTuple):
    """An upload in the queue, or one that failed.

    Attributes:
        number: counts all uploads.
        nbytes: of the change.
        tries: how often it was begun and not finished.
        place: its place in the order.
        upload: the change without its bytes.

    """

    number: int
    state: DocumentState
    nbytes: int
    tries: int
    place: int
    upload: Upload

    @property
    def alone(self) -> bool:
        """Whether it is indexed without others, because one of them may be at fault."""
        return self.tries > 0


class CacheProgress(NamedTuple):
    """Tokens of a document's caches that are computed, and of all; reason: why one of them cannot be."""

    computed: int
    total: int
    reason: str = ""


class UploadQueue:
    """The uploads of the corpus whose folder this is. Threads and processes may share it.

    Short uploads overtake long ones, one for every 32 KiB. Uploads of one file keep their order. What cannot be read or written
    raises `StoreError`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "uploads.sqlite"

    def put(self, uploads: Sequence[Upload]) -> None:
        """Write all uploads, or none. An upload with a reason has failed.

        An upload supersedes those under its id that wait or have failed.
        """
        paths = [self._write_bytes(upload.data) if upload.data else None for upload in uploads]
        try:
            with self._changing(durable=True) as database:
                superseded = [path for upload in uploads for path in _supersede(database, upload)]
                for upload, path in zip(uploads, paths, strict=True):
                    _insert(database, upload, path)
        except BaseException:
            self._unlink(path.name for path in paths if path is not None)
            raise
        self._unlink(superseded)

    def waiting(self) -> list[QueuedUpload]:
        """The uploads that are not indexed yet, in order."""
        return self._uploads(f"{_WAITING} ORDER BY place, number")

    def failed(self) -> list[QueuedUpload]:
        """Uploads that failed, and files of which something was left out; the oldest first."""
        return self._uploads(f"NOT {_WAITING} AND kind != 'delete' ORDER BY number")

    def leaving(self) -> frozenset[str]:
        """Ids of uploads to remove that the index may still hold."""
        return frozenset(name for (name,) in self._rows(f"SELECT id FROM uploads WHERE kind = 'delete' AND {_WAITING}"))

    def is_waiting(self, before: float = inf) -> bool:
        """Whether uploads wait whose place is before this one."""
        return bool(self._rows(f"SELECT 1 FROM uploads WHERE {_WAITING} AND place < ? LIMIT 1", before))

    def require(self, uploads: Collection[QueuedUpload]) -> None:
        """Raise `SupersededError` if one of these uploads was deleted or replaced."""
        numbers = [upload.number for upload in uploads]
        marks = ", ".join("?" * len(numbers))
        ((count,),) = self._rows(f"SELECT count(*) FROM uploads WHERE number IN ({marks})", *numbers) or [(0,)]
        if count < len(numbers):
            raise SupersededError

    def take(self, queued: QueuedUpload) -> Upload:
        """An upload with its bytes. Counts as a try until `put_back` or `settle`.

        Raises `SupersededError`, `GivenUpError` after too many tries, `DocumentsError` without the bytes.
        """
        if queued.tries >= MOST_TRIES and queued.upload.kind != "delete":
            raise GivenUpError(f"given up: {MOST_TRIES} times the server ended, or had no memory, while it was indexed")
        with self._changing() as database:
            row = database.execute("SELECT bytes FROM uploads WHERE number = ?", (queued.number,)).fetchone()
            database.execute(
                "UPDATE uploads SET tries = tries + 1, state = 'reading' WHERE number = ?", (queued.number,)
            )
        if row is None:
            raise SupersededError
        try:
            data = (self.folder / row[0]).read_bytes() if row[0] else b""
        except FileNotFoundError:
            raise DocumentsError("what was kept of it is lost: hand it in again") from None
        return queued.upload._replace(data=data)

    def indexing(self, queued: QueuedUpload) -> None:
        """Note that this upload was read."""
        with self._changing() as database:
            database.execute("UPDATE uploads SET state = 'indexing' WHERE number = ?", (queued.number,))

    def put_back(self, uploads: Collection[QueuedUpload]) -> None:
        """Queue unfinished uploads again; the try does not count."""
        with self._changing() as database:
            for queued in uploads:
                database.execute(
                    "UPDATE uploads SET tries = max(0, tries - 1), state = 'queued' "
                    "WHERE number = ? AND state != 'queued'",
                    (queued.number,),
                )

    def settle(
        self, queued: QueuedUpload, state: Literal["ready", "failed"], reason: str = "", *, whole: bool = False
    ) -> None:
        """Delete an upload that is indexed, or keep it with the reason why it failed or what was left out of it.

        whole: keep it with its bytes, to try again.
        """
        with self._changing() as database:
            names = [] if whole else _bytes_of(database, "number = ?", queued.number)
            if reason:
                database.execute(
                    "UPDATE uploads SET state = ?, reason = ?, nbytes = 0, bytes = iif(?, bytes, NULL) WHERE number = ?",
                    (state, reason, whole, queued.number),
                )
            else:
                _delete(database, "number = ?", queued.number)
            names += _delete(database, _TOO_OLD, MOST_FAILED)
        self._unlink(names)

    def free(self, name: str) -> None:
        """Delete the bytes of the uploads with this id, to make room on a full disk."""
        rows = self._rows("SELECT bytes FROM uploads WHERE id = ?", name)
        self._unlink(path for (path,) in rows)

    def retry(self, name: str) -> bool:
        """Queue the failed upload with this id again; False without one. Raises `ConfigError` if its bytes are not kept."""
        with self._changing(durable=True) as database:
            row = database.execute(
                "SELECT number, bytes FROM uploads WHERE id = ? AND state = 'failed' AND kind != 'delete'", (name,)
            ).fetchone()
            if row is None:
                return False
            number, file_name = row
            if file_name is None:
                raise ConfigError(f"{shown(name)} failed because of what it holds, and was not kept: hand it in again")
            nbytes = (self.folder / file_name).stat().st_size
            database.execute(
                "UPDATE uploads SET state = 'queued', reason = '', tries = 0, nbytes = ?, place = ? WHERE number = ?",
                (nbytes, number + nbytes // _OVERTAKEN, number),
            )
        return True

    def progress(self) -> dict[str, CacheProgress]:
        """How far the caches of each document are, as the owner noted it last."""
        rows = self._rows("SELECT id, done, total, reason FROM progress")
        return {name: CacheProgress(*counts) for name, *counts in rows}

    def note_progress(self, documents: Mapping[str, CacheProgress], *, anew: bool = False) -> None:
        """Note how far these documents are. anew: and that there are no others."""
        if not documents and not anew:
            return
        with self._changing() as database:
            if anew:
                database.execute("DELETE FROM progress")
            rows = [(name, *progress) for name, progress in documents.items()]
            database.executemany("INSERT OR REPLACE INTO progress VALUES (?, ?, ?, ?)", rows)

    def gone(self) -> list[Tokens]:
        """Chunks that left the index and whose caches may still exist."""
        return [tuple(json.loads(ids)) for (ids,) in self._rows("SELECT ids FROM gone")]

    def write_gone(self, chunks: Collection[Tokens]) -> None:
        """Record these chunks, or that there are none."""
        if not chunks and not self.gone():
            return
        with self._changing(durable=True) as database:
            database.execute("DELETE FROM gone")
            database.executemany("INSERT INTO gone VALUES (?)", [(json.dumps(ids),) for ids in chunks])

    def sweep(self) -> None:
        """Delete what killed servers left: temporary files, and bytes of uploads that they did not finish accepting."""
        sweep(self.folder)
        referenced = {name for (name,) in self._rows("SELECT bytes FROM uploads WHERE bytes IS NOT NULL")}
        for path in self.folder.glob("*.upload"):
            with suppress(OSError):
                if path.name not in referenced and time.time() - path.stat().st_mtime > STALE_AFTER_S:
                    path.unlink()

    def _uploads(self, condition: str) -> list[QueuedUpload]:
        return [_queued(row) for row in self._rows(f"SELECT {_COLUMNS} FROM uploads WHERE {condition}")]

    def _rows(self, query: str, *parameters: Any) -> list[Any]:
        """The rows of a query; none without a database."""
        with _named(self.path):
            if not self.path.exists() or not self.path.stat().st_size:
                return []
            with closing(_connected(self.path)) as database:
                return database.execute(query, parameters).fetchall()

    @contextmanager
    def _changing(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """A transaction. durable: it is on the disk at the end, and makes the folder; others do not: the store may be away."""
        with _named(self.path):
            if durable:
                make_private_folder(self.folder)
            self.path.touch(mode=0o600)
            with closing(_connected(self.path)) as database:
                database.execute("PRAGMA journal_mode = PERSIST")
                database.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                database.executescript(_SCHEMA)
                database.execute("BEGIN IMMEDIATE")
                with database:
                    yield database

    def _write_bytes(self, data: bytes) -> Path:
        path = self.folder / f"{uuid.uuid4().hex}.upload"
        with _named(self.path):
            make_private_folder(self.folder)
            write_atomically(path, [data])
        return path

    def _unlink(self, names: Iterable[str | None]) -> None:
        for name in names:
            with suppress(OSError):  # a read-only folder
                if name:
                    (self.folder / name).unlink(missing_ok=True)


_TOO_OLD = f"number IN (SELECT number FROM uploads WHERE NOT {_WAITING} ORDER BY number DESC LIMIT -1 OFFSET ?)"


def _connected(path: Path) -> sqlite3.Connection:
    """A connection for one transaction: an open one would keep the disk from being mounted anew."""
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=_BUSY_S, isolation_level=None)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Raise `StoreError` for what the disk or SQLite refuses."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise StoreNotWritableError(f"documents cannot be kept in {path.parent} ({why})") from error
    except sqlite3.DatabaseError as error:
        problem = f"the list of uploads {path} is damaged ({error}): move it away and hand in again what was waiting"
        raise StoreError(problem) from error


def _supersede(database: sqlite3.Connection, upload: Upload) -> list[str]:
    """Delete the uploads that this one makes useless; returns the names of their bytes."""
    useless = f"NOT {_WAITING}" if upload.reason else "kind != 'delete'"
    return _delete(database, f"id = ? AND {useless}", upload.id)


def _insert(database: sqlite3.Connection, upload: Upload, path: Path | None) -> None:
    state: DocumentState = "failed" if upload.reason else "queued"
    file = _file_of(upload.id)
    nbytes = len(upload.data)
    values = (upload.kind, upload.id, upload.title, upload.text_field, upload.reason, state, nbytes, file)
    number = database.execute(
        "INSERT INTO uploads (kind, id, title, text_field, reason, state, nbytes, file, bytes) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*values, path.name if path is not None else None),
    ).lastrowid
    assert number is not None
    (before,) = database.execute(f"SELECT max(place) FROM uploads WHERE {_WAITING} AND file = ?", (file,)).fetchone()
    place = max(number + nbytes // _OVERTAKEN, before or 0)
    database.execute("UPDATE uploads SET place = ? WHERE number = ?", (place, number))


def _bytes_of(database: sqlite3.Connection, condition: str, *parameters: Any) -> list[str]:
    rows = database.execute(f"SELECT bytes FROM uploads WHERE bytes IS NOT NULL AND {condition}", parameters)
    return [name for (name,) in rows]


def _delete(database: sqlite3.Connection, condition: str, *parameters: Any) -> list[str]:
    """Delete uploads; returns the names of their bytes, to delete once this is committed."""
    names = _bytes_of(database, condition, *parameters)
    database.execute(f"DELETE FROM uploads WHERE {condition}", parameters)
    return names


def _queued(row: Sequence[Any]) -> QueuedUpload:
    number, state, nbytes, tries, place, kind, name, title, reason, text_field = row
    upload = Upload(kind, name, title, reason=reason, text_field=text_field)
    return QueuedUpload(number, state, nbytes, tries, place, upload)


def _file_of(name: str) -> str:
    return name.partition("#")[0]
