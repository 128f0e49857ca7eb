"""Why exact prefixes miss known text: where a request leaves the earlier one that it resembles, in plain words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from blend.census.matching import Match
from blend.census.memory import Earlier
from blend.layout import common_length

LEAST_LOST = 16  # tokens: fewer are no cause
_SHOWN = 60  # characters of an example
_HEAD = ("system", "tools")  # roles of what stands in front of all messages
_WORD = re.compile(r"[\w:./\\+-]+")

_MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
# Kinds of a changed word, the first that fits both the old and the new one.
_VALUES = {
    "time": re.compile(r".*\d{1,2}:\d{2}.*"),
    "date": re.compile(rf".*(\d{{4}}[-/]\d{{2}}[-/]\d{{2}}|\d{{1,2}}[./]\d{{1,2}}[./]\d{{2,4}}).*|(?i:{_MONTHS})\w*"),
    "id": re.compile(r".*(?=\w*\d)(?i:[0-9a-f]{7,}|[0-9a-z]{10,}).*"),
    "number": re.compile(r"\D*\d[\d.,_]*\D*"),
    "path": re.compile(r".*[/\\].*"),
}
_TEXTS = {
    "system": "the system prompt",
    "tools": "the description of a tool",
    "user": "a message of the user",
    "assistant": "an answer",
    "tool": "a result of a tool",
}
_VALUE_REMEDY = "move it behind all that stays the same, or leave it out"
_BLENDING_FINDS_IT = "exact prefixes cannot help; blending can"
_DROP_SELDOM = "drop many messages at once, and seldom"
# Of each kind of cause, what has happened and what to do.
_KINDS = {
    "time": ("{text} holds a time of day", _VALUE_REMEDY),
    "date": ("{text} holds a date", _VALUE_REMEDY),
    "id": ("{text} holds an id", _VALUE_REMEDY),
    "number": ("{text} holds a number that changes", _VALUE_REMEDY),
    "path": ("{text} holds a path that changes", _VALUE_REMEDY),
    "edited": ("{text} is changed", "append what changes, or put it at the end"),
    "shortened": ("{text} is shortened", "shorten a text before it is first sent, or seldom"),
    "grown": ("{text} grows", "append a message instead"),
    "trimmed": ("the conversation's first messages are dropped", _DROP_SELDOM),
    "compacted": ("messages are replaced by fewer ones (compaction)", "compact seldom; blending reuses what stays"),
    "dropped": ("{texts} are dropped in the middle", _DROP_SELDOM),
    "inserted": ("{text} is inserted in front of known text", "insert it at the end"),
    "reordered": ("{texts} come in another order", "sort them, always in the same order"),
    "passages": ("passages come in another order or choice in {text}", _BLENDING_FINDS_IT),
    "again": ("{text} comes again behind other text, unchanged", _BLENDING_FINDS_IT),
    "again_edited": ("{text} comes again after an edit", _BLENDING_FINDS_IT),
    "evicted": ("a known prefix has left the cache", "a larger cache, or requests of one conversation closer together"),
}


class CauseName(NamedTuple):
    """What causes are grouped by. line: of the system's text, 0 if it does not matter."""

    kind: str
    role: str
    line: int = 0

    @property
    def words(self) -> str:
        """In plain words."""
        texts = "tools" if self.role == "tools" else "messages"
        words = _KINDS[self.kind][0].format(text=_TEXTS[self.role], texts=texts)
        return f"{words} in line {self.line}" if self.line else words

    @property
    def remedy(self) -> str:
        """What to do."""
        return _KINDS[self.kind][1]


class Loss(NamedTuple):
    """Known tokens of a request that no exact prefix serves, and why. old, new: an example of the change."""

    name: CauseName
    tokens: int
    old: str = ""
    new: str = ""


@dataclass
class Cause:
    """All losses of one cause. place: of the first request with it; old, new: its example."""

    name: CauseName
    place: str
    old: str
    new: str
    tokens: int = 0
    requests: int = 0


class Causes:
    """Sums up losses by their causes."""

    def __init__(self) -> None:
        self._causes: dict[CauseName, Cause] = {}

    def add(self, loss: Loss, place: str) -> None:
        """Count a loss of the request at this place of a log."""
        if loss.name not in self._causes:
            self._causes[loss.name] = Cause(loss.name, place, *_example(loss.old, loss.new))
        cause = self._causes[loss.name]
        cause.tokens += loss.tokens
        cause.requests += 1

    @property
    def largest(self) -> list[Cause]:
        """All causes, that of most tokens first."""
        return sorted(self._causes.values(), key=lambda cause: -cause.tokens)


