"""A Word file with everything that a reader of the page sees written into its text.

The library that converts the result, mammoth, knows neither numbers of lists nor fields without a stored text, nor formulas,
headers, footers and comments.
"""

from __future__ import annotations

import io
import posixpath
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from xml.etree import ElementTree as ET
from xml.etree.ElementTree import Element

from blend_retrieval.readers.base import Fault, UnreadableError
from blend_retrieval.readers.office.docx_bounds import check_fields, check_paragraphs
from blend_retrieval.readers.office.docx_formulas import MATH, linear
from blend_retrieval.readers.office.docx_numbers import WORD, Numbers, is_on, value
from blend_retrieval.readers.office.docx_styles import RunLooks
from blend_retrieval.readers.office.numbered import marked_number, without_marks
from blend_retrieval.readers.office.picture_texts import drawing_texts
from blend_retrieval.readers.office.text_marks import Stretch, marked
from blend_retrieval.readers.xml_trees import MOST_CHARACTERS, check_xml, xml_root
from blend_retrieval.readers.zipped import Archive

_WORD_2010 = "{http://schemas.microsoft.com/office/word/2010/wordml}"
_COMPATIBLE = "{http://schemas.openxmlformats.org/markup-compatibility/2006}"
_RELATION = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}id"
_STRICT = (
    (
        b"http://purl.oclc.org/ooxml/wordprocessingml/main",
        b"http://schemas.openxmlformats.org/wordprocessingml/2006/main",
    ),
    (b"http://purl.oclc.org/ooxml/officeDocument/math", b"http://schemas.openxmlformats.org/officeDocument/2006/math"),
    (
        b"http://purl.oclc.org/ooxml/officeDocument/relationships",
        b"http://schemas.openxmlformats.org/officeDocument/2006/relationships",
    ),
)
_MAIN = "word/document.xml"
_PAGE_FIELDS = ("PAGE", "NUMPAGES", "SECTIONPAGES")
_WITHOUT_RESULT = ("FORMCHECKBOX", "FORMDROPDOWN")
_MEDIA = "word/media/"
_MOST_NODES = 1_000_000  # elements and attributes of a part; mammoth's trees are large
_PICTURE = "{http://schemas.openxmlformats.org/drawingml/2006/main}blip"
_CONTENTS = {
    "{http://schemas.openxmlformats.org/drawingml/2006/chart}chart": "chart",
    "{http://schemas.microsoft.com/office/drawing/2014/chartex}chart": "chart",
    "{http://schemas.openxmlformats.org/drawingml/2006/diagram}relIds": "diagram",
    "{urn:schemas-microsoft-com:office:office}OLEObject": "embedded object",
    f"{WORD}control": "ActiveX control",
}
_NOTE_REFERENCES = (f"{WORD}footnoteReference", f"{WORD}endnoteReference")
_HEADING_LEVELS = 6
_DIRECT_LOOKS = RunLooks(None)


Elements = Iterable[Element]
"""What stands in the place of an element."""


