"""Jupyter notebooks: cells in their order, code in fences, and the outputs that are text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from blend_retrieval.decoding import decode
from blend_retrieval.headings import markdown_headings
from blend_retrieval.readers.base import Fault, Part, Parts, UnreadableError, notes
from blend_retrieval.readers.html.html import html_to_markdown

_COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[()][0-9A-B]")
_OVERWRITTEN = re.compile(r"[^\n]*\r(?!\n)")
_PICTURE = re.compile(r"!\[((?:[^\]!]|!(?!\[))*+)\]\((?:attachment:[^)\s]|data:)(?:[^)!]|!(?!\[))*+\)")
_FENCE = re.compile(r"`{3,}")
_OLD_KINDS = {  # names of outputs before version 4
    "text": "text/plain",
    "html": "text/html",
    "latex": "text/latex",
    "json": "application/json",
    "png": "image/png",
    "jpeg": "image/jpeg",
    "svg": "image/svg+xml",
}
_TEXTS = ("text/markdown", "text/html", "text/latex", "text/plain")
_MOST_SWELLING = 20  # times of a value in one line that it may take in lines
_FIGURE = re.compile(r"\s*<(?:Figure size |IPython\.core\.display\.\w+ object|matplotlib\.)[^>]*>\s*")

_Json = dict[str, Any]


def read_ipynb(data: bytes, title: str) -> Parts:
    """Read a notebook as one document, under its first heading. Pictures and widgets are named, not read."""
    text, note = decode(data)
    try:
        notebook = json.loads(text)
    except (ValueError, RecursionError):
        raise UnreadableError("is no notebook: it is not JSON") from None
    cells = _cells(notebook)
    reader = _Notebook(_language(notebook))
    sections: list[str] = []
    for number, cell in enumerate(cells, 1):
        sections += reader.cell(cell, number)
    stripped = [section.strip("\n") for section in sections]
    markdown = "\n\n".join(filter(None, stripped))
    first = next(markdown_headings(markdown), None)
    metadata = notebook.get("metadata")
    named = ""
    if isinstance(metadata, dict):
        named = str(metadata.get("title") or "")
    heading = ""
    if first:
        text_above = markdown[: first.start].strip()
        heading = "" if text_above else first.text
    document = Part("", named or heading or title, markdown, "markdown")
    return [document, *notes(note), *reader.faults]


def _cells(notebook: Any) -> list[Any]:
    """The cells of a notebook; the format before version 4 has them in worksheets."""
    if isinstance(notebook, dict):
        sheets = notebook.get("worksheets")
        holders = sheets if isinstance(sheets, list) else [notebook]
        cells: list[Any] = []
        is_notebook = False
        for holder in holders:
            inside = holder.get("cells") if isinstance(holder, dict) else None
            if isinstance(inside, list):
                is_notebook = True
                cells += inside
        if is_notebook:
            return [cell for cell in cells if isinstance(cell, dict)]
    raise UnreadableError("is no notebook: it has no cells")


def _language(notebook: _Json) -> str:
    metadata = notebook.get("metadata")
    for name, key in (("language_info", "name"), ("kernelspec", "language")):
        about = metadata.get(name) if isinstance(metadata, dict) else None
        language = about.get(key) if isinstance(about, dict) else None
        if isinstance(language, str):
            return language
    return ""


def _joined(text: object) -> str:
    """A text that a notebook may hold as lines."""
    if isinstance(text, list):
        return "".join(map(str, text))
    return "" if text is None else str(text)


def _shown(text: str) -> str:
    """What a terminal shows: no colours, and of a line that was written over the last state."""
    plain = _COLOURS.sub("", text).replace("\r\n", "\n")
    lines = [_last_state(line) for line in plain.split("\n")]
    return "\n".join(lines)


def _last_state(line: str) -> str:
    states = [state for state in line.split("\r") if state.strip()]
    return states[-1] if states else ""


def _fenced(text: str, language: str = "") -> str:
    """A text in a fence that is longer than any inside."""
    if not text.strip():
        return ""
    lengths = [len(fence) for fence in _FENCE.findall(text)]
    longest = max(lengths, default=2)
    fence = "`" * (longest + 1)
    body = text.rstrip().lstrip("\n")
    return f"{fence}{language}\n{body}\n{fence}"


class _Notebook:
    """Reads cells."""

    def __init__(self, language: str) -> None:
        self._language = language
        self._faults: dict[Fault, None] = {}

    @property
    def faults(self) -> list[Fault]:
        """What is not read of the cells, each once."""
        return list(self._faults)

    def cell(self, cell: _Json, number: int) -> Iterator[str]:
        source = _joined(cell.get("source", cell.get("input")))
        kind = cell.get("cell_type")
        if kind == "markdown":
            yield self._markdown(source, number)
        elif kind == "heading":  # before version 4
            level = cell.get("level")
            yield f"{'#' * (level if isinstance(level, int) else 1)} {source}"
        elif kind == "code":
            yield _fenced(source, str(cell.get("language") or self._language))
            for output in cell.get("outputs") or ():
                if isinstance(output, dict):
                    yield self._output(output, number)
        else:
            is_markup = kind == "raw" and source.lstrip().startswith("<")
            yield _fenced(source) if is_markup else source

    def _markdown(self, source: str, number: int) -> str:
        """The text of a cell, with the names of pictures that the notebook holds."""
        pictures = len(_PICTURE.findall(source))
        if pictures:
            self._unread(number, "holds a picture, which is not read")
        return _PICTURE.sub(lambda match: match[1], source)

    def _output(self, output: _Json, number: int) -> str:
        kind = output.get("output_type")
        if kind == "stream":
            return _fenced(_shown(_joined(output.get("text"))))
        if kind in ("error", "pyerr"):
            traceback = output.get("traceback")
            lines = ""
            if isinstance(traceback, list):
                lines = "\n".join(map(str, traceback))
            last = f"{output.get('ename', '')}: {output.get('evalue', '')}"
            shown = _shown(lines)
            return _fenced(shown if last.strip(": ") in shown else f"{shown}\n{last}")
        bundle = output.get("data")
        if not isinstance(bundle, dict):
            bundle = _old_bundle(output)
        return self._bundle(bundle, number)

    def _bundle(self, bundle: _Json, number: int) -> str:
        """The first of an output's forms that is text."""
        has_picture = any(kind.startswith("image/") for kind in bundle)
        if has_picture:
            self._unread(number, "shows a picture, which is not read")
        texts = {kind: _joined(bundle[kind]) for kind in _TEXTS if kind in bundle}
        plain = _shown(texts.get("text/plain", ""))
        if _FIGURE.fullmatch(plain):
            plain = ""
        marked_up = self._marked_up(texts, number, plain)
        latex = texts.get("text/latex", "")
        shown = marked_up or _fenced(plain) or latex
        if not shown and "application/json" in bundle:
            value = bundle["application/json"]
            shown = _fenced(_indented(value), "json")
        if not shown and not has_picture and bundle:
            self._unread(number, f"shows {', '.join(sorted(bundle))}, which is not read")
        return shown

    def _marked_up(self, texts: dict[str, str], number: int, plain: str) -> str:
        """Markdown, or HTML if it is a table or there is no plain text."""
        if "text/markdown" in texts:
            return self._markdown(texts["text/markdown"], number)
        html = texts.get("text/html", "")
        if html and ("<table" in html or not plain):
            _, markdown = html_to_markdown(f"<body>{html}</body>")
            return markdown
        return ""

    def _unread(self, number: int, reason: str) -> None:
        fault = Fault(f"cell {number}", reason, 0)
        self._faults[fault] = None


def _indented(value: Any) -> str:
    """A value as JSON in lines, or in one line if the blanks before deep lines would swell it."""
    compact = json.dumps(value, ensure_ascii=False)
    longest = _MOST_SWELLING * len(compact)
    encoder = json.JSONEncoder(ensure_ascii=False, indent=1)
    pieces = []
    length = 0
    for piece in encoder.iterencode(value):
        pieces.append(piece)
        length += len(piece)
        if length > longest:
            return compact
    return "".join(pieces)


def _old_bundle(output: _Json) -> _Json:
    """The forms of an output before version 4."""
    names = output.keys() & _OLD_KINDS.keys()
    return {_OLD_KINDS[name]: output[name] for name in names}
