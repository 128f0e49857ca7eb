"""OpenDocument spreadsheets (.ods, .fods) as Markdown. The files hold each value as a person sees it in its cell."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, NamedTuple
from xml.etree import ElementTree as ET

from blend_retrieval.readers.base import Fault, Parts, UnreadableError
from blend_retrieval.readers.sheets.number_formats import general
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
from blend_retrieval.readers.sheets.xml_elements import attribute, children, each, local_attributes, local_name
from blend_retrieval.readers.xml_streams import Path, streamed_elements
from blend_retrieval.readers.xml_trees import xml_root
from blend_retrieval.readers.zipped import DAMAGE, opened_zip

_CELLS = ("table-cell", "covered-table-cell")
_HIDDEN = "is hidden, but read"
_HIDDEN_BY_FORMAT = "is hidden by its number format"
_WITHOUT_VALUE = "holds a formula without a stored value: open the file in a spreadsheet program, and save it"
_APART = ("annotation", "frame", "custom-shape", "shapes", "ruby-text")  # inside of cells, beside their text
_FILLED_IN = ("page-number", "page-count", "sheet-name", "file-name", "title", "date", "time")  # in headers of pages
_DURATION = re.compile(r"(-?)PT(\d+)H(\d+)M(\d+(?:[.,]\d+)?)S")
_MOST_BLANKS = 1000  # one after another
_MOST_STYLES = 100_000
_STREAMED = ("style", "master-page", "table-row", "table-column", "shapes", "forms")
_GROUPS = ("table-row-group", "table-header-rows", "table-rows")
_VALUES = ("value", "date-value", "time-value", "boolean-value", "string-value")


class _Marks(NamedTuple):
    """How a style shows text: the signs that Markdown puts around it, whether it is shown, and a sheet's page style."""

    sign: str = ""
    is_hidden: bool = False
    page: str = ""


_UNMARKED = _Marks()


def read_ods(data: bytes, title: str) -> Parts:
    """Read the sheets as sections, with merged cells and notes. Hidden sheets are faults."""
    with opened_zip(data) as archive:
        manifest = archive.read("META-INF/manifest.xml") if "META-INF/manifest.xml" in archive else b""
        if b"encryption-data" in manifest:
            raise UnreadableError("is encrypted; save it without a password")
        workbook = _Workbook()
        try:
            if "styles.xml" in archive:
                workbook.add_pages(archive.read("styles.xml"))
            with archive.open("content.xml") as content:
                return workbook.parts(content, archive.size("content.xml"), title)
        except KeyError:
            raise UnreadableError("is no OpenDocument file: it has no content") from None
        except ET.ParseError:
            raise UnreadableError("is damaged: its content is no XML") from None
        except DAMAGE:
            raise UnreadableError("is damaged: content.xml cannot be unpacked") from None


def read_fods(data: bytes, title: str) -> Parts:
    """Read a spreadsheet in one XML file, as `read_ods` does."""
    try:
        return _Workbook().parts(io.BytesIO(data), len(data), title)
    except ET.ParseError:
        raise UnreadableError("is damaged: its content is no XML") from None


def _number(element: ET.Element, name: str) -> int:
    return int(attribute(element, name) or 1)


def _mark(style: ET.Element) -> _Marks:
    """The marks of a style of texts, cells or sheets."""
    sign = ""
    is_hidden = False
    for properties in style:
        position = attribute(properties, "text-position")
        if position.startswith(("sub", "-")):
            sign = "~"
        elif position and not position.startswith("0"):
            sign = "^"
        if attribute(properties, "text-line-through-style") not in ("", "none"):
            sign = "~~"
        is_hidden = is_hidden or attribute(properties, "display") == "false"
    return _Marks(sign, is_hidden, attribute(style, "master-page-name"))


class _Table:
    """A sheet that is being read.

    Attributes:
        element: of the sheet.
        sheet: what was read.
        apart: what was read of its shapes and forms, which stand in front of the rows in the file, and behind them in the text.
        row, column: numbers of the next ones.
        hidden_columns: of the sheet, blank ones among them.
        is_over: whether nothing more is read of it.
    """

    def __init__(self, element: ET.Element, sheet: Sheet) -> None:
        self.element = element
        self.sheet = sheet
        self.apart = Sheet(sheet.name)
        self.row = 0
        self.column = 0
        self.hidden_columns: list[range] = []
        self.is_over = False

    def add_column(self, element: ET.Element) -> None:
        """Note whether a column, or several, are hidden."""
        repeats = _number(element, "number-columns-repeated")
        if attribute(element, "visibility") in ("collapse", "filter"):
            self.hidden_columns.append(range(self.column, self.column + repeats))
        self.column += repeats

    def end(self) -> None:
        """Add what stands behind the rows."""
        if self.is_over:
            return
        for column in self.sheet.rows.columns():
            if any(column in hidden for hidden in self.hidden_columns):
                self.sheet.name_place(_HIDDEN, f"column {column_letters(column)}")
        self.sheet.texts += self.apart.texts
        for reason, places in self.apart.places.items():
            for place in places:
                self.sheet.name_place(reason, place, is_lost=reason in self.apart.lost)


