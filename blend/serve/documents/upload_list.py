"""The list of the uploads of one corpus: a SQLite file, made anew from the files of the uploads if it is damaged.

    incoming/uploads.sqlite   uploads in order, failed ones with the reason, progress of caches, chunks that leave the index
    incoming/<name>.upload    an upload, until it is useless (`upload_files`)

The database keeps a rollback journal whose file stays (PERSIST), not a write-ahead log: a full disk then takes a deletion, and
it can be read while nothing at all can be written. Rows are short, and so are transactions.

A file gets its name, and the mark that it is useless, inside the transaction that changes its row. So if no row names a file,
its upload was not acknowledged, or its row is lost. Either way it is taken in, unless its mark says that it is useless.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from math import inf
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, get_args

from blend.errors import StoreError, StoreNotWritableError
from blend.files import STALE_AFTER_S, make_private_folder, set_aside, sweep
from blend.layout import Tokens
from blend.serve.databases import NewerDatabaseError, damage_of, is_damage, renew, set_foreign_log_aside
from blend.serve.documents.upload_files import (
    ENDING,
    FAILED,
    USELESS,
    WAITING,
    UploadDamagedError,
    UploadFile,
    file_name,
    read_description,
    says_what_it_is,
    set_mark,
)
from blend.serve.documents.uploads import DocumentState, Upload, UploadKind
from blend.serve.failures import LOG
from blend_retrieval.isolated import is_short

IS_WAITING = "state IN ('queued', 'reading', 'indexing')"
COLUMNS = "number, state, nbytes, tries, place, kind, id, title, reason, text_field, bytes"
OVERTAKEN = 1 << 15  # bytes for which one later upload goes first
_BUSY_S = 60.0  # how long another server's transaction may take
_VERSION = 1
_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS uploads (
    number INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT, id TEXT, title TEXT, text_field TEXT, reason TEXT,
    state TEXT, nbytes INTEGER, tries INTEGER DEFAULT 0, place INTEGER DEFAULT 0, file TEXT, bytes TEXT)""",
    "CREATE TABLE IF NOT EXISTS gone (ids TEXT)",
    "CREATE TABLE IF NOT EXISTS progress (id TEXT PRIMARY KEY, done INTEGER, total INTEGER, reason TEXT)",
    f"PRAGMA user_version = {_VERSION}",
)
_QUERIES = (f"SELECT {COLUMNS}, file FROM uploads LIMIT 0", "SELECT ids FROM gone", "SELECT * FROM progress LIMIT 0")

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_List = TypeVar("_List", bound="UploadList")


class ListDamagedError(StoreError):
    """The list of uploads makes no sense."""


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

    @property
    def is_short(self) -> bool:
        """Whether it is taken in without a reader: no file, or a short plain text."""
        return self.upload.kind != "file" or is_short(self.upload.id, self.nbytes)


