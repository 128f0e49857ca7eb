"""Archives for the files of `scripts/bench_readers`: the same bytes at any time."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable

XML = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63606060000000040001f61738550000"
    "000049454e44ae426082"
)
_PACKED_AT = (2026, 1, 1, 0, 0, 0)


def packed(files: Iterable[tuple[str, str | bytes]], kind: str = "") -> bytes:
    """A zip archive. kind: the type of the archive, in a first file that is not compressed."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        if kind:
            archive.writestr(zipfile.ZipInfo("mimetype", _PACKED_AT), kind)
        for name, content in files:
            archive.writestr(zipfile.ZipInfo(name, _PACKED_AT), content, zipfile.ZIP_DEFLATED)
    return memory.getvalue()


def repacked(archive: bytes) -> bytes:
    """An archive without the time at which it was packed."""
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        return packed((name, files.read(name)) for name in files.namelist())