class _Workbook:
    def __init__(self) -> None:
        self._marks: dict[str, _Marks] = {}
        self._pages: dict[str, ET.Element] = {}
        self._has_pages = False  # of a part for styles
        self._cells = 0
        self._budget = Budget()
        self._faults: list[Fault] = []

    def add_pages(self, styles: bytes) -> None:
        """Read the styles of pages. Without these they stand in the content. Raises `ParseError`."""
        self._has_pages = True
        for page in each(xml_root(styles), "master-page"):
            self._pages[attribute(page, "name")] = page

    def parts(self, content: IO[bytes], size: int, title: str) -> Parts:
        """The workbook as a document, and what was not read of it. Raises `ParseError`."""
        tables: list[_Table] = []
        is_spreadsheet = False
        around: ET.Element | None = None
        place = _Place()
        for path, element in streamed_elements(content, size, _STREAMED):
            name = local_name(element)
            if name in ("style", "master-page"):
                self._add_style(name, element)
                continue
            if path[-1] is not around:
                around = path[-1]
                place = _place(path)
            is_spreadsheet = is_spreadsheet or place.is_spreadsheet
            if place.table is None:
                continue
            if not tables or tables[-1].element is not place.table:
                if tables:
                    tables[-1].end()
                tables.append(self._table(place.table))
            if not tables[-1].is_over:
                self._read(tables[-1], name, element, is_inside=place.is_inside)
        if not is_spreadsheet:
            raise UnreadableError("is no spreadsheet")
        if tables:
            tables[-1].end()
        sheets = [table.sheet for table in tables]
        return workbook_parts(title, sheets, self._faults)

    def _add_style(self, name: str, element: ET.Element) -> None:
        if name == "style":
            self._marks[attribute(element, "name")] = _mark(element)
        elif not self._has_pages:
            self._pages[attribute(element, "name")] = element
        if len(self._marks) + len(self._pages) > _MOST_STYLES:
            raise UnreadableError(f"has more than {_MOST_STYLES:,} styles")

    def _table(self, element: ET.Element) -> _Table:
        name = attribute(element, "name")
        marks = self._marks_of(element)
        table = _Table(element, Sheet(name, budget=self._budget))
        if marks.is_hidden:
            self._faults.append(Fault(f"sheet {name}", "is hidden"))
            table.is_over = True
        else:
            table.sheet.texts += self._headers(marks.page)
        return table

    def _read(self, table: _Table, name: str, element: ET.Element, *, is_inside: bool) -> None:
        """Read an element of a sheet. is_inside: whether it stands in something other than a group of rows or columns."""
        reason = ""
        try:
            if name == "table-column":
                table.add_column(element)
            elif name == "table-row" and not is_inside:
                self._read_row(table, element)
            elif name == "shapes" and not is_inside:
                self._read_shapes(table.apart, element)
            elif name == "forms" and not is_inside:
                table.apart.texts += _controls(element)
        except TooManyCells:
            reason = f"has more than the {MOST_CELLS:,} cells that are read"
        except UnreadableError as error:  # a text that is repeated too often
            reason = str(error)
        if reason:
            self._faults.append(Fault(f"sheet {table.sheet.name}", reason))
            table.is_over = True

    def _marks_of(self, element: ET.Element) -> _Marks:
        return self._marks.get(attribute(element, "style-name"), _UNMARKED)

    def _headers(self, page: str) -> Iterator[str]:
        """The words of a page's headers and footers, without what each page fills in."""
        for area in self._pages.get(page, ()):
            if attribute(area, "display") != "false":
                for paragraph in each(area, "p"):
                    is_numbered = next(each(paragraph, "page-number"), None) is not None
                    yield header_words(self._inline(paragraph, _FILLED_IN), is_numbered)

    def _read_row(self, table: _Table, element: ET.Element) -> None:
        sheet = table.sheet
        repeats = _number(element, "number-rows-repeated")
        cells = self._cells_of(sheet, element, table.row)
        if cells:
            words = "".join(cells.values())
            is_hidden = attribute(element, "visibility") in ("collapse", "filter")
            for number in range(table.row, table.row + repeats):
                if number > table.row:
                    sheet.budget.spend(words, repeated=len(cells))
                sheet.rows.add(number, cells)
                self._cells += len(cells)
                if self._cells > MOST_CELLS:
                    raise TooManyCells
                if is_hidden:
                    sheet.name_place(_HIDDEN, f"row {number + 1}")
        table.row += repeats

    def _cells_of(self, sheet: Sheet, row_element: ET.Element, row: int) -> dict[int, str]:
        sheet.budget.see(1 + len(row_element))
        cells: dict[int, str] = {}
        column = 0
        for element in children(row_element, *_CELLS):
            attributes = local_attributes(element)
            repeats = int(attributes.get("number-columns-repeated") or 1)
            text = self._text(sheet, element, attributes, (row, column)) if len(element) or attributes else ""
            if text:
                if self._cells + len(cells) + repeats > MOST_CELLS:
                    raise TooManyCells
                sheet.budget.spend(text, repeats, repeated=repeats - 1)
                cells.update(dict.fromkeys(range(column, column + repeats), text))
                height = int(attributes.get("number-rows-spanned") or 1)
                width = int(attributes.get("number-columns-spanned") or 1)
                if height > 1 or width > 1:
                    sheet.merge(Area(row, column, row + height - 1, column + width - 1))
            self._read_shapes(sheet, element)
            column += repeats
        return cells

    def _text(self, sheet: Sheet, cell: ET.Element, attributes: dict[str, str], place: tuple[int, int]) -> str:
        """The text of a cell, with its note. place: its row and its column."""
        paragraphs = [self._inline(child) for child in children(cell, "p", "h")]
        text = "\n".join(paragraphs)
        value = next((attributes[name] for name in _VALUES if attributes.get(name)), "")
        if not text.strip() and value:
            if paragraphs and attributes.get("value-type") != "string":
                sheet.name_place(_HIDDEN_BY_FORMAT, cell_name(*place), is_lost=True)
            else:
                text = _plain(cell, value)
        formula = attributes.get("formula")
        if formula and not text and not value and not paragraphs:
            sheet.name_place(_WITHOUT_VALUE, cell_name(*place), is_lost=True)
            text = f"={formula.partition('=')[2]}"
        sign = self._marks.get(attributes.get("style-name", ""), _UNMARKED).sign
        if text.strip() and sign:
            text = f"{sign}{text}{sign}"
        for note in children(cell, "annotation"):
            words = [self._inline(child) for child in children(note, "p", "list")]
            text = with_note(text, "; ".join(words))
        return text

    def _inline(self, element: ET.Element, apart: tuple[str, ...] = _APART) -> str:
        """The text of a paragraph, with blanks, line breaks and the marks of its spans. apart: elements to leave out."""
        pieces = [element.text or ""]
        for child in element:
            name = local_name(child)
            if name == "s":
                pieces.append(" " * min(_number(child, "c"), _MOST_BLANKS))
            elif name in ("tab", "line-break"):
                pieces.append(" ")
            elif name not in apart:
                inner = self._inline(child, apart)
                sign = self._marks_of(child).sign if name == "span" and inner.strip() else ""
                pieces.append(f"{sign}{inner}{sign}")
            pieces.append(child.tail or "")
        return "".join(pieces)

    def _read_shapes(self, sheet: Sheet, element: ET.Element) -> None:
        """Read the texts of boxes that lie on cells, and name pictures and charts."""
        for shape in children(element, "frame", "custom-shape"):
            texts = [self._inline(paragraph) for paragraph in each(shape, "p")]
            sheet.texts.append(" ".join(texts))
            kinds = {local_name(inner) for inner in shape.iter()}
            name = attribute(shape, "name") or "without a name"
            if "object" in kinds:
                sheet.name_place("is a chart or another object, which is not read", f"object {name}")
            elif "image" in kinds:
                sheet.name_place("is a picture, which is not read", f"picture {name}")


