"""The look of text in Word files that changes what it says: raised, lowered, struck through, hidden."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from xml.etree.ElementTree import Element, SubElement

from blend_retrieval.readers.office.docx_numbers import MOST_ANCESTORS, WORD, is_on, value

_SCRIPTS = ("superscript", "subscript")


class Look(NamedTuple):
    """How a run looks. script: "superscript", "subscript" or "baseline"."""

    script: str
    is_struck: bool
    is_hidden: bool

    @property
    def marks(self) -> str:
        """The signs of Markdown before the run's words; behind them they stand in reverse order."""
        script = {"superscript": "^", "subscript": "~"}.get(self.script, "")
        return script + ("~~" if self.is_struck else "")

    def write_to(self, run: Element) -> None:
        """Say in the run's own properties how it looks, for a reader that knows no styles of runs."""
        properties = run.find(f"{WORD}rPr")
        if properties is None:
            properties = Element(f"{WORD}rPr")
            run.insert(0, properties)
        for name in ("vertAlign", "strike"):
            for element in properties.findall(WORD + name):
                properties.remove(element)
        if self.script in _SCRIPTS:
            SubElement(properties, f"{WORD}vertAlign", {f"{WORD}val": self.script})
        if self.is_struck:
            SubElement(properties, f"{WORD}strike")


class RunLooks:
    """Finds the looks of runs by their properties and styles."""

    def __init__(self, styles: Element | None) -> None:
        every = () if styles is None else styles.iterfind(f"{WORD}style")
        self._styles = {style.get(f"{WORD}styleId", ""): style for style in every}

    def of(self, run: Element, paragraph_style: str | None = None) -> Look:
        """The look of a run: by its own properties, then by its style, then by its paragraph's."""
        direct = run.find(f"{WORD}rPr")
        properties = [] if direct is None else [direct]
        properties += self._of_style(value(direct, "rStyle"))
        properties += self._of_style(paragraph_style)

        def is_set(name: str) -> bool:
            switches = (element.find(WORD + name) for element in properties)
            return is_on(next((switch for switch in switches if switch is not None), None))

        is_struck = is_set("strike") or is_set("dstrike")
        return Look(_script(properties), is_struck, is_set("vanish"))

    def _of_style(self, name: str | None) -> Iterator[Element]:
        passed: set[str] = set()
        while name in self._styles and name not in passed and len(passed) < MOST_ANCESTORS:
            passed.add(name)
            style = self._styles[name]
            properties = style.find(f"{WORD}rPr")
            if properties is not None:
                yield properties
            name = value(style, "basedOn")


def _script(properties: list[Element]) -> str:
    """Raised or lowered by its kind, or by a number of half points, for which no kind is needed."""
    for element in properties:
        kind = value(element, "vertAlign")
        if kind is not None:
            return kind
        rise = value(element, "position") or "0"
        if rise.lstrip("-").isdigit() and int(rise):
            return "subscript" if rise.startswith("-") else "superscript"
    return "baseline"
