"""The files of uploads. Each says what it is, so that the list of uploads can be made anew from them.

    <number>-<digest of the id>.upload
        kvblend-upload 1 <mark> <digest of the header> <header>     one line; the header is JSON
        <bytes of the document>

The header holds kind, id, title and text field of the upload, and the number and SHA-256 of its bytes. A deletion has a file
without bytes. An earlier version wrote files that hold the bytes alone, under other names.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import NamedTuple, get_args

from blend.files import temporary_path, write_atomically
from blend.serve.documents.uploads import Upload, UploadKind
from blend_retrieval.errors import DocumentsError

ENDING = ".upload"
WAITING = "0"  # or a digit up to 9: how often the upload was begun and not finished
FAILED = "F"  # and may be tried again
USELESS = "X"  # indexed, replaced or deleted: the file goes
_MAGIC = b"kvblend-upload 1 "
_NAME = re.compile(r"(?P<number>\d{12,})-[0-9a-f]{16}\.upload")
_LINE = re.compile(rb"kvblend-upload 1 (?P<mark>[0-9FX]) (?P<digest>[0-9a-f]{16}) (?P<header>\{.*\})")
_LONGEST_LINE = 1 << 20  # bytes


class UploadDamagedError(DocumentsError):
    """The file of an upload is not as it was written."""

    def __init__(self) -> None:
        super().__init__("what was kept of it is damaged: hand it in again")


class UploadFile(NamedTuple):
    """What a file says of itself.

    Attributes:
        number: counts all uploads.
        mark: `WAITING` or a later digit, `FAILED`, `USELESS`.
        upload: without its bytes.
        nbytes: how many it has.
        digest: the SHA-256 of its bytes.

    """

    number: int
    mark: str
    upload: Upload
    nbytes: int
    digest: str


def file_name(number: int, name: str) -> str:
    """The name of the file of the upload with this number and id."""
    return f"{number:012d}-{_digest(name.encode())}{ENDING}"


def says_what_it_is(name: str) -> bool:
    """Whether a file has a header, by its name."""
    return _NAME.fullmatch(name) is not None


def write_draft(folder: Path, upload: Upload) -> Path:
    """Write an upload under a temporary name. Raises OSError."""
    fields = upload._replace(data=b"", reason="")._asdict()
    fields.update(data=len(upload.data), sha256=hashlib.sha256(upload.data).hexdigest())
    header = json.dumps(fields).encode()
    line = b"%b%b %b %b\n" % (_MAGIC, WAITING.encode(), _digest(header).encode(), header)
    path = temporary_path(folder)
    write_atomically(path, [line, upload.data])
    return path


def read_description(path: Path) -> UploadFile:
    """What a file says of itself. Raises `UploadDamagedError`, OSError."""
    with path.open("rb") as file:
        return _described(path, file.readline(_LONGEST_LINE))


def read_upload(path: Path) -> UploadFile:
    """The same, with the bytes of the upload, which are checked. Raises `UploadDamagedError`, OSError."""
    with path.open("rb") as file:
        described = _described(path, file.readline(_LONGEST_LINE))
        data = file.read()
    if hashlib.sha256(data).hexdigest() != described.digest:
        raise UploadDamagedError
    return described._replace(upload=described.upload._replace(data=data))


def set_mark(path: Path, mark: str, *, durable: bool = False) -> None:
    """Write a file's mark. Raises OSError. durable: it is on the disk at the end."""
    with path.open("r+b", buffering=0) as file:
        file.seek(len(_MAGIC))
        file.write(mark.encode())
        if durable:
            os.fsync(file.fileno())


def _described(path: Path, line: bytes) -> UploadFile:
    name = _NAME.fullmatch(path.name)
    parts = _LINE.fullmatch(line.rstrip(b"\n"))
    if name is None or parts is None or _digest(parts["header"]) != parts["digest"].decode():
        raise UploadDamagedError
    fields = json.loads(parts["header"])
    nbytes = fields.pop("data")
    digest = fields.pop("sha256")
    upload = Upload(**fields)
    number = int(name["number"])
    if upload.kind not in get_args(UploadKind) or path.name != file_name(number, upload.id):
        raise UploadDamagedError
    return UploadFile(number, parts["mark"].decode(), upload, nbytes, digest)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
