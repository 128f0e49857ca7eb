"""Marks for numbers of lists and headings that a converter must not change, and their place in the Markdown."""

from __future__ import annotations

import re

_START, _END = "\ue9f0", "\ue9f1"  # for private use, in no document
_NUMBER = re.compile(f"(?:(?:[-*+]|\\d+[.)]) +)*{_START}([^{_END}]*){_END} *")
_ESCAPED_NUMBER = re.compile(r"^(\s*\w{1,4})\\([.)])", re.MULTILINE)
_ESCAPED_BOX = re.compile(r"\\?\[([x ])\\?\]")


def marked_number(number: str) -> str:
    """A number that replaces the one that Markdown would show in its place."""
    return f"{_START}{number}{_END}"


def without_marks(text: str) -> str:
    """A text with marked numbers as words."""
    return text.replace(_START, "").replace(_END, " ")


def numbered_markdown(markdown: str) -> str:
    """Markdown with the marked numbers in the place of a list's own, and without escapes of numbers and boxes."""
    numbered = _NUMBER.sub(lambda match: f"{match[1]} ".lstrip(), markdown)
    boxed = _ESCAPED_BOX.sub(r"[\1]", numbered)
    return _ESCAPED_NUMBER.sub(r"\1\2", boxed)
