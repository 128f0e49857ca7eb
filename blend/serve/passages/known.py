"""Finds the texts of known chunks where they were pasted into a message.

A chunk is found by the first 32 characters of its text, with a rolling hash over all places at once, and then compared. So a
chunk with changed inner white space is not found, nor one of fewer than 32 characters. The hash takes five numpy passes over
the text, each doubling the number of hashed characters. A dict looked up at every place took eight times as long on messages of
10 MB; an Aho-Corasick automaton takes hundreds of megabytes for 10 MB of chunks, and every change rebuilds it.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blend.serve.passages.rendered import ChunkPart, Renderer
from blend_retrieval import Chunk

HEAD = 32  # characters, a power of two
_BLOCK = 1 << 18  # characters hashed at a time, which keeps the arrays small
_FLAGS_PER_HEAD = 32  # one place in so many is let through for nothing when the table is full
_LEAST_BITS = 12

Hashes = NDArray[np.uint64]


class HeadFilter:
    """Flags for strings of `HEAD` characters. Threads may look while one enters more."""

    def __init__(self) -> None:
        # Drawn anew in every process, so that nobody can write a text of which every place is let through.
        self._factor = secrets.randbits(64) | 1
        self._start(())

    def _start(self, heads: Collection[str]) -> None:
        bits = max(_LEAST_BITS, (2 * len(heads) * _FLAGS_PER_HEAD).bit_length())
        self._room, self._entered = (1 << bits) // _FLAGS_PER_HEAD, 0
        flags = np.zeros(1 << bits, dtype=np.bool_)
        self._enter(heads, flags)
        self._flags = flags

    def _enter(self, heads: Collection[str], flags: NDArray[np.bool_]) -> None:
        hashes = self._hashes("".join(heads))[::HEAD]
        flags[_slots(hashes, flags)] = True
        self._entered += len(heads)

    def enter(self, new: Collection[str], wanted: Collection[str]) -> None:
        """Let the strings `new` through from now on. wanted: all that are still of use, for when the table is full."""
        if self._entered + len(new) > self._room:
            self._start(wanted)
        elif new:
            self._enter(new, self._flags)

    def places(self, text: str) -> Iterator[int]:
        """Where one of the strings may start, ascending: every place where one does, and a few others."""
        flags = self._flags
        for start in range(0, len(text) - HEAD + 1, _BLOCK):
            hashes = self._hashes(text[start : start + _BLOCK + HEAD - 1])
            for place in np.flatnonzero(flags[_slots(hashes, flags)]).tolist():
                yield start + place

    def _hashes(self, text: str) -> Hashes:
        """Of the `HEAD` characters from every place on, `[len(text) - HEAD + 1]`: a polynomial modulo 2^64."""
        hashes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
        factor, width = self._factor, 1
        while width < HEAD:
            hashes = hashes[:-width] * np.uint64(factor) + hashes[width:]
            factor, width = factor * factor % (1 << 64), 2 * width
        return hashes


def _slots(hashes: Hashes, flags: NDArray[np.bool_]) -> Hashes:
    """The upper bits, in which all characters have a part."""
    return hashes >> np.uint64(64 - (len(flags).bit_length() - 1))


_SEARCH = 2000  # what a search in a family costs besides the comparison, about


@dataclass
class SearchBudget:
    """What may still be compared for one message, in characters."""

    left: int


class Family:
    """Chunks whose texts, blanks around them apart, begin with the same `HEAD` characters; immutable.

    members: by id. Chunks with one text are told apart by their titles; with one title too, they are one.
    """

    def __init__(self, members: Mapping[str, Chunk]) -> None:
        self.members = dict(members)
        self._titles: dict[str, dict[str, Chunk]] = {}
        for chunk in members.values():
            self._titles.setdefault(chunk.text.strip(), {}).setdefault(chunk.title, chunk)
        self._texts = sorted(self._titles)
        self._longest = max(map(len, self._texts))

    def changed(self, gone: Iterable[str], new: Iterable[Chunk]) -> Family | None:
        """The family without the ids `gone` and with `new`; None when nobody is left."""
        out = set(gone)
        members = {name: chunk for name, chunk in self.members.items() if name not in out}
        members |= {chunk.id: chunk for chunk in new}
        return Family(members) if members else None

    def texts_at(self, text: str, place: int, budget: SearchBudget) -> Iterator[str]:
        """The family's texts that stand at `place`, longest first, unless there is no work left.

        In sorted order, what a text begins with stands before it, and nothing in between but what begins with the same: so the
        last one that is not behind the text is looked at, and then, as far as it agrees with the text, again.
        """
        stop = place + self._longest
        while stop - place >= HEAD and budget.left > 0:
            budget.left -= stop - place + _SEARCH
            at = bisect_right(self._texts, text[place:stop]) - 1
            if at < 0:
                return
            found = self._texts[at]
            common = _common(found, text, place)
            if common == len(found):
                yield found
                common -= 1
            stop = place + common

    def titled(self, found: str, text: str, place: int) -> Chunk:
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


# What a message may cost, in characters compared, which take less than a nanosecond each: so much, and more by its length.
_SPARE, _PER_CHARACTER = 50_000_000, 50
_PLACE, _MATCH = 300, 10_000  # what a place and a match cost besides the comparison, about


class FoundChunk(NamedTuple):
    """Characters `start` to `stop - 1` of a message are this part of this chunk."""

    start: int
    stop: int
    chunk: Chunk
    part: ChunkPart


class _Match(NamedTuple):
    """The text of a chunk, without title and closing, and where it stands."""

    start: int
    text: str
    family: Family


class KnownTexts:
    """Chunks whose texts are found in messages. Threads may search while one updates.

    heads: sifts the places where a chunk may begin.
    """

    def __init__(self, renderer: Renderer, heads: HeadFilter | None = None) -> None:
        self.renderer = renderer
        self._chunks: dict[str, Chunk] = {}
        self._families: dict[str, Family] = {}
        self._heads = heads or HeadFilter()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._chunks)

    def update(self, chunks: Iterable[Chunk]) -> None:
        """Know these chunks and no others: new ones are added and gone ones dropped, at a cost that goes with the change."""
        with self._lock:
            held, wanted = self._chunks, {chunk.id: chunk for chunk in chunks}
            new = [chunk for name, chunk in wanted.items() if not _same(chunk, held.get(name))]
            out = {*(held.keys() - wanted.keys()), *(chunk.id for chunk in new)}
            gone = [held[name] for name in out if name in held]
            self._chunks = wanted
            self._change(_by_head(gone), _by_head(new))

    def _change(self, gone: dict[str, list[Chunk]], new: dict[str, list[Chunk]]) -> None:
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

    def find(self, text: str) -> list[FoundChunk]:
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
        budget = SearchBudget(_SPARE + _PER_CHARACTER * len(text))
        reached: dict[str, int] = {}  # where the last match of a text ended: it does not overlap itself
        for place in self._heads.places(text):
            family = self._families.get(text[place : place + HEAD])
            budget.left -= _PLACE
            if budget.left <= 0:
                return
            if family is None:
                continue
            for one in family.texts_at(text, place, budget):
                if place >= reached.get(one, 0):
                    reached[one] = place + len(one)
                    budget.left -= _MATCH
                    yield _Match(place, one, family)

    def _place(self, text: str, match: _Match, taken: bytearray) -> FoundChunk | None:
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
        return part and FoundChunk(offset + part.start, offset + part.stop, chunk, part)


def _same(one: Chunk, other: Chunk | None) -> bool:
    return other is not None and (one is other or (one.title, one.text) == (other.title, other.text))


def _by_head(chunks: Iterable[Chunk]) -> dict[str, list[Chunk]]:
    """Chunks by the first characters of their texts; those that are too short have none."""
    grouped = defaultdict(list)
    for chunk in chunks:
        text = chunk.text.strip()
        if len(text) >= HEAD:
            grouped[text[:HEAD]].append(chunk)
    return dict(grouped)
