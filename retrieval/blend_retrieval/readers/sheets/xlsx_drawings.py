"""What lies on the cells of an Excel sheet: notes, boxes of text, pictures and charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple
from xml.etree import ElementTree as ET

from blend_retrieval.readers.sheets.package import Package, Relation
from blend_retrieval.readers.sheets.sheets import cell_name
from blend_retrieval.readers.sheets.xlsx_styles import plain_string
from blend_retrieval.readers.sheets.xml_elements import attribute, each, local_name, text_within

_UNSAID = ("rPh", "phoneticPr")


class Drawing(NamedTuple):
    """The texts of a drawing's boxes and charts' titles, and the cells at which its pictures, charts and diagrams begin."""

    texts: list[str]
    pictures: list[str]
    charts: list[str]
    diagrams: list[str]


def notes_at_cells(package: Package, relations: Mapping[str, Relation]) -> dict[str, str]:
    """The notes of a sheet by cells such as "B2". A conversation at a cell is one note."""
    notes: dict[str, list[str]] = {}
    conversations: dict[str, list[str]] = {}
    for relation in relations.values():
        if relation.kind == "comments":
            for comment in each(package.xml(relation.target), "comment"):
                bodies = [plain_string(body) for body in each(comment, "text")]
                notes.setdefault(comment.get("ref", ""), []).extend(bodies)
        elif relation.kind == "threadedComment":
            for comment in each(package.xml(relation.target), "threadedComment"):
                texts = conversations.setdefault(comment.get("ref", ""), [])
                texts.append(text_within(comment, "text"))
    notes |= conversations
    return {place: "; ".join(texts) for place, texts in notes.items()}


def read_drawing(package: Package, path: str) -> Drawing:
    """Read the drawing of a sheet."""
    relations = package.relations(path)
    drawing = Drawing([], [], [], [])
    for anchor in package.xml(path):
        place = _corner(anchor)
        for body in each(anchor, "txBody"):
            drawing.texts.append(_paragraphs(body))
        if next(each(anchor, "pic"), None) is not None:
            drawing.pictures.append(place)
        for graphic in each(anchor, "graphicData"):
            if graphic.get("uri", "").endswith("/diagram"):
                drawing.diagrams.append(place)
        for chart in each(anchor, "chart"):
            drawing.charts.append(place)
            number = attribute(chart, "id")
            if number in relations:
                drawing.texts.extend(_titles(package.xml(relations[number].target)))
    return drawing


def _corner(anchor: ET.Element) -> str:
    for corner in each(anchor, "from"):
        numbers = {local_name(child): int(child.text or 0) for child in corner}
        return cell_name(numbers.get("row", 0), numbers.get("col", 0))
    return "an unknown cell"


def _paragraphs(body: ET.Element) -> str:
    return " ".join(text_within(paragraph, "t") for paragraph in each(body, "p"))


def _titles(chart: ET.Element) -> Iterator[str]:
    for title in each(chart, "title"):
        words = _paragraphs(title).strip()
        if words:
            yield words


def controls_in(package: Package, path: str) -> Iterator[str]:
    """The texts of a sheet's form fields, those that can be ticked after [x] or [ ]. Raises `ParseError`."""
    for shape in each(package.tree(path), "shape"):
        for data in each(shape, "ClientData"):
            boxes = each(shape, "textbox")
            label = " ".join("".join(box.itertext()) for box in boxes)
            kind = data.get("ObjectType", "")
            if kind in ("Checkbox", "Radio"):
                state = text_within(data, "Checked").strip()
                mark = "[x]" if state == "1" else "[ ]"
                yield f"{mark} {label}"
            elif kind != "Note":
                yield label
