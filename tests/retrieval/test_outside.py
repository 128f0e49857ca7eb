"""Documents that name files and addresses outside of themselves: nothing outside is read.

Each document names a canary file in several ways (beside it, by its full path, above it), and a server on this machine.
Its own words are read; the canary's are not, and the server is never asked.
"""

import io
import json
import re
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer

import pytest
from office_files import docx, epub, paragraph, zipped_files
from pptx import Presentation
from sheet_files import xlsx

from blend_retrieval.errors import DocumentsError
from blend_retrieval.loading import load_documents

_CANARY = "pelican 48151623"
_OWN = "The gate opens at dawn."
_RELATIONS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006/relationships"
_DRAWING = "http://schemas.openxmlformats.org/drawingml/2006/main"
_PLACED = "http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing"
_PICTURE = "http://schemas.openxmlformats.org/drawingml/2006/picture"
_ODF = "urn:oasis:names:tc:opendocument:xmlns"
_XLINK = 'xmlns:xlink="http://www.w3.org/1999/xlink"'


_OPENED: list[str] = []


def _note_opened(event: str, arguments: tuple[object, ...]) -> None:
    """Note each canary that is opened: a text that is read and dropped is read, too."""
    if event == "open" and str(arguments[0]).endswith(("canary.txt", "/etc/passwd")):
        _OPENED.append(str(arguments[0]))


sys.addaudithook(_note_opened)


@dataclass
class Outside:
    """A canary file, and a server that counts its connections."""

    canary: Path
    url: str
    asked: list[bytes] = field(default_factory=list)

    def places(self) -> list[str]:
        """Names of the canary for a document in the folder `documents` beside it, and of the server."""
        full = str(self.canary)
        above = f"../{self.canary.name}"
        return [full, above, above.replace("/", "\\"), f"../../{above}", f"file://{full}", f"{self.url}/canary"]


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    canary = tmp_path / "canary.txt"
    canary.write_text(_CANARY)
    asked: list[bytes] = []
    _OPENED.clear()

    class Canary(BaseRequestHandler):
        def handle(self) -> None:
            asked.append(self.request.recv(1000))
            self.request.sendall(f"HTTP/1.0 200 OK\r\n\r\n{_CANARY}".encode())

    with ThreadingTCPServer(("127.0.0.1", 0), Canary) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Outside(canary, f"http://127.0.0.1:{server.server_address[1]}", asked)
        server.shutdown()
        thread.join()


