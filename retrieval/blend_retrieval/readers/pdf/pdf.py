"""PDF text through PDFium, page by page, with headings and filled form fields. Pages without text are reported."""

from __future__ import annotations

import ctypes
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, pairwise
from typing import TYPE_CHECKING, NamedTuple

from blend_retrieval.readers.base import Fault, Part, Parts, UnreadableError
from blend_retrieval.readers.pdf.bidi import has_right_to_left, is_mark, is_right_to_left, reading_order, with_brackets
from blend_retrieval.readers.pdf.bounds import MOST_CONTENT, MOST_DRAWN, Bounded, bounded
from blend_retrieval.readers.pdf.comments import HYPHEN, with_comments
from blend_retrieval.readers.pdf.fields import Box, FieldText, take_annotations
from blend_retrieval.readers.pdf.headings import Entry, with_headings
from blend_retrieval.readers.pdf.layout import Piece
from blend_retrieval.readers.pdf.pages import page_texts
from blend_retrieval.readers.progress import reported

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument, PdfObject, PdfPage, PdfTextPage
    from pypdfium2.raw import FS_RECTF

_PDFIUM = threading.Lock()  # PDFium is not thread-safe
_PASSWORD = 4  # FPDF_ERR_PASSWORD
_DIVIDED = re.compile(rf"(\w+){HYPHEN}\s*(\w+)")
_NO_CHARACTER = re.compile("[\x00\x01\x03-\x08\x0e-\x1f\x7f-\x9f\ufffd]")
_UNKNOWN_SHARE = 0.3
_EMPTY = "holds no text; run it through OCR"
_SCAN = "holds no text, only pictures; run it through OCR"
_DAMAGED = "holds only damaged content"
_NAMELESS = "holds no text, only glyphs that name no characters; run it through OCR"
_CROWDED = f"draws more than {MOST_DRAWN:,} texts or {MOST_CONTENT >> 20} MiB, and is not read"
_FULL = "holds more than {most:,} characters, and is not read"
_MOST_CHARACTERS = 200_000  # of a page
_OUTSIDE = "has text outside of the visible page, which is not read"
_SAMPLE = 16  # characters from which a page's direction is told
_GAP = 1.0  # line heights between two pieces of one line
_WORD_GAP = 0.15  # line heights between two words
_RAISED = 0.3  # line heights
_PICTURE_SHARE, _CAPTION = 0.5, 50  # a picture of half the page beside fewer characters is a scan


_XYZ = 3  # numbers of a place on a page: x, y and zoom
_MOST_ENTRIES = 10_000  # of an outline


class _Page(NamedTuple):
    """The pieces of text on a page, comments on it, what is wrong with it, or "", and whether text stands outside of it."""

    pieces: list[Piece]
    fault: str = ""
    comments: tuple[Piece, ...] = ()
    has_outside: bool = False


def read_pdf(data: bytes, title: str) -> Parts:
    """Read one document, under the title in its metadata."""
    import pypdfium2

    bounds = bounded(data)
    with _PDFIUM:
        try:
            document = pypdfium2.PdfDocument(bounds.data)
        except pypdfium2.PdfiumError as error:
            raise UnreadableError(_reason(error.err_code)) from None
        try:
            document.init_forms()
            outline = list(_outline(document))
            numbers = range(len(document))
            pages = [_read_page(document, number) for number in reported(numbers, len(numbers), "pages")]
            named = _decoded(partial(document.get_metadata_value, "Title"))
            attachments = map(document.get_attachment, range(document.count_attachments()))
            names = [attachment.get_name() for attachment in attachments]
        finally:
            document.close()
    faults = [*_left_out(bounds), *_faults(pages, names)]
    marked = with_headings([page.pieces for page in pages], outline)
    commented = [with_comments(pieces, page.comments) for pieces, page in zip(marked, pages, strict=True)]
    texts: list[str] = []
    for text, (_, apart) in zip(page_texts(pieces for pieces, _ in commented), commented, strict=True):
        texts += [text, *apart]
    text = "\n\n".join(filter(None, texts))
    if not text:
        raise UnreadableError(faults[0].reason if faults else _EMPTY)
    text_document = Part("", named or title, _undivided(text), "marked")
    return [text_document, *faults]


def _left_out(bounds: Bounded) -> list[Fault]:
    """The pages that draw too much."""
    if bounds.is_cut and not bounds.pages:
        return [Fault("", f"a form {_CROWDED}")]
    return [Fault(f"page {number}", _CROWDED) for number in bounds.pages]


def _faults(pages: Sequence[_Page], attachments: Iterable[str]) -> Iterator[Fault]:
    for number, page in enumerate(pages, 1):
        if page.fault:
            yield Fault(f"page {number}", page.fault)
        if page.has_outside:
            yield Fault(f"page {number}", _OUTSIDE, 0)
    for name in attachments:
        yield Fault(f"attachment {name}", "is not read")


