"""Controls: every row, no row, random rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from blend.limits import check_fields
from blend.select.base import Evidence, Selector

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class All(Selector):
    """Every row, whatever the budget: full recompute after the prefix."""

    name: ClassVar[str] = "all"

    def select(self, evidence: Evidence) -> torch.Tensor:
        """All candidates."""
        return evidence.candidates


@dataclass(frozen=True)
class Nothing(Selector):
    """No row, whatever the budget: plain reuse."""

    name: ClassVar[str] = "none"

    def select(self, evidence: Evidence) -> torch.Tensor:
        """No candidate."""
        return evidence.candidates[:0]


@dataclass(frozen=True)
class Random(Selector):
    """Uniformly random rows; the same ones for the same seed and prompt length."""

    name: ClassVar[str] = "random"

    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)

    def select(self, evidence: Evidence) -> torch.Tensor:
        """`budget` random candidates."""
        import torch

        generator = torch.Generator().manual_seed(int(self.seed))
        order = torch.randperm(evidence.candidates.shape[0], generator=generator)[: evidence.budget]
        return evidence.candidates[order.sort().values.to(evidence.candidates.device)]