def losses(match: Match) -> Iterator[Loss]:
    """Why known text of a request is not in an exact prefix, with the tokens that each reason costs."""
    lost = [match.lost(number) for number in range(len(match.parts))]
    if match.earlier is not None and any(lost):
        yield from _from_difference(match, match.earlier, lost)
    for number, tokens in enumerate(lost):
        if tokens >= LEAST_LOST:
            yield _repeated(match, number, tokens)


def _from_difference(match: Match, earlier: Earlier, lost: list[int]) -> Iterator[Loss]:
    """The loss by the first difference to an earlier request; its tokens are taken out of `lost`."""
    texts = [part.text for part in match.parts]
    first = common_length(texts, earlier.texts)
    if first >= min(len(texts), len(earlier.texts)):
        return  # one request is the beginning of the other
    kind = _kind(match, earlier, first)
    behind = set(earlier.texts[first:])
    if kind in ("edited", "passages"):
        behind.add(texts[first])
    numbers = [number for number in range(first, len(texts)) if texts[number] in behind]
    tokens = sum(lost[number] for number in numbers)
    if tokens < LEAST_LOST:
        return
    for number in numbers:
        lost[number] = 0
    role = match.parts[first].role
    old = earlier.texts[first]
    new = texts[first]
    loss = _changed(role, old, new) if kind == "edited" else Loss(CauseName(kind, role), 0, old, new)
    yield loss._replace(tokens=tokens)


def _kind(match: Match, earlier: Earlier, first: int) -> str:
    """What has happened to an earlier request from its text number `first` on."""
    texts = [part.text for part in match.parts]
    before = earlier.texts[first:]
    texts_before = set(before)
    common = first
    while common < len(texts) and texts[common] not in texts_before:
        common += 1
    inserted = common - first
    dropped = before.index(texts[common]) if common < len(texts) else len(before)
    if not inserted and before[0] in texts[first:]:
        return "reordered"
    part = match.parts[first]
    if not inserted:
        in_front = first == 0 or match.parts[first - 1].role in _HEAD
        return "trimmed" if in_front and part.role not in _HEAD else "dropped"
    if not dropped:
        return "inserted"
    edit = match.edited.get(first)
    if edit is not None and edit.is_known.any() and not edit.counterpart:
        return "passages"
    if dropped > inserted and part.role not in _HEAD:
        return "compacted"
    return "edited" if part.role == earlier.roles[first] else "inserted"


def _repeated(match: Match, number: int, tokens: int) -> Loss:
    """The loss by a text that stands behind another text than before."""
    part = match.parts[number]
    edit = match.edited.get(number)
    if edit is None:
        return Loss(CauseName("again", part.role), tokens, "", part.text)
    if not edit.counterpart:
        return Loss(CauseName("passages", part.role), tokens, "", part.text)
    old, new, _ = _differing_lines(edit.counterpart, part.text)
    return Loss(CauseName("again_edited", part.role), tokens, old, new)


def _changed(role: str, before: str, text: str) -> Loss:
    """What has changed in a text: a value, or the text itself."""
    old_line, new_line, number = _differing_lines(before, text)
    line = number if role == "system" else 0
    old, new = _differing_words(old_line, new_line)
    for kind, pattern in _VALUES.items():
        if pattern.fullmatch(old) and pattern.fullmatch(new):
            return Loss(CauseName(kind, role, line), 0, old_line, new_line)
    if text.startswith(before):
        return Loss(CauseName("grown", role), 0, old_line, new_line)
    kind = "shortened" if 2 * len(text) < len(before) else "edited"
    return Loss(CauseName(kind, role, line), 0, old_line, new_line)


def _differing_lines(before: str, text: str) -> tuple[str, str, int]:
    """The first lines that differ, and their number from 1."""
    old_lines = before.split("\n")
    new_lines = text.split("\n")
    at = common_length(new_lines, old_lines)
    old = old_lines[at] if at < len(old_lines) else ""
    new = new_lines[at] if at < len(new_lines) else ""
    return old, new, at + 1


def _differing_words(before: str, line: str) -> tuple[str, str]:
    """The first words that differ, of two lines."""
    pairs = zip(_WORD.findall(before), _WORD.findall(line), strict=False)
    return next(((old, new) for old, new in pairs if old != new), ("", ""))


def _example(old: str, new: str) -> tuple[str, str]:
    """Two texts from shortly before their first difference on, each in one line of at most `_SHOWN` characters."""
    equal = common_length(new, old) if old != new else 0
    begin = max(0, equal - _SHOWN // 3)
    return _shown_from(old, begin), _shown_from(new, begin)


def _shown_from(text: str, begin: int) -> str:
    line = " ".join(text[begin : begin + 4 * _SHOWN].split())
    line = f"…{line}" if begin else line
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 1]}…"
