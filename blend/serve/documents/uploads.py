"""Uploads: their names and limits, checked when they arrive. Clients are not trusted."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Literal, NamedTuple
from unicodedata import normalize

from blend.errors import ConfigError
from blend.serve.events import QueueFullError
from blend.serve.request import GivenDocument
from blend.text import shown
from blend_retrieval.document import clean, clean_title
from blend_retrieval.errors import DocumentsError
from blend_retrieval.isolated import ReadingLimits
from blend_retrieval.readers import KINDS, SUFFIXES, TEXT_FIELD, has_text_name, kind_of

_LONGEST_ID = 200  # characters
_RETRY_S = 10.0
_DRIVE = re.compile(r"[A-Za-z]:")

UploadKind = Literal["file", "text", "delete"]
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
    """

    kind: UploadKind
    id: str
    title: str = ""
    data: bytes = b""
    reason: str = ""
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


def safe_id(name: str) -> str:
    """A document's id from a client's name: one line, relative, `/` between folders, at most 200 characters.

    Empty if nothing is left of the name. A longer name keeps its end and a digest of all of it.
    """
    name = normalize("NFC", name)
    parts = [clean_title(part) for part in name[-4 * _LONGEST_ID :].replace("\\", "/").split("/")]
    path = "/".join(part for part in parts if part not in ("", ".", "..") and not _DRIVE.fullmatch(part))
    if len(path) <= _LONGEST_ID and len(name) <= 4 * _LONGEST_ID:
        return path
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{digest}~{path[17 - _LONGEST_ID :]}"


def upload_id(name: str) -> str:
    """The id of an upload. It has no #, which separates a record from its file."""
    return safe_id(name).replace("#", "_")


def spellings(name: str) -> tuple[str, ...]:
    """The ids that a client may mean by this name, the likeliest first."""
    return tuple(dict.fromkeys((name, safe_id(name), upload_id(name))))


def file_of(document: str) -> str:
    """The file that a document is or stands in, by the document's id; empty for a text."""
    names = accumulate(document.split("#"), "{}#{}".format)
    return next(filter(_is_file, names), "")


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
    uploads = [_text(place, text, limits.file_bytes) for place, text in enumerate(texts, 1)]
    refused: list[Exception] = []
    for place, file in enumerate(files, 1):
        try:
            uploads.append(_file(file, limits.file_bytes))
        except (ConfigError, DocumentsError) as error:
            refused.append(error)
            name = upload_id(file.name) or f"file {place}"
            uploads.append(Upload("file", name, name, reason=str(error)))
    if len(refused) == number:
        raise refused[0]
    # The id of a text without one is a digest of the text: equal ids are then equal texts.
    named = [upload.id for upload in uploads if upload.kind == "file"] + [
        upload_id(text.id) for text in texts if upload_id(text.id)
    ]
    for name, times in Counter(named).items():
        if times > 1:
            raise ConfigError(f"{times} documents of one request have the id {shown(name)}: give each its own")
    return uploads


def _file(file: UploadedFile, most: int) -> Upload:
    name = upload_id(file.name)
    if kind_of(name) is None:
        raise DocumentsError(f"{shown(name)} is none of the kinds that can be read ({KINDS})")
    return _sized(Upload("file", name, name, file.data, text_field=file.text_field), most)


def _text(place: int, document: GivenDocument, most: int) -> Upload:
    data = clean(document.text).encode()
    if not data.strip():
        raise ConfigError(f"document {place} has no text")
    title = clean_title(document.title)
    digest = hashlib.sha256(title.encode() + b"\0" + data).hexdigest()[:16]
    name = upload_id(document.id) or f"text-{digest}"
    return _sized(Upload("text", name, title or name, data), most)


def _sized(upload: Upload, most: int) -> Upload:
    if len(upload.data) > most:
        raise ConfigError(
            f"the document {shown(upload.id)} has {len(upload.data):,} bytes, at most {most:,} are taken: divide it"
        )
    return upload


def _is_file(name: str) -> bool:
    """Whether this can name a file; the id of a text may look the same."""
    return PurePosixPath(name).suffix.lower() in SUFFIXES or has_text_name(name)
