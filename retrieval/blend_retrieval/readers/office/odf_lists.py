"""Numbers of lists and headings in OpenDocument files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from xml.etree.ElementTree import Element

from blend_retrieval.readers.numerals import numeral

TEXT = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}"
STYLE = "{urn:oasis:names:tc:opendocument:xmlns:style:1.0}"
_FORMATS = {"a": "lowerLetter", "A": "upperLetter", "i": "lowerRoman", "I": "upperRoman", "1": "decimal"}
_LATIN = 26


class _Level(NamedTuple):
    """How one level is numbered. shown: the levels that its number shows, counted from it upwards."""

    format: str
    prefix: str
    suffix: str
    start: int
    shown: int
    is_bullet: bool


Levels = dict[int, _Level]


def list_styles(*roots: Element | None) -> dict[str, Levels]:
    """The levels of each list style in these parts, by its name; headings are under ""."""
    styles = {}
    for root in roots:
        for tag, name in (("list-style", None), ("outline-style", "")):
            for style in root.iter(TEXT + tag) if root is not None else ():
                key = style.get(f"{STYLE}name", "") if name is None else name
                styles[key] = dict(_levels(style))
    return styles


def _levels(style: Element) -> Iterator[tuple[int, _Level]]:
    for element in style:
        depth = element.get(f"{TEXT}level", "")
        if depth.isdigit():
            yield (
                int(depth),
                _Level(
                    format=element.get(f"{STYLE}num-format", ""),
                    prefix=element.get(f"{STYLE}num-prefix", ""),
                    suffix=element.get(f"{STYLE}num-suffix", ""),
                    start=int(element.get(f"{TEXT}start-value", "1")),
                    shown=int(element.get(f"{TEXT}display-levels", "1")),
                    is_bullet=not element.tag.endswith(("level-style-number", "outline-level-style")),
                ),
            )


class Counter:
    """The numbers of one list, or of the headings."""

    def __init__(self, levels: Levels) -> None:
        self._levels = levels
        self._counts: dict[int, int] = {}

    def restart(self, depth: int) -> None:
        """Begin a list anew at this level."""
        self._forget(depth)

    def next_number(self, depth: int, start: int | None = None) -> str | None:
        """The number of the next item at a level, "" without one, None for a bullet. start: the item's own value."""
        level = self._levels.get(depth)
        self._forget(depth + 1)
        if start is not None:
            self._counts[depth] = start
        elif depth in self._counts:
            self._counts[depth] += 1
        else:
            self._counts[depth] = level.start if level else 1
        if level is None or level.is_bullet:
            return None
        if not level.format:
            return f"{level.prefix}{level.suffix}".strip()
        first = max(1, depth - level.shown + 1)
        written = map(self._written, range(first, depth + 1))
        numbers = ".".join(filter(None, written))
        return f"{level.prefix}{numbers}{level.suffix}".strip()

    def _forget(self, depth: int) -> None:
        """Forget the counts of this level and of those below."""
        for level in list(self._counts):
            if level >= depth:
                del self._counts[level]

    def _written(self, depth: int) -> str:
        level = self._levels.get(depth)
        count = self._counts.get(depth, level.start if level else 1)
        kind = _FORMATS.get(level.format if level else "1", "")
        if kind.endswith("Letter") and count > _LATIN:
            text = _letters(count)
            return text.upper() if kind.startswith("upper") else text
        return numeral(count, kind) or ""


def _letters(count: int) -> str:
    """Such as "ab" for 28."""
    letters = ""
    while count > 0:
        count, place = divmod(count - 1, _LATIN)
        letters = chr(ord("a") + place) + letters
    return letters
