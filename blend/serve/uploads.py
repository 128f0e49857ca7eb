"""What clients hand in to a corpus: checked when it comes, read when its turn has come. Nothing of it is to be trusted."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

from blend.errors import ConfigError
from blend.limits import shown
from blend.serve.types import GivenDocument, QueueFullError
from blend_retrieval import Document, LoadedDocuments
from blend_retrieval.apart import ApartReader, ReadingLimits
from blend_retrieval.cleaning import clean, clean_title
from blend_retrieval.errors import DocumentsError
from blend_retrieval.readers import SUFFIXES

LONGEST_ID = 200  # characters
_DRIVE = re.compile(r"[A-Za-z]:")
_RETRY_S = 10.0


class UploadedFile(NamedTuple):
    """A file of one of the formats of `blend_retrieval.readers`, under the name that the client gives it."""

    name: str
    data: bytes


class Upload(NamedTuple):
    """Something that is to happen to a corpus. id: of a file its name; the documents in it may have `#...` behind it.

    reason: why it failed, or what of it was left out.
    """

    kind: Literal["file", "text", "delete"]
    id: str
    title: str = ""
    data: bytes = b""
    reason: str = ""


@dataclass(frozen=True)
class DocumentLimits:
    """What a room takes. file_bytes: of one document. request: documents at a time. documents: of the corpus.

    waiting_bytes: of all that wait to be read. reading: what it may take to read a file.
    """

    file_bytes: int = 32 << 20
    request: int = 100
    documents: int = 10_000
    waiting_bytes: int = 512 << 20
    reading: ReadingLimits = field(default_factory=ReadingLimits)


class UploadsFullError(QueueFullError):
    """More waits to be read than may: nobody's mistake."""

    def __init__(self, nbytes: int) -> None:
        Exception.__init__(self, f"{nbytes >> 20} MiB of documents wait to be read; try again in {_RETRY_S:.0f} s")
        self.retry_after_s = _RETRY_S


def safe_id(name: str) -> str:
    """A document's id out of whatever a client calls it: one line, relative, `/` between folders, 200 characters at most.

    Empty where nothing is left of the name. A longer one keeps its end and a digest of all of it.
    """
    parts = [clean_title(part) for part in name[-4 * LONGEST_ID :].replace("\\", "/").split("/")]
    kept = "/".join(part for part in parts if part not in ("", ".", "..") and not _DRIVE.fullmatch(part))
    if len(kept) <= LONGEST_ID and len(name) <= 4 * LONGEST_ID:
        return kept
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{digest}~{kept[17 - LONGEST_ID :]}"


def upload_id(name: str) -> str:
    """The id of what is uploaded under this name. What stands behind a # in an id names a record of a file."""
    return safe_id(name).replace("#", "_")


def spellings(name: str) -> tuple[str, ...]:
    """The ids that what a client calls by this name may have, the likeliest first: as it was told, or as it called it."""
    return tuple(dict.fromkeys((name, safe_id(name), upload_id(name))))


def checked(files: Sequence[UploadedFile], texts: Sequence[GivenDocument], limits: DocumentLimits) -> list[Upload]:
    """The documents of one request, as far as can be said without reading them.

    Raises `ConfigError` for too many, too large or empty ones, `DocumentsError` for a kind of file that cannot be read.
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
    # Texts without an id have one of what they say: where these are the same, so are the texts.
    named = [upload_id(one.name) for one in files] + [upload_id(one.id) for one in texts if upload_id(one.id)]
    for name, times in Counter(named).items():
        if times > 1:
            raise ConfigError(f"{times} documents of one request have the id {shown(name)}: give each its own")
    return found


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


def read(upload: Upload, files: ApartReader) -> LoadedDocuments:
    """The documents in an upload, and what could not be read. Raises as `files` does."""
    if upload.kind == "file":
        return files.read(upload.id, upload.data)
    return LoadedDocuments((Document(upload.id, upload.title, upload.data.decode(), upload.id),), ())


def part_of(document: str, upload: str) -> bool:
    """Whether the document of this id is the one that was uploaded under that id, or a record of that file."""
    return document == upload or (document.startswith(f"{upload}#") and _is_file(upload))


def _is_file(name: str) -> bool:
    """Whether this can name a file that is read; the name of a text may look the same."""
    return PurePosixPath(name).suffix.lower() in SUFFIXES
