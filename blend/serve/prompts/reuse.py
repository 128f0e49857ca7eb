"""Lays out a prompt with all text in it whose KV can be reused, or is to be learned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from blend.layout import Place, PlaceOrigin, PromptLayout, Span, is_composable
from blend.serve.flights import Flight
from blend.serve.prompt import Cited, nothing_before
from blend.serve.prompts.computed import ComputedText, Past
from blend.serve.prompts.cutter import Cutter
from blend.serve.reasons import NEW, ComputedPart
from blend.serve.token_index import (
    LEAST_PIECE,
    Flags,
    Ids,
    Name,
    Offsets,
    TextRun,
    TokenIndex,
    digest_of,
    longest_first,
)
from blend_retrieval import Chunk

# At most so many tokens of new text are not learned; with passages in the prompt more, because the text asks about them.
TALK = 96
TALK_BESIDE = 256
QUESTION = 32  # last tokens of a prompt that are always computed: selectors score all others by them
MOST_RESPELLED = 4  # first tokens of a learned text that may be others in a prompt, if they spell the same
MOST_UNUSED = 8  # times a run's length that its text may have, because the text's whole cache is read


FoundRun = TextRun[Chunk | bytes]
"""Of a chunk, or of a learned text by its digest."""


class PlacedPassage(NamedTuple):
    """A passage at the tokens `start` to `stop - 1` of a prompt. cited: without the found text, which the ids spell."""

    start: int
    stop: int
    cited: Cited

    @property
    def rows(self) -> slice:
        """Where it lies in the prompt."""
        return slice(self.start, self.stop)


class Texts(NamedTuple):
    """The texts that may be found in a prompt.

    Attributes:
        corpora: the chunks of each corpus, by its name.
        learned: pieces of earlier prompts, by their digests; None if nothing is learned.
        in_flight: pieces that other requests bring now, and that are learned soon; None if nothing is learned.
        cutter: cuts new text.
        past: why a new piece is not learned, by its digest.
        whole: whether learned text can only be reused from its lead to its end, as recurrent layers need it.

    """

    corpora: Mapping[str, TokenIndex[Chunk]]
    learned: TokenIndex[bytes] | None
    cutter: Cutter
    whole: bool = False
    past: Past = lambda digest: NEW
    in_flight: TokenIndex[bytes] | None = None


class Reuse(NamedTuple):
    """A prompt with all reusable text as its places.

    Attributes:
        cited: the sources of the places.
        corpus: the corpus that they come from.
        question: tokens of the question that are to be learned, in the suffix.
        computed: the parts that no cache serves, without the prompt's beginning and its last tokens.
        reaches: for each mark of the request, where its text ends.
        history: says how many rows stand in front of the last message; 0 in a new conversation.
        flight: of the request, if it brings text that others may bring now.

    """

    layout: PromptLayout
    cited: tuple[Cited, ...]
    corpus: str
    question: Span | None = None
    computed: tuple[ComputedPart, ...] = ()
    reaches: tuple[int, ...] = ()
    history: Callable[[], int] = nothing_before
    flight: Flight | None = None


class PromptSearch:
    """Looks for known text in one prompt. `reuse` runs the steps; each returns what it finds and the text that is left.

    Args:
        layout: the prompt, with the places that it has.
        cited: the sources of these places. Documents that the request brought are searched; other places stay.
        texts: what may be found.

    """

    def __init__(self, layout: PromptLayout, cited: Sequence[Cited], texts: Texts) -> None:
        existing = list(_places(layout, cited))
        self._layout = layout
        self._texts = texts
        self._ids = np.array(layout.token_ids, dtype=np.int32)
        self._documents = [passage for passage in existing if passage.cited.brought]
        self._fixed = [passage for passage in existing if not passage.cited.brought]
        self._talk = TALK_BESIDE if existing else TALK
        context_end = layout.context.stop if layout.chunks else 1
        self._end = max(context_end, layout.rows - QUESTION)  # behind it stand the question's last tokens

    def reuse(self) -> Reuse:
        """The prompt with all reusable text as its places."""
        searched = self._searched()
        corpus, corpus_runs, foreign = self._of_one_corpus(searched)
        learned_runs = self._of_learned_text()
        usable = [run for run in learned_runs if _usable(run, self._ids, self._texts)]
        stored, free = self._stored(searched & ~foreign, [*corpus_runs, *usable])
        new, question = self._new(free, learned_runs)
        places = sorted([*self._fixed, *stored, *new, *self._too_short([*self._fixed, *stored, *new])])
        laid_out = _laid_out(self._layout, places)
        past = self._texts.past if self._texts.learned is not None else None
        computed = ComputedText(self._ids, laid_out, learned_runs, self._texts.cutter.control, past)
        parts = tuple(computed.parts(searched, foreign, question))
        return Reuse(laid_out, tuple(passage.cited for passage in places), corpus, question, parts)

    def _searched(self) -> Flags:
        """The tokens that are searched, `[tokens]`: neither the beginning, nor places that stay, nor the question's end."""
        searched = np.ones(self._layout.rows, np.bool_)
        searched[: max(1, self._layout.shared_prefix_rows)] = False
        searched[self._end :] = False
        for passage in self._fixed:
            searched[passage.rows] = False
        return searched

    def _of_one_corpus(self, searched: Flags) -> tuple[str, list[TextRun[Chunk]], Flags]:
        """The corpus of which the prompt holds most tokens, its runs, and the tokens that only other corpora have.

        Those are ordinary text and not learned, because what is learned would outlive their documents.
        """
        runs = {
            name: longest_first(_worth(index.runs(self._ids)), searched.copy())
            for name, index in self._texts.corpora.items()
        }
        corpus = max(runs, key=lambda name: sum(run.length for run in runs[name]))
        foreign = np.zeros_like(searched)
        for run in chain.from_iterable(runs.values()):
            foreign[run.rows] = True
        for run in runs[corpus]:
            foreign[run.rows] = False
        return corpus, runs[corpus], foreign

    def _of_learned_text(self) -> list[TextRun[bytes]]:
        """Runs of learned text, and of text that is learned soon, whether they can be used or not."""
        indexes = filter(None, (self._texts.learned, self._texts.in_flight))
        return [run for index in indexes for run in _worth(index.runs(self._ids))]

    def _stored(self, free: Flags, runs: Sequence[FoundRun]) -> tuple[list[PlacedPassage], Flags]:
        """The runs that become places, longest first, and the tokens that are free then."""
        free = free.copy()
        passages = list[PlacedPassage]()
        for run in longest_first(runs, free):
            if _usable(run, self._ids, self._texts):
                passages.append(_found(self._ids, run, self._documents, self._texts.learned))
            else:
                free[run.rows] = True  # new text, to be learned as it is
        return passages, free

    def _new(self, free: Flags, learned_runs: Sequence[TextRun[bytes]]) -> tuple[list[PlacedPassage], Span | None]:
        """The pieces of free text to learn, and the one in front of the question's last tokens.

        That one is no place: selectors judge by all of the question.
        """
        # Text that recurs behind other text becomes a piece of its own, which the next prompt can use.
        begins = {run.start for run in longest_first(learned_runs, free.copy())}
        learning = self._texts.learned is not None and int(np.count_nonzero(free)) > self._talk
        zones = _zones(free, self._documents, learning=learning)
        pieces = self._texts.cutter.pieces(self._ids, self._end) if zones.any() else ()
        cut_pieces = [part for piece in pieces for part in _cut(piece, begins)]
        new = _new(self._ids, zones, self._documents, cut_pieces)
        before_question = [passage for passage in new if passage.stop == self._end and zones[passage.start] == 1]
        if not before_question:
            return new, None
        question = before_question[0]
        return [passage for passage in new if passage is not question], Span(question.start, question.stop)

    def _too_short(self, places: Sequence[PlacedPassage]) -> list[PlacedPassage]:
        """Brought documents in which no place begins: they are too short for a piece, and places as they are."""
        starts = {passage.start for passage in places}
        return [
            _as_new(document, self._texts.learned)
            for document in self._documents
            if starts.isdisjoint(range(document.start, document.stop))
        ]