@dataclass(frozen=True)
class Change:
    """A transaction on the list, and files that begin or end with it.

    begun: names of new files; without the transaction they go. ended: names of files that go with it.
    """

    folder: Path
    database: sqlite3.Connection
    durable: bool
    begun: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def insert(self, upload: Upload, draft: Path | None) -> None:
        """Queue an upload whose file is this draft. One with a reason has failed."""
        values = (upload.kind, upload.id, upload.title, upload.text_field, upload.reason, len(upload.data))
        number = self.database.execute(
            "INSERT INTO uploads (kind, id, title, text_field, reason, nbytes) VALUES (?, ?, ?, ?, ?, ?)", values
        ).lastrowid
        assert number is not None
        name = file_name(number, upload.id) if draft is not None else None
        self._place(number, "failed" if upload.reason else "queued", name)
        if draft is not None and name is not None:
            self.begun.append(name)
            draft.rename(self.folder / name)

    def restore(self, file: UploadFile, name: str) -> None:
        """Queue an upload whose row is lost, as its file describes it."""
        upload = file.upload
        values = (file.number, upload.kind, upload.id, upload.title, upload.text_field, "", file.nbytes)
        self.database.execute(
            "INSERT INTO uploads (number, kind, id, title, text_field, reason, nbytes) VALUES (?, ?, ?, ?, ?, ?, ?)",
            values,
        )
        self._place(file.number, "queued" if file.mark != FAILED else "failed", name)
        tries = int(file.mark) if file.mark.isdecimal() else 0
        reason = "" if file.mark != FAILED else "it failed before: try it again, or delete it"
        self.database.execute("UPDATE uploads SET tries = ?, reason = ? WHERE number = ?", (tries, reason, file.number))

    def _place(self, number: int, state: DocumentState, name: str | None) -> None:
        """Set the place of a new upload in the order: behind those of the same file that come before it."""
        execute = self.database.execute
        identifier, nbytes = execute("SELECT id, nbytes FROM uploads WHERE number = ?", (number,)).fetchone()
        file = identifier.partition("#")[0]
        before = f"SELECT max(place) FROM uploads WHERE {IS_WAITING} AND file = ? AND number < ?"
        (place_before,) = execute(before, (file, number)).fetchone()
        place = max(number + nbytes // OVERTAKEN, place_before or 0)
        execute(
            "UPDATE uploads SET state = ?, place = ?, file = ?, bytes = ? WHERE number = ?",
            (state, place, file, name, number),
        )

    def supersede(self, upload: Upload, before: float = inf) -> None:
        """Delete the uploads with lower numbers than `before` that this one makes useless."""
        useless = f"NOT {IS_WAITING}" if upload.reason else "kind != 'delete'"
        self.delete(f"id = ? AND number < ? AND {useless}", upload.id, before)

    def delete(self, condition: str, *parameters: Any) -> None:
        """Delete uploads, and their files."""
        self.ended.extend(self.files(condition, *parameters))
        self.database.execute(f"DELETE FROM uploads WHERE {condition}", parameters)

    def files(self, condition: str, *parameters: Any) -> list[str]:
        """The names of the files of uploads."""
        query = f"SELECT bytes FROM uploads WHERE bytes IS NOT NULL AND {condition}"
        return [name for (name,) in self.database.execute(query, parameters)]

    def mark(self, names: Iterable[str], mark: str) -> None:
        """Mark files that have a header."""
        for name in filter(says_what_it_is, names):
            with suppress(FileNotFoundError):
                set_mark(self.folder / name, mark, durable=self.durable)


def renewing(
    method: Callable[Concatenate[_List, _Arguments], _Result],
) -> Callable[Concatenate[_List, _Arguments], _Result]:
    """A method of a list that is called again with a new list if the list is damaged."""

    @wraps(method)
    def call(uploads: _List, /, *args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        try:
            return method(uploads, *args, **options)
        except ListDamagedError:
            uploads.renew()
        return method(uploads, *args, **options)

    return call


class UploadList:
    """The list of uploads in a folder. Threads and processes may share it.

    What cannot be read or written raises `StoreError`; a damaged list raises `ListDamagedError`, see `renewing`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "uploads.sqlite"
        self._is_checked = False
        self._leaving: frozenset[str] = frozenset()  # of the last list that could be read

    def renew(self) -> None:
        """Set a damaged list aside, and make a new one from what the files of the uploads say of themselves.

        Raises `StoreError` if that cannot be done.
        """
        self._is_checked = False
        try:
            with self._named():
                renewed = renew(self.path, self._damage, self._begin_anew)
        except ListDamagedError:
            raise
        except StoreError as error:
            raise StoreNotWritableError(
                f"the list of uploads {self.path} is damaged, and no new one begins: {error}"
            ) from None
        if renewed is not None:
            aside, why = renewed
            waiting = len(self._rows(f"SELECT number FROM uploads WHERE {IS_WAITING}"))
            words = (
                f"the list of uploads {self.path} was damaged ({why}) and is now {aside.name}; {waiting:,} uploads wait in a "
                "new list: hand in again what is missing"
            )
            LOG.warning("uploads_list_renewed", extra={"why": words})

    def _begin_anew(self) -> None:
        """Make a new list. Files that do not say what they are are set aside: the damaged list said it."""
        with self._changing(durable=True, anew=True) as change:
            for name in self._unlisted(()):
                if not says_what_it_is(name):
                    set_aside(self.folder / name)
            self._take_in(change)
            # No number of the damaged list comes again: a worker knows uploads by their numbers.
            (highest,) = change.database.execute("SELECT coalesce(max(number), 0) FROM uploads").fetchone()
            change.database.execute("DELETE FROM sqlite_sequence")
            change.database.execute(
                "INSERT INTO sqlite_sequence VALUES ('uploads', ?)", (max(highest, int(time.time())),)
            )

    @renewing
    def sweep(self) -> None:
        """Look whether the list is damaged, take in uploads whose rows are lost, and delete what killed servers left."""
        sweep(self.folder)
        self._is_checked = False
        names = self._unlisted(self._rows("SELECT bytes FROM uploads WHERE bytes IS NOT NULL"))
        if any(map(says_what_it_is, names)):
            with self._changing() as change:
                count = self._take_in(change)
            if count:
                LOG.warning("uploads_restored", extra={"why": f"{count:,} uploads in {self.folder} were in no list"})
        for name in names:
            path = self.folder / name
            with suppress(OSError):
                if not says_what_it_is(name) and time.time() - path.stat().st_mtime > STALE_AFTER_S:
                    path.unlink()

    def _unlisted(self, listed: Iterable[Sequence[str]]) -> list[str]:
        """The names of files of uploads that the list does not name; the oldest first."""
        names = {path.name for path in self.folder.glob(f"*{ENDING}")}
        return sorted(names.difference(name for (name,) in listed))

    def _take_in(self, change: Change) -> int:
        """Queue uploads that only their files tell of, unless later ones made them useless; returns how many."""
        count = 0
        listed = change.database.execute("SELECT bytes FROM uploads WHERE bytes IS NOT NULL")
        for name in filter(says_what_it_is, self._unlisted(listed)):
            path = self.folder / name
            try:
                file = read_description(path)
            except UploadDamagedError:
                words = f"an upload in {self.folder} is damaged, and no list says what it was: it is now {set_aside(path).name}"
                LOG.warning("upload_damaged", extra={"why": words})
                continue
            if _is_of_another(change.database, file):
                aside = set_aside(path).name
                words = f"an upload in {self.folder} has the number of another: it is now {aside}; hand it in again"
                LOG.warning("upload_not_listed", extra={"why": words})
            elif file.mark == USELESS or _is_superseded(change.database, file):
                change.ended.append(name)
            else:
                change.supersede(file.upload, file.number)
                change.restore(file, name)
                count += 1
        return count

    def _uploads(self, condition: str) -> list[QueuedUpload]:
        """The uploads that a condition of SQL chooses."""
        with self._named():
            return [_queued(row) for row in self._rows(f"SELECT {COLUMNS} FROM uploads WHERE {condition}")]

    def _rows(self, query: str, *parameters: Any) -> list[Any]:
        """The rows of a query; none without a list."""
        with self._named():
            self._check()
            if self._is_empty:
                return []
            with closing(self._connected()) as database:
                return database.execute(query, parameters).fetchall()

    @contextmanager
    def _changing(self, *, durable: bool = False, anew: bool = False) -> Iterator[Change]:
        """A transaction.

        durable: it is on the disk at the end, and makes the folder; others do not: the store may be away.
        anew: nobody sees the list before the transaction ends. It is not looked at for damage.
        """
        with self._named():
            if durable:
                make_private_folder(self.folder)
            if not anew:
                self._check()
            self.path.touch(mode=0o600)
            with closing(self._connected()) as database:
                database.execute("PRAGMA journal_mode = PERSIST")
                database.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                database.execute("BEGIN IMMEDIATE")
                for statement in _SCHEMA:  # a list without some of its tables would be a damaged one
                    database.execute(statement)
                if not anew:  # until it has a table, a list next to the file of an upload is a lost one
                    database.execute("COMMIT")
                    database.execute("BEGIN IMMEDIATE")
                change = Change(self.folder, database, durable)
                try:
                    with database:
                        yield change
                        change.mark(change.ended, USELESS)
                except BaseException:
                    with suppress(OSError):
                        change.mark(change.ended, WAITING)
                    self._unlink(change.begun)
                    raise
            self._unlink(change.ended)

    def _unlink(self, names: Iterable[str]) -> None:
        """Delete files in the folder, if it is not read-only."""
        for name in names:
            with suppress(OSError):
                (self.folder / name).unlink(missing_ok=True)

    @property
    def _is_empty(self) -> bool:
        """Whether there is no list, or one of no bytes."""
        return not self.path.exists() or (self.path.is_file() and not self.path.stat().st_size)

    def _check(self) -> None:
        """Raise `ListDamagedError` if the list makes no sense, when this process uses it first, or if there is none."""
        if self._is_checked and not self._is_empty:
            return
        if why := self._damage():
            raise ListDamagedError(f"the list of uploads {self.path} is damaged ({why})")
        self._is_checked = True

    def _damage(self) -> str:
        """Why the list cannot be used; empty if it can."""
        file = self._file()
        try:
            return self._damage_of_file()
        except (OSError, sqlite3.Error):
            if self._file() == file:
                raise
            return self._damage()  # another server has set it aside meanwhile

    def _file(self) -> tuple[int, int] | None:
        """Which file is the list; None if there is none."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def _damage_of_file(self) -> str:
        if why := damage_of(self.path, _QUERIES, _VERSION):
            return why
        if self._is_empty:
            return "it is empty" if any(map(says_what_it_is, self._unlisted(()))) else ""
        with closing(self._connected()) as database:
            rows = database.execute(f"SELECT {COLUMNS} FROM uploads").fetchall()
            deleted = database.execute("SELECT ids FROM gone").fetchall()
        try:
            chunks_of(deleted)
            for row in rows:
                self._require_same(_queued(row), row[-1])
        except ListDamagedError as error:
            return str(error)
        return ""

    def _require_same(self, queued: QueuedUpload, name: str | None) -> None:
        """Raise `ListDamagedError` if an upload's file tells of another one."""
        if name is None or not says_what_it_is(name):
            return
        with suppress(OSError, UploadDamagedError):
            described = read_description(self.folder / name).upload
            if described != queued.upload._replace(reason=""):
                raise ListDamagedError(f"upload {queued.number} is not as its file says")

    def _connected(self) -> sqlite3.Connection:
        """A connection for one transaction: an open one would keep the disk from being mounted anew."""
        set_foreign_log_aside(self.path)
        uri = f"{self.path.resolve().as_uri()}?mode=rw"
        database = sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None)
        try:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version > _VERSION:
                raise NewerDatabaseError
        except BaseException:
            database.close()
            raise
        return database

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Raise `StoreError` for what the disk or SQLite refuses, and for a list that makes no sense."""
        place = f"the list of uploads {self.path}"
        try:
            yield
        except NewerDatabaseError:
            raise StoreNotWritableError(f"{place} was written by a later version of kvblend: update this one") from None
        except (OSError, sqlite3.Error) as error:
            if is_damage(error) or self.path.is_dir():
                problem = f"{place} is damaged ({error}): move it away, and hand in again what was waiting"
                raise ListDamagedError(problem) from error
            raise StoreNotWritableError(f"documents cannot be kept in {self.folder} ({self._words(error)})") from error

    def _words(self, error: Exception) -> str:
        """Why SQLite or the disk refuses. SQLite does not say why it cannot open a file."""
        if isinstance(error, OSError):
            return error.strerror or str(error)
        try:
            with self.path.open("rb"):
                return str(error)
        except OSError as reason:
            return f"{self.path.name}: {reason.strerror}"


def chunks_of(rows: Iterable[Sequence[str]]) -> list[Tokens]:
    """The chunks in rows of the table `gone`. Raises `ListDamagedError`."""
    try:
        chunks = [tuple(json.loads(ids)) for (ids,) in rows]
    except (ValueError, TypeError) as error:
        raise ListDamagedError(f"a removed chunk makes no sense ({error})") from None
    if not all(isinstance(token, int) for chunk in chunks for token in chunk):
        raise ListDamagedError("a removed chunk makes no sense")
    return chunks


def _queued(row: Sequence[Any]) -> QueuedUpload:
    number, state, nbytes, tries, place, kind, identifier, title, reason, text_field, name = row
    is_sound = (
        state in get_args(DocumentState)
        and kind in get_args(UploadKind)
        and all(isinstance(text, str) for text in (identifier, title, reason, text_field))
        and all(isinstance(count, int) for count in (nbytes, tries, place))
    )
    if is_sound and name is not None and says_what_it_is(name):
        is_sound = name == file_name(number, identifier)
    if not is_sound:
        raise ListDamagedError(f"upload {number} makes no sense")
    upload = Upload(kind, identifier, title, reason=reason, text_field=text_field)
    return QueuedUpload(number, state, nbytes, tries, place, upload)


def _is_of_another(database: sqlite3.Connection, file: UploadFile) -> bool:
    """Whether the list has another upload under this one's number."""
    query = "SELECT 1 FROM uploads WHERE number = ? AND id != ?"
    return database.execute(query, (file.number, file.upload.id)).fetchone() is not None


def _is_superseded(database: sqlite3.Connection, file: UploadFile) -> bool:
    """Whether a later upload makes this one, which the list does not name, useless."""
    later = f"id = ? AND number > ? AND {IS_WAITING} AND ? != 'delete'"
    query = f"SELECT 1 FROM uploads WHERE number = ? OR ({later}) LIMIT 1"
    upload = file.upload
    row = database.execute(query, (file.number, upload.id, file.number, upload.kind)).fetchone()
    return row is not None
