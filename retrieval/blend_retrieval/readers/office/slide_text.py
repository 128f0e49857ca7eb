"""The text of slides' boxes and cells in Markdown: raised, lowered and struck-through text, formulas and numbers of lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from blend_retrieval.readers.numerals import numeral
from blend_retrieval.readers.office.docx_formulas import MATH, linear
from blend_retrieval.readers.office.text_marks import Stretch, marked

_MAIN = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_PRESENTATION = "{http://schemas.openxmlformats.org/presentationml/2006/main}"
_CHOICE = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Choice"
_BULLETS = ("buNone", "buAutoNum", "buChar", "buBlip")
_KINDS = {
    "alphaLc": "lowerLetter",
    "alphaUc": "upperLetter",
    "arabic": "decimal",
    "arabicDb": "decimalFullWidth",
    "arabic1": "arabicAlpha",
    "arabic2": "arabicAbjad",
    "circleNumDb": "decimalEnclosedCircle",
    "circleNumWdBlack": "decimalEnclosedCircle",
    "circleNumWdWhite": "decimalEnclosedCircle",
    "ea1Chs": "chineseCounting",
    "ea1Cht": "taiwaneseCounting",
    "ea1JpnChsDb": "japaneseCounting",
    "ea1JpnKor": "japaneseCounting",
    "hebrew2": "hebrew2",
    "hindiNum": "hindiNumbers",
    "romanLc": "lowerRoman",
    "romanUc": "upperRoman",
    "thaiNum": "thaiNumbers",
}
_FORMS = {"ParenBoth": "({})", "ParenR": "{})", "Period": "{}.", "Minus": "{}-", "Plain": "{}"}
_LIST_STYLES = {
    "title": "titleStyle",
    "ctrTitle": "titleStyle",
    "dt": "otherStyle",
    "ftr": "otherStyle",
    "sldNum": "otherStyle",
}


class _List(NamedTuple):
    """How a level is numbered, and the last number on it."""

    kind: str
    start: int
    number: int


class SlideText:
    """Reads boxes and cells of slides. unknown_kinds: the types of numbers that are read as decimal ones."""

    def __init__(self, default_styles: Any) -> None:
        self._default_styles = default_styles
        self.unknown_kinds: dict[str, None] = {}

    def lines(self, body: Any, styles: Iterable[Any] = ()) -> list[str]:
        """The paragraphs of a text body that are not blank. styles: the list styles that it inherits, the nearest first."""
        nearest = (body.find(f"{_MAIN}lstStyle"), *styles, self._default_styles)
        list_styles = [style for style in nearest if style is not None]
        lists: dict[int, _List] = {}
        lines = []
        for paragraph in body.iterfind(f"{_MAIN}p"):
            level = _level(paragraph)
            properties = list(_properties(paragraph, level, list_styles))
            text = marked(_stretches(paragraph, properties)).strip()
            bullet = _bullet(properties)
            is_numbered = bullet is not None and bullet.tag == f"{_MAIN}buAutoNum"
            if not is_numbered:
                _end_lists(lists, level)
            elif text:
                text = f"{self._number(lists, level, bullet)} {text}"
            lines.append(text)
        return [line for line in lines if line]

    def _number(self, lists: dict[int, _List], level: int, bullet: Any) -> str:
        last = lists.get(level)
        kind = bullet.get("type", "arabicPeriod")
        start = int(bullet.get("startAt", "1"))
        goes_on = last is not None and (last.kind, last.start) == (kind, start)
        count = last.number + 1 if last is not None and goes_on else start
        _end_lists(lists, level)
        lists[level] = _List(kind, start, count)
        return self._written(kind, count)

    def _written(self, kind: str, count: int) -> str:
        ending = next((ending for ending in _FORMS if kind.endswith(ending)), "")
        digits = kind.removesuffix(ending)
        form = _FORMS.get(ending, "{}.")
        text = numeral(count, _KINDS[digits]) if digits in _KINDS else None
        if text is None:
            self.unknown_kinds[kind] = None
        return form.format(text or count)


def placeholder_styles(shape: Any, slide: Any) -> Iterator[Any]:
    """The list styles that a placeholder inherits: those of its layout, then those of the master for its kind."""
    if not shape.is_placeholder:
        return
    number = shape.placeholder_format.idx
    for base in slide.slide_layout.placeholders:
        style = base.element.find(f"{_PRESENTATION}txBody/{_MAIN}lstStyle")
        if base.placeholder_format.idx == number and style is not None:
            yield style
    texts = slide.slide_layout.slide_master.element.find(f"{_PRESENTATION}txStyles")
    holder = shape.element.find(f".//{_PRESENTATION}ph")
    kind = "" if holder is None else holder.get("type", "")
    style = None if texts is None else texts.find(_PRESENTATION + _LIST_STYLES.get(kind, "bodyStyle"))
    if style is not None:
        yield style


def _end_lists(lists: dict[int, _List], level: int) -> None:
    """End the lists of this level and of those inside it."""
    for depth in [depth for depth in lists if depth >= level]:
        del lists[depth]


def _level(paragraph: Any) -> int:
    properties = paragraph.find(f"{_MAIN}pPr")
    return 0 if properties is None else int(properties.get("lvl", "0"))


def _properties(paragraph: Any, level: int, styles: Sequence[Any]) -> Iterator[Any]:
    """The properties of a paragraph: its own, then those of its level in each style."""
    places = [(paragraph, "pPr"), *((style, f"lvl{level + 1}pPr") for style in styles)]
    for element, name in places:
        properties = element.find(_MAIN + name)
        if properties is not None:
            yield properties


def _bullet(properties: Iterable[Any]) -> Any | None:
    for element in properties:
        for name in _BULLETS:
            bullet = element.find(_MAIN + name)
            if bullet is not None:
                return bullet
    return None


def _stretches(paragraph: Any, properties: Sequence[Any]) -> Iterator[Stretch]:
    defaults = [element.find(f"{_MAIN}defRPr") for element in properties if not element.tag.endswith("}pPr")]
    for child in paragraph:
        tag = child.tag if isinstance(child.tag, str) else ""
        if tag in (f"{_MAIN}r", f"{_MAIN}fld"):
            text = child.findtext(f"{_MAIN}t") or ""
            yield Stretch(text, _mark([child.find(f"{_MAIN}rPr"), *defaults]))
        elif tag == f"{_MAIN}br":
            yield Stretch("\n", "")
        elif not tag.endswith("Pr"):
            choice = child.find(_CHOICE)
            shown = child if choice is None else choice
            for formula in shown.iter(f"{MATH}oMath"):
                yield Stretch(linear(formula).strip(), "")


def _mark(properties: Iterable[Any]) -> str:
    """The sign around text that is raised, lowered or struck through; the nearest properties that say it count."""
    elements = [element for element in properties if element is not None]
    baseline = next((element.get("baseline") for element in elements if element.get("baseline")), "0")
    strike = next((element.get("strike") for element in elements if element.get("strike")), "noStrike")
    rise = float(baseline.rstrip("%"))
    script = "^" if rise > 0 else "~" if rise < 0 else ""
    return script + ("" if strike == "noStrike" else "~~")