def _reason(code: int | None) -> str:
    if code == _PASSWORD:
        return "is protected by a password; save it without one"
    return "is not a PDF that PDFium can read"


def _undivided(text: str) -> str:
    """Words that were divided at a line's end, joined; with a hyphen if the text spells them so elsewhere."""
    if HYPHEN not in text:
        return text
    words = set(re.findall(r"\w+(?:-\w+)*", text))

    def joined(match: re.Match[str]) -> str:
        hyphenated = f"{match[1]}-{match[2]}"
        return hyphenated if hyphenated in words else match[1] + match[2]

    return _DIVIDED.sub(joined, text).replace(HYPHEN, "-")


def _read_page(document: PdfDocument, number: int) -> _Page:
    import pypdfium2
    import pypdfium2.raw as pdfium

    try:
        page = document[number]
    except pypdfium2.PdfiumError:
        return _Page([], _DAMAGED)
    form = document.formenv.raw if document.formenv else None
    annotations = take_annotations(page, form)
    # Draws filled fields and notes into the page, which shows them when it is loaded again.
    outcome = pdfium.FPDFPage_Flatten(page.raw, pdfium.FLAT_NORMALDISPLAY)
    if outcome == pdfium.FLATTEN_SUCCESS:
        page.close()
        page = document[number]
    try:
        text = page.get_textpage()
        if text.count_chars() > _MOST_CHARACTERS:
            return _Page([], _FULL.format(most=_MOST_CHARACTERS))
        quarters = _quarters(text)
        drawn = list(_glyphs(text, _visible_box(page), quarters))
        glyphs = list(_inside(drawn))
        unknown = sum(glyph.unknown for glyph in glyphs)
        if unknown > _UNKNOWN_SHARE * len(glyphs):
            return _Page([], _NAMELESS)
        pieces = list(_pieces(glyphs, text))
        pieces += [_field_piece(field, quarters) for field in annotations.texts]
        fault = _SCAN if _is_scan(page, pieces) else ""
        comments = tuple(_field_piece(comment, quarters) for comment in annotations.comments)
        has_outside = len(glyphs) < len(drawn)
        return _Page(pieces, fault, comments, has_outside)
    finally:
        page.close()


def _outline(document: PdfDocument) -> Iterator[Entry]:
    """The entries of a document's outline that lead to one of its pages."""
    for bookmark in islice(document.get_toc(), _MOST_ENTRIES):
        target = bookmark.get_dest()
        page = target.get_index() if target else None
        title = _decoded(bookmark.get_title)
        if page is not None and title:
            _, view = target.get_view()
            top = view[1] if len(view) == _XYZ else None
            yield Entry(bookmark.level, title, page, top)


def _decoded(read: Callable[[], str]) -> str:
    """A title, or "" if it is damaged."""
    with suppress(UnicodeDecodeError):
        return read().strip()
    return ""


def _is_scan(page: PdfPage, pieces: Sequence[Piece]) -> bool:
    """Whether a page shows something, but hardly any text."""
    import pypdfium2.raw as pdfium

    if not pieces:
        return next(page.get_objects(), None) is not None
    if sum(len(piece.text) for piece in pieces) > _CAPTION:
        return False
    least = _PICTURE_SHARE * math.prod(page.get_size())
    pictures = page.get_objects(filter=[pdfium.FPDF_PAGEOBJ_IMAGE])
    return any(_area(picture) > least for picture in pictures)


def _area(picture: PdfObject) -> float:
    x0, y0, x1, y1 = picture.get_bounds()
    return float((x1 - x0) * (y1 - y0))


class _Glyph(NamedTuple):
    """A character and its place.

    unknown: whether its font does not say which character it shows. outside: whether it is not on the visible part of the page.
    """

    number: int
    sign: str
    unknown: bool
    left: float
    bottom: float
    right: float
    top: float
    outside: bool

    @property
    def height(self) -> float:
        return self.top - self.bottom

    @property
    def centre(self) -> float:
        return (self.left + self.right) / 2


_Glyphs = Sequence[_Glyph]
_Sides = tuple[float, float, float, float]


def _upright(box: FS_RECTF | Box, quarters: int) -> _Sides:
    """The place of text that is turned by so many quarters, clockwise, as if it were upright."""
    left, bottom, right, top = box.left, box.bottom, box.right, box.top
    for _ in range(quarters):
        left, bottom, right, top = -top, left, -bottom, right
    return left, bottom, right, top


