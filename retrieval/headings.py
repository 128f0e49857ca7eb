"""Where the headings of a Markdown text are."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

MAX_HEADING = 160  # characters; a paragraph over a ruler is a heading to Markdown, but to nobody else
_MARK = re.compile(r"#|[\r\n] {0,3}[=-]")
_NEWLINE = re.compile(r"\r\n?|\n")


class Heading(NamedTuple):
    """A heading outside quotes, lists and code: its level (1 the highest), its words, and the characters it takes."""

    level: int
    text: str
    start: int
    stop: int


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark")
    parser.core.ruler.disable("inline")  # only the blocks matter, and inline parsing is most of the work
    return parser


def find_headings(text: str) -> tuple[Heading, ...]:
    """All headings in order, by the CommonMark specification (so a `#` in a code block is none)."""
    if not _MARK.search(text):
        return ()
    tokens = _parser().parse(text)
    starts = [0, *(match.end() for match in _NEWLINE.finditer(text)), len(text)]
    found = []
    for opening, inline in pairwise(tokens):
        words = " ".join(inline.content.split())
        if opening.type == "heading_open" and opening.level == 0 and opening.map and 0 < len(words) <= MAX_HEADING:
            first, last = opening.map
            found.append(Heading(int(opening.tag[1:]), words, starts[first], starts[min(last, len(starts) - 1)]))
    return tuple(found)
