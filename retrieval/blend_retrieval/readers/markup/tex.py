"""LaTeX as Markdown: headings, lists, tables, notes, accents and macros. Formulas stay as they are written."""

from __future__ import annotations

import re
from typing import NamedTuple

from blend_retrieval.decoding import decode
from blend_retrieval.document import clean
from blend_retrieval.readers.base import Fault, Part, Parts, notes
from blend_retrieval.readers.markup.tex_macros import (
    Macros,
    OpenArgumentsError,
    argument,
    note_open,
    option,
    searched_in_vain,
)
from blend_retrieval.readers.markup.tex_signs import ACCENTS, SIGNS, SILENT, accented
from blend_retrieval.readers.numerals import numeral
from blend_retrieval.readers.tables import markdown_table

_VERBATIM = re.compile(
    r"\\begin\{(verbatim\*?|Verbatim|lstlisting|minted|alltt)\}(?:\[[^\]]*\])?(?:\{([^}]*)\})?[ \t]*\n?(.*?)\\end\{\1\}",
    re.DOTALL,
)
_MATH = re.compile(
    r"\$\$.+?\$\$|(?<!\\)\$(?:\\.|[^$\\])+\$|\\\(.+?\\\)|\\\[.+?\\\]"
    r"|\\begin\{((?:equation|align|gather|multline|eqnarray|displaymath|math|flalign|alignat)\*?)\}.+?\\end\{\1\}",
    re.DOTALL,
)
_COMMENT = re.compile(r"(?<!\\)((?:\\\\)*)%[^\n]*(?:\n[ \t]*(?=\S))?")
_COMMENT_BLOCK = re.compile(r"\\begin\{comment\}.*?\\end\{comment\}", re.DOTALL)
_TOKEN = re.compile(r"\\([a-zA-Z@]+)\*?|\\(.|\n)|([{}~])|(---?|``|''|,,)|\x01(\d+)\x02")
_DASHES = {"--": "–", "---": "—", "``": "“", "''": "”", ",,": "„", "<<": "«", ">>": "»"}
_HEADINGS = ("part", "chapter", "section", "subsection", "subsubsection", "paragraph", "subparagraph")
_STYLES = {  # commands, and the marks of Markdown
    "textbf": "**",
    "emph": "*",
    "textit": "*",
    "textsl": "*",
    "texttt": "`",
    "code": "`",
    "sout": "~~",
}
_FORMS = {
    "footnote": " [note: {}]",
    "footnotetext": " [note: {}]",
    "thanks": " [note: {}]",
    "marginpar": " [note: {}]",
    "todo": " [note: {}]",
    "textsuperscript": "^{}^",
    "textsubscript": "~{}~",
    "caption": "\n\n{}\n\n",
    "enquote": "“{}”",
    "url": "{}",
    "frametitle": "\n\n## {}\n\n",
}
_PLAIN = (
    "textrm",
    "textsf",
    "textsc",
    "textup",
    "textmd",
    "textnormal",
    "text",
    "mbox",
    "hbox",
    "underline",
    "uline",
    "makebox",
)
_KEYS = (
    "ref",
    "eqref",
    "pageref",
    "autoref",
    "cref",
    "Cref",
    "nameref",
    "cite",
    "citep",
    "citet",
    "parencite",
    "textcite",
)
_QUANTITIES = ("SI", "qty", "num", "si", "unit", "SIrange", "qtyrange", "numrange", "ang")
_TABLES = ("tabular", "tabular*", "tabularx", "tabulary", "longtable", "array", "tabbing", "supertabular", "xltabular")
_LISTS = ("itemize", "enumerate", "description", "compactitem", "compactenum", "inparaenum")
_ENUMERATED = ("decimal", "lowerLetter", "lowerRoman", "upperLetter")
_LABELS = {
    "arabic": "decimal",
    "alph": "lowerLetter",
    "Alph": "upperLetter",
    "roman": "lowerRoman",
    "Roman": "upperRoman",
}
_LABEL = re.compile(r"label\s*=\s*\{?([^,{}\]]*\\(arabic|alph|Alph|roman|Roman)\*?[^,{}\]]*)")
_START = re.compile(r"start\s*=\s*(\d+)")
_SET_ITEM = re.compile(r"\\setcounter\{enumi+v?\}\{(\d+)\}")
_REFERENCE = re.compile(r"\\(?:eq|page|auto|name|[cCvV])?ref\*?\{([^}]*)\}")
_BIBITEM = re.compile(r"\\bibitem(?:\[[^\]]*\])?\{([^}]*)\}")
_ASIDE = re.compile(r"\x01(\d+)\x02")
_WIDE_TABLES = ("tabular*", "tabularx", "tabulary", "xltabular")
_NUMBERS = ("num", "si", "unit", "ang")
_HEADING_LEVELS = 6
_MOST_DEPTH = 50
_MOST_COPIES = 1000  # of a cell
_OPEN = "is read as plain text: too many of its arguments, environments or formulas do not end"
_ENDS = re.compile(
    r"\\begin\{((?:verbatim|equation|align|gather|multline|eqnarray|displaymath|math|flalign|alignat)\*?"
    r"|Verbatim|lstlisting|minted|alltt|comment)\}|\\([(\[])"
)
_SEARCH_STEPS = 20  # characters of a pattern's search in the time of one character of a loop


