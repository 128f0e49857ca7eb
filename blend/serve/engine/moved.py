"""Text of an end user's earlier prompt in a new one: its rows there move to their new places.

They were computed in context, behind nearly the same text, so they are closer to full recompute than caches that were computed
apart. But they have read what stood before them. So they serve only the end user whose prompt they are from.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from blend.serve.token_index import TokenIndex, longest_first
from blend.types import Place, PlaceOrigin, PromptLayout, Tokens, common_length

LEAST_SHARE = 0.5  # of a prompt's places that another one must hold; else it is another conversation


class Moved(NamedTuple):
    """A prompt with moved places.

    begin, end: the rows of the earlier prompt that they are parts of. edited: see `MovedRows`.
    """

    layout: PromptLayout
    begin: int
    end: int
    edited: float


def moved(layout: PromptLayout, earlier: Tokens) -> Moved | None:
    """The prompt with the places that stand as a whole in an earlier one; None if that holds too little of it.

    Chunks of a corpus stay as they are: their caches give the same answer whatever was asked before.
    """
    index = TokenIndex[int]()
    index.update((), {0: earlier})
    ids = np.array(layout.token_ids, np.int32)
    runs = longest_first(index.runs(ids), np.ones(len(ids), np.bool_))
    source = np.full(len(ids), -1)  # the row of the earlier prompt that each row was
    for run in runs:
        source[run.rows] = np.arange(run.first, run.first + run.length)
    same = common_length(layout.prefix, earlier)
    places = list(layout.places)
    firsts = dict[int, int]()
    for number, span in enumerate(layout.chunk_spans):
        was = source[span.start : span.stop]
        is_moved = len(was) and was[0] >= 0 and (np.diff(was) == 1).all()
        if is_moved and places[number].origin is not PlaceOrigin.CORPUS:
            firsts[number] = int(was[0])
    count = sum(len(places[number].tokens) for number in firsts)
    if not count or count < LEAST_SHARE * (layout.context.stop - layout.context.start):
        return None
    begin = min(firsts.values())
    end = max(first + len(places[number].tokens) for number, first in firsts.items())
    last = layout.chunk_spans[max(firsts)].stop
    matched = source[same:last]
    inserted = int(np.count_nonzero(matched < 0))
    dropped = end - same - int(np.count_nonzero((matched >= same) & (matched < end)))
    for number, first in firsts.items():
        places[number] = Place(places[number].tokens, PlaceOrigin.MOVED, first=first - begin)
    moved_layout = PromptLayout(layout.prefix, tuple(places), layout.suffix, layout.canonical_prefix)
    return Moved(moved_layout, begin, end, (inserted + max(0, dropped)) / count)
