"""Tables as Markdown: those of sheets, with captions, headers of several rows and blank rows, and those of other readers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from blend_retrieval.readers.base import UnreadableError

_NUMBER = re.compile(r"[^\w]*\d[\d.,:'\s/%-]*[^\d]{0,5}")
_HEADING = re.compile(r"^(?=#{1,6}(?:\s|$))")
_MOST_HEADER_ROWS = 3
_MOST_PLACES = 10_000_000  # for cells in a table
_LEAST_BELOW_PAIRS = 4  # columns of a table, over which rows of two cells are captions


class Row(NamedTuple):
    """A row of a sheet: its cells that are not blank, by column.

    spans: whether a cell in it stands over several columns, so that the next row divides them further.
    """

    cells: dict[int, str]
    spans: bool = False


def markdown_table(rows: Iterable[Sequence[str]]) -> str:
    """Rows as a Markdown table under the first, without blank rows and blank columns."""
    filled_rows = [filled for row in rows if (filled := filled_cells(row))]
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


def _table(rows: Sequence[dict[int, str]], header_rows: int) -> str:
    columns = sorted(set().union(*rows))
    if len(columns) * len(rows) > _MOST_PLACES:
        raise UnreadableError(f"has a table of more than {_MOST_PLACES:,} cells with the empty ones: divide it")
    lines = []
    for filled in rows:
        cells = [filled.get(column, "") for column in columns]
        lines.append(f"| {' | '.join(cells)} |")
    lines.insert(header_rows, f"|{' --- |' * len(columns)}")
    return "\n".join(lines)


def sheet_markdown(rows: Iterable[Row]) -> str:
    """A sheet as Markdown: its tables, each under its header, and its captions as paragraphs.

    A caption is a row of one cell above a table, or of a name and its value above a header. Blank rows divide tables only
    where the rows behind them have a header.
    A header has several rows, all above the ruler, where a cell in it stands over several columns.
    """
    texts: list[str] = []
    table: list[Row] = []
    for block in _with_their_captions(_blocks(rows)):
        captions = _captions(block)
        body = block[captions:]
        if not table or _is_new_table(body, table):
            texts += _table_text(table)
            for caption in block[:captions]:
                words = " ".join(caption.cells.values())
                texts.append(paragraph(words))
            table = body
        else:
            table += block
    return "\n\n".join([*texts, *_table_text(table)])


def _blocks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows without blank ones between them."""
    for is_filled, block in groupby(rows, key=lambda row: bool(row.cells)):
        if is_filled:
            yield list(block)


def _with_their_captions(blocks: Iterable[list[Row]]) -> Iterator[list[Row]]:
    """Blocks of rows without blank rows between them; one that holds captions alone joins the next."""
    captions: list[Row] = []
    for block in blocks:
        captions += block
        if any(len(row.cells) > 1 for row in block):
            yield captions
            captions = []
    if captions:
        yield captions


def _captions(block: Sequence[Row]) -> int:
    """The number of rows above a table that are captions: rows of one cell, and of a name and its value above a header."""
    first_column = min(min(row.cells) for row in block)
    titles = 0
    end = 0
    for row in block:
        is_title = len(row.cells) == 1
        is_pair = list(row.cells) == [first_column, first_column + 1]
        if not (is_title or is_pair):
            break
        if is_title and titles == end:
            titles += 1
        end += 1
    if titles == len(block):
        return 0
    if end == len(block) or _has_number(block[end]):
        return titles
    is_wide = len(block[end].cells) >= _LEAST_BELOW_PAIRS
    return end if is_wide else titles


def _is_new_table(block: Sequence[Row], table: Sequence[Row]) -> bool:
    """Whether rows behind a blank row have a header of their own: words over numbers, or columns that the table lacks."""
    header, *body = block
    if len(header.cells) < 2 or not body:
        return False
    columns = set().union(*(row.cells for row in table))
    if not header.cells.keys() <= columns:
        return True
    return not _has_number(header) and any(map(_has_number, body))


def _has_number(row: Row) -> bool:
    return any(map(_NUMBER.fullmatch, row.cells.values()))


def _table_text(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    header_rows = 1
    for row in rows[: _MOST_HEADER_ROWS - 1]:
        if not row.spans or header_rows == len(rows):
            break
        header_rows += 1
    cells = [row.cells for row in rows]
    return [_table(cells, header_rows)]
