"""Pages that draw too much, found in the bytes of a PDF before PDFium loads them.

PDFium draws a form again wherever it is named, and keeps every text in memory. Forms that name each other ten times, nine deep,
are 10^9 texts in a file of 2 KB. Here each page's texts are counted without drawing them.

Encrypted streams, and those of other filters than Flate, count as empty: only the limits of the process bound them.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import NamedTuple

MOST_DRAWN = 200_000
"""Texts and forms that a page may draw. Full pages of real documents draw up to 20,000."""
MOST_CONTENT = 32 << 20
"""Bytes of a page's content, unpacked. PDFium reads 20 MB of a stream."""
_TEXT_CHARACTERS = 5
_MOST_DEEP = 50  # forms in forms
_MOST_PAGES = 100_000
_PIECE = 1 << 20
_ENDLESS = 1 << 62

_OBJECT = re.compile(rb"(?<!\d)(\d{1,9})\s+\d{1,5}\s+obj\b")
_STREAM = re.compile(rb"\bstream\r?\n?")
_END = re.compile(rb"\bendobj\b|\bendstream\b")
_REFERENCE = rb"\s*(\d{1,9})\s+\d{1,5}\s+R\b"
_NAMED = re.compile(rb"/([^\s/<>\[\](){}%]+)" + _REFERENCE)
_DRAWN = re.compile(rb"/([^\s/<>\[\](){}%]+)\s+Do\b")
_TEXT = re.compile(rb"T[jJ]\b|[)>]\s*['\"]")
_STRING = re.compile(rb"\([^()]*|<[0-9a-fA-F\s]{2,}")
_CONTENTS = re.compile(rb"/Contents\s*(\[[^\]]*\]|\d{1,9}\s+\d{1,5}\s+R)")
_KIDS = re.compile(rb"/Kids\s*\[([^\]]*)\]")
_PAGE = re.compile(rb"/Type\s*/Page\b")
_ESCAPE = re.compile(rb"#([0-9a-fA-F]{2})")
_NUMBERS = re.compile(_REFERENCE)


class _Object(NamedTuple):
    """An object's dictionary, and where its stream lies in the file; (0, 0) without one."""

    body: bytes
    start: int = 0
    stop: int = 0

    @property
    def is_form(self) -> bool:
        return self.stop > 0 and b"/Image" not in self.body


class _Drawn(NamedTuple):
    """What a stream draws: texts, how often each form by its name, and the bytes of its content."""

    texts: int
    forms: dict[bytes, int]
    nbytes: int


class Bounded(NamedTuple):
    """A PDF without what draws too much. pages: the numbers, from 1, of those that lose their content.

    is_cut: whether anything is left out, also forms that only fields or notes show.
    """

    data: bytes
    pages: tuple[int, ...] = ()
    is_cut: bool = False


def bounded(data: bytes) -> Bounded:
    """The PDF without what draws more than `MOST_DRAWN` texts. Its bytes keep their places."""
    document = _Document(data)
    blanks = document.streams_beyond()
    if not blanks:
        return Bounded(data)
    without = bytearray(data)
    for stream in blanks:
        without[stream.start : stream.stop] = b" " * (stream.stop - stream.start)
    numbers = document.pages_with(blanks)
    return Bounded(bytes(without), numbers, is_cut=True)


