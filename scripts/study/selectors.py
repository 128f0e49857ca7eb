"""Selectors of the study alone: an oracle that knows full recompute, and rules that chose no better than the product's."""

from __future__ import annotations

from abc import abstractmethod
from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from blend.config import BlendConfig
from blend.errors import ConfigError
from blend.layout import PromptLayout
from blend.model.attention import AttentionCall
from blend.model.cache import BlendedCache, Run
from blend.prefill.blender import Blender
from blend.prefill.question import QueryAttention
from blend.select import Evidence, Mixed, Needs, QueryGuided, QueryScore, ScoringSelector, Selector, Step, make_selector
from blend.select.base import scoring_layers
from blend.select.selectors import seen_deviation

STORED = BlendConfig(selector="none")  # the caches as the default selector reads them, no context row recomputed


@dataclass(frozen=True)
class OverCaches(ScoringSelector):
    """A selector that scores rows by passes of its own. Scores of the last prompt are remembered: other ratios need no pass."""

    blender: Blender = field(kw_only=True)
    remembered: dict[PromptLayout, Tensor] = field(default_factory=dict, kw_only=True, compare=False)

    @abstractmethod
    def scores(self, layout: PromptLayout, stored: BlendedCache) -> Tensor:
        """Scores of all rows, fp32 `[rows of the prompt]`. stored: the caches, corrected; its question rows may change."""

    @torch.inference_mode()
    def select(self, evidence: Evidence) -> Tensor:
        """The rows with the highest scores."""
        layout = evidence.layout
        if layout not in self.remembered:
            self.remembered.clear()
            self.remembered[layout] = self.scores(layout, self.blender.prefill(layout, config=STORED).cache)
        return self.allot(self.remembered[layout][evidence.candidates], evidence)


@dataclass(frozen=True)
class Oracle(OverCaches):
    """Rows with the most true deviation times true attention, known from full recompute.

    Attention is the question's under full recompute; deviation is the distance of stored from recomputed KV, of keys and values
    each relative to the layer's mean. Both are taken in every layer. It costs a full prefill, so it can never be faster than
    one: it bounds what a choice of rows can gain.
    """

    name: ClassVar[str] = "oracle"

    def scores(self, layout: PromptLayout, stored: BlendedCache) -> Tensor:
        """Attention times deviation, summed over layers."""
        decoder = self.blender.decoder
        exact = decoder.new_cache(layout.rows)
        question_rows = layout.rows - layout.context.stop
        attentions: list[Tensor] = []

        def observe(call: AttentionCall) -> None:
            (attention,) = call.of_last_rows(question_rows).masses()[:, 0].sum(1)
            attentions.append(attention)

        ids = torch.from_numpy(layout.ids)[None].to(decoder.device)
        decoder.watch_attention(ids, Run.consecutive(0, layout.rows, decoder.device), exact, observe)
        weights = torch.zeros(layout.rows, device=decoder.device)
        for layer, attention in enumerate(attentions):
            distance = torch.zeros_like(weights)
            for true, reused in zip(exact.view(layer), stored.view(layer), strict=True):
                distance += _squared_norms(true - reused) / _squared_norms(true).mean()
            weights += attention * distance.sqrt()
        return weights


def _squared_norms(states: Tensor) -> Tensor:
    """Of rows `[1, kv_heads, rows, head_dim]`, over heads and dimensions, fp32 `[rows]`."""
    return states[0].float().square().sum((0, 2))


@dataclass(frozen=True)
class Sums(OverCaches):
    """As query_guided, by attention summed over the question's rows; last: by that of its last row alone."""

    name: ClassVar[str] = "sums"
    own_lead: ClassVar[int] = QueryGuided.own_lead

    layers: str = "middle"
    last: int = 0

    def scores(self, layout: PromptLayout, stored: BlendedCache) -> Tensor:
        """Attention summed over heads and the scored layers."""
        decoder = self.blender.decoder
        layers = scoring_layers(self.layers, decoder.attending)
        counted_rows = self.last or layout.rows - layout.context.stop
        attentions: list[Tensor] = []

        def observe(call: AttentionCall) -> None:
            if call.layer in layers:
                attentions.append(call.of_last_rows(counted_rows).masses()[0, 0].sum(0))

        asked = QueryAttention(decoder, stored, layout, QueryScore(self.layers))
        ids = torch.from_numpy(layout.ids)[None].to(decoder.device)[:, asked.rows.positions]
        decoder.watch_attention(ids, asked.rows, stored, observe, last_layer=asked.last_layer)
        return torch.stack(attentions).sum(0)


