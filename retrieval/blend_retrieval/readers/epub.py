"""E-books: the chapters of an EPUB in their reading order."""

from __future__ import annotations

import posixpath
import zipfile
from collections.abc import Iterator
from urllib.parse import unquote
from xml.etree import ElementTree as ET

from blend_retrieval.decoding import DecodingError
from blend_retrieval.readers.base import Fault, Part, Parts, UnreadableError
from blend_retrieval.readers.html import read_html
from blend_retrieval.readers.zipped import opened_zip

_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
_TITLE = ".//{http://purl.org/dc/elements/1.1/}title"


def read_epub(data: bytes, title: str) -> Parts:
    """Read one document under the book's title. Chapters that cannot be read are faults."""
    with opened_zip(data) as book:
        try:
            container = ET.fromstring(book.read(_CONTAINER))
            place = next(container.iterfind(".//{*}rootfile")).attrib["full-path"]
            package = ET.fromstring(book.read(place))
        except (KeyError, StopIteration, ET.ParseError):
            raise UnreadableError("is no EPUB: it does not list its chapters") from None
        named = (package.findtext(_TITLE) or "").strip()
        chapters = []
        faults = []
        for chapter in _chapters(package, posixpath.dirname(place)):
            try:
                parts = read_html(_chapter(book, chapter), "")
            except (UnreadableError, DecodingError) as error:
                faults.append(Fault(f"chapter {chapter}", str(error)))
                continue
            chapters += [part.text for part in parts if isinstance(part, Part)]
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


def _chapter(book: zipfile.ZipFile, place: str) -> bytes:
    has_encrypted = _ENCRYPTION in book.namelist()
    if has_encrypted and place.encode() in book.read(_ENCRYPTION):
        raise UnreadableError("is encrypted")
    try:
        return book.read(place)
    except KeyError:
        raise UnreadableError("is not in the file") from None
