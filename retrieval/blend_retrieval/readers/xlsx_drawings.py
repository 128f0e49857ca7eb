"""What lies on the cells of an Excel sheet: notes, boxes of text, pictures and charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple
from xml.etree import ElementTree as ET

from blend_retrieval.readers.office_package import Package, Relation, local_name, text_within
from blend_retrieval.readers.sheets import cell_name
from blend_retrieval.readers.xlsx_styles import plain_string

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
            for comment in _each(package.xml(relation.target), "comment"):
                bodies = [plain_string(body) for body in _each(comment, "text")]
                notes.setdefault(comment.get("ref", ""), []).extend(bodies)
        elif relation.kind == "threadedComment":
            for comment in _each(package.xml(relation.target), "threadedComment"):
                conversations.setdefault(comment.get("ref", ""), []).append(text_within(comment, "text"))
    return {place: "; ".join(texts) for place, texts in {**notes, **conversations}.items()}


def _each(root: ET.Element, name: str) -> Iterator[ET.Element]:
    return (element for element in root.iter() if local_name(element) == name)


def read_drawing(package: Package, path: str) -> Drawing:
    """Read the drawing of a sheet."""
    relations = package.relations(path)
    drawing = Drawing([], [], [], [])
    for anchor in package.xml(path):
        place = _corner(anchor)
        for body in _each(anchor, "txBody"):
            drawing.texts.append(_paragraphs(body))
        if any(True for _ in _each(anchor, "pic")):
            drawing.pictures.append(place)
        if any(graphic.get("uri", "").endswith("/diagram") for graphic in _each(anchor, "graphicData")):
            drawing.diagrams.append(place)
        for chart in _each(anchor, "chart"):
            drawing.charts.append(place)
            number = next((value for name, value in chart.items() if name.endswith("}id")), "")
            if number in relations:
                drawing.texts.extend(_titles(package.xml(relations[number].target)))
    return drawing


def _corner(anchor: ET.Element) -> str:
    for corner in _each(anchor, "from"):
        numbers = {local_name(child): int(child.text or 0) for child in corner}
        return cell_name(numbers.get("row", 0), numbers.get("col", 0))
    return "an unknown cell"


def _paragraphs(body: ET.Element) -> str:
    return " ".join(text_within(paragraph, "t") for paragraph in _each(body, "p"))


def _titles(chart: ET.Element) -> Iterator[str]:
    for title in _each(chart, "title"):
        words = _paragraphs(title).strip()
        if words:
            yield words


def controls_in(package: Package, path: str) -> Iterator[str]:
    """The texts of a sheet's form fields, those that can be ticked after [x] or [ ]. Raises `ParseError`."""
    with package.open(path) as stream:
        root = ET.parse(stream).getroot()
    for shape in _each(root, "shape"):
        for data in _each(shape, "ClientData"):
            label = " ".join("".join(box.itertext()) for box in _each(shape, "textbox"))
            kind = data.get("ObjectType", "")
            if kind in ("Checkbox", "Radio"):
                is_ticked = any((tick.text or "").strip() == "1" for tick in _each(data, "Checked"))
                yield f"{'[x]' if is_ticked else '[ ]'} {label}"
            elif kind != "Note":
                yield label
