"""Uploads: checked when they arrive, kept on disk until they are indexed, and read when it is their turn.

Clients are not trusted. The queue is a folder of files:

    incoming/<number>-<tries>.upload   one line of JSON, then the bytes; numbers give the order
    incoming/<number>.failed           the same for a failed upload, with the reason; the bytes stay if they are not at fault
    incoming/gone.json                 token ids of chunks that leave the index, until their caches are removed

Files are written atomically, private to their owner, and deleted as soon as they are useless.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from blend.chunks.library import Tokens
from blend.errors import ConfigError, StoreError
from blend.files import make_private_folder, sweep, write_atomically
from blend.limits import shown
from blend.serve.types import GivenDocument, QueueFullError
from blend_retrieval import Document, LoadedDocuments
from blend_retrieval.document import clean, clean_title
from blend_retrieval.errors import DocumentsError
from blend_retrieval.isolated import IsolatedReader, ReadingLimits
from blend_retrieval.readers import SUFFIXES

INCOMING = "incoming"  # the folder next to an index
LONGEST_ID = 200  # characters
MOST_TRIES = 5  # how often the process may die during an upload
TRIES_TOGETHER = 2  # how often while several uploads are indexed together
_RETRY_S = 10.0
_DRIVE = re.compile(r"[A-Za-z]:")
_WAITING = re.compile(r"([0-9]{12})-([0-9])\.upload")
_FAILED = re.compile(r"([0-9]{12})\.failed")


class UploadedFile(NamedTuple):
    """A file in a format of `blend_retrieval.readers`, under the client's name."""

    name: str
    data: bytes


class Upload(NamedTuple):
    """A change of a corpus.

    id: of a file its name; ids of the documents in it may continue with `#...`.
    reason: why it failed, or what was left out.
    """

    kind: Literal["file", "text", "delete"]
    id: str
    title: str = ""
    data: bytes = b""
    reason: str = ""


@dataclass(frozen=True)
class DocumentLimits:
    """What a corpus accepts.

    file_bytes: of one document. request: documents in one request. documents: in the corpus.
    waiting_bytes: of all that wait to be read. reading: limits of reading one file.
    """

    file_bytes: int = 32 << 20
    request: int = 100
    documents: int = 10_000
    waiting_bytes: int = 512 << 20
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
    parts = [clean_title(part) for part in name[-4 * LONGEST_ID :].replace("\\", "/").split("/")]
    kept = "/".join(part for part in parts if part not in ("", ".", "..") and not _DRIVE.fullmatch(part))
    if len(kept) <= LONGEST_ID and len(name) <= 4 * LONGEST_ID:
        return kept
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{digest}~{kept[17 - LONGEST_ID :]}"


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
    """The documents of one request, checked without reading files.

    Raises `ConfigError` for too many, too large or empty documents, `DocumentsError` for an unsupported kind of file.
    """
    count = len(files) + len(texts)
    if not 0 < count <= limits.request:
        raise ConfigError(f"{count:,} documents in one request: give 1 to {limits.request:,}")
    found = [*map(_file, files), *(_text(number, one) for number, one in enumerate(texts, 1))]
    for upload in found:
        if len(upload.data) > limits.file_bytes:
            raise ConfigError(
                f"the document {shown(upload.id)} has {len(upload.data):,} bytes, at most {limits.file_bytes:,} are "
                "taken: divide it"
            )
    # The id of a text without one is a digest of the text: equal ids are then equal texts.
    named = [upload_id(one.name) for one in files] + [upload_id(one.id) for one in texts if upload_id(one.id)]
    for name, times in Counter(named).items():
        if times > 1:
            raise ConfigError(f"{times} documents of one request have the id {shown(name)}: give each its own")
    return found


def read(upload: Upload, files: IsolatedReader) -> LoadedDocuments:
    """The documents in an upload, and what could not be read. Raises as `files` does."""
    if upload.kind == "file":
        return files.read(upload.id, upload.data)
    return LoadedDocuments((Document(upload.id, upload.title, upload.data.decode(), upload.id),), ())


def _file(file: UploadedFile) -> Upload:
    name = upload_id(file.name)
    if not _is_file(name):
        raise DocumentsError(f"{shown(name)} is none of the kinds that can be read ({' '.join(SUFFIXES)})")
    return Upload("file", name, name, file.data)


def _text(number: int, given: GivenDocument) -> Upload:
    data = clean(given.text).encode()
    if not data.strip():
        raise ConfigError(f"document {number} has no text")
    title = clean_title(given.title)
    digest = hashlib.sha256(title.encode() + b"\0" + data).hexdigest()[:16]
    name = upload_id(given.id) or f"text-{digest}"
    return Upload("text", name, title or name, data)


def _is_file(name: str) -> bool:
    """Whether this can name a file; the id of a text may look the same."""
    return PurePosixPath(name).suffix.lower() in SUFFIXES