def with_texts(reused: Reuse, tokenizer: Any) -> Reuse:
    """The same prompt, in which all sources have their text."""
    cited = list[Cited]()
    for passage in reused.cited:
        text = passage.text or tokenizer.decode(passage.place.tokens, skip_special_tokens=True)
        cited.append(passage._replace(text=text))
    return reused._replace(cited=tuple(cited))


def _as_new(passage: PlacedPassage, learned: TokenIndex[bytes] | None) -> PlacedPassage:
    """A document as new text, unless all of it was learned: a text below `LEAST_RUN` tokens is in no run."""
    place = passage.cited.place
    is_learned = learned is not None and digest_of(place.tokens) in learned
    place = place._replace(origin=PlaceOrigin.LEARNED if is_learned else PlaceOrigin.NEW)
    return passage._replace(cited=passage.cited._replace(place=place))


def _worth(runs: Sequence[TextRun[Name]]) -> list[TextRun[Name]]:
    """Runs whose text is not far longer: a prompt must not read caches of many times its length."""
    return [run for run in runs if len(run.text) <= MOST_UNUSED * run.length]


def _usable(run: FoundRun, ids: Ids, texts: Texts) -> bool:
    """Whether a run can be reused. One of a corpus always counts, because its text is not learned.

    The KV of learned text must have read nothing that this prompt does not say there: whoever brought a text could otherwise
    put words in front of it that change what it says to others. So the run begins where the text does, or behind a few tokens
    that spell what stands before it here: a first word has other tokens behind a blank.
    """
    if isinstance(run.name, Chunk):
        return True
    if texts.whole and not is_composable(run.first, run.length, len(run.text)):
        return False
    if run.first > MOST_RESPELLED:
        return False
    before = ids[max(0, run.start - 2 * MOST_RESPELLED) : run.start]
    spelled = texts.cutter.spelled
    return spelled(before).endswith(spelled(run.text[: run.first]))


