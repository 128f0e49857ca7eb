"""Marks of Markdown around raised (`^`), lowered (`~`) and struck-through (`~~`) text."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple


class Stretch(NamedTuple):
    """Characters of one look, and the mark before them; behind them it stands in reverse order."""

    text: str
    mark: str


def marked(stretches: Iterable[Stretch]) -> str:
    """The text with its marks, which stand at words, not at blanks."""
    texts = []
    for mark, group in groupby(stretches, key=lambda stretch: stretch.mark):
        text = "".join(stretch.text for stretch in group)
        words = text.strip()
        if mark and words:
            text = text.replace(words, f"{mark}{words}{mark[::-1]}", 1)
        texts.append(text)
    return "".join(texts)
