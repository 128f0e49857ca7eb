"""Text as the rest of the package takes it: valid Unicode, plain newlines, titles of one line without control characters."""

from __future__ import annotations

import re

_SURROGATE = re.compile("[\ud800-\udfff]")
_LEADING_BLANK_LINES = re.compile(r"(?:[ \t]*\n)+")
_TERMINAL_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# C0 and C1 that are no white space, and the marks that turn the direction of the text around them.
_UNSEEN = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """Text with plain newlines, without NULs and lone surrogates (which no tokenizer takes), without blank edges."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")
    if _SURROGATE.search(text):
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    blank = _LEADING_BLANK_LINES.match(text)
    return text[blank.end() if blank else 0 :].rstrip()


def clean_title(text: str) -> str:
    """A title on one line, as it may stand in a prompt: valid Unicode without control characters and direction marks."""
    return " ".join(_UNSEEN.sub("", _TERMINAL_SEQUENCE.sub("", clean(text))).split())


def valid_name(name: str) -> str:
    r"""The name of a file as valid Unicode: bytes of it that are not UTF-8 become escapes, such as `\udcff` for 0xff."""
    return name.encode("utf-8", "backslashreplace").decode()