def read_tex(data: bytes, title: str) -> Parts:
    r"""Read one document under its `\title`, with the file's own macros. Included files are faults; pictures are named."""
    decoded, note = decode(data)
    text = clean(decoded)
    reader = _Reader()
    searched_in_vain.set(0)
    try:
        _check_ends(text)
        markdown = reader.document(text)
    except OpenArgumentsError:
        return [Part("", title, text, "plain"), Fault("", _OPEN, 0), *notes(note)]
    document = Part("", reader.title or title, markdown, "markdown")
    return [document, *notes(note), *reader.faults]


_Shown = tuple[str, int]
"""What a command shows, and the place behind it."""


class _Environment(NamedTuple):
    """An environment: its name, its content, and the place behind it."""

    name: str
    content: str
    stop: int


class _Reader:
    """Converts a document. Formulas and code are put aside, so that nothing in them is changed."""

    def __init__(self) -> None:
        self.title = ""
        self.faults: list[Fault] = []
        self._aside: list[str] = []
        self._top = 0
        self._references: set[str] = set()
        self._enumerations = 0
        self._last_number = 0
        self._depth = 0

    def document(self, text: str) -> str:
        """The Markdown of a whole file."""
        text = _VERBATIM.sub(self._code, text)
        if _COMMENT.search(text) or _COMMENT_BLOCK.search(text):
            self._note("its comments are not read")
        text = _COMMENT.sub(r"\1", _COMMENT_BLOCK.sub("", text))
        macros = Macros()
        text = macros.expanded(macros.defined(text))
        for keys in _REFERENCE.findall(text):
            self._references |= set(keys.replace(" ", "").split(","))
        text = _MATH.sub(lambda match: self._put_aside(match[0]), text)
        self._top = 1 if re.search(r"\\chapter\b", text) else 2
        preamble, begin, body = text.partition("\\begin{document}")
        head = self._head(text)
        shown = body.partition("\\end{document}")[0] if begin else preamble
        markdown = re.sub(r"[ \t]+\n", "\n", f"{head}\n\n{self.converted(shown)}")
        whole = self._with_aside(markdown)
        return re.sub(r"\n{3,}", "\n\n", whole).strip()

    def _head(self, text: str) -> str:
        """Title, authors and date."""
        lines = []
        for name in ("title", "author", "date"):
            command = re.search(rf"\\{name}\b", text)
            if command is None:
                continue
            first = option(text, command.end())
            place = first.stop if first else command.end()
            value = argument(text, place)
            if value is None or not value.text.strip():
                continue
            words = " ".join(self.converted(value.text).split())
            words = words.replace(" ,", ",")
            if name == "title":
                self.title = self._with_aside(words).replace("**", "")
                words = f"# {words}"
            lines.append(words)
        return "\n\n".join(lines)

    def _with_aside(self, text: str) -> str:
        """The text with what was put aside in its place."""
        return _ASIDE.sub(lambda match: self._aside[int(match[1])], text)

    def _code(self, match: re.Match[str]) -> str:
        language = match[2] or ""
        return self._put_aside(_fenced(match[3], language))

    def _put_aside(self, text: str) -> str:
        self._aside.append(text)
        return f"\x01{len(self._aside) - 1}\x02"

    def converted(self, text: str) -> str:
        """The Markdown of a part."""
        if self._depth > _MOST_DEPTH:
            return text
        self._depth += 1
        texts = []
        place = 0
        while token := _TOKEN.search(text, place):
            texts.append(text[place : token.start()])
            name, sign, brace, dash, _ = token.groups()
            place = token.end()
            if name:
                shown, place = self._command(text, name, place)
                texts.append(shown)
            elif sign:
                shown, place = self._sign(text, sign, place)
                texts.append(shown)
            elif brace:
                texts.append(" " if brace == "~" else "")
            else:
                texts.append(_DASHES[dash] if dash else token[0])
        self._depth -= 1
        return "".join([*texts, text[place:]])

    def _sign(self, text: str, sign: str, place: int) -> _Shown:
        if sign == "\\":
            space = option(text, place)
            return "\n", space.stop if space else place
        if sign in ACCENTS:
            return self._accented(text, sign, place)
        return SIGNS.get(sign, f"\\{sign}"), place

    def _accented(self, text: str, accent: str, place: int) -> _Shown:
        value = argument(text, place)
        if value:
            return accented(accent, self.converted(value.text)), value.stop
        letter = re.compile(r"[ \t]*(\\[ij](?![a-zA-Z])|\w)").match(text, place)
        if letter is None:
            return f"\\{accent}", place
        return accented(accent, letter[1].removeprefix("\\")), letter.end()

    def _command(self, text: str, name: str, place: int) -> _Shown:
        if name == "begin":
            return self._environment(text, place)
        if name in ACCENTS:
            return self._accented(text, name, place)
        if name in SIGNS:
            sign = SIGNS[name]
            is_letter = len(sign) == 1 and sign.isalpha()
            blank = re.compile(r"[ \t]+").match(text, place)
            if blank and is_letter:
                return sign, blank.end()
            return sign, place + 2 if text.startswith("{}", place) else place
        if name in SILENT:
            return "", self._behind(text, place, SILENT[name])
        first = option(text, place) if name not in ("item",) else None
        behind = first.stop if first else place
        if name == "verb":
            stop = text.find(text[place : place + 1], place + 1)
            return (f"`{text[place + 1 : stop]}`", stop + 1) if stop > 0 else ("", place)
        value = argument(text, behind)
        if value is None:
            return f"\\{name}", place
        return self._with_argument(text, name, value.text, value.stop)

    def _with_argument(self, text: str, name: str, value: str, stop: int) -> _Shown:
        """What a command with an argument shows."""
        if name in ("title", "author", "date"):
            return "", stop
        if name in _HEADINGS:
            return self._heading(name, value), stop
        if name in ("input", "include", "subfile", "import", "bibliography", "addbibresource"):
            self.faults.append(Fault(f"included file {value}", "is not read"))
            return "", stop
        if name == "includegraphics":
            self._note("refers to pictures, which are not read")
            return f"[picture: {value}]", stop
        if name in _STYLES:
            inner = self.converted(value)
            return (f"{_STYLES[name]}{inner}{_STYLES[name]}" if inner.strip() else inner), stop
        if name in _FORMS:
            return _FORMS[name].format(self.converted(value).strip()), stop
        if name in _PLAIN:
            return self.converted(value), stop
        if name in _KEYS or (name == "label" and value in self._references):
            return f"[{value}]", stop
        if name == "label":
            return "", stop
        return self._with_arguments(text, name, value, stop)

    def _heading(self, name: str, value: str) -> str:
        depth = max(1, _HEADINGS.index(name) - self._top + 1)
        level = min(depth + (1 if self.title else 0), _HEADING_LEVELS)
        return f"\n\n{'#' * level} {' '.join(self.converted(value).split())}\n\n"

    def _with_arguments(self, text: str, name: str, value: str, stop: int) -> _Shown:
        second = argument(text, stop)
        if name in _QUANTITIES:
            shown = value
            if second and name not in _NUMBERS:
                shown = f"{value} {second.text}"
                stop = second.stop
            words = shown.replace("\\", " ").split()
            return " ".join(words), stop
        if name in ("href", "textcolor", "colorbox", "foreignlanguage", "hyperref") and second:
            return self.converted(second.text), second.stop
        return f"\\{name}{{{self.converted(value)}}}", stop

    def _behind(self, text: str, place: int, count: int) -> int:
        """The place behind the arguments of a command that shows nothing."""
        place += text.startswith("*", place)
        while first := option(text, place) if count else None:
            place = first.stop
        for _ in range(count):
            value = argument(text, place)
            place = value.stop if value else place
        return place

    def _environment(self, text: str, place: int) -> _Shown:
        environment = _environment(text, place)
        if environment is None:
            return "\\begin", place
        name, content, stop = environment
        if name in _TABLES:
            return f"\n\n{self._table(name, content)}\n\n", stop
        if name in _LISTS:
            return f"\n\n{self._list(name, content)}\n\n", stop
        if name in (
            "figure",
            "table",
            "figure*",
            "table*",
            "wrapfigure",
            "minipage",
            "multicols",
            "tcolorbox",
            "frame",
            "columns",
        ):
            arguments = 1 if name in ("minipage", "multicols") else 0
            content = content[self._behind(content, 0, arguments) :]
            first = option(content, 0)
            start = first.stop if first else 0
            inner = self.converted(content[start:])
        elif name == "thebibliography":
            start = self._behind(content, 0, 1)
            entries = _BIBITEM.sub(r"\n\n[\1] ", content[start:])
            inner = self.converted(entries)
        else:
            label = (
                ""
                if name in ("center", "flushleft", "flushright", "quote", "quotation", "verse")
                else f"**{name.capitalize()}**\n\n"
            )
            inner = label + self.converted(content)
        return f"\n\n{inner.strip()}\n\n", stop

    def _list(self, name: str, content: str) -> str:
        options = option(content, 0)
        settings = options.text if options else ""
        is_numbered = "enum" in name
        self._enumerations += is_numbered
        items = _split(content[options.stop if options else 0 :], r"\\item(?![a-zA-Z])")
        start = _START.search(settings) or _SET_ITEM.search(items[0])
        number = int(start[1]) - ("start" in settings) if start else 0
        number = self._last_number if "resume" in settings else number
        lines = [self.converted(items[0]).strip()]
        for item in items[1:]:
            label = option(item, 0)
            start_of_text = label.stop if label else 0
            words = self.converted(item[start_of_text:]).strip()
            mark = "-"
            if label:
                shown = self.converted(label.text)
                mark = f"- **{shown}**:" if name == "description" else f"- {shown}"
            elif is_numbered:
                number += 1
                mark = self._number(number, settings)
            inner = re.sub(r"\n+", "\n", words).replace("\n", "\n   ")
            lines.append(f"{mark} {inner}")
        self._enumerations -= is_numbered
        self._last_number = number if is_numbered else self._last_number
        return "\n".join(filter(None, lines))

    def _number(self, number: int, settings: str) -> str:
        """The number of an item, as the list's label or LaTeX shows it."""
        label = _LABEL.search(settings)
        if label:
            written = numeral(number, _LABELS[label[2]]) or str(number)
            return self.converted(re.sub(r"\\(?:arabic|alph|Alph|roman|Roman)\*?", written, label[1]))
        kind = _ENUMERATED[min(self._enumerations, len(_ENUMERATED)) - 1]
        written = numeral(number, kind) or str(number)
        return f"({written})" if kind == "lowerLetter" else f"{written}."

    def _table(self, name: str, content: str) -> str:
        arguments = 2 if name in _WIDE_TABLES else 1
        start = self._behind(content, 0, arguments)
        rows = []
        captions = []
        for row in _split(content[start:], r"\\\\(?:\[[^\]]*\])?|\\tabularnewline(?![a-zA-Z])"):
            caption = re.search(r"\\caption", row)
            value = argument(row, caption.end()) if caption else None
            if caption and value:
                captions.append(self.converted(value.text))
                row = row[: caption.start()] + row[value.stop :]
            cells = []
            for part in _split(row, r"(?<!\\)&"):
                cells += self._cells(part)
            if any(cells):
                rows.append(cells)
        width = max(map(len, rows), default=0)
        for cells in rows:
            cells += [""] * (width - len(cells))
        table = markdown_table(rows)
        return "\n\n".join([*captions, table])

    def _cells(self, part: str) -> list[str]:
        """A cell; one over several columns is repeated in each."""
        span = re.match(r"\s*(?:\\[a-z]+(?:\{[^}]*\}|\([^)]*\))*\s*)*?\\multicolumn\{(\d+)\}\{[^}]*\}", part)
        value = argument(part, span.end()) if span else None
        if span and value:
            words = self.converted(value.text).strip()
            return [words] * min(int(span[1]), _MOST_COPIES)
        merged = re.search(r"\\multirow(?:\[[^\]]*\])?\{[^}]*\}\{[^}]*\}", part)
        value = argument(part, merged.end()) if merged else None
        return [self.converted(value.text if value else part).strip()]

    def _note(self, reason: str) -> None:
        fault = Fault("", reason, 0)
        if fault not in self.faults:
            self.faults.append(fault)


