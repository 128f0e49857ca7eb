"""CSV and TSV as Markdown tables, and tables for other readers."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from blend_retrieval.decoding import decode
from blend_retrieval.readers.base import Fault, Part, notes

_DELIMITERS = ",;\t|"
_GLANCE = 50  # rows from which the delimiter is told
_LONGEST_CELL = 1 << 24


def markdown_table(rows: Iterable[Sequence[str]]) -> str:
    """Rows as a Markdown table under the first, without blank rows and blank columns."""
    cells_of_rows = ([_cell(value) for value in row] for row in rows)
    filled = [{column: cell for column, cell in enumerate(cells) if cell} for cells in cells_of_rows if any(cells)]
    columns = sorted(set().union(*filled))
    if not columns:
        return ""
    lines = [f"| {' | '.join(cells.get(column, '') for column in columns)} |" for cells in filled]
    return "\n".join([lines[0], f"|{' --- |' * len(columns)}", *lines[1:]])


def _cell(value: str) -> str:
    return " ".join(value.split()).replace("|", "\\|")


def read_csv(data: bytes, title: str) -> list[Part | Fault]:
    """Read a table whose first row is its header, with the delimiter that divides all rows."""
    text, note = decode(data)
    csv.field_size_limit(_LONGEST_CELL)
    delimiter = max(_DELIMITERS, key=lambda delimiter: _least_columns(text, delimiter))
    return [Part("", title, markdown_table(_rows(text, delimiter)), "markdown"), *notes(note)]


def _least_columns(text: str, delimiter: str) -> int:
    first_rows = islice(_rows(text, delimiter), _GLANCE)
    return min(map(len, first_rows), default=0)


def _rows(text: str, delimiter: str) -> Iterator[list[str]]:
    return (row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if any(row))
