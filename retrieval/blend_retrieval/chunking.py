"""Divides documents into chunks: consecutive passages of one document, each within a token limit.

A document is split at its headings. A section over the limit is split at paragraphs, then sentences, then words
(semantic-text-splitter). Small neighbours are joined again. The passages of a document, in order, are its whole text;
those that begin inside a table have its header before them.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, islice, pairwise
from typing import NamedTuple, TypeAlias

from blend_retrieval.document import Document, Heading, clean_title
from blend_retrieval.errors import ChunkingError
from blend_retrieval.headings import headings_in

TINY_SHARE = 8  # a passage below an eighth of the limit joins any neighbour it fits with
GLANCE = 40  # characters a token; no text is that dense
TITLE_SHARE = 2  # a title may take half of the limit
REMEMBERED = 1 << 12  # passages; repeats come soon or never
# Possessive quantifiers: on hostile lines a pattern that goes back takes hours, and holds the interpreter.
_RULER = r"(?=[^\n]*\|)[ \t]*+\|?+[ \t]*+:?+-++:?+[ \t]*+(?:\|[ \t]*+:?+-++:?+[ \t]*+)*+\|?[ \t]*+\n"
_TABLE = re.compile(
    rf"^(?P<header>(?:\|[^\n]*+\n){{0,2}}?(?=[^\n]*\|)[^\n]*+\n{_RULER})(?P<rows>(?:(?=[^\n]*\|)[^\n]*+(?:\n|\Z))++)",
    re.MULTILINE,
)
HEADER_SHARE = 0.75  # of the limit, that title and header of a table may take
_BLANK_LINES = re.compile(r"(?:[ \t]*[\r\n]+)+")


class Region(NamedTuple):
    """Characters `start` to `stop - 1` of a document's text."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of characters."""
        return self.stop - self.start


class _Table(NamedTuple):
    """A table of Markdown: the lines of its header, and where its rows are."""

    header: str
    start: int
    stop: int


class Passage(NamedTuple):
    """Title and text of a region, and its length in tokens."""

    title: str
    text: str
    tokens: int


_Path: TypeAlias = tuple[Heading, ...]


def _above(path: _Path, heading: Heading) -> _Path:
    """The part of a heading path that stays open below a new heading."""
    return tuple(open_ for open_ in path if open_.level < heading.level)


def _below(path: _Path, heading: Heading) -> _Path:
    """The heading path of the text below a new heading."""
    return (*_above(path, heading), heading)


