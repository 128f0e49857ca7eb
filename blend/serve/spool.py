"""What was accepted and is not in the index yet, on disk: a process that is killed goes on with it when it is started again.

    incoming/<number>-<tries>.upload   one line of JSON, then the bytes; the numbers give the order
    incoming/gone.json                 token ids of chunks that leave the index, until their caches are removed

Files come to their place whole, for their owner alone, and go as soon as they are of no use. Who reads them is sure of their
content: nobody else may write here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from pathlib import Path

from blend.chunks.open_library import Tokens
from blend.errors import StoreError
from blend.files import sweep, write_atomically
from blend.serve.uploads import Upload
from retrieval.errors import DocumentsError

MOST_TRIES = 5
_NAME = re.compile(r"([0-9]{12})-([0-9])\.upload")


INCOMING = "incoming"  # the folder beside an index


class Spool:
    """The folder, which is made when something is first put into it. One thread takes out; any may put in, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        sweep(folder)
        self._next = max(self.numbers(), default=0) + 1

    def numbers(self) -> list[int]:
        """Of what waits, in order."""
        return sorted(self._found())

    def put(self, upload: Upload) -> int:
        """Keep it; the number that it got. Raises `StoreError` when it cannot be written."""
        number, head = self._next, {"kind": upload.kind, "id": upload.id, "title": upload.title}
        self._write(f"{number:012}-0.upload", [json.dumps(head).encode(), b"\n", upload.data])
        self._next += 1
        return number

    def head(self, number: int) -> tuple[Upload, int]:
        """What waits under a number, without its bytes, and how many these are."""
        path = self._path(number)
        with path.open("rb") as file:
            line = file.readline()
            nbytes = file.seek(0, os.SEEK_END) - len(line)
        try:
            return _parsed(line), nbytes
        except DocumentsError:  # as taking it will say
            return Upload("file", path.name), nbytes

    def take(self, number: int) -> Upload:
        """All of it, to be worked upon.

        Raises `DocumentsError` for one that is damaged, or at which the process has ended again and again.
        """
        path = self._path(number)
        tries = int(path.stem[-1]) + 1
        if tries > MOST_TRIES:
            raise DocumentsError(f"given up: the process ended {MOST_TRIES} times while it was read or indexed")
        path = path.rename(path.with_name(f"{number:012}-{tries}.upload"))
        head, _, data = path.read_bytes().partition(b"\n")
        return _parsed(head)._replace(data=data)

    def put_back(self, number: int) -> None:
        """Taken in vain, by nobody's fault."""
        path = self._path(number)
        path.rename(path.with_name(f"{number:012}-0.upload"))

    def remove(self, number: int) -> None:
        """It is in the index, or failed."""
        self._path(number).unlink(missing_ok=True)

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
            self.folder.mkdir(0o700, parents=True, exist_ok=True)
            write_atomically(self.folder / name, blobs)
        except OSError as error:
            raise StoreError(f"documents cannot be kept in {self.folder} ({error.strerror or error})") from None

    def _path(self, number: int) -> Path:
        return self._found().get(number) or self.folder / f"{number:012}-0.upload"

    def _found(self) -> dict[int, Path]:
        if not self.folder.is_dir():
            return {}
        named = ((_NAME.fullmatch(path.name), path) for path in self.folder.iterdir())
        return {int(name[1]): path for name, path in named if name}


def _parsed(line: bytes) -> Upload:
    try:
        return Upload(**json.loads(line))
    except (ValueError, TypeError):
        raise DocumentsError("what was kept of it is damaged: hand it in again") from None
