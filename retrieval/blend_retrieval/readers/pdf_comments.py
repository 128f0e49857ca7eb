"""Comments of a PDF page behind the words that they belong to."""

from __future__ import annotations

from collections.abc import Sequence

from blend_retrieval.readers.pdf_layout import MARKER, Piece

HYPHEN = "\x02"
"""PDFium's sign for a hyphen or soft hyphen at the end of a line, after which the word goes on."""


def with_comments(pieces: Sequence[Piece], comments: Sequence[Piece]) -> tuple[list[Piece], list[str]]:
    """The pieces of a page, each with the comments that stand on it or beside it; and the comments that stand at no line.

    comments: with the places of their icons, or of the last words that they mark. Headings stay as they are.
    """
    commented = list(pieces)
    apart = []
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
    lines = [number for number, piece in enumerate(pieces) if piece.bottom <= comment.middle <= piece.top]
    if not lines:
        lines = [number for number, piece in enumerate(pieces) if _rise(piece, comment) < piece.height]
    if not lines or any(pieces[number].level for number in lines):
        return None
    words = [number for number in lines if not MARKER.fullmatch(pieces[number].text)]

    def distance(number: int) -> tuple[float, float]:
        piece = pieces[number]
        centre = (comment.left + comment.right) / 2
        return max(0.0, piece.left - centre, centre - piece.right), _rise(piece, comment)

    return min(words or lines, key=distance)


def _rise(piece: Piece, comment: Piece) -> float:
    return abs(piece.middle - comment.middle)


def _joined(text: str, comment: str) -> str:
    """The text and the comment, which does not part a word that goes on in the next line."""
    if not text.endswith(HYPHEN):
        return f"{text} {comment}"
    words, _, divided = text.rpartition(" ")
    return f"{words} {comment} {divided}".lstrip()
