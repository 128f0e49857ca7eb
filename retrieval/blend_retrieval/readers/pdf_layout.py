"""The reading order of a page: lines from top to bottom, columns one after another, tables as Markdown.

Lines whose pieces leave a gap at the same place form a block of columns. Such a block is prose in columns if the lines
on every side of a gap go on in the middle of a sentence; otherwise it is a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import mean
from typing import NamedTuple
from unicodedata import normalize

from blend_retrieval.readers.tables import markdown_table

_MARKER = re.compile(r"[^\w\s]{1,2}|\(?\w{1,3}[.)]")  # of a list item
_RIGHT_TO_LEFT = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff]")
_SPELLED = str.maketrans({**{chr(n): normalize("NFKC", chr(n)) for n in range(0xFB00, 0xFB07)}, "\u00ad": ""})
_LEAST_GUTTER = 0.5  # line heights
_PARAGRAPH = 0.7  # line heights between two paragraphs
_MOST_PROSE = 3  # columns
_SHORT_LINE, _LONG_LINE = 2, 5  # words
_CONTINUED_SHARE = 0.25  # of a column's lines
_EDGE = 1e9


class Span(NamedTuple):
    """A stretch of a line, in points."""

    start: float
    stop: float


class Piece(NamedTuple):
    """A stretch of text on one line, and its place in points; y grows upwards."""

    text: str
    left: float
    bottom: float
    right: float
    top: float

    @property
    def height(self) -> float:
        """Height of its line."""
        return self.top - self.bottom


Row = list[Piece]


def page_text(pieces: Sequence[Piece]) -> str:
    """The text of a page, in reading order."""
    rows = [_with_markers(row) for row in _rows(pieces)]
    return "\n".join(_blocks(rows)).translate(_SPELLED).strip()


def _rows(pieces: Sequence[Piece]) -> list[Row]:
    """Pieces of one height together, from top to bottom; in each row from left to right."""
    rows: list[Row] = []
    for piece in sorted(pieces, key=lambda piece: -(piece.top + piece.bottom)):
        first = rows[-1][0] if rows else None
        if first is not None and first.bottom < (piece.top + piece.bottom) / 2:
            rows[-1].append(piece)
        else:
            rows.append([piece])
    return [sorted(row, key=lambda piece: piece.left) for row in rows]


def _with_markers(row: Row) -> Row:
    """A row in which the marker of a list item is no column of its own."""
    if len(row) < 2 or not _MARKER.fullmatch(row[0].text):
        return row
    marker, item = row[:2]
    return [item._replace(text=f"{marker.text} {item.text}", left=marker.left), *row[2:]]


class _Block(NamedTuple):
    """Consecutive rows, and the gaps that divide all of them into columns."""

    rows: list[Row]
    gutters: list[Span]


def _blocks(rows: list[Row]) -> Iterator[str]:
    start = 0
    while start < len(rows):
        block = _columns_from(rows, start)
        if start and _distance(rows, start) > _PARAGRAPH:
            yield ""
        yield _block_text(block)
        start += len(block.rows)


def _columns_from(rows: list[Row], start: int) -> _Block:
    """The longest block of columns that starts with this row, or else the row alone."""
    least = _LEAST_GUTTER * rows[start][0].height
    free = _gaps(rows[start])
    extent = _extent(rows[start])
    gutters = _inside(free, extent)
    stop = start + 1
    if not gutters:
        return _Block([rows[start]], [])
    for place in range(stop, len(rows)):
        row = rows[place]
        row_extent = _extent(row)
        extent = Span(min(extent.start, row_extent.start), max(extent.stop, row_extent.stop))
        free = [gap for gap in _common(free, _gaps(row)) if gap.stop - gap.start >= least]
        narrowed = _inside(free, extent)
        if len(narrowed) < len(gutters) or (len(row) == 1 and _distance(rows, place) > _PARAGRAPH):
            break
        if len(row) > 1:
            stop = place + 1
            gutters = narrowed
    if stop == start + 1:
        return _Block([rows[start]], [])
    while stop < len(rows) and _continues(rows, start, stop, gutters):
        stop += 1
    return _Block(rows[start:stop], gutters)


def _gaps(row: Row) -> list[Span]:
    """What no piece of a row covers, with both margins of the page."""
    gaps = []
    covered = -_EDGE
    for piece in row:
        if piece.left > covered:
            gaps.append(Span(covered, piece.left))
        covered = max(covered, piece.right)
    return [*gaps, Span(covered, _EDGE)]


def _extent(row: Row) -> Span:
    """Where the first piece of a row ends, and where its last one begins."""
    return Span(min(piece.right for piece in row), max(piece.left for piece in row))


def _inside(gaps: list[Span], extent: Span) -> list[Span]:
    """The gaps that have pieces on both sides."""
    return [gap for gap in gaps if extent.start <= gap.start and gap.stop <= extent.stop]


def _common(gaps: list[Span], row_gaps: list[Span]) -> list[Span]:
    """What lies in a gap of both lists."""
    pairs = product(gaps, row_gaps)
    overlaps = [Span(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs]
    return [overlap for overlap in overlaps if overlap.start < overlap.stop]


def _distance(rows: list[Row], place: int) -> float:
    """Space above a row, in line heights."""
    bottom = min(piece.bottom for piece in rows[place - 1])
    first = rows[place][0]
    return (bottom - first.top) / (first.height or 1)


def _continues(
    rows: list[Row],
    start: int,
    place: int,
    gutters: list[Span],
) -> bool:
    """Whether a row goes on with one column of the block above it, without a space between."""
    piece = rows[place][0]
    column = _column(piece, gutters)
    if len(rows[place]) > 1 or column is None or _distance(rows, place) > _PARAGRAPH:
        return False
    pieces_above = (above for row in reversed(rows[start:place]) for above in row)
    lefts = (above.left for above in pieces_above if _column(above, gutters) == column)
    return abs(next(lefts, _EDGE) - piece.left) < piece.height


def _column(piece: Piece, gutters: list[Span]) -> int | None:
    """The number of a piece's column; None if it lies across a gutter."""
    number = sum(gutter.stop <= piece.left for gutter in gutters)
    crosses = number < len(gutters) and piece.right > gutters[number].start
    return None if crosses else number


