"""The lines of a log, whatever its packing, its encoding and its damage, in bounded memory.

A log is read in blocks: unpacked, brought to UTF-8, and divided into lines. `LogLines` says what was not read.
"""

from __future__ import annotations

import codecs
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

LONGEST_LINE = 16 << 20
"""Bytes. Parsed, a line takes up to twenty times its size."""
_BLOCK_BYTES = 1 << 20
_PACKED_BYTES = 1 << 16  # that are unpacked at a time
_GZIP = b"\x1f\x8b"
_PIPED = "pipe it: {command} | blend census -"
_NO_LOGS = {
    b"\x28\xb5\x2f\xfd": f"is packed with zstd; {_PIPED.format(command='zstdcat {name}')}",
    b"BZh": f"is packed with bzip2; {_PIPED.format(command='bzcat {name}')}",
    b"\xfd7zXZ\0": f"is packed with xz; {_PIPED.format(command='xzcat {name}')}",
    b"\x04\x22\x4d\x18": f"is packed with lz4; {_PIPED.format(command='lz4cat {name}')}",
    b"PK\x03\x04": f"is a zip archive; {_PIPED.format(command='unzip -p {name}')}",
    b"PAR1": "is a Parquet file; write its requests as JSON lines first",
    b"SQLite format 3\0": "is an SQLite database; write its requests as JSON lines first",
    b"%PDF-": "is a PDF, no log",
}
_PACKED_TWICE = f"is packed twice; {_PIPED.format(command='zcat {name} | zcat')}"
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_WIDE = {"utf-32-le": 4, "utf-32-be": 4, "utf-16-le": 2, "utf-16-be": 2}  # bytes of a character
_HEAD_BYTES = 16
_SAMPLE_BYTES = 4096
_CONTROLS = bytes({*range(32)} - {*b"\t\n\r\x1b"})
_CONTROL_SHARE = 0.05  # of text's bytes, at most
_BLANKS = b"\0\t\n\r "  # in front of a record; a log that was cut while it was written begins with NULs


class Line(NamedTuple):
    """A line of a log. data: without its end, in UTF-8; empty if it is longer than `LONGEST_LINE`. nbytes: its length."""

    number: int
    data: bytes
    nbytes: int


class LogLines:
    """The lines of one log. problem: after they were read, why the rest of the log was not; else empty."""

    def __init__(self, name: str, stream: BufferedReader) -> None:
        self.problem = ""
        self._name = name
        self._stream = stream

    def __iter__(self) -> Iterator[Line]:
        blocks = self._blocks()
        head = next(blocks, b"")
        for start, problem in (*_NO_LOGS.items(), (_GZIP, _PACKED_TWICE)):
            if head.startswith(start):
                self.problem = problem.format(name=self._name)
                return
        if _is_binary(head[:_SAMPLE_BYTES].lstrip(_BLANKS)):
            self.problem = "is a binary file, no log"
            return
        yield from _lines(_utf8(_with_head(head, blocks)))

    def _blocks(self) -> Iterator[bytes]:
        """The log's bytes, unpacked, none of them empty. The first block has all bytes of the head, if there are so many."""
        is_packed = self._stream.peek(len(_GZIP))[: len(_GZIP)] == _GZIP
        blocks = self._unpacked() if is_packed else self._raw(_BLOCK_BYTES)
        head = b""
        for block in blocks:
            head += block
            if len(head) >= _HEAD_BYTES:
                break
        if head:
            yield head
        yield from blocks

    def _raw(self, nbytes: int) -> Iterator[bytes]:
        """The bytes of the file as they are."""
        offset = 0
        try:
            while block := self._stream.read1(nbytes):
                offset += len(block)
                yield block
        except OSError as error:
            self.problem = f"cannot be read behind byte {offset:,} ({error.strerror or error})"
        else:
            self._check_size(offset)

    def _check_size(self, offset: int) -> None:
        """Note that a file was cut while it was read."""
        try:
            status = os.fstat(self._stream.fileno())
        except OSError:  # no file of the system
            return
        if stat.S_ISREG(status.st_mode) and self._stream.tell() > status.st_size:
            self.problem = f"was cut to {status.st_size:,} bytes while it was read, behind byte {offset:,}"

    def _unpacked(self) -> Iterator[bytes]:
        """The bytes of all members of a gzip file, up to the first damage."""
        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        offset = 0
        packed = self._raw(_PACKED_BYTES)
        for block in packed:
            offset += len(block)
            if member.eof:
                block = block.lstrip(b"\0")  # padding
            while block:
                begin = offset - len(block)
                if member.eof:
                    if not _GZIP.startswith(block[: len(_GZIP)]):
                        self.problem = f"holds other data than gzip from byte {begin:,} on, which was not read"
                        return
                    member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
                intact = member.copy()
                try:
                    data = member.decompress(block, _BLOCK_BYTES)
                except zlib.error as error:
                    yield from _before_damage(intact, block)
                    self.problem = (
                        f"is damaged at about byte {begin:,} of the gzip file ({error}); what follows was not read"
                    )
                    return
                if data:
                    yield data
                block = member.unused_data.lstrip(b"\0") if member.eof else member.unconsumed_tail
        if not member.eof:
            self.problem = (
                self.problem or f"is cut short: the gzip file ends at byte {offset:,} in the middle of its data"
            )


