"""Where the headings of a text are, by how they are marked."""

from __future__ import annotations

from blend_retrieval.document import Heading, Markup
from blend_retrieval.headings import markdown_headings, plain_headings


def find_headings(text: str, markup: Markup = "markdown") -> tuple[Heading, ...]:
    """All headings in order."""
    return plain_headings(text) if markup == "plain" else tuple(markdown_headings(text))
