"""Where the headings of a Markdown text are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from blend_retrieval.document import MAX_HEADING, Heading, clean_title

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

STRETCH = 1 << 18  # characters parsed at a time; what the parser makes of a text takes a hundred times its memory
_MARK = re.compile(r"#|[\r\n] {0,3}(?:=+|-+)[ \t]*(?:[\r\n]|\Z)")
_NEWLINE = re.compile(r"\r\n?|\n")


def markdown_headings(text: str) -> Iterator[Heading]:
    """Headings by the CommonMark specification (so a `#` in a code block is none), in order, parsed as they are read.

    A stretch of text is read as it would be in the whole, but for its last block, which may go on behind it: there the
    next stretch begins. A block longer than a stretch is read again in one of twice the length.
    """
    start, size = 0, STRETCH
    while start < len(text) and _MARK.search(text, start):
        newline = _NEWLINE.search(text, start + size)
        stop = newline.end() if newline else len(text)
        found, last = _parse(text[start:stop])
        if stop == len(text):
            last = stop - start
        yield from (
            heading._replace(start=start + heading.start, stop=start + heading.stop)
            for heading in found
            if heading.start < last
        )
        start, size = start + last, STRETCH if last else 2 * size


def _parse(text: str) -> tuple[list[Heading], int]:
    """Headings of a text, and where its last block starts."""
    tokens = _parser().parse(text)
    starts = [0, *(match.end() for match in _NEWLINE.finditer(text)), len(text)]
    found = []
    for opening, inline in pairwise(tokens):
        words = clean_title(inline.content) if opening.type == "heading_open" and opening.level == 0 else ""
        if opening.map and 0 < len(words) <= MAX_HEADING:
            first, last = opening.map
            found.append(Heading(int(opening.tag[1:]), words, starts[first], starts[min(last, len(starts) - 1)]))
    blocks = [token.map[0] for token in tokens if token.level == 0 and token.map]
    return found, starts[max(blocks, default=0)]


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark")
    parser.core.ruler.disable("inline")  # only the blocks matter, and inline parsing is most of the work
    return parser
