"""Rich Text Format as Markdown, through HTML: tables, notes, lists, powers, and fields as they are shown."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from blend_retrieval.readers.base import Fault, Part, Parts, UnreadableError
from blend_retrieval.readers.html.html import html_to_markdown
from blend_retrieval.readers.office.numbered import numbered_markdown
from blend_retrieval.readers.office.rtf_layout import PAGE_NUMBER, RtfLayout

_TOKEN = re.compile(
    rb"\\([a-zA-Z]{1,32})(-?\d{1,10})?[ ]?"  # a word
    rb"|\\'([0-9a-fA-F]{2})"  # a byte
    rb"|\\([^a-zA-Z0-9])"  # a sign
    rb"|([{}])"
    rb"|[\r\n]+"
    rb"|([^\\{}\r\n]+)",
    re.DOTALL,
)
_MOST_DEPTH = 500
_MOST_SKIPPED = 16  # bytes that stand for a character where no Unicode is read
_SINKS = {  # groups whose text goes elsewhere than into the document, or nowhere
    "title": "title",
    "fldinst": "instruction",
    "fldrslt": "",
    "pict": "",
    "formfield": "form",
    "ffl": "entry",
    "footnote": "note",
    "annotation": "comment",
    "atnauthor": "author",
    "listtext": "number",
    "pntext": "number",
    "fonttbl": "font",
    "stylesheet": "style",
    "shptxt": "body",
    "ud": "body",
    **dict.fromkeys(("header", "headerl", "headerr", "headerf"), "header"),
    **dict.fromkeys(("footer", "footerl", "footerr", "footerf"), "footer"),
}
_SILENT = (  # groups that are no text
    "colortbl",
    "listtable",
    "listoverridetable",
    "revtbl",
    "rsidtbl",
    "generator",
    "info",
    "filetbl",
    "xmlnstbl",
    "upr",
    "objdata",
    "objclass",
    "objname",
    "bkmkstart",
    "bkmkend",
    "ftnsep",
    "ftnsepc",
    "aftnsep",
    "aftnsepc",
    "template",
    "tc",
    "xe",
    "nonshppict",
    "sp",
)
_SHOWN = ("shppict", "shpinst", "cs", "ds", "ts")  # groups that may be ignored, and are read
_LAYOUT = ("pard", "intbl", "trowd", "cell", "row", "nestcell", "nestrow", "outlinelevel", "s")
_NAMES = ("font", "style")  # tables of one group for each name
_BREAKS = ("par", "line", "sect", "page", "column", "softline")
_PAGE_FIELDS = ("PAGE", "NUMPAGES", "SECTIONPAGES")
_HEADING_STYLE = re.compile(r"heading (\d)", re.IGNORECASE)
_UNSET = 25  # the state of a field that has its default
_SYMBOLS = 2  # a character set
_SIGNS = {
    "par": "\n",
    "line": "\n",
    "sect": "\n",
    "page": "\n",
    "column": "\n",
    "softline": "\n",
    "tab": " ",
    "emspace": " ",
    "enspace": " ",
    "qmspace": " ",
    "emdash": "—",
    "endash": "–",
    "bullet": "•",
    "lquote": "‘",
    "rquote": "’",
    "ldblquote": "“",
    "rdblquote": "”",
    "zwj": "\u200d",
    "zwnj": "\u200c",
    "zwbo": "",
    "zwnbo": "",
    "ltrmark": "",
    "rtlmark": "",
}
_CHARSETS = {
    77: "mac_roman",
    128: "cp932",
    129: "cp949",
    130: "cp1361",
    134: "gbk",
    136: "big5",
    161: "cp1253",
    162: "cp1254",
    163: "cp1258",
    177: "cp1255",
    178: "cp1256",
    186: "cp1257",
    204: "cp1251",
    222: "cp874",
    238: "cp1250",
}
_CODE_PAGES = {"mac": "mac_roman", "pc": "cp437", "pca": "cp850", "ansi": "cp1252"}
_HIDDEN_NOTE = "its hidden or deleted text is not read"


def read_rtf(data: bytes, title: str) -> Parts:
    """Read one document under its own title, with lists, tables, notes, comments, headers and footers."""
    if not data.lstrip().startswith(b"{\\rtf"):
        raise UnreadableError("is not RTF: it does not begin with {\\rtf")
    reader = _Reader()
    reader.read(data)
    heading, markdown = html_to_markdown(f"<body>{reader.html()}</body>")
    own_title = " ".join(reader.title.split())
    named = own_title or numbered_markdown(heading) or title
    document = Part("", named, numbered_markdown(markdown), "markdown")
    return [document, *reader.faults()]


@dataclass
class _State:
    """What holds up to the end of a group. sink: the name of where text goes, "" for nowhere."""

    sink: str = "body"
    font: int = -1
    skip: int = 1
    tag: str = ""
    is_hidden: bool = False
    is_struck: bool = False
    is_opening: bool = False
    is_ignorable: bool = False


@dataclass
class _Font:
    """A font's character set and name."""

    charset: int = 1
    name: str = ""


