"""The contract of a selector: which cached context rows are worth recomputing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from blend.select.query_score import QueryScore
from blend.types import PromptLayout

KV = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """Go on with fewer rows from `layer` on: `factor` times the budget. Before the first step all rows run."""

    layer: int
    factor: float = 1.0


@dataclass(frozen=True)
class Needs:
    """What a selector must see before it can choose, so that loading and compute can be planned around it.

    steps: where it chooses, in order of layers. A step at layer 0 costs nothing before it; one at
    layer n > 0 lets the layers below run on all rows still there, and layer n's QKV projection. query: how the query rows, run
    once over the stored caches, score the context rows; None when they need not run. truth: full recompute, for research.
    """

    steps: tuple[Step, ...] = (Step(0),)
    query: QueryScore | None = None
    truth: bool = False


@dataclass(frozen=True)
class Evidence:
    """What a selector may look at, at one of its steps.

    layout: the prompt. candidates: sorted positions of the context rows that came out of the store and are still there, int64
    `[candidates]`. budget: how many of them to return. layer: the step's layer. fresh, stored: keys and values of that layer at
    the candidates, `[1, kv_heads, candidates, head_dim]`, computed in context and repositioned from the store; None at layer 0.
    query_attention: attention that the query rows give each candidate, as the needs say, fp32 `[layers, candidates]`.
    truth: true deviation weighted by true attention, see `recompute.true_weight`, fp32 `[candidates]`.
    """

    layout: PromptLayout
    candidates: torch.Tensor
    budget: int
    layer: int = 0
    fresh: KV | None = None
    stored: KV | None = None
    query_attention: torch.Tensor | None = None
    truth: torch.Tensor | None = None


class Selector(ABC):
    """Chooses rows."""

    name: str

    def needs(self, layers: int) -> Needs:
        """What it must see, for a decoder of so many layers. Raises `ConfigError` when that decoder is too shallow for it."""
        return Needs()

    @abstractmethod
    def select(self, evidence: Evidence) -> torch.Tensor:
        """At most `evidence.budget` of `evidence.candidates`, sorted."""


def top_candidates(scores: torch.Tensor, evidence: Evidence) -> torch.Tensor:
    """The `budget` candidates with the highest scores `[candidates]`, sorted by position; ties go to the earlier row."""
    order = torch.argsort(scores, descending=True, stable=True)[: evidence.budget]
    return evidence.candidates[order.sort().values]
