"""Files for `scripts/bench_readers`: slides of PowerPoint and sheets of Excel."""

from __future__ import annotations

import io
from datetime import datetime
from typing import Any

from _reader_contents import FILLER, Block, Bullets, Cell, Content, Form, Pairs, Picture, Running, Sheet, Steps, Table
from _reader_packages import PIXEL, repacked

_MOMENT = datetime(2026, 1, 1)
_AUTO_NUMBER = "{http://schemas.openxmlformats.org/drawingml/2006/main}buAutoNum"


def pptx(content: Content, variant: int) -> bytes:
    """A slide a block: tables, lists, text boxes, charts for tables of one header, notes of the speaker, footers."""
    from pptx import Presentation

    deck = Presentation()
    deck.core_properties.modified = deck.core_properties.created = _MOMENT
    title = deck.slides.add_slide(deck.slide_layouts[0])
    title.shapes.title.text = content.title
    for number, block in enumerate(content.blocks):
        match block:
            case Pairs(name="Sections"):
                for label, value in block.pairs:
                    slide = _slide(deck, label)
                    slide.placeholders[1].text = f"The quay is {value} cm long."
            case Pairs(name="Notes" | "Comments"):
                for label, value in block.pairs:
                    slide = _slide(deck, label)
                    slide.placeholders[1].text = "The tide is high."
                    slide.notes_slide.notes_text_frame.text = f"Measured as {value} last summer."
            case _:
                slide = _slide(deck, f"Part {'ABCDEFGHIJKL'[number]}")
                slide.placeholders[1].text = FILLER[number % len(FILLER)]
                _on_slide(slide, block)
    memory = io.BytesIO()
    deck.save(memory)
    return repacked(memory.getvalue())


def _slide(deck: Any, title: str) -> Any:
    slide = deck.slides.add_slide(deck.slide_layouts[1])
    slide.shapes.title.text = title
    return slide


def _box(slide: Any, place: int = 0) -> Any:
    from pptx.util import Inches

    return slide.shapes.add_textbox(Inches(1), Inches(3 + place / 2), Inches(6), Inches(0.5)).text_frame


def _on_slide(slide: Any, block: Block) -> None:
    match block:
        case Table():
            _box(slide).text = block.caption
            _table_on_slide(slide, block)
        case Picture():
            _picture_on_slide(slide, block)
        case Bullets() | Steps():
            _list_on_slide(slide, block)
        case Form(_, boxes, label, _, chosen):
            texts = [f"{'☒' if ticked else '☐'} {name}" for name, ticked in boxes]
            for place, text in enumerate([*texts, f"{label}: {chosen}"]):
                _box(slide, place).text = text
        case Running(_, _, text):
            _box(slide, 6).text = text
        case Pairs():
            for place, (name, value) in enumerate(block.pairs):
                _pair_on_slide(_box(slide, place).paragraphs[0], block.name, name, value)


def _list_on_slide(slide: Any, block: Bullets | Steps) -> None:
    if isinstance(block, Steps):
        for item in block.items:
            properties = _line(slide, item)._p.get_or_add_pPr()
            properties.append(
                properties.makeelement(_AUTO_NUMBER, {"type": "arabicPeriod", "startAt": str(block.start)})
            )
        return
    for name, values in block.items:
        _line(slide, name)
        for value in values:
            _line(slide, value).level = 1


def _line(slide: Any, text: str) -> Any:
    """A new paragraph in the slide's text."""
    paragraph = slide.placeholders[1].text_frame.add_paragraph()
    paragraph.text = text
    return paragraph


def _table_on_slide(slide: Any, block: Table) -> None:
    from pptx.util import Inches

    rows, columns = len(block.header) + len(block.rows), len(block.rows[0])
    grid = slide.shapes.add_table(rows, columns, Inches(1), Inches(4), Inches(8), Inches(2)).table
    for level, heads in enumerate(block.header):
        column = 0
        for label, span in heads:
            grid.cell(level, column).text = label
            if span > 1:
                grid.cell(level, column).merge(grid.cell(level, column + span - 1))
            column += span
    for place, row in enumerate(block.rows, len(block.header)):
        for column, value in enumerate(row):
            grid.cell(place, column).text = value


def _picture_on_slide(slide: Any, block: Picture) -> None:
    from pptx.util import Inches

    shape = slide.shapes.add_picture(io.BytesIO(PIXEL), Inches(1), Inches(4))
    shape._element.nvPicPr.cNvPr.set("descr", block.alt)
    _box(slide).text = block.caption


def _pair_on_slide(paragraph: Any, kind: str, name: str, value: str) -> None:
    run = paragraph.add_run()
    if kind == "Links":
        run.text = name
        run.hyperlink.address = value
    elif kind == "Powers":
        base, power = value.split("^")
        run.text = f"{name}: {base}"
        raised = paragraph.add_run()
        raised.text = power
        raised._r.get_or_add_rPr().set("baseline", "30000")
    else:
        run.text = f"{name}{' = ' if kind == 'Code' else ': '}{value}"


def xlsx(contents: list[Sheet], number: int) -> bytes:
    """A file of Excel. number: odd ones hold formulas in the second column, with the values that Excel had computed."""
    import xlsxwriter

    memory = io.BytesIO()
    book = xlsxwriter.Workbook(memory, {"in_memory": True})
    book.set_properties({"created": _MOMENT})
    for sheet in contents:
        page = book.add_worksheet(sheet.name)
        page.write(0, 0, sheet.caption)
        row = 2 if sheet.caption else 0
        for heads in sheet.header:
            _header_of_sheet(page, row, heads)
            row += 1
        for place, cells in enumerate(sheet.rows):
            if place in sheet.notes:
                page.write_comment(row + place, 0, sheet.notes[place], {"author": "Ann"})
            for column, cell in enumerate(cells):
                style = book.add_format({"num_format": cell.number_format})
                _write_cell(page, row + place, column, cell, style, number % 2 == 1 and column == 1)
    book.close()
    return memory.getvalue()


def _header_of_sheet(page: Any, row: int, heads: list[tuple[str, int]]) -> None:
    column = 0
    for label, span in heads:
        if span > 1:
            page.merge_range(row, column, row, column + span - 1, label)
        else:
            page.write(row, column, label)
        column += span


def _write_cell(page: Any, row: int, column: int, cell: Cell, style: Any, as_formula: bool) -> None:
    if cell.number_format == "dd/mm/yyyy":
        page.write_datetime(row, column, datetime.fromisoformat(str(cell.value)), style)
    elif as_formula and isinstance(cell.value, int):
        page.write_formula(row, column, f"={cell.value - 1}+1", style, cell.value)
    elif cell.value is not None:
        page.write(row, column, cell.value, style)