class Package:
    """The parts of a Word file, and the relations between them."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.main = _MAIN
        for _, kind, target in self.relations(""):
            if kind == "officeDocument":
                self.main = target

    def root(self, name: str) -> Element | None:
        """The root element of a part, in the transitional format; None if there is no such part."""
        if name not in self.archive:
            return None
        content = self.archive.read(name)
        for strict, transitional in _STRICT:
            content = content.replace(strict, transitional)
        return xml_root(content, _MOST_NODES)

    def relations(self, part: str) -> Iterator[tuple[str, str, str]]:
        """The id, the kind (such as "header") and the target of each relation of a part."""
        folder, name = posixpath.split(part)
        root = self.root(posixpath.join(folder, "_rels", f"{name}.rels"))
        for relation in root if root is not None else ():
            target = relation.get("Target", "")
            place = posixpath.normpath(posixpath.join(f"/{folder}", target))
            kind = posixpath.basename(relation.get("Type", ""))
            yield relation.get("Id", ""), kind, place.lstrip("/")

    def related(self, kind: str) -> str:
        """The part of this kind that the document names, or ""."""
        for _, name, target in self.relations(self.main):
            if name == kind:
                return target
        return ""

    def with_parts(self, parts: dict[str, Element]) -> bytes:
        """The file with these parts in the place of its own, without media."""
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w") as copy:
            for name in sorted(self.archive.names()):
                if name in parts:
                    content = ET.tostring(parts[name], "utf-8", xml_declaration=True)
                    copy.writestr(name, content)
                elif not name.startswith(_MEDIA):
                    content = self.archive.read(name)
                    check_xml(content, _MOST_NODES)  # of media it is no XML from the start
                    copy.writestr(name, content)
        return data.getvalue()


def _run(text: str) -> Element:
    run = Element(f"{WORD}r")
    run.append(_text(text))
    return run


def _text(text: str) -> Element:
    element = Element(f"{WORD}t", {"{http://www.w3.org/XML/1998/namespace}space": "preserve"})
    element.text = text
    return element


def _paragraph(text: str) -> Element:
    paragraph = Element(f"{WORD}p")
    paragraph.append(_run(text))
    return paragraph


class WordText:
    """Rewrites the parts of a document, and counts what is not read."""

    def __init__(self, package: Package) -> None:
        self._package = package
        numbering = package.root(package.related("numbering"))
        self._styles = package.root(package.related("styles"))
        self._numbers = Numbers(numbering, self._styles)
        self._looks = RunLooks(self._styles)
        self._paragraph_style: str | None = None
        self._comments = self._read_comments()
        self._unread: Counter[str] = Counter()
        self._notes: dict[str, None] = {}
        self._written = 0
        self._frames: dict[str, list[str]] = {}
        self._rewriters: dict[str, Callable[[Element], Elements]] = {
            f"{_COMPATIBLE}AlternateContent": self._alternative,
            f"{MATH}oMath": self._formula,
            f"{MATH}oMathPara": self._inside,
            f"{WORD}p": self._numbered,
            f"{WORD}r": self._visible,
            f"{WORD}sdt": self._control,
            f"{WORD}fldChar": self._form_field,
            f"{WORD}instrText": self._instruction,
            f"{WORD}fldSimple": self._inside,
            f"{WORD}dir": self._inside,
            f"{WORD}bdo": self._inside,
            f"{WORD}ruby": self._ruby,
            f"{WORD}cr": lambda element: [Element(f"{WORD}br")],
            f"{WORD}ptab": lambda element: [Element(f"{WORD}tab")],
            f"{WORD}drawing": self._drawing,
            f"{WORD}pict": self._object,
            f"{WORD}object": self._object,
            f"{WORD}del": self._deleted,
            f"{WORD}commentReference": self._comment,
            f"{WORD}bookmarkStart": lambda element: [],
            f"{WORD}bookmarkEnd": lambda element: [],
        }

    def prepared(self) -> bytes:
        """The file for mammoth."""
        package = self._package
        parts = {}
        notes = [package.related(kind) for kind in ("footnotes", "endnotes")]
        for name in (package.main, *notes):
            root = package.root(name)
            if root is not None:
                self._rewrite_children(root)
                check_fields(root)
                check_paragraphs(root)
                parts[name] = root
        if package.main in parts:
            self._count_notes(parts[package.main], [parts[name] for name in notes if name in parts])
        body = parts[package.main].find(f"{WORD}body") if package.main in parts else None
        if body is not None:
            headers, footers = self._page_frames(body)
            for place, text in enumerate(headers):
                body.insert(place, _paragraph(text))
            body.extend(map(_paragraph, footers))
        return package.with_parts(parts)

    def heading_styles(self) -> Iterator[str]:
        """Rules for mammoth: styles of the document's own that are headings."""
        for style in self._styles if self._styles is not None else ():
            name = style.get(f"{WORD}styleId", "")
            if style.get(f"{WORD}type") != "paragraph":
                continue
            depth = self._numbers.outline_level(name)
            shown_name = value(style, "name") or ""
            is_usual = shown_name.lower().startswith(("heading ", "toc", "title"))
            is_plain = name.replace("-", "").isalnum()
            if depth is None or is_usual or not is_plain:
                continue
            if depth < _HEADING_LEVELS:
                yield f"p.{name} => h{depth + 1}:fresh"

    def faults(self) -> Iterator[Fault]:
        """What is not read of the document, after `prepared`."""
        for kind, count in self._unread.items():
            yield Fault(
                "",
                f"holds {count:,} {kind}{'s' if count > 1 else ''}, which {'are' if count > 1 else 'is'} not read",
                0,
            )
        for note in self._notes:
            yield Fault("", note, 0)
        for kind in sorted(self._numbers.unknown_formats):
            yield Fault("", f"has lists in the numerals {kind}, which are read as decimal numbers", 0)

    def _count_notes(self, body: Element, roots: list[Element]) -> None:
        """Count the notes as text that is written: each stands once for every sign that names it."""
        lengths: Counter[str] = Counter()
        for root in roots:
            for note in root:
                lengths[note.get(f"{WORD}id", "")] += sum(map(len, note.itertext()))
        for tag in _NOTE_REFERENCES:
            for reference in body.iter(tag):
                self._written += lengths[reference.get(f"{WORD}id", "")]
        self._count_written("")

    def _count_written(self, text: str) -> None:
        self._written += len(text)
        if self._written > MOST_CHARACTERS:
            raise UnreadableError(f"holds more than {MOST_CHARACTERS:,} characters of text: divide it")

    def _rewritten(self, element: Element) -> Elements:
        rewrite = self._rewriters.get(element.tag)
        if rewrite is not None:
            return rewrite(element)
        self._rewrite_children(element)
        return [element]

    def _rewrite_children(self, element: Element) -> None:
        element[:] = list(self._inside(element))

    def _inside(self, element: Element) -> Elements:
        """The rewritten children of an element."""
        return list(chain.from_iterable(map(self._rewritten, element)))

    def _alternative(self, element: Element) -> Elements:
        """What Word shows: a text box by its new description, everything else by the old one that mammoth knows."""
        choice = element.find(f"{_COMPATIBLE}Choice")
        fallback = element.find(f"{_COMPATIBLE}Fallback")
        if choice is None:
            shown = fallback
        else:
            has_box = choice.find(f".//{WORD}txbxContent") is not None
            shown = choice if has_box or fallback is None else fallback
        if shown is None:
            return ()
        hidden = [] if shown is choice or choice is None else _picture_texts(choice, [])
        texts = [text for text in hidden if text not in _picture_texts(shown, [])]
        return [*self._inside(shown), *map(_text, texts)]

    def _formula(self, element: Element) -> Elements:
        return [_run(linear(element).strip())]

    def _numbered(self, paragraph: Element) -> Elements:
        properties = paragraph.find(f"{WORD}pPr")
        mark = None if properties is None else properties.find(f"{WORD}rPr")
        is_gone = mark is not None and _is_gone(mark)
        number = None if is_gone else self._numbers.next_number(paragraph)
        outer_style = self._paragraph_style
        self._paragraph_style = value(properties, "pStyle")
        self._rewrite_children(paragraph)
        self._paragraph_style = outer_style
        if number is not None:
            self._count_written(number)
            place = 0 if properties is None else 1
            paragraph.insert(place, _run(marked_number(number)))
        return [paragraph]

    def _visible(self, run: Element) -> Elements:
        look = self._looks.of(run, self._paragraph_style)
        if look.is_hidden:
            if any(text.text for text in run.iter(f"{WORD}t")):
                self._notes["its hidden text is not read"] = None
            return ()
        if any(text.text for text in run.iter(f"{WORD}t")):
            look.write_to(run)
        self._rewrite_children(run)
        return [run]

    def _control(self, control: Element) -> Elements:
        """A content control: a box as [x] or [ ], everything else as the text that it shows."""
        content = control.find(f"{WORD}sdtContent")
        box = control.find(f"{WORD}sdtPr/{_WORD_2010}checkbox")
        if content is None:
            return ()
        if box is None:
            return self._inside(content)
        checked = box.find(f"{_WORD_2010}checked")
        state = "0" if checked is None else checked.get(f"{_WORD_2010}val", "1")
        sign = "[ ]" if state in ("0", "false") else "[x]"
        run = next(content.iter(f"{WORD}r"), None)
        if run is None:
            return [_run(sign)]
        signs = [*run.iter(f"{WORD}t"), *run.iter(f"{WORD}sym")]
        for element in signs:
            run.remove(element)
        run.append(_text(sign))
        return self._inside(content)

    def _form_field(self, element: Element) -> Elements:
        """A field of an old form: the state of a box, the chosen entry of a list."""
        form = element.find(f"{WORD}ffData")
        if form is None:
            return [element]
        box = form.find(f"{WORD}checkBox")
        entries = form.find(f"{WORD}ddList")
        if box is not None:
            state = box.find(f"{WORD}checked")
            state = box.find(f"{WORD}default") if state is None else state
            return [element, _text("[x]" if is_on(state) else "[ ]")]
        if entries is not None:
            chosen = value(entries, "result") or value(entries, "default")
            place = int(chosen or "0")
            names = [value(entry) or "" for entry in entries.iterfind(f"{WORD}listEntry")]
            name = names[place] if place < len(names) else ""
            return [element, _text(name)]
        return [element]

    def _instruction(self, element: Element) -> Elements:
        is_form = (element.text or "").strip().startswith(_WITHOUT_RESULT)
        return () if is_form else [element]

    def _ruby(self, element: Element) -> Elements:
        """Text with its reading behind it."""
        reading = _plain(element.find(f"{WORD}rt"))
        runs = element.findall(f"{WORD}rubyBase/{WORD}r")
        inside = list(chain.from_iterable(runs))
        texts = [inner for inner in inside if inner.tag != f"{WORD}rPr"]
        return [*texts, _text(f"({reading})")]

    def _drawing(self, element: Element) -> Elements:
        boxes = list(_outermost(element, f"{WORD}txbxContent"))
        self._count_unread(element, boxes)
        texts = _picture_texts(element, boxes)
        if not boxes:
            return [element, *map(_text, texts)]
        picture = Element(f"{WORD}pict")
        for box in boxes:
            picture.extend(self._inside(box))
        return [*map(_text, texts), picture]

    def _object(self, element: Element) -> Elements:
        self._count_unread(element, [])
        boxes = list(_outermost(element, f"{WORD}txbxContent"))
        texts = _picture_texts(element, boxes)
        self._rewrite_children(element)
        return [element, *map(_text, texts)]

    def _count_unread(self, element: Element, boxes: Elements) -> None:
        inside = {id(inner) for box in boxes for inner in box.iter()}
        for inner in element.iter():
            if id(inner) in inside:
                continue
            if inner.tag in (_PICTURE, "{urn:schemas-microsoft-com:vml}imagedata"):
                self._unread["picture"] += 1
            elif inner.tag in _CONTENTS:
                self._unread[_CONTENTS[inner.tag]] += 1

    def _deleted(self, element: Element) -> Elements:
        if element.find(f".//{WORD}delText") is not None:
            self._notes["its deleted text (tracked changes) is not read"] = None
        return [element]

    def _comment(self, element: Element) -> Elements:
        comment = self._comments.get(element.get(f"{WORD}id", ""))
        self._count_written(comment or "")
        return [_text(f" [{comment}]")] if comment else ()

    def _read_comments(self) -> dict[str, str]:
        root = self._package.root(self._package.related("comments"))
        comments = {}
        for run in root.iter(f"{WORD}r") if root is not None else ():
            self._looks.of(run).write_to(run)
        for comment in root if root is not None else ():
            author = comment.get(f"{WORD}author", "").strip()
            paragraphs = map(_plain, comment.iter(f"{WORD}p"))
            text = " ".join(filter(None, paragraphs))
            name = comment.get(f"{WORD}id", "")
            by = f" by {author}" if author else ""
            if text:
                comments[name] = f"comment{by}: {text}"
        return comments

    def _page_frames(self, body: Element) -> tuple[list[str], list[str]]:
        """The distinct lines of the headers, and those of the footers."""
        relations = self._package.relations(self._package.main)
        places = {name: target for name, _, target in relations}
        settings = self._package.root(self._package.related("settings"))
        has_even = settings is not None and is_on(settings.find(f"{WORD}evenAndOddHeaders"))
        lines: dict[str, dict[str, None]] = {}
        lines["header"] = {}
        lines["footer"] = {}
        for section in body.iter(f"{WORD}sectPr"):
            shown = {"default": True, "even": has_even, "first": is_on(section.find(f"{WORD}titlePg"))}
            for side in lines:
                for reference in section.iterfind(f"{WORD}{side}Reference"):
                    place = places.get(reference.get(_RELATION, ""), "")
                    kind = reference.get(f"{WORD}type", "default")
                    if shown.get(kind, False):
                        lines[side] |= dict.fromkeys(self._lines_of_frame(place))
        return list(lines["header"]), list(lines["footer"])

    def _lines_of_frame(self, place: str) -> list[str]:
        if place not in self._frames:
            root = self._package.root(place)
            self._frames[place] = [] if root is None else list(self._frame_lines(root))
        return self._frames[place]

    def _frame_lines(self, root: Element) -> Iterator[str]:
        self._rewrite_children(root)
        for element in root:
            lines = []
            for row in element.iter(f"{WORD}tr"):
                cells = map(_plain, row.iter(f"{WORD}tc"))
                lines.append(" | ".join(filter(None, cells)))
            if element.tag != f"{WORD}tbl":
                lines = [_plain(element)]
            for line in lines:
                text = without_marks(line)
                if any(map(str.isalnum, text)) and not _is_page_number(text, element):
                    yield text


