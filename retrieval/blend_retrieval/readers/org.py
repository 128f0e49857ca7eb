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
_COLUMN_MARKS = re.compile(r"<[lcr]?\d*>")
_FIXED = re.compile(r"[ \t]*: ?(.*)$")
_COMMENT = re.compile(r"[ \t]*#(?: |$)")
_DRAWER = re.compile(r"[ \t]*:(PROPERTIES|LOGBOOK|CLOCK):[ \t]*$", re.IGNORECASE)
_DRAWER_END = re.compile(r"[ \t]*:END:[ \t]*$", re.IGNORECASE)
_LINK = re.compile(r"\[\[([^][]+)\](?:\[([^][]+)\])?\]")
_PICTURE = re.compile(r"(?:file:|\./|\.\./|/)?[^\s]+\.(?:png|jpe?g|gif|svg|webp|tiff?)$", re.IGNORECASE)
_EMPHASIS = re.compile(r"(?<![\w*/=~+])([*/=~+])(?=\S)((?:(?!\1).)*?\S)\1(?![\w*/=~+])")
_MARKS = {"*": "**", "/": "*", "=": "`", "~": "`", "+": "~~"}
_CODE_BLOCKS = ("src", "example", "export")
_SHOWN_KEYWORDS = ("caption", "author", "date", "subtitle", "description", "email")
_MACRO = re.compile(r"\{\{\{(\w[\w-]*)(?:\((.*?)\))?\}\}\}")
_HEADING_LEVELS = 6


def read_org(data: bytes, title: str) -> Parts:
    """Read one document under its `#+TITLE`. Drawers and comments are left out; included files are faults."""
    decoded, note = decode(data)
    reader = _Reader()
    text = "\n".join(reader.lines(clean(decoded).split("\n")))
    document = Part("", reader.title or title, text, "markdown")
    return [document, *notes(note), *reader.faults]


class _Reader:
    """Converts lines. macros: the replacements that the file defines."""

    def __init__(self) -> None:
        self.title = ""
        self.faults: list[Fault] = []
        self._macros: dict[str, str] = {}

    def lines(self, lines: list[str]) -> Iterator[str]:
        place = 0
        while place < len(lines):
            line = lines[place]
            begin = _BEGIN.match(line)
            stop = _until(lines, place, _end_of(begin[1])) if begin else place
            if begin and stop < len(lines):
                yield from self._block(begin[1].lower(), begin[2], lines[place + 1 : stop])
            elif _DRAWER.match(line) and (end := _until(lines, place, _DRAWER_END)) < len(lines):
                stop = end
                self._note("its drawers (properties, logs) are not read")
            elif _TABLE.match(line):
                stop = _while(lines, place, _TABLE) - 1
                yield from self._table(lines[place : stop + 1])
            elif _FIXED.match(line):
                stop = _while(lines, place, _FIXED) - 1
                yield from ("```", *(_FIXED.sub(r"\1", fixed) for fixed in lines[place : stop + 1]), "```")
            else:
                yield from self._line(line)
            place = stop + 1

    def _line(self, line: str) -> Iterator[str]:
        headline = _HEADLINE.match(line)
        keyword = _KEYWORD.match(line)
        if headline:
            level = min(len(headline[1]), _HEADING_LEVELS)
            yield f"{'#' * level} {self._inline(headline[2])}"
        elif keyword:
            yield from self._keyword(keyword[1].lower(), keyword[2].strip())
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
            unescaped = [re.sub(r"^([ \t]*),(?=[*,#])", r"\1", line) for line in lines]
            fence = "```" if not any("```" in line for line in lines) else "`" * 8
            yield from (f"{fence}{language}", *unescaped, fence)
        else:
            sign = "> " if name == "quote" else ""
            yield from (f"{sign}{line}" for line in self.lines(lines))

    def _table(self, lines: list[str]) -> Iterator[str]:
        rows = [
            [self._inline(cell.strip()) for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
            for line in lines
            if not _RULER.match(line)
        ]
        shown = [row for row in rows if not all(_COLUMN_MARKS.fullmatch(cell) or not cell for cell in row)]
        yield ""
        yield markdown_table(shown)
        yield ""

    def _inline(self, text: str) -> str:
        replaced = _MACRO.sub(self._macro, text)
        linked = _LINK.sub(self._link, replaced)
        return _EMPHASIS.sub(lambda match: f"{_MARKS[match[1]]}{match[2]}{_MARKS[match[1]]}", linked)

    def _macro(self, match: re.Match[str]) -> str:
        text = self._macros.get(match[1], match[0])
        for number, argument in enumerate((match[2] or "").split(","), 1):
            text = text.replace(f"${number}", argument.strip())
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


def _end_of(name: str) -> re.Pattern[str]:
    return re.compile(rf"[ \t]*#\+end_{re.escape(name)}[ \t]*$", re.IGNORECASE)


def _until(lines: list[str], place: int, pattern: re.Pattern[str]) -> int:
    """The place of the next line that matches; behind the last one if none does."""
    return next((number for number in range(place + 1, len(lines)) if pattern.match(lines[number])), len(lines))


def _while(lines: list[str], place: int, pattern: re.Pattern[str]) -> int:
    """The place of the next line that does not match."""
    return next((number for number in range(place, len(lines)) if not pattern.match(lines[number])), len(lines))
