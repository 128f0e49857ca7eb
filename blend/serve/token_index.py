"""Finds runs of tokens that stand in known texts, by winnowing.

`TokenIndex` finds runs of tokens that stand in known texts, by winnowing (Schleimer, Wilkerson and Aiken, 2003, "Winnowing:
local algorithms for document fingerprinting"): of every `WINDOW` successive strings of `GRAM` tokens, the one with the least
hash is selected. Two texts that share `LEAST_RUN` tokens share a selected string, wherever it stands in each. Each such place
is extended in both directions, token by token, so a hash alone decides nothing. About every ninth string is selected: a known
token takes 4 bytes, and 1.5 for its share of the hashes.
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from threading import Lock
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

GRAM = 16  # tokens of a hashed string
WINDOW = 17  # successive strings of which one is selected
LEAST_RUN = GRAM + WINDOW - 1
LEAST_PIECE = 48  # tokens of a text that is learned
MOST_PLACES = 16  # of one string that are looked at, the latest ones
# Most extensions in a text: linear time, whatever the text.
_RUNS_PER_TOKEN = 1 / 16
_SPARE_RUNS = 256
_STEP = 256  # tokens compared at a time in an extension

Ids = NDArray[np.int32]
Hashes = NDArray[np.uint64]
Offsets = NDArray[np.int64]
Flags = NDArray[np.bool_]
Text = Sequence[int] | Ids
Name = TypeVar("Name", bound=Hashable)
Any_co = TypeVar("Any_co", bound=Hashable, covariant=True)


def digest_of(text: Sequence[int]) -> bytes:
    """The name of a learned text."""
    return blake2b(np.array(text, np.int32).tobytes(), digest_size=16).digest()


class TextRun(NamedTuple, Generic[Any_co]):
    """Tokens `start` to `stop - 1` of a searched text are those of a known text from token `first` on.

    name, text: of the known text; all of its ids.
    """

    start: int
    stop: int
    name: Any_co
    first: int
    text: Ids

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start

    @property
    def rows(self) -> slice:
        """Where it lies in the searched text."""
        return slice(self.start, self.stop)

    def part(self, start: int, stop: int) -> TextRun[Any_co]:
        """Its tokens `start` to `stop - 1`, counted from its own beginning."""
        return TextRun(self.start + start, self.start + stop, self.name, self.first + start, self.text)


class _Table(NamedTuple):
    """Selected strings: their hashes, ascending, and where they stand among all known tokens."""

    hashes: Hashes
    places: NDArray[np.uint32]

    @classmethod
    def merged(cls, tables: Sequence[_Table]) -> _Table:
        hashes, places = (np.concatenate(parts) for parts in zip(*tables, strict=True))
        order = np.argsort(hashes, kind="stable")  # of equal hashes the latest place stays last
        return cls(hashes[order], places[order])

    def without(self, hashes: Hashes, places: Offsets) -> _Table:
        """The table without these strings at these places."""
        low, counts = self.found(hashes)
        begins = np.repeat(low - np.cumsum(counts) + counts, counts)
        candidates = begins + np.arange(counts.sum())
        removed = candidates[np.isin(self.places[candidates], places)]
        if not len(removed):
            return self
        return _Table(np.delete(self.hashes, removed), np.delete(self.places, removed))

    def found(self, hashes: Hashes) -> tuple[Offsets, Offsets]:
        """Where each of these hashes begins in the table, and how often it stands there."""
        low = np.searchsorted(self.hashes, hashes, side="left")
        high = np.searchsorted(self.hashes, hashes, side="right")
        return low, high - low


class TokenIndex(Generic[Name]):
    """Known texts as token ids, by name. Threads may share it."""

    def __init__(self) -> None:
        # Random in every process: otherwise a client could write a text in which every string is selected.
        self._factor = secrets.randbits(64) | 1
        self._lock = Lock()
        self._clear()

    def _clear(self) -> None:
        self._tokens = np.empty(0, np.int32)  # of all texts, one after another, with room for more
        self._starts = np.zeros(1, np.int64)  # of each text, and the end of the last one, with room for more
        self._names: list[Name | None] = []  # of each text; None for one that is gone
        self._numbers: dict[Name, int] = {}
        self._tables: list[_Table] = []
        self._dead = 0  # tokens of texts that are gone

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    @property
    def names(self) -> Iterable[Name]:
        """The names of all texts."""
        return self._numbers.keys()

    @property
    def nbytes(self) -> int:
        """Bytes of tokens and hashes."""
        tables = sum(table.hashes.nbytes + table.places.nbytes for table in self._tables)
        return self._tokens.nbytes + self._starts.nbytes + tables

    def tokens(self, name: Name) -> Ids:
        """The ids of a text. Raises KeyError for an unknown one."""
        with self._lock:
            return self._text(self._numbers[name])

    def _text(self, number: int) -> Ids:
        return self._tokens[self._starts[number] : self._starts[number + 1]]

    def update(self, removed: Iterable[Name], new: Mapping[Name, Text]) -> None:
        """Forget some texts and add others; a known name gets its new text."""
        with self._lock:
            self._remove({*removed, *new})
            added = {**new}
            if 2 * self._dead > self._starts[len(self._names)]:
                added = {**{name: self._text(number) for name, number in self._numbers.items()}, **new}
                self._clear()
            if added:
                self._add(added)

    def _remove(self, names: Iterable[Name]) -> None:
        """Forget the strings of these texts; their tokens stay until they are too many."""
        removed = list[tuple[Hashes, Offsets]]()
        for name in names:
            if (number := self._numbers.pop(name, None)) is not None:
                text = self._text(number)
                hashes, at = self.selected(text)
                removed.append((hashes, at + self._starts[number]))
                self._names[number] = None
                self._dead += len(text)
        if removed:
            strings = [np.concatenate(parts) for parts in zip(*removed, strict=True)]
            self._tables = [table.without(*strings) for table in self._tables]

    def _add(self, new: Mapping[Name, Text]) -> None:
        texts = [np.asarray(ids, dtype=np.int32) for ids in new.values()]
        used = int(self._starts[len(self._names)])
        begin = used
        selected = list[_Table]()
        for text in texts:
            hashes, at = self.selected(text)
            selected.append(_Table(hashes, (at + begin).astype(np.uint32)))
            begin += len(text)
        tables = [*self._tables, _Table.merged(selected)]
        while len(tables) > 1 and len(tables[-2].hashes) < 4 * len(tables[-1].hashes):
            tables[-2:] = [_Table.merged(tables[-2:])]
        self._tables = tables
        self._tokens = _appended(self._tokens, used, np.concatenate(texts))
        ends = used + np.cumsum(list(map(len, texts)))
        self._starts = _appended(self._starts, len(self._names) + 1, ends)
        for name in new:
            self._numbers[name] = len(self._names)
            self._names.append(name)

    def selected(self, ids: Ids) -> tuple[Hashes, Offsets]:
        """The hashes of the selected strings, and where each starts."""
        if len(ids) < GRAM:
            return np.empty(0, np.uint64), np.empty(0, np.int64)
        hashes = ids.astype(np.uint64) + np.uint64(1)
        factor = self._factor
        width = 1
        while width < GRAM:  # a polynomial modulo 2^64, each step twice as long
            hashes = hashes[:-width] * np.uint64(factor) + hashes[width:]
            factor = factor * factor % (1 << 64)
            width = 2 * width
        hashes = (hashes ^ (hashes >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)  # the low bits of a product depend on few tokens
        if len(hashes) > WINDOW:
            least = sliding(np.minimum, hashes, WINDOW)
            chosen = sliding(np.maximum, np.pad(least, WINDOW - 1), WINDOW) == hashes
        else:
            chosen = hashes == hashes.min()
        chosen[1:] &= hashes[1:] != hashes[:-1]  # if one token repeats, the first string is enough
        at = np.flatnonzero(chosen)
        return hashes[at], at

    def runs(self, ids: Text) -> list[TextRun[Name]]:
        """The longest runs of at least `LEAST_RUN` tokens that stand in known texts. They may overlap.

        A string that stands in many texts is looked for in the latest `MOST_PLACES`. Takes time linear in the number of ids:
        a text that was made to need more extensions loses some runs.
        """
        text = np.asarray(ids, dtype=np.int32)
        runs: list[TextRun[Name]] = []
        diagonal = reached = -1
        most = int(len(text) * _RUNS_PER_TOKEN) + _SPARE_RUNS
        with self._lock:
            for at, place, number in self._candidates(text):
                if place - at == diagonal and place < reached:
                    continue  # inside the run before
                start = int(self._starts[number])
                stop = int(self._starts[number + 1])
                before = _common(text[:at][::-1], self._tokens[start:place][::-1])
                behind = _common(text[at:], self._tokens[place:stop])
                diagonal = place - at
                reached = place + behind
                name = self._names[number]
                if before + behind >= LEAST_RUN and name is not None:
                    first = place - before - start
                    runs.append(TextRun(at - before, at + behind, name, first, self._tokens[start:stop]))
                if (most := most - 1) <= 0:
                    break
        return runs

    def _candidates(self, text: Ids) -> Iterator[tuple[int, int, int]]:
        """Where a selected string stands: in the text, among the known tokens, and in which known text.

        Sorted by diagonal, and only where enough tokens agree for a run.
        """
        hashes, at = self.selected(text)
        if not self._tables or not len(hashes):
            return
        pairs = [_looked_up(table, hashes, at) for table in self._tables]
        ats, places = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        numbers = np.searchsorted(self._starts[: len(self._names) + 1], places, side="right") - 1
        long = self._long_enough(text, ats, places, numbers)
        ats = ats[long]
        places = places[long]
        order = np.lexsort((ats, places - ats))
        columns = (column[order].tolist() for column in (ats, places, numbers[long]))
        yield from zip(*columns, strict=True)

    def _long_enough(self, text: Ids, ats: Offsets, places: Offsets, numbers: Offsets) -> Flags:
        """Whether the run at each place has `LEAST_RUN` tokens, judged by that many on either side."""
        starts = self._starts[numbers]
        stops = self._starts[numbers + 1]
        total = np.zeros(len(ats), np.int64)
        for begin, step in ((0, 1), (-1, -1)):
            going = np.ones(len(ats), np.bool_)
            for offset in range(begin, begin + step * LEAST_RUN, step):
                text_at = ats + offset
                token_at = places + offset
                going &= (text_at >= 0) & (text_at < len(text))
                going &= (token_at >= starts) & (token_at < stops)
                going[going] = text[text_at[going]] == self._tokens[token_at[going]]
                if not going.any():
                    break
                total += going
        return total >= LEAST_RUN


def _looked_up(table: _Table, hashes: Hashes, at: Offsets) -> tuple[Offsets, Offsets]:
    """Every pair of a searched place and one where its string may stand."""
    low, every = table.found(hashes)
    counts = np.minimum(every, MOST_PLACES)
    which = np.repeat(np.arange(len(at)), counts)
    begins = np.cumsum(counts) - counts
    back = np.arange(len(which)) - np.repeat(begins, counts)
    latest = low[which] + every[which] - 1
    return at[which], table.places[latest - back].astype(np.int64)


def _common(first: Ids, second: Ids) -> int:
    """How many tokens both begin with."""
    most = min(len(first), len(second))
    for at in range(0, most, _STEP):
        stop = min(at + _STEP, most)
        same = first[at:stop] == second[at:stop]
        if not same.all():
            return at + int(same.argmin())
    return most


_Number = TypeVar("_Number", np.int32, np.int64)


def _appended(array: NDArray[_Number], used: int, added: NDArray[_Number]) -> NDArray[_Number]:
    """The array with `added` behind its first `used` entries. It grows in place if there is room."""
    end = used + len(added)
    if end > len(array):
        larger = np.empty(max(end, 3 * used // 2), dtype=array.dtype)
        larger[:used] = array[:used]
        array = larger
    array[used:end] = added
    return array


def sliding(least: np.ufunc, values: Hashes, width: int) -> Hashes:
    """The least (or greatest) of every `width` successive values, `[len(values) - width + 1]`."""
    covered = 1
    while 2 * covered <= width:
        values = least(values[:-covered], values[covered:])
        covered *= 2
    missing = width - covered
    return least(values[: len(values) - missing], values[missing:]) if missing else values


def longest_first(runs: Iterable[TextRun[Name]], free: Flags) -> list[TextRun[Name]]:
    """Runs that do not overlap, in order. The longest are taken first, then what is left of the others.

    Each has at least `LEAST_RUN` tokens. free: the tokens of the searched text that they may take, `[tokens]`; those that
    they take are cleared.
    """
    chosen = list[TextRun[Name]]()
    for run in sorted(runs, key=lambda run: (-run.length, run.start)):
        free_here = free[run.rows]
        if np.count_nonzero(free_here) < LEAST_RUN:
            continue
        for start, stop in stretches(free_here):
            if stop - start >= LEAST_RUN:
                part = run.part(start, stop)
                free[part.rows] = False
                chosen.append(part)
    return sorted(chosen, key=lambda run: run.start)


def stretches(free: Flags) -> list[list[int]]:
    """Where the flags are set: start and stop of each stretch."""
    framed = np.concatenate(([False], free, [False]))
    edges = np.flatnonzero(np.diff(framed.astype(np.int8)))
    stretches: list[list[int]] = edges.reshape(-1, 2).tolist()
    return stretches