def _with_files(data: bytes, **files: str) -> bytes:
    """An archive with more files, or others under the same names."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        contents: dict[str, str | bytes] = {name: archive.read(name) for name in archive.namelist()}
    return zipped_files({**contents, **files})


def _relationships(places: list[str], kinds: tuple[str, ...], modes: tuple[str, ...] = ("External", "Internal")) -> str:
    """Relations of each kind to each place, as links to the outside and as parts of the archive."""
    lines = [
        f'<Relationship Id="{kind}{number}{mode}" Type="{_RELATIONS}/{kind}" Target="{place}" TargetMode="{mode}"/>'
        for kind in kinds
        for number, place in enumerate(places)
        for mode in modes
    ]
    return f'<Relationships xmlns="{_PACKAGE}">{"".join(lines)}</Relationships>'


def _members(places: list[str]) -> dict[str, str]:
    """Members of an archive that have the names of files outside."""
    return dict.fromkeys(places, "<a>a member</a>") | {"/etc/passwd": "a member"}


def _word(places: list[str]) -> bytes:
    kinds = (
        "aFChunk",
        "image",
        "header",
        "footnotes",
        "comments",
        "subDocument",
        "attachedTemplate",
        "styles",
        "hyperlink",
    )
    relation = f'xmlns:r="{_RELATIONS}" xmlns:a="{_DRAWING}"'
    references = "".join(
        f'<w:altChunk {relation} r:id="aFChunk{number}{mode}"/>'
        f'<w:p><w:subDoc {relation} r:id="subDocument{number}{mode}"/><w:r><w:drawing>'
        f'<wp:inline xmlns:wp="{_PLACED}"><a:graphic {relation}><a:graphicData><pic:pic xmlns:pic="{_PICTURE}"><pic:blipFill>'
        f'<a:blip {"r:link" if mode == "External" else "r:embed"}="image{number}{mode}"/></pic:blipFill></pic:pic>'
        "</a:graphicData></a:graphic></wp:inline></w:drawing></w:r></w:p>"
        f'<w:p><w:r><w:fldChar w:fldCharType="begin"/></w:r><w:r><w:instrText>INCLUDETEXT "{place}"</w:instrText></w:r>'
        '<w:r><w:fldChar w:fldCharType="end"/></w:r></w:p>'
        for number, place in enumerate(places)
        for mode in ("External", "Internal")
    )
    relations = _relationships(places, kinds)
    return _with_files(
        docx(paragraph(_OWN) + references), **{"word/_rels/document.xml.rels": relations}, **_members(places)
    )


def _slides(places: list[str], mode: str = "External") -> bytes:
    """Slides with linked pictures, notes, layouts and other slides."""
    presentation = Presentation()
    slide = presentation.slides.add_slide(presentation.slide_layouts[6])
    slide.shapes.add_textbox(0, 0, 100, 100).text_frame.text = _OWN
    data = io.BytesIO()
    presentation.save(data)
    kinds = ("image", "diagramData", "chart", "comments", "audio", "oleObject", "hyperlink")
    linked = "".join(
        f'<p:pic xmlns:r="{_RELATIONS}"><p:nvPicPr><p:cNvPr id="{number + 50}" name="n"/><p:cNvPicPr/><p:nvPr/></p:nvPicPr>'
        f'<p:blipFill><a:blip r:link="image{number}{mode}" r:embed="image{number}{mode}"/></p:blipFill><p:spPr/></p:pic>'
        for number in range(len(places))
    )
    with zipfile.ZipFile(data) as archive:
        page = archive.read("ppt/slides/slide1.xml").decode()
        relations = archive.read("ppt/slides/_rels/slide1.xml.rels").decode()
    ending = "</Relationships>"
    added = _relationships(places, kinds, (mode,)).split(">", 1)[1]
    files = {
        "ppt/slides/slide1.xml": page.replace("</p:spTree>", f"{linked}</p:spTree>"),
        "ppt/slides/_rels/slide1.xml.rels": relations.replace(ending, added),
    }
    return _with_files(data.getvalue(), **files, **_members(places))


def _workbook(places: list[str]) -> bytes:
    formula = "".join(f'<c t="str"><f>WEBSERVICE("{place}")+\'[{place}]S\'!A1</f></c>' for place in places)
    cells = f'<sheetData><row><c t="inlineStr"><is><t>{_OWN}</t></is></c>{formula}</row></sheetData>'
    links = _relationships(places, ("externalLinkPath", "externalLinkPath"))
    more = {"xl/externalLinks/_rels/externalLink1.xml.rels": links, **_members(places)}
    relations = {f"x{number}": ("comments", place) for number, place in enumerate(places)}
    return xlsx(cells, more=more, sheet_relations=relations)


def _open_document(kind: str, places: list[str]) -> bytes:
    """An OpenDocument file with linked sections, pictures, objects and tables."""
    names = {"office": "office", "table": "table", "text": "text", "draw": "drawing"}
    declared = " ".join(f'xmlns:{prefix}="{_ODF}:{name}:1.0"' for prefix, name in names.items())
    links = "".join(
        f'<text:section text:name="s{number}"><text:section-source xlink:href="{place}"/></text:section>'
        f'<text:p><draw:frame><draw:image xlink:href="{place}"/><draw:object xlink:href="{place}"/></draw:frame></text:p>'
        for number, place in enumerate(places)
    )
    body = f"<office:text><text:p>{_OWN}</text:p>{links}</office:text>"
    if kind == "ods":
        sources = "".join(f'<table:table-source xlink:href="{place}"/>' for place in places)
        row = f"<table:table-row><table:table-cell><text:p>{_OWN}</text:p></table:table-cell></table:table-row>"
        body = f'<office:spreadsheet><table:table table:name="S">{sources}{row}</table:table></office:spreadsheet>'
    if kind == "odp":
        box = f"<draw:frame><draw:text-box><text:p>{_OWN}</text:p>{links}</draw:text-box></draw:frame>"
        body = f'<office:presentation><draw:page draw:name="P">{box}</draw:page></office:presentation>'
    content = (
        f"<office:document-content {declared} {_XLINK}><office:body>{body}</office:body></office:document-content>"
    )
    kinds = {"odt": "text", "ods": "spreadsheet", "odp": "presentation"}
    mime = f"application/vnd.oasis.opendocument.{kinds[kind]}"
    return zipped_files({"mimetype": mime, "content.xml": content, **_members(places)})


def _page(places: list[str], begin: str = "") -> str:
    links = "".join(
        f'<img src="{place}" alt=""/><iframe src="{place}"></iframe><object data="{place}"></object>'
        f'<embed src="{place}"/><script src="{place}"></script><link rel="stylesheet" href="{place}"/>'
        f'<x:include xmlns:x="http://www.w3.org/2001/XInclude" href="{place}" parse="text"/><a href="{place}"></a>'
        for place in places
    )
    return f'{begin}<html xmlns="http://www.w3.org/1999/xhtml"><body><p>{_OWN}</p>{links}</body></html>'


def _book(places: list[str]) -> bytes:
    """An e-book whose list of files and whose reading order go outside of it."""
    members = {f"OEBPS/{place}": _page([place]) for place in places}
    chapters = {"one": _page(places)} | dict.fromkeys(places)
    book = epub(chapters, **members)
    items = "".join(f'<item id="i{number}" href="{place}"/>' for number, place in enumerate([*places, "/etc/passwd"]))
    order = "".join(f'<itemref idref="i{number}"/>' for number in range(len(places) + 1))
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf"><metadata/><manifest><item id="one" href="one.xhtml"/>'
        f'{items}</manifest><spine><itemref idref="one"/>{order}</spine></package>'
    )
    return _with_files(book, **{"OEBPS/book.opf": package})


def _plain(line: str, places: list[str]) -> bytes:
    """Lines that include each of these places."""
    lines = "\n\n".join(line.replace("PLACE", place) for place in places)
    return f"{_OWN}\n\n{lines}\n\n{_OWN}\n".encode()


def _notebook(places: list[str]) -> bytes:
    markdown = "\n".join(f"![]({place}) <img src='{place}'>" for place in places)
    code = "\n".join(f"%load {place}\n!cat {place}\nopen({place!r})" for place in places)
    cells = [
        {"cell_type": "markdown", "source": f"{_OWN}\n{markdown}", "metadata": {}},
        {"cell_type": "code", "source": code, "metadata": {}, "outputs": []},
    ]
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}).encode()


def _mail(places: list[str]) -> bytes:
    bodies = "".join(
        f'--b\nContent-Type: message/external-body; access-type={access}; name="{place}"; URL="{place}"; '
        f'directory="/"; site="127.0.0.1"\n\nContent-Type: text/plain\n\n\n'
        for place in places
        for access in ("local-file", "anon-ftp", "URL")
    )
    page = f"--b\nContent-Type: text/html\nContent-Location: {places[0]}\n\n{_page(places)}\n"
    return f'Content-Type: multipart/mixed; boundary="b"\nSubject: Gate\n\n{page}{bodies}--b--\n'.encode()


_RST = """.. include:: PLACE

