"""Which text of a prompt no cache serves, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blend.layout import PlaceOrigin, Span
from blend.serve.reasons import EDITED, NEW, REFUSED, TOO_SHORT, ComputedPart, Word
from blend.serve.token_index import LEAST_PIECE, Flags, Ids, TextRun, digest_of, stretches

if TYPE_CHECKING:
    from blend.layout import PromptLayout

Past = Callable[[bytes], Word]
"""Why a new piece of a prompt is not learned, by its digest."""


class ComputedText:
    """Says why text of a prompt is computed.

    Args:
        ids: of the prompt.
        layout: the same with its places.
        runs: of learned text, used or not.
        control: ids of control tokens, at which messages end.
        past: see `Past`; None if nothing is learned.

    """

    def __init__(
        self, ids: Ids, layout: PromptLayout, runs: Iterable[TextRun[Any]], control: frozenset[int], past: Past | None
    ) -> None:
        self._ids = ids
        self._control = control
        self._past = past
        self._known = np.zeros(len(ids), np.bool_)
        for run in runs:
            self._known[run.rows] = True
        self._stored = np.zeros(len(ids), np.bool_)
        self._new = list[Span]()
        self._begins = set[int]()  # of stored text
        self._ends = set[int]()
        self._cut_ends = set[int]()  # where the stored text would go on
        for place, span in zip(layout.places, layout.chunk_spans, strict=True):
            if place.origin is PlaceOrigin.NEW:
                self._new.append(span)
            if place.stored is not None:
                self._stored[slice(*span)] = True
                self._begins.add(span.start)
                self._ends.add(span.stop)
                if place.first + len(place.tokens) < len(place.stored):
                    self._cut_ends.add(span.stop)

    def parts(self, searched: Flags, foreign: Flags, question: Span | None) -> Iterator[ComputedPart]:
        """The parts that are computed, among the tokens that were searched for known text.

        foreign: text of other corpora than the prompt's. question: new text in front of the last tokens.
        """
        computed = searched & ~self._stored
        for span in (*self._new, *filter(None, [question])):
            computed[slice(*span)] = False
            yield ComputedPart(*span, self._of_piece(*span))
        for start, stop in stretches(computed & foreign):
            yield ComputedPart(start, stop, REFUSED)
        for start, stop in stretches(computed & ~foreign):
            yield ComputedPart(start, stop, self._of_rest(start, stop))

    def _of_piece(self, start: int, stop: int) -> Word:
        if self._past is None:
            return REFUSED
        word = self._past(digest_of(self._ids[start:stop].tolist()))
        return EDITED if word == NEW and self._is_edited(start, stop) else word

    def _of_rest(self, start: int, stop: int) -> Word:
        if self._past is None and stop - start >= LEAST_PIECE:
            return REFUSED
        return EDITED if self._is_edited(start, stop) else TOO_SHORT

    def _is_edited(self, start: int, stop: int) -> bool:
        """Whether the text holds known text, goes on where known text went on otherwise, or parts known text of a message."""
        if self._known[start:stop].any():
            return True
        tokens: Sequence[int] = self._ids[start:stop].tolist()
        if start in self._cut_ends and tokens[0] not in self._control:
            return True
        return start in self._ends and stop in self._begins and self._control.isdisjoint(tokens)
