"""The contract of a selector: which cached context rows are worth recomputing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from blend.types import PromptLayout

KV = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Evidence:
    """What a selector may look at.

    layout: the prompt. candidates: sorted positions of the context rows that came out of the store, int64 `[candidates]`.
    budget: how many of them to return. fresh, stored: keys and values of the check layer at the candidates,
    `[1, kv_heads, candidates, head_dim]`, computed in context and repositioned from the store; None unless asked for.
    """

    layout: PromptLayout
    candidates: torch.Tensor
    budget: int
    fresh: KV | None = None
    stored: KV | None = None


class Selector(ABC):
    """Chooses rows. `check_layer` is what it needs first: layers below run on all rows, and the check layer's QKV projection.

    0 means that it needs nothing: the rows are known before any layer runs.
    """

    name: str
    check_layer: int = 0

    @abstractmethod
    def select(self, evidence: Evidence) -> torch.Tensor:
        """At most `evidence.budget` of `evidence.candidates`, sorted."""


def top_candidates(scores: torch.Tensor, evidence: Evidence) -> torch.Tensor:
    """The `budget` candidates with the highest scores `[candidates]`, sorted by position; ties go to the earlier row."""
    order = torch.argsort(scores, descending=True, stable=True)[: evidence.budget]
    return evidence.candidates[order.sort().values]
