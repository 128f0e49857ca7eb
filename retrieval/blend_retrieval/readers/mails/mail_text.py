"""The text of a mail: its charset and line breaks, and which of several versions says more."""

from __future__ import annotations

import codecs
import re
from email.message import MIMEPart
from typing import Any, NamedTuple

from blend_retrieval.decoding import Decoded, DecodingError, decode
from blend_retrieval.readers.base import Fault, UnreadableError, notes
from blend_retrieval.readers.html.html import html_to_markdown
from blend_retrieval.readers.mails.events import events_text

_HTML = ("html", "x-amp-html", "x-watch-html", "xhtml")
_XHTML = "application/xhtml+xml"
_FILES = ("csv", "markdown", "rtf", "vcard", "x-vcard", "directory", "tab-separated-values", "css", "javascript", "xml")
_PGP = re.compile(r"-----BEGIN PGP MESSAGE-----.*?(?:-----END PGP MESSAGE-----|\Z)", re.DOTALL)
_ADDRESS = re.compile(r"\b(?:https?://|www\.|mailto:)\S+", re.IGNORECASE)
_WORD = re.compile(r"\w+")
_LACKING_SHARE = 0.2  # of a version's words that another may lack, if none is a number
_QUOTES = re.compile(r"(>*) ?(.*)", re.DOTALL)
_SIGNATURE = "-- "


class PartText(NamedTuple):
    """The text of a part. is_plain: plain text; is_event: what a calendar holds."""

    text: str
    is_plain: bool = False
    is_event: bool = False


def is_text_of_the_mail(part: MIMEPart, *, is_body: bool = False) -> bool:
    """Whether a part belongs to the text that a reader of the mail sees, and is no file in it.

    is_body: whether a text in this place is that of the mail even if it has a file name.
    """
    kind = part.get_content_maintype()
    subtype = part.get_content_subtype()
    if kind == "multipart":  # without its boundary
        return True
    if part.is_attachment() or (kind != "text" and part.get_content_type() != _XHTML):
        return False
    is_file = bool(part.get_filename()) and not is_body
    return subtype == "calendar" or (not is_file and subtype not in _FILES)


def part_text(part: MIMEPart) -> tuple[PartText, list[Fault]]:
    """The text of a part, and what could not be read of it."""
    subtype = part.get_content_subtype()
    try:
        text, note = _decoded(part)
        if subtype in _HTML or part.get_content_type() == _XHTML:
            _, markdown = html_to_markdown(text)
            return PartText(markdown), [*notes(note)]
    except (DecodingError, UnreadableError) as error:
        return PartText(""), [Fault("text", str(error))]
    faults = notes(note)
    if subtype == "calendar":
        return PartText(events_text(text), is_event=True), faults
    if _parameter(part, "format") == "flowed":
        text = _unflowed(text, _parameter(part, "delsp") == "yes")
    readable = _PGP.sub("", text)
    if readable != text:
        faults.append(Fault("text", "is encrypted (PGP): save the mail decrypted"))
    return PartText(readable, is_plain=True), faults


def attached_text(part: MIMEPart) -> bytes:
    """The bytes of an attachment; those of a text in another charset in UTF-8, with a mark."""
    payload: Any = part.get_payload(decode=True) or b""
    is_text = part.get_content_maintype() == "text" and not payload.startswith((b"%PDF", b"PK"))
    if not is_text or not part.get_content_charset():
        return bytes(payload)
    try:
        text, note = _decoded(part)
    except DecodingError:
        return bytes(payload)
    return bytes(payload) if note else text.encode("utf-8-sig")


def fuller_text(versions: list[PartText]) -> list[PartText]:
    """The version that holds what the others say, plain text first; all of them where none does.

    Some programs write a blank plain text, a hint that the mail is in HTML, or a part of what the HTML says.
    """
    by_preference = sorted(versions, key=lambda version: not version.is_plain)
    words = [_words(version.text) for version in by_preference]
    for version, version_words in zip(by_preference, words, strict=True):
        if all(_holds(version_words, needed) for needed in words):
            return [version]
    return by_preference


def _words(text: str) -> set[str]:
    without_marks = text.replace("[picture: ", "[")
    return set(_WORD.findall(_ADDRESS.sub(" ", without_marks).casefold()))


def _holds(words: set[str], needed: set[str]) -> bool:
    """Whether a text with these words says what another says: all its numbers, and most of its words."""
    lacking = needed - words
    has_numbers = any(any(sign.isdigit() for sign in word) for word in lacking)
    return not has_numbers and len(lacking) <= _LACKING_SHARE * len(needed)


def _decoded(part: MIMEPart) -> Decoded:
    payload: Any = part.get_payload(decode=True) or b""
    charset = part.get_content_charset("")
    if _is_ascii(charset):  # what programs say that do not know; a text that is UTF-8 is nothing else
        try:
            return decode(payload)
        except DecodingError:
            return decode(payload, charset)
    return decode(payload, charset)


def _is_ascii(charset: str) -> bool:
    try:
        return codecs.lookup(charset).name == "ascii"
    except LookupError:
        return False


def _parameter(part: MIMEPart, name: str) -> str:
    value = part.get_param(name, "")
    return value.lower() if isinstance(value, str) else ""


def _unflowed(text: str, drops_blanks: bool) -> str:
    """Paragraphs in one line (RFC 3676). A line that ends with a blank goes on in the next one of the same depth of quotes.

    drops_blanks: whether the blank at a line's end is no part of the text (DelSp=yes).
    """
    lines: list[str] = []
    depth_before = -1  # of the line before, if it goes on
    for line in text.splitlines():
        quotes, words = _QUOTES.fullmatch(line).groups()  # type: ignore[union-attr]  # it matches every line
        goes_on = words.endswith(" ") and words != _SIGNATURE
        if goes_on and drops_blanks:
            words = words[:-1]
        if len(quotes) == depth_before and words != _SIGNATURE:
            lines[-1] += words
        else:
            lines.append(f"{quotes} {words}" if quotes else words)
        depth_before = len(quotes) if goes_on else -1
    return "\n".join(lines)