@dataclass
class _Field:
    """A field of a form: its kind, its state, its default and its entries."""

    kind: int = 0
    result: int = 25
    default: int = 0
    entries: list[str] = field(default_factory=list)

    def text(self) -> str:
        state = self.default if self.result == _UNSET else self.result
        if self.kind == 1:
            return "[x]" if state else "[ ]"
        is_entry = self.kind == 2 and state < len(self.entries)
        return self.entries[state] if is_entry else ""


class _Reader:
    """Reads the tokens of a file one after the other."""

    def __init__(self) -> None:
        self.title = ""
        self._layout = RtfLayout()
        self._stack: list[_State] = []
        self._state = _State()
        self._codec = "cp1252"
        self._fonts: dict[int, _Font] = {}
        self._styles: dict[int, int] = {}
        self._style = 0
        self._bytes = bytearray()
        self._to_skip = 0
        self._texts: dict[str, list[str]] = {}
        self._field: _Field | None = None
        self._instruction = ""
        self._author = ""
        self._pictures = 0
        self._notes: dict[str, None] = {}

    def html(self) -> str:
        """The document."""
        return self._layout.html()

    def faults(self) -> Iterator[Fault]:
        """What is not read."""
        if self._pictures:
            count = self._pictures
            yield Fault(
                "",
                f"holds {count:,} picture{'s' if count > 1 else ''}, which {'are' if count > 1 else 'is'} not read",
                0,
            )
        for note in self._notes:
            yield Fault("", note, 0)

    def read(self, data: bytes) -> None:
        place = 0
        while match := _TOKEN.match(data, place):
            place = match.end()
            word, number, byte, sign, brace, text = match.groups()
            if byte or text:
                self._add_bytes(bytes([int(byte, 16)]) if byte else text)
                continue
            self._flush_bytes()
            if word:
                argument = int(number) if number else None
                if word == b"bin":
                    place += max(0, argument or 0)
                else:
                    self._word(word.decode(), argument)
            elif sign:
                self._sign(sign)
            elif brace == b"{":
                self._open()
            elif brace and self._stack:
                self._close()
        self._flush_bytes()
        if place < len(data.rstrip()) or self._stack:
            self._notes["is damaged at its end"] = None

    def _open(self) -> None:
        if len(self._stack) > _MOST_DEPTH:
            raise UnreadableError("has groups that are nested too deeply")
        self._to_skip = 0
        self._stack.append(self._state)
        self._state = replace(self._state, is_opening=True, is_ignorable=False)

    def _close(self) -> None:
        closed = self._state
        self._to_skip = 0  # a substitute for a character ends with its group
        self._state = self._stack.pop()
        if closed.sink != self._state.sink or closed.sink in _NAMES:
            self._finish(closed)

    def _finish(self, closed: _State) -> None:
        """A destination is read whole."""
        text = "".join(self._texts.pop(closed.sink, []))
        words = " ".join(text.split())
        match closed.sink:
            case "title":
                self.title = text
            case "author":
                self._author = words
            case "instruction":
                self._instruction = words
                self._text(self._field.text() if self._field else "")
                self._field = None
            case "entry" if self._field:
                self._field.entries.append(words)
            case "style":
                if heading := _HEADING_STYLE.match(words):
                    self._styles[self._style] = int(heading[1])
                self._style = 0
            case "font":
                font = self._fonts.setdefault(closed.font, _Font())
                font.name = words.rstrip(";")
            case _:
                self._finish_text(closed.sink, text)

    def _finish_text(self, sink: str, text: str) -> None:
        """A group is read whole that shows something in the document."""
        words = " ".join(text.split())
        if sink == "number":
            self._layout.number(words)
        elif sink == "note" and words:
            self._text(f" [note: {words}]")
        elif sink == "comment" and words:
            self._text(f" [comment by {self._author}: {words}]" if self._author else f" [comment: {words}]")
        elif sink in ("header", "footer"):
            self._layout.frame(sink, text)

    def _sign(self, sign: bytes) -> None:
        self._state.is_opening = False
        if sign == b"*":
            self._state.is_opening = True
            self._state.is_ignorable = True
        elif sign in b"\\{}":
            self._add_bytes(sign)
        elif sign in b"\r\n":
            self._word("par", None)
        else:
            shown = {b"~": " ", b"_": "-"}.get(sign, "")
            self._text(shown)

    def _word(self, word: str, number: int | None) -> None:
        is_first = self._state.is_opening
        is_ignorable = self._state.is_ignorable
        self._state.is_opening = False
        if is_first and word in _SINKS:
            self._begin(word)
        elif is_first and (word in _SILENT or (is_ignorable and word not in _SHOWN)):
            self._state.sink = ""
        elif word == "u" and number is not None:
            self._text(chr(number % 0x10000))
            self._to_skip = self._state.skip
        elif word in _SIGNS:
            self._space(word)
        elif word in _LAYOUT:
            if self._state.sink == "body":
                self._layout.control(word, number, self._styles)
            elif word in ("cell", "row"):
                self._text(" | " if word == "cell" else "\n")
            elif word == "s":
                self._property(word, number)
        else:
            self._property(word, number)

    def _begin(self, word: str) -> None:
        """A group whose text goes elsewhere than into the document."""
        sink = _SINKS[word]
        if word == "pict":
            self._pictures += self._state.sink not in ("", "number")
        elif word == "fldrslt":
            is_page = self._instruction.upper().startswith(_PAGE_FIELDS)
            if is_page and self._state.sink in ("header", "footer"):
                self._text(PAGE_NUMBER)
            sink = "" if is_page else self._state.sink
        elif word == "formfield":
            self._field = _Field()
        elif word == "shptxt":
            sink = "body"
            self._layout.control("par", None, {})
        self._state.sink = sink

    def _property(self, word: str, number: int | None) -> None:
        state = self._state
        is_on = number != 0
        match word:
            case "plain":
                state.tag, state.is_hidden, state.is_struck = "", False, False
            case "super" | "up":
                state.tag = "sup" if is_on else ""
            case "sub" | "dn":
                state.tag = "sub" if is_on else ""
            case "nosupersub":
                state.tag = ""
            case "v" | "deleted":
                state.is_hidden = is_on
            case "strike" | "striked":
                state.is_struck = is_on
            case "uc":
                state.skip = min(max(0, number or 0), _MOST_SKIPPED)
            case _:
                self._table(word, number or 0)

    def _table(self, word: str, number: int) -> None:
        """Words of the tables of fonts and styles, and of fields of forms."""
        sink = self._state.sink
        if word == "f":
            self._state.font = number
        elif word == "ansicpg" or word in _CODE_PAGES:
            self._codec = _known(_CODE_PAGES.get(word, f"cp{number}"), self._codec)
        elif word == "fcharset" and sink == "font":
            font = self._fonts.setdefault(self._state.font, _Font())
            font.charset = number
        elif word == "s" and sink == "style":
            self._style = number
        elif sink == "form" and self._field:
            if word == "fftype":
                self._field.kind = number
            elif word == "ffres":
                self._field.result = number
            elif word == "ffdefres":
                self._field.default = number

    def _add_bytes(self, content: bytes) -> None:
        self._state.is_opening = False
        skipped = min(self._to_skip, len(content))
        self._to_skip -= skipped
        self._bytes += content[skipped:]

    def _flush_bytes(self) -> None:
        if not self._bytes:
            return
        content = bytes(self._bytes)
        self._bytes.clear()
        font = self._fonts.get(self._state.font, _Font())
        if font.charset == _SYMBOLS and self._state.sink != "font":
            symbols = [_symbol(font.name, code) for code in content]
            self._text("".join(symbols))
            return
        codec = _CHARSETS.get(font.charset, self._codec)
        self._text(content.decode(codec, "replace"))

    def _space(self, word: str) -> None:
        if self._state.sink == "body" and word in _BREAKS:
            self._layout.control(word, None, self._styles)
        else:
            self._text(_SIGNS[word])

    def _text(self, text: str) -> None:
        sink = self._state.sink
        if not sink or not text:
            return
        if self._state.is_hidden:
            if text.strip():
                self._notes[_HIDDEN_NOTE] = None
        elif sink == "body":
            self._layout.text(text, self._state.tag, is_struck=self._state.is_struck)
        else:
            self._texts.setdefault(sink, []).append(text)


def _known(codec: str, default: str) -> str:
    try:
        return codecs.lookup("utf-8" if codec == "cp65001" else codec).name
    except LookupError:
        return default


def _symbol(font: str, code: int) -> str:
    """The character that a font of symbols shows."""
    from mammoth.docx.dingbats import dingbats

    shown = dingbats.get((font, code))
    if shown:
        return chr(shown)
    return bytes([code]).decode("cp1252", "replace")
