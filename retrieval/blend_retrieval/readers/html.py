"""HTML to Markdown: keeps headings, lists, tables and code; drops scripts, styles and navigation."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from blend_retrieval.readers.base import Fault, Part, UnreadableError, missing

_NOISE = (
    "script",
    "style",
    "template",
    "noscript",
    "nav",
    "header",
    "footer",
    "title",
    "form",
    "iframe",
    "svg",
    "head",
)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Beautiful Soup's warnings about text like a file name, XHTML, and replaced bytes."""
    logger = logging.getLogger("bs4.dammit")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def html_to_markdown(html: bytes | str) -> tuple[str, str]:
    """(title or "", Markdown) of a page; the text of `main`, or of a lone `article`, or else of `body`."""
    try:
        from bs4 import BeautifulSoup
        from markdownify import MarkdownConverter
    except ImportError:
        raise missing("beautifulsoup4 and markdownify") from None
    with _quiet():
        soup = BeautifulSoup(html, "html.parser")
    title = next((tag.get_text(" ", strip=True) for tag in (soup.title, soup.h1) if tag is not None), "")
    articles = soup.find_all("article")
    body = soup.find("main") or (articles[0] if len(articles) == 1 else None) or soup.body or soup
    for tag in body.find_all(_NOISE):
        if tag.name != "header" or tag.find(re.compile("^h[1-6]$")) is None:
            tag.decompose()
    converter = MarkdownConverter(
        heading_style="ATX",
        bullets="-",
        strip=["a", "img"],
        escape_asterisks=False,
        escape_underscores=False,
        escape_misc=False,
    )
    markdown = converter.convert_soup(body)
    return title, re.sub(r"\n{3,}", "\n\n", markdown).strip()


def read_html(data: bytes, title: str) -> list[Part | Fault]:
    """Read a page under its own title, in its declared or detected encoding."""
    if b"\0" in data and not data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UnreadableError("is a binary file, not HTML")
    named, text = html_to_markdown(data)
    return [Part("", named or title, text, "markdown")]
