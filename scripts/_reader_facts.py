"""Facts of a document, and whether a text states them: each value must stand in the right relation to its labels.

A value may be written in several right forms (`7.5 %`, `7.5%`). It counts as a whole word only: 4711 is not in 14711.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

TICKED = ("[x]", "[X]", "☒", "☑", "✓", "✔", "✅", "(x)", "(X)", "(*)", "◉", "●")
BLANK = ("[ ]", "[]", "☐", "◻", "□", "❏", "❑", "( )", "()", "○")
_FARTHEST = 600  # characters between a label and its value
_BLANK_CELL = re.compile(r"(?:unnamed: ?\d+(?:_level_\d+)?|nan|none|)", re.IGNORECASE)
_MARK = re.compile(
    r"[\s\[(^]{0,4}(?:footnote|note)?[\s\[(^#-]{0,3}([0-9]{1,3}|[a-z]{1,3}|[*†‡])(?![a-z])", re.IGNORECASE
)
_NOTE_START = re.compile(
    r"\W*?(?:(?:fn|footnote|note)\W*)?([0-9]{1,3}(?![\w.,]*\d)|(?<![a-z])[a-z](?=[.)\]:])|[*†‡])(?!\w)\W*",
    re.IGNORECASE,
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")


class Group(NamedTuple):
    """What belongs together: the labels that compete for a value, and the values.

    columns: of a table, the labels of each row of its header.
    """

    labels: tuple[str, ...]
    values: tuple[str, ...] = ()
    columns: tuple[tuple[str, ...], ...] = ()


class Fact(NamedTuple):
    """A value and where it belongs.

    kind: the part of the document, for the table of what is lost.
    relation: "after" (the label is the nearest before the value), "line" (both in one line), "row" (a cell below `columns`),
        "note" (beside its anchor, or behind the same mark), "tick" (the mark before the label), "chosen" (one of the
        group's values).
    values: right forms of one value.
    columns: of a cell, the label of each row of the header.
    wrong: what may not stand before the value in its line.
    """

    kind: str
    relation: str
    label: str
    values: tuple[str, ...]
    group: Group
    columns: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()

    def __str__(self) -> str:
        label = " > ".join((*self.columns, self.label))
        return f"{self.kind}: {label} = {self.values[0]}"


def is_stated(fact: Fact, text: str) -> bool:
    """Whether a text, as `plain` gives it, states the fact."""
    return _RELATIONS[fact.relation](fact, text)


def plain(text: str) -> str:
    """A text without the signs of Markdown and HTML, powers as `^6`: what remains is the same for all readers."""
    text = html.unescape(text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"~~.*?~~|<(?:del|s|strike)>.*?</(?:del|s|strike)>", "", text)
    text = re.sub(r"<sup>(.*?)</sup>|\^\{?(-?\w+)\}?\^?", lambda match: f"^{match[1] or match[2]}", text)
    text = re.sub(r"[⁰¹²³⁴-⁹⁻]+", lambda match: f"^{match[0].translate(_SUPERSCRIPTS)}", text)
    text = re.sub(r"</?[a-zA-Z][^<>\n]*>", " ", text)
    text = re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", text)
    text = re.sub(r"[\u200b-\u200f\u2060\ufeff\u00ad]", "", text)
    text = re.sub(r"\*\*|``?|(?<!\w)_+|_+(?!\w)|(?<=\w)\*(?!\w)|(?<!\w)\*(?=\w)", "", text)
    text = text.replace("\u2212", "-").replace("\u2011", "-")
    text = re.sub(r"[^\S\n\t]+", " ", text)
    return "\n".join(line.strip(" ") for line in text.splitlines())


def places(words: str, text: str) -> Iterator[re.Match[str]]:
    """Where these words stand, as whole words, over ends of lines, too."""
    pattern = r"\s+".join(map(re.escape, words.split()))
    before = r"(?<![\w.,])" if words[0].isalnum() else ""
    after = r"(?![\w]|[.,]\d)" if words[-1].isalnum() else ""
    return re.finditer(f"{before}{pattern}{after}", text)


def _value_places(fact: Fact, text: str) -> Iterator[re.Match[str]]:
    return (place for form in fact.values for place in places(form, text))


def _last(labels: Sequence[str], text: str, end: int) -> tuple[int, str]:
    """The last of these labels in front of `end`, and where it ends; -1 and "" where there is none."""
    start = max(0, end - 8 * _FARTHEST)
    window = text[start:end]
    ends = [(start + place.end(), label) for label in labels for place in places(label, window)]
    return max(ends, default=(-1, ""))


def _line_of(text: str, place: int) -> tuple[int, int]:
    """Where the line of a place starts and ends."""
    end = text.find("\n", place)
    return text.rfind("\n", 0, place) + 1, len(text) if end < 0 else end


def _is_after(fact: Fact, text: str) -> bool:
    return any(_stands_after(fact, text, place.start()) for place in _value_places(fact, text))


def _stands_after(fact: Fact, text: str, place: int) -> bool:
    end, label = _last(fact.group.labels, text, place)
    between = text[end:place]
    if label != fact.label or len(between) > _FARTHEST:
        return False
    rivals = [value for value in fact.group.values if value not in fact.values]
    return not any(next(places(words, between), None) for words in (*rivals, *fact.wrong))


def _is_in_line(fact: Fact, text: str) -> bool:
    """Both in one line, or with nothing but an end of line between them."""
    for place in _value_places(fact, text):
        start, end = _line_of(text, place.start())
        rest = text[place.end() : place.end() + len(fact.label) + 4].lstrip(" \t\n.)")
        if next(places(fact.label, text[start:end]), None) or rest.startswith(fact.label):
            return True
    return False


def _is_note(fact: Fact, text: str) -> bool:
    """A note that starts with the mark behind its anchor; or one without a mark, beside the anchor."""
    anchors = re.finditer(re.escape(fact.label), text)
    anchor_marks = {mark[1].lower() for anchor in anchors if (mark := _MARK.match(text, anchor.end()))}
    for place in _value_places(fact, text):
        mark = _mark_of_note(text, place.start())
        if mark in anchor_marks if mark else _stands_after(fact, text, place.start()):
            return True
    return False


def _mark_of_note(text: str, place: int) -> str:
    """The mark at the start of the line of a place, or alone in the line above; "" where there is none."""
    start, _ = _line_of(text, place)
    above = text[:start].rstrip("\n").rpartition("\n")[2]
    mark = _NOTE_START.match(text[start:place]) or _NOTE_START.fullmatch(above)
    return mark[1].lower() if mark else ""


def _is_ticked_right(fact: Fact, text: str) -> bool:
    """The nearest mark before the label, else the nearest behind it, is right."""
    marks = "|".join(map(re.escape, TICKED + BLANK))
    for label in places(fact.label, text):
        start, end = _line_of(text, label.start())
        before = re.findall(marks, text[start : label.start()])
        behind = re.findall(marks, text[label.end() : end])
        mark = before[-1] if before else behind[0] if behind else ""
        if mark in fact.values:
            return True
    return False


def _is_chosen(fact: Fact, text: str) -> bool:
    """The value stands behind its label, without the values that were not chosen, or with a mark before it alone."""
    marks = "|".join(map(re.escape, TICKED))
    choices = "|".join(map(re.escape, fact.group.values))
    for label in places(fact.label, text):
        rest = text[label.end() : label.end() + 200].split("\n\n", 1)[0]
        named = re.findall(choices, rest)
        ticked = re.findall(rf"(?:{marks})\s*({choices})", rest)
        if set(ticked or named) <= set(fact.values) and named:
            return True
    return False


def _is_in_cell(fact: Fact, text: str) -> bool:
    """The row's label is the nearest before the value, and each of the column's labels is above or before it."""
    for place in _value_places(fact, text):
        end, label = _last(fact.group.labels, text, place.start())
        if label == fact.label and all(
            _is_below(fact, text, place.start(), end, name, level)
            for name, level in zip(fact.columns, fact.group.columns, strict=True)
        ):
            return True
    return False


def _is_below(fact: Fact, text: str, place: int, row_start: int, name: str, level: tuple[str, ...]) -> bool:
    """Whether a value belongs to the column `name` of a header's row with the labels `level`."""
    start, line_end = _line_of(text, place)
    end, nearest = _last(level, text, place)
    if end >= min(row_start, start):
        return nearest == name and not any(
            next(places(value, text[end:place]), None) for value in fact.group.values if value not in fact.values
        )
    line = text[start:line_end]
    above = text[:start].split("\n")
    for header in reversed(above):
        named = sum(next(places(label, header), None) is not None for label in level)
        if named and (named > 1 or len(level) == 1) and next(places(name, header), None):
            return _same_column(fact, name, level, header, line, place - start)
    return False


def _same_column(fact: Fact, name: str, level: tuple[str, ...], header: str, line: str, place: int) -> bool:
    """Whether the value at this place of a line has `name` above it: by cells, and within a cell, or a line, by order."""
    for divider in ("|", "\t"):
        if divider in header and divider in line:
            index = line.count(divider, 0, place)
            heads = header.split(divider)[: index + 1]
            while len(heads) > 1 and _BLANK_CELL.fullmatch(heads[-1].strip()):
                heads.pop()
            start = line.rfind(divider, 0, place) + 1
            header, line, place = heads[-1], line[start:].split(divider)[0], place - start
            break
    labels = sorted((label.start(), words) for words in set(level) for label in places(words, header))
    values = {value.start() for words in fact.group.values for value in places(words, line)} | {place}
    rank = sorted(values).index(place)
    return bool(labels) and labels[rank * len(labels) // len(values)][1] == name


_RELATIONS = {
    "after": _is_after,
    "line": _is_in_line,
    "row": _is_in_cell,
    "note": _is_note,
    "tick": _is_ticked_right,
    "chosen": _is_chosen,
}
