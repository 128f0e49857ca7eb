"""reStructuredText through docutils' HTML. `rst_directives` and `rst_roles` read what docutils lacks.

docutils leaves out what it cannot read. Here it comes as it stands in the file, and a note names the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

from blend_retrieval.decoding import decode
from blend_retrieval.readers.base import Fault, Part, Parts, notes
from blend_retrieval.readers.html.html import html_to_markdown
from blend_retrieval.readers.markup.rst_bounds import BeyondBoundsError, bounded_parser, bounded_tables, check_tree

_SETTINGS: dict[str, Any] = {
    "input_encoding": "unicode",
    "report_level": 5,
    "halt_level": 5,
    "warning_stream": False,
    "file_insertion_enabled": False,
    "raw_enabled": True,
    "line_length_limit": 1 << 20,
    "embed_stylesheet": False,
    "syntax_highlight": "none",
    "_disable_config": True,
}
_WARNING = 2  # a level of docutils' messages: from it on they may stand for lost text
_AS_A_COMMENT = "makes a comment, not a directive: that has two colons and a blank behind its name"
_AS_IT_STANDS = "cannot be read by docutils, and is taken as it stands"
_GENERATED = re.compile(r"\s*\.\.\s+(?:contents|sectnum|section-numbering)\s*::")  # what docutils makes of headings
_MISTAKEN = re.compile(r"([a-z][\w-]*)(?::(?=\s)|::(?=\S))")


def read_rst(data: bytes, title: str) -> Parts:
    """Read one document, under its own title. Never takes in other files; each is named."""
    from docutils.core import publish_parts

    from blend_retrieval.readers.markup.rst_directives import register_directives, unread_places
    from blend_retrieval.readers.markup.rst_roles import register_roles

    text, note = decode(data)
    register_directives(text)
    register_roles(text)
    writer = _writer()
    try:
        with _blank_corners(), bounded_tables():
            parts = publish_parts(text, parser=bounded_parser(), writer=writer, settings_overrides=_SETTINGS)
    except BeyondBoundsError as error:
        return [Part("", title, text, "plain"), Fault("", f"is read as plain text: {error}", 0), *notes(note)]
    except Exception as error:  # docutils raises any error of its parser
        reason = f"is read as plain text: docutils cannot read it ({type(error).__name__})"
        return [Part("", title, text, "plain"), Fault("", reason, 0), *notes(note)]
    _, markdown = html_to_markdown(f"<body>{parts['html_body']}</body>")
    _, named = html_to_markdown(parts["title"])
    document = Part("", named or title, markdown, "markdown")
    return [document, *unread_places(writer.document), *notes(note)]


@contextmanager
def _blank_corners() -> Iterator[None]:
    """Keep rows of simple tables whose first cell is blank, above all their headers, which docutils leaves out."""
    from docutils.parsers.rst import tableparser

    parser = tableparser.SimpleTableParser

    class CornerParser(parser):  # type: ignore[misc, valid-type]  # docutils publishes no types
        def parse_table(self) -> None:
            start, end = self.parse_columns(self.block[0], 0)[0]
            has_row = False
            for number, line in enumerate(self.block):
                if self.span_pat.match(line):
                    has_row = False
                elif line[start:end].strip():
                    has_row = True
                elif line.strip() and not has_row:
                    self.block[number] = f"{line[:start]}\\{line[start + 1 :]}"
                    has_row = True
            super().parse_table()

    tableparser.SimpleTableParser = CornerParser
    try:
        yield
    finally:
        tableparser.SimpleTableParser = parser


def _writer() -> Any:
    """The writer of HTML, with `_complete` before it leaves out docutils' messages."""
    from docutils.transforms import Transform
    from docutils.writers.html5_polyglot import Writer

    class Complete(Transform):  # type: ignore[misc]  # docutils publishes no types
        default_priority = 850

        def apply(self) -> None:
            _complete(self.document)

    class BoundedTree(Transform):  # type: ignore[misc]  # docutils publishes no types
        default_priority = 215  # before docutils replaces them

        def apply(self) -> None:
            check_tree(self.document)

    class CompleteWriter(Writer):  # type: ignore[misc]  # docutils publishes no types
        def get_transforms(self) -> list[Any]:
            return [*super().get_transforms(), BoundedTree, Complete]

    return CompleteWriter()


