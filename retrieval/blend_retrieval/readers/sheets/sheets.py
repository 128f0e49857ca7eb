"""Sheets of workbooks as Markdown: merged cells, captions, notes. The readers of .xlsx and .ods files fill them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from blend_retrieval.document import enumerated
from blend_retrieval.readers.base import Fault, Part, Parts, UnreadableError
from blend_retrieval.readers.tables import Row, paragraph, sheet_markdown, table_cell
from blend_retrieval.readers.xml_trees import MOST_CHARACTERS

MOST_CELLS = 2_000_000  # of a workbook
_MOST_COVERED = 10_000_000  # places under merged cells
_MOST_REPEATED = 200_000  # cells of a workbook that repeat others: a few letters of a file can name millions
_LETTERS = 26
_PAGE_WORDS = 2


class Area(NamedTuple):
    """Cells from one corner to the other, both included. Rows and columns count from 0."""

    first_row: int
    first_column: int
    last_row: int
    last_column: int


class TooManyCells(Exception):  # noqa: N818
    """A workbook has more cells than are read."""


class Budget:
    """What the sheets of a workbook may hold, so that a short file cannot name a long text again and again."""

    def __init__(self) -> None:
        self._characters = MOST_CHARACTERS
        self._repeated = _MOST_REPEATED
        self._covered = _MOST_COVERED

    def spend(self, text: str, times: int = 1, *, repeated: int = 0) -> None:
        """Take a text that is written so many times, and cells that repeat others.

        Raises `UnreadableError` if there is nothing left.
        """
        self._characters -= len(text) * times
        self._repeated -= repeated
        if self._characters < 0:
            raise UnreadableError(f"holds more than {MOST_CHARACTERS:,} characters of text: divide it")
        if self._repeated < 0:
            raise UnreadableError(f"has more than {_MOST_REPEATED:,} cells that repeat others")

    def cover(self, places: int) -> None:
        """Take places that a merged cell covers. Raises `UnreadableError` if there are none left."""
        self._covered -= places
        if self._covered < 0:
            raise UnreadableError("has merged cells that cover each other: save it without them")


@dataclass
class Sheet:
    """A sheet that a reader fills cell by cell.

    Attributes:
        name: the sheet's.
        rows: texts of cells, by row and column. Both count from 0.
        merged: areas whose first cell stands for all of them.
        texts: what stands outside the cells: texts in boxes, headers and footers.
        places: cells, rows and columns to name, by the reason, as in "B2" or "column B".
        lost: reasons for which a value is lost.
        budget: of the workbook.
    """

    name: str
    rows: dict[int, dict[int, str]] = field(default_factory=dict)
    merged: list[Area] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    places: dict[str, list[str]] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    budget: Budget = field(default_factory=Budget)

    def name_place(self, reason: str, place: str, *, is_lost: bool = False) -> None:
        """Name a place of the sheet, such as "B2", with what is to say about it."""
        self.places.setdefault(reason, []).append(place)
        if is_lost:
            self.lost.add(reason)

    def columns(self) -> list[int]:
        """The columns that have filled cells."""
        return sorted(_columns(self.rows.values()))

    def faults(self) -> Iterator[Fault]:
        """What was not read, and notes: one for each reason."""
        for reason, places in self.places.items():
            lost = len(places) if reason in self.lost else 0
            yield Fault(f"sheet {self.name}: {enumerated(places)}", reason, lost)

    def markdown(self) -> str:
        """The sheet as a section, or "" if it is blank. Its rows are gone afterwards."""
        body = self.tables()
        texts = map(paragraph, self.texts)
        content = "\n\n".join(filter(None, [body, *texts]))
        return f"# {table_cell(self.name)}\n\n{content}" if content else ""

    def tables(self) -> str:
        """The cells as Markdown tables, with their captions. The rows are gone afterwards."""
        return sheet_markdown(self._filled_rows())

    def _rows_in_order(self) -> dict[int, dict[int, str]]:
        """The rows that are not blank. They are taken from the sheet, so that one of a million rows is in memory once."""
        rows = {}
        for number in sorted(self.rows):
            cells = _filled(self.rows.pop(number))
            if cells:
                rows[number] = cells
        return rows

    def _filled_rows(self) -> Iterator[Row]:
        """The rows, a merged cell's text in each row and column that it covers and that has other cells."""
        rows = self._rows_in_order()
        columns = sorted(_columns(rows.values()))
        alone = {number for number, cells in rows.items() if len(cells) == 1}
        spanning: set[int] = set()
        for area in self.merged:
            text = rows.get(area.first_row, {}).get(area.first_column)
            if text is None:
                continue
            covered = [column for column in columns if area.first_column <= column <= area.last_column]
            if len(covered) > 1:
                if area.first_row in alone and area.first_column == columns[0]:
                    covered = covered[:1]  # a title or a remark
                else:
                    spanning.add(area.first_row)
            numbers = list(_rows_within(rows, area))
            self.budget.cover(len(numbers) * len(covered))
            for number in numbers:
                for column in covered:
                    if column not in rows[number]:
                        self.budget.spend(text)
                        rows[number][column] = text
        before = -1
        for number, cells in rows.items():
            if number > before + 1:
                yield Row({})
            columns_in_order = sorted(cells)
            is_in_order = columns_in_order == list(cells)
            ordered = cells if is_in_order else {column: cells[column] for column in columns_in_order}
            yield Row(ordered, number in spanning)
            before = number


def _columns(rows: Iterable[dict[int, str]]) -> set[int]:
    columns: set[int] = set()
    for cells in rows:
        columns.update(cells)
    return columns


def _filled(cells: dict[int, str]) -> dict[int, str]:
    for column, text in list(cells.items()):
        words = table_cell(text)
        if words:
            cells[column] = words
        else:
            del cells[column]
    return cells


def _rows_within(rows: dict[int, dict[int, str]], area: Area) -> Iterable[int]:
    numbers = range(area.first_row, area.last_row + 1)
    if len(numbers) < len(rows):
        return [number for number in numbers if number in rows]
    return [number for number in rows if number in numbers]


def workbook_parts(title: str, sheets: Iterable[Sheet], faults: Iterable[Fault]) -> Parts:
    """One document with a section for each sheet that is not blank, and what was not read."""
    sections = []
    noted: list[Fault] = []
    for sheet in sheets:
        sections.append(sheet.markdown())
        noted += sheet.faults()
    workbook = Part("", title, "\n\n".join(filter(None, sections)), "markdown")
    return [workbook, *faults, *noted]


def column_letters(column: int) -> str:
    """The name of a column that counts from 0, such as "AB"."""
    letters = ""
    number = column + 1
    while number:
        number, letter = divmod(number - 1, _LETTERS)
        letters = chr(ord("A") + letter) + letters
    return letters


def cell_name(row: int, column: int) -> str:
    """The name of a cell whose row and column count from 0, such as "B2"."""
    return f"{column_letters(column)}{row + 1}"


def with_note(text: str, note: str) -> str:
    """A cell's text with the note that is pinned to it."""
    words = " ".join(note.split())
    return f"{text} (note: {words})".lstrip() if words else text


def header_words(words: str, is_numbered: bool) -> str:
    """The words of a page's header or footer, "" if they say nothing but the page, such as "Page ... of ...".

    is_numbered: whether the number of the page stands among them.
    """
    texts = words.split()
    says_more = any(letter.isalpha() for letter in words) and not (is_numbered and len(texts) <= _PAGE_WORDS)
    return " ".join(texts) if says_more else ""