def _check_ends(text: str) -> None:
    """Raise OpenArgumentsError if too many formulas and environments stand behind the last end of their kind."""
    ends: dict[str, int] = {}
    for start in _ENDS.finditer(text):
        end = f"\\end{{{start[1]}}}" if start[1] else {"(": "\\)", "[": "\\]"}[start[2]]
        if end not in ends:
            ends[end] = text.rfind(end)
        if start.start() > ends[end]:
            note_open(text, start.start(), _SEARCH_STEPS)


def _environment(text: str, place: int) -> _Environment | None:
    name = argument(text, place)
    if name is None:
        return None
    depth = 1
    for mark in re.compile(rf"\\(begin|end)\s*\{{{re.escape(name.text)}\}}").finditer(text, name.stop):
        depth += 1 if mark[1] == "begin" else -1
        if not depth:
            return _Environment(name.text, text[name.stop : mark.start()], mark.end())
    note_open(text, place)
    return None


def _split(text: str, pattern: str) -> list[str]:
    """The text divided at a pattern, but not inside of braces and inner environments."""
    parts = []
    start = depth = 0
    for token in re.finditer(
        rf"(?P<split>{pattern})|\\begin\s*\{{[^}}]*\}}|\\end\s*\{{[^}}]*\}}|\\.|[{{}}]", text, re.DOTALL
    ):
        if token["split"] is not None and not depth:
            parts.append(text[start : token.start()])
            start = token.end()
        elif token[0].startswith("\\begin"):
            depth += 1
        elif token[0].startswith("\\end"):
            depth -= 1
        elif token[0] == "{":
            depth += 1
        elif token[0] == "}":
            depth -= 1
    return [*parts, text[start:]]


def _fenced(code: str, language: str) -> str:
    fence = "```" if "```" not in code else "`" * 8
    return f"\n\n{fence}{language}\n{code.rstrip()}\n{fence}\n\n"
