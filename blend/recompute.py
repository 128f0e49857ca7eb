"""Selective recompute: plan which rows may need it, choose among them, and run the decoder over the chosen rows only.

Some selectors need evidence that costs its own pass of the decoder: the question's attention over the stored caches
(`QueryAttention`), or the deviation from full recompute (`true_weight`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.model.forward import AttentionCall, Narrowing, Resume, RowRequest, RowSteps, Steps
from blend.quality import RATIOS, Estimate, Judge, signals_of
from blend.select import All, Evidence, Nothing, QueryScore, Selector, Step
from blend.select.base import KV, needs_of, rows_of, scoring_layers
from blend.types import PromptLayout, Selection, Stopwatch

if TYPE_CHECKING:
    from blend.chunks.assemble import Assembly
    from blend.model.cache import BlendedCache
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
        inexact: stale rows, and rows of a first chunk that its codec rounded.
        stored: how many rows came out of the store.
        budget: how many candidates the selector chooses.
        whole_chunks: whether the model has recurrent layers, which compute all candidates of a chunk or none.
        lead_rows: how many stored rows such a model always computes.

    """

    layout: PromptLayout
    candidates: torch.Tensor
    ahead: torch.Tensor
    required: torch.Tensor
    stale: torch.Tensor
    inexact: torch.Tensor
    stored: int
    budget: int
    selector: Selector
    whole_chunks: bool = False
    lead_rows: int = 0

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
    leads: Sequence[int] | None = None,
    judged: bool = False,
) -> Plan:
    """Sort the rows by the caches found for them, and turn a share of the stored rows into a budget.

    A budget of nothing, or of everything, needs no selector, unless a judge decides later.

    hits: which places came out of the store. ratio: share of the stored rows to recompute. first_exact: whether a stored first
    chunk is exact where it stands, so that it costs no budget. first_lossless: whether its codec kept it to the last bit.
    known: rows of the prefix with known KV; None for all. leads: for a model with recurrent layers, how many first rows of the
    chunk at each place are always computed; they count against the budget. judged: whether a judge chooses the ratio.
    """
    stored = torch.zeros(layout.rows, dtype=torch.bool)
    for hit, span in zip(hits, layout.chunk_spans, strict=True):
        stored[span.start : span.stop] = hit
    after_prefix = torch.arange(len(layout.prefix), layout.rows)
    held = after_prefix[stored[after_prefix]]
    for lead, hit, span in zip(leads or (), hits, layout.chunk_spans, strict=False):
        stored[span.start : span.start + (lead if hit else 0)] = False
    required = after_prefix[~stored[after_prefix]]
    exact_until = layout.chunk_spans[0].stop if first_exact and hits and hits[0] else 0
    stale = held[held >= exact_until]
    candidates, budget, lead_rows = held, round(ratio * held.shape[0]), int((~stored[held]).sum())
    if budget == held.shape[0] or isinstance(selector, All):
        selector, budget = All(), held.shape[0]
    else:
        candidates = stale[stored[stale]]
        budget = min(max(0, budget - lead_rows), candidates.shape[0])
        if leads is not None and budget < _smallest(layout, candidates):
            budget = 0
        selector = selector if budget or (judged and candidates.shape[0]) else Nothing()
    ahead = torch.arange(len(layout.prefix) if known is None else known, len(layout.prefix))
    inexact = stale if first_lossless else held
    on = [part.to(device) for part in (candidates, ahead, required, stale, inexact)]
    whole = leads is not None
    return Plan(layout, on[0], on[1], on[2], on[3], on[4], held.shape[0], budget, selector, whole, lead_rows)


def _smallest(layout: PromptLayout, rows: torch.Tensor) -> int:
    """The fewest of these rows, at least one, that a chunk has."""
    counts = torch.unique(layout.chunk_starts(rows), return_counts=True)[1]
    return int(counts.min()) if counts.shape[0] else 0


