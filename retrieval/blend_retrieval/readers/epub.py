"""E-books: the chapters of an EPUB in their reading order."""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Iterator
from urllib.parse import unquote
from xml.etree import ElementTree as ET

from blend_retrieval.decoding import DecodingError
from blend_retrieval.readers.base import Fault, Part, Parts, UnreadableError
from blend_retrieval.readers.html.html import read_xhtml
from blend_retrieval.readers.html.pictures import PICTURE
from blend_retrieval.readers.progress import reported
from blend_retrieval.readers.xml_trees import xml_root
from blend_retrieval.readers.zipped import Archive, opened_zip

_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
_PAGES = ("application/xhtml+xml", "text/html", "text/x-oeb1-document", "application/x-dtbook+xml")
_PICTURE = re.compile(rb"<(?:\w+:)?(?:img|image|svg|object)\b", re.IGNORECASE)
_URI = re.compile(rb"""\bURI\s*=\s*["']([^"']*)""")
_TITLE = ".//{http://purl.org/dc/elements/1.1/}title"


def read_epub(data: bytes, title: str) -> Parts:
    """Read one document under the book's title. Chapters that cannot be read are faults."""
    with opened_zip(data) as book:
        try:
            container = xml_root(book.read(_CONTAINER))
            place = next(container.iterfind(".//{*}rootfile")).attrib["full-path"]
            package = xml_root(book.read(place))
        except (KeyError, StopIteration, ET.ParseError):
            raise UnreadableError("is no EPUB: it does not list its chapters") from None
        named = (package.findtext(_TITLE) or "").strip()
        encrypted = _encrypted(book)
        chapters = []
        faults = _unlisted(package)
        order = Counter(_chapters(package, posixpath.dirname(place)))
        for chapter, times in reported(order.items(), len(order), "chapters"):
            if times > 1:
                faults.append(Fault(f"chapter {chapter}", f"stands {times:,} times in the book, and is read once", 0))
            try:
                content = _chapter(book, chapter, encrypted)
                parts = read_xhtml(content, "")
            except (UnreadableError, DecodingError) as error:
                faults.append(Fault(f"chapter {chapter}", str(error)))
                continue
            texts = [part.text for part in parts if isinstance(part, Part) and part.text]
            chapters += texts
            has_words = any(PICTURE.sub("", text).strip() for text in texts)
            if not has_words and _PICTURE.search(content):
                faults.append(Fault(f"chapter {chapter}", "holds only pictures", 0))
    text = "\n\n".join(chapters)
    document = Part("", named or title, text, "markdown")
    return [document, *faults]


def _chapters(package: ET.Element, folder: str) -> Iterator[str]:
    """Places of the chapters in the archive."""
    items = package.iterfind(".//{*}item")
    places = {item.get("id"): item.get("href") for item in items}
    for reference in package.iterfind(".//{*}itemref"):
        if place := places.get(reference.get("idref")):
            path = posixpath.join(folder, unquote(place))
            yield posixpath.normpath(path)


def _unlisted(package: ET.Element) -> list[Fault]:
    """Chapters of the reading order that the book's list of files lacks, and pages that stand in no reading order."""
    items = [item for item in package.iterfind(".//{*}item") if item.get("href")]
    listed = {item.get("id") for item in items}
    order = {reference.get("idref") for reference in package.iterfind(".//{*}itemref")}
    faults = [
        Fault(f"chapter {name}", "is not in the book's list of files") for name in sorted(filter(None, order - listed))
    ]
    for item in items:
        is_page = item.get("media-type") in _PAGES and "nav" not in (item.get("properties") or "").split()
        if is_page and item.get("id") not in order:
            faults.append(Fault(f"page {item.get('href')}", "is not in the reading order, so it is not read"))
    return faults


def _encrypted(book: Archive) -> set[str]:
    """The places of the parts that are encrypted."""
    listed = book.read(_ENCRYPTION) if _ENCRYPTION in book else b""
    return {unquote(place.decode("utf-8", "replace")) for place in _URI.findall(listed)}


def _chapter(book: Archive, place: str, encrypted: set[str]) -> bytes:
    if place in encrypted:
        raise UnreadableError("is encrypted")
    try:
        return book.read(place)
    except KeyError:
        raise UnreadableError("is not in the file") from None
