"""Finds reusable text in prompts, at any offset: chunks of a corpus, text that was learned, and new pieces to learn.

`TokenIndex` finds runs of tokens that stand in known texts, by winnowing (Schleimer, Wilkerson and Aiken, 2003, "Winnowing:
local algorithms for document fingerprinting"): of every `WINDOW` successive strings of `GRAM` tokens, the one with the least
hash is selected. Two texts that share `LEAST_RUN` tokens share a selected string, wherever it stands in each. Each such place
is extended in both directions, token by token, so a hash alone decides nothing. About every ninth string is selected: a known
token takes 4 bytes, and 1.5 for its share of the hashes.

`Cutter` cuts new text at places that depend on the tokens around them alone. A token boundary is a cut if it ranks highest
within `REACH` tokens on both sides: ends of paragraphs before ends of lines, of sentences, and all others; among equals a hash
of the tokens around it decides. So a passage gives the same pieces whatever stands before it, and behind an edit the cuts fall
back into step.

`reuse` lays out a prompt with what they find.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from blend.serve.types import Cited
from blend.types import Place, PlaceOrigin, PromptLayout, Span, is_composable
from blend_retrieval import Chunk

GRAM = 16  # tokens of a hashed string
WINDOW = 17  # successive strings of which one is selected
LEAST_RUN = GRAM + WINDOW - 1
MOST_PLACES = 16  # of one string that are looked at, the latest ones
_RUNS_PER_TOKEN, _SPARE_RUNS = 1 / 16, 256  # most extensions in a text: linear time, whatever the text
_STEPS = (64, 256, 1024)  # tokens compared at a time in an extension

Ids = NDArray[np.int32]
Hashes = NDArray[np.uint64]
Name = TypeVar("Name", bound=Hashable)
Any_co = TypeVar("Any_co", bound=Hashable, covariant=True)

LEAST_PIECE, MOST_PIECE = 48, 512  # tokens
REACH = 96  # pieces then have about 200 tokens
_AROUND = 4  # tokens on each side of a boundary that its hash depends on
_KINDS = np.uint64(62)  # the upper bits of a rank hold the kind of boundary
_PARAGRAPH, _LINE, _SENTENCE = 3, 2, 1
_SENTENCE_ENDS = (".", "!", "?", "。", "！", "？")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

# At most so many tokens of new text are not learned; with passages in the prompt more, because the text asks about them.
TALK, TALK_BESIDE = 96, 256
QUESTION = 32  # last tokens of a prompt that are always computed: selectors score all others by them
MOST_UNUSED = 8  # times a run's length that its text may have, because the text's whole cache is read


class TextRun(NamedTuple, Generic[Any_co]):
    """Tokens `start` to `stop - 1` of a searched text are those of a known text from token `first` on.

    name, text: of the known text; all of its ids.
    """

    start: int
    stop: int
    name: Any_co
    first: int
    text: Ids


class _Table(NamedTuple):
    """Selected strings: their hashes, ascending, and where they stand among all known tokens."""

    hashes: Hashes
    places: NDArray[np.uint32]

    @classmethod
    def merged(cls, tables: Sequence[_Table]) -> _Table:
        hashes, places = (np.concatenate(parts) for parts in zip(*tables, strict=True))
        order = np.argsort(hashes, kind="stable")  # of equal hashes the latest place stays last
        return cls(hashes[order], places[order])

    def without(self, hashes: Hashes, places: NDArray[np.int64]) -> _Table:
        """The table without these strings at these places."""
        low, counts = self.found(hashes)
        mine = np.repeat(low - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        gone = mine[np.isin(self.places[mine], places)]
        return _Table(np.delete(self.hashes, gone), np.delete(self.places, gone)) if len(gone) else self

    def found(self, hashes: Hashes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where each of these hashes begins in the table, and how often it stands there."""
        low = np.searchsorted(self.hashes, hashes, side="left")
        return low, np.searchsorted(self.hashes, hashes, side="right") - low


class _State(NamedTuple, Generic[Name]):
    """What a search reads. tokens: of all texts, one after another, the first `starts[texts]` of them.

    names: of that many `texts`, and of later ones; None for one that is gone.
    """

    tokens: Ids
    starts: NDArray[np.int64]
    names: list[Name | None]
    tables: tuple[_Table, ...]
    texts: int

    @property
    def used(self) -> int:
        return int(self.starts[self.texts])


