"""The texts of known chunks, found where they were pasted into a message.

A chunk is found by the first 32 characters of its text (`heads`, a rolling hash; measured against a dict looked up at every
place, which took eight times as long on messages of 10 MB, and chosen over an Aho-Corasick automaton, which takes hundreds of
megabytes for 10 MB of chunks and is built anew for every change) and then compared as it stands. So a chunk whose inner white
space a client has changed is not found, nor one of fewer than 32 characters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from threading import Lock
from typing import NamedTuple

from blend.serve.passages.family import Family, KnownChunk, Work
from blend.serve.passages.heads import HEAD, HeadFilter
from blend.serve.passages.rendered import Part, Renderer

# What a message may cost, in characters compared, which take less than a nanosecond each: so much, and more by its length.
_SPARE, _PER_CHARACTER = 50_000_000, 50
_LOOK_UP, _MATCH = 300, 10_000  # what a place and a match cost besides the comparison, about


class Found(NamedTuple):
    """Characters `start` to `stop - 1` of a message are this part of this chunk."""

    start: int
    stop: int
    chunk: KnownChunk
    part: Part


class _Match(NamedTuple):
    """The text of a chunk, without title and closing, and where it stands."""

    start: int
    text: str
    family: Family


class KnownTexts:
    """Chunks whose texts are found in messages. Threads may search while one updates."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self._chunks: dict[str, KnownChunk] = {}
        self._families: dict[str, Family] = {}
        self._heads = HeadFilter()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._chunks)

    def update(self, chunks: Iterable[KnownChunk]) -> None:
        """Know these chunks and no others: new ones are added and gone ones dropped, at a cost that goes with the change."""
        with self._lock:
            held, wanted = self._chunks, {chunk.id: chunk for chunk in chunks}
            new = [chunk for name, chunk in wanted.items() if not _same(chunk, held.get(name))]
            out = {*(held.keys() - wanted.keys()), *(chunk.id for chunk in new)}
            gone = [held[name] for name in out if name in held]
            self._chunks = wanted
            self._change(_by_head(gone), _by_head(new))

    def _change(self, gone: dict[str, list[KnownChunk]], new: dict[str, list[KnownChunk]]) -> None:
        for head in gone.keys() | new.keys():
            out, entering = gone.get(head, []), new.get(head, [])
            held = self._families.get(head)
            family = (
                held.changed((chunk.id for chunk in out), entering)
                if held
                else Family({chunk.id: chunk for chunk in entering})
            )
            if family is None:
                del self._families[head]
            else:
                self._families[head] = family
        self._heads.enter(new.keys(), self._families.keys())

    def find(self, text: str) -> list[Found]:
        """Where known chunks stand in a text, in order and apart from one another: the longest first, then the leftmost.

        A place where the text of a chunk stands without its title line or closing blank line counts as far as the chunk's
        tokens lie within it (`Renderer.part`). The time is linear in the text's length: where more would be compared than that
        allows, as in texts that were made for it, what follows is left as it is.
        """
        taken, found = bytearray(len(text)), []
        for match in sorted(self._matches(text), key=lambda match: (-len(match.text), match.start)):
            one = self._place(text, match, taken)
            if one is not None:
                taken[one.start : one.stop] = b"\1" * (one.stop - one.start)
                found.append(one)
        return sorted(found, key=lambda one: one.start)

    def _matches(self, text: str) -> Iterator[_Match]:
        work = Work(_SPARE + _PER_CHARACTER * len(text))
        reached: dict[str, int] = {}  # where the last match of a text ended: it does not overlap itself
        for place in self._heads.places(text):
            family = self._families.get(text[place : place + HEAD])
            work.spend(_LOOK_UP)
            if work.left <= 0:
                return
            if family is None:
                continue
            for one in family.texts_at(text, place, work):
                if place >= reached.get(one, 0):
                    reached[one] = place + len(one)
                    work.spend(_MATCH)
                    yield _Match(place, one, family)

    def _place(self, text: str, match: _Match, taken: bytearray) -> Found | None:
        """The match with as much of its title and closing as stands there and is free."""
        start, stop = match.start, match.start + len(match.text)
        if taken.find(1, start, stop) >= 0:
            return None
        chunk = match.family.titled(match.text, text, start)
        whole = self.renderer.render(chunk.title, match.text)
        if whole.lead <= start and text.startswith(whole.text[: whole.lead], start - whole.lead):
            start -= whole.lead if taken.find(1, start - whole.lead, start) < 0 else 0
        while stop < len(text) and stop < match.start + len(whole.text) - whole.lead and not taken[stop]:
            if text[stop] != "\n":
                break
            stop += 1
        offset = match.start - whole.lead
        part = self.renderer.part(chunk.title, match.text, start - offset, stop - offset)
        return part and Found(offset + part.start, offset + part.stop, chunk, part)


def _same(one: KnownChunk, other: KnownChunk | None) -> bool:
    return other is not None and (one is other or (one.title, one.text) == (other.title, other.text))


def _by_head(chunks: Iterable[KnownChunk]) -> dict[str, list[KnownChunk]]:
    """Chunks by the first characters of their texts; those that are too short have none."""
    grouped = defaultdict(list)
    for chunk in chunks:
        text = chunk.text.strip()
        if len(text) >= HEAD:
            grouped[text[:HEAD]].append(chunk)
    return dict(grouped)
