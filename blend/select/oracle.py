"""For research: rows chosen in the knowledge of full recompute, to see how far a selector is from that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from blend.select.allotment import ScoringSelector
from blend.select.base import Evidence, Needs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Oracle(ScoringSelector):
    """For research: rows with the most true deviation times true attention, known from a full prefill.

    Deviation is taken in every layer, attention is what the question gives under full recompute. Costs a full prefill
    before it chooses, so it can never be faster than one.
    """

    name: ClassVar[str] = "oracle"

    def needs(self, layers: int) -> Needs:
        """Full recompute."""
        return Needs(truth=True)

    def select(self, evidence: Evidence) -> torch.Tensor:
        """The rows with the highest weight."""
        assert evidence.truth is not None
        return self.allot(evidence.truth, evidence)