def _nothing() -> _State[Name]:
    return _State(np.empty(0, np.int32), np.zeros(1, np.int64), [], (), 0)


class TokenIndex(Generic[Name]):
    """Known texts as token ids, by name. Threads may search while one updates."""

    def __init__(self) -> None:
        # Random in every process: otherwise a client could write a text in which every string is selected.
        self._factor, self._lock = secrets.randbits(64) | 1, Lock()
        self._numbers: dict[Name, int] = {}
        self._dead = 0  # tokens of texts that are gone
        self._state: _State[Name] = _nothing()

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
        state = self._state
        tables = sum(one.hashes.nbytes + one.places.nbytes for one in state.tables)
        return state.tokens.nbytes + state.starts.nbytes + tables

    def tokens(self, name: Name) -> Ids:
        """The ids of a text. Raises KeyError for an unknown one."""
        number, state = self._numbers[name], self._state
        return state.tokens[state.starts[number] : state.starts[number + 1]]

    def update(self, gone: Iterable[Name], new: Mapping[Name, Sequence[int] | Ids]) -> None:
        """Forget some texts and add others; a known name gets its new text."""
        with self._lock:
            state, added = self._without({*gone, *new}), {**new}
            if 2 * self._dead > state.used:
                added = {**{name: self.tokens(name) for name in self._numbers}, **new}
                self._numbers, self._dead, state = {}, 0, _nothing()
            self._state = self._added(state, added)

    def _without(self, names: Iterable[Name]) -> _State[Name]:
        """The state without the strings of these texts; their tokens stay until they are too many."""
        state, gone = self._state, list[tuple[Hashes, NDArray[np.int64]]]()
        for name in names:
            if (number := self._numbers.pop(name, None)) is not None:
                start, stop = state.starts[number : number + 2].tolist()
                hashes, at = self.selected(state.tokens[start:stop])
                gone.append((hashes, at + start))
                state.names[number] = None
                self._dead += stop - start
        if not gone:
            return state
        strings = [np.concatenate(parts) for parts in zip(*gone, strict=True)]
        return state._replace(tables=tuple(table.without(*strings) for table in state.tables))

    def _added(self, state: _State[Name], new: Mapping[Name, Sequence[int] | Ids]) -> _State[Name]:
        texts = [np.asarray(ids, dtype=np.int32) for ids in new.values()]
        if not texts:
            return state
        ends = state.used + np.cumsum([len(text) for text in texts])
        selected = [self.selected(text) for text in texts]
        begins = [state.used, *ends[:-1].tolist()]
        places = np.concatenate([at + begin for (_, at), begin in zip(selected, begins, strict=True)])
        table = _Table.merged([_Table(np.concatenate([hashes for hashes, _ in selected]), places.astype(np.uint32))])
        tables = [*state.tables, table]
        while len(tables) > 1 and len(tables[-2].hashes) < 4 * len(tables[-1].hashes):
            tables[-2:] = [_Table.merged(tables[-2:])]
        tokens = _appended(state.tokens, state.used, np.concatenate(texts))
        starts = _appended(state.starts, state.texts + 1, ends)
        # A running search reads only the first `texts` names of its state, so appending is safe.
        for name in new:
            self._numbers[name] = len(state.names)
            state.names.append(name)
        return _State(tokens, starts, state.names, tuple(tables), len(state.names))

    def selected(self, ids: Ids) -> tuple[Hashes, NDArray[np.int64]]:
        """The hashes of the selected strings, and where each starts."""
        if len(ids) < GRAM:
            return np.empty(0, np.uint64), np.empty(0, np.int64)
        hashes, factor, width = ids.astype(np.uint64) + np.uint64(1), self._factor, 1
        while width < GRAM:  # a polynomial modulo 2^64, each step twice as long
            hashes = hashes[:-width] * np.uint64(factor) + hashes[width:]
            factor, width = factor * factor % (1 << 64), 2 * width
        hashes = (hashes ^ (hashes >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)  # the low bits of a product depend on few tokens
        if len(hashes) > WINDOW:
            least = sliding(np.minimum, hashes, WINDOW)
            edge = np.zeros(WINDOW - 1, np.uint64)
            chosen = sliding(np.maximum, np.concatenate((edge, least, edge)), WINDOW) == hashes
        else:
            chosen = hashes == hashes.min()
        chosen[1:] &= hashes[1:] != hashes[:-1]  # if one token repeats, the first string is enough
        at = np.flatnonzero(chosen)
        return hashes[at], at

    def runs(self, ids: Sequence[int] | Ids) -> list[TextRun[Name]]:
        """The longest runs of at least `LEAST_RUN` tokens that stand in known texts. They may overlap.

        A string that stands in many texts is looked for in the latest `MOST_PLACES`. Takes time linear in the number of ids:
        a text that was made to need more extensions loses some runs.
        """
        state, text = self._state, np.asarray(ids, dtype=np.int32)
        found: list[TextRun[Name]] = []
        diagonal = reached = -1
        most = int(len(text) * _RUNS_PER_TOKEN) + _SPARE_RUNS
        for at, place, number in self._candidates(state, text):
            if place - at == diagonal and place < reached:
                continue  # inside the run before
            name, start, stop = state.names[number], int(state.starts[number]), int(state.starts[number + 1])
            before = _common(text[:at][::-1], state.tokens[start:place][::-1])
            behind = _common(text[at:], state.tokens[place:stop])
            diagonal, reached = place - at, place + behind
            if before + behind >= LEAST_RUN and name is not None:
                found.append(TextRun(at - before, at + behind, name, place - before - start, state.tokens[start:stop]))
            if (most := most - 1) <= 0:
                break
        return found

    def _candidates(self, state: _State[Name], text: Ids) -> Iterator[tuple[int, int, int]]:
        """Where a selected string stands: in the text, among the known tokens, and in which known text.

        Sorted by diagonal, and only where enough tokens agree for a run.
        """
        hashes, at = self.selected(text)
        pairs = [_looked_up(table, hashes, at) for table in state.tables]
        if not pairs or not len(hashes):
            return
        ats, places = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        numbers = np.searchsorted(state.starts[: state.texts + 1], places, side="right") - 1
        long = self._long_enough(state, text, ats, places, numbers)
        ats, places, numbers = ats[long], places[long], numbers[long]
        order = np.lexsort((ats, places - ats))
        yield from zip(ats[order].tolist(), places[order].tolist(), numbers[order].tolist(), strict=True)

    def _long_enough(
        self,
        state: _State[Name],
        text: Ids,
        ats: NDArray[np.int64],
        places: NDArray[np.int64],
        numbers: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """Whether the run at each place has `LEAST_RUN` tokens, judged by that many on either side."""
        starts, stops = state.starts[numbers], state.starts[numbers + 1]
        total = np.zeros(len(ats), np.int64)
        for begin, step in ((0, 1), (-1, -1)):
            going = np.ones(len(ats), np.bool_)
            for offset in range(begin, begin + step * LEAST_RUN, step):
                one, other = ats + offset, places + offset
                going &= (one >= 0) & (one < len(text)) & (other >= starts) & (other < stops)
                going[going] = text[one[going]] == state.tokens[other[going]]
                if not going.any():
                    break
                total += going
        return total >= LEAST_RUN


def _looked_up(table: _Table, hashes: Hashes, at: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every pair of a searched place and one where its string may stand."""
    low, every = table.found(hashes)
    counts = np.minimum(every, MOST_PLACES)
    which = np.repeat(np.arange(len(at)), counts)
    back = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    return at[which], table.places[low[which] + every[which] - 1 - back].astype(np.int64)


def _common(some: Ids, others: Ids) -> int:
    """How many tokens both begin with."""
    most, at, number = min(len(some), len(others)), 0, 0
    while at < most:
        step = _STEPS[min(number, len(_STEPS) - 1)]
        same = some[at : min(at + step, most)] == others[at : min(at + step, most)]
        if not same.all():
            return at + int(same.argmin())
        at, number = at + step, number + 1
    return most


_Number = TypeVar("_Number", np.int32, np.int64)


def _appended(array: NDArray[_Number], used: int, more: NDArray[_Number]) -> NDArray[_Number]:
    """The array with `more` behind its first `used` entries. It grows in place if there is room: no search reads there yet."""
    if used + len(more) > len(array):
        larger = np.empty(max(used + len(more), 3 * used // 2), dtype=array.dtype)
        larger[:used] = array[:used]
        array = larger
    array[used : used + len(more)] = more
    return array


def sliding(least: np.ufunc, values: Hashes, width: int) -> Hashes:
    """The least (or greatest) of every `width` successive values, `[len(values) - width + 1]`."""
    held = 1
    while 2 * held <= width:
        values = least(values[:-held], values[held:])
        held *= 2
    rest = width - held
    return least(values[: len(values) - rest], values[rest:]) if rest else values


def longest_first(runs: Iterable[TextRun[Name]], free: NDArray[np.bool_]) -> list[TextRun[Name]]:
    """Runs that do not overlap, in order. The longest are taken first, then what is left of the others.

    Each has at least `LEAST_RUN` tokens. free: the tokens of the searched text that they may take, `[tokens]`; those that
    they take are cleared.
    """
    chosen = list[TextRun[Name]]()
    for run in sorted(runs, key=lambda run: (run.start - run.stop, run.start)):
        mine = free[run.start : run.stop]
        for start, stop in stretches(mine) if np.count_nonzero(mine) >= LEAST_RUN else ():
            if stop - start >= LEAST_RUN:
                free[run.start + start : run.start + stop] = False
                chosen.append(TextRun(run.start + start, run.start + stop, run.name, run.first + start, run.text))
    return sorted(chosen, key=lambda run: run.start)


def stretches(free: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Where the flags are set: start and stop of each stretch."""
    if free.all():
        return [(0, len(free))]
    edges = np.flatnonzero(np.diff(np.concatenate(([False], free, [False])).astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


class Cutter:
    """Cuts token ids.

    tokenizer: says what they spell. control: ids of control tokens, at which messages end. least_rows: shorter pieces would not
    pay, so all pieces get longer by one factor.
    """

    def __init__(self, tokenizer: Any, control: frozenset[int], least_rows: float = 0.0) -> None:
        self._factor = 1  # a power of two: `least_rows` is timed, and must not change the pieces at every start
        while self._factor * REACH < least_rows:
            self._factor *= 2
        self._decode: Callable[[list[int]], str] = tokenizer.decode
        self._kinds = dict.fromkeys(control, _PARAGRAPH)

    def pieces(self, ids: Sequence[int] | Ids, until: int | None = None) -> list[Span]:
        """The text's pieces, one behind another; the first and the last may be short.

        until: where the text's last question ends, or has begun. The last piece ends there, and begins behind the last
        paragraph or line before it, if there is one.
        """
        text = np.asarray(ids, dtype=np.int32)
        ranks = self._ranks(text)
        reach, most = self._factor * REACH, self._factor * MOST_PIECE
        edge = np.zeros(reach, np.uint64)
        highest = sliding(np.maximum, np.concatenate((edge, ranks, edge)), 2 * reach + 1)
        cuts = [0]
        for at in np.flatnonzero(ranks == highest).tolist():
            if at - cuts[-1] > reach or not ranks[cuts[-1]]:  # of equal ranks the first one
                cuts.append(at)
        cuts.append(len(text))
        if until is not None and until < len(text):
            cuts = [cut for cut in cuts if cut <= until]
            kinds = ranks[cuts[-1] + 1 : until + 1] >> _KINDS
            if kinds.max(initial=0) >= _LINE:
                cuts.append(until - int(kinds[::-1].argmax()))
            cuts.append(until)
        return [piece for start, stop in pairwise(cuts) if start < stop for piece in _fitting(ranks, start, stop, most)]

    def _ranks(self, text: Ids) -> NDArray[np.uint64]:
        """The rank of the boundary before each token; 0 before the first."""
        known, which = np.unique(text, return_inverse=True)
        kinds = np.array([self._kind(int(token)) for token in known], np.uint64)[which]
        padded = np.concatenate((np.zeros(_AROUND, np.int32), text, np.zeros(_AROUND, np.int32))).astype(np.uint64)
        mixed = np.zeros(len(text), np.uint64)
        for offset in range(2 * _AROUND):
            mixed = (mixed ^ padded[offset : offset + len(text)]) * _FACTOR
            mixed ^= mixed >> np.uint64(29)
        ranks = (mixed >> np.uint64(2)) | np.uint64(1)
        ranks[1:] |= kinds[:-1] << _KINDS
        ranks[:1] = 0
        return ranks

    def _kind(self, token: int) -> int:
        """The kind of boundary behind this token."""
        if token not in self._kinds:
            spelled = self._decode([token])
            lines = spelled.count("\n") if not spelled.strip(" \t\n") or spelled.endswith("\n") else 0
            sentence = spelled.rstrip().endswith(_SENTENCE_ENDS)
            self._kinds[token] = min(lines + 1, _PARAGRAPH) if lines else _SENTENCE if sentence else 0
        return self._kinds[token]


def _fitting(ranks: NDArray[np.uint64], start: int, stop: int, most: int) -> list[Span]:
    """The piece, or its parts: one of more than `most` tokens is cut where a boundary ranks highest."""
    waiting, done = [Span(start, stop)], list[Span]()
    while waiting:
        start, stop = waiting.pop()
        if stop - start <= most:
            done.append(Span(start, stop))
            continue
        inside = slice(start + LEAST_PIECE, stop - LEAST_PIECE)
        at = inside.start + int(ranks[inside].argmax())
        waiting += [Span(at, stop), Span(start, at)]
    return done


class PlacedPassage(NamedTuple):
    """A passage at the tokens `start` to `stop - 1` of a prompt. cited: without the found text, which the ids spell."""

    start: int
    stop: int
    cited: Cited


class Texts(NamedTuple):
    """The texts that may be found in a prompt.

    Attributes:
        corpora: the chunks of each corpus, by its name.
        learned: pieces of earlier prompts, by their digests; None if nothing is learned.
        cutter: cuts new text.
        from_prompts: whether caches of learned text are taken out of prompts.
        whole: whether learned text can only be reused from its lead to its end, as recurrent layers need it.

    """

    corpora: Mapping[str, TokenIndex[Chunk]]
    learned: TokenIndex[bytes] | None
    cutter: Cutter
    from_prompts: bool = True
    whole: bool = False


class Reuse(NamedTuple):
    """A prompt with all reusable text as its places.

    Attributes:
        cited: the sources of the places.
        corpus: the corpus that they come from.
        asked: tokens of the question that are to be learned, in the suffix.

    """

    layout: PromptLayout
    cited: tuple[Cited, ...]
    corpus: str
    asked: Span | None = None


def reuse(layout: PromptLayout, cited: Sequence[Cited], texts: Texts) -> Reuse:
    """Find reusable text in a prompt.

    cited: the sources of the places that it has. Documents that the request brought are searched; other places stay. Of
    several corpora it takes the one of which the prompt holds most tokens. Text of the others is ordinary text and is not
    learned, because it would outlive their documents.
    """
    ids = np.array(layout.token_ids, dtype=np.int32)
    given = list(_places(layout, cited))
    documents = [one for one in given if one.cited.brought]
    places = [one for one in given if not one.cited.brought]
    question = max(layout.context.stop if layout.chunks else 1, layout.rows - QUESTION)
    free = np.ones(layout.rows, np.bool_)
    free[: max(1, layout.shared_prefix_rows)] = False
    free[question:] = False
    for one in places:
        free[one.start : one.stop] = False
    found = {name: longest_first(_worth(index.runs(ids)), free.copy()) for name, index in texts.corpora.items()}
    corpus = max(found, key=lambda name: sum(run.stop - run.start for run in found[name]))
    foreign = free.copy()
    for run in chain.from_iterable(found.values()):
        foreign[run.start : run.stop] = False
    for run in found[corpus]:
        foreign[run.start : run.stop] = True
    free &= foreign
    runs: list[TextRun[Chunk | bytes]] = [*found[corpus]]
    if texts.learned is not None:
        runs += [run for run in _worth(texts.learned.runs(ids)) if _usable(run, texts)]
    for stretch in longest_first(runs, free):
        if _usable(stretch, texts):
            places.append(_found(ids, stretch, documents))
        else:
            free[stretch.start : stretch.stop] = True  # new text, to be learned as it is
    long = np.count_nonzero(free) > (TALK_BESIDE if given else TALK)
    zones = _zones(free, documents, learning=texts.learned is not None and bool(long))
    new = _new(ids, zones, documents, texts.cutter.pieces(ids, question) if zones.any() else ())
    # The text in front of the question's last tokens is no place: selectors judge by all of the question.
    asked = next((Span(one.start, one.stop) for one in new if one.stop == question and zones[one.start] == 1), None)
    places += [one for one in new if asked is None or one.start != asked.start]
    held = {place.start for place in places}
    places += [one for one in documents if held.isdisjoint(range(one.start, one.stop))]  # too short for a piece
    places.sort()
    laid_out = _laid_out(layout, places, from_prompts=texts.from_prompts)
    return Reuse(laid_out, tuple(one.cited for one in places), corpus, asked if texts.from_prompts else None)


def _worth(runs: Sequence[TextRun[Name]]) -> list[TextRun[Name]]:
    """Runs whose text is not far longer: a prompt must not read caches of many times its length."""
    return [run for run in runs if MOST_UNUSED * (run.stop - run.start) >= len(run.text)]


def _usable(run: TextRun[Chunk | bytes], texts: Texts) -> bool:
    """Whether a run can be reused. One of a corpus always counts, because its text is not learned."""
    return (
        not texts.whole or isinstance(run.name, Chunk) or is_composable(run.first, run.stop - run.start, len(run.text))
    )


def _places(layout: PromptLayout, cited: Sequence[Cited]) -> Iterator[PlacedPassage]:
    """The places that a prompt has."""
    sources = iter(cited)
    for place, span in zip(layout.places, layout.chunk_spans, strict=True):
        if place.origin is not PlaceOrigin.TEXT:
            yield PlacedPassage(*span, next(sources))


def _found(ids: Ids, run: TextRun[Chunk | bytes], documents: Sequence[PlacedPassage]) -> PlacedPassage:
    mine = tuple(ids[run.start : run.stop].tolist())
    whole = len(mine) == len(run.text)
    place = Place(mine) if whole else Place(mine, part_of=tuple(run.text.tolist()), first=run.first)
    return PlacedPassage(run.start, run.stop, _cited(place, run.start, run.name, documents))


def _cited(place: Place, start: int, name: Chunk | bytes | None, documents: Sequence[PlacedPassage]) -> Cited:
    """The source of a passage: the document that it is in, the chunk `name`, or a text that is or was learned."""
    within = next((one.cited for one in documents if one.start <= start < one.stop), None)
    text = name.text if isinstance(name, Chunk) and place.part_of is None else ""
    if within is not None:
        return within._replace(place=place, text=text, brought=not isinstance(name, Chunk))
    if isinstance(name, Chunk):
        return Cited(place, "pasted", name.id, name.document_id, name.title, text)
    return Cited(place, "learned", "", "", "", "", brought=True)


def _zones(free: NDArray[np.bool_], documents: Sequence[PlacedPassage], *, learning: bool) -> NDArray[np.int64]:
    """The zone of each token, `[tokens]`: 0 is not learned, 1 is new text of messages, 2 and more that of each document."""
    zones = np.full(len(free), int(learning))
    for number, one in enumerate(documents, 2):
        zones[one.start : one.stop] = number
    zones[~free] = 0
    return zones


def _new(
    ids: Ids, zones: NDArray[np.int64], documents: Sequence[PlacedPassage], pieces: Iterable[Span]
) -> list[PlacedPassage]:
    """The pieces to learn."""
    found = list[PlacedPassage]()
    for piece in pieces:
        borders = np.flatnonzero(np.diff(zones[piece.start : piece.stop])) + piece.start + 1
        for start, stop in pairwise([piece.start, *borders.tolist(), piece.stop]):
            if zones[start] and stop - start >= LEAST_PIECE:
                place = Place(tuple(ids[start:stop].tolist()))
                found.append(PlacedPassage(start, stop, _cited(place, start, None, documents)))
    return found


def _laid_out(layout: PromptLayout, passages: Sequence[PlacedPassage], *, from_prompts: bool) -> PromptLayout:
    """The prompt with these passages, in order, and ordinary text between them."""
    ids = layout.token_ids
    if not passages:
        return PromptLayout(ids[:-1], (), ids[-1:], layout.canonical_prefix)
    places = list[Place]()
    reached = passages[0].start
    for passage in passages:
        if passage.start > reached:
            places.append(Place(ids[reached : passage.start], PlaceOrigin.TEXT))
        learned = passage.cited.brought and from_prompts
        places.append(passage.cited.place._replace(origin=PlaceOrigin.REQUEST if learned else PlaceOrigin.CORPUS))
        reached = passage.stop
    return PromptLayout(ids[: passages[0].start], tuple(places), ids[reached:], layout.canonical_prefix)
