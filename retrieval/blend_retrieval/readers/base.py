"""What every reader of a file format takes and gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from blend_retrieval.document import Markup


class Part(NamedTuple):
    """One document inside a file. `name` tells the documents of one file apart and is empty where there is only one.

    `markup` says what counts as a heading in the text.
    """

    name: str
    title: str
    text: str
    markup: Markup


class Fault(NamedTuple):
    """A place in a file that could not be read; the rest of the file could."""

    where: str
    reason: str


class UnreadableError(Exception):
    """The whole file cannot be read; the message is the reason. is_there: whether it may hold documents all the same."""

    def __init__(self, reason: str, *, is_there: bool = True) -> None:
        super().__init__(reason)
        self.is_there = is_there


Reader = Callable[[bytes, str], list[Part | Fault]]
"""(bytes of the file, title to use when the file names none) -> its documents. Raises `UnreadableError`."""


def missing(package: str) -> UnreadableError:
    """The error for a parser that is not installed."""
    return UnreadableError(f"reading it needs {package}; run: pip install 'kvblend[docs]'")
