"""Packages of Open XML: XML files in a zip archive, and the relations that lead from one to the next."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from types import TracebackType
from typing import IO, NamedTuple
from xml.etree import ElementTree as ET

from blend_retrieval.readers.base import UnreadableError
from blend_retrieval.readers.xml_trees import xml_root
from blend_retrieval.readers.zipped import DAMAGE as _UNPACKING
from blend_retrieval.readers.zipped import opened_zip

DAMAGE = (KeyError, ET.ParseError, *_UNPACKING)
"""What reading a part raises if it is missing or damaged."""


class Relation(NamedTuple):
    """A relation of one part to another: the last word of its type, the other's path, and its id."""

    kind: str
    target: str
    number: str


class Package:
    """An open package. Names of parts are compared without case, as Office does.

    Raises `UnreadableError` if the bytes are no zip archive, or one that unpacks to too much.
    """

    def __init__(self, data: bytes) -> None:
        self._archive = opened_zip(data)
        self._names: dict[str, str] = {}
        for name in self._archive.names():
            path = name.replace("\\", "/").lower()
            self._names[path] = name

    def __enter__(self) -> Package:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._archive.__exit__(kind, error, trace)

    def open(self, path: str) -> IO[bytes]:
        """A part's bytes. Raises `KeyError` if there is no such part."""
        return self._archive.open(self._names[path.lower()])

    def size(self, path: str) -> int:
        """The bytes of a part by the directory. Raises `KeyError` if there is no such part."""
        return self._archive.size(self._names[path.lower()])

    def tree(self, path: str) -> ET.Element:
        """The root of a part. Raises `KeyError` if it is missing, `ParseError` if it is no XML."""
        content = self._archive.read(self._names[path.lower()])
        return xml_root(content)

    def xml(self, path: str) -> ET.Element:
        """The root of a part. Raises `UnreadableError` if it is missing or no XML."""
        try:
            return self.tree(path)
        except (KeyError, ET.ParseError):
            raise UnreadableError(f"is damaged: {path} is missing or no XML") from None

    def relations(self, path: str) -> dict[str, Relation]:
        """The relations of a part, by their ids. "" is the package."""
        folder, name = posixpath.split(path)
        list_path = posixpath.join(folder, "_rels", f"{name}.rels")
        if list_path.lower() not in self._names:
            return {}
        relations = {}
        for element in self.xml(list_path):
            if element.get("TargetMode") != "External":
                kind = element.get("Type", "").rpartition("/")[2]
                joined = posixpath.join("/", folder, element.get("Target", ""))
                target = posixpath.normpath(joined).lstrip("/")
                number = element.get("Id", "")
                relations[number] = Relation(kind, target, number)
        return relations

    def main_part(self, kind: str) -> str | None:
        """The part that holds the document, or None."""
        return target_of(self.relations(""), kind)


def target_of(relations: Mapping[str, Relation], kind: str) -> str | None:
    """The path of the first part of a kind, or None."""
    for relation in relations.values():
        if relation.kind == kind:
            return relation.target
    return None
