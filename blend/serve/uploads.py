"""Uploads: checked when they arrive, kept on disk until they are indexed, and read when it is their turn.

Clients are not trusted. The queue is a folder of files:

    incoming/<number>-<tries>.upload   one line of JSON, then the bytes; numbers give the order
    incoming/<number>.failed           the same for a failed upload, with the reason; the bytes stay if they are not at fault
    incoming/gone.json                 token ids of chunks that leave the index, until their caches are deleted

Files are written atomically, private to their owner, and deleted as soon as they are useless.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple
from unicodedata import normalize

from blend.errors import ConfigError, StoreError, StoreNotWritableError
from blend.files import make_private_folder, sweep, write_atomically
from blend.limits import shown
from blend.serve.types import GivenDocument, QueueFullError
from blend.types import Tokens
from blend_retrieval.document import clean, clean_title
from blend_retrieval.errors import DocumentsError
from blend_retrieval.isolated import ReadingLimits
from blend_retrieval.readers import KINDS, SUFFIXES, TEXT_FIELD

INCOMING = "incoming"  # the folder next to an index
_LONGEST_ID = 200  # characters
MOST_TRIES = 5  # how often the process may die during an upload
MOST_FAILED = 1000  # failures to remember
_TRIES_TOGETHER = 2  # how often while several uploads are indexed together
_RETRY_S = 10.0
_DRIVE = re.compile(r"[A-Za-z]:")
_WAITING = re.compile(r"[0-9]{12}-[0-9]\.upload")
_FAILED = re.compile(r"[0-9]{12}\.failed")
_DAMAGED = "what was kept of it is damaged: hand it in again"

DocumentState = Literal["queued", "reading", "indexing", "computing", "ready", "failed"]


class DocumentStatus(NamedTuple):
    """A document, or a file that is not read yet.

    Attributes:
        chunks: chunks that can be retrieved now, also while a new version is being indexed.
        tokens_done, tokens_total: tokens of its caches; a chunk has one or two.
        reason: why it failed, or what was left out of it.

    """

    id: str
    title: str
    state: DocumentState
    chunks: int = 0
    tokens_done: int = 0
    tokens_total: int = 0
    reason: str = ""


class UploadedFile(NamedTuple):
    """A file in a format of `blend_retrieval.readers`, under the client's name.

    text_field: the field of JSONL records that holds their text.
    """

    name: str
    data: bytes
    text_field: str = TEXT_FIELD


class Upload(NamedTuple):
    """A change of a corpus.

    id: of a file its name; ids of the documents in it may continue with `#...`.
    reason: why it failed, or what was left out.
    is_read: whether it was read nevertheless.
    """

    kind: Literal["file", "text", "delete"]
    id: str
    title: str = ""
    data: bytes = b""
    reason: str = ""
    is_read: bool = False
    text_field: str = TEXT_FIELD


@dataclass(frozen=True)
class DocumentLimits:
    """What a corpus accepts."""

    file_bytes: int = 32 << 20  # of one document
    request: int = 100  # documents in one request
    documents: int = 10_000  # in the corpus
    waiting_bytes: int = 512 << 20  # of all that wait to be read
    reading: ReadingLimits = field(default_factory=ReadingLimits)


class UploadsFullError(QueueFullError):
    """Too many bytes wait to be read."""

    def __init__(self, nbytes: int) -> None:
        Exception.__init__(self, f"{nbytes >> 20} MiB of documents wait to be read; try again in {_RETRY_S:.0f} s")
        self.retry_after_s = _RETRY_S


class GivenUpError(DocumentsError):
    """The process died again and again during this upload."""


def safe_id(name: str) -> str:
    """A document's id from a client's name: one line, relative, `/` between folders, at most 200 characters.

    Empty if nothing is left of the name. A longer name keeps its end and a digest of all of it.
    """
    name = normalize("NFC", name)
    parts = [clean_title(part) for part in name[-4 * _LONGEST_ID :].replace("\\", "/").split("/")]
    kept = "/".join(part for part in parts if part not in ("", ".", "..") and not _DRIVE.fullmatch(part))
    if len(kept) <= _LONGEST_ID and len(name) <= 4 * _LONGEST_ID:
        return kept
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{digest}~{kept[17 - _LONGEST_ID :]}"


def upload_id(name: str) -> str:
    """The id of an upload. It has no #, which separates a record from its file."""
    return safe_id(name).replace("#", "_")


def spellings(name: str) -> tuple[str, ...]:
    """The ids that a client may mean by this name, the likeliest first."""
    return tuple(dict.fromkeys((name, safe_id(name), upload_id(name))))


def part_of(document: str, upload: str) -> bool:
    """Whether a document is this upload, or a record of this file."""
    return document == upload or (document.startswith(f"{upload}#") and _is_file(upload))


