"""Selective recompute: run the decoder over the chosen rows only, choosing them on the way where the selector needs to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from blend.config import MaskMode
from blend.model.attention import AttentionCall
from blend.model.rows import Narrowing
from blend.select.base import KV, Evidence, Selector, Step
from blend.select.controls import All, Nothing
from blend.select.query_score import QueryScore, scoring_layers
from blend.timing import Stopwatch
from blend.types import PromptLayout, Selection

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache
    from blend.model.decoder import Decoder


@dataclass(frozen=True)
class Plan:
    """What is to be recomputed before the selector has spoken.

    candidates: sorted positions of context rows whose stored KV may differ from full recompute. required: rows after the prefix
    that hold none. stale: rows that hold stored KV and stand elsewhere than where it was computed. budget: candidates to
    recompute. selector: who chooses them.
    """

    layout: PromptLayout
    candidates: torch.Tensor
    required: torch.Tensor
    stale: torch.Tensor
    budget: int
    selector: Selector


def make_plan(
    layout: PromptLayout,
    hits: tuple[bool, ...],
    selector: Selector,
    ratio: float,
    device: torch.device,
    *,
    first_exact: bool = True,
) -> Plan:
    """Split the rows by what the store gave, and turn a share of the stored rows into a budget.

    first_exact: whether a stored first chunk stands where it was computed, right behind the prefix: it is exact then, so no
    budget is spent on it. A budget of nothing, or of everything, needs no selector.
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
    return Plan(layout, candidates.to(device), required.to(device), stale.to(device), budget, selector)


def recompute(
    decoder: Decoder, cache: BlendedCache, plan: Plan, *, mask: MaskMode, watch: Stopwatch
) -> tuple[torch.Tensor, Selection]:
    """Fill `cache` with fresh KV of the selected rows; next-token logits `[1, vocab]` and the selection made.

    Time goes to the stages select, recompute and first_token of `watch`. Raises `ConfigError` when the selector needs a layer
    that the decoder does not have.
    """
    depth = len(decoder.layers)
    needs = plan.selector.needs(depth)
    with watch.stage("select"):
        asked = query_attention(decoder, cache, plan, needs.query, mask) if needs.query else None
        truth = true_weight(decoder, cache, plan.layout) if needs.truth else None
    choice = _Choice(plan, cache, asked, truth, watch)
    for step in (s for s in needs.steps if s.layer == 0):
        choice.narrow(step, None)
    rows = choice.rows
    narrowings = [Narrowing(step.layer, partial(_narrow, choice, step)) for step in needs.steps if step.layer > 0]
    ids = torch.tensor(plan.layout.token_ids, device=decoder.device)[rows][None]
    with watch.stage("recompute"), decoder.before_head(lambda: watch.switch("first_token")):
        logits = decoder.prefill_rows(ids, rows, cache, total=plan.layout.rows, mask=mask, narrowings=narrowings)
    return logits, Selection(choice.rows, choice.rows_per_layer(depth))


def query_attention(
    decoder: Decoder, cache: BlendedCache, plan: Plan, score: QueryScore, mask: MaskMode = "exact"
) -> torch.Tensor:
    """Attention of the suffix rows over the stored caches, summed over heads, fp32 `[scored layers, rows of the prompt]`.

    With rows "sum" all that they give a row. With "peak" the most that any of them gives it in each head, and what the
    last of them gives it, which is where the answer starts; both count alike over the context. In sums, what one head seeks out
    drowns in what all its rows touch: the chunk that resembles the question takes the budget of the one that answers.

    Uncached rows hold nothing yet: they get no part in it. The suffix rows' KV is written, and written again by the recompute.
    Raises `ConfigError` for layers that the decoder does not have.
    """
    layers = scoring_layers(score.layers, len(decoder.layers))
    layout, scored, ends = plan.layout, list[torch.Tensor](), list[torch.Tensor]()
    suffix = torch.arange(layout.context.stop, layout.rows, device=decoder.device)
    uncached = plan.required[plan.required < layout.context.stop]

    def observe(call: AttentionCall) -> None:
        if call.layer in layers:
            scored.append(_over_heads(call, score, "max" if score.rows == "peak" else "sum"))
            if score.rows == "peak":
                end = replace(call, query=call.query[:, :, -1:], positions=call.positions[-1:])
                ends.append(_over_heads(end, score, "sum"))

    cache.blank(uncached)
    ids = torch.tensor([layout.suffix], device=decoder.device)
    decoder.watch_attention(ids, suffix, cache, observe, total=layout.rows, last_layer=layers[-1])
    attention = torch.stack(scored)
    if ends:
        last, context = torch.stack(ends), slice(layout.context.start, layout.context.stop)
        attention += last * (attention[:, context].sum() / last[:, context].sum().clamp_min(1e-20))
    return attention


