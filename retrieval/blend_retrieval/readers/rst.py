"""reStructuredText through docutils' HTML. Directives and roles of Sphinx, which docutils lacks, keep their text."""

from __future__ import annotations

import re
from typing import Any

from blend_retrieval.decoding import decode
from blend_retrieval.readers.base import Part, Parts, UnreadableError, notes
from blend_retrieval.readers.html import html_to_markdown

_DIRECTIVE = re.compile(r"^[ \t]*\.\.[ \t]+([\w][\w:.+-]*)::", re.MULTILINE)
_ROLE = re.compile(r":([a-zA-Z][\w:+-]*):`|`:([a-zA-Z][\w:+-]*):")
_SETTINGS: dict[str, Any] = {
    "input_encoding": "unicode",
    "report_level": 5,
    "halt_level": 5,
    "file_insertion_enabled": False,
    "raw_enabled": False,
    "embed_stylesheet": False,
    "syntax_highlight": "none",
    "_disable_config": True,
}


def _register_unknown(text: str) -> None:
    """Register the directives and roles in `text` that docutils lacks; each gives its argument and content."""
    from docutils import nodes
    from docutils.parsers.rst import Directive, directives, languages, roles

    class UnknownDirective(Directive):  # type: ignore[misc]  # docutils publishes no types
        optional_arguments = 1
        final_argument_whitespace = True
        has_content = True

        def run(self) -> list[Any]:
            container = nodes.container()
            if self.arguments:
                container += nodes.paragraph("", self.arguments[0])
            self.state.nested_parse(self.content, self.content_offset, container)
            return [container]

    english = languages.get_language("en")
    directive_names = {match[1].lower() for match in _DIRECTIVE.finditer(text)}
    for name in directive_names:
        if name not in english.directives and name not in directives._directives:
            directives.register_directive(name, UnknownDirective)
    role_names = {match.expand(r"\1\2").lower() for match in _ROLE.finditer(text)}
    for name in role_names:
        if name not in english.roles and name not in roles._roles:
            roles.register_generic_role(name, nodes.literal)


def read_rst(data: bytes, title: str) -> Parts:
    """Read one document, under its own title. Never includes other files."""
    from docutils.core import publish_parts
    from docutils.writers.html5_polyglot import Writer

    text, note = decode(data)
    _register_unknown(text)
    try:
        parts = publish_parts(text, writer=Writer(), settings_overrides=_SETTINGS)
    except Exception as error:  # docutils raises any error of its parser
        raise UnreadableError(f"is not reStructuredText that docutils can read ({type(error).__name__})") from error
    _, markdown = html_to_markdown(f"<body>{parts['html_body']}</body>")
    _, named = html_to_markdown(parts["title"])
    document = Part("", named or title, markdown, "markdown")
    return [document, *notes(note)]
