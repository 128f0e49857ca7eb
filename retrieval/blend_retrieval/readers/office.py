"""PowerPoint and Excel files as Markdown."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, time
from typing import TYPE_CHECKING, Any

from blend_retrieval.readers.base import Fault, Part, Parts
from blend_retrieval.readers.tables import markdown_table
from blend_retrieval.readers.zipped import opened_zip

if TYPE_CHECKING:
    from openpyxl.workbook import Workbook

MOST_CELLS = 2_000_000  # of a workbook


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
        yield markdown_table([cell.text for cell in row.cells] for row in shape.table.rows)
    elif getattr(shape, "has_chart", False):
        yield markdown_table(_chart_rows(shape.chart))
    elif shape.has_text_frame:
        lines = [paragraph.text for paragraph in shape.text_frame.paragraphs]
        yield "\n".join(line for line in lines if line.strip())


def _chart_rows(chart: Any) -> Iterator[Sequence[str]]:
    for plot in _plots(chart):
        series = list(plot.series)
        yield ["", *(line.name for line in series)]
        columns = [[_shown(value) for value in line.values] for line in series]
        yield from zip(map(str, plot.categories), *columns, strict=False)


def read_xlsx(data: bytes, title: str) -> Parts:
    """Read the sheets as sections with one table each, with the values of formulas. Hidden sheets are faults."""
    import openpyxl

    opened_zip(data).close()
    values = openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=True)
    formulas = openpyxl.load_workbook(io.BytesIO(data), read_only=True)
    sections: list[str] = []
    faults: list[Fault] = []
    cells = 0
    for sheet in values.worksheets:
        if sheet.sheet_state != "visible":
            faults.append(Fault(f"sheet {sheet.title}", "is hidden"))
            continue
        rows = []
        for row in _sheet_rows(values, formulas, sheet.title):
            cells += len(row)
            if cells > MOST_CELLS:
                reason = f"has more than the {MOST_CELLS:,} cells that are read"
                faults.append(Fault(f"sheet {sheet.title}", reason))
                break
            rows.append(row)
        if table := markdown_table(rows):
            sections.append(f"# {sheet.title}\n\n{table}")
    workbook = Part("", title, _joined(sections), "markdown")
    return [workbook, *faults]


def _sheet_rows(values: Workbook, formulas: Workbook, name: str) -> Iterator[list[str]]:
    """The rows of a sheet; a formula without a stored value is shown itself."""
    rows = []
    for workbook in (values, formulas):
        sheet = workbook[name]
        sheet.reset_dimensions()  # what a file says of its size is often wrong
        rows.append(sheet.iter_rows(values_only=True))
    for shown, written in zip(*rows, strict=False):
        cells = zip(shown, written, strict=False)
        yield [_shown(formula if value is None else value) for value, formula in cells]


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        is_day = value.time() == time()
        return str(value.date() if is_day else value)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
