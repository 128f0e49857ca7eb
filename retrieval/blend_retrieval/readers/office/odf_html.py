"""The content of an OpenDocument file as HTML."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from html import escape
from typing import NamedTuple
from xml.etree.ElementTree import Element

from blend_retrieval.readers.office.numbered import marked_number
from blend_retrieval.readers.office.odf_lists import STYLE, TEXT, Counter, Levels, list_styles
from blend_retrieval.readers.office.picture_texts import picture_text

_MOST_BLANKS = 1000  # one after another
OFFICE = "{urn:oasis:names:tc:opendocument:xmlns:office:1.0}"
TABLE = "{urn:oasis:names:tc:opendocument:xmlns:table:1.0}"
DRAW = "{urn:oasis:names:tc:opendocument:xmlns:drawing:1.0}"
FORM = "{urn:oasis:names:tc:opendocument:xmlns:form:1.0}"
PRESENTATION = "{urn:oasis:names:tc:opendocument:xmlns:presentation:1.0}"
MATH = "{http://www.w3.org/1998/Math/MathML}"
_SVG = "{urn:oasis:names:tc:opendocument:xmlns:svg-compatible:1.0}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_ID = "{http://www.w3.org/XML/1998/namespace}id"
_CREATOR = "{http://purl.org/dc/elements/1.1/}creator"
_HEADING_LEVELS = 6
_MOST_REPEATS = 1000  # of a cell or row that holds text
_SILENT = (
    f"{TEXT}page-number",
    f"{TEXT}page-count",
    f"{TEXT}soft-page-break",
    f"{TEXT}number",
    f"{TEXT}note-citation",
    f"{TEXT}sequence-decls",
    f"{TEXT}variable-decls",
    f"{TEXT}user-field-decls",
    f"{TEXT}alphabetical-index-mark",
    f"{OFFICE}forms",
    f"{OFFICE}annotation-end",
    f"{OFFICE}event-listeners",
    f"{OFFICE}scripts",
    f"{_SVG}title",
    f"{_SVG}desc",
)
_INDEX_SOURCES = "-source"
_SHAPE_NAMES = "g custom-shape rect line polyline polygon regular-polygon path circle ellipse connector measure caption"
_DECORATIVE = "}decorative"


class Styles(NamedTuple):
    """What styles say that changes a text's meaning.

    tags: those around text in a style, by its name; None if it is hidden. titles: the styles of a document's title.
    """

    tags: dict[str, tuple[str, ...] | None]
    lists: dict[str, Levels]
    titles: set[str]


def styles_of(*roots: Element | None) -> Styles:
    """The styles in the parts of a file."""
    properties: dict[str, dict[str, str]] = {}
    parents: dict[str, str] = {}
    for root in roots:
        for style in root.iter(f"{STYLE}style") if root is not None else ():
            name = style.get(f"{STYLE}name", "")
            text = style.find(f"{STYLE}text-properties")
            properties[name] = {} if text is None else dict(text.attrib)
            parents[name] = style.get(f"{STYLE}parent-style-name", "")
    tags = {name: _tags(_inherited(name, properties, parents)) for name in properties}
    return Styles(tags, list_styles(*roots), _titles(roots))


def _titles(roots: Iterable[Element | None]) -> set[str]:
    titles = {"Title"}
    for root in roots:
        for style in root.iter(f"{STYLE}style") if root is not None else ():
            if style.get(f"{STYLE}parent-style-name") in titles:
                titles.add(style.get(f"{STYLE}name", ""))
    return titles


def _inherited(name: str, properties: dict[str, dict[str, str]], parents: dict[str, str]) -> dict[str, str]:
    """The properties of a style with those of the styles that it is derived from."""
    text: dict[str, str] = {}
    passed = set()
    while name in properties and name not in passed:
        passed.add(name)
        text = properties[name] | text
        name = parents[name]
    return text


def _tags(properties: dict[str, str]) -> tuple[str, ...] | None:
    if properties.get(f"{TEXT}display") == "none":
        return None
    tags = []
    place = properties.get(f"{STYLE}text-position", "").split(" ")[0]
    if place.startswith("sub") or (place.startswith("-") and place != "-0%"):
        tags.append("sub")
    elif place.startswith("super") or place.rstrip("%").strip("0"):
        tags.append("sup")
    if properties.get(f"{STYLE}text-line-through-style", "none") != "none":
        tags.append("s")
    return tuple(tags)


class OdfHtml:
    """Writes the elements of a body as HTML. embedded: the root of an object's content by its place, or None."""

    def __init__(self, styles: Styles, embedded: Callable[[str], Element | None]) -> None:
        self._styles = styles
        self._embedded = embedded
        self._controls: dict[str, Element] = {}
        self._headings = Counter(styles.lists.get("", {}))
        self._lists: dict[str, Counter] = {}
        self._list_names: list[str] = []
        self._last_lists: dict[str, Counter] = {}
        self.unread: Tally[str] = Tally()
        self.notes: dict[str, None] = {}
        self._writers: dict[str, Callable[[Element], str]] = {
            f"{TEXT}h": self._heading,
            f"{TEXT}p": self._paragraph,
            f"{TEXT}span": self._styled,
            f"{TEXT}s": lambda element: " " * min(int(element.get(f"{TEXT}c", "1")), _MOST_BLANKS),
            f"{TEXT}tab": lambda element: " ",
            f"{TEXT}line-break": lambda element: "<br>",
            f"{TEXT}list": self._list,
            f"{TEXT}note": lambda element: f" [note: {self.words(element)}]",
            f"{OFFICE}annotation": self._comment,
            f"{TEXT}tracked-changes": self._deleted,
            f"{TEXT}section": self._section,
            f"{TEXT}ruby": self._ruby,
            f"{TABLE}table": lambda element: f"<table>{self._rows(element)}</table>",
            f"{DRAW}frame": self._frame,
            f"{DRAW}image": lambda element: "",
            **{f"{DRAW}{name}": self._shape for name in _SHAPE_NAMES.split()},
            f"{DRAW}control": self._control,
            f"{PRESENTATION}notes": lambda element: "",
        }

    def body(self, element: Element) -> str:
        """The HTML of a body or another element's content."""
        for control in element.iter():
            name = control.get(_ID) or control.get(f"{FORM}id")
            if control.tag.startswith(FORM) and name:
                self._controls[name] = control
        return self._inside(element)

    def _write(self, element: Element) -> str:
        if element.tag in _SILENT or element.tag.endswith(_INDEX_SOURCES):
            return ""
        writer = self._writers.get(element.tag)
        return writer(element) if writer else self._inside(element)

    def _inside(self, element: Element) -> str:
        texts = [escape(element.text or "", quote=False)]
        for child in element:
            texts.append(self._write(child))
            texts.append(escape(child.tail or "", quote=False))
        return "".join(texts)

    def words(self, element: Element) -> str:
        """The paragraphs of an element, or itself if it is one, in one line of HTML."""
        texts = [self._styled(paragraph) for paragraph in _paragraphs(element)]
        lines = [" ".join(text.split()) for text in texts]
        return " ".join(filter(None, lines))

    def _styled(self, element: Element) -> str:
        style = element.get(f"{TEXT}style-name", "")
        tags = self._styles.tags.get(style, ())
        inner = self._inside(element)
        if tags is None:
            if inner.strip():
                self.notes["its hidden text is not read"] = None
            return ""
        for tag in tags:
            inner = f"<{tag}>{inner}</{tag}>"
        return inner

    def _paragraph(self, element: Element) -> str:
        tag = "h1" if element.get(f"{TEXT}style-name") in self._styles.titles else "p"
        return f"<{tag}>{self._styled(element)}</{tag}>"

    def _heading(self, element: Element) -> str:
        depth = max(1, int(element.get(f"{TEXT}outline-level", "1")))
        stored = element.find(f"{TEXT}number")
        number = stored.text if stored is not None else None
        if element.get(f"{TEXT}is-list-header") != "true":
            counted = self._headings.next_number(depth, _start(element))
            number = number or counted
        mark = marked_number(number) if number else ""
        level = min(depth, _HEADING_LEVELS)
        return f"<h{level}>{mark}{self._styled(element)}</h{level}>"

    def _list(self, element: Element) -> str:
        outer_name = self._list_names[-1] if self._list_names else ""
        name = element.get(f"{TEXT}style-name") or outer_name
        self._list_names.append(name)
        depth = len(self._list_names)
        counter = self._counter(element, name, depth)
        items = [self._item(item, counter, depth) for item in element]
        self._list_names.pop()
        return f"<ul>{''.join(items)}</ul>"

    def _counter(self, element: Element, name: str, depth: int) -> Counter:
        """The numbers that a list goes on with."""
        former = self._lists.get(element.get(f"{TEXT}continue-list", ""))
        goes_on = element.get(f"{TEXT}continue-numbering") == "true"
        counter = former or self._last_lists.get(name)
        if counter is None or (depth == 1 and not former and not goes_on):
            counter = Counter(self._styles.lists.get(name, {}))
        elif not former and not goes_on:
            counter.restart(depth)
        self._last_lists[name] = counter
        if name_of_list := element.get(_ID):
            self._lists[name_of_list] = counter
        return counter

    def _item(self, item: Element, counter: Counter, depth: int) -> str:
        paragraphs = (child for child in item if child.tag in (f"{TEXT}p", f"{TEXT}h"))
        paragraph = next(paragraphs, None)
        mark = ""
        if paragraph is not None and not item.tag.endswith("list-header"):
            number = counter.next_number(depth, _start(item))
            mark = "" if number is None else marked_number(number)
        texts = []
        for child in item:
            text = self._write(child)
            if child is paragraph:
                opening, _, inner = text.partition(">")
                text = f"{mark}{inner.removesuffix('</p>')}" if opening == "<p" else f"{opening}>{mark}{inner}"
            texts.append(text)
        content = "".join(texts)
        return content if paragraph is None and content.startswith("<ul>") else f"<li>{content}</li>"

    def _comment(self, element: Element) -> str:
        author = (element.findtext(_CREATOR) or "").strip()
        words = self.words(element)
        by = f" by {escape(author, quote=False)}" if author else ""
        return f" [comment{by}: {words}]" if words else ""

    def _deleted(self, element: Element) -> str:
        if element.find(f".//{TEXT}deletion") is not None:
            self.notes["its deleted text (tracked changes) is not read"] = None
        return ""

    def _section(self, element: Element) -> str:
        inner = self._inside(element)
        if element.get(f"{TEXT}display") == "none":
            self.notes["its hidden text is not read"] = None
            return ""
        return inner

    def _ruby(self, element: Element) -> str:
        base, reading = (element.find(f"{TEXT}{name}") for name in ("ruby-base", "ruby-text"))
        words = "" if base is None else self._inside(base)
        sound = "" if reading is None else self._inside(reading)
        return f"{words}({sound})"

    def _rows(self, table: Element) -> str:
        rows = []
        for row in _rows_of(table):
            cells = "".join(self._cells(row))
            repeats = int(row.get(f"{TABLE}number-rows-repeated", "1"))
            has_text = "".join(row.itertext()).strip() != ""
            rows += [f"<tr>{cells}</tr>"] * (min(repeats, _MOST_REPEATS) if has_text else 0)
        return "".join(rows)

    def _cells(self, row: Element) -> Iterator[str]:
        for cell in row:
            if cell.tag == f"{TABLE}table-cell":
                spans = "".join(
                    f' {side}span="{cell.get(f"{TABLE}number-{name}-spanned")}"'
                    for side, name in (("col", "columns"), ("row", "rows"))
                    if cell.get(f"{TABLE}number-{name}-spanned", "1") != "1"
                )
                repeats = int(cell.get(f"{TABLE}number-columns-repeated", "1"))
                yield f"<td{spans}>{self._inside(cell)}</td>" * min(repeats, _MOST_REPEATS)

    def _frame(self, element: Element) -> str:
        text = _picture_text(element)
        boxes = [child for child in element if child.tag in (f"{DRAW}text-box", f"{TABLE}table")]
        if boxes:
            texts = [self._write(box) for box in boxes]
            return f"{text}<div>{''.join(texts)}</div>"
        for child in element:
            if child.tag in (f"{DRAW}object", f"{DRAW}object-ole"):
                return text + self._object(child)
        self.unread["picture"] += 1
        return text

    def _shape(self, element: Element) -> str:
        """A shape or a group: its text for those who do not see it, and what is written in it."""
        return _picture_text(element) + self._inside(element)

    def _object(self, element: Element) -> str:
        root = self._embedded(element.get(_LINK, ""))
        holder = element if root is None else root
        formula = next(holder.iter(f"{MATH}math"), None)
        if formula is not None:
            return _mathml(formula)
        is_chart = root is not None and root.find(f"{OFFICE}body/{OFFICE}chart") is not None
        self.unread["chart" if is_chart else "embedded object"] += 1
        return ""

    def _control(self, element: Element) -> str:
        """What a form's field shows."""
        control = self._controls.get(element.get(f"{DRAW}control", ""))
        if control is None:
            return ""
        label = control.get(f"{FORM}label", "")
        kind = control.tag.removeprefix(FORM)
        if kind == "checkbox":
            return f"[{'x' if control.get(f'{FORM}current-state') == 'checked' else ' '}] {escape(label)}"
        if kind == "radio":
            return f"({'x' if control.get(f'{FORM}current-selected') == 'true' else ' '}) {escape(label)}"
        if kind == "listbox":
            options = control.findall(f"{FORM}option")
            chosen = [
                option.get(f"{FORM}label", "") for option in options if option.get(f"{FORM}current-selected") == "true"
            ]
            return escape(", ".join(chosen))
        value = control.get(f"{FORM}current-value") or control.get(f"{FORM}value") or ""
        return "" if kind in ("password", "hidden") else escape(value or label)