def checked(files: Sequence[UploadedFile], texts: Sequence[GivenDocument], limits: DocumentLimits) -> list[Upload]:
    """The documents of one request, checked without reading files; a bad file among good ones has a reason.

    Raises as `Documents.add` does.
    """
    number = len(files) + len(texts)
    if not 0 < number <= limits.request:
        raise ConfigError(f"{number:,} documents in one request: give 1 to {limits.request:,}")
    found = [_text(place, text, limits.file_bytes) for place, text in enumerate(texts, 1)]
    refused: list[Exception] = []
    for place, file in enumerate(files, 1):
        try:
            found.append(_file(file, limits.file_bytes))
        except (ConfigError, DocumentsError) as error:
            refused.append(error)
            name = upload_id(file.name) or f"file {place}"
            found.append(Upload("file", name, name, reason=str(error)))
    if len(refused) == number:
        raise refused[0]
    # The id of a text without one is a digest of the text: equal ids are then equal texts.
    named = [upload.id for upload in found if upload.kind == "file"] + [
        upload_id(one.id) for one in texts if upload_id(one.id)
    ]
    for name, times in Counter(named).items():
        if times > 1:
            raise ConfigError(f"{times} documents of one request have the id {shown(name)}: give each its own")
    return found


def _file(file: UploadedFile, most: int) -> Upload:
    name = upload_id(file.name)
    if not _is_file(name):
        raise DocumentsError(f"{shown(name)} is none of the kinds that can be read ({KINDS})")
    return _sized(Upload("file", name, name, file.data, text_field=file.text_field), most)


def _text(place: int, given: GivenDocument, most: int) -> Upload:
    data = clean(given.text).encode()
    if not data.strip():
        raise ConfigError(f"document {place} has no text")
    title = clean_title(given.title)
    digest = hashlib.sha256(title.encode() + b"\0" + data).hexdigest()[:16]
    name = upload_id(given.id) or f"text-{digest}"
    return _sized(Upload("text", name, title or name, data), most)


def _sized(upload: Upload, most: int) -> Upload:
    if len(upload.data) > most:
        raise ConfigError(
            f"the document {shown(upload.id)} has {len(upload.data):,} bytes, at most {most:,} are taken: divide it"
        )
    return upload


def _is_file(name: str) -> bool:
    """Whether this can name a file; the id of a text may look the same."""
    return PurePosixPath(name).suffix.lower() in SUFFIXES


@dataclass(eq=False)
class QueuedUpload:
    """An upload in the queue.

    Attributes:
        path: its file.
        upload: the change without its bytes, of which there are `nbytes`.
        alone: whether it is indexed without others: one of them is at fault, or they are too large together.
        done: completes when it is indexed, or with the error.

    """

    path: Path
    upload: Upload
    nbytes: int
    state: DocumentState = "queued"
    done: Future[None] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.alone = self.tries >= _TRIES_TOGETHER  # the process died during it, and others may be innocent
        self.done.set_running_or_notify_cancel()  # so that no waiter can cancel it

    @property
    def number(self) -> int:
        """Its place in the order."""
        return int(self.path.name[:12])

    @property
    def tries(self) -> int:
        """How often it was begun and not finished."""
        return int(self.path.stem[13:] or 0)


