"""A text's paragraphs, found by what stands in them alone: in whatever order passages are pasted, each gives the same ones."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from blend.serve.passages.rendered import Renderer

_MOST_OF_A_FENCE = 2048  # characters; longer code is divided at its blank lines
_MOST_OF_A_HEADING = 80
_HEADINGS = 2  # that may stand over a paragraph
_MOST_BETWEEN = 8  # characters between a heading and what it stands over

_GAP = re.compile(
    r"""(?:^|(?<=\n))  # at the start of a line:
    (?:
        # lines that are blank, a ruler, a tag or quotation marks; nothing is tried twice, lines may be long
        (?:[^\S\n]*+(?:(?:([-=*_])\1{2,}+|</?[A-Za-z][^<>\n]{0,80}+>|"{3}|'{3})[^\S\n]*+)?(?:\n|\Z))++
        | (?=\#{2,6}\ )  # or nothing, before a Markdown heading; a single # may as well open a comment
    )""",
    re.VERBOSE,
)
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})([^`\n]*)$", re.MULTILINE)
_NAMES = "document|doc|passage|source|context|chunk|text|reference|result|snippet|excerpt|article"
_LABEL = re.compile(
    rf"(?:[-*+>]\s+)?(?:(?:{_NAMES})\s*[#(\[]?\d{{1,4}}[)\]]?[.:)]?|[(\[]\d{{1,4}}[)\]][.:]?|\d{{1,4}}[.:)])(?:\s+|\Z)",
    re.IGNORECASE,
)
_MARKDOWN_HEADING = re.compile(r"#{1,6}\s")
_ENDS = ".!?:;,…。！？：；，)]}>\"'`|"


class Block(NamedTuple):
    """Characters `start` to `stop - 1` of a text, blanks around them left out."""

    start: int
    stop: int


def paragraphs(text: str, start: int, stop: int) -> Iterator[Block]:
    """The paragraphs between two places of a text, in order, each with the headings over it.

    Blank lines, rulers, tags and Markdown headings divide; a short fence of code is not divided. A number in front, as chains
    give to what they paste ("[1] ", "Document 2:"), belongs to none, for it changes with the order.
    """
    above: deque[Block] = deque(maxlen=_HEADINGS)
    for block in _unlabelled(text, start, stop):
        if above and block.start - above[-1].stop > _MOST_BETWEEN:
            above.clear()
        if _is_heading(text, block):
            above.append(block)
            continue
        yield Block(above[0].start if above else block.start, block.stop)
        above.clear()


def _unlabelled(text: str, start: int, stop: int) -> Iterator[Block]:
    for block in _blocks(text, start, stop):
        label = _LABEL.match(text, block.start, block.stop)
        bare = stripped(text, label.end() if label else block.start, block.stop)
        if bare.stop > bare.start:
            yield bare


def _blocks(text: str, start: int, stop: int) -> Iterator[Block]:
    """What stands between the gaps, those in short fences of code apart."""
    fences, fence, begin = _fences(text, start, stop), Block(start, start), start
    for gap in _GAP.finditer(text, start, stop):
        while fence.stop <= gap.start() and fence.stop < stop:
            fence = next(fences, Block(stop, stop))
        if gap.start() <= fence.start:
            yield stripped(text, begin, gap.start())
            begin = gap.end()
    yield stripped(text, begin, stop)


def _fences(text: str, start: int, stop: int) -> Iterator[Block]:
    """Code between two lines of the same marks, as far as it is short: an opening line without an end spoils little."""
    opening: re.Match[str] | None = None
    for line in _FENCE.finditer(text, start, stop):
        if opening is None or line.end() - opening.start() > _MOST_OF_A_FENCE:
            opening = line
        elif line[1] == opening[1] and not line[2].strip():
            yield Block(opening.start(), line.end())
            opening = None


def stripped(text: str, start: int, stop: int) -> Block:
    """A stretch of a text without blanks at its ends; it copies its characters once."""
    inside = text[start:stop]
    bare = inside.lstrip()
    start += len(inside) - len(bare)
    return Block(start, start + len(bare.rstrip()))


def _is_heading(text: str, block: Block) -> bool:
    """Whether it is one short line that opens as a Markdown heading or does not end as a sentence does."""
    if block.stop - block.start > _MOST_OF_A_HEADING:
        return False
    line = text[block.start : block.stop]
    return "\n" not in line and (_MARKDOWN_HEADING.match(line) is not None or line[-1] not in _ENDS)


# --- Long texts that nobody has seen before, cut into passages worth a cache of their own.


LONG_TOKENS = 256  # shorter messages are talk, of which nothing is learned
LEAST_PASSAGE = 48  # tokens
MOST_PASSAGE = 512
_FILLED = 448  # tokens that a piece of a long paragraph aims at
_GLANCE = 2048  # characters by which the density of a long paragraph is judged
_LONG_CHARACTERS = 8 * MOST_PASSAGE  # a paragraph beyond is not tokenised in one piece
_WINDOW = 16  # pieces that the splitter is shown at a time: for each it reads all that it is shown
_MOST_CHARACTERS = 1 << 20  # of a message; what is longer takes more time to divide than it is worth


def is_long(text: str, renderer: Renderer) -> bool:
    """Whether passages of a message are to be learned: it is neither talk nor out of all proportion."""
    if not LONG_TOKENS // 4 < len(text) <= _MOST_CHARACTERS:
        return False
    glance = text[: 16 * LONG_TOKENS]
    return len(glance) < len(text) or renderer.template.count(glance) > LONG_TOKENS


def passages(text: str, start: int, stop: int, renderer: Renderer) -> Iterator[Block]:
    """Stretches of a text between two places that are passages, in order; all else is too short to be one.

    Each is a paragraph or, of one longer than `MOST_PASSAGE` tokens, a piece of it; where it starts and ends depends on nothing
    outside of the paragraph.
    """
    for block in paragraphs(text, start, stop):
        yield from _fitting(text, block, renderer)


def _fitting(text: str, block: Block, renderer: Renderer) -> Iterator[Block]:
    """The block, or its pieces, piece by piece until they fit."""
    waiting = [block]
    while waiting:
        one = waiting.pop()
        inside = text[one.start : one.stop]
        if len(inside.encode(errors="replace")) < LEAST_PASSAGE:  # no token is less than a byte
            continue
        glance = inside if len(inside) <= _LONG_CHARACTERS else inside[:_GLANCE]
        tokens = len(renderer.render("", glance).ids)
        if len(glance) < len(inside) or tokens > MOST_PASSAGE:
            capacity = min(_GLANCE, len(glance) * _FILLED // max(tokens, 1), len(inside) - 1)
            waiting.extend(reversed(list(_pieces(text, one, max(capacity, 1)))))
        elif tokens >= LEAST_PASSAGE:
            yield one


def _pieces(text: str, block: Block, capacity: int) -> Iterator[Block]:
    """Cut at the ends of lines and sentences, from the block's own start on."""
    from semantic_text_splitter import MarkdownSplitter

    split, start, window = MarkdownSplitter(capacity).chunk_indices, block.start, _WINDOW * capacity
    while start < block.stop:
        found = split(text[start : min(start + window, block.stop)])
        if start + window < block.stop:  # the last piece may go on behind the window; there the next one begins
            found, rest = found[:-1], found[-1:]
            following = start + rest[0][0] if found else start + window
        else:
            following = block.stop
        # What Python calls blank, such as a unit separator, the splitter need not; a chunk's text has none at its ends.
        yield from (stripped(text, start + at, start + at + len(piece)) for at, piece in found)
        start = following
