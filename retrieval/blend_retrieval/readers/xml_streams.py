"""Elements of a long XML text, one after the other, without its tree.

A tree costs 10 to 30 times its text. Here it holds what one piece of the text says, and elements that have not ended yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import IO
from xml.etree import ElementTree as ET

from blend_retrieval.readers.base import UnreadableError
from blend_retrieval.readers.progress import report
from blend_retrieval.readers.xml_trees import MOST_LEVELS, TOO_DEEP

_PIECE = 1 << 16  # bytes
_MOST_BYTES = 64 << 20  # in which nothing ends that can be forgotten, such as a picture in a cell
_MOST_NODES = 1_000_000  # in these: elements and attributes, by a rough count

Path = tuple[ET.Element, ...]
"""The elements around an element, from the outermost on. They have attributes, but not all that stands in them."""


def streamed_elements(stream: IO[bytes], size: int, names: Collection[str]) -> Iterator[tuple[Path, ET.Element]]:
    """The elements of these local names where they end, each with the elements around it.

    An element inside of another one of these names belongs to that one, and is not listed. Nothing outside of them is kept.

    Args:
        stream: of the XML text.
        size: its bytes, for reports of how far the reader is.
        names: of elements, without their namespaces.

    Raises:
        ParseError: the text is no XML.
        UnreadableError: elements are nested too deeply, or one is too large.
    """
    builder = ET.TreeBuilder()
    top = builder.start("top", {})
    parser = ET.XMLParser(target=builder)
    tree = _Tree(top, names)
    done = 0
    try:
        while piece := stream.read(_PIECE):
            parser.feed(piece)
            yield from tree.ended()
            tree.check(piece)
            done += len(piece)
            report(done, size, "bytes")
        parser.close()
    except Exception:
        builder.start("end", {})  # stands in the innermost element that is open: what stands before it has ended
        yield from tree.ended()
        raise
    yield from tree.wanted((), top)


class _Tree:
    """The tree of what was parsed, from which all is taken that has ended."""

    def __init__(self, top: ET.Element, names: Collection[str]) -> None:
        self._top = top
        self._names = names
        self._wanted: dict[str, bool] = {}
        self._innermost = top
        self._bytes = 0
        self._nodes = 0

    def ended(self) -> Iterator[tuple[Path, ET.Element]]:
        """The elements that have ended since. The last one at each level may go on."""
        path: Path = ()
        element = self._top
        while len(element) and not self._is_wanted(element):
            if len(path) > MOST_LEVELS:
                raise UnreadableError(TOO_DEEP)
            path = (*path, element)
            for child in element[:-1]:
                yield from self.wanted(path, child)
            del element[:-1]
            element = element[0]
        if element is not self._innermost:
            self._innermost = element
            self._bytes = 0
            self._nodes = 0

    def check(self, piece: bytes) -> None:
        """Raise `UnreadableError` if nothing has ended for long. piece: of the text, read since."""
        self._bytes += len(piece)
        self._nodes += piece.count(b"<") + piece.count(b"=")
        if self._bytes > _MOST_BYTES or self._nodes > _MOST_NODES:
            raise UnreadableError("holds an element that is too large: divide it")

    def wanted(self, path: Path, element: ET.Element) -> Iterator[tuple[Path, ET.Element]]:
        """The elements of the names in an element that has ended, or this itself."""
        if self._is_wanted(element):
            yield path, element
            return
        inside = (*path, element)
        for child in element:
            yield from self.wanted(inside, child)

    def _is_wanted(self, element: ET.Element) -> bool:
        wanted = self._wanted.get(element.tag)
        if wanted is None:
            wanted = self._wanted[element.tag] = element.tag.rpartition("}")[2] in self._names
        return wanted
