"""Sheets of workbooks as Markdown: merged cells, captions, notes. The readers of .xlsx and .ods files fill them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from blend_retrieval.document import enumerated
from blend_retrieval.readers.base import Fault, Part, Parts, UnreadableError
from blend_retrieval.readers.sheets.sheet_rows import SheetRows
from blend_retrieval.readers.tables import Row, paragraph, sheet_markdown, table_cell
from blend_retrieval.readers.xml_trees import MOST_CHARACTERS

MOST_CELLS = 2_000_000  # of a workbook
_MOST_COVERED = 10_000_000  # places under merged cells
_MOST_SEEN = 10_000_000  # rows and cells of a file, blank ones among them
_MOST_MERGED = 200_000  # merged cells of a sheet
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
        self._seen = _MOST_SEEN

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

    def see(self, places: int) -> None:
        """Take rows and cells of the file, blank ones among them. Raises `UnreadableError` if there are none left."""
        self._seen -= places
        if self._seen < 0:
            raise UnreadableError(
                f"has more than the {_MOST_SEEN:,} rows and cells, blank ones among them, that are read"
            )

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
        rows: texts of cells, by row and column.
        merged: areas whose first cell stands for all of them.
        texts: what stands outside the cells: texts in boxes, headers and footers.
        places: cells, rows and columns to name, by the reason, as in "B2" or "column B".
        lost: reasons for which a value is lost.
        budget: of the workbook.
    """

    name: str
    rows: SheetRows = field(default_factory=SheetRows)
    merged: list[Area] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    places: dict[str, list[str]] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    budget: Budget = field(default_factory=Budget)

    def merge(self, area: Area) -> None:
        """Let an area's first cell stand for all of it. Raises `UnreadableError` if there are too many."""
        self.merged.append(area)
        if len(self.merged) > _MOST_MERGED:
            raise UnreadableError(f"has more than {_MOST_MERGED:,} merged cells")

    def name_place(self, reason: str, place: str, *, is_lost: bool = False) -> None:
        """Name a place of the sheet, such as "B2", with what is to say about it."""
        self.places.setdefault(reason, []).append(place)
        if is_lost:
            self.lost.add(reason)

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

    def _filled_rows(self) -> Iterator[Row]:
        """The rows, a merged cell's text in each row and column that it covers and that has other cells."""
        columns = self.rows.columns()
        first_rows = {area.first_row for area in self.merged}
        alone = {number for number in first_rows if len(self.rows.get(number)) == 1}
        spanning: set[int] = set()
        for area in self.merged:
            text = self.rows.get(area.first_row).get(area.first_column)
            if text is None:
                continue
            start = bisect_left(columns, area.first_column)
            end = bisect_right(columns, area.last_column)
            covered = columns[start:end]
            if len(covered) > 1:
                if area.first_row in alone and area.first_column == columns[0]:
                    covered = covered[:1]  # a title or a remark
                else:
                    spanning.add(area.first_row)
            numbers = self.rows.within(area.first_row, area.last_row)
            self.budget.cover(len(numbers) * len(covered))
            for number in numbers:
                self._cover(number, covered, text)
        return self.rows.taken(spanning)

    def _cover(self, number: int, columns: Iterable[int], text: str) -> None:
        """Write the text of a merged cell into the blank cells of a row that it covers."""
        cells = self.rows.get(number)
        blank = [column for column in columns if column not in cells]
        if blank:
            self.budget.spend(text, len(blank))
            self.rows.change(number).update(dict.fromkeys(blank, text))


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
