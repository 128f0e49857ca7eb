"""Decodes text files, whatever their encoding."""

from __future__ import annotations

import codecs
import re
from contextlib import suppress
from typing import NamedTuple
from unicodedata import category, name

_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Files that say ASCII, Latin-1 or GB 2312 are in these supersets, as every browser assumes.
_SUPERSETS = {"ascii": "windows-1252", "iso8859-1": "windows-1252", "gb2312": "gb18030", "gbk": "gb18030"}
_NO_CHARSETS = ("idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape")  # codecs of Python's own
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_UTF8_LETTER = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
_LEAST_EVIDENCE = 16  # bytes; a word alone may be one of several languages
_EVIDENCE = 1 << 18  # bytes of lines outside ASCII
MAX_CONTROL_SHARE, _FEW = 0.01, 4
_UNMARKED = ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")
_NO_TEXT = {"Cc", "Cn", "Co", "Cs"}  # categories of characters: controls, unassigned, private, half a surrogate pair
_ASCII = re.compile(r"[\t\n\f\r -~]")
# Blanks; punctuation of East Asia, and kana, which stand between kanji.
_BETWEEN_WORDS = re.compile(r"[\t\n\r \u3001\u3002\u300c\u300d\u3041-\u30ff\uff01\uff0c\uff1a\uff1f]")
_EAST_ASIAN = re.compile(r"[\u3000-\u30ff\u4e00-\u9fff\uff01-\uff5e]+")
_FOREIGN_SHARE = 0.25  # outside ASCII, at most, in Latin letters
_LEAST_BETWEEN, _BETWEEN_SHARE = 2, 0.02
_MOST_SCRIPTS = 4  # Japanese has kanji, hiragana, katakana and Latin


class DecodingError(ValueError):
    """The bytes are no text, or text in an unknown encoding; the message is the reason."""


class BinaryError(DecodingError):
    """The bytes are no text."""

    def __init__(self) -> None:
        super().__init__("is a binary file, not text")


class Decoded(NamedTuple):
    """A file's text. note: how it was read, if its encoding was detected."""

    text: str
    note: str = ""


def decode(data: bytes, declared: str = "") -> Decoded:
    """The text of a file: by its byte order mark, its declared encoding, as UTF-8, or in the encoding that is detected.

    UTF-16 and UTF-32 without a mark are read if no other reading makes sense.

    declared: the encoding that the file names, or "".
    Raises `DecodingError` for a binary file, and for bytes whose encoding cannot be told for certain.
    """
    mark = marked_encoding(data, "")
    if not mark and b"\0" in data:
        return _unmarked(data)
    for encoding in filter(None, (mark, _superset(declared), "utf-8")):
        with suppress(UnicodeDecodeError, LookupError):
            return Decoded(_checked(data.decode(encoding)))
    if mark:
        raise DecodingError(f"is damaged: it opens as {mark} text, but is none")
    with suppress(DecodingError):
        return _unmarked(data)
    encoding = _detected(data)
    text = _checked(data.decode(encoding))
    return Decoded(text, f"is read as {encoding}: it is not UTF-8, and names no other encoding")


def marked_encoding(head: bytes, unmarked: str = "utf-8") -> str:
    """The encoding that the byte order mark of a file names, or `unmarked`. head: its first four bytes, or more."""
    return next((encoding for bom, encoding in _BOMS if head.startswith(bom)), unmarked)


def _superset(declared: str) -> str:
    """The codec for a declared encoding. A file whose declaration can be read is not in UTF-16, whatever it says."""
    try:
        codec = codecs.lookup(declared).name
    except LookupError:
        return ""
    is_wide = codec.startswith(("utf-16", "utf-32"))
    if is_wide or codec.replace("_", "-") in _NO_CHARSETS:
        return ""
    return _SUPERSETS.get(codec, codec)


def _checked(text: str) -> str:
    most_controls = max(_FEW, MAX_CONTROL_SHARE * len(text))
    if len(_CONTROL.findall(text)) > most_controls:
        raise BinaryError
    return text


def _unmarked(data: bytes) -> Decoded:
    """A text in UTF-16 or UTF-32 without a byte order mark. Raises `DecodingError` if it is not unmistakable."""
    if len(data) >= _LEAST_EVIDENCE:
        readings = []
        for encoding in _UNMARKED:
            with suppress(UnicodeDecodeError):
                text = data.decode(encoding)
                if _is_unmistakable(text, data):
                    readings.append(Decoded(text, f"is read as {encoding}: it has no byte order mark"))
        if len(readings) == 1:
            return readings[0]
    raise BinaryError


def _is_unmistakable(text: str, data: bytes) -> bool:
    """Whether this reading of the bytes, in units of two or four of them, is certainly a text.

    Bytes in the wrong order, numbers and other encodings give characters that no text has, letters of many scripts, or
    nothing between words. Without a NUL nearly any bytes are characters of East Asia, so nothing else may be among them.
    """
    foreign = _ASCII.sub("", text)
    letters = set(foreign)
    if any(category(letter) in _NO_TEXT for letter in letters):
        return False
    if len(foreign) <= _FOREIGN_SHARE * len(text):
        return True
    between = len(text) - len(_BETWEEN_WORDS.sub("", text))
    if between < max(_LEAST_BETWEEN, _BETWEEN_SHARE * len(text)):
        return False
    if b"\0" not in data:
        return _EAST_ASIAN.fullmatch(text) is not None
    scripts = {name(letter).split()[0] for letter in letters if letter.isalpha()}
    return len(scripts) <= _MOST_SCRIPTS and not _is_utf8(data.replace(b"\0", b""))


def _is_utf8(data: bytes) -> bool:
    with suppress(ValueError):
        _checked(data.decode())
        return True
    return False


def _detected(data: bytes) -> str:
    """The encoding in which two independent detectors read the same text. Raises `DecodingError` if they do not."""
    from chardet import detect
    from chardetng_py import EncodingDetector

    lines = b"\n".join(line for line in data.split(b"\n") if not line.isascii())
    foreign_bytes = lines.translate(None, bytes(range(128)))
    letters = b"".join(_UTF8_LETTER.findall(lines))
    if 2 * len(letters) > len(foreign_bytes):
        raise DecodingError(f"is damaged UTF-8 ({_first_fault(data)}): save it as UTF-8 again")
    stop = lines.find(b"\n", _EVIDENCE)
    evidence = lines if stop < 0 else lines[:stop]
    detector = EncodingDetector()
    detector.feed(evidence, last=True)
    encoding: str = detector.guess_assess(tld=None, allow_utf8=False)[0]
    second_encoding = detect(evidence)["encoding"] or ""
    with suppress(UnicodeDecodeError, LookupError):
        agree = evidence.decode(encoding) == evidence.decode(second_encoding)
        if agree and len(data) >= _LEAST_EVIDENCE:
            data.decode(encoding)
            return encoding
    raise DecodingError(f"is not UTF-8 ({_first_fault(data)}), and its encoding is not certain: convert it to UTF-8")


def _first_fault(data: bytes) -> str:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start}"
    return "no byte"
