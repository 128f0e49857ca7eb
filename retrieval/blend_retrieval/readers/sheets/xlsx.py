"""Excel workbooks (.xlsx, .xlsm) as Markdown: each value as a person sees it in its cell.

A workbook is a zip archive of XML files (ECMA-376, part 1, chapter 18), which name each other in lists of relations.
`xlsx_styles` reads strings and styles, `xlsx_drawings` notes, pictures and charts, and `sheets` makes the tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import NamedTuple
from xml.etree import ElementTree as ET

from blend_retrieval.readers.base import Fault, Parts, UnreadableError
from blend_retrieval.readers.sheets.number_formats import number_format
from blend_retrieval.readers.sheets.package import DAMAGE, Package, Relation, target_of
from blend_retrieval.readers.sheets.sheets import (
    MOST_CELLS,
    Area,
    Budget,
    Sheet,
    TooManyCells,
    cell_name,
    column_letters,
    header_words,
    with_note,
    workbook_parts,
)
from blend_retrieval.readers.sheets.xlsx_drawings import Drawing, controls_in, notes_at_cells, read_drawing
from blend_retrieval.readers.sheets.xlsx_styles import Style, plain_string, shared_strings, struck, styles
from blend_retrieval.readers.sheets.xml_elements import attribute, each, local_name
from blend_retrieval.readers.tables import table_cell
from blend_retrieval.readers.xml_streams import streamed_elements

_REFERENCE = re.compile(r"\$?([A-Z]{1,3})\$?(\d+)")
_RELATIVE = re.compile(r'"[^"]*"|\'[^\']*\'|(?<![\w.$])(\$?)([A-Z]{1,3})(\$?)(\d+)(?![\w(!])')
_PRINT_CODE = re.compile(r'&(?:"[^"]*"|\d+|K[0-9A-F]{6}|K\d\d[+-]\d{3}|[A-Za-z])|&(?=&)')
_PRINTED_PART = re.compile("&[LCR]")
_PAGE_NUMBER = re.compile("&[PN]")
_FEIGNED_PREFIX = re.compile(r"_xl(?:fn|ws|udf)\.")
_COLUMNS = 16_384
_EPOCH = datetime(1899, 12, 30)
_HIDDEN = "is hidden, but read"
_HIDDEN_BY_FORMAT = "is hidden by its number format"
_WITHOUT_VALUE = "holds a formula without a stored value: open the file in a spreadsheet program, and save it"
_RICH_VALUE = "holds a picture or a linked record, which is not read"
_STREAMED = ("row", "col", "mergeCell", "oddHeader", "oddFooter")
_PLAIN = Style()
_EMBEDDED = ("oleObject", "package")
_TRUE = ("1", "true")


def read_xlsx(data: bytes, title: str) -> Parts:
    """Read the sheets as sections, with the values of formulas, merged cells and notes. Hidden sheets are faults."""
    with Package(data) as package:
        return _Workbook(package).parts(title)


class _Place(NamedTuple):
    row: int
    column: int


class _Workbook:
    def __init__(self, package: Package) -> None:
        self._package = package
        path = package.main_part("officeDocument")
        if path is None or not path.endswith(".xml"):
            raise UnreadableError("is no workbook in XML: save it as .xlsx")
        self._relations = package.relations(path)
        root = package.xml(path)
        properties = next(each(root, "workbookPr"), None)
        self._from_1904 = properties is not None and properties.get("date1904") in _TRUE
        self._entries = list(each(root, "sheet"))
        self._strings = shared_strings(package, target_of(self._relations, "sharedStrings"))
        self._styles = styles(package, target_of(self._relations, "styles"))
        self._cells = 0
        self._budget = Budget()

    def parts(self, title: str) -> Parts:
        """The workbook as a document, and what was not read of it."""
        sheets: list[Sheet] = []
        faults: list[Fault] = []
        for entry in self._entries:
            name = entry.get("name", "")
            relation = self._relations.get(attribute(entry, "id"), Relation("", "", ""))
            reason = _reason_to_skip(entry, relation)
            if reason:
                faults.append(Fault(f"sheet {name}", reason))
                continue
            sheet = Sheet(name, budget=self._budget)
            sheets.append(sheet)
            try:
                self._read_sheet(sheet, relation.target)
            except TooManyCells:
                faults.append(Fault(f"sheet {name}", f"has more than the {MOST_CELLS:,} cells that are read"))
            except UnreadableError as error:  # of a part that lies on the cells
                faults.append(Fault(f"sheet {name}", str(error)))
            except (*DAMAGE, IndexError, ValueError):
                faults.append(Fault(f"sheet {name}", "is damaged: it is not read to its end"))
        return workbook_parts(title, sheets, faults)

    def _read_sheet(self, sheet: Sheet, path: str) -> None:
        relations = self._package.relations(path)
        try:
            reader = _SheetReader(sheet, self._strings, self._styles, self._from_1904, MOST_CELLS - self._cells)
            with self._package.open(path) as stream:
                size = self._package.size(path)
                for _, element in streamed_elements(stream, size, _STREAMED):
                    reader.read(element)
        finally:
            self._cells += reader.cells
        for place, note in notes_at_cells(self._package, relations).items():
            position = _place(place)
            if note.strip():
                cells = sheet.rows.change(position.row)
                cells[position.column] = with_note(cells.get(position.column, ""), table_cell(note))
        for relation in relations.values():
            if relation.kind == "drawing":
                _add_drawing(sheet, read_drawing(self._package, relation.target))
            elif relation.kind == "vmlDrawing":
                with suppress(ET.ParseError, KeyError):  # notes alone, as HTML
                    sheet.texts += controls_in(self._package, relation.target)
            elif relation.kind in _EMBEDDED:
                name = relation.target.rpartition("/")[2]
                sheet.name_place("is an embedded file, which is not read", f"object {name}")
        reader.name_hidden()


def _reason_to_skip(entry: ET.Element, relation: Relation) -> str:
    if entry.get("state", "visible") != "visible":
        return "is hidden"
    if relation.kind == "worksheet":
        return ""
    kind = {"chartsheet": "a chart", "dialogsheet": "a dialog"}.get(relation.kind, "no sheet of cells")
    return f"is {kind}, which is not read"


def _add_drawing(sheet: Sheet, drawing: Drawing) -> None:
    sheet.texts += drawing.texts
    for place in drawing.pictures:
        sheet.name_place("is a picture, which is not read", f"picture at {place}")
    for place in drawing.diagrams:
        sheet.name_place("is a diagram, which is not read", f"diagram at {place}")
    for place in drawing.charts:
        sheet.name_place("is a chart: its title is read, its curves are not", f"chart at {place}")


def _place(reference: str) -> _Place:
    """The place of a cell such as "B2". Raises `KeyError` if it is none."""
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise KeyError(reference)
    return _Place(int(match[2]) - 1, _column(match[1]))


def _column_in(suffix: str, reference: str) -> int:
    """The column of a cell, most likely in a row whose cells' names end with `suffix`. Raises `KeyError` if it is none."""
    column = _columns_by_name().get(reference.removesuffix(suffix))
    return _place(reference).column if column is None else column