def _complete(document: Any) -> None:
    """Put into the tree of a document what docutils' HTML would leave out."""
    from docutils import nodes

    for message in list(document.findall(nodes.system_message)):
        _keep_source(document, message)
    for comment in list(document.findall(nodes.comment)):
        _keep_mistaken(document, comment)
    for formula in list(document.findall(lambda node: isinstance(node, nodes.math | nodes.math_block))):
        is_block = isinstance(formula, nodes.math_block)
        latex = formula.astext()
        formula.replace_self(nodes.literal_block(latex, latex) if is_block else nodes.literal(latex, latex))
    for picture in list(document.findall(nodes.image)):
        _keep_alternative(picture)
    for frame in list(document.findall(lambda node: isinstance(node, nodes.header | nodes.footer))):
        place = 0 if isinstance(frame, nodes.header) else len(document)
        frame.parent.remove(frame)
        document[place:place] = frame.children
    for subtitle in list(document.findall(nodes.subtitle)):
        if subtitle.parent is document:  # and no part of a sidebar
            _as_heading(subtitle)
    for classifier in list(document.findall(nodes.classifier)):
        classifier.parent[0] += nodes.Text(f" : {classifier.astext()}")
        classifier.parent.remove(classifier)
    _name_raw(document)


def _keep_alternative(picture: Any) -> None:
    """Put a picture's text in its place, without opening the file. Where it has none, docutils would show the file's name."""
    from docutils import nodes

    attributes = {"src": picture["uri"], "alt": picture.get("alt", "")}
    attributes |= {name: picture[name] for name in ("width", "height") if name in picture}
    element = "".join(f' {name}="{escape(str(value))}"' for name, value in attributes.items())
    outer = picture.parent
    is_inline = isinstance(outer, nodes.TextElement)
    is_link_alone = isinstance(outer, nodes.reference) and not isinstance(outer.parent, nodes.TextElement)
    html = f"<img{element}>" if is_inline and not is_link_alone else f"<p><img{element}></p>"
    whole = outer if is_link_alone else picture
    whole.replace_self(nodes.raw("", html, format="html"))


def _as_heading(subtitle: Any) -> None:
    """Make a heading of the one that stands alone below a title, with all that follows: docutils takes it for a subtitle."""
    from docutils import nodes

    outer = subtitle.parent
    place = outer.index(subtitle) + 1
    section = nodes.section("", nodes.title("", "", *subtitle.children), *outer.children[place:])
    outer.children[place - 1 :] = []
    outer += section


def _keep_source(document: Any, message: Any) -> None:
    """Put the source that docutils could not read in the place of its message."""
    from docutils import nodes

    from blend_retrieval.readers.markup.rst_directives import unread_places

    sources = [child for child in message.children if isinstance(child, nodes.literal_block)]
    is_warning = message["level"] == _WARNING
    is_read_too = is_warning and message.children[0].astext().startswith("Title ")  # a ruler that is too short
    is_generated = any(_GENERATED.match(source.astext()) for source in sources)
    if not sources or message["level"] < _WARNING or is_read_too or is_generated:
        return
    unread_places(document).append(Fault(f"line {message.get('line', 1)}", _AS_IT_STANDS, 0))
    message.replace_self(sources)


def _keep_mistaken(document: Any, comment: Any) -> None:
    """Keep a comment that is a directive with one colon, or without the blank behind its colons."""
    from docutils import nodes

    from blend_retrieval.readers.markup.rst_directives import is_directive, unread_places

    words = comment.astext()
    mistaken = _MISTAKEN.match(words)
    if mistaken is not None and is_directive(mistaken[1]):
        unread_places(document).append(Fault(f".. {mistaken[0]}", _AS_A_COMMENT, 0))
        comment.replace_self(nodes.literal_block(words, words))


def _name_raw(document: Any) -> None:
    """Name the parts in other languages than HTML, which the writer leaves out."""
    from docutils import nodes

    from blend_retrieval.readers.markup.rst_directives import unread_places

    kinds = {raw["format"] for raw in document.findall(nodes.raw) if "html" not in raw["format"].split()}
    for kind in sorted(kinds):
        unread_places(document).append(Fault("", f"holds raw {kind}, which is not read", 0))
