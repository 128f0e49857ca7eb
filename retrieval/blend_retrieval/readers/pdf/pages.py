"""The texts of pages. A table that goes on over the next page is one table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from blend_retrieval.readers.pdf.layout import (
    PARAGRAPH,
    Block,
    Piece,
    Row,
    Span,
    block_cells,
    block_from,
    block_text,
    cells_of,
    distance_above,
    gutters_of,
    is_jump,
    page_blocks,
    page_rows,
    with_headings_apart,
)
from blend_retrieval.readers.tables import markdown_table

_MOST_HEADS = 3  # rows between a table and the edge of its page
_FRAME_SPACE = 1.5  # line heights between a table and a running head or foot
_CAPTION = re.compile(r"\s*(?:table|tab\.|tabelle|tableau|fig)", re.IGNORECASE)
_GOES_ON = re.compile(r"contin|cont[.'’]|fortsetzung|fortgesetzt|suite", re.IGNORECASE)
_NUMBER = re.compile(r"[-+−–(]*[$€£¥]?\s*\d[\d\s.,:/%€$£¥)–-]*[^\W\d]{0,3}")

_Cells = list[list[str]]


@dataclass
class _Table:
    """The cells of a table, its rows on its first page, and the gaps between its columns.

    line: the text of a single row, which is no table yet.
    """

    cells: _Cells
    rows: list[Row]
    gutters: list[Span]
    line: str = ""

    def text(self) -> str:
        if len(self.cells) == 1:
            return self.line
        return f"{markdown_table(self.cells)}\n"

    def takes(self, rows: _Cells) -> bool:
        """Whether rows at the top of the next page go on with this table, rather than begin one of their own."""
        body = self.cells[1:]
        pairs = list(enumerate(rows[0]))
        if rows[0] == self.cells[0]:
            return True
        for column, cell in pairs:
            is_word = cell != "" and not _is_number(cell)
            if body and is_word and _has_numbers(body, column):
                return False
        if body:
            return True
        names = self.cells[0]  # a header at the foot of its page
        return any(_is_number(cell) and not _is_number(names[column]) for column, cell in pairs)

    def go_on(self, rows: _Cells) -> None:
        """Add rows of the next page, without the header that it repeats."""
        start = 0
        while start < len(rows) and rows[start] == self.cells[start]:
            start += 1
        self.cells += rows[start:]


def _is_number(cell: str) -> bool:
    return _NUMBER.fullmatch(cell.strip()) is not None


def _has_numbers(rows: _Cells, column: int) -> bool:
    cells = [row[column] for row in rows if row[column]]
    return bool(cells) and all(map(_is_number, cells))


@dataclass
class _Page:
    """Texts and tables of a page from top to bottom. open_table: the one that may go on over the next page."""

    parts: list[str | _Table] = field(default_factory=list)
    open_table: _Table | None = None
    rows_below: int = 0

    def add(self, block: Block) -> None:
        if block.space > PARAGRAPH:
            self.parts.append("")
        if not self.rows_below and block.space <= _FRAME_SPACE:
            self.open_table = None  # text follows it at once
        cells = block_cells(block)
        gutters = block.gutters
        line = block_text(block) if cells is None else ""
        if len(block.rows) == 1:
            gutters = gutters_of(block.rows[0])
            header = cells_of(block.rows[0], gutters) if gutters else None
            cells = [header] if header else None
        self.rows_below += len(block.rows)
        if cells is None:
            self.parts.append(line)
            return
        table = _Table(cells, block.rows, gutters, line)
        self.parts.append(table)
        is_foot = len(cells) == 1 and self.open_table is not None and self.rows_below <= _MOST_HEADS
        if not is_foot:
            self.open_table = table
            self.rows_below = 0

    def text(self) -> str:
        texts = [part if isinstance(part, str) else part.text() for part in self.parts]
        return with_headings_apart("\n".join(texts))


def page_texts(pages: Iterable[Sequence[Piece]]) -> list[str]:
    """The texts of pages, in reading order. A line after a `#` is a heading."""
    laid: list[_Page] = []
    open_table: _Table | None = None
    for pieces in pages:
        rows = page_rows(pieces)
        page = _Page()
        following = _following(rows, open_table) if open_table else None
        if open_table and following:
            for block in page_blocks(rows[: following.start]):
                page.add(block)
            open_table.go_on(following.cells)
            page.open_table = open_table
            page.rows_below = 0
        for block in page_blocks(rows, following.stop if following else 0):
            page.add(block)
        open_table = page.open_table if page.rows_below <= _MOST_HEADS else None
        laid.append(page)
    return [page.text() for page in laid]


class _Following(NamedTuple):
    """The rows of a page, from `start` to `stop`, that go on with the table of the page before."""

    start: int
    stop: int
    cells: _Cells


def _following(rows: list[Row], table: _Table) -> _Following | None:
    for start in range(min(_MOST_HEADS + 1, len(rows))):
        if start and not _is_head(rows, start - 1):
            return None
        block = block_from(rows, start)
        cells = block_cells(block)
        is_alike = cells is not None and _are_alike(block.gutters, table.gutters)
        if cells is None or not is_alike:
            cells = _fitting(rows, start, table)
        if cells:
            stop = start + len(cells)
            goes_on = table.takes(cells)
            return _Following(start, stop, cells) if goes_on else None
    return None


def _is_head(rows: list[Row], place: int) -> bool:
    """Whether a row may stand above the rest of a table: a running head or "Table 1 (continued)"."""
    text = " ".join(piece.text for piece in rows[place])
    if _GOES_ON.search(text):
        return True
    is_heading = any(piece.level for piece in rows[place])
    is_last = place + 1 == len(rows)
    if is_heading or is_last or _CAPTION.match(text):
        return False
    return distance_above(rows, place + 1) > _FRAME_SPACE


def _are_alike(gutters: list[Span], other_gutters: list[Span]) -> bool:
    if len(gutters) != len(other_gutters):
        return False
    for gap, gap_above in zip(gutters, other_gutters, strict=True):
        start = max(gap.start, gap_above.start)
        stop = min(gap.stop, gap_above.stop)
        if start >= stop:
            return False
    return True


def _fitting(rows: list[Row], start: int, table: _Table) -> _Cells:
    """The cells of rows whose pieces stand in the columns of a table."""
    fitting: _Cells = []
    if len(table.cells) == 1:
        return fitting
    for place in range(start, len(rows)):
        cells = cells_of(rows[place], table.gutters)
        is_far = place > start and distance_above(rows, place) > PARAGRAPH
        is_alone = len(rows[place]) == 1 and (is_far or place == start)
        if cells is None or is_alone or is_jump(rows, start, place):
            break
        if not _are_aligned(rows[place], table):
            break
        fitting.append(cells)
    return fitting


def _are_aligned(row: Row, table: _Table) -> bool:
    """Whether each piece of a row begins or ends where one of the table does."""
    pieces = [piece for table_row in table.rows for piece in table_row]
    return all(any(_is_below(piece, above) for above in pieces) for piece in row)


def _is_below(piece: Piece, above: Piece) -> bool:
    tolerance = piece.height / 2
    at_left = abs(piece.left - above.left)
    at_right = abs(piece.right - above.right)
    return min(at_left, at_right) < tolerance
