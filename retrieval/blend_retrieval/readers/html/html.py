"""HTML to Markdown: keeps headings, lists, tables, formulas and code; drops navigation, scripts and hidden elements."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from blend_retrieval.decoding import Decoded, decode
from blend_retrieval.readers.base import Part, Parts, UnreadableError, notes
from blend_retrieval.readers.html.bounds import check_depth, check_size
from blend_retrieval.readers.html.fields import write_fields
from blend_retrieval.readers.html.formulas import write_formulas
from blend_retrieval.readers.html.frames import clear_frames, distinct
from blend_retrieval.readers.html.lists import mark_numbers, with_numbers
from blend_retrieval.readers.html.pictures import drawing_text, write_pictures
from blend_retrieval.readers.html.xhtml import html_of_xhtml, is_xhtml
from blend_retrieval.readers.xml_trees import TOO_DEEP

if TYPE_CHECKING:
    from selectolax.lexbor import LexborHTMLParser

_ENCODING = re.compile(
    rb"<meta[^>]+charset\s*=\s*[\"']?\s*([\w.:-]+)|<\?xml[^>]+encoding\s*=\s*[\"']([\w.:-]+)", re.IGNORECASE
)
_DECLARED_WITHIN = 1024  # bytes, by the HTML standard
_NOISE = "nav, noscript, iframe, dialog:not([open]), [role=navigation], [role=search], a[class*=skip][href^='#']"
_ADDRESS = re.compile(r"(?:https?://|mailto:|tel:)\S+", re.IGNORECASE)
_SOFT_HYPHEN = "\u00ad"


def html_to_markdown(html: str) -> tuple[str, str]:
    """(title or "", Markdown) of a page, or of a page in XHTML that says so.

    Raises `UnreadableError` if it is too large, or its elements are nested too deeply.
    """
    from html_to_markdown import ConversionOptions, PreprocessingOptions, convert
    from selectolax.lexbor import LexborHTMLParser

    source = html_of_xhtml(html) if is_xhtml(html) else html
    check_size(source)
    tree = LexborHTMLParser(source)
    check_depth(tree)
    heading = tree.css_first("head > title") or tree.css_first("h1")
    title = (heading and heading.text()) or ""
    try:
        _prepare(tree)
    except RecursionError:
        raise UnreadableError(TOO_DEEP) from None
    options = ConversionOptions(
        bullets="-",
        sup_symbol="^",
        sub_symbol="~",
        strip_tags=["a"],
        skip_images=True,
        autolinks=False,
        compact_tables=True,
        expand_abbreviations=False,
        include_blockquote_citations=False,
        extract_metadata=False,
        preprocessing=PreprocessingOptions(enabled=False),
    )
    result = convert(tree.html or "", options)
    if result.warnings:
        raise UnreadableError(f"cannot be read whole: {result.warnings[0].message}")
    markdown = with_numbers(result.content or "").replace(_SOFT_HYPHEN, "")
    return title, markdown.strip()


def _prepare(tree: LexborHTMLParser) -> None:
    """Remove what frames a page, and write formulas, pictures and filled fields as text."""
    for node in reversed(distinct(tree.css(_NOISE))):  # those inside others first
        node.decompose()
    clear_frames(tree)
    write_formulas(tree)
    for drawing in reversed(tree.css("svg")):
        words = drawing_text(drawing)
        drawing.replace_with(f" {words} " if words else "")
    write_fields(tree)
    write_pictures(tree)
    _write_addresses(tree)
    mark_numbers(tree)


def _write_addresses(tree: LexborHTMLParser) -> None:
    """Write the addresses of links that show nothing else."""
    for link in tree.css("a[href]"):
        address = _ADDRESS.fullmatch((link.attributes["href"] or "").strip())
        if address and not link.text().strip() and link.first_child is None:
            link.insert_child(address[0])


def read_html(data: bytes, title: str) -> Parts:
    """Read a page under its own title, in its declared or detected encoding."""
    text, note = _decoded(data)
    return _page(text, note, title)


def read_xhtml(data: bytes, title: str) -> Parts:
    """Read a page in XHTML, whether it says so or not."""
    text, note = _decoded(data)
    return _page(html_of_xhtml(text), note, title)


def _decoded(data: bytes) -> Decoded:
    declared = _ENCODING.search(data, 0, _DECLARED_WITHIN)
    encoding = declared.expand(rb"\1\2").decode() if declared else ""
    return decode(data, encoding)


def _page(text: str, note: str, title: str) -> Parts:
    named, markdown = html_to_markdown(text)
    page = Part("", named or title, markdown, "markdown")
    return [page, *notes(note)]
