"""Numbers of a Word file's lists and headings, which Word computes and does not store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple
from xml.etree.ElementTree import Element

from blend_retrieval.readers.numerals import numeral

WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_BULLETS = ("bullet", "none")
_MOST_LEVELS = 9
MOST_ANCESTORS = 20  # of a style


def value(element: Element | None, path: str = "", name: str = "val") -> str | None:
    """An attribute of an element, or of one below it; None without the element or the attribute."""
    if element is not None and path:
        steps = [WORD + step for step in path.split("/")]
        element = element.find("/".join(steps))
    return None if element is None else element.get(WORD + name)


def is_on(element: Element | None) -> bool:
    """Whether an element that switches something is there and does not say "off"."""
    if element is None:
        return False
    state = element.get(f"{WORD}val", "1")
    return state not in ("0", "false", "off")


class _Level(NamedTuple):
    """How one level of a list is numbered. pattern: such as "%1.%2". restart: the level (from 1) after which it starts anew."""

    start: int
    format: str
    pattern: str
    restart: int
    is_legal: bool
    style: str | None


_Levels = dict[int, _Level]
_Counts = dict[int, int]


class _List(NamedTuple):
    """A list's definition, its levels, and the levels that start anew when it is first used."""

    definition: str
    levels: _Levels
    overrides: _Counts


class _Place(NamedTuple):
    """The list and level of a paragraph."""

    number: str
    level: int


class Numbers:
    """Counts the numbered paragraphs of a document in their order.

    numbering, styles: the roots of these parts of the file, or None.
    """

    def __init__(self, numbering: Element | None, styles: Element | None) -> None:
        self._styles = _by_attribute(_children(styles, "style"), "styleId")
        self._lists = _lists(numbering) if numbering is not None else {}
        self._places_by_style = _places_by_style(self._lists)
        self._counts: dict[str, _Counts] = {}
        self._used: set[_Place] = set()
        self.unknown_formats: set[str] = set()

    def next_number(self, paragraph: Element) -> str | None:
        """The number that Word shows before the next paragraph: "" if it hides it, None if there is none, or a bullet."""
        place = self._place(paragraph.find(f"{WORD}pPr"))
        numbered = self._lists.get(place.number) if place else None
        if place is None or numbered is None or place.level not in numbered.levels:
            return None
        counts = self._count(numbered, place)
        level = numbered.levels[place.level]
        if level.format == "bullet":
            return None
        return self._shown(level, numbered.levels, counts)

    def outline_level(self, style: str) -> int | None:
        """The level of headings in this style, from 0; None if they are none."""
        for ancestor in self._ancestors(style):
            depth = value(ancestor, "pPr/outlineLvl")
            if depth is not None:
                level = int(depth) if depth.isdigit() else _MOST_LEVELS
                return level if level < _MOST_LEVELS else None
        return None

    def _ancestors(self, style: str | None) -> Iterator[Element]:
        for _ in range(MOST_ANCESTORS):
            element = self._styles.get(style or "")
            if element is None:
                return
            yield element
            style = value(element, "basedOn")

    def _place(self, properties: Element | None) -> _Place | None:
        number = value(properties, "numPr/numId")
        depth = value(properties, "numPr/ilvl")
        style = value(properties, "pStyle")
        chain = list(self._ancestors(style))
        for ancestor in chain if number is None else ():
            number = value(ancestor, "pPr/numPr/numId")
            if number is not None:
                depth = depth or self._depth_of_styles(number, chain) or value(ancestor, "pPr/numPr/ilvl")
                break
        if number is None and style is not None and style not in self._styles:
            return self._place_by_style(style)
        if number is None or number == "0":
            return None
        return _Place(number, int(depth) if depth and depth.isdigit() else 0)

    def _depth_of_styles(self, number: str, styles: Iterable[Element]) -> str | None:
        """The level that a list keeps for the first of these styles."""
        numbered = self._lists.get(number)
        levels = numbered.levels.items() if numbered else ()
        depths = {level.style: str(depth) for depth, level in levels if level.style}
        for style in styles:
            name = style.get(f"{WORD}styleId")
            if name in depths:
                return depths[name]
        return None

    def _place_by_style(self, style: str) -> _Place | None:
        return self._places_by_style.get(style)

    def _count(self, numbered: _List, place: _Place) -> _Counts:
        counts = self._counts.setdefault(numbered.definition, {})
        is_first_use = place not in self._used
        self._used.add(place)
        if is_first_use and place.level in numbered.overrides:
            counts[place.level] = numbered.overrides[place.level]
        elif place.level in counts:
            counts[place.level] += 1
        else:
            counts[place.level] = numbered.levels[place.level].start
        for depth, level in numbered.levels.items():
            if depth < place.level:
                counts.setdefault(depth, level.start)
            elif depth > place.level and place.level < level.restart:
                counts.pop(depth, None)
        return counts

    def _shown(self, level: _Level, levels: _Levels, counts: _Counts) -> str:
        shown = level.pattern
        for depth, count in counts.items():
            kind = levels[depth].format if depth in levels else "decimal"
            if level.is_legal and kind not in _BULLETS:
                kind = "decimal"
            sign = f"%{depth + 1}"
            if sign in shown:
                written = numeral(count, kind)
                if written is None:
                    self.unknown_formats.add(kind)
                    written = str(count)
                shown = shown.replace(sign, written)
        return shown.strip()


