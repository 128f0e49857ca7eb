"""Tables as Markdown: those of sheets, with captions, headers of several rows and blank rows, and those of other readers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import NamedTuple

from blend_retrieval.readers.base import UnreadableError

_NUMBER = re.compile(r"[^\w]*\d[\d.,:'\s/%-]*[^\d]{0,5}")
_HEADING = re.compile(r"^(?=#{1,6}(?:\s|$))")
_MOST_HEADER_ROWS = 3
_MOST_PLACES = 10_000_000  # for cells in a table
_BETWEEN_CELLS = "\x1f"  # no cell has it: `table_cell` takes it for a blank
_LINES_AT_ONCE = 10_000  # that are joined: a string for each takes more memory than its text
_LEAST_BELOW_PAIRS = 4  # columns of a table, over which rows of two cells are captions


class Row(NamedTuple):
    """A row of a sheet: its cells that are not blank.

    columns: those of the cells, in order.
    joined: the cells' texts in one string, which takes a fraction of a dictionary's memory.
    spans: whether a cell in it stands over several columns, so that the next row divides them further.
    """

    columns: tuple[int, ...]
    joined: str
    spans: bool = False

    @classmethod
    def of(cls, cells: Mapping[int, str]) -> Row:
        """The row of these cells, which are in the order of their columns, each as `table_cell` returns it."""
        return cls(tuple(cells), _BETWEEN_CELLS.join(cells.values()))

    @property
    def texts(self) -> list[str]:
        """The cells' texts, in the order of columns."""
        return self.joined.split(_BETWEEN_CELLS) if self.columns else []

    @property
    def cells(self) -> dict[int, str]:
        """The cells, by column."""
        return dict(zip(self.columns, self.texts, strict=True))


