"""OpenDocument spreadsheets (.ods, .fods) as Markdown. The files hold each value as a person sees it in its cell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple
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
from blend_retrieval.readers.sheets.xml_elements import attribute, children, each, local_name
from blend_retrieval.readers.xml_trees import xml_root
from blend_retrieval.readers.zipped import opened_zip

_CELLS = ("table-cell", "covered-table-cell")
_HIDDEN = "is hidden, but read"
_HIDDEN_BY_FORMAT = "is hidden by its number format"
_WITHOUT_VALUE = "holds a formula without a stored value: open the file in a spreadsheet program, and save it"
_APART = ("annotation", "frame", "custom-shape", "shapes", "ruby-text")  # inside of cells, beside their text
_FILLED_IN = ("page-number", "page-count", "sheet-name", "file-name", "title", "date", "time")  # in headers of pages
_DURATION = re.compile(r"(-?)PT(\d+)H(\d+)M(\d+(?:[.,]\d+)?)S")
_MOST_BLANKS = 1000  # one after another
_MOST_NODES = 10_000_000  # elements and attributes of a file
_VALUES = ("value", "date-value", "time-value", "boolean-value", "string-value")


class _Marks(NamedTuple):
    """How a style shows text: the signs that Markdown puts around it, whether it is shown, and a sheet's page style."""

    sign: str = ""
    is_hidden: bool = False
    page: str = ""


def read_ods(data: bytes, title: str) -> Parts:
    """Read the sheets as sections, with merged cells and notes. Hidden sheets are faults."""
    with opened_zip(data) as archive:
        manifest = archive.read("META-INF/manifest.xml") if "META-INF/manifest.xml" in archive else b""
        if b"encryption-data" in manifest:
            raise UnreadableError("is encrypted; save it without a password")
        try:
            content = _parsed(archive.read("content.xml"))
            styles = _parsed(archive.read("styles.xml")) if "styles.xml" in archive else content
        except KeyError:
            raise UnreadableError("is no OpenDocument file: it has no content") from None
    return _parts(content, styles, title)


def read_fods(data: bytes, title: str) -> Parts:
    """Read a spreadsheet in one XML file, as `read_ods` does."""
    root = _parsed(data)
    return _parts(root, root, title)


def _parsed(data: bytes) -> ET.Element:
    try:
        return xml_root(data, _MOST_NODES)
    except ET.ParseError:
        raise UnreadableError("is damaged: its content is no XML") from None


def _parts(content: ET.Element, styles: ET.Element, title: str) -> Parts:
    spreadsheet = next(each(content, "spreadsheet"), None)
    if spreadsheet is None:
        raise UnreadableError("is no spreadsheet")
    return _Workbook(_marks(content), styles).parts(spreadsheet, title)


def _number(element: ET.Element, name: str) -> int:
    return int(attribute(element, name) or 1)


def _marks(root: ET.Element) -> dict[str, _Marks]:
    """The marks of each style of texts, cells and sheets."""
    marks = {}
    for style in each(root, "style"):
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
        marks[attribute(style, "name")] = _Marks(sign, is_hidden, attribute(style, "master-page-name"))
    return marks


