"""E-books: the chapters of an EPUB in their reading order."""

from __future__ import annotations

import posixpath
import zipfile
from collections.abc import Iterator
from urllib.parse import unquote
from xml.etree import ElementTree as ET

from blend_retrieval.decoding import DecodingError
from blend_retrieval.readers.base import Fault, Part, UnreadableError
from blend_retrieval.readers.html import read_html
from blend_retrieval.readers.zipped import opened_zip

_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"


def read_epub(data: bytes, title: str) -> list[Part | Fault]:
    """Read one document under the book's title. Chapters that cannot be read are faults."""
    with opened_zip(data) as book:
        try:
            container = ET.fromstring(book.read(_CONTAINER))
            place = next(container.iterfind(".//{*}rootfile")).attrib["full-path"]
            package = ET.fromstring(book.read(place))
        except (KeyError, StopIteration, ET.ParseError):
            raise UnreadableError("is no EPUB: it does not list its chapters") from None
        named = next((element.text for element in package.iter("{http://purl.org/dc/elements/1.1/}title")), None)
        chapters = []
        faults = []
        for chapter in _chapters(package, posixpath.dirname(place)):
            try:
                parts = read_html(_chapter(book, chapter), "")
            except (UnreadableError, DecodingError) as error:
                faults.append(Fault(f"chapter {chapter}", str(error)))
                continue
            chapters += [part.text for part in parts if isinstance(part, Part)]
    return [Part("", (named or "").strip() or title, "\n\n".join(chapters), "markdown"), *faults]


def _chapters(package: ET.Element, folder: str) -> Iterator[str]:
    """Places of the chapters in the archive."""
    places = {item.get("id"): item.get("href", "") for item in package.iterfind(".//{*}item")}
    for reference in package.iterfind(".//{*}itemref"):
        if place := places.get(reference.get("idref")):
            yield posixpath.normpath(posixpath.join(folder, unquote(place)))


def _chapter(book: zipfile.ZipFile, place: str) -> bytes:
    if _ENCRYPTION in book.namelist() and place.encode() in book.read(_ENCRYPTION):
        raise UnreadableError("is encrypted")
    try:
        return book.read(place)
    except KeyError:
        raise UnreadableError("is not in the file") from None
