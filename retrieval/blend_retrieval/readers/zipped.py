"""Opens zip archives within bounds: office files and e-books."""

from __future__ import annotations

import io
import zipfile

from blend_retrieval.readers.base import UnreadableError

MOST_BYTES = 300 << 20  # unpacked
MOST_RATIO = 200  # unpacked to packed
_HARMLESS = 16 << 20  # bytes whose ratio does not matter


def opened_zip(data: bytes) -> zipfile.ZipFile:
    """The archive. Raises `UnreadableError` if it is damaged or encrypted, or would unpack to too much."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        raise UnreadableError(_damage(data)) from None
    unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > MOST_BYTES or (unpacked > _HARMLESS and unpacked > MOST_RATIO * len(data)):
        raise UnreadableError(f"unpacks to {unpacked:,} bytes: divide it")
    if any(entry.flag_bits & 1 for entry in archive.infolist()):
        raise UnreadableError("is encrypted; save it without a password")
    return archive


def _damage(data: bytes) -> str:
    if data.startswith(b"\xd0\xcf\x11\xe0"):  # OLE: the formats of before 2007, and encrypted files of all later ones
        return "is encrypted, or in a format of before 2007; save it anew, without a password"
    return "is damaged: it is no zip archive"
