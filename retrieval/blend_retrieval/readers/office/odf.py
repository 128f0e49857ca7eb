"""OpenDocument texts and presentations as Markdown, through HTML."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from xml.etree.ElementTree import Element

from blend_retrieval.readers.base import Fault, Part, Parts, UnreadableError
from blend_retrieval.readers.html.html import html_to_markdown
from blend_retrieval.readers.office.numbered import numbered_markdown
from blend_retrieval.readers.office.odf_html import DRAW, OFFICE, PRESENTATION, OdfHtml, styles_of
from blend_retrieval.readers.office.odf_lists import STYLE, TEXT
from blend_retrieval.readers.xml_trees import xml_root
from blend_retrieval.readers.zipped import Archive, opened_zip

_MANIFEST = "META-INF/manifest.xml"
_TITLE = ".//{http://purl.org/dc/elements/1.1/}title"
_MOST_NODES = 1_000_000  # elements and attributes of a part: HTML is made of them
_FEW = 2  # words such as "Page of"
_PAGE_FIELDS = (f"{TEXT}page-number", f"{TEXT}page-count")


class _File:
    """The parts of an OpenDocument file, and what its content says in HTML."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._embedded_nodes = 0
        if _MANIFEST in archive and b"encryption-data" in archive.read(_MANIFEST):
            raise UnreadableError("is encrypted; save it without a password")
        content = self.root("content.xml")
        body = None if content is None else content.find(f"{OFFICE}body")
        if body is None:
            raise UnreadableError("is no OpenDocument file: it has no content")
        self.body: Element = body
        self.styles = self.root("styles.xml")
        styles = styles_of(self.styles, content)
        self.html = OdfHtml(styles, self._embedded)
        self._frame_html = OdfHtml(styles_of(self.styles), self._embedded)  # other styles may have the same names

    def root(self, place: str) -> Element | None:
        """The root element of a part, or None."""
        name = posixpath.normpath(place)
        if name not in self._archive:
            return None
        content = self._archive.read(name)
        return xml_root(content, _MOST_NODES)

    def _embedded(self, place: str) -> Element | None:
        """The content of an object in the text. Raises `UnreadableError` if objects are named again and again."""
        root = self.root(f"{place}/content.xml")
        self._embedded_nodes += 0 if root is None else sum(1 for _ in root.iter())
        if self._embedded_nodes > _MOST_NODES:
            raise UnreadableError("names its embedded objects too often")
        return root

    def title(self) -> str:
        """The title among the file's properties, or ""."""
        meta = self.root("meta.xml")
        return "" if meta is None else (meta.findtext(_TITLE) or "").strip()

    def frame_lines(self, side: str) -> list[str]:
        """The distinct lines of the headers or the footers of pages, in HTML."""
        pages = [] if self.styles is None else self.styles.iter(f"{STYLE}master-page")
        lines: dict[str, None] = {}
        for page in pages:
            for frame in page.iterfind(f"{STYLE}{side}"):
                for paragraph in frame.iter(f"{TEXT}p"):
                    if _says_more_than_page(paragraph):
                        lines[self._frame_html.words(paragraph)] = None
        return list(lines)

    def document(self, html: str, title: str) -> Parts:
        """The document of this HTML, and what is not read."""
        heading, markdown = html_to_markdown(f"<body>{html}</body>")
        named = self.title() or numbered_markdown(heading) or title
        document = Part("", named, numbered_markdown(markdown), "markdown")
        return [document, *self._faults()]

    def _faults(self) -> Iterator[Fault]:
        for kind, count in self.html.unread.items():
            yield Fault(
                "",
                f"holds {count:,} {kind}{'s' if count > 1 else ''}, which {'are' if count > 1 else 'is'} not read",
                0,
            )
        for note in self.html.notes:
            yield Fault("", note, 0)


def _says_more_than_page(paragraph: Element) -> bool:
    """Whether a paragraph in a header or footer holds more than the number of a page."""
    words = _visible(paragraph).split()
    has_page = any(paragraph.find(f".//{field}") is not None for field in _PAGE_FIELDS)
    is_page_number = has_page and len(words) <= _FEW
    return any(map(str.isalnum, "".join(words))) and not is_page_number


def _visible(element: Element) -> str:
    """The text of a header or footer, without the numbers of pages."""
    texts = [element.text or ""]
    for child in element:
        if child.tag not in _PAGE_FIELDS:
            texts.append(" " if child.tag in (f"{TEXT}s", f"{TEXT}tab") else _visible(child))
        texts.append(child.tail or "")
    return "".join(texts)


def read_odt(data: bytes, title: str) -> Parts:
    """Read a text under its own title, with numbers of lists, notes, comments, forms, headers and footers."""
    with opened_zip(data) as archive:
        file = _File(archive)
        frames = ["".join(f"<p>{line}</p>" for line in file.frame_lines(side)) for side in ("header", "footer")]
        content = file.html.body(file.body)
        return file.document(f"{frames[0]}{content}{frames[1]}", title)


def read_odp(data: bytes, title: str) -> Parts:
    """Read the slides as sections, with their notes."""
    with opened_zip(data) as archive:
        file = _File(archive)
        pages = file.body.iter(f"{DRAW}page")
        slides = [_slide(file.html, page) for page in pages]
        return file.document("".join(slides), title)


def _slide(html: OdfHtml, page: Element) -> str:
    """A slide: its title, what stands on it, and its notes."""
    heading: list[str] = []
    texts = []
    notes: list[str] = []
    for shape in page:
        kind = shape.get(f"{PRESENTATION}class")
        if shape.tag == f"{PRESENTATION}notes":
            notes += _notes(html, shape)
        elif kind == "title":
            heading.append(html.words(shape).replace("<br>", " "))
        else:
            wrapper = Element("shape")
            wrapper.append(shape)
            texts.append(html.body(wrapper))
    title = " ".join(heading).strip()
    head = f"<h2>{title}</h2>" if title else ""
    shown = [f"<div>{text}</div>" for text in texts + notes]
    return head + "".join(shown)


def _notes(html: OdfHtml, page: Element) -> Iterator[str]:
    for frame in page:
        if frame.get(f"{PRESENTATION}class") == "notes":
            yield html.body(frame)