def _start(element: Element) -> int | None:
    restarts = element.get(f"{TEXT}restart-numbering", "true") == "true"
    value = element.get(f"{TEXT}start-value", "")
    return int(value) if restarts and value.isdigit() else None


def _paragraphs(element: Element) -> Iterator[Element]:
    """The paragraphs of an element, or itself if it is one, without those inside other paragraphs."""
    if element.tag in (f"{TEXT}p", f"{TEXT}h"):
        yield element
        return
    for child in element:
        yield from _paragraphs(child)


def _rows_of(table: Element) -> Iterable[Element]:
    for child in table:
        if child.tag == f"{TABLE}table-row":
            yield child
        elif child.tag in (f"{TABLE}{name}" for name in ("table-header-rows", "table-rows", "table-row-group")):
            yield from _rows_of(child)


def _picture_text(element: Element) -> str:
    """The title and description of a frame or shape, unless it is for decoration."""
    is_decorative = any(name.endswith(_DECORATIVE) and value == "true" for name, value in element.attrib.items())
    if is_decorative:
        return ""
    words = (element.findtext(f"{_SVG}{name}") for name in ("title", "desc"))
    text = picture_text(*words, name=element.get(f"{DRAW}name", ""))
    return escape(text, quote=False)


def _mathml(formula: Element) -> str:
    """A formula in MathML without namespaces, as HTML has it."""
    name = formula.tag.removeprefix(MATH)
    inner = "".join(map(_mathml, formula))
    return f"<{name}>{escape(formula.text or '', quote=False)}{inner}</{name}>"