class Rows:
    """Rows in little memory."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._columns: list[tuple[int, ...]] = []
        self._joined: list[str] = []
        self._spanning: set[int] = set()
        for row in rows:
            self.append(row)

    def __len__(self) -> int:
        return len(self._joined)

    def __getitem__(self, place: int) -> Row:
        return Row(self._columns[place], self._joined[place], place in self._spanning)

    def __iter__(self) -> Iterator[Row]:
        return map(self.__getitem__, range(len(self)))

    def append(self, row: Row) -> None:
        """Add a row at the end."""
        if row.spans:
            self._spanning.add(len(self))
        columns = self._shapes.setdefault(row.columns, row.columns)
        self._columns.append(columns)
        self._joined.append(row.joined)

    def extend(self, rows: Iterable[Row]) -> None:
        """Add rows at the end."""
        for row in rows:
            self.append(row)

    def behind(self, first: int) -> Rows:
        """The rows without the first ones."""
        return Rows(islice(self, first, None)) if first else self

    def take(self, place: int) -> Row:
        """A row, which is empty afterwards."""
        row = self[place]
        self._joined[place] = ""
        return row

    def shapes(self) -> Iterable[tuple[int, ...]]:
        """The sets of columns that rows have."""
        return self._shapes.values()

    def columns(self) -> list[int]:
        """The columns that have cells."""
        return sorted(set().union(*self._shapes))


def markdown_table(rows: Iterable[Sequence[str]]) -> str:
    """Rows as a Markdown table under the first, without blank rows and blank columns."""
    filled = (Row.of(filled_cells(row)) for row in rows)
    filled_rows = Rows(row for row in filled if row.columns)
    return _table(filled_rows, 1) if filled_rows else ""


def filled_cells(row: Sequence[str]) -> dict[int, str]:
    """The cells of a row that are not blank, by column, as a Markdown table takes them."""
    cells = enumerate(map(table_cell, row))
    return {column: cell for column, cell in cells if cell}


def table_cell(value: str) -> str:
    """A value in one line, with its vertical lines escaped."""
    return " ".join(value.split()).replace("|", "\\|")


def paragraph(text: str) -> str:
    """A text as a paragraph in one line, never a heading."""
    return _HEADING.sub(r"\\", " ".join(text.split()))


def _table(rows: Rows, header_rows: int) -> str:
    """The rows as Markdown. They are gone afterwards."""
    columns = rows.columns()
    if len(columns) * len(rows) > _MOST_PLACES:
        raise UnreadableError(f"has a table of more than {_MOST_PLACES:,} cells with the empty ones: divide it")
    whole = tuple(columns)
    pieces = []
    lines = []
    for place in range(len(rows)):
        if place == header_rows:
            lines.append(_ruler(columns))
        row = rows.take(place)
        if row.columns == whole:
            line = row.joined.replace(_BETWEEN_CELLS, " | ")
        else:
            cells = row.cells
            line = " | ".join([cells.get(column, "") for column in columns])
        lines.append(f"| {line} |")
        if len(lines) >= _LINES_AT_ONCE:
            pieces.append("\n".join(lines))
            lines.clear()
    if len(rows) == header_rows:
        lines.append(_ruler(columns))
    pieces.append("\n".join(lines))
    return "\n".join(filter(None, pieces))


def _ruler(columns: Sequence[int]) -> str:
    return f"|{' --- |' * len(columns)}"


def sheet_markdown(rows: Iterable[Row]) -> str:
    """A sheet as Markdown: its tables, each under its header, and its captions as paragraphs.

    A caption is a row of one cell above a table, or of a name and its value above a header. Blank rows divide tables only
    where the rows behind them have a header.
    A header has several rows, all above the ruler, where a cell in it stands over several columns.
    """
    texts: list[str] = []
    table = Rows()
    for block in _with_their_captions(_blocks(rows)):
        captions = _captions(block)
        titles = [" ".join(block[place].texts) for place in range(captions)]
        body = block.behind(captions)
        if not table or _is_new_table(body, table):
            texts += _table_text(table)
            texts += map(paragraph, titles)
            table = body
        else:
            table.extend(block)
    texts += _table_text(table)
    return "\n\n".join(texts)


def _blocks(rows: Iterable[Row]) -> Iterator[Rows]:
    """Rows without blank ones between them."""
    for is_filled, block in groupby(rows, key=lambda row: bool(row.columns)):
        if is_filled:
            yield Rows(block)


def _with_their_captions(blocks: Iterable[Rows]) -> Iterator[Rows]:
    """Blocks of rows without blank rows between them; one that holds captions alone joins the next."""
    captions = Rows()
    for block in blocks:
        if captions:
            captions.extend(block)
        else:
            captions = block
        if any(len(columns) > 1 for columns in block.shapes()):
            yield captions
            captions = Rows()
    if captions:
        yield captions


def _captions(block: Rows) -> int:
    """The number of rows above a table that are captions: rows of one cell, and of a name and its value above a header."""
    first_column = min(columns[0] for columns in block.shapes())
    titles = 0
    end = 0
    for row in block:
        is_title = len(row.columns) == 1
        is_pair = row.columns == (first_column, first_column + 1)
        if not (is_title or is_pair):
            break
        if is_title and titles == end:
            titles += 1
        end += 1
    if titles == len(block):
        return 0
    if end == len(block) or _has_number(block[end]):
        return titles
    is_wide = len(block[end].columns) >= _LEAST_BELOW_PAIRS
    return end if is_wide else titles


def _is_new_table(block: Rows, table: Rows) -> bool:
    """Whether rows behind a blank row have a header of their own: words over numbers, or columns that the table lacks."""
    header = block[0]
    if len(header.columns) < 2 or len(block) == 1:
        return False
    if not set(header.columns).issubset(table.columns()):
        return True
    return not _has_number(header) and any(map(_has_number, islice(block, 1, None)))


def _has_number(row: Row) -> bool:
    return any(map(_NUMBER.fullmatch, row.texts))


def _table_text(rows: Rows) -> list[str]:
    if not rows:
        return []
    header_rows = 1
    for row in islice(rows, _MOST_HEADER_ROWS - 1):
        if not row.spans or header_rows == len(rows):
            break
        header_rows += 1
    return [_table(rows, header_rows)]
