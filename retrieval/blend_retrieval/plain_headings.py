"""Finds the headings of plain text where nothing else looks like them: underlined lines, and lines with rising numbers.

Plain text is full of comments, ruled tables, lists and logs, and titles go into prompts and sources. A missed heading
merely costs a shorter title.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple
from unicodedata import east_asian_width

from blend_retrieval.document import Heading, clean_title

_LONGEST = 100  # characters
_RULER = re.compile(r"^(?:={3,}+|-{3,}+)[ \t]*+$", re.MULTILINE)
_NUMBERED = re.compile(r"^(\d{1,3}+(?:\.\d{1,3}+)*+)\.?+[ \t]++(\S.*)$", re.MULTILINE)
_FENCE = re.compile(r"^ {0,3}(?:```|~~~)", re.MULTILINE)
_LEAST_NUMBERED = 3
_MOST_LEVELS = 6
_NO_TITLE = re.compile(r"[={}\[\];\\|<>\t]|  |\w\(|::|->|&&|\.\.|--|,[^\W\d]")
_CLOSING = ".,;:。，；：、…({[-/"


class _Line(NamedTuple):
    """A line: characters `start` to `stop - 1` of a text, without its newline."""

    start: int
    stop: int
    text: str

    @property
    def is_blank(self) -> bool:
        return not self.text.strip()


_NO_LINE = _Line(-1, -1, "")


def plain_headings(text: str) -> Iterator[Heading]:
    """Headings in order. Text in fences has none."""
    headings = [*_underlined(text), *_numbered(text)]
    fences = [fence.start() for fence in _FENCE.finditer(text)]
    for heading in sorted(headings, key=lambda heading: heading.start):
        is_outside = bisect_left(fences, heading.start) % 2 == 0
        if is_outside:
            yield heading


def _underlined(text: str) -> Iterator[Heading]:
    """Lines over a ruler of their length, between blank lines; there may be an equal ruler above."""
    for ruler in _RULER.finditer(text):
        sign = ruler[0].rstrip()
        title = _line_above(text, ruler.start())
        above = _line_above(text, title.start)
        is_framed = above.text.rstrip() == sign
        width = len(title.text.rstrip())
        is_under = len(sign) in (width, _columns(title.text.rstrip()))
        below = _line_below(text, ruler.end())
        if is_under and below.is_blank and (above.is_blank or is_framed) and _is_title(title.text):
            level = 1 if sign[0] == "=" else 2
            start = above.start if is_framed else title.start
            yield Heading(level, clean_title(title.text), start, min(ruler.end() + 1, len(text)))


def _columns(line: str) -> int:
    """The width of a line, in which letters of East Asia take two columns."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in line)


def _numbered(text: str) -> list[Heading]:
    """Lines after numbers that rise from 1, each between blank lines, with text between two of one level."""
    headings: list[Heading] = []
    numbers: tuple[int, ...] = ()
    for line in _NUMBERED.finditer(text):
        number = tuple(map(int, line[1].split(".")))
        is_next = number in _successors(numbers)
        is_alone = _line_above(text, line.start()).is_blank and _line_below(text, line.end()).is_blank
        if not (is_next and is_alone and _is_title(line[2]) and not line[2][0].islower()):
            continue
        is_deeper = len(number) > len(numbers)
        if headings and not is_deeper and not text[headings[-1].stop : line.start()].strip():
            return []  # a list
        numbers = number
        level = min(len(number), _MOST_LEVELS)
        title = clean_title(line[0])
        headings.append(Heading(level, title, line.start(), min(line.end() + 1, len(text))))
    return headings if len(headings) >= _LEAST_NUMBERED else []


def _successors(number: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The numbers that a heading after this one may have."""
    siblings = [(*number[:depth], number[depth] + 1) for depth in range(len(number))]
    return [(*number, 1), *siblings]


def _is_title(words: str) -> bool:
    """Whether this may be the text of a heading: a short line of words at the margin, no sentence, columns or code."""
    words = words.rstrip()
    if not 0 < len(words) <= _LONGEST or _NO_TITLE.search(words) or words[-1] in _CLOSING:
        return False
    letters = sum(map(str.isalpha, words))
    return words[0].isalnum() and letters > 1 and 2 * letters >= len(words.replace(" ", ""))


def _line_above(text: str, start: int) -> _Line:
    """The line before one that starts here."""
    if start <= 0:
        return _NO_LINE
    above = text.rfind("\n", 0, start - 1) + 1
    return _Line(above, start - 1, text[above : start - 1])


def _line_below(text: str, stop: int) -> _Line:
    """The line after one that ends here."""
    if stop >= len(text):
        return _NO_LINE
    end = text.find("\n", stop + 1)
    end = len(text) if end < 0 else end
    return _Line(stop + 1, end, text[stop + 1 : end])
