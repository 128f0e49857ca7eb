"""CSV and TSV as Markdown tables, and tables for other readers."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from blend_retrieval.decoding import decode
from blend_retrieval.readers.base import Part, Parts, notes

_DELIMITERS = ",;\t|"
_GLANCE = 50  # rows from which the delimiter is told
_LONGEST_CELL = 1 << 24


def markdown_table(rows: Iterable[Sequence[str]]) -> str:
    """Rows as a Markdown table under the first, without blank rows and blank columns."""
    filled_rows = [filled for row in rows if (filled := _filled_cells(row))]
    if not filled_rows:
        return ""
    columns = sorted(set().union(*filled_rows))
    lines = []
    for filled in filled_rows:
        cells = [filled.get(column, "") for column in columns]
        lines.append(f"| {' | '.join(cells)} |")
    lines.insert(1, f"|{' --- |' * len(columns)}")
    return "\n".join(lines)


def _filled_cells(row: Sequence[str]) -> dict[int, str]:
    """The cells of a row that are not blank, by column."""
    cells = enumerate(map(_cell, row))
    return {column: cell for column, cell in cells if cell}


def _cell(value: str) -> str:
    return " ".join(value.split()).replace("|", "\\|")


def read_csv(data: bytes, title: str) -> Parts:
    """Read a table whose first row is its header, with the delimiter that divides all rows."""
    text, note = decode(data)
    csv.field_size_limit(_LONGEST_CELL)
    delimiter = max(_DELIMITERS, key=lambda delimiter: _least_columns(text, delimiter))
    markdown = markdown_table(_rows(text, delimiter))
    table = Part("", title, markdown, "markdown")
    return [table, *notes(note)]


def _least_columns(text: str, delimiter: str) -> int:
    first_rows = islice(_rows(text, delimiter), _GLANCE)
    return min(map(len, first_rows), default=0)


def _rows(text: str, delimiter: str) -> Iterator[list[str]]:
    lines = io.StringIO(text, newline="")
    return filter(any, csv.reader(lines, delimiter=delimiter))