class UploadQueue:
    """The folder of uploads that wait or failed. One thread takes uploads; any thread may add, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        sweep(folder)
        self._next = max((*self.numbers(), *self.failed()), default=0) + 1

    def numbers(self) -> list[int]:
        """Numbers of the waiting uploads, in order."""
        return sorted(self._found())

    def put(self, upload: Upload) -> int:
        """Write an upload and return its number. Raises `StoreError` if that fails."""
        number = self._next
        self._write(f"{number:012}-0.upload", _blobs(upload))
        self._next += 1
        return number

    def head(self, number: int) -> tuple[Upload, int]:
        """A waiting upload without its bytes, and how many these are."""
        path = self._path(number)
        try:
            with path.open("rb") as file:
                line = file.readline()
                return _parsed(line), file.seek(0, os.SEEK_END) - len(line)
        except (DocumentsError, OSError):  # `take` raises the same
            return Upload("file", path.name), 0

    def alone(self, number: int) -> bool:
        """Whether to index this upload alone: the process died during it, and the others may be innocent."""
        return _tries(self._path(number)) >= TRIES_TOGETHER

    def take(self, number: int) -> Upload:
        """An upload with its bytes. Counts as a try if the process dies before `put_back`, `fail` or `remove`.

        Raises `DocumentsError` for a damaged file, `GivenUpError` after too many tries, `OSError`.
        """
        path = self._path(number)
        tries = _tries(path) + 1
        if tries > MOST_TRIES:
            raise GivenUpError(f"given up: the process ended {MOST_TRIES} times while it was read or indexed")
        path = path.rename(path.with_name(f"{number:012}-{tries}.upload"))
        head, _, data = path.read_bytes().partition(b"\n")
        return _parsed(head)._replace(data=data)

    def put_back(self, number: int) -> None:
        """Undo `take`: the upload waits again, and the try does not count. Raises `OSError`."""
        path = self._path(number)
        path.rename(path.with_name(f"{number:012}-{max(0, _tries(path) - 1)}.upload"))

    def fail(self, number: int, upload: Upload, *, whole: bool) -> None:
        """Record a failure with its reason. whole: keep the bytes.

        Raises `StoreError` if that cannot be written; the upload then waits, and fails again in the next process.
        """
        if whole:
            with suppress(OSError):
                upload = upload._replace(data=self._path(number).read_bytes().partition(b"\n")[2])
        self._write(f"{number:012}.failed", _blobs(upload))
        with suppress(OSError):
            self._path(number).unlink(missing_ok=True)

    def failed(self) -> dict[int, Upload]:
        """Failed uploads without their bytes, in order."""
        found: dict[int, Upload] = {}
        for number, path in sorted(self._found(_FAILED).items()):
            with suppress(OSError, DocumentsError), path.open("rb") as file:
                found[number] = _parsed(file.readline())
        return found

    def remove(self, number: int) -> None:
        """Delete an upload that is indexed or no longer wanted. Raises `OSError`."""
        self._path(number).unlink(missing_ok=True)
        (self.folder / f"{number:012}.failed").unlink(missing_ok=True)

    def gone(self) -> list[Tokens]:
        """Chunks that left the index and whose caches may still exist."""
        try:
            return [tuple(ids) for ids in json.loads((self.folder / "gone.json").read_bytes())]
        except (FileNotFoundError, ValueError):
            return []

    def write_gone(self, chunks: Collection[Tokens]) -> None:
        """Record these chunks, or that there are none. Raises `StoreError` if that fails."""
        if chunks:
            self._write("gone.json", [json.dumps(list(chunks)).encode()])
        else:
            (self.folder / "gone.json").unlink(missing_ok=True)

    def _write(self, name: str, blobs: list[bytes]) -> None:
        try:
            make_private_folder(self.folder)
            write_atomically(self.folder / name, blobs)
        except OSError as error:
            raise StoreError(f"documents cannot be kept in {self.folder} ({error.strerror or error})") from None

    def _path(self, number: int) -> Path:
        return self._found().get(number) or self.folder / f"{number:012}-0.upload"

    def _found(self, pattern: re.Pattern[str] = _WAITING) -> dict[int, Path]:
        if not self.folder.is_dir():
            return {}
        named = ((pattern.fullmatch(path.name), path) for path in self.folder.iterdir())
        return {int(name[1]): path for name, path in named if name}


def _tries(path: Path) -> int:
    return int(path.stem[-1])


def _blobs(upload: Upload) -> list[bytes]:
    head = {name: value for name, value in upload._asdict().items() if name != "data" and (value or name != "reason")}
    return [json.dumps(head).encode(), b"\n", upload.data]


def _parsed(line: bytes) -> Upload:
    try:
        return Upload(**json.loads(line))
    except (ValueError, TypeError):
        raise DocumentsError("what was kept of it is damaged: hand it in again") from None
