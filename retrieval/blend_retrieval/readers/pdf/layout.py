"""The reading order of a page: lines from top to bottom, columns one after another, tables as Markdown.

Lines whose pieces leave a gap at the same place form a block of columns. Such a block is prose in columns if the lines
on every side of a gap go on in the middle of a sentence; otherwise it is a table.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, product
from statistics import mean
from typing import NamedTuple

from blend_retrieval.readers.pdf.bidi import is_right_to_left

HEADING = re.compile(r"#{1,6} ")  # at the start of a line
MARKER = re.compile(r"[^\w\s]{1,2}|\(?\w{1,3}[.)]")  # of a list item
_NUMBER = re.compile(r"[\dA-Z.]{1,8}")  # of a heading
_SPELLED = str.maketrans(
    {
        "\u00ad": "",  # a soft hyphen; the others are ligatures
        "\ufb00": "ff",
        "\ufb01": "fi",
        "\ufb02": "fl",
        "\ufb03": "ffi",
        "\ufb04": "ffl",
        "\ufb05": "st",
        "\ufb06": "st",
    }
)
_LEAST_GUTTER = 0.5  # line heights
PARAGRAPH = 0.7  # line heights between two paragraphs
_LEAST_JUMP, _JUMP = 2.0, 2.0  # line heights; times the spaces beside
_MOST_PROSE = 3  # columns
_SHORT_LINE, _LONG_LINE = 2, 5  # words
_CONTINUED_SHARE = 0.25  # of a column's lines
_EDGE = 1e9


class Span(NamedTuple):
    """A stretch of a line, in points."""

    start: float
    stop: float


class Piece(NamedTuple):
    """A stretch of text on one line, its place and size in points; y grows upwards. level: of a heading, or 0."""

    text: str
    left: float
    bottom: float
    right: float
    top: float
    size: float = 0.0
    level: int = 0

    @property
    def height(self) -> float:
        """Height of its line."""
        return self.top - self.bottom

    @property
    def middle(self) -> float:
        """Half-way between bottom and top."""
        return (self.top + self.bottom) / 2


Row = list[Piece]


def page_rows(pieces: Sequence[Piece]) -> list[Row]:
    """The rows of a page from top to bottom, each from left to right. The marker of a list item is no piece of its own."""
    return [_with_markers(row) for row in _rows(pieces)]


def with_headings_apart(text: str) -> str:
    """The text with a blank line around each heading. A line after a `#` is a heading."""
    lines = text.split("\n")
    return "\n".join(_with_headings_apart(lines)).translate(_SPELLED).strip("\n")


def _rows(pieces: Sequence[Piece]) -> list[Row]:
    """Pieces of one height together, from top to bottom; in each row from left to right."""
    rows: list[Row] = []
    for piece in sorted(pieces, key=lambda piece: -piece.middle):
        if rows and rows[-1][0].bottom < piece.middle:
            rows[-1].append(piece)
        else:
            rows.append([piece])
    for row in rows:
        row.sort(key=lambda piece: piece.left)
    return rows


def _with_markers(row: Row) -> Row:
    """A row in which the marker of a list item is no column of its own."""
    if len(row) < 2 or not MARKER.fullmatch(row[0].text):
        return row
    marker, item = row[:2]
    marked = item._replace(text=f"{marker.text} {item.text}", left=marker.left)
    return [marked, *row[2:]]


def _with_headings_apart(lines: Iterable[str]) -> Iterator[str]:
    """The lines with a blank one around each heading; the lines of one heading become one."""
    heading = ""
    above = ""
    for line in lines:
        mark = HEADING.match(line)
        if heading and mark and heading.startswith(mark[0]):
            heading += line[mark.end() - 1 :]
            continue
        if heading:
            yield heading
            if line:
                yield ""
        heading = line if mark else ""
        if mark and above:
            yield ""
        if not mark:
            yield line
        above = line
    if heading:
        yield heading


class Block(NamedTuple):
    """Consecutive rows, and the gaps that divide all of them into columns. space: above them, in line heights."""

    rows: list[Row]
    gutters: list[Span]
    space: float = 0.0


def page_blocks(rows: list[Row], start: int = 0) -> Iterator[Block]:
    """The blocks of a page from top to bottom, from this row on."""
    while start < len(rows):
        block = block_from(rows, start)
        yield block._replace(space=distance_above(rows, start) if start else 0.0)
        start += len(block.rows)


def block_from(rows: list[Row], start: int) -> Block:
    """The longest block of columns that starts with this row, or else the row alone."""
    least = _LEAST_GUTTER * rows[start][0].height
    free = _gaps(rows[start])
    extent = _extent(rows[start])
    gutters = _inside(free, extent)
    stop = start + 1
    if not gutters:
        return Block([rows[start]], [])
    for place in range(stop, len(rows)):
        row = rows[place]
        row_start, row_stop = _extent(row)
        first = min(extent.start, row_start)
        last = max(extent.stop, row_stop)
        extent = Span(first, last)
        common = _common(free, _gaps(row))
        free = [gap for gap in common if gap.stop - gap.start >= least]
        narrowed = _inside(free, extent)
        if len(narrowed) < len(gutters) or is_jump(rows, start, place):
            break
        if len(row) > 1:
            stop = place + 1
            gutters = narrowed
        elif distance_above(rows, place) > PARAGRAPH:
            break
    if stop == start + 1:
        return Block([rows[start]], [])
    while stop < len(rows) and _continues(rows, start, stop, gutters):
        stop += 1
    return Block(rows[start:stop], gutters)


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
    start = min(piece.right for piece in row)
    stop = max(piece.left for piece in row)
    return Span(start, stop)


def _inside(gaps: list[Span], extent: Span) -> list[Span]:
    """The gaps that have pieces on both sides."""
    inside = []
    for gap in gaps:
        if extent.start <= gap.start and gap.stop <= extent.stop:
            inside.append(gap)
    return inside


def _common(gaps: list[Span], row_gaps: list[Span]) -> list[Span]:
    """What lies in a gap of both lists."""
    overlaps = []
    for gap, row_gap in product(gaps, row_gaps):
        start = max(gap.start, row_gap.start)
        stop = min(gap.stop, row_gap.stop)
        if start < stop:
            overlaps.append(Span(start, stop))
    return overlaps


def distance_above(rows: list[Row], place: int) -> float:
    """Space above a row, in line heights."""
    bottom = min(piece.bottom for piece in rows[place - 1])
    first = rows[place][0]
    return (bottom - first.top) / (first.height or 1)


def is_jump(rows: list[Row], start: int, place: int) -> bool:
    """Whether the space above a row is far larger than those between its neighbours, as at a running head or foot."""
    space = distance_above(rows, place)
    spaces = []
    for number in (place - 1, place + 1):
        if start < number < len(rows):
            spaces.append(distance_above(rows, number))
    if space <= _LEAST_JUMP or not spaces:
        return False
    usual = max(min(spaces), PARAGRAPH)
    return space > _JUMP * usual


def gutters_of(row: Row) -> list[Span]:
    """The gaps of a single row that are wide enough for columns."""
    least = _LEAST_GUTTER * row[0].height
    gaps = _inside(_gaps(row), _extent(row))
    return [gap for gap in gaps if gap.stop - gap.start >= least]


def _continues(rows: list[Row], start: int, place: int, gutters: list[Span]) -> bool:
    """Whether a row goes on with one column of the block above it, without a space between."""
    piece = rows[place][0]
    column = column_of(piece, gutters)
    is_alone = len(rows[place]) == 1
    is_apart = distance_above(rows, place) > PARAGRAPH
    if not is_alone or column is None or is_apart:
        return False
    rows_above = reversed(rows[start:place])
    pieces_above = chain.from_iterable(rows_above)
    lefts = (above.left for above in pieces_above if column_of(above, gutters) == column)
    left = next(lefts, _EDGE)
    return abs(left - piece.left) < piece.height


def column_of(piece: Piece, gutters: list[Span]) -> int | None:
    """The number of a piece's column; None if it lies across a gutter."""
    number = bisect_right(gutters, piece.left, key=lambda gutter: gutter.stop)
    crosses = number < len(gutters) and piece.right > gutters[number].start
    return None if crosses else number