class PassageComposer:
    """Makes passages from the regions of one document.

    A passage's title is the document's title and the headings above the passage. Headings at the start of a region that
    apply to all of it move from the text to the title. If the title takes over half of `max_tokens`, it is shortened to
    the document's title and the headings stay in the text, so no word is lost.
    """

    def __init__(
        self, document: Document, headings: Sequence[Heading], measure: Callable[[str, str], int], max_tokens: int
    ) -> None:
        self.text = document.text
        self.source = document.source
        self.max_tokens = max_tokens
        self._measure = measure
        self.reach = GLANCE * max_tokens  # characters that no passage exceeds
        self._title = clean_title(document.title)[: self.reach]
        self._headings = headings
        self._starts = [heading.start for heading in headings]
        self._paths: list[_Path] = [()]  # open headings after the first n
        for heading in headings:
            self._paths.append(_below(self._paths[-1], heading))
        tables = _TABLE.finditer(document.text)
        self._tables = [_Table(match["header"], *match.span("rows")) for match in tables]
        self.compose = lru_cache(REMEMBERED)(self._read)

    def measure(self, title: str, text: str) -> int:
        """Tokens of a passage. A passage far beyond the limit gets a number above it without tokenising."""
        if len(text) > self.reach:
            return len(text)
        return self._measure(title, text)

    def sections(self) -> list[Region]:
        """The document, cut at every heading, without blank stretches."""
        edges = sorted({0, *self._starts, len(self.text)})
        regions = [Region(start, stop) for start, stop in pairwise(edges)]
        return [region for region in regions if not self._is_blank(*region)]

    def _is_blank(self, start: int, stop: int) -> bool:
        return not self.text[start:stop].strip()

    def _read(self, region: Region) -> Passage:
        """The passage of a region."""
        title, offset = self.frame(region)
        blank = _BLANK_LINES.match(self.text, offset, region.stop)
        start = blank.end() if blank else offset
        header = self._header(title, start)
        text = header + self.text[start : region.stop]
        text = text.rstrip()
        return Passage(title, text, self.measure(title, text))

    def _header(self, title: str, place: int) -> str:
        """The header of the table whose rows a passage begins among, if there is room for it."""
        number = bisect_left(self._tables, place, key=lambda table: table.stop)
        if number == len(self._tables):
            return ""
        table = self._tables[number]
        is_among_rows = table.start <= place < table.stop
        if is_among_rows and self._has_room(title, table.header):
            return table.header
        return ""

    def _has_room(self, title: str, header: str) -> bool:
        return self.measure(title, header) <= HEADER_SHARE * self.max_tokens

    def longest_header(self, title: str, region: Region) -> str:
        """The longest header that a passage of this region may begin with, or ""."""
        longest = ""
        for table in self._tables:
            is_inside = region.start <= table.start < region.stop
            is_longer = len(table.header) > len(longest)
            if is_inside and is_longer and self._has_room(title, table.header):
                longest = table.header
        return longest

    def fits(self, region: Region) -> bool:
        """Whether the region's passage is within the limit."""
        return self.compose(region).tokens <= self.max_tokens

    def tiny(self, region: Region) -> bool:
        """Whether the region's passage is too short to stand alone."""
        return self.compose(region).tokens < self.max_tokens // TINY_SHARE

    def same_topic(self, left: Region, right: Region) -> bool:
        """Whether `right` continues `left` without closing a section that `left` did not open."""
        opened = [heading.level for heading in self._inside(left)]
        first = self._inside(Region(right.start, right.start + 1))
        if not opened or not first:
            return True
        return first[0].level >= min(opened)

    def frame(self, region: Region) -> tuple[str, int]:
        """A region's title, and where its text starts: after the headings that moved into the title."""
        inside = self._inside(region)
        enclosing = self._enclosing(region, inside)
        path = enclosing
        offset = region.start
        for number, heading in enumerate(inside, 1):
            is_closed = any(later.level <= heading.level for later in inside[number:])
            if is_closed or not self._is_blank(offset, heading.start):
                break
            path = _below(path, heading)
            offset = heading.stop
        if self._is_blank(offset, region.stop):
            path = enclosing
            offset = region.start
        title = self._join(path)
        if not self._affordable(title):
            return self._short_title, region.start
        return title, offset

    def _inside(self, region: Region) -> Sequence[Heading]:
        first = bisect_left(self._starts, region.start)
        stop = bisect_left(self._starts, region.stop)
        return self._headings[first:stop]

    def _enclosing(self, region: Region, inside: Sequence[Heading]) -> _Path:
        """Headings before a region that still apply where its text starts."""
        number = bisect_left(self._starts, region.start)
        path = self._paths[number]
        if inside and self._is_blank(region.start, inside[0].start):
            path = _above(path, inside[0])
        return path

    def _join(self, path: _Path) -> str:
        names = [heading.text for heading in path]
        if self._title and names[:1] != [self._title]:
            names.insert(0, self._title)
        return " > ".join(names)

    def _affordable(self, title: str) -> bool:
        return self.measure(title, "") <= self.max_tokens // TITLE_SHARE

    @cached_property
    def _short_title(self) -> str:
        """As much of the document's title as fits."""
        title = self._title
        while title and not self._affordable(title):
            title = title[: len(title) * 3 // 4].rstrip()
        return title


LEAST_MAX_TOKENS = 16
LEAST_WINDOW = 1 << 14  # characters
MOST_HEADINGS = 100_000  # of a document; later ones stay text

Encode = Callable[[str], Sequence[int]]
Render = Callable[[str, str], str]


@dataclass(frozen=True)
class Chunk:
    """One passage of a document.

    Attributes:
        id: hex digest of the document's id, the title and the text. Edits elsewhere do not change it.
        title: the document's title and the headings above the passage, joined by " > ".
        tokens: length of the rendered chunk in the tokenizer that made it.
    """

    id: str
    document_id: str
    title: str
    text: str
    tokens: int


def chunk_documents(
    documents: Iterable[Document], encode: Encode, max_tokens: int, render: Render
) -> tuple[Chunk, ...]:
    """Divide documents into chunks, in order, each with `len(encode(render(title, text))) <= max_tokens`.

    Args:
        documents: in the order of their chunks.
        encode: token ids of a text without special tokens, such as `partial(tokenizer.encode, add_special_tokens=False)`.
        max_tokens: of a rendered chunk.
        render: the text to tokenise, from a chunk's title and text.

    Raises:
        ChunkingError: `max_tokens` is below 16, or too small for a single character.
    """
    chunks: list[Chunk] = []
    for document in documents:
        steps = divide_in_steps(document, encode, max_tokens, render)
        try:
            while True:
                next(steps)
        except StopIteration as end:
            chunks += end.value
    return tuple(chunks)


def divide_in_steps(
    document: Document, encode: Encode, max_tokens: int, render: Render
) -> Generator[None, None, list[Chunk]]:
    """Divide a document as `chunk_documents` does, and pause after every passage."""
    if max_tokens < LEAST_MAX_TOKENS:
        raise ChunkingError(f"chunks of {max_tokens} tokens hold no text; allow at least {LEAST_MAX_TOKENS}")

    def measure(title: str, text: str) -> int:
        return len(encode(render(title, text)))

    def either_tiny(left: Region, right: Region) -> bool:
        return composer.tiny(left) or composer.tiny(right)

    headings: list[Heading] = []
    for heading in islice(headings_in(document.text, document.markup), MOST_HEADINGS):
        headings.append(heading)
        yield
    composer = PassageComposer(document, headings, measure, max_tokens)
    regions: list[Region] = []
    for section in composer.sections():
        for region in _divide(composer, section):
            regions.append(region)
            yield
    regions = yield from _join(composer, regions, composer.same_topic)
    regions = yield from _join(composer, regions, either_tiny)
    passages: list[Passage] = []
    for region in regions:
        passages.append(composer.compose(region))
        yield
    return _number(document, passages)


def _divide(composer: PassageComposer, region: Region) -> Iterator[Region]:
    """Split a region into pieces within the limit."""
    if composer.fits(region):
        yield region
        return
    start = region.start
    for stop in chain(_cuts(composer, region), [region.stop]):
        yield from _halve(composer, Region(start, stop))
        start = stop


def _cuts(composer: PassageComposer, region: Region) -> Iterator[int]:
    """The positions where the splitter cuts a region.

    The splitter reads all of its text for every piece, so it gets one window at a time. The last piece of a window may be
    incomplete, so the next window begins with it.
    """
    from semantic_text_splitter import MarkdownSplitter

    title, start = composer.frame(region)
    text_region = Region(start, region.stop)
    header = composer.longest_header(title, text_region)

    def measure(text: str) -> int:
        may_be_row = "|" in text.partition("\n")[0]
        if may_be_row:
            text = header + text
        return composer.measure(title, text)

    splitter = MarkdownSplitter.from_callback(measure, composer.max_tokens)
    window = max(LEAST_WINDOW, 2 * composer.reach)

    def cuts() -> list[int]:
        stop = min(start + window, region.stop)
        text = composer.text[start:stop]
        offsets = [offset for offset, _ in splitter.chunk_indices(text)]
        return [start + offset for offset in offsets[1:]]

    while region.stop - start > window:
        window_cuts = cuts() or [start + window]
        yield from window_cuts
        start = window_cuts[-1]
    yield from cuts()


def _halve(composer: PassageComposer, region: Region) -> Iterator[Region]:
    """Halve a passage that is still too long, between words if possible."""
    if composer.fits(region):
        yield region
        return
    if region.length < 2:
        raise ChunkingError(
            f"{composer.max_tokens} tokens are too few for one character of {composer.source}; allow more"
        )
    middle = (region.start + region.stop) // 2
    space = composer.text.rfind(" ", region.start + 1, middle)
    cut = space if space > 0 else middle
    yield from _halve(composer, Region(region.start, cut))
    yield from _halve(composer, Region(cut, region.stop))


def _join(
    composer: PassageComposer, regions: list[Region], belong: Callable[[Region, Region], bool]
) -> Generator[None, None, list[Region]]:
    """Join neighbours from left to right if they belong together and fit into one chunk."""
    joined: list[Region] = []
    for region in regions:
        yield
        if joined and belong(joined[-1], region):
            union = Region(joined[-1].start, region.stop)
            if composer.fits(union):
                joined[-1] = union
                continue
        joined.append(region)
    return joined


def _number(document: Document, passages: Sequence[Passage]) -> list[Chunk]:
    """Passages as chunks. A count distinguishes equal passages of one document, so ids are unique."""
    times: Counter[tuple[str, str]] = Counter()
    chunks = []
    for title, text, tokens in passages:
        if not text:  # blanks left by halving
            continue
        identity = json.dumps([document.id, title, text, times[title, text]])
        times[title, text] += 1
        digest = hashlib.sha256(identity.encode()).hexdigest()
        chunks.append(Chunk(digest[:32], document.id, title, text, tokens))
    return chunks
