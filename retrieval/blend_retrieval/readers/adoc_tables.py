"""Tables of AsciiDoc: cells of one row may stand on several lines."""

from __future__ import annotations

import csv
import re

_COLUMNS = re.compile(r'cols\s*=\s*(?:"([^"]*)"|([^,\s"\]]+))')
_FORMAT = re.compile(r"format\s*=\s*\"?(\w+)")
_SEPARATOR = re.compile(r'separator\s*=\s*"?([^",\]]+)')
_DELIMITERS = {"csv": ",", "dsv": ":", "tsv": "\t"}
_CELL = r"(?:(\d+)?(?:\.(\d+))?([+*]))?[<^>]?(?:\.[<^>])?[a-z]?"


def table_rows(lines: list[str], attributes: str, sign: str) -> list[list[str]]:
    """The rows of a table. attributes: those above it. sign: the first of its fence."""
    kind = _FORMAT.search(attributes)
    name = kind[1] if kind else {",": "csv", ":": "dsv"}.get(sign, "psv")
    separator = _SEPARATOR.search(attributes)
    if name in _DELIMITERS:
        delimiter = separator[1] if separator else _DELIMITERS[name]
        return [row for row in csv.reader(lines, delimiter=delimiter[:1]) if row]
    delimiter = separator[1] if separator else "!" if sign == "!" else "|"
    return _rows(lines, delimiter, _column_count(attributes))


def _column_count(attributes: str) -> int:
    """The number of columns that the attributes name, or 0."""
    columns = _COLUMNS.search(attributes)
    if columns is None:
        return 0
    count = 0
    for column in re.split(r"[,;]", columns[1] or columns[2]):
        times = re.match(r"\s*(\d+)\*", column)
        count += int(times[1]) if times else 1
    return count


def _rows(lines: list[str], delimiter: str, columns: int) -> list[list[str]]:
    """Cells in rows of `columns`, or of as many as the first line has."""
    mark = re.compile(rf"(?:^|(?<=\s)){_CELL}(?<!\\){re.escape(delimiter)}")
    text = "\n".join(lines)
    marks = list(mark.finditer(text))
    first_line = next((line for line in lines if line.strip()), "")
    columns = columns or sum(_span(match)[0] for match in mark.finditer(first_line)) or 1
    cells: list[tuple[str, int, int]] = []
    for match, following in zip(marks, [*marks[1:], None], strict=True):
        cell = text[match.end() : following.start() if following else len(text)]
        width, height = _span(match)
        copies = width if match[3] == "*" else 1
        cells += [(cell.strip(), 1 if match[3] == "*" else width, height)] * copies
    return _placed(cells, columns)


def _span(match: re.Match[str]) -> tuple[int, int]:
    return int(match[1] or 1), int(match[2] or 1)


def _placed(cells: list[tuple[str, int, int]], columns: int) -> list[list[str]]:
    """The cells in their rows; a cell over several columns or rows stands in each."""
    rows: list[list[str | None]] = [[None] * columns]
    row = 0
    for text, width, height in cells:
        while None not in rows[row]:
            row += 1
            if row == len(rows):
                rows.append([None] * columns)
        start = rows[row].index(None)
        for below in range(row, row + height):
            while below >= len(rows):
                rows.append([None] * columns)
            for column in range(start, min(columns, start + width)):
                rows[below][column] = text
    return [[cell or "" for cell in row] for row in rows]