def _controls(forms: ET.Element) -> Iterator[str]:
    """The texts of form fields, those that can be ticked after [x] or [ ]."""
    for control in forms.iter():
        label = attribute(control, "label")
        if local_name(control) in ("checkbox", "radio"):
            state = attribute(control, "current-state") or attribute(control, "current-selected")
            yield f"{'[x]' if state in ('checked', 'true') else '[ ]'} {label}"
        elif label:
            yield label


class _Place(NamedTuple):
    """Where an element stands: in a spreadsheet, in a table, and there in something other than groups of rows or columns."""

    is_spreadsheet: bool = False
    table: ET.Element | None = None
    is_inside: bool = False


def _place(path: Path) -> _Place:
    names = [local_name(element) for element in path]
    if "spreadsheet" not in names:
        return _Place()
    level = names.index("spreadsheet") + 1
    if names[level : level + 1] != ["table"]:  # tracked changes hold what was deleted
        return _Place(is_spreadsheet=True)
    is_inside = any(name not in _GROUPS for name in names[level + 1 :])
    return _Place(True, path[level], is_inside)


def _plain(cell: ET.Element, value: str) -> str:
    """A value of a cell without text, as programs write them that are no spreadsheets."""
    kind = attribute(cell, "value-type")
    if kind == "percentage":
        with suppress(ValueError):
            return f"{general(repr(round(float(value) * 100, 10)))}%"
    if kind == "currency":
        return f"{general(value)} {attribute(cell, 'currency')}".strip()
    if kind == "boolean":
        return value.upper()
    if kind == "time":
        return _duration(value)
    return general(value) if kind == "float" else value


def _duration(value: str) -> str:
    """A time such as PT26H30M00S as 26:30:00."""
    match = _DURATION.fullmatch(value)
    return f"{match[1]}{int(match[2])}:{match[3]:>02}:{match[4]:>02}" if match else value