def _before_damage(member: zlib._Decompress, block: bytes) -> Iterator[bytes]:
    """What of this block can be unpacked in front of its damage."""
    for nbytes in (4096, 64, 1):
        with suppress(zlib.error):
            while True:
                intact = member.copy()
                yield member.decompress(block, nbytes)
                block = member.unconsumed_tail
        member = intact


def unreadable(log: Path) -> str:
    """Why a file that is there can be no log, in words behind its name; empty if it can be one."""
    if log.is_dir():
        return "is a folder; name the logs in it"
    if not os.access(log, os.R_OK):
        return "cannot be read; its owner can allow it: chmod u+r"
    if not log.is_file():  # opening a pipe would wait for what is written to it
        return ""
    with log.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
    return next((problem.format(name=log) for start, problem in _NO_LOGS.items() if head.startswith(start)), "")


def _with_head(head: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
    if head:
        yield head
    yield from blocks


def _is_binary(sample: bytes) -> bool:
    """Whether bytes are no text in any encoding."""
    controls = len(sample) - len(sample.translate(None, _CONTROLS))
    return _encoding(sample) == "utf-8" and controls > _CONTROL_SHARE * len(sample)


def _utf8(blocks: Iterator[bytes]) -> Iterator[bytes]:
    r"""Blocks in UTF-8. Damage in UTF-16 and UTF-32 becomes `\x..`, which is no JSON."""
    head = next(blocks, b"")
    encoding = _encoding(head)
    if encoding == "utf-8":
        yield from _with_head(head, blocks)
        return
    decoder = codecs.getincrementaldecoder(encoding)("backslashreplace")
    for block in _with_head(head, blocks):
        yield decoder.decode(block).encode()
    yield decoder.decode(b"", final=True).encode()


def _encoding(head: bytes) -> str:
    """The encoding that a log begins in: by its mark, or as the first two characters of JSON in ASCII have their zeros."""
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return encoding
    for encoding, width in _WIDE.items():
        text = head[: 2 * width].decode(encoding, "replace")
        if len(text) == 2 and text.isascii() and "\0" not in text:
            return encoding
    return "utf-8"


def _lines(blocks: Iterable[bytes]) -> Iterator[Line]:
    """Lines that end with LF, CR or both; no string of JSON holds them."""
    number = 1
    pieces = list[bytes]()
    nbytes = 0
    for block in _whole_ends(blocks):
        if not nbytes and not block.strip(_BLANKS):  # a bomb of empty lines
            number += block.count(b"\n") + block.count(b"\r") - block.count(b"\r\n")
            continue
        for piece in block.splitlines(keepends=True):
            data = piece.rstrip(b"\r\n")
            if not nbytes:
                data = data.lstrip(_BLANKS)
            nbytes += len(data)
            if nbytes <= LONGEST_LINE:
                pieces.append(data)
            else:
                pieces.clear()
            if piece.endswith((b"\r", b"\n")):
                yield Line(number, b"".join(pieces), nbytes)
                number += 1
                pieces.clear()
                nbytes = 0
    if nbytes:
        yield Line(number, b"".join(pieces), nbytes)


def _whole_ends(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes; no block ends between CR and LF."""
    carried = b""
    for block in blocks:
        joined = carried + block
        carried = joined[-1:] if joined.endswith(b"\r") else b""
        yield joined[: len(joined) - len(carried)]
    if carried:
        yield carried
