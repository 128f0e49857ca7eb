"""Finds reusable text in a prompt, at any offset: chunks of a corpus, text that was learned, and new pieces to learn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blend.serve.passages.cut import LEAST_PIECE, Cutter
from blend.serve.passages.find import Ids, Name, TextRun, TokenIndex, longest_first
from blend.serve.types import Cited, Passage
from blend.types import Part, PromptLayout, Span
from blend_retrieval import Chunk

# New text of at most so many tokens is talk and is not learned. Beside passages more of it is: it asks about them.
TALK, TALK_BESIDE = 96, 256
QUESTION = 32  # of the last tokens of a prompt are always computed: by them selectors judge all others
MOST_UNUSED = 8  # times the run's length, the length of a text whose whole cache is read for it


class PlacedPassage(NamedTuple):
    """Tokens `start` to `stop - 1` of a prompt, a passage. cited: without the text of what was found, which the ids spell."""

    start: int
    stop: int
    cited: Cited


class Texts(NamedTuple):
    """What may be found in a prompt.

    corpora: the chunks of each, by its name. learned: pieces of earlier prompts, by their digests; None where nothing is
    learned. cutter: cuts what is new. in_place: whether caches of learned text are taken out of prompts.
    """

    corpora: Mapping[str, TokenIndex[Chunk]]
    learned: TokenIndex[bytes] | None
    cutter: Cutter
    in_place: bool = True


class Reuse(NamedTuple):
    """A prompt with all reusable text as its places.

    cited: the places' sources. corpus: that they are of. asked: tokens of the question that are to be learned, in the suffix.
    """

    layout: PromptLayout
    cited: tuple[Cited, ...]
    corpus: str
    asked: Span | None = None


def reuse(layout: PromptLayout, cited: Sequence[Cited], texts: Texts) -> Reuse:
    """Find reusable text in a prompt.

    cited: the sources of the places that it has. Documents that the request brought are searched; other places stay. Of
    several corpora the one is taken of which the prompt holds most tokens. What it holds of the others is ordinary text, and
    not learned: it would outlive their documents.
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
        runs += _worth(texts.learned.runs(ids))
    places += [_found(ids, run, documents) for run in longest_first(runs, free)]
    long = np.count_nonzero(free) > (TALK_BESIDE if given else TALK)
    zones = _zones(free, documents, learning=texts.learned is not None and bool(long))
    new = _new(ids, zones, documents, texts.cutter.pieces(ids, question) if zones.any() else ())
    # The text in front of the question's last tokens is no place: selectors judge by all of the question.
    asked = next((Span(one.start, one.stop) for one in new if one.stop == question and zones[one.start] == 1), None)
    places += [one for one in new if asked is None or one.start != asked.start]
    held = {place.start for place in places}
    places += [one for one in documents if held.isdisjoint(range(one.start, one.stop))]  # too short for a piece
    places.sort()
    laid_out = _laid_out(layout, places, in_place=texts.in_place)
    return Reuse(laid_out, tuple(one.cited for one in places), corpus, asked if texts.in_place else None)


def _worth(runs: Sequence[TextRun[Name]]) -> list[TextRun[Name]]:
    """Those whose text is not far longer: a prompt must not cost the reading of many times its length."""
    return [run for run in runs if MOST_UNUSED * (run.stop - run.start) >= len(run.text)]


def _places(layout: PromptLayout, cited: Sequence[Cited]) -> Iterator[PlacedPassage]:
    """The places that a prompt has."""
    sources = iter(cited)
    for place, span in enumerate(layout.chunk_spans):
        if place not in layout.plain:
            yield PlacedPassage(*span, next(sources))


def _found(ids: Ids, run: TextRun[Chunk | bytes], documents: Sequence[PlacedPassage]) -> PlacedPassage:
    mine = tuple(ids[run.start : run.stop].tolist())
    whole = len(mine) == len(run.text)
    passage = Passage(mine, None if whole else Part(tuple(run.text.tolist()), run.first))
    return PlacedPassage(run.start, run.stop, _cited(passage, run.start, run.name, documents))


def _cited(passage: Passage, start: int, name: Chunk | bytes | None, documents: Sequence[PlacedPassage]) -> Cited:
    """The source of a passage: the document that it is in, the chunk `name`, or a text that is or was learned."""
    within = next((one.cited for one in documents if one.start <= start < one.stop), None)
    text = name.text if isinstance(name, Chunk) and passage.part is None else ""
    if within is not None:
        return within._replace(passage=passage, text=text, brought=not isinstance(name, Chunk))
    if isinstance(name, Chunk):
        return Cited(passage, "pasted", name.id, name.document_id, name.title, text)
    return Cited(passage, "learned", "", "", "", "", brought=True)


def _zones(free: NDArray[np.bool_], documents: Sequence[PlacedPassage], *, learning: bool) -> NDArray[np.int64]:
    """What new text may be learned: 0 none, 1 of messages, 2 and more of each document, `[tokens]`."""
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
                passage = Passage(tuple(ids[start:stop].tolist()))
                found.append(PlacedPassage(start, stop, _cited(passage, start, None, documents)))
    return found


def _laid_out(layout: PromptLayout, places: Sequence[PlacedPassage], *, in_place: bool) -> PromptLayout:
    """The prompt with these places, in order, and ordinary text between them."""
    ids = layout.token_ids
    if not places:
        return PromptLayout(ids[:-1], (), ids[-1:], canonical_prefix=layout.canonical_prefix)
    chunks, plain, learned, parts = list[tuple[int, ...]](), set[int](), set[int](), dict[int, Part]()
    reached = places[0].start
    for one in places:
        if one.start > reached:
            plain.add(len(chunks))
            chunks.append(ids[reached : one.start])
        if one.cited.passage.part is not None:
            parts[len(chunks)] = one.cited.passage.part
        if one.cited.brought and in_place:
            learned.add(len(chunks))
        chunks.append(one.cited.passage.ids)
        reached = one.stop
    kinds = frozenset(plain), parts, frozenset(learned)
    return PromptLayout(ids[: places[0].start], tuple(chunks), ids[reached:], *kinds, layout.canonical_prefix)
