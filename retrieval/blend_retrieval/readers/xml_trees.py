"""XML trees within bounds.

A tree costs 10 to 30 times its text. So the text is scanned first, which keeps nothing, and is refused if the tree would have
too many elements, would be too deep, or would hold too much text.
"""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree import ElementTree as ET
from xml.parsers import expat

from blend_retrieval.readers.base import UnreadableError

MOST_NODES = 2_000_000  # elements and attributes of a part
MOST_CHARACTERS = 32 << 20  # of text in a part
MOST_LEVELS = 1000
TOO_DEEP = "cannot be read whole: its elements are nested too deeply"
_PIECE = 1 << 20


class _Bounds:
    """Counts what a tree would hold, as a parser comes by it."""

    def __init__(self, most_nodes: int) -> None:
        self._most_nodes = most_nodes
        self._nodes = 0
        self._levels = 0
        self._characters = 0

    def start(self, name: str, attributes: Mapping[str, str]) -> None:
        self._nodes += 1 + len(attributes)
        self._levels += 1
        if self._nodes > self._most_nodes:
            raise UnreadableError(f"holds more than {self._most_nodes:,} elements: divide it")
        if self._levels > MOST_LEVELS:
            raise UnreadableError(TOO_DEEP)

    def end(self, name: str) -> None:
        self._levels -= 1

    def text(self, text: str) -> None:
        self._characters += len(text)
        if self._characters > MOST_CHARACTERS:
            raise UnreadableError(f"holds more than {MOST_CHARACTERS:,} characters of text: divide it")


def check_xml(data: bytes, most_nodes: int = MOST_NODES) -> None:
    """Raise `UnreadableError` if the tree of an XML text would be too large. Mistakes in the XML are the parser's to find."""
    bounds = _Bounds(most_nodes)
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler = bounds.start
    parser.EndElementHandler = bounds.end
    parser.CharacterDataHandler = bounds.text
    try:
        for place in range(0, len(data), _PIECE):
            parser.Parse(data[place : place + _PIECE])
    except expat.ExpatError:
        return


def xml_root(data: bytes, most_nodes: int = MOST_NODES) -> ET.Element:
    """The root of an XML text. Raises `UnreadableError` if its tree would be too large, and `ParseError` if it is no XML."""
    check_xml(data, most_nodes)
    return ET.fromstring(data)
