"""Bounds of a page in HTML, checked before its tree is built.

A tree costs up to a hundred times its text, and the parser looks through all open elements, and all attributes of an element,
again and again.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from blend_retrieval.readers.base import UnreadableError
from blend_retrieval.readers.xml_trees import TOO_DEEP

if TYPE_CHECKING:
    from selectolax.lexbor import LexborHTMLParser

MOST_ELEMENTS = 1_000_000
MOST_CHARACTERS = 64 << 20  # of text and markup
_MOST_ATTRIBUTES = 4000  # of an element
_MOST_LEVELS = 1000
_MOST_OPEN = 5000  # elements without an end tag, by a rough count
_VALUE = r"""(?:"[^"]*+"|'[^']*+'|[^\s>"'][^\s>]*+)"""
_ATTRIBUTE = rf"[^\s/>][^\s/>=]*+(?:\s*+=\s*+{_VALUE})?+"
_COUNTED = re.compile(_ATTRIBUTE)
_TAG = re.compile(
    r"<!--.*?(?:-->|\Z)"
    r"|<(?:script|style)\b.*?(?:</(?:script|style)|\Z)"
    r"|</(?P<ended>[a-z][^\s/>]*+)"
    rf"|<(?P<name>[a-z][^\s/>]*+)(?P<attributes>(?:[\s/]++{_ATTRIBUTE})*+)\s*+(?P<slash>/?)",
    re.DOTALL | re.IGNORECASE,
)
_SHORTEST = 2 * _MOST_ATTRIBUTES  # characters of that many attributes
# Elements that end by themselves, so that pages leave out their end tags.
_ENDLESS_NAMES = (
    "a area base body br button col colgroup dd dt embed head hr html img input li link meta nobr optgroup option p param "
    "rp rt source tbody td tfoot th thead tr track wbr"
)
_ENDLESS = frozenset(_ENDLESS_NAMES.split())
_FOREIGN = ("svg", "math")  # in which a slash ends an element
_NOT_FOREIGN_NAMES = (  # elements that end a drawing or a formula
    "b big blockquote body br center code dd div dl dt em embed h1 h2 h3 h4 h5 h6 head hr i img li listing menu meta nobr ol "
    "p pre ruby s small span strong strike sub sup table tt u ul var"
)
_NOT_FOREIGN = frozenset(_NOT_FOREIGN_NAMES.split())
_FORMATTING_NAMES = "a b big code em font i nobr s small strike strong tt u"
_FORMATTING = frozenset(_FORMATTING_NAMES.split())
_CELLS = ("td", "th", "caption")
_PARTS_OF_TABLES = (*_CELLS, "tr", "tbody", "thead", "tfoot")
_MOST_EQUAL = 3  # formatting elements that the parser opens again, by the HTML standard
_MOST_REOPENED = 3_000_000


def check_size(html: str) -> None:
    """Raise `UnreadableError` if the tree of a page would be too large or too deep."""
    if len(html) > MOST_CHARACTERS:
        raise UnreadableError(f"holds more than {MOST_CHARACTERS:,} characters: divide it")
    if html.count("<") - html.count("</") > MOST_ELEMENTS:
        raise UnreadableError(f"holds more than {MOST_ELEMENTS:,} elements: divide it")
    is_small = len(html) < _SHORTEST
    if is_small:
        return
    elements = _OpenElements()
    formatting = _Formatting()
    for tag in _TAG.finditer(html):
        attributes = tag["attributes"] or ""
        if len(attributes) > _SHORTEST and len(_COUNTED.findall(attributes)) > _MOST_ATTRIBUTES:
            raise UnreadableError(f"has an element with more than {_MOST_ATTRIBUTES:,} attributes")
        if tag["ended"]:
            name = tag["ended"].lower()
            elements.end(name)
            formatting.end(name)
        elif tag["name"]:
            name = tag["name"].lower()
            elements.start(name, has_slash=tag["slash"] == "/")
            formatting.start(name, attributes)


class _OpenElements:
    """The elements that are open at a place of a page, roughly as the parser sees them."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._counts: Counter[str] = Counter()

    def start(self, name: str, *, has_slash: bool) -> None:
        """Open an element. Raises `UnreadableError` if too many are open."""
        if name in _NOT_FOREIGN:
            for foreign in _FOREIGN:
                self.end(foreign)
        if name in _PARTS_OF_TABLES and self._counts["table"]:
            while self._names[-1] != "table":
                self._pop()
        is_foreign = any(self._counts[foreign] for foreign in _FOREIGN)
        if name in _ENDLESS or (has_slash and (is_foreign or name in _FOREIGN)):
            return
        self._names.append(name)
        self._counts[name] += 1
        if len(self._names) > _MOST_OPEN:
            raise UnreadableError(TOO_DEEP)

    def end(self, name: str) -> None:
        """End the last element of a name, and all in it."""
        while self._counts[name]:
            if self._pop() == name:
                return

    def _pop(self) -> str:
        last = self._names.pop()
        self._counts[last] -= 1
        return last


class _Formatting:
    """The formatting elements without an end tag. The parser opens all of them again in each block that follows.

    A cell of a table hides those outside of it, and ends its own.
    """

    def __init__(self) -> None:
        self._open: list[tuple[str, str]] = []
        self._cells: list[int | None] = []  # of each open table: where its cell's elements begin
        self._reopened = 0

    def start(self, name: str, attributes: str) -> None:
        """Open an element. Raises `UnreadableError` if too many would be opened again."""
        if name in _FORMATTING:
            visible = self._open[self._first() :]
            if visible.count((name, attributes)) < _MOST_EQUAL:
                self._open.append((name, attributes))
            return
        if name == "table":
            self._cells.append(None)
        elif name in _CELLS and self._cells:
            self._end_cell()
            self._cells[-1] = len(self._open)
        self._reopen()

    def end(self, name: str) -> None:
        """End the last formatting element of a name, or a block."""
        if name not in _FORMATTING:
            if name == "table" and self._cells:
                self._end_cell()
                self._cells.pop()
            self._reopen()
            return
        for place in range(len(self._open) - 1, self._first() - 1, -1):
            if self._open[place][0] == name:
                del self._open[place]
                return

    def _first(self) -> int:
        """The place of the first element that the innermost cell shows."""
        return next((cell for cell in reversed(self._cells) if cell is not None), 0)

    def _end_cell(self) -> None:
        if self._cells[-1] is not None:
            del self._open[self._cells[-1] :]

    def _reopen(self) -> None:
        visible = len(self._open) - self._first()
        self._reopened += visible
        if self._reopened > _MOST_REOPENED or visible > _MOST_LEVELS:
            raise UnreadableError("leaves too many elements without their end tags")


def check_depth(tree: LexborHTMLParser) -> None:
    """Raise `UnreadableError` if elements are nested too deeply. The walk goes down and back up, without recursion."""
    node = tree.root
    depth = 0
    while node is not None:
        below = node.first_child
        if below is not None:
            depth += 1
            if depth > _MOST_LEVELS:
                raise UnreadableError(TOO_DEEP)
            node = below
            continue
        while node is not None and node.next is None:
            node = node.parent
            depth -= 1
            if depth <= 0:
                return
        node = None if node is None else node.next