def _places(layout: PromptLayout, cited: Sequence[Cited]) -> Iterator[PlacedPassage]:
    """The places that a prompt has."""
    sources = iter(cited)
    for place, span in zip(layout.places, layout.chunk_spans, strict=True):
        if place.origin is not PlaceOrigin.TEXT:
            yield PlacedPassage(*span, next(sources))


def _found(
    ids: Ids, run: FoundRun, documents: Sequence[PlacedPassage], learned: TokenIndex[bytes] | None
) -> PlacedPassage:
    tokens = tuple(ids[run.rows].tolist())
    if isinstance(run.name, Chunk):
        origin = PlaceOrigin.CORPUS
    elif (
        learned is None or run.name not in learned
    ):  # text in flight is new until a request of this end user has computed it
        return PlacedPassage(
            run.start, run.stop, _cited(Place(tokens, PlaceOrigin.NEW), run.start, run.name, documents)
        )
    else:
        origin = PlaceOrigin.LEARNED
    place = Place(tokens, origin)
    if run.length < len(run.text):
        place = Place(tokens, origin, tuple(run.text.tolist()), run.first)
    return PlacedPassage(run.start, run.stop, _cited(place, run.start, run.name, documents))


def _cited(place: Place, start: int, name: Chunk | bytes | None, documents: Sequence[PlacedPassage]) -> Cited:
    """The source of a passage: the document that it is in, the chunk `name`, or a text that is or was learned."""
    around = (document.cited for document in documents if document.start <= start < document.stop)
    within = next(around, None)
    text = name.text if isinstance(name, Chunk) and place.part_of is None else ""
    if within is not None:
        return within._replace(place=place, text=text, brought=not isinstance(name, Chunk))
    if isinstance(name, Chunk):
        return Cited(place, "pasted", name.id, name.document_id, name.title, text)
    return Cited(place, "learned", brought=True)


def _zones(free: Flags, documents: Sequence[PlacedPassage], *, learning: bool) -> Offsets:
    """The zone of each token, `[tokens]`: 0 is not learned, 1 is new text of messages, 2 and more that of each document."""
    zones = np.full(len(free), int(learning))
    for number, document in enumerate(documents, 2):
        zones[document.rows] = number
    zones[~free] = 0
    return zones


def _cut(piece: Span, begins: Iterable[int]) -> Iterator[Span]:
    """The piece, cut where a text begins."""
    inside = sorted(begin for begin in begins if piece.start < begin < piece.stop)
    yield from map(Span, (piece.start, *inside), (*inside, piece.stop))


def _new(ids: Ids, zones: Offsets, documents: Sequence[PlacedPassage], pieces: Iterable[Span]) -> list[PlacedPassage]:
    """The pieces to learn."""
    passages = list[PlacedPassage]()
    for piece in pieces:
        changes = np.diff(zones[piece.start : piece.stop])
        borders = np.flatnonzero(changes) + piece.start + 1
        edges = [piece.start, *borders.tolist(), piece.stop]
        for start, stop in pairwise(edges):
            if zones[start] and stop - start >= LEAST_PIECE:
                place = Place(tuple(ids[start:stop].tolist()), PlaceOrigin.NEW)
                passages.append(PlacedPassage(start, stop, _cited(place, start, None, documents)))
    return passages


def _laid_out(layout: PromptLayout, passages: Sequence[PlacedPassage]) -> PromptLayout:
    """The prompt with these passages, in order, and ordinary text between them."""
    ids = layout.token_ids
    if not passages:
        return PromptLayout(ids[:-1], (), ids[-1:], layout.canonical_prefix)
    places = list[Place]()
    begin = passages[0].start
    reached = begin
    for passage in passages:
        if passage.start > reached:
            places.append(Place(ids[reached : passage.start], PlaceOrigin.TEXT))
        places.append(passage.cited.place)
        reached = passage.stop
    return PromptLayout(ids[:begin], tuple(places), ids[reached:], layout.canonical_prefix)
