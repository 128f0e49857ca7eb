"""What was accepted and is not in the index yet, on disk: a process that is killed goes on with it when it is started again.

    incoming/<number>-<tries>.upload   one line of JSON, then the bytes; the numbers give the order
    incoming/<number>.failed           the same of one that failed, with the reason; with its bytes where they are not at fault
    incoming/gone.json                 token ids of chunks that leave the index, until their caches are removed

Files come to their place whole, for their owner alone, and go as soon as they are of no use. Who reads them is sure of their
content: nobody else may write here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from blend.chunks.library import Tokens
from blend.errors import StoreError
from blend.files import make_private_folder, sweep, write_atomically
from blend.serve.uploads import Upload
from blend_retrieval.errors import DocumentsError

MOST_TRIES, TRIES_TOGETHER = 5, 2
"""How often a process may end while an upload is under way; and how often while several are under way together."""
_NAME = re.compile(r"([0-9]{12})-([0-9])\.upload")
_FAILED = re.compile(r"([0-9]{12})\.failed")

INCOMING = "incoming"  # the folder beside an index


class GivenUpError(DocumentsError):
    """The process ended again and again while it was at this upload."""


class Spool:
    """The folder, which is made when something is first put into it. One thread takes out; any may put in, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        sweep(folder)
        self._next = max((*self.numbers(), *self.failed()), default=0) + 1

    def numbers(self) -> list[int]:
        """Of what waits, in order."""
        return sorted(self._found())

    def put(self, upload: Upload) -> int:
        """Keep it; the number that it got. Raises `StoreError` when it cannot be written."""
        number = self._next
        self._write(f"{number:012}-0.upload", _blobs(upload))
        self._next += 1
        return number

    def head(self, number: int) -> tuple[Upload, int]:
        """What waits under a number, without its bytes, and how many these are."""
        path = self._path(number)
        try:
            with path.open("rb") as file:
                line = file.readline()
                return _parsed(line), file.seek(0, os.SEEK_END) - len(line)
        except (DocumentsError, OSError):  # as taking it will say
            return Upload("file", path.name), 0

    def alone(self, number: int) -> bool:
        """Whether it is to be taken alone: the process ended while it was under way, and others may be innocent."""
        return _tries(self._path(number)) >= TRIES_TOGETHER

    def take(self, number: int) -> Upload:
        """All of it, to be worked upon. A process that ends before `put_back`, `fail` or `remove` counts as a try.

        Raises `DocumentsError` for one that is damaged, `GivenUpError` after too many tries, `OSError`.
        """
        path = self._path(number)
        tries = _tries(path) + 1
        if tries > MOST_TRIES:
            raise GivenUpError(f"given up: the process ended {MOST_TRIES} times while it was read or indexed")
        path = path.rename(path.with_name(f"{number:012}-{tries}.upload"))
        head, _, data = path.read_bytes().partition(b"\n")
        return _parsed(head)._replace(data=data)

    def put_back(self, number: int) -> None:
        """Taken in vain, by nobody's fault. Raises `OSError`."""
        path = self._path(number)
        path.rename(path.with_name(f"{number:012}-{max(0, _tries(path) - 1)}.upload"))

    def fail(self, number: int, upload: Upload, *, whole: bool) -> None:
        """Remember that it failed, and for which reason. whole: with its bytes.

        Raises `StoreError` when that cannot be written; it then waits, and fails again when the process is started anew.
        """
        if whole:
            with suppress(OSError):
                upload = upload._replace(data=self._path(number).read_bytes().partition(b"\n")[2])
        self._write(f"{number:012}.failed", _blobs(upload))
        with suppress(OSError):
            self._path(number).unlink(missing_ok=True)

    def failed(self) -> dict[int, Upload]:
        """What failed, by number and in order, without its bytes."""
        found: dict[int, Upload] = {}
        for number, path in sorted(self._found(_FAILED).items()):
            with suppress(OSError, DocumentsError), path.open("rb") as file:
                found[number] = _parsed(file.readline())
        return found

    def remove(self, number: int) -> None:
        """Nobody needs it any more: it is in the index, or deleted. Raises `OSError`."""
        self._path(number).unlink(missing_ok=True)
        (self.folder / f"{number:012}.failed").unlink(missing_ok=True)

    def gone(self) -> list[Tokens]:
        """Chunks that left the index and whose caches may be there still."""
        try:
            return [tuple(ids) for ids in json.loads((self.folder / "gone.json").read_bytes())]
        except (FileNotFoundError, ValueError):  # a disk that damaged it: nothing says what else there was
            return []

    def write_gone(self, chunks: Collection[Tokens]) -> None:
        """Remember these, or that there are none. Raises `StoreError` when it cannot be written."""
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

    def _found(self, pattern: re.Pattern[str] = _NAME) -> dict[int, Path]:
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
