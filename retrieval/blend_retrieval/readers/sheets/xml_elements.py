"""Elements of XML by their local names, whatever their namespace: files of one format use several versions of it."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree as ET


def local_name(element: ET.Element) -> str:
    """An element's name without its namespace."""
    return element.tag.rpartition("}")[2]


def each(root: ET.Element, name: str) -> Iterator[ET.Element]:
    """All elements of a name within another, in their order."""
    for element in root.iter():
        if local_name(element) == name:
            yield element


def children(element: ET.Element, *names: str) -> Iterator[ET.Element]:
    """The elements of these names directly in another."""
    for child in element:
        if local_name(child) in names:
            yield child


def attribute(element: ET.Element, name: str) -> str:
    """An attribute by its local name, or ""."""
    for key, value in element.items():
        if key.rpartition("}")[2] == name:
            return value
    return ""


def local_attributes(element: ET.Element) -> dict[str, str]:
    """An element's attributes by their local names."""
    return {key.rpartition("}")[2]: value for key, value in element.items()}


def text_within(element: ET.Element, name: str) -> str:
    """The texts of all elements of a name within another, one after the other."""
    return "".join(inner.text or "" for inner in each(element, name))
