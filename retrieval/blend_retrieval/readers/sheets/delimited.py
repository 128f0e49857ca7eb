"""CSV and TSV as Markdown tables, whatever divides their columns."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from blend_retrieval.decoding import decode
from blend_retrieval.document import enumerated
from blend_retrieval.readers.base import Fault, Part, Parts, notes
from blend_retrieval.readers.progress import reported
from blend_retrieval.readers.tables import Row, filled_cells, sheet_markdown, table_cell

_DELIMITERS = ",;\t|"
_GLANCE = 2000  # rows by which the delimiter is chosen
_LONGEST_CELL = 1 << 24
_LONGEST_RECORD = 1000  # lines
_DELIMITER_LINE = re.compile(r'"?sep=(.)"?[ \t]*(?:\r\n|\r|\n|\Z)', re.IGNORECASE)
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|\Z)")
_GLANCE_AT_QUOTES = 1 << 16  # characters
_BETWEEN_APOSTROPHES = re.compile(r"(?:^|[,;|\t])\s*'[^']*'\s*(?:[,;|\t]|$)")
_NO_TABLE = (0.0, 0, 0)
_PROSE_SIGNS = ",;"  # with a blank behind them
_NUMBER = re.compile(r"[^\d,;|\t]*[\d.,'\s]*\d[^\d,;|\t]*")
_DECIMAL = re.compile(r"\s*-?\d+,\d+\s*")
_ENCLOSED = re.compile(r'".*"')
_WITH_DOUBLED_MARKS = re.compile(r'".*"".*"')
_REGULAR_SHARE = 0.9  # of rows, from which shorter ones on top are captions


class _Record(NamedTuple):
    """A row of the file. is_quoted: whether it has cells in quotation marks, which may hold any sign."""

    cells: list[str]
    is_quoted: bool

    def is_blank(self) -> bool:
        return not any(cell.strip() for cell in self.cells)


def read_csv(data: bytes, title: str) -> Parts:
    """Read tables with the delimiter that divides their rows into the same columns. Values stay as they are written."""
    return _read(data, title, _DELIMITERS)


def read_tsv(data: bytes, title: str) -> Parts:
    """Read tables divided by tabs, or by another sign if the file has no tab."""
    has_tabs = b"\t" in data
    return _read(data, title, "\t" if has_tabs else _DELIMITERS)


def _read(data: bytes, title: str, delimiters: str) -> Parts:
    text, note = decode(data)
    csv.field_size_limit(_LONGEST_CELL)
    if first_line := _DELIMITER_LINE.match(text):
        delimiters = first_line[1]
        text = text[first_line.end() :]
    quote = _quote(text)
    delimiter = delimiters if len(delimiters) == 1 else _delimiter(text, delimiters, quote)
    rows = _records(text, delimiter, quote)
    records = list(reported(rows, text.count("\n") + 1, "rows"))
    captions = _captions(records)
    table = Part("", title, sheet_markdown(_rows(records, captions, delimiter)), "markdown")
    return [table, *_long_rows(records, captions), *notes(note)]


def _long_rows(records: Sequence[_Record], captions: int) -> list[Fault]:
    """A note on rows that have more cells than the header above them."""
    places = []
    width = 0
    for number, record in enumerate(records[captions:], captions + 1):
        cells = len(record.cells) if any(record.cells[width:]) else 0
        if record.is_blank():
            width = 0
        elif width < 2:
            width = max(width, cells)
        elif cells > width:
            places.append(f"row {number}")
    return [Fault(enumerated(places), "has more cells than the header: its columns may be wrong", 0)] if places else []


def _rows(records: Sequence[_Record], captions: int, delimiter: str) -> Iterator[Row]:
    """The rows of a sheet. Shorter rows above regular ones are captions, in one cell."""
    for number, record in enumerate(records):
        if number < captions:
            text = f"{delimiter} ".join(cell.strip() for cell in record.cells).strip(f"{delimiter} ")
            yield Row.of({0: table_cell(text)} if text else {})
        else:
            yield Row.of(filled_cells(record.cells))


def _captions(records: Sequence[_Record]) -> int:
    counts = [0 if record.is_blank() else len(record.cells) for record in records]
    width = _width(counts)
    first = 0
    while first < len(counts) and counts[first] < width:
        first += 1
    if first and counts[first - 1] > 1 and _has_number(records[first]) and not _has_number(records[first - 1]):
        return 0  # a header whose rows have more cells
    rows = [count for count in counts[first:] if count]
    is_regular = len(rows) > 1 and rows.count(width) >= _REGULAR_SHARE * len(rows)
    return first if is_regular else 0


def _has_number(record: _Record) -> bool:
    return any(map(_NUMBER.fullmatch, record.cells))


def _width(counts: Sequence[int]) -> int:
    """The number of columns that most rows have, the larger one of two."""
    numbers = Counter(filter(None, counts))
    return max(numbers, key=lambda count: (numbers[count], count), default=0)


def _quote(text: str) -> str:
    """The sign that encloses cells: an apostrophe if most lines have cells between two, and none a quotation mark."""
    lines = [line for line in text[:_GLANCE_AT_QUOTES].splitlines() if line.strip()]
    with_apostrophes = sum(_BETWEEN_APOSTROPHES.search(line) is not None for line in lines)
    return "'" if '"' not in text and 2 * with_apostrophes > len(lines) else '"'


def _delimiter(text: str, delimiters: str, quote: str) -> str:
    """The delimiter that divides the first rows best; a NUL, which no text has, if none does."""
    scores = {}
    for delimiter in delimiters:
        records = islice(_records(text, delimiter, quote), _GLANCE)
        filled = [record for record in records if not record.is_blank()]
        scores[delimiter] = _score(filled, delimiter)
    best = max(scores, key=lambda delimiter: scores[delimiter])
    return best if scores[best] > _NO_TABLE else "\0"


def _score(records: Sequence[_Record], delimiter: str) -> tuple[float, int, int]:
    """(share of rows with the same columns times share of cells that no other delimiter would divide, rows, columns)."""
    counts = [len(record.cells) for record in records]
    table = _without_single_cells(counts)
    width = _width(table)
    if width < 2 or (len(table) < 2 and len(records) > 1):
        return _NO_TABLE
    if delimiter == "," and len(table) < len(counts) and all(_is_decimal(record) for record in records):
        return _NO_TABLE
    cells = [cell for record in records if not record.is_quoted for cell in record.cells]
    torn = sum(_is_torn(cell, delimiter) for cell in cells)
    regular = table.count(width) / len(table)
    return regular * (1 - torn / max(len(cells), 1)), len(table), width


def _without_single_cells(counts: Sequence[int]) -> Sequence[int]:
    """The rows between captions and remarks of one cell."""
    divided = [number for number, count in enumerate(counts) if count > 1]
    return counts[divided[0] : divided[-1] + 1] if divided else []


def _is_decimal(record: _Record) -> bool:
    return len(record.cells) < 2 or _DECIMAL.fullmatch(",".join(record.cells)) is not None


def _is_torn(cell: str, delimiter: str) -> bool:
    """Whether a cell holds another delimiter that is no sign of prose, of a decimal or of thousands."""
    for sign in _DELIMITERS:
        if sign == delimiter or sign not in cell:
            continue
        if sign in _PROSE_SIGNS and not re.search(rf"{sign}\S", cell):
            continue
        if not (sign == "," and _NUMBER.fullmatch(cell)):
            return True
    return False


def _records(text: str, delimiter: str, quote: str) -> Iterator[_Record]:
    """The records of the file. Quotation marks that do not enclose a cell are signs like others."""
    place = 0
    while place < len(text):
        match = _LINE.match(text, place)
        line = match[0] if match else ""
        place += len(line)
        plain = line.rstrip("\r\n")
        if quote not in plain:
            yield _Record(plain.split(delimiter), False)
            continue
        quoted = _quoted(text, place, line, delimiter, quote)
        if quoted is None:
            yield _Record(plain.split(delimiter), False)
        else:
            cells, place = quoted
            yield _Record(cells, True)


def _quoted(text: str, place: int, line: str, delimiter: str, quote: str) -> tuple[list[str], int] | None:
    """(the cells of a record that begins with a line, where the next begins), or None if no cell in it is enclosed rightly.

    place: behind the line.
    """
    dialects = (_Doubled, _Escaped) if delimiter != "\t" else (_BetweenTabs,)
    for dialect in dialects:
        lines = _Lines(text, place, line)
        try:
            cells = next(csv.reader(lines, dialect, delimiter=delimiter, quotechar=quote))
        except (csv.Error, StopIteration):
            continue
        if delimiter != "\t" or _is_enclosed_between_tabs(cells, line.rstrip("\r\n")):
            return cells, lines.place
    return None


class _Doubled(csv.excel):
    strict = True
    skipinitialspace = True


class _Escaped(_Doubled):
    doublequote = False
    escapechar = "\\"


class _BetweenTabs(csv.excel_tab):
    strict = True


class _Lines:
    """The lines of a record, of which the first is known. place: behind those that were read."""

    def __init__(self, text: str, place: int, line: str) -> None:
        self._text = text
        self._line = line
        self._count = 0
        self.place = place

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        self._count += 1
        if self._count == 1:
            return self._line
        match = _LINE.match(self._text, self.place)
        if match is None or not match[0] or self._count > _LONGEST_RECORD:
            raise StopIteration
        self.place = match.end()
        return match[0]


def _is_enclosed_between_tabs(cells: Sequence[str], line: str) -> bool:
    """Whether quotation marks enclose cells, which few programs write into files with tabs.

    They do if they enclose every cell, or one of several lines, or with marks in it that are doubled.
    """
    if any("\n" in cell or "\r" in cell for cell in cells):
        return not any("\t" in cell for cell in cells)
    written = [cell for cell in line.split("\t") if cell]
    if len(written) > len(cells) or all(map(_ENCLOSED.fullmatch, written)):
        return True
    return any(map(_WITH_DOUBLED_MARKS.fullmatch, written))
