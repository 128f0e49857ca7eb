"""Markdown and plain text, and decoding for all readers."""

from __future__ import annotations

import codecs
import re

from blend_retrieval.document import clean
from blend_retrieval.headings import markdown_headings
from blend_retrieval.readers.base import Fault, Part, UnreadableError

_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?)\n(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
_FRONT_TITLE = re.compile(r"^title:[ \t]*(['\"]?)(.+?)\1[ \t]*$", re.MULTILINE)
MAX_CONTROL_SHARE = 0.01


def decode(data: bytes) -> str:
    """Text of a file, by its byte order mark, else UTF-8. Raises `UnreadableError` for other encodings."""
    encoding = next((name for bom, name in _BOMS if data.startswith(bom)), "utf-8")
    if encoding == "utf-8" and b"\0" in data:
        raise UnreadableError("is a binary file, not text")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise UnreadableError(f"is not {encoding} text (byte {error.start}); convert it to UTF-8") from None
    if len(_CONTROL.findall(text)) > MAX_CONTROL_SHARE * len(text):
        raise UnreadableError("is a binary file, not text")
    return text


def read_text(data: bytes, title: str) -> list[Part | Fault]:
    """Read plain text, titled by its file name."""
    return [Part("", title, decode(data), "plain")]


def read_markdown(data: bytes, title: str) -> list[Part | Fault]:
    """Read Markdown, titled by its front matter, or by its first heading if it opens with one."""
    text = clean(decode(data))
    if front := _FRONT_MATTER.match(text):
        named = _FRONT_TITLE.search(front[1])
        return [Part("", named[2] if named else title, text[front.end() :], "markdown")]
    first = next(markdown_headings(text), None)
    opens = first is not None and not text[: first.start].strip()
    return [Part("", first.text if first and opens else title, text, "markdown")]
