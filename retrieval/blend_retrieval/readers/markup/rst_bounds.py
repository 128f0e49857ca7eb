"""Bounds of docutils' work. What goes beyond them comes as it stands in the file, with a note."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from blend_retrieval.readers.base import Fault

_MOST_SEARCHED = 1_000_000  # characters of a paragraph that are searched for the ends of marks, in vain
_MOST_STEPS = 50  # along the borders of a grid table, for each of its characters
_MOST_COLUMNS_WIDTH = 100_000  # columns of a grid table times characters of a line
_MOST_SUBSTITUTED = 5_000_000  # characters and references
_MOST_DANGLING = 3000  # references of a paragraph
_MOST_MESSAGES = 5000
_END_PATTERNS = ("emphasis", "strong", "interpreted_or_phrase_ref", "literal", "target", "substitution_ref")
_OPEN_MARKS = "has a paragraph with too many marks that do not end, and is taken as it stands"


class BeyondBoundsError(Exception):
    """A document that docutils would work on for too long. The text says what it has too many of."""


class _OpenMarksError(Exception):
    """A paragraph with too many marks that do not end."""


class _EndPattern:
    """A pattern of the ends of marks, which counts the characters that were searched in vain."""

    def __init__(self, pattern: re.Pattern[str], searched: list[int]) -> None:
        self._pattern = pattern
        self._searched = searched

    def search(self, text: str) -> re.Match[str] | None:
        end = self._pattern.search(text)
        if end is None:
            self._searched[0] += len(text)
            if self._searched[0] > _MOST_SEARCHED:
                raise _OpenMarksError
        return end


def bounded_parser() -> Any:
    """The parser of docutils, which takes a paragraph as plain text where too many of its marks do not end."""
    from docutils import nodes, utils
    from docutils.parsers.rst import Parser, states

    from blend_retrieval.readers.markup.rst_directives import unread_places

    inliner = states.Inliner()  # no class below it, because docutils builds its patterns of this class's attributes
    customize = inliner.init_customizations
    parse = inliner.parse
    searched = [0]

    def customize_bounded(settings: Any) -> None:
        customize(settings)
        for name in _END_PATTERNS:
            pattern = getattr(inliner.patterns, name)
            setattr(inliner.patterns, name, _EndPattern(pattern, searched))

    def parse_bounded(text: str, lineno: int, memo: Any, parent: Any) -> Any:
        searched[0] = 0
        try:
            return parse(text, lineno, memo, parent)
        except _OpenMarksError:
            unread_places(memo.document).append(Fault(f"line {lineno}", _OPEN_MARKS, 0))
            return [nodes.Text(utils.unescape(utils.escape2null(text), restore_backslashes=True))], []

    inliner.init_customizations = customize_bounded
    inliner.parse = parse_bounded
    return Parser(inliner=inliner)


@contextmanager
def bounded_tables() -> Iterator[None]:
    """Make docutils leave grid tables of too many columns, or with tangled borders, as they stand."""
    from docutils.parsers.rst import tableparser

    parser = tableparser.GridTableParser

    class BoundedGridParser(parser):  # type: ignore[misc, valid-type]  # docutils publishes no types
        def setup(self, block: Any) -> None:
            super().setup(block)
            width = len(block[0])
            columns = max(line.count("+") + line.count("|") for line in block)
            self.steps_left = _MOST_STEPS * width * len(block)
            if columns * width > _MOST_COLUMNS_WIDTH:
                raise tableparser.TableMarkupError("Too many columns.")

        def scan_down(self, top: int, left: int, right: int) -> Any:
            return _scan_down(self, top, left, right)

        def scan_left(self, top: int, left: int, bottom: int, right: int) -> Any:
            self.take_steps(right - left)
            return super().scan_left(top, left, bottom, right)

        def scan_up(self, top: int, left: int, bottom: int, right: int) -> Any:
            self.take_steps(bottom - top)
            return super().scan_up(top, left, bottom, right)

        def take_steps(self, count: int) -> None:
            self.steps_left -= count
            if self.steps_left < 0:
                raise tableparser.TableMarkupError("Tangled borders.")

    tableparser.GridTableParser = BoundedGridParser
    try:
        yield
    finally:
        tableparser.GridTableParser = parser


def _scan_down(parser: Any, top: int, left: int, right: int) -> Any:
    """As docutils' `scan_down`, which looks for the lower right corner of a cell, but each line is a step."""
    from docutils.parsers.rst.tableparser import update_dict_of_lists

    borders: dict[int, list[int]] = {}
    for row in range(top + 1, parser.bottom + 1):
        parser.take_steps(1)
        sign = parser.stripped_block[row][right]
        if sign not in "+|":
            return None
        if sign == "|":
            continue
        borders[row] = [right]
        corner = parser.scan_left(top, left, row, right)
        if corner:
            rows, columns = corner
            update_dict_of_lists(borders, rows)
            return row, borders, columns
    return None


def check_tree(document: Any) -> None:
    """Raise BeyondBoundsError for a tree whose references docutils has not replaced yet."""
    from docutils import nodes

    dangling: Counter[int] = Counter()
    for reference in document.findall(nodes.reference):
        is_dangling = "anonymous" in reference or reference.get("refname", "") not in document.nameids
        has_address = "refuri" in reference
        if is_dangling and not has_address:
            dangling[id(reference.parent)] += 1
    messages = sum(1 for _ in document.findall(nodes.system_message))
    if _substituted(document) > _MOST_SUBSTITUTED:
        raise BeyondBoundsError("its substitutions repeat themselves too often")
    if max(dangling.values(), default=0) > _MOST_DANGLING:
        raise BeyondBoundsError("a paragraph has too many references to nothing")
    if messages > _MOST_MESSAGES:
        raise BeyondBoundsError("docutils finds too many mistakes in it")


def _substituted(document: Any) -> int:
    """The characters and references that come in the place of all references to substitutions."""
    from docutils import nodes

    definitions = document.substitution_defs
    names = document.substitution_names
    sizes: dict[str, int] = {}

    def size(name: str) -> int:
        key = name if name in definitions else names.get(name.lower())
        if key is None:
            return 0
        if key not in sizes:
            sizes[key] = 0  # for a substitution that refers to itself, which docutils refuses
            definition = definitions[key]
            sizes[key] = 1 + len(definition.astext()) + references(definition)
        return sizes[key]

    def references(tree: Any) -> int:
        return sum(size(reference["refname"]) for reference in tree.findall(nodes.substitution_reference))

    return references(document)