def _block_text(block: _Block) -> str:
    if not block.gutters:
        return "\n".join(map(_line, block.rows))
    numbers = range(len(block.gutters) + 1)
    columns = [[_cell(row, number, block.gutters) for row in block.rows] for number in numbers]
    lines = list(map(_line, block.rows))
    prose = [_is_prose(column) for column in columns]
    if all(prose) and len(columns) <= _MOST_PROSE:
        if _right_to_left(" ".join(lines)):
            columns.reverse()
        return "\n".join("\n".join(filter(None, column)) for column in columns)
    divided_rows = sum(len(row) > 1 for row in block.rows)
    if 2 * divided_rows < len(block.rows) or any(_is_running(column) for column in columns):
        return "\n".join(lines)
    return markdown_table(zip(*columns, strict=True)) + "\n"


def _cell(
    row: Row,
    column: int,
    gutters: list[Span],
) -> str:
    return _line([piece for piece in row if _column(piece, gutters) == column])


def _line(row: Row) -> str:
    texts = [piece.text for piece in row]
    line = " ".join(texts)
    return " ".join(reversed(texts)) if _right_to_left(line) else line


def _right_to_left(text: str) -> bool:
    return 2 * len(_RIGHT_TO_LEFT.findall(text)) > sum(map(str.isalpha, text))


def _is_prose(column: Sequence[str]) -> bool:
    """Whether the lines of a column are sentences, by their length or because they begin in the middle of one."""
    words, continued = _flow(column)
    return words >= _LONG_LINE or (words >= _SHORT_LINE and continued >= _CONTINUED_SHARE)


def _is_running(column: Sequence[str]) -> bool:
    """Whether the lines of a column are those of a paragraph, beside numbers or terms in the margin."""
    words, continued = _flow(column)
    return words >= _LONG_LINE and continued >= _CONTINUED_SHARE


def _flow(column: Sequence[str]) -> tuple[float, float]:
    """Words of a line on average, and the share of lines that begin in the middle of a sentence."""
    lines = [line for line in column if line]
    words = mean(len(line.split()) for line in lines)
    continued = mean(line[0].islower() for line in lines)
    return words, continued