class _Document:
    """The objects of a file. A number may have several, of which only PDFium knows which counts: the largest is taken."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._objects: dict[int, list[_Object]] = {}
        self._costs: dict[int, int] = {}
        self._drawn: dict[int, _Drawn] = {}
        for number, item in _objects(data):
            self._objects.setdefault(number, []).append(item)
        packed = [item for items in self._objects.values() for item in items if b"/ObjStm" in item.body]
        for item in packed:
            for number, body in _packed_objects(item.body, _unpacked(data, item)):
                self._objects.setdefault(number, []).append(_Object(body))

    def streams_beyond(self) -> list[_Object]:
        """The streams of forms and pages that draw too much."""
        beyond = {}
        for number, items in self._objects.items():
            for item in items:
                if item.is_form and self._cost(number, 0) > MOST_DRAWN:
                    beyond[item.start] = item
                if _PAGE.search(item.body) and self._page_cost(item) > MOST_DRAWN:
                    for content in self._contents(item):
                        beyond[content.start] = content
        return list(beyond.values())

    def pages_with(self, streams: list[_Object]) -> tuple[int, ...]:
        """The numbers of the pages that show one of these streams, also within forms."""
        starts = {stream.start for stream in streams}
        numbers = []
        for number, page in enumerate(self._pages(), 1):
            contents = self._contents(page)
            is_cut = any(content.start in starts for content in contents)
            if is_cut:
                numbers.append(number)
        return tuple(numbers)

    def _pages(self) -> Iterator[_Object]:
        """The pages in their order."""
        roots = [item for items in self._objects.values() for item in items if b"/Catalog" in item.body]
        tops = [int(number) for root in roots for name, number in _NAMED.findall(root.body) if name == b"Pages"]
        waiting = tops[-1:]
        entered: set[int] = set()
        count = 0
        while waiting and count < _MOST_PAGES:
            number = waiting.pop()
            for item in self._objects.get(number, [])[-1:]:
                kids = _KIDS.search(item.body)
                if kids is None:
                    count += 1
                    yield item
                elif number not in entered:
                    entered.add(number)
                    waiting += reversed([int(kid) for kid in _NUMBERS.findall(kids[1])])

    def _contents(self, page: _Object) -> list[_Object]:
        """The streams of a page's content."""
        streams: list[_Object] = []
        match = _CONTENTS.search(page.body)
        numbers = _NUMBERS.findall(match[1]) if match else []
        for number in map(int, numbers):
            for item in self._objects.get(number, []):
                if item.stop:
                    streams.append(item)
                else:  # a list of streams
                    within = map(int, _NUMBERS.findall(item.body))
                    streams += [stream for other in within for stream in self._objects.get(other, []) if stream.stop]
        return streams

    def _page_cost(self, page: _Object) -> int:
        """The texts and forms that a page draws."""
        contents = {content.start: content for content in self._contents(page)}
        drawn = [self._drawn_by(content) for content in contents.values()]
        if sum(part.nbytes for part in drawn) > MOST_CONTENT:
            return _ENDLESS
        forms = self._forms_of(page)
        return sum(self._cost_of(part, forms, 0) for part in drawn)

    def _cost(self, number: int, depth: int) -> int:
        """The texts and forms that a form draws; one that draws itself has no end."""
        if number not in self._costs:
            self._costs[number] = _ENDLESS  # while it is counted
            if depth < _MOST_DEEP:
                forms = [item for item in self._objects.get(number, []) if item.is_form]
                costs = [self._cost_of(self._drawn_by(form), self._forms_of(form), depth) for form in forms]
                self._costs[number] = max(costs, default=0)
        return self._costs[number]

    def _cost_of(self, drawn: _Drawn, forms: dict[bytes, set[int]], depth: int) -> int:
        cost = drawn.texts
        for name, times in drawn.forms.items():
            inner = [self._cost(number, depth + 1) for number in forms.get(name, ())]
            cost += times * (1 + max(inner, default=0))
        return cost

    def _forms_of(self, item: _Object) -> dict[bytes, set[int]]:
        """The objects that the resources of a page or form name, those of the page tree above included."""
        forms: dict[bytes, set[int]] = {}
        waiting = [item.body]
        entered: set[int] = set()
        while waiting:
            body = waiting.pop()
            for name, digits in _NAMED.findall(body):
                number = int(digits)
                if name in (b"Resources", b"XObject", b"Parent"):
                    if number not in entered:
                        entered.add(number)
                        waiting += [other.body for other in self._objects.get(number, [])]
                elif name not in (b"Contents", b"Length"):
                    forms.setdefault(_plain(name), set()).add(number)
        return forms

    def _drawn_by(self, stream: _Object) -> _Drawn:
        if stream.start not in self._drawn:
            self._drawn[stream.start] = _drawn(self._data, stream)
        return self._drawn[stream.start]


def _objects(data: bytes) -> Iterator[tuple[int, _Object]]:
    """The objects of a file with their numbers."""
    place = 0
    while head := _OBJECT.search(data, place):
        end = _END.search(data, head.end())
        stop = end.start() if end else len(data)
        stream = _STREAM.search(data, head.end(), stop)
        if stream:
            yield int(head[1]), _Object(data[head.end() : stream.start()], stream.end(), stop)
        else:
            yield int(head[1]), _Object(data[head.end() : stop])
        place = max(stop, head.end())


def _packed_objects(body: bytes, content: bytes) -> Iterator[tuple[int, bytes]]:
    """The objects of an object stream."""
    first = re.search(rb"/First\s+(\d{1,9})", body)
    if not first:
        return
    start = int(first[1])
    numbers = [int(digits) for digits in re.findall(rb"\d{1,9}", content[:start])]
    places = [start + place for place in numbers[1::2]]
    for number, place, stop in zip(numbers[::2], places, [*places[1:], len(content)], strict=False):
        yield number, content[place:stop]


def _unpacked(data: bytes, stream: _Object) -> bytes:
    return b"".join(_pieces(data, stream))


def _pieces(data: bytes, stream: _Object) -> Iterator[bytes]:
    """The content of a stream in pieces, of the most that a page may have and one more."""
    content = memoryview(data)[stream.start : stream.stop]
    if b"/F" not in stream.body or b"Decode" not in stream.body:
        yield bytes(content[: MOST_CONTENT + 1])
        return
    unpacker = zlib.decompressobj()
    rest: bytes | memoryview = content
    nbytes = 0
    while len(rest) and not unpacker.eof and nbytes <= MOST_CONTENT:
        try:
            piece = unpacker.decompress(rest, _PIECE)
        except zlib.error:
            return
        rest = unpacker.unconsumed_tail
        nbytes += len(piece)
        yield piece


def _drawn(data: bytes, stream: _Object) -> _Drawn:
    """What a stream draws. Long strings count as several texts."""
    content = _unpacked(data, stream)
    texts = sum(1 for _ in _TEXT.finditer(content))
    characters = sum(match.end() - match.start() for match in _STRING.finditer(content))
    forms: dict[bytes, int] = {}
    for match in _DRAWN.finditer(content):
        name = _plain(match[1])
        forms[name] = forms.get(name, 0) + 1
    return _Drawn(texts + characters // _TEXT_CHARACTERS, forms, len(content))


def _plain(name: bytes) -> bytes:
    """A name without escapes."""
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), name)
