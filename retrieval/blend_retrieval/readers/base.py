"""Input and output types of every reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from blend_retrieval.document import Markup

TEXT_FIELD = "text"  # of a JSONL record


class Part(NamedTuple):
    """One document inside a file. `name` distinguishes the documents of one file; it is empty for a single document.

    markup: how the text marks headings.
    """

    name: str
    title: str
    text: str
    markup: Markup


class Fault(NamedTuple):
    """A place in a file that could not be read, although the rest could.

    where: the place, or "" for a note on the whole file, such as the encoding that was detected.
    lost: pages or records that are lost, 0 for a note.
    """

    where: str
    reason: str
    lost: int = 1


class UnreadableError(Exception):
    """The whole file cannot be read; the message is the reason. is_there: whether it may hold documents anyway."""

    def __init__(self, reason: str, *, is_there: bool = True) -> None:
        super().__init__(reason)
        self.is_there = is_there


Parts = list[Part | Fault]
"""The documents of a file, and what could not be read of it."""
Reader = Callable[[bytes, str], Parts]
"""(bytes of the file, title to use when the file names none) -> its documents. Raises `UnreadableError`."""


def notes(note: str) -> list[Fault]:
    """The note on how a file was read, if there is one."""
    return [Fault("", note, 0)] if note else []
