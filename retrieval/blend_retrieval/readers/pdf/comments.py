"""Comments of a PDF page behind the words that they belong to."""

from __future__ import annotations

from collections.abc import Sequence

from blend_retrieval.readers.pdf.layout import MARKER, Piece

HYPHEN = "\x02"
"""PDFium's sign for a hyphen or soft hyphen at the end of a line, after which the word goes on."""

_MOST_PAIRS = 1_000_000  # of pieces and comments whose distances are compared


def with_comments(pieces: Sequence[Piece], comments: Sequence[Piece]) -> tuple[list[Piece], list[str]]:
    """The pieces of a page, each with the comments that stand on it or beside it; and the comments that stand at no line.

    comments: with the places of their icons, or of the last words that they mark. Headings stay as they are.
    """
    commented = list(pieces)
    apart = []
    if len(pieces) * len(comments) > _MOST_PAIRS:
        return commented, [comment.text for comment in comments]
    for comment in comments:
        number = _nearest(pieces, comment)
        if number is None:
            apart.append(comment.text)
        else:
            piece = commented[number]
            commented[number] = piece._replace(text=_joined(piece.text, comment.text))
    return commented, apart


def _nearest(pieces: Sequence[Piece], comment: Piece) -> int | None:
    """The number of the piece in the comment's line that is nearest to it."""
    line = _line(pieces, comment)
    if any(pieces[number].level for number in line):
        return None
    words = [number for number in line if not MARKER.fullmatch(pieces[number].text)]
    return min(words or line, key=lambda number: _distance(pieces[number], comment), default=None)


def _line(pieces: Sequence[Piece], comment: Piece) -> list[int]:
    """The numbers of the pieces at the height of a comment, or less than a line away from it."""
    line = []
    near = []
    for number, piece in enumerate(pieces):
        if piece.bottom <= comment.middle <= piece.top:
            line.append(number)
        if _rise(piece, comment) < piece.height:
            near.append(number)
    return line or near


def _distance(piece: Piece, comment: Piece) -> tuple[float, float]:
    """How far a comment is on the left or right of a piece, then how far above or below."""
    centre = (comment.left + comment.right) / 2
    before = piece.left - centre
    behind = centre - piece.right
    aside = max(0.0, before, behind)
    return aside, _rise(piece, comment)


def _rise(piece: Piece, comment: Piece) -> float:
    return abs(piece.middle - comment.middle)


def _joined(text: str, comment: str) -> str:
    """The text and the comment, which does not part a word that goes on in the next line."""
    if not text.endswith(HYPHEN):
        return f"{text} {comment}"
    words, _, divided = text.rpartition(" ")
    return f"{words} {comment} {divided}".lstrip()
