"""AsciiDoc as Markdown: headings, blocks, tables, lists, attributes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from blend_retrieval.decoding import decode
from blend_retrieval.document import clean
from blend_retrieval.readers.base import Fault, Part, Parts, notes
from blend_retrieval.readers.markup.adoc_tables import table_rows
from blend_retrieval.readers.numerals import numeral
from blend_retrieval.readers.tables import markdown_table

_HEADING = re.compile(r"(={1,6}|#{1,6})[ \t]+(.+?)(?:[ \t]+\1)?[ \t]*$")
_ATTRIBUTE = re.compile(r":(!?[\w-]+!?):(?:[ \t]+(.*))?$")
_REFERENCE = re.compile(r"(?<!\\)\{(\w[\w-]*)\}")
_BLOCK_ATTRIBUTES = re.compile(r"\[(?!\[)([^\]]*)\][ \t]*$")
_ANCHOR = re.compile(r"\[\[[^\]]{0,2000}\]\]")
_BLOCK_TITLE = re.compile(r"\.(?![. \t])(.+)$")
_FENCES = re.compile(r"(-{4,}|\.{4,}|={4,}|\*{4,}|_{4,}|\+{4,}|/{4,}|--|```+)[\w-]*[ \t]*$")
_TABLE = re.compile(r"([|,:!])={3,}[ \t]*$")
_MACRO = re.compile(r"(include|image|video|audio|toc)::([^\[]*)\[([^\]]*)\][ \t]*$")
_CONDITION = re.compile(r"(?:ifdef|ifndef|ifeval|endif)::([^\[]*)\[(.*)\][ \t]*$")
_ITEM = re.compile(r"[ \t]*(\*{1,5}|\.{1,5}|-)[ \t]+(.*)$")
_TERM = re.compile(r"[ \t]*(.+?)(:{2,4}|;;)(?:[ \t]+(.*))?$")
_CHECK = re.compile(r"\[([ x*])\][ \t]+")
_XREF = re.compile(r"<<([^,>]{1,2000})(?:,[ \t]*([^>]{0,2000}))?>>|xref:([^\[\s]{1,2000})\[([^\]]*)\]")
_LINK = re.compile(r"(?:link:)?((?:https?|ftp|mailto):[^\s\[\]]{1,2000}|link:[^\s\[\]]{1,2000})\[([^\]]*)\]")
_INLINE_IMAGE = re.compile(r"image:(?!:)([^\s\[]{1,2000})\[([^\]]*)\]")
_INLINE = (
    (re.compile(r"footnote:\w*\[([^\]]*)\]"), r" [note: \1]"),
    (re.compile(r"(?:kbd|btn|menu:[^\[]{0,2000})\[([^\]]*)\]"), r"\1"),
    (re.compile(r"(?:stem|latexmath|asciimath):\[([^\]]*)\]"), r"$\1$"),
    (re.compile(r"pass:\w*\[([^\]]*)\]"), r"\1"),
    (re.compile(r"\+\+\+(.*?)\+\+\+"), r"\1"),
    (re.compile(r"(?<![\w*])\*(?=\S)([^*\n]+?)(?<=\S)\*(?![\w*])"), r"**\1**"),
    (re.compile(r"\[(?:line-through|\.line-through)\]#([^#]+)#"), r"~~\1~~"),
    (re.compile(r"\[[^\]\n]*\]#([^#\n]+)#"), r"\1"),
)
_START = re.compile(r"start=(\d+)")
_KINDS_BY_DEPTH = ("decimal", "lowerLetter", "lowerRoman", "upperLetter", "upperRoman")
_NUMERALS = {  # as AsciiDoc and as Word name them
    "arabic": "decimal",
    "decimal": "decimalZero",
    "loweralpha": "lowerLetter",
    "upperalpha": "upperLetter",
    "lowerroman": "lowerRoman",
    "upperroman": "upperRoman",
    "lowergreek": "lowerGreek",
}
_LITERAL = ("-", ".", "`")
_CONTINUED = " \\"  # at the end of a line
_LONG_FENCE = "`" * 8
_HEADING_LEVELS = 6
_MOST_PASSES = 5  # of attributes in attributes
_MOST_OPEN = 500  # brackets of a line that do not end
_MOST_FILLED = 2_000_000  # characters that stand in the place of attributes


def read_adoc(data: bytes, title: str) -> Parts:
    """Read one document under its title, with the values of its attributes. Included files and conditions are named."""
    decoded, note = decode(data)
    reader = _Reader()
    text = "\n".join(reader.lines(clean(decoded).split("\n")))
    markdown = re.sub(r"\n{3,}", "\n\n", text)
    document = Part("", reader.title or title, markdown, "markdown")
    return [document, *notes(note), *reader.faults]


class _Reader:
    """Converts lines. What a block is named and how its cells are divided stands above it."""

    def __init__(self) -> None:
        self.title = ""
        self.faults: list[Fault] = []
        self._attributes: dict[str, str] = {
            "nbsp": " ",
            "empty": "",
            "sp": " ",
            "blank": "",
            "plus": "+",
            "amp": "&",
            "lt": "<",
        }
        self._attributes |= {
            "gt": ">",
            "vbar": "|",
            "deg": "°",
            "startsb": "[",
            "endsb": "]",
            "asterisk": "*",
            "tilde": "~",
        }
        self._style = ""
        self._counts: dict[int, int] = {}
        self._filled_left = _MOST_FILLED
        self._is_apart = False
        self._is_attached = False

    def lines(self, lines: list[str]) -> Iterator[str]:
        place = 0
        while place < len(lines):
            line = lines[place]
            fence = _FENCES.match(line) or _TABLE.match(line)
            stop = _end(lines, place) if fence else place
            if fence and stop < len(lines):
                inside = lines[place + 1 : stop]
                convert = self._table if _TABLE.match(line) else self._block
                yield from convert(line, inside)
                self._style = ""
            else:
                stop = place
                whole = line
                while self._goes_on(lines, stop):
                    stop += 1
                    whole = f"{whole.rstrip(_CONTINUED)} {lines[stop].strip()}"
                yield from self._line(whole)
                self._is_apart = not whole.strip()
                self._is_attached &= not self._is_apart
            place = stop + 1

    def _goes_on(self, lines: list[str], place: int) -> bool:
        """Whether the value of an attribute goes on on the next line."""
        is_last = place + 1 == len(lines)
        return not is_last and lines[place].endswith(" \\")

    def _line(self, line: str) -> Iterator[str]:
        attribute = _ATTRIBUTE.match(line)
        heading = _HEADING.match(line)
        about = _BLOCK_ATTRIBUTES.match(line)
        if line.startswith("//") and not line.startswith("///"):
            self._note("its comments are not read")
        elif attribute:
            name = attribute[1].strip("!").lower()
            self._attributes[name] = self._filled(attribute[2] or "")
        elif heading:
            self._counts = {}
            level = min(len(heading[1]), _HEADING_LEVELS)
            words = self._inline(heading[2])
            if level == 1 and not self.title:
                self.title = words
            yield from ("", f"{'#' * level} {words}", "")
        elif about:
            self._style = about[1]
        elif line.strip() in ("+", "'''", "<<<"):
            self._is_attached = line.strip() == "+"
            yield ""
        else:
            yield from self._text(line)

    def _text(self, line: str) -> Iterator[str]:
        macro = _MACRO.match(line)
        condition = _CONDITION.match(line)
        item = _ITEM.match(line)
        term = _TERM.match(line)
        block_title = _BLOCK_TITLE.match(line)
        if macro:
            yield from self._macro(macro[1], macro[2], macro[3])
        elif condition:
            self._note("its conditions (ifdef, ifndef, ifeval) are not followed: all alternatives are read")
            if condition[2] and not line.startswith("ifeval"):
                yield self._inline(condition[2])
        elif item:
            yield self._item(item[1], item[2])
        elif block_title:
            yield f"**{self._inline(block_title[1])}**"
            yield ""
        elif term and not line.lstrip().startswith(("http", "|")):
            yield f"**{self._inline(term[1])}**: {self._inline(term[3] or '')}".rstrip()
        else:
            if line.strip() and self._is_apart and not self._is_attached:
                self._counts = {}  # a paragraph ends the list
            yield self._inline(line.removesuffix(" +"))
            self._style = "" if line.strip() else self._style

    def _item(self, mark: str, text: str) -> str:
        depth = len(mark) - 1
        box = _CHECK.match(text)
        words = f"[{'x' if box[1] != ' ' else ' '}] {text[box.end() :]}" if box else text
        for level in list(self._counts):
            if level > depth:
                del self._counts[level]
        sign = self._number(depth) if mark[0] == "." else "-"
        self._style = ""
        indent = "   " * depth
        return f"{indent}{sign} {self._inline(words)}"

    def _number(self, depth: int) -> str:
        """The number of the next item."""
        start = _START.search(self._style)
        count = self._counts.get(depth, 0) + 1
        if start:
            count = int(start[1])
        self._counts[depth] = count
        kind = _KINDS_BY_DEPTH[depth]
        for name in self._style.split(","):
            kind = _NUMERALS.get(name.strip(), kind)
        return f"{numeral(count, kind)}."

    def _macro(self, name: str, target: str, attributes: str) -> Iterator[str]:
        if name == "include":
            self.faults.append(Fault(f"included file {self._filled(target)}", "is not read"))
        elif name != "toc":
            self._note("refers to pictures or films, which are not read")
            words = attributes.split(",")[0].strip(' "')
            yield f"[picture: {self._inline(words or target)}]"

    def _block(self, fence: str, lines: list[str]) -> Iterator[str]:
        sign = fence[0]
        style = self._style.split(",")
        if sign == "/":
            self._note("its comments are not read")
        elif (sign in _LITERAL and fence.strip() != "--") or style[0] in ("source", "listing"):
            language = fence.strip("`").strip() if sign == "`" else ""
            if len(style) > 1:
                language = style[1].strip()
            yield from self._code(lines, language)
        elif sign == "+":
            yield from lines
        else:
            kind = style[0].strip()
            yield from ("", f"**{kind.capitalize()}**: ".rstrip() if kind.isupper() else "")
            quote = "> " if sign == "_" else ""
            self._style = ""
            yield from (f"{quote}{line}" for line in self.lines(lines))
            if sign == "_" and len(style) > 1:
                yield f"> — {', '.join(part.strip() for part in style[1:])}"
            yield ""

    def _code(self, lines: list[str], language: str) -> Iterator[str]:
        is_filled = "subs=" in self._style and "attributes" in self._style
        has_fence = any("```" in line for line in lines)
        ticks = _LONG_FENCE if has_fence else "```"
        yield from ("", f"{ticks}{language}")
        yield from map(self._filled, lines) if is_filled else lines
        yield from (ticks, "")

    def _table(self, fence: str, lines: list[str]) -> Iterator[str]:
        rows = []
        for row in table_rows(lines, self._style, fence[0]):
            rows.append([self._inline(cell) for cell in row])
        yield ""
        yield markdown_table(rows)
        yield ""

    def _filled(self, text: str) -> str:
        """The text with the values of attributes."""
        for _ in range(_MOST_PASSES):
            filled = _REFERENCE.sub(self._value, text)
            if filled == text:
                break
            text = filled
        return text

    def _value(self, reference: re.Match[str]) -> str:
        """The value of an attribute; the reference itself if the file does not define it."""
        name = reference[1].lower()
        value = self._attributes.get(name, reference[0])
        self._filled_left -= len(value)
        if self._filled_left < 0:
            self._note("repeats its attributes too often: from there on they stay as they are written")
            return reference[0]
        return value

    def _inline(self, text: str) -> str:
        words = self._filled(text)
        bracket = words.rfind("]") + 1
        if words.count("[", bracket) > _MOST_OPEN:
            self._note("has a line with too many brackets that do not end, which stays as it is written")
            return words
        words = _XREF.sub(_referred, _ANCHOR.sub("", words))
        words = _INLINE_IMAGE.sub(self._picture, words)
        words = _LINK.sub(_linked, words)
        for pattern, replacement in _INLINE:
            words = pattern.sub(replacement, words)
        return words

    def _picture(self, match: re.Match[str]) -> str:
        self._note("refers to pictures or films, which are not read")
        words = match[2].split(",")[0].strip(' "')
        return f"[picture: {words or match[1]}]"

    def _note(self, reason: str) -> None:
        fault = Fault("", reason, 0)
        if fault not in self.faults:
            self.faults.append(fault)


def _referred(match: re.Match[str]) -> str:
    words = match[2] or match[4]
    target = match[1] or match[3]
    return words or target


def _linked(match: re.Match[str]) -> str:
    words = match[2].split(",")[0].rstrip("^")
    address = match[1].removeprefix("link:")
    return words or address


def _end(lines: list[str], place: int) -> int:
    """The place of the line that ends a block; behind the last one if none does."""
    fence = lines[place].rstrip()
    closing = "```" if fence.startswith("```") else fence
    for number in range(place + 1, len(lines)):
        if lines[number].rstrip() == closing:
            return number
    return len(lines)
