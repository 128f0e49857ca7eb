"""Bounds of a Word file that its library does not check."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from blend_retrieval.readers.base import UnreadableError
from blend_retrieval.readers.office.docx_numbers import WORD

_MOST_FIELDS = 500  # inside each other
_MOST_PARAGRAPHS = 300_000  # each takes 1 KB and .1 ms


def check_paragraphs(root: Element) -> None:
    """Raise `UnreadableError` if there are too many."""
    paragraphs = sum(1 for _ in root.iter(f"{WORD}p"))
    if paragraphs > _MOST_PARAGRAPHS:
        raise UnreadableError(f"holds more than {_MOST_PARAGRAPHS:,} paragraphs: divide it")


def check_fields(root: Element) -> None:
    """Raise `UnreadableError` if fields begin and do not end: mammoth looks through all that are open at every text."""
    open_fields = 0
    for mark in root.iter(f"{WORD}fldChar"):
        kind = mark.get(f"{WORD}fldCharType")
        if kind == "begin":
            open_fields += 1
        elif kind == "end":
            open_fields -= 1
        if open_fields > _MOST_FIELDS:
            raise UnreadableError("is damaged: its fields do not end")
