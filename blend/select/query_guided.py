"""Rows that the question looks at: context rows scored by the attention of the query rows over the stored caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from blend.select.allotment import ScoringSelector
from blend.select.base import Evidence, Needs
from blend.select.query_score import QueryRows, QueryScore

if TYPE_CHECKING:
    import torch

LEAD = 6  # rows of every chunk, measured in docs/study.md


@dataclass(frozen=True)
class QueryGuided(ScoringSelector):
    """Rows with the most attention from the question over the stored caches, summed over a band of layers.

    Known before any layer is recomputed. layers, rows, value_norm: see `QueryScore`.
    """

    name: ClassVar[str] = "query_guided"

    layers: str = "middle"
    rows: QueryRows = "peak"
    value_norm: bool = False

    @property
    def own_lead(self) -> int:
        """Some rows, unless they are taken in blocks."""
        return LEAD if self.block == 1 else 0

    def needs(self, layers: int) -> Needs:
        """The query's attention at the band's layers."""
        return Needs(query=QueryScore(self.layers, self.rows, self.value_norm))

    def select(self, evidence: Evidence) -> torch.Tensor:
        """The rows that the query attends to most."""
        assert evidence.query_attention is not None
        return self.allot(evidence.query_attention.sum(0), evidence)
