"""Headings of a PDF: lines that its outline names, and short lines in letters that are clearly larger than the text's.

A missed heading merely costs a shorter title, so running heads, captions, numbers, quotes and the names on a title page
are none.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from blend_retrieval.document import MAX_HEADING
from blend_retrieval.readers.pdf.layout import Piece

_LARGER = 1.15  # times the size of most of the text
_ALIKE = 1.03  # times another size that counts as the same
_CAPTION = re.compile(r"(?:fig(?:ure|\.)?|table|listing|abb(?:ildung|\.)?|tab(?:elle|\.)?|tableau)\s*\d", re.IGNORECASE)
_SENTENCE_END = (".", ",", ";", ":", "…")
_LEAST_LETTERS = 3
_MOST_LINES = 3
_MOST_LEVELS = 6
_LINE_GAP, _BLOCK_GAP = 3.0, 0.7  # line heights between pieces of a line, and between lines of a block
_HEADING_SHARE = 0.75  # of the blocks of a size; if fewer are like headings, the size is that of quotes or remarks
_TEXT_SHARE = 0.3  # of a document's characters, that headings of one size may have
_RUNNING = 2  # pages that open or close with the same line
_NUMBER = re.compile(r"^(?:\w+ )?(?:\d+(?:\.\d+)*|[A-Z]|[IVX]+)[.:)]?\s+")  # such as "1.2", "Chapter 3:", "Appendix A"
_DIGITS = re.compile(r"\d+")


class Entry(NamedTuple):
    """An entry of an outline: its depth (0 is highest), its title, and the page and height that it leads to."""

    depth: int
    title: str
    page: int
    top: float | None


class _Line(NamedTuple):
    """Pieces of one size that stand one after another. first: the number of the first one on its page."""

    page: int
    first: int
    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        return " ".join(piece.text for piece in self.pieces)

    @property
    def size(self) -> float:
        return self.pieces[0].size


_Block = tuple[_Line, ...]
"""Lines of one size under each other, without a space between."""
_Levels = dict[_Line, int]
_Head = tuple[str, float]
_Heads = set[_Head]
_Pages = Sequence[Sequence[Piece]]


def with_headings(pages: _Pages, outline: Sequence[Entry]) -> list[list[Piece]]:
    """The pieces of all pages, with the levels of headings set."""
    blocks: list[_Block] = []
    for number, page in enumerate(pages):
        blocks += _blocks(number, page)
    lines = list(chain.from_iterable(blocks))
    running = _running(lines)
    levels = _named_by_outline(lines, outline, running)
    levels |= _larger(blocks, levels, running)
    marked = [list(page) for page in pages]
    for line, level in levels.items():
        for number, piece in enumerate(line.pieces, line.first):
            marked[line.page][number] = piece._replace(level=level)
    return marked


def _blocks(page_number: int, page: Sequence[Piece]) -> Iterator[_Block]:
    block: list[_Line] = []
    for line in _lines(page_number, page):
        if block and not _goes_on(block[-1], line):
            yield tuple(block)
            block = []
        block.append(line)
    if block:
        yield tuple(block)


def _lines(page_number: int, page: Sequence[Piece]) -> Iterator[_Line]:
    first = 0
    for number, piece in enumerate(page):
        if number > first and not _is_beside(page[number - 1], piece):
            yield _Line(page_number, first, tuple(page[first:number]))
            first = number
    if page:
        yield _Line(page_number, first, tuple(page[first:]))


def _is_beside(last: Piece, piece: Piece) -> bool:
    top = min(last.top, piece.top)
    bottom = max(last.bottom, piece.bottom)
    gap = piece.left - last.right
    is_near = 0 <= gap < _LINE_GAP * last.height
    return top > bottom and is_near and _alike(last.size, piece.size)


def _goes_on(above: _Line, line: _Line) -> bool:
    last = above.pieces[0]
    piece = line.pieces[0]
    gap = last.bottom - piece.top
    is_below = -last.height < gap < _BLOCK_GAP * last.height
    return is_below and _alike(above.size, line.size)


def _alike(size: float, second_size: float) -> bool:
    return max(size, second_size) <= _ALIKE * min(size, second_size)


def _running(lines: Sequence[_Line]) -> _Heads:
    """Running heads and feet: what several pages open or close with, but for numbers."""
    by_page = defaultdict(list)
    for line in lines:
        by_page[line.page].append(line)
    heads: Counter[_Head] = Counter()
    for page_lines in by_page.values():
        highest = max(page_lines, key=lambda line: line.pieces[0].middle)
        lowest = min(page_lines, key=lambda line: line.pieces[0].middle)
        heads.update({_head(highest), _head(lowest)})
    return {head for head, count in heads.items() if count >= _RUNNING}


def _head(line: _Line) -> _Head:
    text = _DIGITS.sub("", line.text)
    return text.strip(), line.size


def _named_by_outline(lines: Sequence[_Line], outline: Sequence[Entry], running: _Heads) -> _Levels:
    """The lines that entries of the outline name, on the pages that they lead to."""
    pages = {entry.page for entry in outline}
    titles: dict[tuple[int, str], list[_Block]] = defaultdict(list)
    for count in range(1, _MOST_LINES + 1):
        for start in range(len(lines) - count + 1):
            block = tuple(lines[start : start + count])
            page = block[0].page
            if page in pages:
                title = _letters(_text(block))
                titles[page, title].append(block)
    levels: _Levels = {}
    for entry in outline:
        title = _letters(entry.title)
        matches: list[_Block] = []
        if title:
            matches = titles.get((entry.page, title), [])

        def rank(match: _Block, entry: Entry = entry) -> tuple[bool, float, float]:
            line = match[0]
            distance = 0.0
            if entry.top is not None:
                distance = abs(line.pieces[0].top - entry.top)
            is_running = _head(line) in running
            return is_running, -line.size, distance

        if matches:
            best = min(matches, key=rank)
            level = min(entry.depth + 1, _MOST_LEVELS)
            levels |= dict.fromkeys(best, level)
    return levels


def _text(block: _Block) -> str:
    return " ".join(line.text for line in block)


def _letters(text: str) -> str:
    """The letters and digits of a heading, without its number."""
    title = _NUMBER.sub("", text, count=1)
    return "".join(filter(str.isalnum, title.casefold()))


def _larger(blocks: Sequence[_Block], outlined: _Levels, running: _Heads) -> _Levels:
    """Short lines that are larger than the text, with levels by size; sizes that the outline names keep its levels."""
    characters: Counter[float] = Counter()
    for block in blocks:
        characters[block[0].size] += _length(block)
    text_size = max(characters, key=lambda size: characters[size], default=0.0)
    least = _LARGER * text_size
    by_size: dict[float, list[_Block]] = defaultdict(list)
    for block in blocks:
        size = block[0].size
        if size < least or not outlined.keys().isdisjoint(block):
            continue
        alike = (larger for larger in by_size if _alike(larger, size))
        by_size[next(alike, size)].append(block)
    names = _names(blocks, text_size)
    most = _TEXT_SHARE * characters.total()
    headings: dict[float, list[_Block]] = {}
    for size in sorted(by_size, reverse=True):
        nameless = [block for block in by_size[size] if block not in names]
        candidates = [block for block in nameless if _head(block[0]) not in running]
        likely = list(filter(_is_like_heading, candidates))
        length = sum(map(_length, candidates))
        least_likely = _HEADING_SHARE * len(candidates)
        if likely and len(likely) >= least_likely and length <= most:
            headings[size] = likely
    outline_levels = {line.size: level for line, level in outlined.items()}
    levels = _levels_by_size(headings, outline_levels)
    lines: _Levels = {}
    for size, same in headings.items():
        for block in same:
            lines |= dict.fromkeys(block, levels[size])
    return lines


def _length(block: _Block) -> int:
    return sum(len(line.text) for line in block)


def _names(blocks: Sequence[_Block], text_size: float) -> set[_Block]:
    """Authors and dates on a title page: what stands between the largest lines and the first section."""
    opening = []
    for block in blocks:
        if _alike(block[0].size, text_size):
            break
        opening.append(block)
    later = blocks[len(opening) :]
    later_sizes = {block[0].size for block in later}
    opening_sizes = [block[0].size for block in opening]
    largest = max(opening_sizes, default=0.0)
    names = {block for block in opening if block[0].size < largest}
    below = 0.0
    for block in reversed(opening):
        size = block[0].size
        if size <= below or size not in later_sizes:
            break
        names.discard(block)
        below = size
    return names


def _is_like_heading(block: _Block) -> bool:
    text = _text(block)
    title = _NUMBER.sub("", text, count=1)
    letters = sum(map(str.isalpha, title))
    signs = len(title.replace(" ", ""))
    is_words = letters >= _LEAST_LETTERS and 2 * letters >= signs
    is_short = len(block) <= _MOST_LINES and len(text) <= MAX_HEADING
    is_sentence = text.endswith(_SENTENCE_END)
    is_caption = _CAPTION.match(text) is not None
    return is_words and is_short and not is_sentence and not is_caption


def _levels_by_size(sizes: Iterable[float], outline_levels: dict[float, int]) -> dict[float, int]:
    """Levels for sizes, largest first: the outline's for the same size, or one below the next larger one."""
    levels: dict[float, int] = {}
    level = 0
    for size in sizes:
        same = []
        above = [level]
        for outline_size, depth in outline_levels.items():
            if _alike(outline_size, size):
                same.append(depth)
            if outline_size > size:
                above.append(depth)
        level = same[0] if same else max(above) + 1
        levels[size] = min(level, _MOST_LEVELS)
    return levels
