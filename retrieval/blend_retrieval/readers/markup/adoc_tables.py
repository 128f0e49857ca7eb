"""Tables of AsciiDoc: cells of one row may stand on several lines."""

from __future__ import annotations

import csv
import re
from typing import NamedTuple

_COLUMNS = re.compile(r'cols\s*=\s*(?:"([^"]*)"|([^,\s"\]]+))')
_FORMAT = re.compile(r"format\s*=\s*\"?(\w+)")
_SEPARATOR = re.compile(r'separator\s*=\s*"?([^",\]]+)')
_DELIMITERS = {"csv": ",", "dsv": ":", "tsv": "\t"}
_MOST_COPIES = 1000  # of a cell or column
_MOST_COLUMNS = 10_000
_MOST_PLACES = 500_000  # of a table, for cells that stand in several
_MOST_COPIED = 1_000_000  # characters of a table
_FORMATS = {",": "csv", ":": "dsv"}
_CELL = r"(?:(\d+)?(?:\.(\d+))?([+*]))?[<^>]?(?:\.[<^>])?[a-z]?"


def table_rows(lines: list[str], attributes: str, sign: str) -> list[list[str]]:
    """The rows of a table. attributes: those above it. sign: the first of its fence."""
    kind = _FORMAT.search(attributes)
    name = kind[1] if kind else _FORMATS.get(sign, "psv")
    usual = "!" if sign == "!" else "|"
    delimiter = _DELIMITERS.get(name, usual)
    separator = _SEPARATOR.search(attributes)
    if separator:
        delimiter = separator[1]
    if name in _DELIMITERS:
        rows = csv.reader(lines, delimiter=delimiter[:1])
        return list(filter(None, rows))
    columns = _column_count(attributes)
    return _rows(lines, delimiter, columns)


def _column_count(attributes: str) -> int:
    """The number of columns that the attributes name, or 0."""
    columns = _COLUMNS.search(attributes)
    if columns is None:
        return 0
    count = 0
    for column in re.split(r"[,;]", columns[1] or columns[2]):
        times = re.match(r"\s*(\d+)\*", column)
        count += _count(times[1]) if times else 1
    return min(count, _MOST_COLUMNS)


def _rows(lines: list[str], delimiter: str, columns: int) -> list[list[str]]:
    """Cells in rows of `columns`, or of as many as the first line has."""
    mark = re.compile(rf"(?:^|(?<=\s)){_CELL}(?<!\\){re.escape(delimiter)}")
    text = "\n".join(lines)
    marks = list(mark.finditer(text))
    first_line = next((line for line in lines if line.strip()), "")
    if not columns:
        widths = [_width(match) for match in mark.finditer(first_line)]
        columns = min(sum(widths), _MOST_COLUMNS) or 1
    cells: list[_Cell] = []
    if not marks:
        return [[line] for line in lines]
    stops = [match.start() for match in marks[1:]]
    copied = 0
    for match, stop in zip(marks, [*stops, len(text)], strict=True):
        words = text[match.end() : stop].strip()
        width = _width(match)
        height = _count(match[2])
        copied += (width * height - 1) * (len(words) + 1)
        if copied > _MOST_COPIED:
            width = height = 1
        if match[3] == "*":
            cells += [_Cell(words, 1, height)] * width
        else:
            cells.append(_Cell(words, width, height))
    return _placed(cells, columns)


def _width(match: re.Match[str]) -> int:
    return _count(match[1])


def _count(digits: str | None) -> int:
    return min(int(digits or 1), _MOST_COPIES)


class _Cell(NamedTuple):
    """A cell, and the columns and rows over which it stands."""

    text: str
    width: int
    height: int


def _placed(cells: list[_Cell], columns: int) -> list[list[str]]:
    """The cells in their rows; a cell over several columns or rows stands in each."""
    rows: list[list[str | None]] = [[None] * columns]
    row = place = 0
    for text, width, height in cells:
        while place == columns or rows[row][place] is not None:
            place += 1
            if place < columns:
                continue
            place = 0
            row += 1
            if row == len(rows):
                rows.append([None] * columns)
        is_bounded = columns * (row + height) <= _MOST_PLACES
        for below in range(row, row + (height if is_bounded else 1)):
            while below >= len(rows):
                rows.append([None] * columns)
            stop = min(columns, place + width)
            rows[below][place:stop] = [text] * (stop - place)
    return [[cell or "" for cell in row] for row in rows]
