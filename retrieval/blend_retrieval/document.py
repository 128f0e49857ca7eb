"""Documents: cleaned texts of a corpus, and the files that were skipped."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple
from unicodedata import normalize

_SURROGATE = re.compile("[\ud800-\udfff]")
_LEADING_BLANK_LINES = re.compile(r"(?:[ \t]*\n)+")
# Sequences for terminals, C0 and C1 that are no white space, and marks that turn the direction of the text around them.
_UNSEEN = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """Text with plain newlines, without NULs, lone surrogates (no tokenizer takes them) and blanks at either end."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = text.replace("\0", "")
    if _SURROGATE.search(text):
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    blank = _LEADING_BLANK_LINES.match(text)
    start = blank.end() if blank else 0
    return text[start:].rstrip()


def clean_title(text: str) -> str:
    """A title for a prompt: one line of valid Unicode without control characters and direction marks."""
    visible = _UNSEEN.sub("", clean(text))
    return " ".join(visible.split())


def valid_name(name: str) -> str:
    r"""A file's name as valid, composed Unicode. Bytes that are not UTF-8 become escapes such as `\udcff` for 0xff."""
    return normalize("NFC", name.encode("utf-8", "backslashreplace").decode())


Markup = Literal["markdown", "marked", "plain", "code"]
"""How a text marks headings.

`markdown`: as CommonMark does. `marked`: only by lines that start with one to six `#` and a blank, as the PDF reader writes
them. `plain`: by rulers and numbers that are unmistakable, because a `#` may be a comment, and a ruler a table's. `code`: not.
"""

MAX_HEADING = 160  # characters; to Markdown even a paragraph over a ruler is a heading


class Heading(NamedTuple):
    """A heading outside quotes, lists and code: its level (1 is highest), its text, and its span in characters."""

    level: int
    text: str
    start: int
    stop: int


class Document(NamedTuple):
    r"""One text of a corpus.

    Attributes:
        id: unique in its corpus and stable between runs: the path below the loaded folder, plus `#...` for a record in a
            file.
        title: the document's title, or its file name.
        text: Markdown or plain text with `\n` newlines, split at headings.
        source: where it came from, for people.
        markup: how the text marks headings.
    """

    id: str
    title: str
    text: str
    source: str
    markup: Markup = "markdown"


class SkippedDocument(NamedTuple):
    """What was skipped of a file or folder for one reason, or a note on how it was read.

    unread: ids that its documents would have: a file's id, to which `#...` may be added, or a folder's id with a final
    slash for all documents below. Empty if the file was read or does not exist.
    lost: skipped files, records or pages; 0 if all was read, and the reason is a note.
    """

    source: str
    reason: str
    unread: tuple[str, ...] = ()
    lost: int = 1

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}"


_NAMED = 3  # places that a line names


def enumerated(places: Sequence[str]) -> str:
    """Such as "a, b, c and 2,997 more"."""
    named = ", ".join(places[:_NAMED])
    unnamed = len(places) - _NAMED
    return f"{named} and {unnamed:,} more" if unnamed > 0 else named


def summarized(skipped: Iterable[SkippedDocument]) -> list[SkippedDocument]:
    """The same with one entry for each reason that many files share."""
    reasons: dict[str, list[SkippedDocument]] = {}
    for entry in skipped:
        reasons.setdefault(entry.reason, []).append(entry)
    summary: list[SkippedDocument] = []
    for group in reasons.values():
        summary += [_merged(group)] if len(group) > _NAMED else group
    return summary


def _merged(group: Sequence[SkippedDocument]) -> SkippedDocument:
    unread = tuple(name for entry in group for name in entry.unread)
    sources = enumerated([entry.source for entry in group])
    lost = sum(entry.lost for entry in group)
    return SkippedDocument(sources, group[0].reason, unread, lost)


class LoadedDocuments(NamedTuple):
    """Documents sorted by id, everything that was skipped, and notes on how files were read."""

    documents: tuple[Document, ...]
    skipped: tuple[SkippedDocument, ...]

    def unread(self) -> Callable[[str], bool]:
        """A test whether a document with this id may exist in an unreadable file or folder."""
        names = {name for entry in self.skipped for name in entry.unread}
        return lambda document: not names.isdisjoint(_holders(document))


def _holders(document: str) -> Iterator[str]:
    """The id, and the ids of files and folders that may contain such a document."""
    yield document
    yield "/"
    for place, letter in enumerate(document):
        if letter == "#":
            yield document[:place]
        elif letter == "/":
            yield document[: place + 1]
