"""PowerPoint files as Markdown."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from blend_retrieval.readers.base import Fault, Part, Parts
from blend_retrieval.readers.office.picture_texts import PICTURE, drawing_texts
from blend_retrieval.readers.office.slide_text import SlideText, placeholder_styles
from blend_retrieval.readers.sheets.sheets import Area, Sheet
from blend_retrieval.readers.tables import markdown_table
from blend_retrieval.readers.xml_trees import check_xml
from blend_retrieval.readers.zipped import opened_zip

_DEFAULT_STYLES = "{http://schemas.openxmlformats.org/presentationml/2006/main}defaultTextStyle"
_COMPATIBLE = "{http://schemas.openxmlformats.org/markup-compatibility/2006}"


def read_pptx(data: bytes, title: str) -> Parts:
    """Read the slides as sections, with tables, charts, notes and texts of pictures. Slides of pictures alone are faults."""
    from pptx import Presentation

    with opened_zip(data) as archive:
        archive.check_parts()
        for name in archive.names():
            if name.endswith((".xml", ".rels")):
                check_xml(archive.read(name))
    texts = []
    faults = []
    presentation = Presentation(io.BytesIO(data))
    slide_text = SlideText(presentation.element.find(_DEFAULT_STYLES))
    listed = presentation.element.sldIdLst
    for number, entry in enumerate(() if listed is None else listed.sldId_lst, 1):
        try:
            slide = presentation.part.related_slide(entry.rId)
            blocks = list(_Slide(slide, slide_text).blocks())
        except KeyError:
            faults.append(Fault(f"slide {number}", "is not read: it, or a part of the file that it needs, is missing"))
            continue
        texts.append(_joined(blocks))
        faults += [Fault(f"slide {number}", reason) for reason in _left_out(slide, blocks)]
    deck = Part("", title, _joined(texts), "markdown")
    for kind in slide_text.unknown_kinds:
        faults.append(Fault("", f"has lists in the numerals {kind}, which are read as decimal numbers", 0))
    return [deck, *faults]


def _joined(texts: Iterable[str]) -> str:
    return "\n\n".join(filter(None, texts))


def _left_out(slide: Any, blocks: Iterable[str]) -> Iterator[str]:
    has_words = any(block and not block.startswith(PICTURE) for block in blocks)
    if not has_words and len(slide.shapes):
        yield "holds no text, only pictures; run it through OCR"
    elif any(map(_is_diagram, _shapes(slide.shapes))):
        yield "holds a diagram, which is not read"


def _is_diagram(shape: Any) -> bool:
    if not shape.element.tag.endswith("}graphicFrame") or shape.has_table:
        return False
    return not (shape.has_chart and _plots(shape.chart))


def _plots(chart: Any) -> list[Any]:
    try:
        return list(chart.plots)
    except NotImplementedError:  # of surfaces and stocks
        return []


class _Slide:
    """The blocks of Markdown that a slide shows, from top to bottom."""

    def __init__(self, slide: Any, text: SlideText) -> None:
        self._slide = slide
        self._text = text

    def blocks(self) -> Iterator[str]:
        """The title, what stands on the slide, and its notes."""
        heading = self._slide.shapes.title
        if heading is not None and heading.has_text_frame:
            words = " ".join(" ".join(self._lines(heading)).split())
            yield f"## {words}" if words else ""
        heading_id = None if heading is None else heading.shape_id
        bodies = [shape for shape in _shapes(self._slide.shapes) if shape.shape_id != heading_id]
        bodies.sort(key=lambda shape: (shape.top or 0, shape.left or 0))
        for shape in bodies:
            yield from self._shape(shape)
        notes = self._slide.notes_slide.notes_text_frame if self._slide.has_notes_slide else None
        if notes:
            yield "\n".join(self._text.lines(notes._txBody))

    def _lines(self, shape: Any) -> list[str]:
        return self._text.lines(shape.text_frame._txBody, placeholder_styles(shape, self._slide))

    def _shape(self, shape: Any) -> Iterator[str]:
        has_table = getattr(shape, "has_table", False)
        if not has_table:
            yield from drawing_texts(shape.element[0])
        if hasattr(shape, "shapes"):  # a group
            for inner in _shapes(shape.shapes):
                yield from self._shape(inner)
        elif has_table:
            yield self._table(shape.table)
        elif getattr(shape, "has_chart", False):
            yield markdown_table(_chart_rows(shape.chart))
        elif shape.has_text_frame:
            yield "\n".join(self._lines(shape))

    def _table(self, table: Any) -> str:
        """A table of a slide; a merged cell stands in each row and column that it covers."""
        sheet = Sheet("")
        for number, row in enumerate(table.rows):
            cells = list(row.cells)
            texts = {
                column: "\n".join(self._text.lines(cell.text_frame._txBody))
                for column, cell in enumerate(cells)
                if not cell.is_spanned
            }
            sheet.rows.add(number, texts)
            for column, cell in enumerate(cells):
                if cell.is_merge_origin:
                    area = Area(number, column, number + cell.span_height - 1, column + cell.span_width - 1)
                    sheet.merge(area)
        return sheet.tables()


def _shapes(shapes: Any) -> Iterator[Any]:
    """The shapes of a slide or group, with those that PowerPoint describes for its new versions alone, such as formulas."""
    from pptx.shapes.shapetree import SlideShapeFactory

    yield from shapes
    for choice in shapes.element.iterfind(f"{_COMPATIBLE}AlternateContent/{_COMPATIBLE}Choice[1]"):
        for element in choice:
            if element.tag.endswith(("}sp", "}pic", "}grpSp", "}graphicFrame", "}cxnSp")):
                yield SlideShapeFactory(element, shapes)


def _chart_rows(chart: Any) -> Iterator[Sequence[str]]:
    for plot in _plots(chart):
        series = list(plot.series)
        yield ["", *(line.name for line in series)]
        columns = [[_shown(value) for value in line.values] for line in series]
        yield from zip(map(str, plot.categories), *columns, strict=False)


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return str(int(value)) if float(value).is_integer() else str(value)
