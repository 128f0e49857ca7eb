"""Finds the headings of a text: of Markdown by the CommonMark specification, of plain text where they are unmistakable."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from blend_retrieval.document import MAX_HEADING, Heading, Markup, clean_title
from blend_retrieval.plain_headings import plain_headings

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

STRETCH = 1 << 18  # characters parsed at a time; the parser's result takes a hundred times the text's memory
_MARK = re.compile(r"#|[\r\n] {0,3}(?:=+|-+)[ \t]*(?:[\r\n]|\Z)")
_NEWLINE = re.compile(r"\r\n?|\n")


_MARKED = re.compile(r"^(#{1,6}) +(.+)\n?", re.MULTILINE)


def headings_in(text: str, markup: Markup) -> Iterator[Heading]:
    """Headings in order, as this kind of text marks them."""
    if markup == "markdown":
        return markdown_headings(text)
    if markup == "marked":
        return _marked_headings(text)
    return plain_headings(text) if markup == "plain" else iter(())


def _marked_headings(text: str) -> Iterator[Heading]:
    for line in _MARKED.finditer(text):
        words = clean_title(line[2])
        if 0 < len(words) <= MAX_HEADING:
            yield Heading(len(line[1]), words, line.start(), line.end())


def markdown_headings(text: str) -> Iterator[Heading]:
    """Headings in order; a `#` in a code block is none.

    Parses one stretch of text at a time. The last block of a stretch may be incomplete, so the next stretch begins with
    it. A block longer than a stretch is parsed again in one of twice the length.
    """
    start = 0
    size = STRETCH
    while start < len(text) and _MARK.search(text, start):
        newline = _NEWLINE.search(text, start + size)
        stop = newline.end() if newline else len(text)
        headings, last = parse_markdown(text[start:stop])
        if stop == len(text):
            last = stop - start
        for heading in headings:
            if heading.start < last:
                yield heading._replace(start=start + heading.start, stop=start + heading.stop)
        start += last
        size = STRETCH if last else 2 * size


def parse_markdown(text: str) -> tuple[list[Heading], int]:
    """Headings of a text, and where its last block starts."""
    tokens = _parser().parse(text)
    newlines = _NEWLINE.finditer(text)
    starts = [0, *(newline.end() for newline in newlines), len(text)]
    headings = []
    for opening, inline in pairwise(tokens):
        if opening.type != "heading_open" or opening.level > 0 or not opening.map:
            continue
        words = clean_title(inline.content)
        if 0 < len(words) <= MAX_HEADING:
            first, last = opening.map
            level = int(opening.tag[1:])
            stop = starts[min(last, len(starts) - 1)]
            headings.append(Heading(level, words, starts[first], stop))
    blocks = [token.map[0] for token in tokens if token.level == 0 and token.map]
    return headings, starts[max(blocks, default=0)]


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark")
    parser.core.ruler.disable("inline")  # only blocks matter, and inline parsing is most of the work
    return parser