class UploadQueue:
    """The folder of uploads. `take` and `put` work on files alone; a lock of the caller guards all else.

    waiting: in order. failed: by id, with files that were read in part.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        sweep(folder)
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        self.waiting = [_opened(path) for path in files if _WAITING.fullmatch(path.name)]
        self.failed: dict[str, QueuedUpload] = {}
        for path in files:
            if _FAILED.fullmatch(path.name):
                self._remember(_opened(path))
        last = max((one.number for one in (*self.waiting, *self.failed.values())), default=0)
        self._numbers = count(last + 1)

    def put(self, uploads: Sequence[Upload]) -> list[QueuedUpload]:
        """Write all uploads, or none; they are not `waiting` yet. Raises `StoreError`."""
        written: list[QueuedUpload] = []
        try:
            for upload in uploads:
                path = self.folder / f"{next(self._numbers):012}-0.upload"
                self._write(path, _blobs(upload))
                written.append(QueuedUpload(path, upload._replace(data=b""), len(upload.data)))
        except BaseException:
            for one in written:
                _unlink(one.path)
            raise
        return written

    def take(self, one: QueuedUpload) -> Upload:
        """An upload with its bytes. Counts as a try if the process dies before `put_back` or `settle`.

        Raises `DocumentsError` for a damaged file, `GivenUpError` after too many tries, `OSError`.
        """
        if one.tries >= MOST_TRIES:
            raise GivenUpError(f"given up: the process ended {MOST_TRIES} times while it was read or indexed")
        _rename(one, one.tries + 1)
        head, _, data = one.path.read_bytes().partition(b"\n")
        return _parsed(head)._replace(data=data)

    def put_back(self, uploads: Collection[QueuedUpload]) -> None:
        """Queue unfinished uploads again, each alone and behind the others; those of one file keep their order."""
        left = [one for one in uploads if not one.done.done()]
        for one in left:
            if one.state != "queued":
                with suppress(OSError):  # a read-only folder
                    _rename(one, max(0, one.tries - 1))
            one.state, one.alone = "queued", True
        files = {_file_of(one) for one in left}
        self.waiting.sort(key=lambda one: _file_of(one) in files)

    def refuse(self, upload: Upload) -> None:
        """Remember an upload that is not taken, with its reason. Raises `StoreError`."""
        path = self.folder / f"{next(self._numbers):012}.failed"
        self._write(path, _blobs(upload))
        self._remember(QueuedUpload(path, upload, 0))

    def settle(self, one: QueuedUpload, reason: str = "", *, failed: bool = False, whole: bool = False) -> None:
        """Delete an upload that is indexed, or keep it as failed with this reason. whole: with its bytes.

        reason: without `failed`, what was left out of it.
        """
        one.upload = one.upload._replace(is_read=one.upload.is_read and not failed)
        self.waiting.remove(one)
        kind, name = one.upload.kind, one.upload.id
        if kind == "delete":
            for other in [] if failed else [other for other in self.failed if part_of(other, name)]:
                self.forget(other)
        else:
            self.forget(name)
            if reason:
                self._keep(one, reason, whole=whole)
                return
        _unlink(one.path)

    def forget(self, name: str) -> None:
        """Delete the failed upload with this id."""
        if one := self.failed.pop(name, None):
            _unlink(one.path)

    def gone(self) -> list[Tokens]:
        """Chunks that left the index and whose caches may still exist."""
        try:
            return [tuple(ids) for ids in json.loads((self.folder / "gone.json").read_bytes())]
        except (FileNotFoundError, ValueError):
            return []

    def write_gone(self, chunks: Collection[Tokens]) -> None:
        """Record these chunks, or that there are none. Raises `StoreError` if that fails."""
        path = self.folder / "gone.json"
        if chunks:
            self._write(path, [json.dumps(list(chunks)).encode()])
        elif path.exists():  # a read-only file system refuses to delete what is not there, too
            path.unlink(missing_ok=True)

    def _keep(self, one: QueuedUpload, reason: str, *, whole: bool) -> None:
        data, path = b"", one.path.with_name(f"{one.number:012}.failed")
        one.upload = one.upload._replace(reason=reason)
        with suppress(OSError, StoreError):  # on a full disk it waits, and fails again in the next process
            if whole:
                data = one.path.read_bytes().partition(b"\n")[2]
            self._write(path, _blobs(one.upload._replace(data=data)))
            one.path.unlink()
            one.path = path
        self._remember(one)

    def _remember(self, one: QueuedUpload) -> None:
        self.forget(one.upload.id)
        self.failed[one.upload.id] = one
        while len(self.failed) > MOST_FAILED:
            self.forget(next(iter(self.failed)))

    def _write(self, path: Path, blobs: list[bytes]) -> None:
        try:
            make_private_folder(self.folder)
            write_atomically(path, blobs)
        except OSError as error:
            problem = f"documents cannot be kept in {self.folder} ({error.strerror or error})"
            raise StoreNotWritableError(problem) from None


def _opened(path: Path) -> QueuedUpload:
    """An upload of an earlier process; a damaged one fails when it is taken."""
    try:
        with path.open("rb") as file:
            line = file.readline()
            return QueuedUpload(path, _parsed(line), path.stat().st_size - len(line))
    except (DocumentsError, OSError):
        return QueuedUpload(path, Upload("file", path.name, reason=_DAMAGED), 0)


def _rename(one: QueuedUpload, tries: int) -> None:
    one.path = one.path.rename(one.path.with_name(f"{one.number:012}-{tries}.upload"))


def _unlink(path: Path) -> None:
    with suppress(OSError):  # a read-only folder: the next process repeats the upload, with the same result
        path.unlink()


def _file_of(one: QueuedUpload) -> str:
    return one.upload.id.partition("#")[0]


def _blobs(upload: Upload) -> list[bytes]:
    head = {name: value for name, value in upload._asdict().items() if name != "data" and (value or name == "title")}
    return [json.dumps(head).encode(), b"\n", upload.data]


def _parsed(line: bytes) -> Upload:
    try:
        return Upload(**json.loads(line))
    except (ValueError, TypeError):
        raise DocumentsError(_DAMAGED) from None
