"""Opens zip archives within bounds: office files and e-books.

The directory of an archive may lie. So its sizes are compared with the bounds first, and every part is then unpacked piece by
piece, up to the size that the directory gives.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from itertools import pairwise
from types import TracebackType
from typing import IO

from blend_retrieval.readers.base import UnreadableError

MOST_BYTES = 300 << 20  # unpacked
MOST_RATIO = 200  # unpacked to packed
MOST_PARTS = 50_000
_HARMLESS = 16 << 20  # bytes whose ratio does not matter
_PIECE = 1 << 16
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # those of office files and e-books
_ENTRY = b"PK\x01\x02"  # of the directory
_ENTRY_BYTES = 46  # without the name and what follows it
_END_BYTES = 22  # of the directory's end
_COUNTED_PARTS = 2000
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError)
"""What unpacking a part raises if it is damaged."""


class Archive:
    """An open zip archive whose parts are unpacked within bounds. Use it in a `with` statement.

    Raises `UnreadableError` if it is damaged or encrypted, has too many parts, or would unpack to too much.
    """

    def __init__(self, data: bytes) -> None:
        if data.count(_ENTRY) > MOST_PARTS:
            raise UnreadableError(f"has more than the {MOST_PARTS:,} parts that are read")
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        except (*DAMAGE, ValueError):
            raise UnreadableError(_damage(data)) from None
        entries = self._zip.infolist()
        _check_directory(entries, len(data))
        self._names = {entry.filename: None for entry in entries}

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def names(self) -> list[str]:
        """The names of the parts, in the order of the directory."""
        return list(self._names)

    def open(self, name: str) -> IO[bytes]:
        """A part as a stream. Raises `KeyError` if there is none of this name, or one of `DAMAGE`."""
        return self._zip.open(name)

    def size(self, name: str) -> int:
        """The unpacked bytes of a part by the directory. Raises `KeyError` if there is none of this name."""
        return self._zip.getinfo(name).file_size

    def read(self, name: str) -> bytes:
        """A part's bytes.

        Raises:
            KeyError: there is no such part.
            UnreadableError: it is damaged, or unpacks to another size than the directory gives.
        """
        pieces = []
        try:
            with self.open(name) as stream:
                while piece := stream.read(_PIECE):
                    pieces.append(piece)
        except DAMAGE:
            raise UnreadableError(f"is damaged: {name} cannot be unpacked") from None
        return b"".join(pieces)

    def check_parts(self) -> None:
        """Unpack every part once, without keeping it. Raises `UnreadableError` if one is damaged."""
        for name in self._names:
            try:
                with self.open(name) as stream:
                    while stream.read(_PIECE):
                        pass
            except DAMAGE:
                raise UnreadableError(f"is damaged: {name} cannot be unpacked") from None


def opened_zip(data: bytes) -> Archive:
    """The archive. Raises `UnreadableError` as `Archive` does."""
    return Archive(data)


def declared_size(data: bytes) -> int:
    """The bytes to which an archive unpacks by its directory, of which the first entries count; 0 for other files.

    Cheap, and checks nothing. A part that says nonsense counts as long as it says.
    """
    if not data.startswith(b"PK"):
        return 0
    size = 0
    end = data.rfind(b"PK\x05\x06")
    if end < 0 or end + _END_BYTES > len(data):
        return 0
    place = int.from_bytes(data[end + 16 : end + 20], "little")
    for _ in range(_COUNTED_PARTS):
        if data[place : place + 4] != _ENTRY:
            break
        size += int.from_bytes(data[place + 24 : place + 28], "little")
        lengths = [int.from_bytes(data[at : at + 2], "little") for at in range(place + 28, place + 34, 2)]
        place += _ENTRY_BYTES + sum(lengths)
    return size


def _check_directory(entries: list[zipfile.ZipInfo], packed: int) -> None:
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > MOST_BYTES or (unpacked > _HARMLESS and unpacked > MOST_RATIO * packed):
        raise UnreadableError(f"unpacks to {unpacked:,} bytes: divide it")
    if any(entry.flag_bits & 1 for entry in entries):
        raise UnreadableError("is encrypted; save it without a password")
    if any(entry.compress_type not in _METHODS for entry in entries):
        raise UnreadableError("is packed by a method that such files do not use; save it anew")
    in_order = sorted(entries, key=lambda entry: entry.header_offset)
    for entry, following in pairwise(in_order):
        if entry.header_offset + entry.compress_size >= following.header_offset:
            raise UnreadableError("is damaged: its parts lie on each other")


def _damage(data: bytes) -> str:
    if data.startswith(b"\xd0\xcf\x11\xe0"):  # OLE: the formats of before 2007, and encrypted files of all later ones
        return "is encrypted, or in a format of before 2007; save it anew, without a password"
    return "is damaged: it is no zip archive"
