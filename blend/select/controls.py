"""Controls: every row, no row, random rows."""

from __future__ import annotations

import torch

from blend.select.base import Evidence, Selector


class All(Selector):
    """Every row, whatever the budget: full recompute after the prefix."""

    name = "all"

    def select(self, evidence: Evidence) -> torch.Tensor:
        """All candidates."""
        return evidence.candidates


class Nothing(Selector):
    """No row, whatever the budget: plain reuse."""

    name = "none"

    def select(self, evidence: Evidence) -> torch.Tensor:
        """No candidate."""
        return evidence.candidates[:0]


class Random(Selector):
    """Uniformly random rows; the same ones for the same seed and prompt length."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def select(self, evidence: Evidence) -> torch.Tensor:
        """`budget` random candidates."""
        generator = torch.Generator().manual_seed(self._seed)
        order = torch.randperm(evidence.candidates.shape[0], generator=generator)[: evidence.budget]
        return evidence.candidates[order.sort().values.to(evidence.candidates.device)]