def _quarters(text: PdfTextPage) -> int:
    """The quarters of a circle by which most of a page's text is turned, clockwise."""
    import pypdfium2.raw as pdfium

    sample = range(0, text.count_chars(), _SAMPLE)
    turns: Counter[int] = Counter()
    for place in sample:
        angle = pdfium.FPDFText_GetCharAngle(text.raw, place)
        quarters = round(2 * angle / math.pi)
        turns[quarters % 4] += 1
    if not turns:
        return 0
    (most_common, _) = turns.most_common(1)[0]
    return most_common


def _visible_box(page: PdfPage) -> FS_RECTF:
    """The part of a page that a viewer shows."""
    import pypdfium2.raw as pdfium

    box = pdfium.FS_RECTF()
    pdfium.FPDF_GetPageBoundingBox(page.raw, ctypes.byref(box))
    return box


def _glyphs(text: PdfTextPage, visible: FS_RECTF, quarters: int) -> Iterator[_Glyph]:
    """The characters of a page in the order of its content, with blanks and newlines that PDFium adds."""
    import pypdfium2.raw as pdfium

    box = pdfium.FS_RECTF()
    reference = ctypes.byref(box)
    for number in range(text.count_chars()):
        pdfium.FPDFText_GetLooseCharBox(text.raw, number, reference)
        sign = chr(pdfium.FPDFText_GetUnicode(text.raw, number))
        is_unmapped = pdfium.FPDFText_HasUnicodeMapError(text.raw, number) == 1
        unknown = is_unmapped or bool(_NO_CHARACTER.match(sign))
        x = (box.left + box.right) / 2
        y = (box.bottom + box.top) / 2
        is_in_width = visible.left <= x <= visible.right
        is_in_height = visible.bottom <= y <= visible.top
        is_outside = not (sign.isspace() or (is_in_width and is_in_height))
        place = _upright(box, quarters)
        yield _Glyph(number, sign, unknown, *place, is_outside)


def _inside(glyphs: _Glyphs) -> Iterator[_Glyph]:
    """The characters without words that lie outside of the page; a word that lies on its edge is whole."""
    if not any(glyph.outside for glyph in glyphs):
        yield from glyphs
        return
    word: list[_Glyph] = []
    for glyph in glyphs:
        is_blank = glyph.sign.isspace()
        if word and (is_blank or _is_apart(word[-1], glyph)):
            yield from _visible_word(word)
            word = []
        if is_blank:
            yield glyph
        else:
            word.append(glyph)
    yield from _visible_word(word)


def _visible_word(word: list[_Glyph]) -> list[_Glyph]:
    is_outside = all(glyph.outside for glyph in word)
    return [] if is_outside else word


def _field_piece(field: FieldText, quarters: int) -> Piece:
    return Piece(field.text, *_upright(field.box, quarters))


def _pieces(glyphs: _Glyphs, text: PdfTextPage) -> Iterator[Piece]:
    """Stretches of characters without a gap."""
    page_signs = _signs(glyphs)
    if not has_right_to_left(page_signs):
        yield from _pieces_from_left(glyphs, text)
        return
    is_page_from_right = is_right_to_left(page_signs)

    def is_from_right(line: _Glyphs) -> bool:
        signs = _signs(line)
        return is_right_to_left(signs) or (is_page_from_right and has_right_to_left(signs))

    for line in _lines(glyphs, is_from_right):
        cut = _pieces_from_right if is_from_right(line) else _pieces_from_left
        yield from cut(line, text)


def _signs(glyphs: Iterable[_Glyph]) -> str:
    return "".join(glyph.sign for glyph in glyphs)


def _lines(glyphs: _Glyphs, is_from_right: Callable[[_Glyphs], bool]) -> Iterator[list[_Glyph]]:
    """The lines that PDFium finds; those from right to left that stand beside each other are one."""
    lines: list[list[_Glyph]] = [[]]
    for glyph in glyphs:
        lines[-1].append(glyph)
        if glyph.sign == "\n":
            lines.append([])
    joined: list[_Glyph] = []
    for line in lines:
        goes_on = _is_beside(joined, line) and is_from_right([*joined, *line])
        if joined and not goes_on:
            yield joined
            joined = []
        joined += line
    yield joined


def _is_beside(line: _Glyphs, following: _Glyphs) -> bool:
    """Whether a line begins at the height at which another ends."""
    last = _first_letter(reversed(line))
    first = _first_letter(following)
    if last is None or first is None:
        return False
    top = min(last.top, first.top)
    bottom = max(last.bottom, first.bottom)
    return 2 * (top - bottom) > min(last.height, first.height)


def _first_letter(glyphs: Iterable[_Glyph]) -> _Glyph | None:
    letters = (glyph for glyph in glyphs if not glyph.sign.isspace())
    return next(letters, None)


