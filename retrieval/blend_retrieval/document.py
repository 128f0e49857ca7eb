"""Documents: the text of a corpus, cleaned, and what was left out of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

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


Markup = Literal["markdown", "plain"]
"""How headings are marked: as Markdown has them, or as people mark them in plain text, where a `#` may be a comment."""

MAX_HEADING = 160  # characters; a paragraph over a ruler is a heading to Markdown, but to nobody else


class Heading(NamedTuple):
    """A heading outside quotes, lists and code: its level (1 the highest), its words, and the characters it takes."""

    level: int
    text: str
    start: int
    stop: int


class Document(NamedTuple):
    r"""One text.

    id: unique in its corpus and the same in every run: the path below the folder that was loaded, with `#...` behind it
        for a record inside a file.
    title: what the document calls itself, or its file name.
    text: Markdown or plain text: headings are where it may be divided. Newlines are `\n`.
    source: where it came from, for people.
    markup: what counts as a heading in the text; in plain text only what cannot well be code, a comment or a table.
    """

    id: str
    title: str
    text: str
    source: str
    markup: Markup = "markdown"


class SkippedDocument(NamedTuple):
    """A file or record that was left out, and why, in one line.

    unread: ids that documents in it have, if it holds any: that of a file, which may have `#...` behind it, or that of a folder
    with a slash at its end, which stands for all below; none where it was read, or is not there.
    """

    source: str
    reason: str
    unread: tuple[str, ...] = ()


class LoadedDocuments(NamedTuple):
    """Documents in the order of their ids, and everything that was left out."""

    documents: tuple[Document, ...]
    skipped: tuple[SkippedDocument, ...]

    def unread(self) -> Callable[[str], bool]:
        """Says of a document's id whether it may be there all the same, in what could not be read."""
        names = {name for one in self.skipped for name in one.unread}
        return lambda document: bool(names) and not names.isdisjoint(_holders(document))


def _holders(document: str) -> Iterator[str]:
    """The id, and those of the files and folders that a document of this id may be in."""
    yield document
    yield "/"
    for place, letter in enumerate(document):
        if letter == "#":
            yield document[:place]
        elif letter == "/":
            yield document[: place + 1]
