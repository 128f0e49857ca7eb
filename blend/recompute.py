"""Selective recompute: run the decoder over the chosen rows only, choosing them on the way where the selector needs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from blend.model.forward import Narrowing, Resume, RowRequest, Steps
from blend.select import All, Evidence, Nothing, QueryScore, Selector, Step
from blend.select.base import KV, needs_of, rows_of
from blend.select.evidence import QueryAttention, true_weight
from blend.timing import Stopwatch
from blend.types import PromptLayout, Selection

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache
    from blend.model.decoder import RowDecoder


MostRows = int | Callable[[], int]
"""Rows of a piece at most, or what says so before each."""


@dataclass(frozen=True)
class Plan:
    """What is to be recomputed before the selector has spoken.

    candidates: sorted positions of context rows whose stored KV may differ from full recompute. ahead: rows of the prefix that
    are not known. required: rows after it that hold none. stale: rows that hold stored KV and stand elsewhere than where it was
    computed. inexact: those, and with them the rows of a first chunk that its codec rounded. budget: candidates to recompute.
    selector: who chooses them.
    """

    layout: PromptLayout
    candidates: torch.Tensor
    ahead: torch.Tensor
    required: torch.Tensor
    stale: torch.Tensor
    inexact: torch.Tensor
    budget: int
    selector: Selector

    def exact_rows(self, computed: torch.Tensor) -> int:
        """How many of the prompt's first rows are what full prefill gives, if the known rows of the prefix are.

        computed: positions of the rows that were computed in every layer, `[rows]`.
        """
        left = not torch.isin(self.inexact, computed).all()
        return int(self.inexact[0]) if left else self.layout.rows


def make_plan(
    layout: PromptLayout,
    hits: tuple[bool, ...],
    selector: Selector,
    ratio: float,
    device: torch.device,
    *,
    first_exact: bool = True,
    first_lossless: bool = True,
    known: int | None = None,
) -> Plan:
    """Split the rows by what the store gave, and turn a share of the stored rows into a budget.

    first_exact: whether a stored first chunk stands where it was computed, right behind the prefix: it is exact then, so no
    budget is spent on it. first_lossless: whether it is so to the last bit; where its codec rounded it, it is used all the
    same. known: rows of the prefix whose KV is at hand; None for all. A budget of nothing, or of everything, needs no selector.
    """
    stored = torch.zeros(layout.rows, dtype=torch.bool)
    for hit, span in zip(hits, layout.chunk_spans, strict=True):
        stored[span.start : span.stop] = hit
    after_prefix = torch.arange(len(layout.prefix), layout.rows)
    held, required = after_prefix[stored[after_prefix]], after_prefix[~stored[after_prefix]]
    exact_until = layout.chunk_spans[0].stop if first_exact and hits and hits[0] else 0
    stale = held[held >= exact_until]
    candidates, budget = held, round(ratio * held.shape[0])
    if budget == held.shape[0] or isinstance(selector, All):
        selector, budget = All(), held.shape[0]
    else:
        candidates = stale
        budget = min(budget, candidates.shape[0])
        selector = selector if budget else Nothing()
    ahead = torch.arange(len(layout.prefix) if known is None else known, len(layout.prefix))
    inexact = stale if first_lossless else held
    on = [part.to(device) for part in (candidates, ahead, required, stale, inexact)]
    return Plan(layout, on[0], on[1], on[2], on[3], on[4], budget, selector)


def recompute(
    decoder: RowDecoder,
    cache: BlendedCache,
    plan: Plan,
    *,
    watch: Stopwatch,
    most_rows: MostRows | None = None,
    on_rows: Callable[[torch.Tensor], None],
) -> Steps[tuple[torch.Tensor, Selection]]:
    """Fill `cache` with fresh KV of the selected rows; next-token logits `[1, vocab]` and the selection made.

    The rows are yielded, to be run by `Decoder.prefill`, alone or beside other prompts' rows, and its logits sent back. All at
    once, or with `most_rows` in pieces of no more, positions ascending: a row reads what the pieces before it wrote, as it
    would in one pass. A selector that chooses while layers are computed sees all rows in one piece. on_rows: called with the
    positions of all rows that are computed from then on, before the first piece, and again whenever the selector narrows them.

    Time goes to the stages select and recompute of `watch`. Raises `ConfigError` when the selector needs a layer that the
    decoder does not have, or breaks its contract (`blend.select.base`).
    """
    depth, ids = len(decoder.layers), torch.tensor(plan.layout.token_ids, device=decoder.device)
    needs = needs_of(plan.selector, depth)
    asks = needs.query is not None or needs.truth
    before = plan.ahead if asks else plan.ahead[:0]  # the question looks at the prefix, so that comes first
    with watch.stage("recompute"):
        for piece in _pieces(before, most_rows):
            yield RowRequest(ids[piece][None], piece, cache)
    if (
        most_rows is not None
    ):  # other prompts' rows are in the same passes, and they neither wait nor fail for these layers
        for layer in cache.layers:
            if layer.on_use is not None:
                yield Resume.BESIDE
                layer.settle()
    yield Resume.HERE
    with watch.stage("select"):
        attention = (yield from _query_attention(decoder, cache, plan, needs.query, most_rows)) if needs.query else None
        if needs.truth:
            yield Resume.TURN
        truth = true_weight(decoder, cache, plan.layout) if needs.truth else None
    choice = _Choice(plan, cache, attention, truth, watch, with_prefix=not asks)
    for step in (s for s in needs.steps if s.layer == 0):
        choice.narrow(step, None)
    on_rows(choice.rows)
    narrow = partial(_narrow, choice, on_rows)
    narrowings = tuple(Narrowing(step.layer, partial(narrow, step)) for step in needs.steps if step.layer > 0)
    with watch.stage("recompute"):
        for piece in _pieces(choice.rows, None if narrowings else most_rows):
            logits = yield RowRequest(ids[piece][None], piece, cache, narrowings)
    scores = attention.sum(0) if attention is not None else None
    return logits, Selection(choice.rows, choice.rows_per_layer(depth), scores).behind(before)


def _pieces(rows: torch.Tensor, most: MostRows | None) -> Iterator[torch.Tensor]:
    while rows.shape[0]:
        piece = rows[: most() if callable(most) else most]
        yield piece
        rows = rows[piece.shape[0] :]


def _query_attention(
    decoder: RowDecoder, cache: BlendedCache, plan: Plan, score: QueryScore, most_rows: MostRows | None
) -> Steps[torch.Tensor]:
    """The question's attention, as `query_attention` gives it; in pieces its rows are run beside other prompts' rows too.

    They then go through the layers above those that are looked at for nothing, which is little where answers wait meanwhile.
    In the last layer a pass for KV shows the last of its rows alone: pieces that are looked at there have passes of their own.
    """
    uncached = plan.required[plan.required < plan.layout.context.stop]
    scoring = QueryAttention(decoder, cache, plan.layout, score, uncached)
    for piece in _pieces(scoring.rows, most_rows):
        if most_rows is None or scoring.last_layer == len(decoder.layers) - 1:
            yield Resume.TURN
            scoring.watch(decoder, cache, piece)
        else:
            yield RowRequest(scoring.ids_of(piece), piece, cache, observe=scoring.observe)
    return scoring.attention()


class _Choice:
    """The rows still computed, as the selector narrows them down."""

    def __init__(
        self,
        plan: Plan,
        cache: BlendedCache,
        attention: torch.Tensor | None,
        truth: torch.Tensor | None,
        watch: Stopwatch,
        *,
        with_prefix: bool,
    ) -> None:
        self._plan, self._cache, self._attention, self._truth, self._watch = plan, cache, attention, truth, watch
        self._candidates = plan.candidates
        self._always = torch.cat((plan.ahead, plan.required)) if with_prefix else plan.required
        self.rows = torch.cat((plan.candidates, self._always)).sort().values
        self._history = [(0, self.rows.shape[0])]

    def narrow(self, step: Step, fresh: KV | None) -> torch.Tensor:
        """The rows to keep from `step` on; `fresh` is the KV of all rows still there, `[1, kv_heads, rows, head_dim]`."""
        with self._watch.stage("select"):
            self._candidates = rows_of(self._plan.selector, self._evidence(step, fresh))
            self.rows = torch.cat((self._candidates, self._always)).sort().values
        self._history.append((step.layer, self.rows.shape[0]))
        return self.rows

    def rows_per_layer(self, depth: int) -> tuple[int, ...]:
        """How many rows each layer ran on."""
        return tuple([rows for start, rows in self._history if start <= layer][-1] for layer in range(depth))

    def _evidence(self, step: Step, fresh: KV | None) -> Evidence:
        candidates, budget = self._candidates, round(step.factor * self._plan.budget)
        return Evidence(
            self._plan.layout,
            candidates,
            min(budget, candidates.shape[0]),
            layer=step.layer,
            fresh=_at(fresh, torch.searchsorted(self.rows, candidates)) if fresh else None,
            stored=_at(self._cache.view(step.layer), candidates) if fresh else None,
            query_attention=self._attention[:, candidates] if self._attention is not None else None,
            truth=self._truth[candidates] if self._truth is not None else None,
        )


def _narrow(
    choice: _Choice, on_rows: Callable[[torch.Tensor], None], step: Step, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    rows = choice.narrow(step, (keys, values))
    on_rows(rows)
    return rows


def _at(kv: KV, index: torch.Tensor) -> KV:
    return kv[0].index_select(2, index), kv[1].index_select(2, index)
