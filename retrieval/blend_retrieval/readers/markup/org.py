"""Org files as Markdown: headlines, blocks, tables, links and figures of speech."""

from __future__ import annotations

import re
from collections.abc import Iterator

from blend_retrieval.decoding import decode
from blend_retrieval.document import clean
from blend_retrieval.readers.base import Fault, Part, Parts, notes
from blend_retrieval.readers.tables import markdown_table

_HEADLINE = re.compile(r"(\*+)[ \t]+(.*?)[ \t]*$")
_KEYWORD = re.compile(r"[ \t]*#\+(\w[\w-]*)(?:\[[^\]]*\])?:[ \t]*(.*)$")
_BEGIN = re.compile(r"[ \t]*#\+begin_(\w+)[ \t]*(.*)$", re.IGNORECASE)
_TABLE = re.compile(r"[ \t]*\|")
_RULER = re.compile(r"[ \t]*\|[-+]+\|?[ \t]*$")
_COLUMN_MARKS = re.compile(r"(?:<[lcr]?\d*>)?")
_CELL_END = re.compile(r"(?<!\\)\|")
_FIXED = re.compile(r"[ \t]*: ?(.*)$")
_COMMENT = re.compile(r"[ \t]*#(?: |$)")
_DRAWER = re.compile(r"[ \t]*:(PROPERTIES|LOGBOOK|CLOCK):[ \t]*$", re.IGNORECASE)
_DRAWER_END = re.compile(r"[ \t]*:END:[ \t]*$", re.IGNORECASE)
_LINK = re.compile(r"\[\[([^][]+)\](?:\[([^][]+)\])?\]")
_PICTURE = re.compile(r"(?:file:|\./|\.\./|/)?[^\s]+\.(?:png|jpe?g|gif|svg|webp|tiff?)$", re.IGNORECASE)
_EMPHASIS = re.compile(r"(?<![\w*/=~+])([*/=~+])(?=\S)((?:(?!\1).)*?\S)\1(?![\w*/=~+])")
_MARKS = {  # of emphasis, and those of Markdown
    "*": "**",
    "/": "*",
    "=": "`",
    "~": "`",
    "+": "~~",
    "_": "",
}
_CODE_BLOCKS = ("src", "example", "export")
_SHOWN_KEYWORDS = ("caption", "author", "date", "subtitle", "description", "email")
_MACRO = re.compile(r"\{\{\{(\w[\w-]*)(?:\((.*?)\))?\}\}\}")
_ESCAPED = re.compile(r"^([ \t]*),(?=[*,#])")
_LONG_FENCE = "`" * 8
_HEADING_LEVELS = 6
_MOST_FILLED = 2_000_000  # characters that stand in the place of macros
_MOST_ARGUMENTS = 100
_DRAWER_NAME = ":end:"
_BLOCK_END = re.compile(r"[ \t]*#\+end_(\w+)[ \t]*$", re.IGNORECASE)


def read_org(data: bytes, title: str) -> Parts:
    """Read one document under its `#+TITLE`. Drawers and comments are left out; included files are faults."""
    decoded, note = decode(data)
    reader = _Reader()
    lines = clean(decoded).split("\n")
    text = "\n".join(reader.lines(lines))
    document = Part("", reader.title or title, text, "markdown")
    return [document, *notes(note), *reader.faults]


