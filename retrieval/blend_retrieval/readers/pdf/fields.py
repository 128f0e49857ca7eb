"""Fields of forms and notes on a PDF page that its drawing does not show, or does not show as text."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pypdfium2 import PdfPage

_HIDDEN = 2 | 32  # flags: hidden, and not to be viewed
_PASSWORD, _COMB = 1 << 13, 1 << 24  # flags of a text field
_MOST_OPTIONS = 20  # of a list that is shown whole
_LINE = 12.0  # points
_FILLED = 0.9  # of a line's height
_OFF = ("", "Off")


class Box(NamedTuple):
    """A rectangle on a page, in points."""

    left: float
    bottom: float
    right: float
    top: float


class FieldText(NamedTuple):
    """A line of text that a field or note shows, and its place."""

    text: str
    box: Box


class Annotations(NamedTuple):
    """What fields and notes show on a page, and the comments that it opens on a click, at the words that they belong to."""

    texts: list[FieldText]
    comments: list[FieldText]


def take_annotations(page: PdfPage, form: Any) -> Annotations:
    """Read the fields and notes of a page, and remove those that its drawing need not show.

    form: PDFium's handle of the document's form, or None.
    """
    import pypdfium2.raw as pdfium

    texts: list[FieldText] = []
    comments: list[FieldText] = []
    shown: list[int] = []
    for number in range(pdfium.FPDFPage_GetAnnotCount(page.raw)):
        annotation = pdfium.FPDFPage_GetAnnot(page.raw, number)
        if not annotation:
            continue
        try:
            if pdfium.FPDFAnnot_GetFlags(annotation) & _HIDDEN:
                continue
            kind = pdfium.FPDFAnnot_GetSubtype(annotation)
            lines: list[str] | None = None
            if kind == pdfium.FPDF_ANNOT_WIDGET and form is not None:
                lines = _field(form, annotation)
            elif kind == pdfium.FPDF_ANNOT_FREETEXT:
                lines = _free_text(annotation)
            elif kind in _commented():
                comments += _comment(annotation)
            if lines is not None:
                texts += _placed(lines, _box(annotation))
                shown.append(number)
        finally:
            pdfium.FPDFPage_CloseAnnot(annotation)
    for number in reversed(shown):
        pdfium.FPDFPage_RemoveAnnot(page.raw, number)
    return Annotations(texts, comments)


def _commented() -> set[int]:
    """The kinds of annotations whose contents a reader opens as a comment."""
    import pypdfium2.raw as pdfium

    names = "TEXT LINE SQUARE CIRCLE POLYGON POLYLINE HIGHLIGHT UNDERLINE SQUIGGLY STRIKEOUT STAMP CARET INK"
    return {getattr(pdfium, f"FPDF_ANNOT_{name}") for name in names.split()}


def _field(form: Any, annotation: Any) -> list[str] | None:
    """The lines that stand for a field; None if its drawing says it."""
    import pypdfium2.raw as pdfium

    kind = pdfium.FPDFAnnot_GetFormFieldType(form, annotation)
    if kind in (pdfium.FPDF_FORMFIELD_CHECKBOX, pdfium.FPDF_FORMFIELD_RADIOBUTTON):
        sign = "x" if _is_checked(form, annotation) else " "
        return [f"[{sign}]" if kind == pdfium.FPDF_FORMFIELD_CHECKBOX else f"({sign})"]
    if kind == pdfium.FPDF_FORMFIELD_LISTBOX:
        return _options(form, annotation)
    flags = pdfium.FPDFAnnot_GetFormFieldFlags(form, annotation)
    if kind == pdfium.FPDF_FORMFIELD_TEXTFIELD and flags & _COMB and not flags & _PASSWORD:
        return _text(pdfium.FPDFAnnot_GetFormFieldValue, form, annotation).splitlines()
    return None


def _is_checked(form: Any, annotation: Any) -> bool:
    import pypdfium2.raw as pdfium

    if pdfium.FPDFAnnot_IsChecked(form, annotation):
        return True
    if pdfium.FPDFAnnot_HasKey(annotation, b"AP"):
        return False
    states = [_string(annotation, key) for key in (b"AS", b"V")]
    return any(state not in _OFF for state in states)


def _options(form: Any, annotation: Any) -> list[str]:
    """The entries of a list with their states; of a long one those that are chosen."""
    import pypdfium2.raw as pdfium

    count = max(0, pdfium.FPDFAnnot_GetOptionCount(form, annotation))
    entries = []
    for number in range(count):

        def label(form: Any, annotation: Any, buffer: Any, size: int, number: int = number) -> int:
            return int(pdfium.FPDFAnnot_GetOptionLabel(form, annotation, number, buffer, size))

        is_chosen = bool(pdfium.FPDFAnnot_IsOptionSelected(form, annotation, number))
        entries.append((is_chosen, _text(label, form, annotation)))
    if count > _MOST_OPTIONS:
        return [", ".join(text for is_chosen, text in entries if is_chosen)]
    return [" ".join(f"[{'x' if is_chosen else ' '}] {text}" for is_chosen, text in entries)]


def _free_text(annotation: Any) -> list[str] | None:
    """The lines of a text on the page that has no drawing; None if it has one."""
    import pypdfium2.raw as pdfium

    if pdfium.FPDFAnnot_HasKey(annotation, b"AP"):
        return None
    return _lines(_string(annotation, b"Contents"))


def _comment(annotation: Any) -> Iterator[FieldText]:
    place = _commented_place(annotation)
    text = " ".join(_string(annotation, b"Contents").split())
    author = _string(annotation, b"T").strip()
    if text:
        words = f"[comment by {author}: {text}]" if author else f"[comment: {text}]"
        yield FieldText(words, place)


def _commented_place(annotation: Any) -> Box:
    """The icon of a comment, or the end of the last line that it marks."""
    import pypdfium2.raw as pdfium

    box = _box(annotation)
    if pdfium.FPDFAnnot_GetSubtype(annotation) == pdfium.FPDF_ANNOT_TEXT:
        return box
    count = pdfium.FPDFAnnot_CountAttachmentPoints(annotation)
    if count:
        quad = pdfium.FS_QUADPOINTSF()
        pdfium.FPDFAnnot_GetAttachmentPoints(annotation, count - 1, ctypes.byref(quad))
        lefts = sorted((quad.x1, quad.x2, quad.x3, quad.x4))
        heights = sorted((quad.y1, quad.y2, quad.y3, quad.y4))
        box = Box(lefts[0], heights[0], lefts[-1], heights[-1])
    return Box(box.right, box.bottom, box.right, min(box.top, box.bottom + _LINE))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


def _placed(lines: list[str], box: Box) -> Iterator[FieldText]:
    """The lines one under the other, from the top of their box."""
    if not lines:
        return
    room = (box.top - box.bottom) / len(lines)
    height = min(_LINE, room) or _LINE
    middle = (box.top + box.bottom) / 2
    top = box.top if len(lines) > 1 else middle + height / 2
    for line in lines:
        bottom = top - _FILLED * height
        if line:
            place = Box(box.left, bottom, box.right, top)
            yield FieldText(line, place)
        top -= height


def _box(annotation: Any) -> Box:
    import pypdfium2.raw as pdfium

    rectangle = pdfium.FS_RECTF()
    pdfium.FPDFAnnot_GetRect(annotation, ctypes.byref(rectangle))
    lefts = sorted((rectangle.left, rectangle.right))
    heights = sorted((rectangle.bottom, rectangle.top))
    return Box(lefts[0], heights[0], lefts[1], heights[1])


def _string(annotation: Any, key: bytes) -> str:
    import pypdfium2.raw as pdfium

    def read(annotation: Any, buffer: Any, size: int) -> int:
        return int(pdfium.FPDFAnnot_GetStringValue(annotation, key, buffer, size))

    return _text(read, annotation)


def _text(read: Callable[..., int], *arguments: Any) -> str:
    """The UTF-16 text that a function of PDFium writes to a buffer."""
    import pypdfium2.raw as pdfium

    size = read(*arguments, None, 0)
    if size <= 2:
        return ""
    buffer = ctypes.create_string_buffer(size)
    read(*arguments, ctypes.cast(buffer, ctypes.POINTER(pdfium.FPDF_WCHAR)), size)
    return buffer.raw[:size].decode("utf-16-le", "replace").rstrip("\0")