.. include:: PLACE
   :literal:

.. raw:: html
   :file: PLACE

.. raw:: html
   :url: PLACE

.. csv-table::
   :file: PLACE

.. csv-table::
   :url: PLACE

.. literalinclude:: PLACE

.. figure:: PLACE"""
_ORG = '#+INCLUDE: "PLACE"\n#+SETUPFILE: PLACE\n[[file:PLACE]]'
_ADOC = "include::PLACE[]\n\n[source]\n----\ninclude::PLACE[]\n----\n\nimage::PLACE[]"
_TEX = r"\input{PLACE} \include{PLACE} \lstinputlisting{PLACE} \verbatiminput{PLACE} \includegraphics{PLACE}"
_FORMATS = {
    "docx": _word,
    "pptx": _slides,
    "xlsx": _workbook,
    "odt": lambda places: _open_document("odt", places),
    "ods": lambda places: _open_document("ods", places),
    "odp": lambda places: _open_document("odp", places),
    "epub": _book,
    "html": lambda places: _page(places).encode(),
    "xhtml": lambda places: _page(places).encode(),
    "rst": lambda places: _plain(_RST, places),
    "adoc": lambda places: _plain(_ADOC, places),
    "tex": lambda places: _plain(_TEX, places),
    "org": lambda places: _plain(_ORG, places),
    "md": lambda places: _plain('![](PLACE) <!--#include file="PLACE" --> {{< include PLACE >}}', places),
    "ipynb": _notebook,
    "eml": _mail,
}


def _read(kind: str, data: bytes, outside: Outside) -> str:
    """The text of a document in a folder beside the canary. Nothing outside is read, and no member leaves the archive."""
    path = outside.canary.parent / "documents" / f"gate.{kind}"
    path.parent.mkdir()
    path.write_bytes(data)
    before = set(outside.canary.parent.rglob("*"))
    try:
        loaded = load_documents(path.parent)
        texts = "\n".join(document.text for document in loaded.documents)
        reasons = "\n".join(fault.reason for fault in loaded.skipped)
    except DocumentsError as error:
        texts, reasons = "", str(error)
    assert not [secret for secret in (_CANARY, "root:") if secret in texts + reasons]
    assert (outside.asked, _OPENED) == ([], [])
    assert set(outside.canary.parent.rglob("*")) == before
    return texts


@pytest.mark.parametrize("kind", _FORMATS)
def test_a_document_reads_no_file_and_no_address_that_it_names(kind: str, outside: Outside) -> None:
    assert _OWN in _read(kind, _FORMATS[kind](outside.places()), outside)


def test_slides_whose_parts_lie_outside_of_the_file(outside: Outside) -> None:
    _read("pptx", _slides(outside.places(), "Internal"), outside)


def _with_entities(text: str, declared: str, entities: str) -> str:
    """An XML text with a document type that declares these entities, and a reference to each of them in its text."""
    begin, text = ("", text) if not text.startswith("<?xml") else tuple(text.split("?>", 1))
    root = re.search(r"<([\w:.-]+)", text)
    assert root is not None
    close = "?>" if begin else ""
    return f"{begin}{close}<!DOCTYPE {root[1]} {declared}>{text.lstrip().replace(_OWN, _OWN + entities)}"


_XML = ("docx", "pptx", "xlsx", "odt", "ods", "odp", "epub", "html", "xhtml", "fods")


@pytest.mark.parametrize("way", ["entities", "parameters", "document type", "public document type"])
@pytest.mark.parametrize("kind", _XML)
def test_external_entities_and_document_types_are_not_read(kind: str, way: str, outside: Outside) -> None:
    """Each part of the archive declares them. A file that needs them may be unreadable as a whole."""
    places = [place.replace("\\", "/") for place in outside.places()]
    names = range(len(places))
    entities = "".join(f"&e{name};" for name in names)
    if way == "entities":
        lines = "".join(f'<!ENTITY e{name} SYSTEM "{place}">' for name, place in zip(names, places, strict=True))
        declared = f"[{lines}]"
    elif way == "parameters":
        lines = "".join(
            f'<!ENTITY % p{name} SYSTEM "{place}"> %p{name};' for name, place in zip(names, places, strict=True)
        )
        declared = f"[{lines}]"
    else:
        system = places[-1]
        declared = (
            f'PUBLIC "-//W3C//DTD XHTML 1.1//EN" "{system}"' if way.startswith("public") else f'SYSTEM "{system}"'
        )
    references = entities if way == "entities" else ""
    texts = _read(kind, _declared(kind, declared, references), outside)
    if way != "entities" and kind not in ("docx", "pptx"):
        assert _OWN in texts


def _declared(kind: str, declared: str, references: str) -> bytes:
    """A document of which each XML part has this document type, and these references in its text."""
    if kind == "fods":
        with zipfile.ZipFile(io.BytesIO(_open_document("ods", []))) as archive:
            text = archive.read("content.xml").decode().replace("document-content", "document")
        return _with_entities(text, declared, references).encode()
    data = _FORMATS[kind]([])
    if not data.startswith(b"PK"):
        return _with_entities(data.decode(), declared, references).encode()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    changed = {
        name: _with_entities(content.decode(), declared, references)
        for name, content in parts.items()
        if content.startswith(b"<")
    }
    return zipped_files({**parts, **changed})
