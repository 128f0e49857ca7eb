"""Long texts that nobody has seen before, cut into passages worth a cache of their own."""

from __future__ import annotations

from collections.abc import Iterator

from blend.serve.passages.blocks import Block, paragraphs, stripped
from blend.serve.passages.rendered import Renderer

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