@lru_cache
def _columns_by_name() -> dict[str, int]:
    return {column_letters(column): column for column in range(_COLUMNS)}


@lru_cache(_COLUMNS)
def _column(letters: str) -> int:
    number = 0
    for letter in letters:
        number = 26 * number + ord(letter) - ord("A") + 1
    return number - 1


class _SheetReader:
    """Reads the XML of one sheet, element by element. cells: the number that it has read."""

    def __init__(self, sheet: Sheet, strings: list[str], styles: list[Style], from_1904: bool, most_cells: int) -> None:
        self._sheet = sheet
        self._strings = strings
        self._styles = styles
        self._from_1904 = from_1904
        self._most_cells = most_cells
        self._hidden_columns: list[range] = []
        self._hidden_rows: list[int] = []
        self._shared: dict[str, tuple[_Place, str]] = {}
        self._row = -1
        self.cells = 0

    def read(self, element: ET.Element) -> None:
        """Read a row, or another element of the sheet, into the sheet. Raises `TooManyCells`."""
        name = local_name(element)
        if name == "row":
            self._row = self._read_row(element, self._row + 1)
        elif name == "col":
            self._read_column(element)
        elif name == "mergeCell":
            self._read_merged(element.get("ref", ""))
        elif name in ("oddHeader", "oddFooter"):
            self._sheet.texts += _printed(element.text or "")

    def _read_column(self, element: ET.Element) -> None:
        if element.get("hidden") in _TRUE or float(element.get("width") or 1) == 0:
            first = int(element.get("min", 1)) - 1
            last = int(element.get("max", 1))
            self._hidden_columns.append(range(first, last))

    def _read_merged(self, reference: str) -> None:
        first, _, last = reference.partition(":")
        corner = _place(first)
        end = _place(last or first)
        self._sheet.merge(Area(corner.row, corner.column, end.row, end.column))

    def _read_row(self, element: ET.Element, following: int) -> int:
        """Read a row's cells. following: its number if it names none. Returns its number."""
        row = int(element.get("r") or following + 1) - 1
        self._sheet.budget.see(1 + len(element))
        suffix = str(row + 1)
        cells: dict[int, str] = {}
        column = -1
        for cell in element:
            reference = cell.get("r")
            column = _column_in(suffix, reference) if reference else column + 1
            text = self._text(cell, _Place(row, column))
            if text:
                cells[column] = text
        if cells:
            self.cells += len(cells)
            if self.cells > self._most_cells:
                raise TooManyCells
            self._sheet.budget.spend("".join(cells.values()))
            self._sheet.rows.add(row, cells)
            is_flat = element.get("customHeight") in _TRUE and float(element.get("ht") or 1) == 0
            if element.get("hidden") in _TRUE or is_flat:
                self._hidden_rows.append(row)
        return row

    def _text(self, cell: ET.Element, place: _Place) -> str:
        """The text of a cell, as its format shows it."""
        kind = cell.get("t", "n")
        fields = {local_name(child): child for child in cell}
        value = plain_string(fields["v"].text or "") if "v" in fields else ""
        if "is" in fields:
            kind, value = "str", plain_string(fields["is"])
        formula = fields.get("f")
        written = self._formula(formula, place) if formula is not None else ""
        if value == "":
            if written and not (kind == "str" and "v" in fields):
                self._sheet.name_place(_WITHOUT_VALUE, cell_name(*place), is_lost=True)
                return written
            return ""
        if kind == "e" and cell.get("vm"):
            self._sheet.name_place(_RICH_VALUE, cell_name(*place), is_lost=True)
            return ""
        return self._shown(value, kind, int(cell.get("s") or 0), place)

    def _shown(self, value: str, kind: str, style_number: int, place: _Place) -> str:
        style = self._styles[style_number] if style_number < len(self._styles) else _PLAIN
        cell_format = number_format(style.code)
        if kind == "b":
            shown = "TRUE" if value in _TRUE else "FALSE"
        elif kind == "e":
            shown = value
        elif kind in ("s", "str"):
            shown = cell_format.shown_text(self._strings[int(value)] if kind == "s" else value)
        else:
            number = _serial(value) if kind == "d" else value
            shown = cell_format.shown_number(number, self._from_1904 and kind != "d")
        if not shown.strip() and value.strip() and style.is_formatted():
            self._sheet.name_place(_HIDDEN_BY_FORMAT, cell_name(*place), is_lost=True)
        return struck(shown) if style.is_struck else shown

    def _formula(self, element: ET.Element, place: _Place) -> str:
        """A formula as it is written. One that is shared moves with its cell."""
        text = element.text or ""
        number = element.get("si")
        if number is not None:
            if text:
                self._shared[number] = place, text
            elif number in self._shared:
                origin, text = self._shared[number]
                text = _moved(text, place.row - origin.row, place.column - origin.column)
        return f"={_FEIGNED_PREFIX.sub('', text.removeprefix('='))}"

    def name_hidden(self) -> None:
        """Name the hidden rows and columns that hold something."""
        for column in self._sheet.rows.columns():
            if any(column in hidden for hidden in self._hidden_columns):
                self._sheet.name_place(_HIDDEN, f"column {column_letters(column)}")
        for row in self._hidden_rows:
            self._sheet.name_place(_HIDDEN, f"row {row + 1}")


def _serial(iso: str) -> str:
    """A date in ISO 8601 as a number of days; other texts as they are."""
    try:
        moment = datetime.fromisoformat(iso).replace(tzinfo=None)
    except ValueError:
        return iso
    span = moment - _EPOCH
    return repr(span.days + span.seconds / 86_400)


def _moved(formula: str, rows: int, columns: int) -> str:
    def moved(match: re.Match[str]) -> str:
        if match[4] is None:
            return match[0]
        column = match[2] if match[1] else column_letters(_column(match[2]) + columns)
        row = match[4] if match[3] else str(int(match[4]) + rows)
        return f"{match[1]}{column}{match[3]}{row}"

    return _RELATIVE.sub(moved, formula)


def _printed(code: str) -> Iterator[str]:
    """The words of the left, middle and right part of a header or footer, without what each page fills in."""
    for part in _PRINTED_PART.split(code):
        yield header_words(_PRINT_CODE.sub(" ", part), _PAGE_NUMBER.search(part) is not None)
