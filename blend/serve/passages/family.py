"""Texts that begin alike, and which of them stand at a place of another text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from blend.serve.passages.heads import HEAD


class KnownChunk(Protocol):
    """What is known of a chunk."""

    @property
    def id(self) -> str:
        """Names it among the others."""
        ...

    @property
    def document_id(self) -> str:
        """Of the document that it is a part of."""
        ...

    @property
    def title(self) -> str:
        """Heading under which the text stands in a prompt; may be empty."""
        ...

    @property
    def text(self) -> str:
        """The chunk's own text."""
        ...


_LOOK_UP = 2000  # what a search in a family costs besides the comparison, about


@dataclass
class Work:
    """What may still be compared for one message, in characters."""

    left: int

    def spend(self, characters: int) -> None:
        """So many were."""
        self.left -= characters


class Family:
    """Chunks whose texts, blanks around them apart, begin with the same `HEAD` characters; immutable.

    members: by id. Chunks with one text are told apart by their titles; with one title too, they are one.
    """

    def __init__(self, members: Mapping[str, KnownChunk]) -> None:
        self.members = dict(members)
        self._titles: dict[str, dict[str, KnownChunk]] = {}
        for chunk in members.values():
            self._titles.setdefault(chunk.text.strip(), {}).setdefault(chunk.title, chunk)
        self._texts = sorted(self._titles)
        self._longest = max(map(len, self._texts))

    def changed(self, gone: Iterable[str], new: Iterable[KnownChunk]) -> Family | None:
        """The family without the ids `gone` and with `new`; None when nobody is left."""
        out = set(gone)
        members = {name: chunk for name, chunk in self.members.items() if name not in out}
        members |= {chunk.id: chunk for chunk in new}
        return Family(members) if members else None

    def texts_at(self, text: str, place: int, work: Work) -> Iterator[str]:
        """The family's texts that stand at `place`, longest first, unless there is no work left.

        In sorted order, what a text begins with stands before it, and nothing in between but what begins with the same: so the
        last one that is not behind the text is looked at, and then, as far as it agrees with the text, again.
        """
        stop = place + self._longest
        while stop - place >= HEAD and work.left > 0:
            work.spend(stop - place + _LOOK_UP)
            at = bisect_right(self._texts, text[place:stop]) - 1
            if at < 0:
                return
            found = self._texts[at]
            common = _common(found, text, place)
            if common == len(found):
                yield found
                common -= 1
            stop = place + common

    def titled(self, found: str, text: str, place: int) -> KnownChunk:
        """Of the chunks with this text, that whose title stands right before `place`, else that with the shortest one."""
        titles = self._titles[found]
        if len(titles) > 1 and text[place - 1 : place] == "\n":
            for length in sorted({len(title) for title in titles if 0 < len(title) < place}, reverse=True):
                if (chunk := titles.get(text[place - 1 - length : place - 1])) is not None:
                    return chunk
        return titles[min(titles, key=len)]


def _common(found: str, text: str, place: int) -> int:
    """How many characters of `found` stand at `place`."""
    if text.startswith(found, place):
        return len(found)
    low, high = 0, len(found)  # so many do, so many do not
    while high - low > 1:
        middle = (low + high) // 2
        if text.startswith(found[low:middle], place + low):
            low = middle
        else:
            high = middle
    return low