class _Reader:
    """Converts lines. macros: the replacements that the file defines."""

    def __init__(self) -> None:
        self.title = ""
        self.faults: list[Fault] = []
        self._macros: dict[str, str] = {}
        self._filled_left = _MOST_FILLED

    def lines(self, lines: list[str]) -> Iterator[str]:
        place = 0
        last_ends = _last_ends(lines)
        while place < len(lines):
            line = lines[place]
            begin = _BEGIN.match(line)
            drawer = _DRAWER.match(line)
            ending = _end_of(begin[1]) if begin else _DRAWER_END
            name = begin[1].lower() if begin else _DRAWER_NAME
            has_end = bool(begin or drawer) and last_ends.get(name, 0) > place
            stop = _until(lines, place, ending) if has_end else len(lines)
            if stop == len(lines):
                stop = self._last_of_group(lines, place)
                yield from self._group(lines[place : stop + 1])
            elif begin:
                inside = lines[place + 1 : stop]
                yield from self._block(name, begin[2], inside)
            else:
                self._note("its drawers (properties, logs) are not read")
            place = stop + 1

    def _last_of_group(self, lines: list[str], place: int) -> int:
        """The last line of a table or of fixed text; this line, if it is neither."""
        for pattern in (_TABLE, _FIXED):
            if pattern.match(lines[place]):
                return _while(lines, place, pattern) - 1
        return place

    def _group(self, lines: list[str]) -> Iterator[str]:
        if _TABLE.match(lines[0]):
            yield from self._table(lines)
        elif _FIXED.match(lines[0]):
            yield "```"
            for line in lines:
                yield _FIXED.sub(r"\1", line)
            yield "```"
        else:
            yield from self._line(lines[0])

    def _line(self, line: str) -> Iterator[str]:
        headline = _HEADLINE.match(line)
        keyword = _KEYWORD.match(line)
        if headline:
            level = min(len(headline[1]), _HEADING_LEVELS)
            yield f"{'#' * level} {self._inline(headline[2])}"
        elif keyword:
            name = keyword[1].lower()
            yield from self._keyword(name, keyword[2].strip())
        elif _COMMENT.match(line):
            self._note("its comments are not read")
        else:
            yield self._inline(line)

    def _keyword(self, name: str, value: str) -> Iterator[str]:
        if name == "title":
            self.title = f"{self.title} {self._inline(value)}".strip()
        elif name == "macro":
            macro, _, text = value.partition(" ")
            self._macros[macro] = text.strip()
        elif name == "include":
            self.faults.append(Fault(f"included file {value}", "is not read"))
        elif name in _SHOWN_KEYWORDS and value:
            yield self._inline(value if name == "caption" else f"{name.capitalize()}: {value}")

    def _block(self, name: str, argument: str, lines: list[str]) -> Iterator[str]:
        if name == "comment":
            self._note("its comments are not read")
        elif name in _CODE_BLOCKS:
            language = argument.split(" ")[0] if name == "src" else ""
            has_fence = any("```" in line for line in lines)
            fence = _LONG_FENCE if has_fence else "```"
            yield f"{fence}{language}"
            for line in lines:
                yield _ESCAPED.sub(r"\1", line)
            yield fence
        else:
            sign = "> " if name == "quote" else ""
            yield from (f"{sign}{line}" for line in self.lines(lines))

    def _table(self, lines: list[str]) -> Iterator[str]:
        rows = []
        for line in lines:
            if _RULER.match(line):
                continue
            cells = _CELL_END.split(line.strip().strip("|"))
            if all(_COLUMN_MARKS.fullmatch(cell.strip()) for cell in cells):
                continue
            rows.append([self._inline(cell.strip()) for cell in cells])
        yield ""
        yield markdown_table(rows)
        yield ""

    def _inline(self, text: str) -> str:
        replaced = _MACRO.sub(self._macro, text)
        linked = _LINK.sub(self._link, replaced)
        return _EMPHASIS.sub(_emphasized, linked)

    def _macro(self, match: re.Match[str]) -> str:
        text = self._macros.get(match[1], match[0])
        arguments = (match[2] or "").split(",")[:_MOST_ARGUMENTS]
        for number, argument in enumerate(arguments, 1):
            self._filled_left -= text.count(f"${number}") * len(argument)
            if self._filled_left >= 0:
                text = text.replace(f"${number}", argument.strip())
        self._filled_left -= len(text)
        if self._filled_left < 0:
            self._note("repeats its macros too often: from there on they stay as they are written")
            return match[0]
        return text

    def _link(self, match: re.Match[str]) -> str:
        target, words = match[1], match[2]
        if _PICTURE.fullmatch(words or target):
            self._note("refers to pictures, which are not read")
            return f"[picture: {target.removeprefix('file:')}]"
        return words or target.removeprefix("file:")

    def _note(self, reason: str) -> None:
        fault = Fault("", reason, 0)
        if fault not in self.faults:
            self.faults.append(fault)


def _emphasized(match: re.Match[str]) -> str:
    mark = _MARKS[match[1]]
    return f"{mark}{match[2]}{mark}"


def _end_of(name: str) -> re.Pattern[str]:
    return re.compile(rf"[ \t]*#\+end_{re.escape(name)}[ \t]*$", re.IGNORECASE)


def _last_ends(lines: list[str]) -> dict[str, int]:
    """The place of the last end of each kind of block."""
    places: dict[str, int] = {}
    for number, line in enumerate(lines):
        block = _BLOCK_END.match(line)
        if block:
            places[block[1].lower()] = number
        elif _DRAWER_END.match(line):
            places[_DRAWER_NAME] = number
    return places


def _until(lines: list[str], place: int, pattern: re.Pattern[str]) -> int:
    """The place of the next line that matches; behind the last one if none does."""
    for number in range(place + 1, len(lines)):
        if pattern.match(lines[number]):
            return number
    return len(lines)


def _while(lines: list[str], place: int, pattern: re.Pattern[str]) -> int:
    """The place of the next line that does not match."""
    for number in range(place, len(lines)):
        if not pattern.match(lines[number]):
            return number
    return len(lines)
