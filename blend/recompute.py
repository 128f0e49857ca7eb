"""Selective recompute: run the decoder over the chosen rows only, choosing them on the way where the selector needs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from blend.config import MaskMode
from blend.driver import Narrowing
from blend.select.base import KV, Evidence, Selector
from blend.select.controls import All, Nothing
from blend.timing import Stopwatch
from blend.types import PromptLayout, Selection

if TYPE_CHECKING:
    from blend.blended_cache import BlendedCache
    from blend.decoder import Decoder


@dataclass(frozen=True)
class Plan:
    """What is to be recomputed before the selector has spoken.

    candidates: sorted positions of context rows that hold stored KV. required: all other rows after the prefix.
    budget: candidates to recompute. selector: who chooses them.
    """

    layout: PromptLayout
    candidates: torch.Tensor
    required: torch.Tensor
    budget: int
    selector: Selector


def make_plan(
    layout: PromptLayout, hits: tuple[bool, ...], selector: Selector, ratio: float, device: torch.device
) -> Plan:
    """Split the rows by what the store gave. A budget of nothing or of everything needs no selector: it is known at once."""
    stored = torch.zeros(layout.rows, dtype=torch.bool)
    for hit, span in zip(hits, layout.chunk_spans, strict=True):
        stored[span.start : span.stop] = hit
    after_prefix = torch.arange(len(layout.prefix), layout.rows)
    candidates, required = after_prefix[stored[after_prefix]], after_prefix[~stored[after_prefix]]
    budget = round(ratio * candidates.shape[0])
    if budget == candidates.shape[0] or isinstance(selector, All):
        selector, budget = All(), candidates.shape[0]
    elif budget == 0:
        selector = Nothing()
    return Plan(layout, candidates.to(device), required.to(device), budget, selector)


def recompute(
    decoder: Decoder, cache: BlendedCache, plan: Plan, *, mask: MaskMode, watch: Stopwatch
) -> tuple[torch.Tensor, Selection]:
    """Fill `cache` with fresh KV of the selected rows; next-token logits `[1, vocab]` and the selection made.

    Time goes to the stages select, recompute and first_token of `watch`.
    """
    start_layer = plan.selector.check_layer
    if start_layer == 0 or start_layer >= len(decoder.layers):
        with watch.stage("select"):
            rows = _merge(plan, Evidence(plan.layout, plan.candidates, plan.budget))
        return _run(decoder, cache, plan.layout, rows, mask, None, watch), Selection(rows, 0)
    chosen: list[torch.Tensor] = []

    def choose(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        with watch.stage("select"):
            chosen.append(_merge(plan, _evidence(plan, (keys, values), cache.view(start_layer))))
        return chosen[0]

    first = len(plan.layout.prefix)
    every = torch.arange(first, plan.layout.rows, device=decoder.device)
    logits = _run(decoder, cache, plan.layout, every, mask, Narrowing(start_layer, choose), watch)
    return logits, Selection(chosen[0], start_layer)


def _evidence(plan: Plan, fresh: KV, stored: KV) -> Evidence:
    """Fresh KV starts after the prefix, stored KV at row 0; cut both to the candidates."""
    index = plan.candidates - len(plan.layout.prefix)
    return Evidence(
        plan.layout,
        plan.candidates,
        plan.budget,
        fresh=(fresh[0].index_select(2, index), fresh[1].index_select(2, index)),
        stored=(stored[0].index_select(2, plan.candidates), stored[1].index_select(2, plan.candidates)),
    )


def _merge(plan: Plan, evidence: Evidence) -> torch.Tensor:
    return torch.cat((plan.selector.select(evidence), plan.required)).sort().values


def _run(
    decoder: Decoder,
    cache: BlendedCache,
    layout: PromptLayout,
    rows: torch.Tensor,
    mask: MaskMode,
    narrowing: Narrowing | None,
    watch: Stopwatch,
) -> torch.Tensor:
    ids = torch.tensor(layout.token_ids, device=decoder.device)[rows][None]
    with watch.stage("recompute"), decoder.before_head(lambda: watch.switch("first_token")):
        return decoder.prefill_rows(ids, rows, cache, total=layout.rows, mask=mask, narrowing=narrowing)