def _pieces_from_right(line: _Glyphs, text: PdfTextPage) -> Iterator[Piece]:
    """Stretches of a line from right to left, by the places of its characters."""
    stretch: list[_Glyph] = []
    for glyph in _from_left(line):
        if stretch:
            last = stretch[-1]
            gap = glyph.left - last.right
            height = max(last.height, glyph.height)
            if gap > _GAP * height:
                yield _piece(_as_read(stretch), text)
                stretch = []
            elif gap > _WORD_GAP * height:
                blank = last._replace(sign=" ", left=last.right, right=glyph.left)
                stretch.append(blank)
        stretch.append(glyph)
    if stretch:
        yield _piece(_as_read(stretch), text)


def _from_left(line: _Glyphs) -> list[_Glyph]:
    """The characters of a line from left to right, each with its marks and the blanks behind it."""
    clusters: list[_Glyph] = []
    marks: list[_Glyph] = []
    for glyph in line:
        is_added = glyph.sign.isspace() and glyph.left == glyph.right  # by PDFium, in no certain place
        if is_added or _NO_CHARACTER.match(glyph.sign):
            continue
        last = clusters[-1] if clusters else None
        if is_mark(glyph.sign):
            marks.append(glyph)
        elif last and _is_same_place(last, glyph):
            clusters[-1] = last._replace(sign=last.sign + glyph.sign)  # one glyph that shows two letters
        else:
            clusters.append(glyph)
    for mark in marks:
        _join_to_nearest(clusters, mark)
    return sorted(clusters, key=lambda glyph: glyph.centre)


def _is_same_place(last: _Glyph, glyph: _Glyph) -> bool:
    if glyph.sign.isspace():
        return False
    return (last.left, last.right) == (glyph.left, glyph.right)


def _join_to_nearest(clusters: list[_Glyph], mark: _Glyph) -> None:
    """Add a mark to the letter that it stands over or under."""

    def distance(place: int) -> float:
        glyph = clusters[place]
        is_blank = glyph.sign.isspace()
        return math.inf if is_blank else abs(glyph.centre - mark.centre)

    if clusters:
        places = range(len(clusters))
        nearest = min(places, key=distance)
        letter = clusters[nearest]
        clusters[nearest] = letter._replace(sign=letter.sign + mark.sign)


def _as_read(stretch: _Glyphs) -> list[_Glyph]:
    order = reading_order([glyph.sign for glyph in stretch])
    glyphs = [stretch[place] for place in order]
    signs = with_brackets([glyph.sign for glyph in glyphs])
    pairs = zip(glyphs, signs, strict=True)
    return [glyph._replace(sign=sign) for glyph, sign in pairs]


def _pieces_from_left(glyphs: Iterable[_Glyph], text: PdfTextPage) -> Iterator[Piece]:
    stretch: list[_Glyph] = []
    for glyph in glyphs:
        if stretch and _is_apart(stretch[-1], glyph):
            yield _piece(stretch, text)
            stretch = []
        if _NO_CHARACTER.match(glyph.sign):
            continue
        if not glyph.sign.isspace():
            stretch.append(glyph)
        elif stretch:
            last = stretch.pop()
            stretch.append(last._replace(sign=f"{last.sign.rstrip()} "))
    if stretch:
        yield _piece(stretch, text)


def _is_apart(last: _Glyph, glyph: _Glyph) -> bool:
    if glyph.sign.isspace():
        return glyph.sign == "\n"
    if last.top < glyph.bottom or glyph.top < last.bottom:
        return True
    gap = max(glyph.left - last.right, last.left - glyph.right)
    return gap > 0 and gap > _GAP * max(last.height, glyph.height)


def _piece(stretch: _Glyphs, text: PdfTextPage) -> Piece:
    signs = [stretch[0].sign]
    for last, glyph in pairwise(stretch):
        rise = glyph.bottom - last.bottom
        is_raised = rise > _RAISED * last.height
        is_power = is_raised and last.sign.isdigit()
        if is_power and glyph.sign[0] in "-−0123456789":
            signs.append("^")
        signs.append(glyph.sign)
    middle = stretch[len(stretch) // 2]
    return Piece(
        text="".join(signs).strip(),
        left=min(glyph.left for glyph in stretch),
        bottom=min(glyph.bottom for glyph in stretch),
        right=max(glyph.right for glyph in stretch),
        top=max(glyph.top for glyph in stretch),
        size=_size(text, middle.number),
    )


def _size(text: PdfTextPage, number: int) -> float:
    """The size of a character in points: its font's, scaled as the page scales it."""
    import pypdfium2.raw as pdfium

    matrix = pdfium.FS_MATRIX()
    pdfium.FPDFText_GetMatrix(text.raw, number, ctypes.byref(matrix))
    size = pdfium.FPDFText_GetFontSize(text.raw, number)
    scale = math.hypot(matrix.c, matrix.d)
    return round(float(size) * scale, 1)