def true_weight(decoder: Decoder, cache: BlendedCache, layout: PromptLayout) -> torch.Tensor:
    """How much each row's stored KV costs the question, from a full prefill, fp32 `[rows of the prompt]`.

    Over all layers, the attention that the suffix rows give the row under full recompute, times how far its stored KV is from
    the recomputed: the norm of the difference, keys and values each relative to the layer's mean squared norm.
    """
    exact, mass = decoder.new_cache(layout.rows), list[torch.Tensor]()
    suffix = slice(layout.context.stop, None)

    def observe(call: AttentionCall) -> None:
        asked = replace(call, query=call.query[:, :, suffix], positions=call.positions[suffix])
        mass.append(asked.mass()[0])

    every = torch.arange(layout.rows, device=decoder.device)
    decoder.watch_attention(
        torch.tensor([layout.token_ids], device=decoder.device), every, exact, observe, total=layout.rows
    )
    weight = torch.zeros(layout.rows, device=decoder.device)
    for layer, attention in enumerate(mass):
        far = torch.zeros_like(weight)
        for true, stored in zip(exact.view(layer), cache.view(layer), strict=True):
            size = true[0].float().square().sum((0, 2)).mean()
            far += (true - stored)[0].float().square().sum((0, 2)) / size
        weight += attention * far.sqrt()
    return weight


def _over_heads(call: AttentionCall, score: QueryScore, reduce: Literal["sum", "max"]) -> torch.Tensor:
    """What each key receives in a head, joined over rows, summed over heads; weighted by the norm of the value if so wanted."""
    heads = call.mass(per_head=True, reduce=reduce)[0]
    if not score.value_norm:
        return heads.sum(0)
    norm = torch.linalg.vector_norm(call.value[0].float(), dim=-1)
    grouped = heads.view(norm.shape[0], -1, norm.shape[1]).sum(1)
    return torch.sum(grouped * norm, dim=0)


class _Choice:
    """The rows still computed, as the selector narrows them down."""

    def __init__(
        self,
        plan: Plan,
        cache: BlendedCache,
        asked: torch.Tensor | None,
        truth: torch.Tensor | None,
        watch: Stopwatch,
    ) -> None:
        self._plan, self._cache, self._asked, self._truth, self._watch = plan, cache, asked, truth, watch
        self._candidates = plan.candidates
        self.rows = torch.cat((plan.candidates, plan.required)).sort().values
        self._history = [(0, self.rows.shape[0])]

    def narrow(self, step: Step, fresh: KV | None) -> torch.Tensor:
        """The rows to keep from `step` on; `fresh` is the KV of all rows still there, `[1, kv_heads, rows, head_dim]`."""
        with self._watch.stage("select"):
            self._candidates = self._plan.selector.select(self._evidence(step, fresh))
            self.rows = torch.cat((self._candidates, self._plan.required)).sort().values
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
            query_attention=self._asked[:, candidates] if self._asked is not None else None,
            truth=self._truth[candidates] if self._truth is not None else None,
        )


def _narrow(choice: _Choice, step: Step, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return choice.narrow(step, (keys, values))


def _at(kv: KV, index: torch.Tensor) -> KV:
    return kv[0].index_select(2, index), kv[1].index_select(2, index)
