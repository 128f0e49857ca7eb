"""Which rows of a prompt may need recomputing, and how many of them are. Everything here is known without the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from blend.layout import PlaceOrigin, PromptLayout
from blend.prefill.resources import MovedRows
from blend.select import All, Nothing, Selector

Rows: TypeAlias = NDArray[np.int64]
SEAM = 32  # first moved rows behind an edit, which are always computed; measured in docs/study.md
MOVED_RATIO = 0.02  # least share of the other moved rows to recompute; measured there, too
PER_EDITED = 2  # rows to recompute for each edited one


@dataclass(frozen=True)
class Plan:
    """The rows of a prompt, before the selector chooses; all are sorted positions.

    Attributes:
        candidates: context rows whose stored KV may differ from full recompute.
        ahead: rows of the prefix without known KV.
        required: later rows without stored KV, and the first moved ones behind an edit.
        leads: rows with stored KV that are always computed, where the model has recurrent layers.
        stale: rows whose stored KV was computed elsewhere.
        inexact: stale rows, and rows of a first chunk that its codec rounded.
        stored: how many rows came out of the store.
        budget: how many candidates the selector chooses.
        whole_chunks: whether the model has recurrent layers, which compute all candidates of a chunk or none.

    """

    layout: PromptLayout
    candidates: Rows
    ahead: Rows
    required: Rows
    leads: Rows
    stale: Rows
    inexact: Rows
    stored: int
    budget: int
    selector: Selector
    whole_chunks: bool = False

    @property
    def lead_rows(self) -> int:
        """How many stored rows are always computed."""
        return len(self.leads)

    def exact_rows(self, computed: Rows) -> int:
        """How many first rows equal full prefill, if the known rows do. computed: positions computed in every layer."""
        remaining = self.inexact[~np.isin(self.inexact, computed)]
        return int(self.inexact[0]) if len(remaining) else self.layout.rows

    def restarts(self, hits: Sequence[bool], computed: Rows) -> list[int]:
        """First rows of stored chunks behind others that a pass over the computed rows leaves out; none if it is exact.

        hits: which places came out of the store. computed: positions.
        """
        if np.isin(self.stale, computed).all():
            return []
        pairs = zip(self.layout.chunk_spans, hits, strict=True)
        spans = [span for span, hit in pairs if hit and span.length]
        return [span.start for before, span in pairwise(spans) if before.stop - 1 not in computed]


def make_plan(
    layout: PromptLayout,
    hits: Sequence[bool],
    selector: Selector,
    ratio: float,
    *,
    first_exact: bool,
    first_lossless: bool,
    known: int,
    leads: Sequence[int] | None,
    judged: bool,
    moved: MovedRows,
) -> Plan:
    """Sort the rows by the caches that they have, and turn a share of the stored rows into a budget.

    Args:
        layout: the prompt.
        hits: which places came out of the store.
        selector: chooses rows.
        ratio: share of the stored rows to recompute, except moved ones.
        first_exact: whether a stored first chunk is exact where it stands, so that it costs no budget.
        first_lossless: whether its codec kept it to the last bit.
        known: rows of the prefix with known KV.
        leads: how many first rows of each place's chunk recurrent layers always compute; they count against the budget.
        judged: whether a judge chooses the ratio later; else a budget of nothing, or of everything, needs no selector.
        moved: the rows of `MOVED` places.
    """
    bounds = np.array(layout.bounds, np.int64)
    lengths = np.diff(bounds)
    rows = np.arange(bounds[0], bounds[-1])
    has_cache, moved_rows = _cached(layout, np.repeat(np.array(hits, bool), lengths), moved.sound)
    stored = rows[has_cache]
    lead_stops = bounds[:-1] + np.array(leads or 0, np.int64)
    is_lead = (rows < np.repeat(lead_stops, lengths))[has_cache]
    lead_rows = stored[is_lead]
    required = np.sort(np.concatenate((rows[~has_cache], lead_rows, np.arange(bounds[-1], layout.rows))), kind="stable")
    exact_until = bounds[1] if first_exact and hits and hits[0] else 0
    stale = stored[stored >= exact_until]
    budget = len(stored) if isinstance(selector, All) else _budget(len(stored), moved_rows, ratio, moved)
    if budget == len(stored):
        candidates = stored[~is_lead]
        selector = All()
    else:
        candidates = stored[~is_lead & (stored >= exact_until)]
        budget = _affordable(budget - len(lead_rows), candidates, None if leads is None else bounds)
        selector = selector if budget or (judged and len(candidates)) else Nothing()
    return Plan(
        layout=layout,
        candidates=candidates,
        ahead=np.arange(known, bounds[0]),
        required=required,
        leads=lead_rows,
        stale=stale,
        inexact=stale if first_lossless else stored,
        stored=len(stored),
        budget=budget,
        selector=selector,
        whole_chunks=leads is not None,
    )


def _cached(
    layout: PromptLayout, has_cache: NDArray[np.bool_], sound: NDArray[np.bool_] | None
) -> tuple[NDArray[np.bool_], int]:
    """Which rows of the places take KV from a cache, seams not; and how many of them are moved.

    has_cache: of their places. sound: see `MovedRows`.
    """
    if PlaceOrigin.MOVED not in [place.origin for place in layout.places]:
        return has_cache, 0
    moved = np.zeros_like(has_cache)
    reached = -1  # the row of the earlier prompt behind the last place
    seam = 0  # rows that are still to be computed; a place may be shorter
    for place, span in zip(layout.places, layout.chunk_spans, strict=True):
        if place.origin is not PlaceOrigin.MOVED:
            reached = -1
            continue
        start = span.start - layout.context.start
        stop = start + span.length
        moved[start:stop] = True
        if sound is not None:
            has_cache[start:stop] &= sound[place.first : place.first + span.length]
        if place.first != reached:
            seam = SEAM
        computed = min(seam, span.length)
        has_cache[start : start + computed] = False
        seam -= computed
        reached = place.first + span.length
    return has_cache, int(np.count_nonzero(moved & has_cache))


def _budget(stored: int, moved: int, ratio: float, rows: MovedRows) -> int:
    """How many of the stored rows to recompute. moved: how many of them are of `rows`."""
    moved_ratio = min(ratio, max(MOVED_RATIO, PER_EDITED * rows.edited)) if rows.sound is None else 0.0
    return round(ratio * (stored - moved) + moved_ratio * moved)


def _affordable(budget: int, candidates: Rows, bounds: Rows | None) -> int:
    """The budget within what there is to choose. bounds: of places whose candidates are computed all or not at all."""
    budget = min(max(0, budget), len(candidates))
    if bounds is None or not budget:
        return budget
    counts = np.histogram(candidates, bounds)[0]
    return budget if budget >= counts[counts > 0].min() else 0
