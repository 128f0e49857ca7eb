"""Where the headings of a plain text are: lines that are underlined, and lines after a `#` where that marks headings.

Nothing says what a plain text holds, and tutorials, logs and notes are full of comments and ruled tables. A title goes
into prompts and sources, so a line is a heading only on good evidence; a heading that is missed costs a shorter title.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple
from unicodedata import east_asian_width

from blend_retrieval.document import MAX_HEADING, Heading, clean_title
from blend_retrieval.headings import PROMPT, like_code, like_heading, like_prose

_RULE = re.compile(r"^(?:={3,}|-{3,})[ \t]*$", re.MULTILINE)
_HASH = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
_MARKED = re.compile(r"(#{1,6})[ \t]+(.*?)(?:[ \t]+#+)?[ \t]*$")
_FENCE = re.compile(r"^ {0,3}(`{3,}(?=[^`\n]*$)|~{3,})[ \t]*(.*)$", re.MULTILINE)
_COLUMNS = re.compile(r"\S(?: {2,}|\t)\S")
_LEAST_MARKED = 2  # a single line after a `#` says nothing of the text
_HEADING_SHARE = 0.75  # of the lines that open with `#`; where fewer are like headings, it marks comments
_GLANCE = 200  # characters by which a neighbour is judged


def plain_headings(text: str) -> tuple[Heading, ...]:
    """Headings in order, outside of fenced code."""
    fences = _Fences.of(text)
    return tuple(sorted([*_underlined(text, fences), *_marked(text, fences)], key=lambda heading: heading.start))


class _Line(NamedTuple):
    """A line: characters `start` to `stop - 1`, without its newline. `start` is below 0 where there is none."""

    start: int
    stop: int
    text: str

    @property
    def blank(self) -> bool:
        return not self.text.strip()


class _Fences(NamedTuple):
    """Stretches of fenced code, in order; `closed` when none is left open."""

    spans: tuple[tuple[int, int], ...]
    closed: bool

    @classmethod
    def of(cls, text: str) -> _Fences:
        spans, mark, start = [], "", 0
        for fence in _FENCE.finditer(text):
            if not mark:
                mark, start = fence[1], fence.start()
            elif fence[1].startswith(mark) and not fence[2]:
                spans.append((start, fence.end()))
                mark = ""
        return cls(tuple(spans), not mark)

    def outside(self, matches: Iterator[re.Match[str]]) -> Iterator[re.Match[str]]:
        """Those of some ordered matches that are in no fence."""
        spans = iter((*self.spans, (1 << 62, 1 << 62)))
        span = next(spans)
        for match in matches:
            while span[1] <= match.start():
                span = next(spans)
            if match.start() < span[0]:
                yield match


def _underlined(text: str, fences: _Fences) -> Iterator[Heading]:
    """Words of their own line over a ruler about as long as they are, or between two rulers."""
    for rule in fences.outside(_RULE.finditer(text)):
        below = _Line(rule.start(), rule.end(), rule[0].rstrip())
        words = _before(text, below)
        above = _before(text, words)
        framed = above.text.rstrip() == below.text and _before(text, above).blank
        title = words.text.strip()
        if not (framed or (above.blank and words.text[:1] == title[:1])) or not 0 < len(title) <= MAX_HEADING:
            continue
        if _long_enough(title, len(below.text), framed) and like_heading(title) and _heads_words(text, below, framed):
            start = above.start if framed else words.start
            yield Heading(1 if below.text[0] == "=" else 2, clean_title(title), start, min(below.stop + 1, len(text)))


def _long_enough(title: str, ruler: int, framed: bool) -> bool:
    columns = sum(2 if east_asian_width(sign) in "WF" else 1 for sign in title)
    return 0.8 * len(title) - 1 <= ruler and (framed or ruler <= 1.25 * columns + 3)


def _heads_words(text: str, ruler: _Line, framed: bool) -> bool:
    """Whether what follows a ruler could be the text under a heading, and not the rows of a table or a prompt."""
    after = _after(text, ruler)
    return not _COLUMNS.search(after.text.strip()) and not PROMPT.match(after.text) and (after.blank or not framed)


def _marked(text: str, fences: _Fences) -> list[Heading]:
    """Lines after a `#`, if there are some and nearly all of them stand like headings: alone, among words."""
    if not fences.closed:
        return []
    count, found = 0, []
    for match in fences.outside(_HASH.finditer(text)):
        count += 1
        line = _Line(match.start(), match.end(), match[0])
        marked = _MARKED.match(match[0]) if len(match[0]) <= MAX_HEADING else None
        if marked and marked[2] and like_heading(marked[2]) and _among_words(text, line):
            stop = min(line.stop + 1, len(text))
            found.append(Heading(len(marked[1]), clean_title(marked[2]), line.start, stop))
    return found if len(found) >= max(_LEAST_MARKED, _HEADING_SHARE * count) else []


def _among_words(text: str, line: _Line) -> bool:
    before, after = _before(text, line), _after(text, line)
    if not (before.blank and after.blank):
        return False
    while before.start > 0 and before.blank:
        before = _before(text, before)
    while after.stop < len(text) and after.blank:
        after = _after(text, after)
    return (before.blank or not like_code(before.text)) and like_prose(after.text)


def _before(text: str, line: _Line) -> _Line:
    if line.start <= 0:
        return _Line(-1, -1, "")
    start = text.rfind("\n", 0, line.start - 1) + 1
    return _Line(start, line.start - 1, text[start : min(line.start - 1, start + _GLANCE)])


def _after(text: str, line: _Line) -> _Line:
    start = line.stop + 1
    if start > len(text):
        return _Line(len(text), len(text), "")
    stop = text.find("\n", start)
    stop = len(text) if stop < 0 else stop
    return _Line(start, stop, text[start : min(stop, start + _GLANCE)])
