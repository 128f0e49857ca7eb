"""Text that several requests in flight bring: the first of them computes its caches, apart from its own prompt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from blend.layout import Place, PlaceOrigin, PromptLayout, Tokens
from blend.model.passes import Resume, Steps
from blend.serve.removed import removed_from
from blend.serve.token_index import LEAST_PIECE, TokenIndex, digest_of

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.config import BlendConfig
    from blend.model.row_decoder import RowDecoder
    from blend.prefill.blender import Blender
    from blend.serve.flights import Flight
    from blend.serve.prompt import Prompt
    from blend.types import CacheKey


class SharedText:
    """Computes and finds the text of one prompt that other requests in flight bring, too.

    Its caches are those of learned text: computed apart from every prompt, so nothing of one request's other text is in them.
    What other end users have stored is no hint: each user's first request computes what is new to that user.

    Args:
        config: how the prompt is blended.
        least_gain: rows that computing text apart must save, for all requests together.

    Attributes:
        rows_computed: of caches, so far.
        texts: those that the prompt takes from caches that a request in flight has computed.

    """

    def __init__(self, prompt: Prompt, blender: Blender[RowDecoder], config: BlendConfig, least_gain: int) -> None:
        self._prompt = prompt
        self._blender = blender
        self._config = config
        self._least_gain = least_gain
        self._joined = 0  # other requests, when the text was looked at last
        self.rows_computed = 0
        self.texts = frozenset[Tokens]()

    @property
    def has_news(self) -> bool:
        """Whether another request with text of this prompt has come since the text was looked at last."""
        flight = self._prompt.flight
        return flight is not None and flight.joined > self._joined

    def steps(self, layout: PromptLayout, start: int, most_rows: Callable[[], int]) -> Steps[PromptLayout]:
        """The prompt with the shared text as learned text, once its caches are stored.

        Computes those that are missing and that others would compute, too. If the store takes none, the prompt computes its
        text itself.

        Args:
            layout: the whole prompt.
            start: its first row that is not computed yet; text in front of it is left out.
            most_rows: of a pass.

        """
        flight = self._prompt.flight
        if flight is None or not flight.joined:
            return layout
        self._joined = flight.joined
        with flight.owning():
            with flight.stalled():
                yield Resume.BACKGROUND
                layout = divided(layout, flight)
                flight.bring(brought(layout))
                named = {digest_of(text): text for text in brought(layout, start)}
                texts = {name: text for name, text in named.items() if name in flight.shared}
                awaited = self._awaited(flight, texts)
            for name in awaited:
                yield from self._compute(flight, name, texts[name], most_rows)
            with flight.stalled():
                yield Resume.BACKGROUND
                stored = self._stored(flight, texts)
                self.texts |= {text for name, text in stored.items() if self._is_new(text) or name in flight.computed}
        return with_learned(layout, self.texts)

    @property
    def _library(self) -> ChunkLibrary:
        return self._blender.library(self._prompt.layout.kept_behind)

    def _key(self, library: ChunkLibrary, text: Tokens) -> CacheKey:
        return library.best(text, contextual=self._config.surrogate)

    def _awaited(self, flight: Flight, texts: Mapping[bytes, Tokens]) -> Sequence[bytes]:
        """The texts to compute now, in the prompt's order; none if that saves too little."""
        if flight.has_stalled_owner:
            return ()
        counts = flight.awaited()
        names = [name for name in self._lacking(flight, texts) if counts[name]]
        blended = 1 - max(self._config.ratio, self._blender.uncorrected_ratio)
        saved = sum(len(texts[name]) * ((counts[name] + 1) * blended - 1) for name in names)
        if self._prompt.learn is None or saved <= self._least_gain + len(names) * self._blender.decoder.pass_rows:
            return ()
        admitted = self._prompt.learn(self._library, [texts[name] for name in names])
        return [name for name in names if texts[name] in admitted]

    def _lacking(self, flight: Flight, texts: Mapping[bytes, Tokens]) -> Sequence[bytes]:
        """The texts whose cache the store does not hold, or no request of this end user has computed."""
        library = self._library
        keys = [self._key(library, text) for text in texts.values()]
        missing = {key.chunk for key in library.missing_of(keys)}
        return [
            name
            for name, text in texts.items()
            if text in missing or (self._is_new(text) and name not in flight.computed)
        ]

    def _is_new(self, text: Tokens) -> bool:
        """Whether it was not learned text when the prompt was made."""
        return all(place.stored != text for place in self._prompt.layout.places)

    def _stored(self, flight: Flight, texts: Mapping[bytes, Tokens]) -> Mapping[bytes, Tokens]:
        """The texts that are stored now."""
        lacking = set(self._lacking(flight, texts))
        return {name: text for name, text in texts.items() if name not in lacking}

    def _compute(self, flight: Flight, name: bytes, text: Tokens, most_rows: Callable[[], int]) -> Steps[None]:
        """Compute and store the cache of a text, unless another request has done so, or the store takes too long."""
        if name in flight.computed or flight.is_overdue(flight.shared):
            return
        library = self._library
        key = self._key(library, text)
        yield Resume.ENGINE
        cache = yield from library.encoder(key.kind).steps(text, most_rows())
        self.rows_computed += len(text)
        with flight.stalled():
            yield Resume.BACKGROUND
            keep = partial(library.keep, key, cache)
            removed_from(library.store).unless_removed(library.key(key), self._prompt.request.arrived, keep)
        flight.computed.add(name)


def divided(layout: PromptLayout, flight: Flight) -> PromptLayout:
    """The prompt, whose new pieces are divided where other requests in flight have parts of them as theirs."""
    places = list[Place]()
    for place in layout.places:
        is_whole = place.origin is not PlaceOrigin.NEW or digest_of(place.tokens) in flight.computed
        places += [place] if is_whole else _parts(place, flight.index)
    return replace(layout, places=tuple(places))


def brought(layout: PromptLayout, start: int = 0) -> list[Tokens]:
    """The text that the request brings from row `start` on."""
    pairs = zip(layout.places, layout.chunk_spans, strict=True)
    return [place.whole for place, span in pairs if place.is_brought and span.start >= start]


def _parts(place: Place, index: TokenIndex[bytes]) -> list[Place]:
    """A new piece, divided into the texts of the index that lie in it, the longest first, and what is left."""
    tokens = place.tokens
    runs = [run for run in index.runs(tokens) if run.length == len(run.text) < len(tokens)]
    free = np.ones(len(tokens), np.bool_)
    borders = {0, len(tokens)}
    for run in sorted(runs, key=lambda run: (-run.length, run.start)):
        if free[run.rows].all():
            free[run.rows] = False
            borders |= {run.start, run.stop}
    if len(borders) == 2:  # a document may be shorter than a piece
        return [place]
    parts = [tokens[start:stop] for start, stop in pairwise(sorted(borders))]
    return [Place(part, PlaceOrigin.NEW if len(part) >= LEAST_PIECE else PlaceOrigin.TEXT) for part in parts]


def with_learned(layout: PromptLayout, texts: Collection[Tokens]) -> PromptLayout:
    """The prompt, in which these texts are learned text."""
    places = [
        place._replace(origin=PlaceOrigin.LEARNED)
        if place.origin is PlaceOrigin.NEW and place.whole in texts
        else place
        for place in layout.places
    ]
    return replace(layout, places=tuple(places))