def _children(parent: Element | None, name: str) -> Iterator[Element]:
    if parent is not None:
        yield from parent.iterfind(WORD + name)


def _by_attribute(elements: Iterable[Element], name: str) -> dict[str, Element]:
    return {element.get(WORD + name, ""): element for element in elements}


def _lists(numbering: Element) -> dict[str, _List]:
    """The lists of a document by their numbers."""
    definitions = _by_attribute(_children(numbering, "abstractNum"), "abstractNumId")
    by_style = {value(definition, "styleLink"): name for name, definition in definitions.items()}
    lists = {}
    for number in _children(numbering, "num"):
        name = value(number, "abstractNumId") or ""
        definition = definitions.get(name)
        link = value(definition, "numStyleLink")
        if link is not None and link in by_style:
            name = by_style[link]
            definition = definitions[name]
        levels = _levels(definition)
        overrides = {}
        for override in _children(number, "lvlOverride"):
            depth = int(override.get(f"{WORD}ilvl", "0"))
            replaced = _levels(override)
            levels |= replaced
            start = value(override, "startOverride")
            if start is not None:
                overrides[depth] = int(start)
            elif replaced:
                overrides |= {depth: level.start for depth, level in replaced.items()}
        lists[number.get(f"{WORD}numId", "")] = _List(name, levels, overrides)
    return lists


def _places_by_style(lists: dict[str, _List]) -> dict[str, _Place]:
    """The first list and level of each style of paragraphs that a level names."""
    places: dict[str, _Place] = {}
    for number, numbered in lists.items():
        for depth, level in numbered.levels.items():
            if level.style:
                places.setdefault(level.style, _Place(number, depth))
    return places


def _levels(definition: Element | None) -> _Levels:
    levels = {}
    for level in _children(definition, "lvl"):
        depth = int(level.get(f"{WORD}ilvl", "0"))
        if depth >= _MOST_LEVELS:
            continue
        restart = value(level, "lvlRestart")
        levels[depth] = _Level(
            start=int(value(level, "start") or "0"),
            format=_format(level),
            pattern=value(level, "lvlText") or "",
            restart=depth if restart is None else int(restart),
            is_legal=is_on(level.find(f"{WORD}isLgl")),
            style=value(level, "pStyle"),
        )
    return levels


def _format(level: Element) -> str:
    """Such as "upperRoman"; of a format of its own the sample, such as "001, 002, 003, ..."."""
    formats = list(level.iter(f"{WORD}numFmt"))
    if not formats:
        return "decimal"
    sample = formats[0].get(f"{WORD}format")
    return sample or formats[0].get(f"{WORD}val") or "decimal"
