"""PowerPoint files as Markdown."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from blend_retrieval.readers.base import Fault, Part, Parts
from blend_retrieval.readers.sheets import Area, Sheet
from blend_retrieval.readers.tables import markdown_table
from blend_retrieval.readers.zipped import opened_zip


def read_pptx(data: bytes, title: str) -> Parts:
    """Read the slides as sections, with tables, charts and notes. Slides of pictures alone are faults."""
    from pptx import Presentation

    opened_zip(data).close()
    texts = []
    faults = []
    for number, slide in enumerate(Presentation(io.BytesIO(data)).slides, 1):
        text = _joined(_slide(slide))
        texts.append(text)
        faults += [Fault(f"slide {number}", reason) for reason in _left_out(slide, text)]
    deck = Part("", title, _joined(texts), "markdown")
    return [deck, *faults]


def _joined(texts: Iterable[str]) -> str:
    return "\n\n".join(filter(None, texts))


def _left_out(slide: Any, text: str) -> Iterator[str]:
    if not text and len(slide.shapes):
        yield "holds no text, only pictures; run it through OCR"
    elif any(map(_is_diagram, slide.shapes)):
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


def _slide(slide: Any) -> Iterator[str]:
    heading = slide.shapes.title
    if heading is not None and heading.has_text_frame:
        words = " ".join(heading.text_frame.text.split())
        yield f"## {words}" if words else ""
    heading_id = None if heading is None else heading.shape_id
    bodies = [shape for shape in slide.shapes if shape.shape_id != heading_id]
    bodies.sort(key=lambda shape: (shape.top or 0, shape.left or 0))
    for shape in bodies:
        yield from _shape(shape)
    notes = slide.notes_slide.notes_text_frame if slide.has_notes_slide else None
    if notes:
        yield notes.text.strip()


def _shape(shape: Any) -> Iterator[str]:
    if hasattr(shape, "shapes"):  # a group
        for inner in shape.shapes:
            yield from _shape(inner)
    elif getattr(shape, "has_table", False):
        yield _table(shape.table)
    elif getattr(shape, "has_chart", False):
        yield markdown_table(_chart_rows(shape.chart))
    elif shape.has_text_frame:
        lines = [paragraph.text for paragraph in shape.text_frame.paragraphs]
        yield "\n".join(line for line in lines if line.strip())


def _table(table: Any) -> str:
    """A table of a slide; a merged cell stands in each row and column that it covers."""
    sheet = Sheet("")
    for number, row in enumerate(table.rows):
        cells = list(row.cells)
        sheet.rows[number] = {column: cell.text for column, cell in enumerate(cells) if not cell.is_spanned}
        for column, cell in enumerate(cells):
            if cell.is_merge_origin:
                area = Area(number, column, number + cell.span_height - 1, column + cell.span_width - 1)
                sheet.merged.append(area)
    return sheet.tables()


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
