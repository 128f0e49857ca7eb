"""Files for `scripts/bench_readers`: PDFs, written by ReportLab."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

from _reader_contents import FILLER, Block, Bullets, Content, Form, Pairs, Picture, Running, Steps, Table


def pdf(content: Content, variant: int) -> bytes:
    """Pages with headers, footers, notes at their end and an outline.

    variant: 0 has ruled tables, 1 two columns of text where it has no table, and form fields.
    """
    from reportlab.lib.pagesizes import A4
    from reportlab.platypus import BaseDocTemplate, Frame, PageTemplate, Paragraph

    memory = io.BytesIO()
    paper = _Paper(variant)
    story = [Paragraph(content.title, paper.styles["Title"])]
    for number, block in enumerate(content.blocks):
        story += [Paragraph(FILLER[number % len(FILLER)], paper.styles["Normal"]), *paper.block(block)]
    width, height = A4
    columns = 2 if variant and not any(isinstance(block, Table) for block in content.blocks) else 1
    room = (width - 100) / columns
    frames = [Frame(50 + place * room, 120, room - 12, height - 200) for place in range(columns)]
    document = BaseDocTemplate(memory, pagesize=A4, title=content.title, invariant=1)
    document.addPageTemplates([PageTemplate(frames=frames, onPage=paper.around)])
    document.build(story)
    return memory.getvalue()


class _Paper:
    """From blocks to what ReportLab sets."""

    def __init__(self, variant: int) -> None:
        from reportlab.lib.styles import getSampleStyleSheet

        self.variant = variant
        self.styles: Any = getSampleStyleSheet()
        self.notes: list[str] = []
        self.running: dict[str, str] = {}

    def around(self, canvas: Any, document: Any) -> None:
        """The header and the footer of a page; the notes of the first one."""
        width, height = document.pagesize
        canvas.setFont("Helvetica", 8)
        if "Head" in self.running:
            canvas.drawRightString(width - 50, height - 40, self.running["Head"])
        canvas.drawString(50, 30, self.running.get("Foot", ""))
        canvas.drawRightString(width - 50, 30, f"Page {document.page}")
        if document.page == 1 and self.notes:
            canvas.line(50, 105, 180, 105)
            for place, text in enumerate(self.notes):
                canvas.drawString(50, 92 - 12 * place, f"{place + 1} {text}")

    def block(self, block: Block) -> Iterable[Any]:
        from reportlab.platypus import ListFlowable, ListItem, Paragraph, Spacer
        from reportlab.platypus.flowables import HRFlowable

        def paragraph(text: str, style: str = "Normal") -> Any:
            return Paragraph(text, self.styles[style])

        match block:
            case Pairs(name="Fields"):
                yield self.grid([[f"{label}:", value] for label, value in block.pairs], 0)
            case Pairs():
                yield from self.pairs(block, paragraph)
            case Running(_, name, text):
                self.running[name] = text
            case Table():
                yield paragraph(block.caption, "Italic")
                header = [
                    [part for label, span in heads for part in (label, *[""] * (span - 1))] for heads in block.header
                ]
                yield self.grid([*header, *block.rows], len(header))
            case Steps(_, start, items):
                yield ListFlowable([ListItem(paragraph(item)) for item in items], bulletFormat="%s.", start=start)
            case Bullets(_, items):
                lists = [
                    (name, ListFlowable([paragraph(value) for value in values], bulletType="bullet"))
                    for name, values in items
                ]
                yield ListFlowable([ListItem([paragraph(name), inner]) for name, inner in lists], bulletType="bullet")
            case Form():
                yield from self.form(block)
            case Picture(_, caption, alt):
                yield HRFlowable(width="50%", thickness=40, color="grey")
                yield paragraph(f"{caption} ({alt})", "Italic")
        yield Spacer(1, 6)

    def grid(self, rows: list[list[str]], header: int) -> Any:
        from reportlab.platypus import Table as Grid

        spans: list[tuple[Any, ...]] = []
        if header == 2:
            spans = [("SPAN", (1, 0), (2, 0)), ("SPAN", (3, 0), (4, 0)), ("ALIGN", (1, 0), (-1, 0), "CENTER")]
        lines: list[tuple[Any, ...]] = [("GRID", (0, 0), (-1, -1), 0.5, "black")] if header and not self.variant else []
        right: list[tuple[Any, ...]] = [("ALIGN", (1, header), (-1, -1), "RIGHT")] if header else []
        return Grid(rows, repeatRows=0 if self.variant else header, style=[*spans, *lines, *right], hAlign="LEFT")

    def pairs(self, block: Pairs, paragraph: Any) -> Iterable[Any]:
        from reportlab.platypus import Preformatted

        for label, value in block.pairs:
            match block.name:
                case "Sections":
                    yield _drawn(0, _bookmark(label))
                    yield paragraph(label, "Heading2")
                    yield paragraph(f"The quay is {value} cm long.")
                case "Notes":
                    self.notes.append(f"Measured as {value} last summer.")
                    yield paragraph(f"The tide of {label}<super>{len(self.notes)}</super> is high.")
                case "Comments":
                    yield paragraph(f"The master of {label} comes.")
                    yield _drawn(0, _comment(f"Ask for {value} first."))
                case "Links":
                    yield paragraph(f'See <a href="{value}">{label}</a>.')
                case "Powers":
                    base, power = value.split("^")
                    yield paragraph(f"{label}: {base}<super>{power}</super>")
                case "Code":
                    yield Preformatted(f"[dock]\n{label} = {value}", self.styles["Code"])
                case _:
                    yield paragraph(f"{label}: {value}")

    def form(self, block: Form) -> Iterable[Any]:
        from reportlab.platypus import Paragraph

        if self.variant:
            yield from (_drawn(18, _box(label, ticked)) for label, ticked in block.boxes)
            yield _drawn(24, _choice(block))
            return
        for label, ticked in block.boxes:
            sign = "✔" if ticked else "❏"
            yield Paragraph(f'<font name="ZapfDingbats">{sign}</font> {label}', self.styles["Normal"])
        yield Paragraph(f"{block.label}: {block.chosen}", self.styles["Normal"])


Draw = Callable[[Any], None]


def _drawn(height: int, draw: Draw) -> Any:
    """Something of this height that `draw` draws on the page's canvas."""
    from reportlab.platypus import Flowable

    class Drawn(Flowable):
        def wrap(self, width: float, available: float) -> tuple[float, float]:
            return width, height

        def draw(self) -> None:
            draw(self.canv)

    return Drawn()


def _bookmark(label: str) -> Draw:
    def draw(canvas: Any) -> None:
        canvas.bookmarkPage(label)
        canvas.addOutlineEntry(label, label)

    return draw


def _comment(text: str) -> Draw:
    def draw(canvas: Any) -> None:
        left, bottom = canvas.absolutePosition(200, 0)
        canvas.textAnnotation(text, Rect=(left, bottom, left + 20, bottom + 20))

    return draw


def _box(label: str, ticked: bool) -> Draw:
    def draw(canvas: Any) -> None:
        canvas.acroForm.checkbox(name=label, checked=ticked, size=12, x=0, y=2, relative=True)
        canvas.drawString(20, 4, label)

    return draw


def _choice(block: Form) -> Draw:
    def draw(canvas: Any) -> None:
        canvas.drawString(0, 6, f"{block.label}:")
        choices = {"options": block.choices, "value": block.chosen, "width": 90, "height": 18}
        canvas.acroForm.choice(name="colour", x=110, y=2, relative=True, **choices)

    return draw