@dataclass(frozen=True)
class Blocks(QueryGuided):
    """As query_guided, in runs of `block` neighbouring rows of a chunk, by their summed scores."""

    name: ClassVar[str] = "blocks"

    block: int = 16

    def allot(self, scores: Tensor, evidence: Evidence) -> Tensor:
        """The rows of the best blocks; of the last one its first rows."""
        starts = evidence.layout.chunk_starts(evidence.candidates)
        blocks = starts + (evidence.candidates - starts) // self.block * self.block
        _, which = torch.unique(blocks, return_inverse=True)
        sums = scores.new_zeros(int(which.max()) + 1).index_add_(0, which, scores)
        return super().allot(sums[which], evidence)


@dataclass(frozen=True)
class Floors(QueryGuided):
    """As query_guided, but every chunk first gets an equal part of `floor` of the budget."""

    name: ClassVar[str] = "floors"

    floor: float = 0.3

    def allot(self, scores: Tensor, evidence: Evidence) -> Tensor:
        """The best rows of every chunk first."""
        starts = evidence.layout.chunk_starts(evidence.candidates)
        chunk_starts = sorted(set(starts.tolist()))
        floor_rows = int(self.floor * evidence.budget / len(chunk_starts))
        raised = scores.clone()
        for start in chunk_starts:
            (inside,) = torch.where(starts == start)
            raised[inside[scores[inside].argsort(descending=True, stable=True)[:floor_rows]]] = float("inf")
        return super().allot(raised, evidence)


@dataclass(frozen=True)
class ZSum(Mixed):
    """As mixed, by the sum of the z-scores of both logarithms instead of the product."""

    name: ClassVar[str] = "zsum"

    def select(self, evidence: Evidence) -> Tensor:
        """The rows with the highest sum."""
        assert evidence.query_attention is not None
        parts = (seen_deviation(evidence, self.of), evidence.query_attention.sum(0))
        logarithms = [part.clamp_min(1e-20).log() for part in parts]
        z_scores = [(values - values.mean()) / values.std().clamp_min(1e-20) for values in logarithms]
        return self.allot(z_scores[0] + z_scores[1], evidence)


@dataclass(frozen=True)
class Prefilter(Mixed):
    """As mixed, where attention alone first narrows the rows to `budgets` budgets, so that fewer run below the check layer."""

    name: ClassVar[str] = "prefilter"

    budgets: float = 2.5

    def needs(self, layers: int) -> Needs:
        """The input, then the check layer."""
        return Needs(0, QueryScore(self.layers), factor=self.budgets, later=(Step(self.check_layer),))

    def select(self, evidence: Evidence) -> Tensor:
        """By attention alone at the input, by both at the check layer."""
        assert evidence.query_attention is not None
        if evidence.layer == 0:
            return self.allot(evidence.query_attention.sum(0), evidence)
        return super().select(evidence)


_WITHOUT_BLENDER = (Blocks, Floors, ZSum, Prefilter)
STUDIED: dict[str, Callable[..., Selector]] = {kind.name: kind for kind in (Oracle, Sums, *_WITHOUT_BLENDER)}


def studied_selector(spec: str, blender: Blender) -> Selector:
    """The selector of a spec, `NAME:key=value,...`: one of the study's, or a built-in one. Raises `ConfigError`."""
    name, _, text = spec.partition(":")
    if name not in STUDIED:
        return make_selector(spec)
    try:
        pairs = [pair.split("=", 1) for pair in text.split(",") if pair]
        arguments = {key: value if key in ("layers", "of") else literal_eval(value) for key, value in pairs}
        own = {} if STUDIED[name] in _WITHOUT_BLENDER else {"blender": blender}
        return STUDIED[name](**own, **arguments)
    except (ValueError, SyntaxError, TypeError) as error:
        raise ConfigError(f"{spec}: {error}; see scripts/study/selectors.py") from None
