"""The uploads of one corpus, which all servers over its folder share.

    incoming/uploads.sqlite   the list (`upload_list`)
    incoming/<name>.upload    an upload (`upload_files`)
    incoming/.owner           a lock; the server that holds it reads and indexes, the others accept, list and stand by

An upload is on the disk before it is acknowledged. Files are private to their owner.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Literal, NamedTuple

from blend.errors import ConfigError, StoreError
from blend.files import make_private_folder
from blend.layout import Tokens
from blend.serve.documents.upload_files import (
    ENDING,
    FAILED,
    USELESS,
    WAITING,
    UploadDamagedError,
    read_description,
    read_upload,
    says_what_it_is,
    set_mark,
    write_draft,
)
from blend.serve.documents.upload_list import IS_WAITING, OVERTAKEN, QueuedUpload, UploadList, chunks_of, renewing
from blend.serve.documents.uploads import Upload
from blend.text import shown
from blend_retrieval.errors import DocumentsError

INCOMING = "incoming"  # the folder next to an index
MOST_TRIES = 5  # how often a server may die during an upload
MOST_FAILED = 1000  # failures to remember
_LOST = "what was kept of it is lost: hand it in again"
_TOO_OLD = f"number IN (SELECT number FROM uploads WHERE NOT {IS_WAITING} ORDER BY number DESC LIMIT -1 OFFSET ?)"


class SupersededError(Exception):
    """The upload was deleted, or replaced by a later one."""


class GivenUpError(DocumentsError):
    """The upload was begun and not finished again and again."""


class CacheProgress(NamedTuple):
    """Tokens of a document's caches that are computed, and of all; reason: why one of them cannot be."""

    computed: int
    total: int
    reason: str = ""


