"""Selective recompute: plan which rows may need it, choose among them, and run the decoder over the chosen rows only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from blend.model.forward import Narrowing, Resume, RowRequest, RowSteps, Steps
from blend.select import All, Evidence, Nothing, QueryScore, Selector, Step
from blend.select.base import KV, needs_of, rows_of
from blend.select.evidence import QueryAttention, true_weight
from blend.timing import Stopwatch
from blend.types import PromptLayout, Selection

if TYPE_CHECKING:
    from blend.chunks.assemble import Assembly
    from blend.model.decoder import RowDecoder


MostRows = int | Callable[[], int]
"""Most rows of a piece, or a function that says so before each piece."""


@dataclass(frozen=True)
class Plan:
    """The rows of a prompt, before the selector chooses; all are sorted positions, int64.

    Attributes:
        candidates: context rows whose stored KV may differ from full recompute.
        ahead: rows of the prefix without known KV.
        required: later rows without stored KV.
        stale: rows whose stored KV was computed elsewhere.
        inexact: stale rows, and the rows of a first chunk that its codec rounded.
        budget: how many candidates to recompute.
        selector: chooses them.

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
        """How many first rows equal full prefill, if the known rows do. computed: positions computed in every layer."""
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
    """Sort the rows by what the store gave, and turn a share of the stored rows into a budget.

    A budget of nothing, or of everything, needs no selector.

    Args:
        layout: the prompt.
        hits: which chunks came out of the store.
        selector: chooses rows.
        ratio: share of the stored rows to recompute.
        device: of the rows.
        first_exact: whether a stored first chunk is exact where it stands, so that it costs no budget.
        first_lossless: whether its codec kept it to the last bit.
        known: rows of the prefix with known KV; None for all.

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


class Recompute:
    """Chooses the rows of one prompt and recomputes them: first `select`, then `run`.

    Both yield the passes to run (`Steps`): all rows at once, or with `most_rows` in ascending pieces. A piece reads what those
    before it wrote, as it would in one pass. A selector that chooses while layers are computed gets all rows in one piece.

    Args:
        decoder: that runs the rows.
        plan: the rows to choose from.
        loading: of the stored chunks, into the cache that the rows are written to.
        watch: time goes to its stages "select" and "recompute".
        most_rows: rows of a piece at most; None runs all rows at once and does not interleave with other prompts.
        on_rows: called with the positions of all rows that run from then on, before the first piece and after each narrowing.

    Raises:
        ConfigError: the selector needs a layer that the decoder lacks, or breaks its contract (`blend.select.base`).

    """

    def __init__(
        self,
        decoder: RowDecoder,
        plan: Plan,
        loading: Assembly,
        watch: Stopwatch,
        *,
        most_rows: MostRows | None = None,
        on_rows: Callable[[torch.Tensor], None],
    ) -> None:
        self._decoder, self._plan, self._loading, self._watch = decoder, plan, loading, watch
        self._cache, self._most_rows, self._on_rows = loading.cache, most_rows, on_rows
        self._depth = len(decoder.layers)
        self._ids = torch.tensor(plan.layout.token_ids, device=decoder.device)
        self._needs = needs_of(plan.selector, self._depth)
        looks = self._needs.query is not None or self._needs.truth
        self._ahead = plan.ahead if looks else plan.ahead[:0]  # the question attends to the prefix, so that runs first
        self._attention: torch.Tensor | None = None
        self._truth: torch.Tensor | None = None
        self._candidates = plan.candidates
        self._always = plan.required if looks else torch.cat((plan.ahead, plan.required))
        self._rows = torch.cat((plan.candidates, self._always)).sort().values
        self._history = [(0, self._rows.shape[0])]

    def select(self) -> Steps[None]:
        """Choose the rows to recompute, or those that the selector narrows down later, while they run."""
        with self._watch.stage("recompute"):
            for piece in self._pieces(self._ahead):
                yield self._request(piece)
        if (
            self._most_rows is not None
        ):  # a pass that other prompts share must neither wait nor fail for this one's store
            for layer in self._loading.pending:
                yield Resume.BACKGROUND
                self._loading.await_layer(layer)
        yield Resume.ENGINE
        with self._watch.stage("select"):
            if self._needs.query is not None:
                scoring = self._question(self._needs.query)
                for piece in self._pieces(scoring.rows):
                    # A shared pass runs the layers above the scored ones for nothing, but does not hold up answers. In the last
                    # layer it shows only a piece's last row, so pieces run separately where that layer is scored.
                    if self._most_rows is None or scoring.last_layer == self._depth - 1:
                        yield Resume.NEXT_TURN
                        scoring.watch(self._decoder, self._cache, piece, self._loading.await_layer)
                    else:
                        yield replace(self._request(piece), observe=scoring.observe)
                self._attention = scoring.attention()
            if self._needs.truth:
                yield Resume.NEXT_TURN
                self._loading.finish()
                self._truth = true_weight(self._decoder, self._cache, self._plan.layout)
        for step in self._needs.steps:
            if step.layer == 0:
                self._narrow(step, None)
        self._on_rows(self._rows)

    def run(self) -> RowSteps[torch.Tensor]:
        """Recompute the chosen rows; ends with the next token's logits, `[1, vocab]`."""
        later = [step for step in self._needs.steps if step.layer > 0]
        narrowings = tuple(Narrowing(step.layer, partial(self._narrow_at, step)) for step in later)
        with self._watch.stage("recompute"):
            for piece in [self._rows] if narrowings else self._pieces(self._rows):
                logits = yield replace(self._request(piece), narrowings=narrowings)
        return logits

    @property
    def selection(self) -> Selection:
        """The rows that were computed."""
        per_layer = (
            [rows for start, rows in self._history if start <= layer][-1] + self._ahead.shape[0]
            for layer in range(self._depth)
        )
        scores = self._attention.sum(0) if self._attention is not None else None
        return Selection(torch.cat((self._ahead, self._rows)), tuple(per_layer), scores)

    def _request(self, rows: torch.Tensor) -> RowRequest:
        return RowRequest(self._ids[rows][None], rows, self._cache, await_layer=self._loading.await_layer)

    def _pieces(self, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        most = self._most_rows
        while rows.shape[0]:
            piece = rows[: most() if callable(most) else most]
            yield piece
            rows = rows[piece.shape[0] :]

    def _question(self, score: QueryScore) -> QueryAttention:
        layout, required = self._plan.layout, self._plan.required
        return QueryAttention(self._decoder, self._cache, layout, score, required[required < layout.context.stop])

    def _narrow_at(self, step: Step, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The rows to keep from `step` on, given the KV of all rows still there, `[1, kv_heads, rows, head_dim]`."""
        self._loading.await_layer(step.layer)
        self._narrow(step, (keys, values))
        self._on_rows(self._rows)
        return self._rows

    def _narrow(self, step: Step, fresh: KV | None) -> None:
        with self._watch.stage("select"):
            self._candidates = rows_of(self._plan.selector, self._evidence(step, fresh))
            self._rows = torch.cat((self._candidates, self._always)).sort().values
        self._history.append((step.layer, self._rows.shape[0]))

    def _evidence(self, step: Step, fresh: KV | None) -> Evidence:
        candidates, budget = self._candidates, round(step.factor * self._plan.budget)
        return Evidence(
            self._plan.layout,
            candidates,
            min(budget, candidates.shape[0]),
            layer=step.layer,
            fresh=_at(fresh, torch.searchsorted(self._rows, candidates)) if fresh else None,
            stored=_at(self._cache.view(step.layer), candidates) if fresh else None,
            query_attention=self._attention[:, candidates] if self._attention is not None else None,
            truth=self._truth[candidates] if self._truth is not None else None,
        )


def _at(kv: KV, index: torch.Tensor) -> KV:
    return kv[0].index_select(2, index), kv[1].index_select(2, index)