def _picture_texts(element: Element, boxes: Elements) -> list[str]:
    """The distinct texts in the place of pictures, charts and shapes, without those inside boxes of text."""
    inside = Counter(text for box in boxes for text in drawing_texts(box))
    texts = Counter(drawing_texts(element)) - inside
    return list(texts)


def _is_gone(mark: Element) -> bool:
    """Whether the end of a paragraph is deleted, or moved away."""
    return mark.find(f"{WORD}del") is not None or mark.find(f"{WORD}moveFrom") is not None


def _outermost(element: Element, tag: str) -> Iterator[Element]:
    for child in element:
        if child.tag == tag:
            yield child
        else:
            yield from _outermost(child, tag)


def _plain(element: Element | None) -> str:
    """The text of an element in one line, without the numbers of pages, which nobody knows before printing."""
    words: list[Stretch] = []
    instruction = ""
    mark = ""
    is_result = False
    for inner in element.iter() if element is not None else ():
        if inner.tag == f"{WORD}fldChar":
            kind = inner.get(f"{WORD}fldCharType")
            instruction = "" if kind == "begin" else instruction
            is_result = kind == "separate"
        elif inner.tag == f"{WORD}instrText":
            instruction += inner.text or ""
        elif inner.tag == f"{WORD}t":
            if not (is_result and _is_page_field(instruction)):
                words.append(Stretch(inner.text or "", mark))
        elif inner.tag == f"{WORD}r":
            mark = _DIRECT_LOOKS.of(inner).marks
        elif inner.tag in (f"{WORD}tab", f"{WORD}br", f"{WORD}p"):
            words.append(Stretch(" ", ""))
    return " ".join(marked(words).split())


def _is_page_field(instruction: str) -> bool:
    return (instruction.split() or [""])[0].upper() in _PAGE_FIELDS


def _is_page_number(text: str, element: Element) -> bool:
    """Whether a line holds a number of a page and at most a few words such as "Page of"."""
    fields = [instruction.text or "" for instruction in element.iter(f"{WORD}instrText")]
    return any(map(_is_page_field, fields)) and len(text.split()) <= 2