class Recompute:
    """Chooses the rows of one prompt and recomputes them: first `select`, then `run`.

    Both yield the passes to run (`Steps`): all rows at once, or with `most_rows` in ascending pieces. A piece reads the rows
    that earlier pieces wrote, as it would in one pass. A selector that chooses while layers are computed gets all rows in
    one piece.

    Args:
        loading: the loading of the stored chunks, into the cache that the rows are written to.
        watch: time goes to its stages "select" and "recompute".
        most_rows: most rows of a piece; None runs all rows at once and does not interleave with other prompts.
        on_rows: called with the positions of all rows that run from then on, before the first piece and after each
            narrowing.
        judge: decides by the question's pass which share of the stored rows is recomputed, instead of the plan; only for
            selectors that choose by the question's attention at layer 0.

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
        judge: Judge | None = None,
    ) -> None:
        self.estimate: Estimate | None = None
        self._judge = judge
        self._decoder, self._plan, self._loading, self._watch = decoder, plan, loading, watch
        self._cache, self._most_rows, self._on_rows = loading.cache, most_rows, on_rows
        self._depth = len(decoder.rotations)
        self._ids = torch.tensor(plan.layout.token_ids, device=decoder.device)
        self._needs = needs_of(plan.selector, self._depth)
        looks = self._needs.query is not None or self._needs.truth
        self._ahead = plan.ahead if looks else plan.ahead[:0]  # the question attends to the prefix, so that runs first
        self._attention: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None  # behind the question's pass
        self._truth: torch.Tensor | None = None
        self._candidates = plan.candidates
        self._always = plan.required if looks else torch.cat((plan.ahead, plan.required))
        self._rows: torch.Tensor = torch.unique(torch.cat((plan.candidates, self._always)))
        self._history = [(0, self._rows.shape[0])]

    def select(self) -> Steps[None]:
        """Choose the rows to recompute, or those that the selector narrows down later, while they run."""
        with self._watch.stage("recompute"):
            for piece in self._pieces(self._ahead):
                yield self._request(piece)
            self._cache.mark()  # the question's pass and the recompute both begin here
        if self._most_rows is not None:  # a pass that other prompts share must neither wait nor fail for this store
            for layer in self._loading.pending:
                yield Resume.BACKGROUND
                self._loading.await_layer(layer)
        yield Resume.ENGINE
        with self._watch.stage("select"):
            if self._needs.query is not None:
                yield from self._ask(self._needs.query)
            if self._needs.truth:
                yield Resume.NEXT_TURN
                self._loading.finish()
                self._truth = true_weight(self._decoder, self._cache, self._plan.layout)
        for step in self._needs.steps:
            if step.layer == 0:
                self._narrow(step, None)
        self._on_rows(self._rows)

    def _ask(self, score: QueryScore) -> Steps[None]:
        """Run the question over the stored caches, for its attention and, if there is a judge, the next token's logits."""
        scoring = self._question(score)
        if self._judge is not None and self._plan.whole_chunks:
            self._on_rows(scoring.rows)
        for piece in self._pieces(scoring.rows):
            # A shared pass runs the layers above the scored ones for nothing, but does not hold up answers. In the last
            # layer it shows only the rows whose logits are wanted.
            if self._most_rows is None and self._judge is None:
                yield Resume.NEXT_TURN
                scoring.watch(piece, self._loading.await_layer)
            else:
                outputs = piece.shape[0] if scoring.last_layer >= self._depth - 1 else 1
                self._logits = yield replace(self._request(piece), observe=scoring.observe, outputs=outputs)
        self._attention = scoring.attention()
        if self._judge is not None and self._logits is not None:
            self._judged(self._judge, self._logits[-1])

    def run(self) -> RowSteps[torch.Tensor]:
        """Recompute the chosen rows; ends with the next token's logits, `[1, vocab]`.

        With recurrent layers the leads run with the question. If they are enough, its pass was the recompute.
        """
        if self._logits is not None and self._plan.whole_chunks and not self._candidates.shape[0]:
            return self._logits[-1:]
        later = [step for step in self._needs.steps if step.layer > 0]
        narrowings = tuple(Narrowing(step.layer, partial(self._narrow_at, step)) for step in later)
        with self._watch.stage("recompute"):
            for piece in [self._rows] if narrowings else self._pieces(self._rows):
                logits = yield replace(self._request(piece), narrowings=narrowings)
        return logits

    def _judged(self, judge: Judge, logits: torch.Tensor) -> None:
        """Let the judge choose how many rows to recompute. logits: of the question's last row, `[vocab]`."""
        assert self._attention is not None
        attention, plan = self._attention.sum(0), self._plan
        budgets = [max(0, round(ratio * plan.stored) - plan.lead_rows) for ratio in RATIOS]
        chosen = [rows_of(plan.selector, self._evidence(Step(0), None, budget)) for budget in budgets]
        computed = [torch.cat((rows, plan.required)) for rows in chosen]
        estimate = judge.choice([signals_of(logits, attention, plan.stale, rows) for rows in computed])
        self.estimate = estimate._replace(ratio=max(estimate.ratio, plan.lead_rows / plan.stored))
        budget = max(plan.budget, round(estimate.ratio * plan.stored) - plan.lead_rows)
        self._plan = replace(plan, budget=budget)

    @property
    def selection(self) -> Selection:
        """The rows that were computed."""
        per_layer = [
            [rows for start, rows in self._history if start <= layer][-1] + self._ahead.shape[0]
            for layer in range(self._depth)
        ]
        per_layer += [1] * (len(self._decoder.layers) - self._depth)  # those that keep no KV
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
        if self._plan.whole_chunks:  # the question's rows need the states of all rows before them
            also = required[required < layout.context.stop]
            return QueryAttention(self._decoder, self._cache, layout, score, also=also)
        return QueryAttention(self._decoder, self._cache, layout, score, required[required < layout.context.stop])

    def _narrow_at(self, step: Step, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The rows to keep from `step` on, given the KV of all rows still there, `[1, kv_heads, rows, head_dim]`."""
        self._loading.await_layer(step.layer)
        self._narrow(step, (keys, values))
        self._on_rows(self._rows)
        return self._rows

    def _narrow(self, step: Step, fresh: KV | None) -> None:
        with self._watch.stage("select"):
            budget = round(step.factor * self._plan.budget)
            self._candidates = rows_of(self._plan.selector, self._evidence(step, fresh, budget))
            self._rows = torch.unique(torch.cat((self._candidates, self._always)))
        self._history.append((step.layer, self._rows.shape[0]))

    def _evidence(self, step: Step, fresh: KV | None, budget: int) -> Evidence:
        candidates = self._candidates
        return Evidence(
            self._plan.layout,
            candidates,
            min(budget, candidates.shape[0]),
            layer=step.layer,
            fresh=_at(fresh, torch.searchsorted(self._rows, candidates)) if fresh else None,
            stored=_at(self._cache.view(step.layer), candidates) if fresh else None,
            query_attention=self._attention[:, candidates] if self._attention is not None else None,
            truth=self._truth[candidates] if self._truth is not None else None,
            whole_chunks=self._plan.whole_chunks,
        )


def _at(kv: KV, index: torch.Tensor) -> KV:
    return kv[0].index_select(2, index), kv[1].index_select(2, index)


class QueryAttention:
    """Attention of the suffix rows over the stored caches, summed over heads.

    Run the suffix with `observe` or `watch`, at once or in ascending pieces, then call `attention`. A row's attention does
    not depend on the pieces. Until the last piece, the attention of every scored layer is kept per head, fp32 `[heads, rows
    of the prompt]`. The suffix rows' KV is written; the recompute overwrites it.

    rows="sum" takes the attention of all suffix rows. rows="peak" takes in each head the largest attention of any suffix
    row, plus that of the last row, where the answer starts; both weigh the same. A sum favours the chunk that resembles the
    question over the one that answers it.

    Args:
        cache: holds the stored caches.
        uncached: positions of context rows without stored KV, int64 `[rows]`; they are blanked.
        also: positions of context rows that run too, int64 `[rows]`. Their attention does not count.

    Attributes:
        rows: positions of the rows to run.
        last_layer: the last scored layer.

    Raises:
        ConfigError: a scored layer that the decoder lacks.

    """

    def __init__(
        self,
        decoder: RowDecoder,
        cache: BlendedCache,
        layout: PromptLayout,
        score: QueryScore,
        uncached: torch.Tensor | None = None,
        also: torch.Tensor | None = None,
    ) -> None:
        self._layers = scoring_layers(score.layers, decoder.attending)
        self._decoder, self._cache, self._layout, self._score = decoder, cache, layout, score
        self._scored, self._ends = list[torch.Tensor](), list[torch.Tensor]()
        self._partial: dict[int, _Partial] = {}
        self.last_layer = self._layers[-1]
        suffix = torch.arange(layout.context.stop, layout.rows, device=decoder.device)
        self._suffix_rows = suffix.shape[0]
        self.rows = suffix if also is None else torch.cat((also, suffix))
        if uncached is not None:
            cache.blank(uncached)

    def watch(self, rows: torch.Tensor, await_layer: Callable[[int], None] | None = None) -> None:
        """Observe these rows in one pass, which ends with the last scored layer. await_layer: see `RowRequest`."""
        ids = torch.tensor([self._layout.token_ids], device=rows.device)[:, rows]
        self._decoder.watch_attention(
            ids, rows, self._cache, self.observe, last_layer=self.last_layer, await_layer=await_layer
        )

    def observe(self, call: AttentionCall) -> None:
        """Add the attention of a layer."""
        of_suffix = int((call.positions >= self._layout.context.stop).sum())
        if call.layer not in self._layers or not of_suffix:
            return
        if of_suffix < call.positions.shape[0]:
            call = replace(call, query=call.query[:, :, -of_suffix:], positions=call.positions[-of_suffix:])
        peak = self._score.rows == "peak"
        heads = call.mass(per_head=True, reduce="max" if peak else "sum")[0]
        before = self._partial.pop(call.layer, _Partial(0, heads[:, :0]))
        seen = before.joined(heads, call.query.shape[2], peak=peak)
        if seen.rows < self._suffix_rows:
            self._partial[call.layer] = seen
            return
        self._scored.append(_over_heads(seen.heads, call, self._score))
        if peak:
            end = replace(call, query=call.query[:, :, -1:], positions=call.positions[-1:])
            self._ends.append(_over_heads(end.mass(per_head=True)[0], call, self._score))

    def attention(self) -> torch.Tensor:
        """Attention of all scored layers, fp32 `[scored layers, rows of the prompt]`."""
        attention = torch.stack(self._scored)
        if self._ends:
            last, context = torch.stack(self._ends), slice(self._layout.context.start, self._layout.context.stop)
            attention += last * (attention[:, context].sum() / last[:, context].sum().clamp_min(1e-20))
        return attention


def true_weight(decoder: RowDecoder, cache: BlendedCache, layout: PromptLayout) -> torch.Tensor:
    """How much each row's stored KV costs the question, from a full prefill, fp32 `[rows of the prompt]`.

    The sum over layers of the suffix rows' attention under full recompute, times the norm of the difference of stored and
    recomputed KV, keys and values each relative to the layer's mean squared norm.
    """
    exact, mass = decoder.new_cache(layout.rows), list[torch.Tensor]()
    suffix = slice(layout.context.stop, None)

    def observe(call: AttentionCall) -> None:
        of_suffix = replace(call, query=call.query[:, :, suffix], positions=call.positions[suffix])
        mass.append(of_suffix.mass()[0])

    every = torch.arange(layout.rows, device=decoder.device)
    decoder.watch_attention(torch.tensor([layout.token_ids], device=decoder.device), every, exact, observe)
    weight = torch.zeros(layout.rows, device=decoder.device)
    for layer, attention in enumerate(mass):
        far = torch.zeros_like(weight)
        for true, stored in zip(exact.view(layer), cache.view(layer), strict=True):
            size = true[0].float().square().sum((0, 2)).mean()
            far += (true - stored)[0].float().square().sum((0, 2)) / size
        weight += attention * far.sqrt()
    return weight


class _Partial(NamedTuple):
    """Attention per head that each key received from the first `rows` rows of the suffix, `[heads, keys]`."""

    rows: int
    heads: torch.Tensor

    def joined(self, heads: torch.Tensor, rows: int, *, peak: bool) -> _Partial:
        """Joined with the attention of the next rows, which may see more keys; overwrites `heads`."""
        known = heads[:, : self.heads.shape[1]]
        torch.maximum(known, self.heads, out=known) if peak else known.add_(self.heads)
        return _Partial(self.rows + rows, heads)


def _over_heads(heads: torch.Tensor, call: AttentionCall, score: QueryScore) -> torch.Tensor:
    """The sum over heads of attention `[heads, keys]`, weighted by the norm of each key's value with `value_norm`."""
    if not score.value_norm:
        return heads.sum(0)
    norm = torch.linalg.vector_norm(call.value[0].float(), dim=-1)
    grouped = heads.view(norm.shape[0], -1, norm.shape[1]).sum(1)
    return torch.sum(grouped * norm, dim=0)
