"""Uploads of a corpus that are read and indexed together."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from blend.corpus import DividedDocuments
from blend.serve.documents.upload_list import QueuedUpload

MOST_AT_ONCE = 16  # uploads that are indexed together
MOST_BYTES_AT_ONCE = 1 << 20


@dataclass(eq=False)
class Batch:
    """Uploads that are indexed together, all to be removed or none; without any, the index is looked at.

    Attributes:
        steps: reads, divides and embeds their documents; pauses often.
        begun: the upload that is worked on.
        is_long: whether its file takes long to be read; then it is the only one.
        awaited: what its steps wait for before they can go on: a reader's place, or a file that is being read.
        documents: those that are divided and embedded.
        outcomes: by the numbers of uploads of which something was left out: their state, and what.

    """

    uploads: list[QueuedUpload]
    steps: Generator[None, None, None] = field(init=False)
    begun: QueuedUpload | None = None
    is_long: bool = False
    awaited: Future[Any] | None = None
    documents: list[DividedDocuments] = field(default_factory=list)
    outcomes: dict[int, tuple[Literal["ready", "failed"], str]] = field(default_factory=dict)

    @property
    def is_reading(self) -> bool:
        """Whether its steps wait."""
        return self.awaited is not None and not self.awaited.done()

    @property
    def numbers(self) -> set[int]:
        """The numbers of its uploads."""
        return {queued.number for queued in self.uploads}

    @property
    def removed(self) -> list[str]:
        """The uploads that are to leave the index."""
        return [queued.upload.id for queued in self.uploads if queued.upload.kind == "delete"]

    @property
    def divided(self) -> DividedDocuments:
        """All documents together."""
        return DividedDocuments(
            frozenset().union(*(documents.ids for documents in self.documents)),
            [chunk for documents in self.documents for chunk in documents.chunks],
            {name: vector for documents in self.documents for name, vector in documents.vectors.items()},
            {name: ids for documents in self.documents for name, ids in documents.tokens.items()},
        )


def together(waiting: Iterator[QueuedUpload]) -> Iterator[QueuedUpload]:
    """The first uploads that may be indexed together.

    Files that need a reader are not among others, which would wait for it.
    """
    nbytes = number = 0
    removes = is_short = False
    for queued in waiting:
        is_removal = queued.upload.kind == "delete"
        if number and not is_removal and not removes and queued.is_short != is_short:
            continue
        nbytes += queued.nbytes
        ends = queued.alone or nbytes > MOST_BYTES_AT_ONCE or removes != is_removal
        if number and (ends or number == MOST_AT_ONCE):
            return
        yield queued
        number += 1
        is_short = queued.is_short
        if queued.alone:
            return
        removes = is_removal