class _Workbook:
    def __init__(self, marks: dict[str, _Marks], styles: ET.Element) -> None:
        self._marks = marks
        self._pages = {attribute(page, "name"): page for page in each(styles, "master-page")}
        self._cells = 0
        self._budget = Budget()

    def parts(self, spreadsheet: ET.Element, title: str) -> Parts:
        """The workbook as a document, and what was not read of it."""
        sheets: list[Sheet] = []
        faults: list[Fault] = []
        for table in children(spreadsheet, "table"):  # tracked changes hold what was deleted
            name = attribute(table, "name")
            if self._marks_of(table).is_hidden:
                faults.append(Fault(f"sheet {name}", "is hidden"))
                continue
            sheet = Sheet(name, budget=self._budget)
            sheet.texts += self._headers(self._marks_of(table).page)
            sheets.append(sheet)
            try:
                self._read_table(sheet, table)
            except TooManyCells:
                faults.append(Fault(f"sheet {name}", f"has more than the {MOST_CELLS:,} cells that are read"))
            except UnreadableError as error:  # a text that is repeated too often
                faults.append(Fault(f"sheet {name}", str(error)))
        return workbook_parts(title, sheets, faults)

    def _marks_of(self, element: ET.Element) -> _Marks:
        return self._marks.get(attribute(element, "style-name"), _Marks())

    def _headers(self, page: str) -> Iterator[str]:
        """The words of a page's headers and footers, without what each page fills in."""
        for area in self._pages.get(page, ()):
            if attribute(area, "display") != "false":
                for paragraph in each(area, "p"):
                    is_numbered = next(each(paragraph, "page-number"), None) is not None
                    yield header_words(self._inline(paragraph, _FILLED_IN), is_numbered)

    def _read_table(self, sheet: Sheet, table: ET.Element) -> None:
        row = 0
        for element in _rows(table):
            repeats = _number(element, "number-rows-repeated")
            cells = self._cells_of(sheet, element, row)
            words = "".join(cells.values())
            for number in range(row, row + repeats if cells else row):
                if number > row:
                    sheet.budget.spend(words, repeated=len(cells))
                sheet.rows.add(number, cells)
                self._cells += len(cells)
                if self._cells > MOST_CELLS:
                    raise TooManyCells
                if attribute(element, "visibility") in ("collapse", "filter"):
                    sheet.name_place(_HIDDEN, f"row {number + 1}")
            row += repeats
        for column in sorted(_hidden_columns(table, sheet.rows.columns())):
            sheet.name_place(_HIDDEN, f"column {column_letters(column)}")
        for child in table:
            if local_name(child) == "shapes":
                self._read_shapes(sheet, child)
            elif local_name(child) == "forms":
                sheet.texts += _controls(child)

    def _cells_of(self, sheet: Sheet, row_element: ET.Element, row: int) -> dict[int, str]:
        cells: dict[int, str] = {}
        column = 0
        for element in children(row_element, *_CELLS):
            repeats = _number(element, "number-columns-repeated")
            text = self._text(sheet, element, cell_name(row, column))
            if text:
                if self._cells + len(cells) + repeats > MOST_CELLS:
                    raise TooManyCells
                sheet.budget.spend(text, repeats, repeated=repeats - 1)
                cells.update(dict.fromkeys(range(column, column + repeats), text))
            height, width = _number(element, "number-rows-spanned"), _number(element, "number-columns-spanned")
            if height > 1 or width > 1:
                sheet.merged.append(Area(row, column, row + height - 1, column + width - 1))
            self._read_shapes(sheet, element)
            column += repeats
        return cells

    def _text(self, sheet: Sheet, cell: ET.Element, place: str) -> str:
        """The text of a cell, with its note."""
        paragraphs = [self._inline(child) for child in children(cell, "p", "h")]
        text = "\n".join(paragraphs)
        value = next((attribute(cell, name) for name in _VALUES if attribute(cell, name)), "")
        if not text.strip() and value:
            if paragraphs and attribute(cell, "value-type") != "string":
                sheet.name_place(_HIDDEN_BY_FORMAT, place, is_lost=True)
            else:
                text = _plain(cell, value)
        formula = attribute(cell, "formula")
        if formula and not text and not value and not paragraphs:
            sheet.name_place(_WITHOUT_VALUE, place, is_lost=True)
            text = f"={formula.partition('=')[2]}"
        sign = self._marks_of(cell).sign
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


def _rows(table: ET.Element) -> Iterator[ET.Element]:
    """The rows of a table, those of groups and of its header among them."""
    for child in table:
        name = local_name(child)
        if name == "table-row":
            yield child
        elif name in ("table-row-group", "table-header-rows", "table-rows"):
            yield from _rows(child)


def _hidden_columns(table: ET.Element, filled: Sequence[int]) -> set[int]:
    """The columns, of those that are filled, that are hidden."""
    hidden: set[int] = set()
    column = 0
    for element in each(table, "table-column"):
        repeats = _number(element, "number-columns-repeated")
        if attribute(element, "visibility") in ("collapse", "filter"):
            hidden |= {number for number in filled if column <= number < column + repeats}
        column += repeats
    return hidden


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