class UploadQueue(UploadList):
    """The uploads of the corpus whose folder this is. Threads and processes may share it.

    Short uploads overtake long ones, one for every 32 KiB. Uploads of one file keep their order. What cannot be read or written
    raises `StoreError`. A damaged list is set aside, and a new one made of what the files of the uploads say of themselves.
    """

    @renewing
    def put(self, uploads: Sequence[Upload]) -> None:
        """Write all uploads, or none. An upload with a reason has failed.

        An upload supersedes those under its id that wait or have failed.
        """
        drafts: list[Path | None] = []
        try:
            drafts.extend(map(self._draft, uploads))
            with self._changing(durable=True) as change:
                for upload in uploads:
                    change.supersede(upload)
                for upload, draft in zip(uploads, drafts, strict=True):
                    change.insert(upload, draft)
        finally:
            self._unlink(draft.name for draft in drafts if draft is not None)

    def _draft(self, upload: Upload) -> Path | None:
        """Write the file of an upload; None of one that has failed, and of a deletion that finds no room."""
        if upload.reason:
            return None
        with self._named():
            make_private_folder(self.folder)
            try:
                return write_draft(self.folder, upload)
            except OSError:
                if upload.kind != "delete":
                    raise
                return None

    @renewing
    def waiting(self) -> list[QueuedUpload]:
        """The uploads that are not indexed yet, in order."""
        return self._uploads(f"{IS_WAITING} ORDER BY place, number")

    @renewing
    def failed(self) -> list[QueuedUpload]:
        """Uploads that failed, and files of which something was left out; the oldest first."""
        return self._uploads(f"NOT {IS_WAITING} AND kind != 'delete' ORDER BY number")

    def leaving(self) -> frozenset[str]:
        """Ids of uploads to remove that the index may still hold.

        While the list cannot be read, those that were in it last, and those that files tell of.
        """
        try:
            self._leaving = self._listed_deletions()
        except StoreError:
            return self._leaving | self._filed_deletions()
        return self._leaving

    @renewing
    def _listed_deletions(self) -> frozenset[str]:
        return frozenset(queued.upload.id for queued in self._uploads(f"kind = 'delete' AND {IS_WAITING}"))

    def _filed_deletions(self) -> frozenset[str]:
        names = set[str]()
        for path in self.folder.glob(f"*{ENDING}"):
            with suppress(OSError, UploadDamagedError):
                file = read_description(path)
                if file.upload.kind == "delete" and file.mark != USELESS:
                    names.add(file.upload.id)
        return frozenset(names)

    @renewing
    def is_waiting(self, before: float = inf) -> bool:
        """Whether uploads wait whose place is before this one."""
        return bool(self._rows(f"SELECT 1 FROM uploads WHERE {IS_WAITING} AND place < ? LIMIT 1", before))

    @renewing
    def require(self, uploads: Collection[QueuedUpload]) -> None:
        """Raise `SupersededError` if one of these uploads was deleted or replaced."""
        numbers = [upload.number for upload in uploads]
        marks = ", ".join("?" * len(numbers))
        ((count,),) = self._rows(f"SELECT count(*) FROM uploads WHERE number IN ({marks})", *numbers) or [(0,)]
        if count < len(numbers):
            raise SupersededError

    @renewing
    def take(self, queued: QueuedUpload) -> Upload:
        """An upload with its bytes. Counts as a try until `put_back` or `settle`.

        Raises `SupersededError`, `GivenUpError` after too many tries, `DocumentsError` without the bytes as they were.
        """
        if queued.tries >= MOST_TRIES and queued.upload.kind != "delete":
            raise GivenUpError(f"given up: {MOST_TRIES} times the server ended, or had no memory, while it was indexed")
        with self._changing() as change:
            row = change.database.execute("SELECT bytes FROM uploads WHERE number = ?", (queued.number,)).fetchone()
            change.database.execute(
                "UPDATE uploads SET tries = tries + 1, state = 'reading' WHERE number = ?", (queued.number,)
            )
        if row is None:
            raise SupersededError
        (name,) = row
        self._mark(name, str(min(queued.tries + 1, MOST_TRIES)))
        if name is None or queued.upload.kind == "delete":
            return queued.upload
        try:
            if says_what_it_is(name):
                upload = read_upload(self.folder / name).upload
                self._require_same(queued, name)
                return upload
            data = (self.folder / name).read_bytes()  # as an earlier version wrote it
        except FileNotFoundError:
            raise DocumentsError(_LOST) from None
        return queued.upload._replace(data=data)

    def _mark(self, name: str | None, mark: str) -> None:
        """Mark the file of an upload, if there is one and it can be written: a list that is lost is made of these marks."""
        with suppress(OSError):
            if name is not None and says_what_it_is(name):
                set_mark(self.folder / name, mark)

    @renewing
    def indexing(self, queued: QueuedUpload) -> None:
        """Note that this upload was read."""
        with self._changing() as change:
            change.database.execute("UPDATE uploads SET state = 'indexing' WHERE number = ?", (queued.number,))

    @renewing
    def put_back(self, uploads: Collection[QueuedUpload]) -> None:
        """Queue unfinished uploads again; the try does not count."""
        with self._changing() as change:
            for queued in uploads:
                change.database.execute(
                    "UPDATE uploads SET tries = max(0, tries - 1), state = 'queued' "
                    "WHERE number = ? AND state != 'queued'",
                    (queued.number,),
                )
                for name in change.files("number = ?", queued.number):
                    self._mark(name, str(min(queued.tries, MOST_TRIES)))

    @renewing
    def settle(
        self, queued: QueuedUpload, state: Literal["ready", "failed"], reason: str = "", *, whole: bool = False
    ) -> None:
        """Delete an upload that is indexed, or keep it with the reason why it failed or what was left out of it.

        whole: keep it with its bytes, to try again.
        """
        with self._changing() as change:
            names = change.files("number = ?", queued.number)
            if reason:
                change.database.execute(
                    "UPDATE uploads SET state = ?, reason = ?, nbytes = 0, bytes = iif(?, bytes, NULL) WHERE number = ?",
                    (state, reason, whole, queued.number),
                )
                if whole:
                    change.mark(names, FAILED)
                else:
                    change.ended.extend(names)
            else:
                change.delete("number = ?", queued.number)
            change.delete(_TOO_OLD, MOST_FAILED)

    def free(self, name: str) -> None:
        """Delete the bytes of the uploads with this id, to make room on a full disk."""
        rows = self._rows("SELECT bytes FROM uploads WHERE id = ? AND kind != 'delete'", name)
        self._unlink(path for (path,) in rows if path is not None)

    @renewing
    def retry(self, name: str) -> bool:
        """Queue the failed upload with this id again; False without one. Raises `ConfigError` if its bytes are not kept."""
        with self._changing(durable=True) as change:
            row = change.database.execute(
                "SELECT number, bytes FROM uploads WHERE id = ? AND state = 'failed' AND kind != 'delete'", (name,)
            ).fetchone()
            if row is None:
                return False
            number, file_name = row
            if file_name is None:
                raise ConfigError(f"{shown(name)} failed because of what it holds, and was not kept: hand it in again")
            nbytes = (self.folder / file_name).stat().st_size
            change.database.execute(
                "UPDATE uploads SET state = 'queued', reason = '', tries = 0, nbytes = ?, place = ? WHERE number = ?",
                (nbytes, number + nbytes // OVERTAKEN, number),
            )
            change.mark([file_name], WAITING)
        return True

    @renewing
    def progress(self) -> dict[str, CacheProgress]:
        """How far the caches of each document are, as the owner noted it last."""
        rows = self._rows("SELECT id, done, total, reason FROM progress")
        return {name: CacheProgress(*counts) for name, *counts in rows}

    @renewing
    def note_progress(self, documents: Mapping[str, CacheProgress], *, anew: bool = False) -> None:
        """Note how far these documents are. anew: and that there are no others."""
        if not documents and not anew:
            return
        with self._changing() as change:
            if anew:
                change.database.execute("DELETE FROM progress")
            rows = [(name, *progress) for name, progress in documents.items()]
            change.database.executemany("INSERT OR REPLACE INTO progress VALUES (?, ?, ?, ?)", rows)

    @renewing
    def gone(self) -> list[Tokens]:
        """Chunks that left the index and whose caches may still exist."""
        return chunks_of(self._rows("SELECT ids FROM gone"))

    @renewing
    def write_gone(self, chunks: Collection[Tokens]) -> None:
        """Record these chunks, or that there are none."""
        if not chunks and not self.gone():
            return
        with self._changing(durable=True) as change:
            change.database.execute("DELETE FROM gone")
            change.database.executemany("INSERT INTO gone VALUES (?)", [(json.dumps(ids),) for ids in chunks])