def block_cells(block: Block) -> list[list[str]] | None:
    """The rows of a table, a text for each column; None if the block is prose."""
    if not block.gutters:
        return None
    columns = [list(map(_line, rows)) for rows in _columns(block)]
    is_prose = len(columns) <= _MOST_PROSE and all(map(_is_prose, columns))
    divided_rows = sum(len(row) > 1 for row in block.rows)
    is_sparse = 2 * divided_rows < len(block.rows)
    if is_prose or is_sparse or any(map(_is_running, columns)):
        return None
    return [list(cells) for cells in zip(*columns, strict=True)]


def block_text(block: Block) -> str:
    """The text of a block that is no table: line by line, columns of prose one after the other."""
    text = "\n".join(map(_marked_line, block.rows))
    if not block.gutters:
        return text
    column_rows = _columns(block)
    columns = [list(map(_line, rows)) for rows in column_rows]
    if len(columns) > _MOST_PROSE or not all(map(_is_prose, columns)):
        return text
    if is_right_to_left(text):
        column_rows.reverse()
    lines = map(_marked_line, chain.from_iterable(column_rows))
    return "\n".join(filter(None, lines))


def cells_of(row: Row, gutters: list[Span]) -> list[str] | None:
    """The texts of a row in the columns of a table; None if a piece lies across two of them."""
    places = [column_of(piece, gutters) for piece in row]
    if None in places:
        return None
    by_column = zip(places, row, strict=True)
    numbers = range(len(gutters) + 1)
    pieces: list[Row] = [[] for _ in numbers]
    for place, piece in by_column:
        pieces[place or 0].append(piece)
    return list(map(_line, pieces))


def _columns(block: Block) -> list[list[Row]]:
    numbers = range(len(block.gutters) + 1)
    return [_column_rows(block, number) for number in numbers]


def _column_rows(block: Block, column: int) -> list[Row]:
    """The pieces of each row in a column."""
    column_rows = []
    for row in block.rows:
        pieces = [piece for piece in row if column_of(piece, block.gutters) == column]
        column_rows.append(pieces)
    return column_rows


def _marked_line(row: Row) -> str:
    """The text of a row: a heading after a `#` for each level; other text after a `#` is indented."""
    line = _line(row)
    has_number = len(row) == 2 and _NUMBER.fullmatch(row[0].text)
    is_one_line = len(row) == 1 or has_number
    if is_one_line and all(piece.level for piece in row):
        return f"{'#' * row[0].level} {line}"
    return f" {line}" if HEADING.match(line) else line


def _line(row: Row) -> str:
    texts = [piece.text for piece in row]
    line = " ".join(texts)
    return " ".join(reversed(texts)) if is_right_to_left(line) else line


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
